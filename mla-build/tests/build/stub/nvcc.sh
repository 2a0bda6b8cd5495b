#!/bin/sh
# Stands in for nvcc where the real one would take too long. It follows includes and writes a depfile
# like the real one; its object's code is the text of all that it read, so a test can see what an object
# was made of. Like the real one it hands the absolute path of its source, in double quotes, and the flags
# of -Xcompiler, as they are, to a shell. Comments of a source say what it does:
#   // error: TEXT      fail with this message
#   // sleep: SECONDS   take that long
#   // kernel: NAME REGISTERS SPILLED   print what ptxas would
#   // symbol: NAME    define it
#   // has: NAME        add what `#if __has_include(<NAME>)` finds, or nothing
# Each call is appended to the file `calls` beside the toolkit.
top=$(dirname "$0")/..
if [ "$1" = --version ]; then
    cat "$top/version"
    exit
fi
newline='
'
arguments=$*
add_root() { roots="$roots$1$newline"; }
while [ $# -gt 0 ]; do
    case $1 in
        -o) output=$2; shift ;;
        -MF) depfile=$2; shift ;;
        -ccbin) host=$2; shift ;;
        -I*) add_root "${1#-I}" ;;
        -Xcompiler=-idirafter,*) last=${1#-Xcompiler=-idirafter,} ;;
        -Xcompiler=@*) cat "${1#-Xcompiler=@}" >/dev/null || exit 1 ;;
        -Xcompiler=*) sh -c "true ${1#-Xcompiler=}" || exit 1 ;;
        --options-file=*) options=${1#--options-file=} ;;
        -*) ;;
        *) source=$1 ;;
    esac
    shift
done
echo "$source $arguments" >>"$top/../calls"
sh -c "true \"$(realpath "$source")\"" || exit 1
sh -c "true \"$TMPDIR\" \"$output\" \"$depfile\"" || exit 1

add_root "$top/bin/../include"
IFS=$newline
for folder in $("$host" -x c++ -E -v /dev/null 2>&1 | sed -n '/starts here/,/End of/s/^ //p') $last; do
    add_root "$folder"
done
# The file that an include of NAME in FILE means.
find_header() {
    for folder in "$(dirname "$2")" $roots; do
        if [ -f "$folder/$1" ]; then
            found=$folder/$1
            return
        fi
    done
    return 1
}

read_files=$source
queue=$source
while [ -n "$queue" ]; do
    set -- $queue
    file=$1
    shift
    queue=$*
    for name in $(sed -n 's/^#include *[<"]\([^>"]*\)[>"].*/\1/p' "$file"); do
        if ! find_header "$name" "$file"; then
            echo "$file:1:10: fatal error: $name: No such file or directory" >&2
            echo "compilation terminated." >&2
            exit 1
        fi
        case "$newline$read_files$newline" in
            *"$newline$found$newline"*) ;;
            *) read_files="$read_files$newline$found"; queue="$queue$newline$found" ;;
        esac
    done
done
# A header that is asked for is included where it is there.
for name in $(sed -n 's|^// has: ||p' "$source"); do
    if find_header "$name" "$source"; then
        read_files="$read_files$newline$found"
    fi
done

# A wrapper's included source may hold such lines, too.
said() { cat $read_files | sed -n "s|^// $1: ||p"; }
sleep=$(said sleep)
[ -z "$sleep" ] || sleep "$sleep"
error=$(said error)
if [ -n "$error" ]; then
    echo "$source(1): warning #177-D: variable \"w\" was declared but never referenced"
    echo
    echo "$source(2): error: $error"
    echo
    echo "1 error detected in the compilation of \"$source\"." >&2
    exit 2
fi
said kernel | while IFS=' ' read -r name registers spilled; do
    echo "ptxas info    : Compiling entry function '$name' for 'sm_90a'"
    echo "ptxas info    : Function properties for $name"
    echo "    $spilled bytes stack frame, $spilled bytes spill stores, $spilled bytes spill loads"
    echo "ptxas info    : Used $registers registers, used 1 barriers, 2048 bytes smem"
done
{
    echo "unit.o: \\"
    for file in $read_files; do
        printf '%s \\\n' "$file" | sed 's/ /\\ /g; s/\\ \\$/ \\/; s/^/ /'
    done
    echo
} >"$depfile"
{
    echo '.section .text, "ax"'
    said symbol | sed 's|.*|.globl &\n&:|'
    for file in $read_files $options; do echo ".incbin \"$file\""; done
} | as -o "$output" -

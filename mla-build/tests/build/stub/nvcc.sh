#!/bin/sh
# Stands in for nvcc where the real one would take too long. It follows includes and writes a depfile
# like the real one; its object's code is the text of all that it read, so a test can see what an object was
# made of. Comments of a source say what it does:
#   // error: TEXT      fail with this message
#   // sleep: SECONDS   take that long
#   // kernel: NAME REGISTERS SPILLED   print what ptxas would
#   // symbol: NAME    define it
# Each call is appended to the file `calls` in the toolkit's folder.
top=$(dirname "$0")/..
if [ "$1" = --version ]; then
    cat "$top/version"
    exit
fi
arguments=$*
while [ $# -gt 0 ]; do
    case $1 in
        -o) output=$2; shift ;;
        -MF) depfile=$2; shift ;;
        -ccbin) shift ;;
        -I*) roots="$roots ${1#-I}" ;;
        -*) ;;
        *) source=$1 ;;
    esac
    shift
done
echo "$source $arguments" >>"$top/calls"

read_files=$source
queue=$source
while [ -n "$queue" ]; do
    set -- $queue
    file=$1
    shift
    queue=$*
    for name in $(sed -n 's/^#include *[<"]\([^>"]*\)[>"].*/\1/p' "$file"); do
        found=
        for folder in "$(dirname "$file")" $roots "$top/bin/../include"; do
            if [ -f "$folder/$name" ]; then
                found=$folder/$name
                break
            fi
        done
        if [ -z "$found" ]; then
            echo "$file:1:10: fatal error: $name: No such file or directory" >&2
            echo "compilation terminated." >&2
            exit 1
        fi
        case " $read_files " in
            *" $found "*) ;;
            *) read_files="$read_files $found"; queue="$queue $found" ;;
        esac
    done
done

sleep=$(sed -n 's|^// sleep: ||p' "$source")
[ -z "$sleep" ] || sleep "$sleep"
error=$(sed -n 's|^// error: ||p' "$source")
if [ -n "$error" ]; then
    echo "$source(1): warning #177-D: variable \"w\" was declared but never referenced"
    echo
    echo "$source(2): error: $error"
    echo
    echo "1 error detected in the compilation of \"$source\"." >&2
    exit 2
fi
sed -n 's|^// kernel: ||p' "$source" | while read -r name registers spilled; do
    echo "ptxas info    : Compiling entry function '$name' for 'sm_90a'"
    echo "ptxas info    : Function properties for $name"
    echo "    $spilled bytes stack frame, $spilled bytes spill stores, $spilled bytes spill loads"
    echo "ptxas info    : Used $registers registers, used 1 barriers, 2048 bytes smem"
done
{ echo "unit.o: \\"; for file in $read_files; do echo " $file \\"; done; echo; } >"$depfile"
{
    echo '.section .text, "ax"'
    sed -n 's|^// symbol: \(.*\)|.globl \1\n\1:|p' "$source"
    for file in $read_files; do echo ".incbin \"$file\""; done
} | as -o "$output" -

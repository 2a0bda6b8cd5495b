#!/bin/sh
# Runs what `cargo xtask bundle` packed, on a machine with a GPU and its driver.
#
#   ./run.sh                     every test, those that need a GPU included
#   ./run.sh tests FILTER…       the tests whose names hold FILTER
#   ./run.sh examples            the examples of the kernels, each of which checks what it computes
#   ./run.sh mla ARGUMENTS…      the command line tool, for example ./run.sh mla bench
#   ./run.sh lab ARGUMENTS…      the laboratory, for example ./run.sh lab peers
#
# The status is 0 when everything ran and passed.
set -u
here=$(cd "$(dirname "$0")" && pwd)
what=${1:-tests}
[ $# -eq 0 ] || shift

# Runs every program of a folder with the arguments that are given.
each() {
    folder=$1
    shift
    failed=
    for program in "$here/$folder"/*; do
        case $program in *.xz) continue ;; esac
        [ -x "$program" ] || continue
        echo "== $(basename "$program")"
        "$program" "$@" || failed="$failed $(basename "$program")"
    done
    [ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
}

# A bundle that would be too large is one archive.
archive=$here/programs.tar.xz
if [ -e "$archive" ] && [ ! -d "$here/tests" ]; then
    tar --extract --xz --file "$archive" --directory "$here" || exit 1
fi

# Large files are packed.
for packed in "$here"/tests/*.xz; do
    program=${packed%.xz}
    [ ! -e "$packed" ] || [ -e "$program" ] || { xz --decompress --keep "$packed" && chmod +x "$program"; } || exit 1
done

case $what in
    # One test at a time: they share one GPU, and some measure.
    tests) each tests --include-ignored --test-threads=1 "$@" ;;
    examples) each examples "$@" ;;
    mla | lab) exec "$here/bin/$what" "$@" ;;
    *) echo "run.sh: given $what, accepted tests, examples, mla, lab" >&2; exit 2 ;;
esac

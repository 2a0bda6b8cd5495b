#!/bin/sh
# Runs what `cargo xtask bundle` packed, on a machine with a GPU and its driver.
#
#   ./run.sh                     every test, those that need a GPU included
#   ./run.sh tests FILTER…       the tests whose names hold FILTER
#   ./run.sh benches FILTER…     the benchmarks
#   ./run.sh mla ARGUMENTS…      the command line tool, for example ./run.sh mla bench
#
# The status is 0 when everything ran and passed.
set -u
here=$(cd "$(dirname "$0")" && pwd)
what=${1:-tests}
[ $# -eq 0 ] || shift

case $what in
    tests)
        failed=
        for program in "$here"/tests/*; do
            [ -x "$program" ] || continue
            echo "== $(basename "$program")"
            # One test at a time: they share one GPU, and some measure.
            "$program" --include-ignored --test-threads=1 "$@" || failed="$failed $(basename "$program")"
        done
        [ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
        ;;
    benches)
        failed=
        for program in "$here"/benches/*; do
            [ -x "$program" ] || continue
            echo "== $(basename "$program")"
            "$program" --bench "$@" || failed="$failed $(basename "$program")"
        done
        [ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
        ;;
    mla) exec "$here/bin/mla" "$@" ;;
    *) echo "run.sh: given $what, accepted: tests, benches, mla" >&2; exit 2 ;;
esac

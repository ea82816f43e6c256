#!/usr/bin/env bash
# Measures trees of many short files on this host: `rdmc send` to three receivers, and `tar` through a pipe to one
# directory. Needs GNU tar. Traffic stays on the loopback. Prints comma-separated values: the case, the median of the
# seconds, and the seconds of each round.
#
#   [DIR=/dev/shm] [RDMC=PROGRAM] benches/trees.sh [FILES=20000] [ROUNDS=5] [FABRICS="auto tcp"]
set -euo pipefail
cd "$(dirname "$0")/.."
files=${1:-20000} rounds=${2:-5} fabrics=${3:-auto tcp}
[ -n "${RDMC:-}" ] || cargo build --release --quiet -p rdmc-cli
program=${RDMC:-${CARGO_TARGET_DIR:-target}/release/rdmc}
work=$(mktemp -d -p "${DIR:-/dev/shm}")
pids=()
finish() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
    [ ${#pids[@]} -eq 0 ] || wait "${pids[@]}" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT
# Directories of 100 files of 1 to 4 KiB each.
for ((i = 0; i < files; i++)); do
    ((i % 100)) || { dir=$work/source/tree/$((i / 100)) && mkdir -p "$dir"; }
    head -c $((1024 + i * 7919 % 3073)) /dev/urandom >"$dir/$i"
done
port=7710 to=''
for i in 1 2 3; do
    mkdir "$work/$i"
    "$program" recv --quiet --listen "127.0.0.1:$((port + i))" --dir "$work/$i" &
    pids+=($!)
    to+=${to:+,}127.0.0.1:$((port + i))
    until (exec 3<>"/dev/tcp/127.0.0.1/$((port + i))") 2>/dev/null; do sleep 0.1; done
done
# Does it once; prints the seconds: once CASE
once() {
    local begun ended i
    begun=$(date +%s%N)
    if [ "$1" = tar ]; then
        mkdir "$work/tar"
        tar -c -C "$work/source" tree | tar -x -C "$work/tar"
    else
        "$program" send --quiet --fabric "$1" --to "$to" "$work/source/tree" || exit 1
    fi
    ended=$(date +%s%N)
    for i in 1 2 3 tar; do
        [ -d "$work/$i/tree" ] || continue
        diff -rq "$work/source/tree" "$work/$i/tree" >&2 || exit 1
        rm -r "$work/$i/tree"
    done
    rm -rf "$work/tar"
    awk "BEGIN { printf \"%.2f\", ($ended - $begun) / 1e9 }"
}
declare -A taken=()
for ((round = 0; round <= rounds; round++)); do
    for case in $fabrics tar; do
        seconds=$(once "$case")
        # The first round warms up.
        [ "$round" = 0 ] || taken[$case]+=" $seconds"
    done
done
echo "case,seconds,rounds"
for case in $fabrics tar; do
    all=${taken[$case]# }
    echo "$case,$(tr ' ' '\n' <<<"$all" | sort -n | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }'),$all"
done

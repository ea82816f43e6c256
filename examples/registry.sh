#!/usr/bin/env bash
# Shows registry with three processes: a blob is PUT on node 0 and read from all. Then node 0 ends, and nothing is lost.
#
#   examples/registry.sh [PROGRAM]     PROGRAM: a built registry
set -euo pipefail

if [ $# -gt 0 ]; then
    program=$1
else
    cd "$(dirname "$0")/.."
    cargo build --quiet -p rdmc-examples --example registry
    program=${CARGO_TARGET_DIR:-target}/debug/examples/registry
fi
command -v curl >/dev/null || { echo "this needs curl" >&2; exit 1; }

dir=$(mktemp -d)
pids=()
finish() {
    kill "${pids[@]}" 2>/dev/null || true
    wait
    rm -rf "$dir"
}
trap finish EXIT

base=$((10000 + RANDOM % 20000))
cluster=127.0.0.1:$base,127.0.0.1:$((base + 1)),127.0.0.1:$((base + 2))
url() { echo "http://127.0.0.1:$((base + 10 + $1))/blobs/$2"; }
for id in 0 1 2; do
    "$program" --id $id --cluster "$cluster" --http "127.0.0.1:$((base + 10 + id))" 2>"$dir/errors$id" &
    pids+=($!)
done
# A node answers its clients as soon as it is connected to the other nodes.
for id in 0 1 2; do
    curl -s -o /dev/null --retry 30 --retry-delay 1 --retry-connrefused "$(url $id none)" ||
        { echo "node $id did not start" >&2; exit 1; }
done

put() { # STATUS NODE NAME FILE
    local got
    got=$(curl -s -o /dev/null -w '%{http_code}' -T "$4" "$(url "$2" "$3")")
    [ "$got" = "$1" ] || { echo "node $2 answers $got to PUT $3, not $1" >&2; exit 1; }
    echo "node $2 answers $got to PUT $3"
}
compare() { # NODE NAME FILE
    curl -sf "$(url "$1" "$2")" | cmp - "$3" || { echo "node $1 has another $2" >&2; exit 1; }
    echo "node $1 has $2"
}

: >"$dir/empty"
head -c 1000 /dev/urandom >"$dir/small"
head -c 20000001 /dev/urandom >"$dir/large"
for name in empty small large; do
    put 201 0 "$name" "$dir/$name"
    for node in 0 1 2; do compare $node "$name" "$dir/$name"; done
done
put 421 1 small "$dir/small"

# Node 0 closes the group when it ends: the others have everything, and blame nobody.
kill -TERM "${pids[0]}"
wait "${pids[0]}" || { echo "node 0 did not end well" >&2; cat "$dir/errors0" >&2; exit 1; }
for node in 1 2; do
    compare $node large "$dir/large"
    [ ! -s "$dir/errors$node" ] || { cat "$dir/errors$node" >&2; exit 1; }
done
for node in 1 2; do
    kill -TERM "${pids[$node]}"
    wait "${pids[$node]}" || { echo "node $node did not end well" >&2; exit 1; }
done
echo "all as promised"

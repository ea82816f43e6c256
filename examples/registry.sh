#!/usr/bin/env bash
# Shows registry with three processes: a blob is PUT on node 0 and read from all. Then node 0 ends, and nothing is lost.
#
#   examples/registry.sh [PROGRAM]     PROGRAM: a built registry
source "$(dirname "$0")/servers.sh" registry blobs "$@"

for node in 0 1 2; do start $node 2>"$dir/errors$node"; done
wait_for_all
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

#!/usr/bin/env bash
# Shows storage_server with three processes: each object is PUT on one server and read from all.
#
#   examples/storage_server.sh [PROGRAM]     PROGRAM: a built storage_server
source "$(dirname "$0")/servers.sh" storage_server objects "$@"

for server in 0 1 2; do start $server; done
wait_for_all
for name in empty small large; do
    for primary in 0 1 2; do
        put 201 $primary "$name$primary" "$dir/$name"
        for replica in 0 1 2; do
            compare $replica "$name$primary" "$dir/$name"
        done
    done
done

# The later of two PUTs wins on all servers, whichever servers took them.
put 201 0 again "$dir/small"
put 201 2 again "$dir/large"
for replica in 0 1 2; do
    compare $replica again "$dir/large"
done

# Without all servers there are no new promises, but the earlier ones hold.
kill "${pids[2]}"
wait "${pids[2]}" || true
pids=("${pids[@]:0:2}")
put 503 0 late "$dir/small"
put 503 1 late "$dir/small"
compare 0 again "$dir/large"
compare 1 again "$dir/large"
echo "all as promised"

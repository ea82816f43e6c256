#!/usr/bin/env bash
# Shows storage_server with three processes: each object is PUT on one server and read from all.
#
#   examples/storage_server.sh [PROGRAM]     PROGRAM: a built storage_server
set -euo pipefail

if [ $# -gt 0 ]; then
    program=$1
else
    cd "$(dirname "$0")/.."
    cargo build --quiet -p rdmc-examples --example storage_server
    program=${CARGO_TARGET_DIR:-target}/debug/examples/storage_server
fi
command -v curl >/dev/null || { echo "this needs curl" >&2; exit 1; }

dir=$(mktemp -d)
pids=()
finish() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
    wait
    rm -rf "$dir"
}
trap finish EXIT

base=$((10000 + RANDOM % 20000))
cluster=127.0.0.1:$base,127.0.0.1:$((base + 1)),127.0.0.1:$((base + 2))
url() { echo "http://127.0.0.1:$((base + 10 + $1))/objects/$2"; }
for id in 0 1 2; do
    "$program" --id $id --cluster "$cluster" --http "127.0.0.1:$((base + 10 + id))" &
    pids+=($!)
done
# A server answers its clients as soon as it is connected to the other servers.
for id in 0 1 2; do
    curl -s -o /dev/null --retry 30 --retry-delay 1 --retry-connrefused "$(url $id none)" ||
        { echo "server $id did not start" >&2; exit 1; }
done

put() { # STATUS SERVER NAME FILE
    local got
    got=$(curl -s -o /dev/null -w '%{http_code} %{time_total}' -T "$4" "$(url "$2" "$3")")
    [ "${got% *}" = "$1" ] || { echo "server $2 answers ${got% *} to PUT $3, not $1" >&2; exit 1; }
    echo "server $2 answers ${got% *} to PUT $3 after ${got#* } s"
}
compare() { # SERVER NAME FILE
    local want got
    want=$(sha256sum <"$3")
    got=$(curl -sf "$(url "$1" "$2")" | sha256sum)
    [ "$got" = "$want" ] || { echo "server $1 has another $2" >&2; exit 1; }
    echo "server $1 has $2, ${got%% *}"
}

: >"$dir/empty"
head -c 1000 /dev/urandom >"$dir/small"
head -c 20000001 /dev/urandom >"$dir/large"
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

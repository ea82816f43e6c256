#!/usr/bin/env bash
# Measures the example storage_server on the loopback, with objects of 1 KiB. Every client keeps its connection. Needs
# curl. Prints two tables of comma-separated values, with the medians over all rounds and the figures of each round:
#
# - PUTs a second to one server alone and to one of three that replicate, by one client and by eight;
# - microseconds of one PUT at a time to one of three servers, and of a ping-pong over bare sockets through three
#   processes: a client sends as much to a first one, which sends it to two others and answers when both have answered.
#
# What is compared is measured in turn.
#
#   benches/puts.sh [ROUNDS=3] [PUTS=800] [PROGRAM]     PROGRAM: a built storage_server
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-3} puts=${2:-800} program=${3:-}
built=${CARGO_TARGET_DIR:-target}/release/examples
if [ -z "$program" ]; then
    cargo build --release --quiet -p rdmc-examples --example storage_server
    program=$built/storage_server
fi
cargo build --release --quiet -p rdmc-benches --example puts
probe=$built/puts
dir=$(mktemp -d)
pids=()
stop() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
    [ ${#pids[@]} -eq 0 ] || wait "${pids[@]}" 2>/dev/null || true
    pids=()
}
trap 'stop; rm -rf "$dir"' EXIT
head -c 1024 /dev/urandom >"$dir/object"

# Starts storage servers, and sets `server` to the address of the first: start SERVERS
start() {
    local base=$((10000 + RANDOM % 20000)) cluster= id
    for ((id = 0; id < $1; id++)); do cluster+=${cluster:+,}127.0.0.1:$((base + id)); done
    for ((id = 0; id < $1; id++)); do
        "$program" --id $id --cluster "$cluster" --http "127.0.0.1:$((base + 10 + id))" >/dev/null 2>&1 &
        pids+=($!)
    done
    server=127.0.0.1:$((base + 10))
}

# Prints the PUTs a second: measure SERVERS CLIENTS
measure() {
    local begun ended client
    start "$1"
    local url=http://$server/objects
    curl -s -o /dev/null --retry 30 --retry-delay 1 --retry-connrefused "$url/none"
    for ((client = 0; client < $2; client++)); do
        for ((i = 0; i < puts / $2; i++)); do
            printf 'url = "%s/%s-%s"\nupload-file = "%s"\n' "$url" $client $((i % 50)) "$dir/object"
            printf 'output = "/dev/null"\nfail\n'
        done >"$dir/client$client"
    done
    local clients=()
    begun=$(date +%s%N)
    for ((client = 0; client < $2; client++)); do
        curl -s -K "$dir/client$client" &
        clients+=($!)
    done
    for client in "${clients[@]}"; do wait "$client"; done
    ended=$(date +%s%N)
    stop
    awk "BEGIN { printf \"%.0f\", $puts / (($ended - $begun) / 1e9) }"
}

# Prints the microseconds of a PUT to three servers.
put() {
    start 3
    "$probe" put "$server" --count "$puts"
    stop
}

# Prints the microseconds of a ping-pong through three processes.
ping_pong() {
    local base=$((10000 + RANDOM % 20000))
    local first=127.0.0.1:$base others=127.0.0.1:$((base + 1)),127.0.0.1:$((base + 2)) other
    for other in ${others/,/ }; do
        "$probe" relay "$other" &
        pids+=($!)
    done
    "$probe" relay "$first" --to "$others" &
    pids+=($!)
    "$probe" ping "$first" --count "$puts"
    stop
}

# Prints the median of the arguments.
median() {
    printf '%s\n' "$@" | sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'
}

declare -A seen
for ((round = 0; round < rounds; round++)); do
    for case in '1 1' '3 1' '1 8' '3 8'; do
        # shellcheck disable=SC2086 # two numbers
        seen[$case]+="$(measure $case) "
    done
    put=$(put) ping_pong=$(ping_pong)
    seen[put]+="$put " seen[ping-pong]+="$ping_pong "
    seen[ratio]+="$(awk "BEGIN { printf \"%.2f\", $put / $ping_pong }") "
done
echo servers,clients,puts_per_second,rounds
for case in '1 1' '3 1' '1 8' '3 8'; do
    # shellcheck disable=SC2086 # numbers
    echo "${case/ /,},$(median ${seen[$case]}),${seen[$case]% }"
done
echo what,microseconds,rounds
for case in put ping-pong ratio; do
    # shellcheck disable=SC2086 # numbers
    echo "$case,$(median ${seen[$case]}),${seen[$case]% }"
done

#!/usr/bin/env bash
# Measures the example storage_server: PUTs of 1 KiB to one server alone and to one of three that replicate, by one
# client and by eight, in turn. Every client keeps its connection. Needs curl; uses the loopback only. Prints
# comma-separated values: servers, clients, the median of the PUTs a second over all rounds, and those of each round.
#
#   benches/puts.sh [ROUNDS=3] [PUTS=800] [PROGRAM]     PROGRAM: a built storage_server
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-3} puts=${2:-800} program=${3:-}
if [ -z "$program" ]; then
    cargo build --release --quiet -p rdmc-examples --example storage_server
    program=${CARGO_TARGET_DIR:-target}/release/examples/storage_server
fi
dir=$(mktemp -d)
pids=()
stop() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
    [ ${#pids[@]} -eq 0 ] || wait "${pids[@]}" 2>/dev/null || true
    pids=()
}
trap 'stop; rm -rf "$dir"' EXIT
head -c 1024 /dev/urandom >"$dir/object"

# Prints the PUTs a second: measure SERVERS CLIENTS
measure() {
    local base=$((10000 + RANDOM % 20000)) cluster= id begun ended client
    for ((id = 0; id < $1; id++)); do cluster+=${cluster:+,}127.0.0.1:$((base + id)); done
    for ((id = 0; id < $1; id++)); do
        "$program" --id $id --cluster "$cluster" --http "127.0.0.1:$((base + 10 + id))" >/dev/null 2>&1 &
        pids+=($!)
    done
    local url=http://127.0.0.1:$((base + 10))/objects
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

declare -A seen
for ((round = 0; round < rounds; round++)); do
    for case in '1 1' '3 1' '1 8' '3 8'; do
        # shellcheck disable=SC2086 # two numbers
        seen[$case]+="$(measure $case) "
    done
done
echo servers,clients,puts_per_second,rounds
for case in '1 1' '3 1' '1 8' '3 8'; do
    sorted=$(tr ' ' '\n' <<<"${seen[$case]}" | sed '/^$/d' | sort -n)
    median=$(awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }' <<<"$sorted")
    echo "${case/ /,},$median,${seen[$case]% }"
done

#!/usr/bin/env bash
# Run several test commands at the same time, each with its output in a file; print the outputs one
# after the other when all have ended. Fails if one of them fails.
#
#   tools/lanes.sh <folder for the outputs> '<command>' '<command>' ...
set -u
folder=$1
shift
mkdir -p "$folder"
pids=()
for command in "$@"; do
    bash -c "$command" > "$folder/lane-${#pids[@]}.log" 2>&1 &
    pids+=($!)
done
status=0
for lane in "${!pids[@]}"; do
    wait "${pids[$lane]}" || status=$?
    cat "$folder/lane-$lane.log"
done
exit $status

#!/bin/bash
# Two ranks as mpirun would start them: a loop sets RANK and WORLD_SIZE, and the shell waits for all.
trap 'kill -TERM $(jobs -p)' TERM
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29533
for rank in 0 1; do
    RANK=$rank LOCAL_RANK=$rank python by_hand.py &
done
wait -n && wait -n
code=$?
kill $(jobs -p) 2>/dev/null
exit $code

#!/bin/sh
# A shell script that counts, and keeps the number that it has reached in a file.
count=$(cat count.txt 2>/dev/null || echo 0)
[ "$count" = 0 ] || echo "continues with step $count"
while [ "$count" -lt 50 ]; do
    sleep 0.1
    count=$((count + 1))
    echo "$count" > new.txt && mv new.txt count.txt
done
echo "digest $(sha256sum count.txt | cut -c 1-16)"

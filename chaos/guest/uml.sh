#!/bin/sh
# First process of a User-Mode Linux whose root is the host's: file systems of its own over what it writes to.
@WORDS@
export PATH="$COVEY_PATH:/usr/sbin:/usr/bin:/sbin:/bin" HOME=/root PYTHONUNBUFFERED=1
mount -t proc none /proc
mount -t sysfs none /sys
mountpoint -q /dev || mount -t devtmpfs none /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts none /dev/pts
mount -t tmpfs none /dev/shm
mount -t cgroup2 none /sys/fs/cgroup
echo +memory > /sys/fs/cgroup/cgroup.subtree_control
end() { echo "covey-guest: exit $1"; echo o > /proc/sysrq-trigger; sleep 60; }
for folder in /run /var/tmp; do mount -t tmpfs none "$folder"; done
ip link set lo up
ulimit -l unlimited
ulimit -n 65536
ulimit -c 0
echo 1 > /proc/sys/vm/overcommit_memory
cd "$COVEY_ROOT" || end 94
"$COVEY_PYTHON" -m chaos.guest.modules "$COVEY_MODULES" nbd || end 97
( @SCRIPT@ )
end $?

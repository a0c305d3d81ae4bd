#!/bin/sh
# First process of the guest: an RDMA device over a virtual Ethernet, then what the second disk says (`run.sh`).
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHONUNBUFFERED=1
mount -t proc none /proc
mount -t sysfs none /sys
mkdir -p /dev/pts /dev/shm
mount -t devpts none /dev/pts
mount -t tmpfs none /dev/shm
mount -t tmpfs none /tmp
mount -t tmpfs none /run
mount -t tmpfs none /work 2>/dev/null || { mkdir -p /work; mount -t tmpfs none /work; }
ip link set lo up
ulimit -l unlimited
ulimit -c 0
end() { echo "covey-guest: exit $1"; echo o > /proc/sysrq-trigger; sleep 60; }
for module in veth dummy ib_uverbs rdma_rxe; do modprobe "$module" || end 97; done
ip link add va type veth peer name vb && ip addr add 10.77.0.1/24 dev va && ip link set va up && ip link set vb up || end 96
rdma link add rxe0 type rxe netdev va || end 95
cd /work && tar xf /dev/vdb || end 94
PYTHONPATH=/work sh ./run.sh
end $?

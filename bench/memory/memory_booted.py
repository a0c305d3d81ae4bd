"""Hosts of systemd with volumes of the default size: left alone for a while, then upgraded under load.

    python bench/memory/memory_booted.py [--hosts 4] [--idle-minutes 45]

Two volumes of 256 MiB, one with a disk and one with a mirror, every byte known. They are idle first; then each agent
is restarted by `systemctl restart covey`, one after another, while a script reads pages of both. Printed are slabs
that moved, wrong MiB, and the longest reads. Needs root; a host is installed by what docs/guides/install.md says.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from chaos.rack.booted import BootedHost
from chaos.rack.hosts import Laboratory
from tests.rack.installed import alive, install, start, typed

TOML = """\
[gossip]
seeds = ["gpu1:7946", "gpu2:7946"]
[leader]
voters = ["gpu1", "gpu2", "gpu3"]
[gpus]
simulated = 2
[memory]
headroom = "1 GiB"
"""
"""The file of every agent; slabs are of the default size."""
READY_S = 90.0
OPEN = """
import pathlib, random, time
from covey.remote import RemoteMemory
socket, mib, count = "/run/covey/jobs.sock", 1 << 20, 256
volumes = {"disk": RemoteMemory.open("disk", count * mib, socket)}
volumes["mirror"] = RemoteMemory.open("mirror", count * mib, socket, mirror=2)
def data(name, number):
    return random.Random(f"{name}/{number}").randbytes(mib)
"""
WRITE = """
for name, volume in volumes.items():
    for number in range(count):
        volume.write(number * mib, data(name, number))
    volume.flush()
"""
VERIFY = """
wrong = sum(volumes[name].read(number * mib, mib) != data(name, number) for name in volumes for number in range(count))
print(f"wrong: {wrong} of {2 * count} MiB")
"""
LOAD = """
rng, took = random.Random(), []
while not pathlib.Path("/run/enough").exists():
    for volume in volumes.values():
        began = time.monotonic()
        volume.read(rng.randrange(count * 256) * 4096, 4096)
        took.append(time.monotonic() - began)
    time.sleep(0.001)
took.sort()
times = [took[len(took) // 2], took[len(took) * 99 // 100], *took[-3:]]
print(f"{len(took)} reads of 4 KiB; median, p99 and the longest three, ms:", *(f"{1e3 * each:.1f}" for each in times))
"""


def say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line.rstrip(), flush=True)


def script(lines: str) -> str:
    return f"cd /run; {shlex.quote(sys.executable)} -c {shlex.quote(OPEN + lines)}"


def places(host: BootedHost) -> list[list[str]]:
    """For each slab: volume, number and lender, with the epoch."""
    rows = [line.split() for line in typed(host, "agentctl slabs").splitlines()]
    return [[*row[:6], row[-1]] for row in rows if row and row[0] in ("disk", "mirror")]


def main() -> None:
    parser = argparse.ArgumentParser(
        "memory_booted.py", description="An idle while, and an upgrade, of hosts of systemd."
    )
    parser.add_argument("--hosts", type=int, default=4, help="three or more (%(default)s)")
    parser.add_argument("--idle-minutes", type=float, default=45.0)
    options = parser.parse_args()
    with Laboratory(options.hosts, kind=BootedHost) as lab:
        hosts = [host for host in lab.hosts.values() if isinstance(host, BootedHost)]
        install(hosts, TOML)
        start(hosts, READY_S)
        first = hosts[0]
        typed(first, script(WRITE), 600.0)
        time.sleep(10.0)
        say(typed(first, script(VERIFY), 600.0))
        before = places(first)
        say(f"{len(before)} slabs are mapped; idle for {options.idle_minutes:g} minutes")
        time.sleep(60 * options.idle_minutes)
        say(f"moved: {sum(one != other for one, other in zip(before, places(first), strict=True))}")
        say(typed(first, script(VERIFY), 600.0))
        first.popen(["bash", "-c", f"{script(LOAD)} > /run/load 2>&1"])
        time.sleep(5.0)
        before = places(first)
        for host in hosts:
            say(f"{host.name}: systemctl restart covey")
            typed(host, "systemctl restart covey")
            alive(host, len(hosts), READY_S)
            time.sleep(3.0)
        typed(first, "touch /run/enough; sleep 3")
        say(typed(first, "cat /run/load"))
        say(f"moved: {sum(one != other for one, other in zip(before, places(first), strict=True))}")
        say(typed(first, script(VERIFY), 600.0))


if __name__ == "__main__":
    main()

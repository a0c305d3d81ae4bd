"""What a rack that does nothing costs each host: packets, bytes, processor time and memory of its agent.

    python bench/control/idle_rack.py [--hosts 20] [--seconds 60] [--json FILE]

All agents run in one network namespace of their own, so that its loopback carries their packets and no others: each is
counted once. The first `SETTLED_S` after the rack has a leader are left out: connections of the start close by then.
Processor time and memory are the agents' alone; nothing is lent, and no job runs. Needs root.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agent.ports.processes.procfs import stat
from bench.live_command import json_option, keep, options, print_head
from bench.memory.memory_at_rest import weight
from cli.rack import processes, rack

SETTLED_S = 75.0
INSIDE = "COVEY_BENCH_INSIDE"
TICKS = os.sysconf("SC_CLK_TCK")


def carried() -> tuple[int, int]:
    """Bytes and packets that the loopback of this network namespace has carried."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    fields = line.partition(":")[2].split()
    return int(fields[0]), int(fields[1])


def processor_s(pids: list[int]) -> float:
    """Processor time of these processes so far, seconds."""
    found = [fields for pid in pids if (fields := stat(pid)) is not None]
    return sum(int(fields[11]) + int(fields[12]) for fields in found) / TICKS


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--hosts", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    json_option(parser)
    args = parser.parse_args()
    if not os.environ.get(INSIDE):
        command = ["unshare", "--net", sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, INSIDE: "1"}, check=False).returncode)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory(prefix="covey-idle-") as folder:
        directory, silent = Path(folder) / "rack", rack.Timer(lambda _line: None)
        try:
            began_s = time.monotonic()
            hosts = rack.start(directory, args.hosts, 2, os.environ, silent)
            up_s = time.monotonic() - began_s
            time.sleep(SETTLED_S)
            state_dirs = [directory / host.name for host in hosts]
            agents = [pid for each in state_dirs if (pid := processes.lock_holder(each)) is not None]
            before, busy_s, since_s = carried(), processor_s(agents), time.monotonic()
            time.sleep(args.seconds)
            after, more_s, for_s = carried(), processor_s(agents), time.monotonic() - since_s
            pss = statistics.median(weight(pid)[1] for pid in agents)
        finally:
            rack.stop(directory, os.environ, lambda _line: None)
    shares = args.hosts * for_s
    found = {
        "hosts": args.hosts,
        "agents": len(agents),
        "up_s": up_s,
        "packets_s": (after[1] - before[1]) / shares,
        "bytes_s": (after[0] - before[0]) / shares,
        "core": (more_s - busy_s) / shares,
        "pss_mib": pss,
        "load": os.getloadavg()[0],
    }
    print_head("hosts | up after | packets/s a host | KB/s a host | % of a core | PSS, MiB | load")
    print(
        f"| {args.hosts} | {up_s:.0f} s | {found['packets_s']:.1f} | {found['bytes_s'] / 1000:.2f} "
        f"| {100 * found['core']:.2f} | {pss:.1f} | {found['load']:.1f} |"
    )
    keep(found, args.json)


if __name__ == "__main__":
    main()

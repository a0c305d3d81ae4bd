"""`make bench-tuner-live`: the tuner on a real rack with one slow host: a step before and after, the same bits.

    python bench/elastic/tuner_live.py [--rate 100mbit] [--slow quota|pass] [--quota 0.1] [--ranks 12] [--steps 400]

Three hosts (network namespaces) with real agents, each with a card of that rate in each direction (tbf); the processes
of the last one share a processor quota (cgroup), or its passes take four times as long (they sleep: for a machine that
has other things to do). `examples/elastic.py` runs with a process on each. After `agentctl
tune` the slow host should carry fewer ranks, and steps be shorter. STEP: median time between two steps, ms, measured
from files that the job's script writes, not by the tuner; TX: megabytes that each host's card sent in a step, from the
kernel's counters. Afterwards the same training runs without the tuner: the same digest. (Needs root,
iproute2 and cgroup v1 or v2 with the cpu controller.)
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.elastic.elastic_changes import TRAIN, shell, times, told  # noqa: E402
from bench.healing.healing_kills import digest  # noqa: E402
from bench.live_command import json_option, keep, options, print_head, submitted  # noqa: E402
from chaos.rack.agents import AgentRack, wait  # noqa: E402
from chaos.rack.cpu_quota import CpuQuota  # noqa: E402
from chaos.rack.hosts import Host, Laboratory  # noqa: E402

HOSTS = 3
START_S = 120.0
"""Seconds that a job may take to begin, and more than its steps to end."""
SEEN_S = 8.0
"""Seconds for which steps are watched before and after."""
SLOW = """
import socket, sys
if socket.gethostname() == {slow!r}:
    sys.argv[-1] = str(4 * float(sys.argv[-1]))
"""
"""Put before the script: the last argument is how long a pass takes at least."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--rate", default="100mbit", help="of a host's card in each direction, as tc says it")
    parser.add_argument("--slow", choices=("quota", "pass"), default="quota", help="what makes the last host slow")
    parser.add_argument("--quota", type=float, default=0.1, help="processors for the processes of the slow host")
    parser.add_argument("--pass-s", type=float, default=0.02, help="a pass takes at least so long, and on a host that "
                        "is slow by `pass` four times that")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=12)
    parser.add_argument("--width", type=int, default=8192, help="features of an image: the size of the model")
    parser.add_argument("--steps", type=int, default=400)
    json_option(parser)
    args = parser.parse_args(argv)
    with Laboratory(HOSTS) as lab, CpuQuota("covey-tuner", args.quota) as quota:
        each = list(lab.hosts.values())
        shape(lab, each, args.rate)
        rack = AgentRack(lab, gpus=1, voters=3)
        rack.start()
        rack.wait_up()
        script = f"elastic.py --steps {args.steps} --width {args.width} --step-seconds {args.pass_s}"
        slow = each[-1].name if args.slow == "pass" else ""
        job = submit(rack, script, f"{HOSTS}..{args.ranks}", slow)
        wait(lambda: len(times(rack)) > 20, lambda: told(rack, job), START_S)
        if args.slow == "quota":
            quota.hold(each[-1].find("train.py"))
        before = watched(rack, each, SEEN_S)
        show(rack, job)
        found: dict[str, Any] = {}
        until_s = time.monotonic() + START_S + 2 * args.steps * before["step_s"]
        while len(times(rack)) < args.steps * 0.7:
            if time.monotonic() > until_s:
                raise SystemExit(f"{len(times(rack))} of {args.steps} steps are done in time\n{told(rack, job)}")
            time.sleep(5.0)
            found = show(rack, job) or found
        after = watched(rack, each, SEEN_S)
        tuned = digest(rack, job)
        events = shell(rack, f"agentctl why {job}")
        fixed = digest(rack, submit(rack, script, f"{HOSTS}..{args.ranks}", ""))
    print(events, file=sys.stderr)
    print_head("when | STEP, ms | ranks by host | TX, MB a step | the same bits")
    ranks = " ".join(str(host["ranks"]) for host in found.get("hosts", ()))
    first = " ".join([str(args.ranks // HOSTS)] * HOSTS)
    for name, row, carried in (("before", before, first), ("after", after, ranks)):
        sent_mb = " ".join(f"{one / 1e6:.2f}" for one in row["sent_bytes"])
        print(f"| {name} | {1000 * row['step_s']:.1f} | {carried} | {sent_mb} | {'yes' if tuned == fixed else 'NO'} |")
    for line in events.splitlines():
        if " tuned " in line:
            print(f"  {line.split('tuned', 1)[1].strip()}")
    keep({"before": before, "after": after, "view": found, "same": tuned == fixed}, args.json)
    return 0 if tuned == fixed else 1


def submit(rack: AgentRack, script: str, workers: str, slow: str) -> str:
    """Start the job; a pass takes four times as long on the host `slow`."""
    for host in rack.hosts:
        (host.folder / "root" / "train.py").write_text(SLOW.format(slow=slow) + TRAIN)
        for old in (host.folder / "root").glob("steps.*"):
            old.unlink()
    return submitted(rack.hosts[0], f"--workers {workers} -- python train.py {ROOT / 'examples'}/{script}")


def show(rack: AgentRack, job: str) -> dict[str, Any]:
    """Tune the job, and what its tuner knows; empty: it does not say."""
    said = rack.hosts[0].shell(f"agentctl tune {job} --json")
    view: dict[str, Any] = json.loads(said.stdout)["data"] if said.returncode == 0 else {}
    print(f"  step {len(times(rack))}: {view.get('doing', said.stderr.strip())}", file=sys.stderr, flush=True)
    return view


def shape(lab: Laboratory, hosts: Sequence[Host], rate: str) -> None:
    words = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
    for host in hosts:
        port = ["tc", "qdisc", "add", "dev", f"h{host.number}n0", *words]
        subprocess.run([*lab.inside(), *port], check=True)
        host.run(["tc", "qdisc", "add", "dev", "eth0", *words]).check_returncode()


def sent(host: Host) -> int:
    said = host.run(["cat", "/proc/net/dev"]).stdout
    line = next(line for line in said.splitlines() if line.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


def watched(rack: AgentRack, hosts: Sequence[Host], for_s: float) -> Mapping[str, Any]:
    """Steps and bytes of so many seconds, from outside."""
    done, bytes_before = len(times(rack)), [sent(host) for host in hosts]
    time.sleep(for_s)
    all_s, bytes_after = times(rack), [sent(host) for host in hosts]
    spans = [after - before for before, after in pairwise(all_s[done:])]
    steps = max(1, len(all_s) - done)
    found = [(after - before) / steps for before, after in zip(bytes_before, bytes_after, strict=True)]
    return {"step_s": statistics.median(spans or [0.0]), "steps": steps, "sent_bytes": found}


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-groups`: jobs that share their hosts, in turns and thrown together, on cards of a given rate.

    python bench/elastic/groups_live.py [--jobs 4] [--steps 30] [--rate 100mbit] [--work 0.1] [--megabytes 1]

Two hosts (network namespaces, each with one core of this machine and a link of that rate in both directions, tbf) with
real agents. Each job has two numpy workers, one on each host; a step multiplies matrices for `--work` seconds of
processor time and adds gradients of `--megabytes` over the two. TOGETHER: the jobs run side by side; TURNS: with
`--share-host night`; ALONE: one after the other, the sum of their times. Every job must end with the bits that it has
alone. (Needs root and iproute2.)
"""

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head, submitted  # noqa: E402
from chaos.rack.agents import AgentRack, wait  # noqa: E402
from chaos.rack.hosts import Laboratory  # noqa: E402

NICE = -15
"""Jobs go before all else on this machine, whose processors they share as those of two hosts."""
WORK = """
import os, sys, time
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import hashlib
import numpy as np
import covey
seed, steps, work_s, megabytes = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
os.sched_setaffinity(0, {int(os.environ["COVEY_HOST"][-1]) % os.cpu_count()})
rng = np.random.default_rng(seed)
a = rng.standard_normal((160, 160)).astype(np.float32)
w = np.zeros(int(megabytes * 250_000), np.float32)
with covey.join() as job:
    g = rng.standard_normal(len(w)).astype(np.float32) * (job.rank + 1)
    w = job.tensors.push_pull("first", w)
    began_s = time.monotonic()
    for step in range(steps):
        done_s = time.thread_time() + work_s
        while time.thread_time() < done_s:
            b = a @ a
        w += job.tensors.push_pull("g", g * np.float32(1 + step % 3))
        job.step()
    print("TOOK", time.monotonic() - began_s, "DIGEST", hashlib.sha256(w.tobytes()).hexdigest()[:16], flush=True)
"""


class Ended(NamedTuple):
    """One job that has ended."""

    job: str
    took_s: float
    digest: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", default="100mbit", help="of each host's card")
    parser.add_argument("--work", type=float, default=0.1, metavar="S", help="processor time of a step on each host")
    parser.add_argument("--megabytes", type=float, default=1.0, help="of gradients in a step")
    json_option(parser)
    args = parser.parse_args(argv)
    with Laboratory(2) as lab:
        rack = AgentRack(lab, gpus=0, voters=1)
        shape(rack, args.rate)
        rack.start()
        rack.wait_up()
        alone = [done for seed in range(args.jobs) for done in run(rack, args, (seed,), "")]
        together = run(rack, args, range(args.jobs), "")
        turns = run(rack, args, range(args.jobs), "--share-host night")
    right = [done.digest for done in alone]
    same = all([done.digest for done in found] == right for found in (together, turns))
    print_head("jobs | took, all | the same bits")
    print(f"| alone, one after the other | {sum(done.took_s for done in alone):.1f} s | - |")
    for name, found in (("together", together), ("in turns", turns)):
        yes = "yes" if [done.digest for done in found] == right else "NO"
        print(f"| {name} | {max(done.took_s for done in found):.1f} s | {yes} |")
    each = {name: [done.took_s for done in found] for name, found in zip("atx", (alone, together, turns), strict=True)}
    keep({"same": same, "took_s": each}, args.json)
    return 0 if same else 1


def shape(rack: AgentRack, rate: str) -> None:
    """Give each host's card this rate in both directions."""
    for host in rack.hosts:
        (host.folder / "root" / "work.py").write_text(WORK)
        shape = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
        port = ["tc", "qdisc", "add", "dev", f"h{host.number}n0", *shape]
        subprocess.run([*rack.lab.inside(), *port], check=True)
        host.run(["tc", "qdisc", "add", "dev", "eth0", *shape]).check_returncode()


def run(rack: AgentRack, args: object, seeds: Sequence[int], more: str) -> list[Ended]:
    """Run one job for each seed, all at once."""
    steps, work, megabytes = (getattr(args, name) for name in ("steps", "work", "megabytes"))
    jobs = []
    for seed in seeds:
        words = f"nice -n {NICE} python work.py {seed} {steps} {work} {megabytes}"
        jobs.append(submitted(rack.hosts[0], f"--gpus 0 --workers 2 {more} -- {words}"))
    until_s = time.monotonic() + 280.0
    found: dict[str, Ended] = {}

    def ended() -> bool:
        for job in jobs:
            if job not in found and (done := outcome(rack, job)) is not None:
                found[job] = done
        return len(found) == len(jobs)

    wait(ended, lambda: "\n".join(told(rack, job) for job in jobs), max(1.0, until_s - time.monotonic()), 0.5)
    if more:
        print("\n".join(rack.hosts[0].shell(f"agentctl job {job} | grep -E 'step time|shares'").stdout for job in jobs))
    return [found[job] for job in jobs]


def outcome(rack: AgentRack, job: str) -> Ended | None:
    """How a job ended: the longest of its ranks; None: it runs."""
    said = rack.hosts[0].shell(f"agentctl logs {job} 2>&1; agentctl job {job}").stdout
    took = re.findall(r"TOOK ([0-9.]+) DIGEST ([0-9a-f]+)", said)
    if len(took) < 2:
        return None
    if len({digest for _, digest in took}) != 1:
        raise SystemExit(f"ranks of {job} disagree:\n{said}")
    return Ended(job, max(float(seconds) for seconds, _ in took), took[0][1])


def told(rack: AgentRack, job: str) -> str:
    lines = (f"agentctl {words}" for words in (f"why {job}", f"job {job}", f"logs {job} 2>&1 | tail -5", "status"))
    return "\n".join(rack.hosts[0].shell(line).stdout for line in lines)


if __name__ == "__main__":
    sys.exit(main())

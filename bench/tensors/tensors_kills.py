"""`make bench-tensors-kills`: how long training stops when an owner of its tensors is killed, again and again.

    python bench/tensors/tensors_kills.py [--kills 20] [--every 32] [--steps 8500] [--json FILE]

Two hosts (network namespaces) with real agents; a stock script of PyTorch's DistributedDataParallel, submitted with
`--aggregate`, has two ranks on each and a table at each. `kill -9` of one host's `aggd`, then of the other's, at times
that a seed chooses. GAP: how much longer than the median step the step took in which it happened, in ms. Afterwards
the same script runs once more without kills: the parameters of all ranks are to be the same bits. (Needs root,
iproute2 and PyTorch.)
"""

import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head, submitted  # noqa: E402
from chaos.rack.agents import AgentRack, wait  # noqa: E402
from chaos.rack.hosts import Host, Laboratory  # noqa: E402

HOSTS, RANKS = 2, 4
PAUSE_S = 0.05
"""Seconds that each step pauses, besides what it computes."""
LOST_S = 10.0
"""Seconds after a kill in whose steps it is looked for."""
END_S = 900.0
TRAIN = """
import hashlib, sys, time
import torch
import torch.distributed as dist

steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
layers = [torch.nn.Linear(512, 512) for _ in range(4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
draws = torch.Generator().manual_seed(rank)
with open(f"steps{rank}", "w") as log:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 512, generator=draws)).square().mean().backward()
        optimizer.step()
        print(time.monotonic(), file=log, flush=True)
        time.sleep(pause_s)
held = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print("parameters sha256=" + hashlib.sha256(held).hexdigest(), flush=True)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    every = "seconds between two kills, more or less: an aggregator that lived for 30 is started again at once"
    parser.add_argument("--every", type=float, default=32.0, help=every)
    parser.add_argument("--steps", type=int, default=8500)
    parser.add_argument("--seed", type=int, default=1)
    json_option(parser)
    args = parser.parse_args(argv)
    with Laboratory(HOSTS) as lab:
        rack = AgentRack(lab, gpus=RANKS // HOSTS, voters=1, more_toml='[aggregator]\ndirect = "never"\n')
        rack.start()
        rack.wait_up()
        job = submit(rack, args.steps, PAUSE_S)
        wait(lambda: len(steps(rack)) > 20, lambda: told(rack, job), 120.0)
        killed = kill(rack, args.kills, args.every, args.seed)
        with_kills, times = parameters(rack, job), steps(rack)
        without = parameters(rack, submit(rack, args.steps, 0.0))
    found = gaps(times, killed)
    print_head("kills | steps | median step, ms | GAP, median | GAP, worst | the same bits")
    gap = [1000 * (each - found["step_s"]) for each in found["took_s"]]
    same = len(set(with_kills)) == 1 and with_kills == without
    words = f"{len(gap)} | {len(times)} | {1000 * found['step_s']:.0f}"
    print(f"| {words} | {statistics.median(gap):.0f} | {max(gap):.0f} | {'yes' if same else 'NO'} |")
    keep(found | {"same": same}, args.json)
    return 0 if same and len(times) == args.steps and len(gap) == len(killed) else 1


def submit(rack: AgentRack, count: int, pause_s: float) -> str:
    """Submit the job; returns its id."""
    for host in rack.hosts:
        (host.folder / "root" / "train.py").write_text(TRAIN)
    return submitted(rack.hosts[0], f"--workers {RANKS} --aggregate -- python train.py {count} {pause_s}")


def told(rack: AgentRack, job: str) -> str:
    first = rack.hosts[0]
    return "\n".join(first.shell(words).stdout for words in (f"agentctl job {job}", f"agentctl logs {job} --rank 0"))


def steps(rack: AgentRack) -> list[float]:
    """Times at which the steps of rank 0 ended."""
    for host in rack.hosts:
        file = host.folder / "root" / "steps0"
        if file.exists():
            return [float(line) for line in file.read_text().splitlines()]
    return []


def kill(rack: AgentRack, kills: int, every_s: float, seed: int) -> list[float]:
    """Kill an owner `kills` times, those of the hosts in turn; returns when."""
    draws, at = random.Random(seed), []
    for number in range(kills):
        time.sleep(every_s * draws.uniform(0.8, 1.2))
        pid = aggregator(rack.hosts[number % HOSTS])
        at.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)
        print(f"  kill {number + 1} of {kills}", file=sys.stderr, flush=True)
    return at


def aggregator(host: Host) -> int:
    found: list[int] = wait(lambda: host.find("aggd"), lambda: f"no aggd on {host.name}", 30.0)
    return found[0]


def parameters(rack: AgentRack, job: str) -> list[str]:
    """Parameters of each rank, once the job has ended."""
    first = rack.hosts[0]
    waited = first.shell(f"agentctl wait {job}", timeout_s=END_S)
    if waited.returncode:
        raise SystemExit(waited.stdout + waited.stderr + told(rack, job))
    logs = [first.shell(f"agentctl logs {job} --rank {rank}").stdout for rank in range(RANKS)]
    return [match[1] for match in (re.search(r"sha256=(\w+)", log) for log in logs) if match]


def gaps(times: Sequence[float], killed: Sequence[float]) -> dict[str, Any]:
    """The median step, and for each kill before the end the longest step under way between it and the next, at most
    `LOST_S` later."""
    each = [after - before for before, after in pairwise(times)]
    took: list[float] = []
    for kill_s, next_s in zip(killed, [*killed[1:], killed[-1] + LOST_S], strict=True):
        end_s = min(next_s, kill_s + LOST_S)
        under_way = [after - before for before, after in pairwise(times) if before <= end_s and after >= kill_s]
        if not under_way:
            print(f"the script ended before kill {len(took) + 1} of {len(killed)}; next: more --steps", file=sys.stderr)
            break
        took.append(max(under_way))
    if not took:
        raise SystemExit("the script ended before the first kill; next: more --steps")
    return {"step_s": statistics.median(each), "took_s": took}


if __name__ == "__main__":
    sys.exit(main())

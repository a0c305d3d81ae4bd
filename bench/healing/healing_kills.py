"""`make heal-test`: ranks of a job are killed, again and again: how long the others wait, and the same bits.

    python bench/healing/healing_kills.py [--script heal_ddp] [--kills 200] [--every 1.5] [--steps 14000] [--only KIND]
        [--spares 1] [--empty-host] [--beside]

Four hosts (network namespaces) with real agents, and two GPUs each: a rank that leaves a host joins others of the job;
`examples/healing.py` (numpy, Adam, random batches), or `examples/heal_ddp.py` (PyTorch's DistributedDataParallel), has
a rank on each of four. Each kill is one of these, as a seed chooses: any rank; two at once; a rank, and its successor
while that starts; a rank with the `aggd` that sums; a rank with its host's agent, which may lead; a whole host, whose
power fails, so that others take its ranks over; or no kill: `agentctl move`, of all ranks on a host. With
`--empty-host` a fifth one has no rank, and each host has one GPU. Agents are started again as systemd would, hosts once
others have taken over. The next kill waits until all ranks have done a step: what is a rank's own is with two others.
GAP: how much longer than the median step the step took in which it happened, by the clock of ranks that lived through
it, in ms; the start of a successor is in it, and the time to notice that a host is gone. OTHERS: processes of ranks
that ended and were not killed. `--beside`: another job (`examples/digits.py`, with Adam at its aggregator) trains on
the same hosts and on a fifth one, whose `direct = "never"` packs it on `aggd`, which is killed now and then. SAMPLES
(heal_ddp): batches of other samples in another process of their rank, and samples that an epoch used not once: 0.
Afterwards the same script runs without kills. (Needs root and iproute2.)
"""

import os
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from agent.jobs.rank_env import INCARNATIONS_BITS  # noqa: E402
from bench.live_command import json_option, keep, options, print_head, submitted  # noqa: E402
from chaos.rack.agents import AgentRack, wait  # noqa: E402
from chaos.rack.hosts import Host, Laboratory  # noqa: E402

RANKS = 4
PAUSE_S = 0.02
"""Seconds that each step pauses, besides what it computes."""
KINDS = (
    "a rank",
    "a rank",
    "two ranks",
    "a rank and its successor",
    "a rank and its aggregator",
    "a rank and its agent",
    "a whole host",
    "a move",
)
LOST_S = {"a whole host": 30.0}
"""Seconds after a kill in which it may still be felt; others: 6 s."""
END_S = 900.0
TRAIN = """
import os, runpy, sys, time
import covey.job.job_state
script, pause_s, *sys.argv[1:] = sys.argv[1:]
open("/proc/self/comm", "w").write("rank" + os.environ["COVEY_RANK"])  # one that was a spare has it nowhere else
done, log = covey.job.job_state.JobState.done, open(f"steps{os.environ['COVEY_RANK']}", "a")
samples = open(f"samples{os.environ['COVEY_RANK']}", "a")
if script.endswith("heal_ddp.py"):
    from covey.frameworks.torch.sampler import StepSampler
    given = StepSampler._batch_at
    def batch_at(sampler, number):
        batch = given(sampler, number)
        print(number, *batch, file=samples, flush=True)
        return batch
    StepSampler._batch_at = batch_at
def noted(state, **more):
    step = state.step
    done(state, **more)
    print(time.monotonic(), os.environ.get("COVEY_INCARNATION", "0"), step, file=log, flush=True)
    time.sleep(float(pause_s))
covey.job.job_state.JobState.done = noted
sys.path[0] = os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""
POINTS = 4096
"""Samples of heal_ddp, all of which each epoch uses."""
SCRIPTS = {"healing": "--steps {}", "heal_ddp": "--epochs {}", "heal_jax": "--steps {}"}
"""Scripts of examples/, with the arguments that say how long they run."""
RESULT = re.compile(r"(?:state sha256=|parameters )(\w+)")


class Killed(NamedTuple):
    at_s: float
    kind: str
    ranks: list[int]


class Done(NamedTuple):
    """One step that a rank did."""

    at_s: float
    incarnation: int
    step: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--every", type=float, default=1.5, help="seconds between two kills, more or less")
    parser.add_argument("--script", choices=SCRIPTS, default="healing", help="heal_ddp needs PyTorch, heal_jax JAX")
    parser.add_argument("--steps", type=int, default=14_000, help="of healing; epochs of 32 steps of heal_ddp")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spares", type=int, default=0, help="of the job, on each of its hosts and one more")
    parser.add_argument("--empty-host", action="store_true", help="a fifth host, which takes over what others lose")
    parser.add_argument("--beside", action="store_true", help="a job packed on aggregators trains on the same hosts")
    parser.add_argument("--only", choices=dict.fromkeys(KINDS), metavar="KIND", help="such as 'a whole host'")
    json_option(parser)
    args = parser.parse_args(argv)
    with Laboratory(RANKS + (args.empty_host or args.beside)) as lab:
        rack = AgentRack(lab, gpus=(1 if args.empty_host else 2) + args.beside, voters=3)
        if args.beside:
            settings = rack.hosts[0].folder / "etc" / "agent.toml"
            text = re.sub("simulated = .*", "simulated = 1", settings.read_text())
            settings.write_text(text + '[aggregator]\ndirect = "never"\n')
        rack.start()
        rack.wait_up()
        beside = Beside(rack) if args.beside else None
        blocks = None if args.empty_host else blocked(rack)
        job = submit(rack, args.script, args.steps, PAUSE_S, args.spares)
        if blocks is not None:
            wait(lambda: all(steps(rack)), lambda: told(rack, job), 120.0)
            rack.hosts[0].shell(f"agentctl cancel {blocks}")
        wait(lambda: all(len(each) > 20 for each in steps(rack)), lambda: told(rack, job), 120.0)
        if args.spares:
            wait(lambda: where_spares_wait(rack, job) > RANKS, lambda: told(rack, job), 120.0)
        kinds = (args.only,) if args.only else KINDS
        killed = Kills(rack, job, random.Random(args.seed), beside).all(args.kills, args.every, kinds)
        with_kills, times = digest(rack, job), steps(rack)
        if beside is not None:
            beside.end()
        wrong = wrong_samples(rack) if args.script == "heal_ddp" else 0
        why = rack.hosts[0].shell(f"agentctl why {job}").stdout
        attempts = rack.hosts[0].shell(f"agentctl job {job} --json").stdout
        without = digest(rack, submit(rack, args.script, args.steps, 0.0))
    found = gaps(times, killed)
    deaths = Counter(rank for each in killed for rank in each.ranks)
    others = sum(abs(lost(each) - deaths[rank]) for rank, each in enumerate(times))
    for rank, each in enumerate(times):
        if lost(each) != deaths[rank]:
            processes = [
                divmod(one, 1 << INCARNATIONS_BITS) for one in dict.fromkeys(done.incarnation for done in each)
            ]
            print(
                f"  rank {rank}: {lost(each)} processes ended, {deaths[rank]} were killed; {processes}", file=sys.stderr
            )
            print(why, file=sys.stderr)
    same = with_kills == without and '"attempt": 1,' in attempts
    gap_words = "GAP, median | GAP, 9 of 10 | GAP, worst"
    print_head(f"killed | times | median step, ms | {gap_words} | OTHERS | SAMPLES | the same bits")
    for kind in (*dict.fromkeys(KINDS), ""):
        gap = sorted(
            1000 * (took_s - found["step_s"])
            for each, took_s in zip(killed, found["took_s"], strict=True)
            if kind in ("", each.kind)
        )
        if gap:
            words = f"{kind or 'all'} | {len(gap)} | {1000 * found['step_s']:.0f} | {statistics.median(gap):.0f}"
            after = f"{others} | {wrong} | {'yes' if same else 'NO'}" if not kind else " | | "
            print(f"| {words} | {gap[len(gap) * 9 // 10]:.0f} | {gap[-1]:.0f} | {after} |")
    keep(found | {"same": same, "kinds": [each.kind for each in killed], "others": others, "samples": wrong}, args.json)
    return 0 if same and not others and not wrong else 1


def submit(rack: AgentRack, script: str, count: int, pause_s: float, spares: int = 0) -> str:
    """Submit the job; returns its id."""
    for host in rack.hosts:
        (host.folder / "root" / "train.py").write_text(TRAIN)
    words = f"python train.py {ROOT / 'examples' / script}.py {pause_s} {SCRIPTS[script].format(count)}"
    return submitted(rack.hosts[0], f"--workers {RANKS} --spares {spares} -- {words}")


class Beside:
    """A job with a worker on each host whose sums and optimizer are at an `aggd`; another one follows when hosts were
    lost so often that it has failed."""

    WORDS = f"python {ROOT / 'examples' / 'digits.py'} --optimizer adam --steps 1000000 --step-seconds 0.03"

    def __init__(self, rack: AgentRack) -> None:
        self._rack, self._jobs = rack, [self._begin(rack)]

    def look(self) -> None:
        """Begin another one if it has failed."""
        if '"state": "failed"' in self._rack.hosts[0].shell(f"agentctl job {self._jobs[-1]} --json").stdout:
            self._jobs.append(self._begin(self._rack))

    def end(self) -> None:
        said = self._rack.hosts[0].shell(f"agentctl tensors; agentctl job {self._jobs[-1]}").stdout
        print(f"  {len(self._jobs)} jobs were packed beside it, one after another; the last:\n{said}", file=sys.stderr)
        self._rack.hosts[0].shell(f"agentctl cancel {self._jobs[-1]}")

    def _begin(self, rack: AgentRack) -> str:
        return running(rack, f"--nodes {len(rack.hosts)} --retries 1000 -- {self.WORDS}")


def blocked(rack: AgentRack) -> str:
    """Submit a job that takes a GPU of each host, so that each has room for one rank at most; returns its id."""
    return running(rack, f"--nodes {RANKS} -- sleep 3600")


def running(rack: AgentRack, words: str) -> str:
    """Submit a job and wait until it runs; returns its id."""
    job = submitted(rack.hosts[0], words)
    runs = '"state": "running"'
    wait(lambda: runs in rack.hosts[0].shell(f"agentctl job {job} --json").stdout, lambda: told(rack, job), 60.0)
    return job


def told(rack: AgentRack, job: str) -> str:
    first = next(host for host in rack.hosts if host.is_up)
    return "\n".join(first.shell(words).stdout for words in (f"agentctl why {job}", f"agentctl logs {job} --rank 0"))


def where_spares_wait(rack: AgentRack, job: str) -> int:
    """Number of hosts on which spares wait, or did."""
    said = rack.hosts[0].shell(f"agentctl why {job}").stdout
    return len({line.split()[1] for line in said.splitlines() if "spares here" in line})


def steps(rack: AgentRack) -> list[list[Done]]:
    """Steps by rank, in the order in which it did them."""
    found: list[list[Done]] = [[] for _ in range(RANKS)]
    for host in rack.hosts:
        for rank in range(RANKS):
            file = host.folder / "root" / f"steps{rank}"
            lines = file.read_text().splitlines() if file.exists() else []
            words = [line.split() for line in lines]
            found[rank] += [Done(float(each[0]), int(each[1]), int(each[2])) for each in words if len(each) == 3]
    return found


def wrong_samples(rack: AgentRack) -> int:
    """Number of batches in which two processes of a rank took other samples, and of samples that were not used once in
    an epoch."""
    taken: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for host in rack.hosts:
        for rank in range(RANKS):
            file = host.folder / "root" / f"samples{rank}"
            for line in file.read_text().splitlines() if file.exists() else ():
                number, *samples = map(int, line.split())
                taken.setdefault((number, rank), set()).add(tuple(samples))
    wrong = sum(len(each) - 1 for each in taken.values())
    used: Counter[tuple[int, int]] = Counter()
    for (number, _), each in taken.items():
        samples = min(each)
        used.update((number * RANKS * len(samples) // POINTS, sample) for sample in samples)
    epochs = {epoch for epoch, _ in used}
    return wrong + sum(used[epoch, sample] != 1 for epoch in epochs for sample in range(POINTS))


class Kills:
    def __init__(self, rack: AgentRack, job: str, draws: random.Random, beside: "Beside | None" = None) -> None:
        self._rack, self._job, self._draws, self._beside = rack, job, draws, beside
        self._before = [-1] * RANKS
        """For each rank, the newest process that was killed."""

    def all(self, kills: int, every_s: float, kinds: Sequence[str]) -> list[Killed]:
        killed = []
        for number in range(kills):
            time.sleep(every_s * self._draws.uniform(0.6, 1.4))
            kind = self._draws.choice(kinds)
            ranks = self._draws.sample(range(RANKS), 2 if kind == "two ranks" else 1)
            all_ranks = [self._process(rank) for rank in range(RANKS)]
            if kind in ("a whole host", "a move"):  # whoever is there goes along
                ranks = [rank for rank, (host, _) in enumerate(all_ranks) if host is all_ranks[ranks[0]][0]]
            lost = [all_ranks[rank] for rank in ranks]
            newest = steps(self._rack)
            for rank in ranks:
                self._before[rank] = newest[rank][-1].incarnation
            killed.append(Killed(time.monotonic(), kind, ranks))
            if kind == "a whole host":
                self._lose_host(ranks, lost[0][0])
            elif kind == "a move":
                self._move(ranks[0], lost[0][0])
            else:
                for pid in [*self._besides(kind, lost[0][0]), *(pid for _, pid in lost)]:
                    os.kill(pid, signal.SIGKILL)
            if kind == "a rank and its successor":
                self._lose_successor(ranks[0], lost[0][1])
                killed[-1] = killed[-1]._replace(ranks=ranks * 2)
            print(f"  kill {number + 1} of {kills}: {kind}", file=sys.stderr, flush=True)
            self._rack.start()
            if self._beside is not None:
                self._beside.look()
        return killed

    def _lose_host(self, ranks: Sequence[int], host: Host) -> None:
        """Fail a host's power, which is back once others have its ranks."""
        host.power_off()
        for rank in ranks:
            self._process(rank)
        host.power_on()
        self._rack.start()
        self._rack.wait_up()

    def _move(self, rank: int, host: Host) -> None:
        said = host.shell(f"agentctl move {self._job} {rank}")
        assert said.returncode == 0, said.stdout + said.stderr + told(self._rack, self._job)

    def _process(self, rank: int) -> tuple[Host, int]:
        """Host and process of a rank, once it has done a step: it has what it needs."""
        found: tuple[Host, int] = wait(lambda: self._living(rank), lambda: told(self._rack, self._job), 60.0)
        return found

    def _living(self, rank: int) -> tuple[Host, int] | None:
        self._rack.start()  # an agent that was just killed may have been there still
        done = steps(self._rack)[rank]
        if not done or done[-1].incarnation <= self._before[rank]:
            return None
        found = [(host, pid) for host in self._rack.hosts for pid in host.find("train.py") if rank_of(pid) == rank]
        return found[0] if found else None

    def _lose_successor(self, rank: int, lost: int) -> None:
        """Kill a rank's successor some moments after it started."""
        found = wait(
            lambda: [pid for pid in self._processes(rank) if pid != lost], lambda: told(self._rack, self._job), 60.0
        )
        time.sleep(self._draws.uniform(0.0, 0.3))
        os.kill(found[0], signal.SIGKILL)

    def _processes(self, rank: int) -> list[int]:
        return [pid for host in self._rack.hosts for pid in host.find("train.py") if rank_of(pid) == rank]

    def _besides(self, kind: str, host: Host) -> list[int]:
        if kind == "a rank and its aggregator":
            return [pid for each in self._rack.hosts for pid in each.find("aggd")][:1]
        pid = self._rack.agent_pid(host) if kind == "a rank and its agent" else None
        return [] if pid is None else [pid]


def rank_of(pid: int) -> int | None:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    return int(name[4:]) if name.startswith("rank") else None


def digest(rack: AgentRack, job: str) -> str:
    """Digest that rank 0 prints, once the job has ended."""
    first = next(host for host in rack.hosts if host.is_up)
    waited = first.shell(f"agentctl wait {job}", timeout_s=END_S)
    match = RESULT.search(first.shell(f"agentctl logs {job} --rank 0").stdout)
    if waited.returncode or match is None:
        raise SystemExit(waited.stdout + waited.stderr + told(rack, job))
    return match[1]


def lost(done: Sequence[Done]) -> int:
    """Number of processes of a rank that ended before its newest one. They are numbered anew wherever the rank comes
    to, from 0 or, after a move, from 1; the bits above say how often the job's ranks had moved."""
    seen: dict[int, set[int]] = {}
    for each in done:
        moves, number = divmod(each.incarnation, 1 << INCARNATIONS_BITS)
        seen.setdefault(moves, set()).add(number)
    return sum(max(numbers) - min(numbers) for numbers in seen.values()) + len(seen) - 1


def gaps(times: Sequence[Sequence[Done]], killed: Sequence[Killed]) -> dict[str, Any]:
    """The median step, and for each kill the longest step of a rank that lived through it."""
    spans = [
        (rank, before.at_s, after.at_s)
        for rank, each in enumerate(times)
        for before, after in pairwise(each)
        if before.incarnation == after.incarnation
    ]
    ends_s = [each.at_s for each in killed[1:]] + [killed[-1].at_s + 30.0]
    took = []
    for (kill_s, kind, ranks), next_s in zip(killed, ends_s, strict=True):
        end_s = min(next_s, kill_s + LOST_S.get(kind, 6.0))
        lived = [
            after - before
            for rank, before, after in spans
            if rank not in ranks and before <= end_s and after >= kill_s
            if before <= kill_s or after < next_s  # else it is the next kill's
        ]
        took.append(max(lived, default=0.0))
    return {"step_s": statistics.median(after - before for _, before, after in spans), "took_s": took}


if __name__ == "__main__":
    sys.exit(main())

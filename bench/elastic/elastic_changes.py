"""`make bench-elastic`: a job's processes change at random, with kills among that: how long it pauses, the same bits.

    python bench/elastic/elastic_changes.py [--changes 60] [--every 3] [--seed 1] [--only KIND] [--data-mb MB]

Four hosts (network namespaces) with real agents and four GPUs each; `examples/elastic.py` (numpy, Adam, random batches)
has 16 ranks (`--workers 4..16`). Each change is one of these, as a seed chooses: `agentctl scale` to another number; a
process is killed; two are; the power of a host fails, which is back a little later. PAUSE: the longest time between two
steps after the change, less the median of such times before it, in ms, until the next change; the start of new
processes, and the time to notice that a host is gone, are in it as far as others waited. OTHERS: processes that ended
although nobody killed them and no smaller number was asked for. START: from when a greater number was asked for until a
process that came had done its first step, in seconds, the median and the longest. Afterwards `examples/healing.py` runs
with 16 processes and without changes: the same bits. With `--data-mb` both are `examples/elastic/mlr.py` with so much
data in 256 Blocks, of which a step takes one in 16; LOADED and MOVED: Blocks that the processes which were left at the
end had loaded, and had from others.
(Needs root and iproute2.)
"""

import json
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
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.healing.healing_kills import digest, rank_of  # noqa: E402
from bench.live_command import json_option, keep, options, print_head, submitted  # noqa: E402
from chaos.rack.agents import AgentRack, wait  # noqa: E402
from chaos.rack.hosts import Host, Laboratory  # noqa: E402

HOSTS, GPUS = 4, 4
LOW, HIGH = 4, 16
STEPS = 180
"""Steps a change: more than a machine does meanwhile on which nothing else runs."""
REFUSED_S = 60.0
"""Seconds after which a change that is refused again and again is an error."""
BLOCKS, BATCHES, FEATURES = 256, 16, 256
KINDS = ("scale", "scale", "scale", "scale", "a process", "two processes", "a whole host")
TRAIN = """
import os, runpy, sys, time
import covey.job.job_state
script, *sys.argv[1:] = sys.argv[1:]
open("/proc/self/comm", "w").write("rank" + os.environ["RANK"])
done, log = covey.job.job_state.JobState.done, None
def noted(state, **more):
    global log
    step = state.step
    done(state, **more)
    log = log or open(f"steps.{os.environ['RANK']}.{os.getpid()}", "a")
    print(time.monotonic(), step, file=log, flush=True)
covey.job.job_state.JobState.done = noted
sys.path[0] = os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""


class Change(NamedTuple):
    at_s: float
    kind: str
    words: str
    before: frozenset[int]
    """The processes before it."""
    killed: frozenset[int] = frozenset()
    to: int | None = None
    """How many processes were asked for."""
    less: int = 0
    """How many fewer these are than the job had by its log; some of those may not have begun yet."""

    def ended_unasked(self, after: frozenset[int]) -> int:
        """How many of the processes before it were neither killed nor are there `after` it, beside those that had to
        go for the number that was asked for."""
        return max(0, len(self.before - after - self.killed) - self.less)


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--changes", type=int, default=60)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two changes, more or less")
    parser.add_argument("--steps", type=int, help=f"enough for all changes (default: {STEPS} a change)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=dict.fromkeys(KINDS), metavar="KIND", help="such as 'a whole host'")
    parser.add_argument("--data-mb", type=int, default=0, help="MB of data in Blocks, of all processes together")
    json_option(parser)
    args = parser.parse_args(argv)
    elastic, fixed_size = scripts(args.steps or STEPS * args.changes, args.data_mb)
    with Laboratory(HOSTS) as lab:
        rack = AgentRack(lab, gpus=GPUS, voters=3)
        rack.start()
        rack.wait_up()
        job = submit(rack, elastic, f"{LOW}..{HIGH}")
        wait(lambda: len(times(rack)) > 20, lambda: told(rack, job), 120.0)
        made = Changes(rack, job, random.Random(args.seed))
        changes = made.all(args.changes, args.every, (args.only,) if args.only else KINDS)
        time.sleep(args.every)
        done_s, events = times(rack), shell(rack, f"agentctl why {job}")
        after = [*(change.before for change in changes[1:]), made.pids()]
        others = sum(change.ended_unasked(then) for change, then in zip(changes, after, strict=True))
        starts = starts_of(rack, changes)
        said = shell(rack, f"agentctl job {job} --json")
        bits = digest(rack, job)
        blocks = re.findall(r"loaded=(\d+) moved=(\d+)", shell(rack, f"agentctl logs {job}"))
        fixed = digest(rack, submit(rack, fixed_size, str(HIGH)))
    pauses = pauses_of(done_s, changes)
    same = bits == fixed and '"attempt": 1,' in said
    if not same or others:
        print(f"{bits}, and {fixed} without changes\n{events}", file=sys.stderr)
    print_head("change | times | PAUSE, median | PAUSE, 9 of 10 | PAUSE, worst | OTHERS | the same bits")
    for kind in (*dict.fromkeys(KINDS), ""):
        found = sorted(each for each, change in zip(pauses, changes, strict=True) if kind in ("", change.kind))
        if found:
            rest = f"{others} | {'yes' if same else 'NO'}" if not kind else " | "
            words = f"{statistics.median(found):.0f} | {found[len(found) * 9 // 10]:.0f} | {found[-1]:.0f}"
            print(f"| {kind or 'all'} | {len(found)} | {words} | {rest} |")
    if starts:
        print(f"\nSTART of {len(starts)} processes: {statistics.median(starts):.2f} s, at most {max(starts):.2f} s")
    if args.data_mb:
        loaded, moved = (sum(int(each[at]) for each in blocks) for at in (0, 1))
        print(f"\nBlocks of {args.data_mb} MB of data: {loaded} LOADED, {moved} MOVED")
    kinds = [each.kind for each in changes]
    keep({"same": same, "others": others, "pauses_ms": pauses, "changes": kinds, "starts_s": starts}, args.json)
    return 0 if same and not others else 1


def scripts(steps: int, data_mb: int) -> tuple[str, str]:
    """The commands of the job whose processes change, and of the one whose number is fixed."""
    if not data_mb:
        return f"elastic.py --step-seconds 0.002 --steps {steps}", f"healing.py --steps {steps}"
    rows = max(1, data_mb * 1_000_000 // (BLOCKS * (FEATURES + 1) * 4))
    words = f"elastic/mlr.py --blocks {BLOCKS} --features {FEATURES} --rows {rows} --batches {BATCHES} --steps {steps}"
    return f"{words} --step-seconds 0.002", words


def submit(rack: AgentRack, script: str, workers: str) -> str:
    for host in rack.hosts:
        (host.folder / "root" / "train.py").write_text(TRAIN)
    words = f"python train.py {ROOT / 'examples'}/{script}"
    return submitted(rack.hosts[0], f"--workers {workers} -- {words}")


def shell(rack: AgentRack, words: str) -> str:
    return str(next(host for host in rack.hosts if host.is_up).shell(words).stdout)


def told(rack: AgentRack, job: str) -> str:
    return "\n".join(shell(rack, words) for words in (f"agentctl why {job}", f"agentctl job {job}"))


def times(rack: AgentRack) -> list[float]:
    """When each step was first done, in order."""
    first: dict[int, float] = {}
    for host in rack.hosts:
        for file in (host.folder / "root").glob("steps.*"):
            for words in (line.split() for line in file.read_text().splitlines()):
                if len(words) == 2:
                    step, at_s = int(words[1]), float(words[0])
                    first[step] = min(at_s, first.get(step, at_s))
    return [first[step] for step in sorted(first)]


def pauses_of(done_s: Sequence[float], changes: Sequence[Change]) -> list[float]:
    """The pause of each change, in ms."""
    spans, pauses = [*pairwise(done_s)], []
    ends_s = [each.at_s for each in changes[1:]] + [done_s[-1]]
    for change, end_s in zip(changes, ends_s, strict=True):
        usual = [after - before for before, after in spans if change.at_s - 2.0 < after <= change.at_s]
        found = [after - before for before, after in spans if after > change.at_s and before < end_s]
        pauses.append(1000 * max(0.0, max(found, default=0.0) - statistics.median(usual or [0.0])))
    return pauses


def starts_of(rack: AgentRack, changes: Sequence[Change]) -> list[float]:
    """Seconds from each scaling to a greater number until the first step of each process that came by it."""
    found = []
    for host in rack.hosts:
        for words in (file.read_text().split() for file in (host.folder / "root").glob("steps.*")):
            before = [change for change in changes if words and change.at_s < float(words[0])]
            if before and (before[-1].to or 0) > len(before[-1].before):
                found.append(float(words[0]) - before[-1].at_s)
    return found


class Changes:
    def __init__(self, rack: AgentRack, job: str, draws: random.Random) -> None:
        self._rack, self._job, self._draws, self._now = rack, job, draws, LOW

    def all(self, count: int, every_s: float, kinds: Sequence[str]) -> list[Change]:
        made = []
        for number in range(count):
            time.sleep(every_s * self._draws.uniform(0.6, 1.4))
            kind = self._draws.choice(kinds)
            made.append(self._scale() if kind == "scale" else self._lose(kind))
            print(f"  change {number + 1} of {count}: {made[-1].words}", file=sys.stderr, flush=True)
            self._rack.start()
        return made

    def _scale(self) -> Change:
        """Scale the job to another number. What is refused, as while another change is under way, is asked for again;
        that is no part of the pause."""
        wanted = self._draws.choice([each for each in range(LOW, HIGH + 1) if each != self._now])
        end_s = time.monotonic() + REFUSED_S
        while True:
            there, before, asked_s = self._elastic()["processes"], self.pids(), time.monotonic()
            said = next(host for host in self._rack.hosts if host.is_up).shell(f"agentctl scale {self._job} {wanted}")
            if not said.returncode:
                break
            if time.monotonic() > end_s:
                raise SystemExit(said.stdout + said.stderr)
            time.sleep(0.5)
        self._now = wanted
        return Change(
            asked_s, "scale", said.stdout.strip().partition("\n")[0], before, to=wanted, less=max(0, there - wanted)
        )

    def _lose(self, kind: str) -> Change:
        """Kill processes, or a host."""
        wait(self._all_have_state, lambda: told(self._rack, self._job), 60.0)
        before, asked_s = self.pids(), time.monotonic()
        if kind == "a whole host":
            host = self._draws.choice(self._rack.hosts[1:])
            killed = frozenset(pid for each, pid in self._processes() if each is host)
            return Change(asked_s, kind, self._lose_host(host), before, killed)
        lost = self._draws.sample(sorted(before), min(len(before), 2 if kind == "two processes" else 1))
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        return Change(asked_s, kind, f"{kind} of {len(before)} killed", before, frozenset(lost))

    def pids(self) -> frozenset[int]:
        return frozenset(pid for _, pid in self._processes())

    def _processes(self) -> list[tuple[Host, int]]:
        found = [(host, pid) for host in self._rack.hosts for pid in host.find("train.py")]
        return [(host, pid) for host, pid in found if rank_of(pid) is not None]

    def _all_have_state(self) -> bool:
        """Whether each process has done a step: it has what those that are killed need."""
        each = self._processes()
        return bool(each) and all(self._has_done(rank_of(pid), inner(pid)) for _, pid in each)

    def _has_done(self, rank: int | None, pid: int) -> bool:
        return any((host.folder / "root" / f"steps.{rank}.{pid}").exists() for host in self._rack.hosts)

    def _lose_host(self, host: Host) -> str:
        before = sum(each is host for each, _ in self._processes())
        host.power_off()
        if self._draws.random() < 0.5:  # else it is back before anybody has missed it
            wait(lambda: host.name not in self._hosts(), lambda: told(self._rack, self._job), 60.0)
        host.power_on()
        self._rack.start()
        self._rack.wait_up()
        return f"{host.name} with {before} processes lost its power"

    def _hosts(self) -> list[str]:
        """Hosts with processes of the job."""
        return [place["host"] for place in self._told()["places"]]

    def _elastic(self) -> dict[str, Any]:
        return dict(self._told()["elastic"])

    def _told(self) -> dict[str, Any]:
        return dict(json.loads(shell(self._rack, f"agentctl job {self._job} --json"))["data"])


def inner(pid: int) -> int:
    """Number of the process on its own host; 0: it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


if __name__ == "__main__":
    sys.exit(main())

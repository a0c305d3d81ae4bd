"""The fast engine of `covey-sim jobs` and the scheduler that agents run say the same, second by second.

`Engine` holds the order and nothing else; `Live` drives `Queue` and `Leader` with commands, as agents do. Both get the
same jobs, and everything either of them does must be the same: which jobs start, are stopped, are promoted and end at
which second. The cases have what both have: 2D-LAS in which running jobs stay, on one pool of GPUs, for one tenant.
The engine's other orders are other systems, which no agent runs.
"""

import random

import msgspec
import pytest

from covey.core.job_records import GpuSeconds
from plugins.scheduler.messages.commands import Command, Promoted
from plugins.scheduler.policy.rules import COVEY, OrderRules
from sim.jobs.engine import Engine, Outcome, SimJob
from sim.jobs.live import Live, settings_of
from sim.jobs.trace import read_trace
from tests.sim.test_jobs import TRACES

Said = tuple[int, str, str | int]
"""(second, what, job) of one event."""


class Told(Engine):
    """The engine, and what it did."""

    def __init__(self, jobs: list[SimJob], capacity: int, rules: OrderRules) -> None:
        super().__init__(jobs, capacity, rules)
        self.said: list[Said] = []

    def _say(self, what: str, job: int) -> None:
        self.said.append((self.now, what, self.jobs[job].id))

    def _start(self, job: int, restore_s: int) -> None:
        self._say("start", job)
        super()._start(job, restore_s)

    def _preempt(self, job: int, preempt_s: int) -> None:
        self._say("stop", job)
        super()._preempt(job, preempt_s)

    def _promote(self, job: int) -> None:
        self._say("promote", job)
        super()._promote(job)

    def _complete(self, job: int) -> None:
        self._say("end", job)
        super()._complete(job)


class ToldLive(Live):
    """The agents' scheduler, and what it did."""

    def __init__(self, jobs: list[SimJob], capacity: int, rules: OrderRules) -> None:
        super().__init__(jobs, 1, capacity, rules, settings_of(rules, {}, None, None))
        self.said: list[Said] = []
        self.got = [0] * len(jobs)
        """When each job got the GPUs that it has."""
        self.restored_s, self.lost_s = [0] * len(jobs), [0] * len(jobs)
        """Seconds for which each job read a checkpoint to good use, and that its stops lost."""

    def _told(self, what: str, job: int) -> None:
        self.said.append((self.now, what, self.jobs[job].id))

    def _start(self, at: int, counts: bool) -> None:
        self._told("start", at)
        self.got[at] = self.now
        super()._start(at, counts)

    def _stopped(self, at: int) -> None:
        self._told("stop", at)
        life, every_s = self.lives[at], self.every_s
        ran_s = self.now - life.went if life.runs else 0
        if every_s is None or 0 < every_s <= ran_s:
            unsaved_s = ran_s % every_s if every_s else 0
            self.restored_s[at] += (life.went if life.runs else self.now) - self.got[at]
        else:
            unsaved_s = self.now - self.got[at]  # this start saved nothing, so that it was in vain
        self.lost_s[at] += unsaved_s + self.preempt_s
        super()._stopped(at)

    def _complete(self, at: int) -> None:
        self._told("end", at)
        self.restored_s[at] += self.lives[at].went - self.got[at]
        super()._complete(at)

    def _perform(self, command: Command) -> bool:
        taken = super()._perform(command)
        if taken and isinstance(command, Promoted):
            self._told("promote", self.at[command.job])
        return taken


def case(dice: random.Random) -> tuple[list[SimJob], int, OrderRules]:
    """A small crowded cluster. Ids ascend with submission, as the log numbers jobs; where a stop takes no time no job
    is promoted by the knob, because an agent would do so in the very second in which it stopped the job."""
    capacity = dice.choice((1, 2, 4, 8))
    widths = [width for width in (1, 1, 1, 2, 2, 3, 4, 8) if width <= capacity]
    comes = sorted(dice.randrange(60) for _ in range(dice.randrange(1, 40)))
    jobs = [SimJob(id, submit_s, dice.choice(widths), dice.randrange(1, 40)) for id, submit_s in enumerate(comes)]
    preempt_s = dice.choice((0, 1, 2, 5))
    rules = OrderRules(
        thresholds_gpu_s=tuple(sorted(dice.sample((4, 6, 10, 16, 24, 40, 80), dice.randrange(4)))),
        knob=dice.choice((None, (1, 1), (2, 1), (7, 2))) if preempt_s else None,
        starve_limit_s=dice.choice((None, None, 10, 20, 50)),
        gang_patience_s=dice.choice((None, 1, 3, 10, 30)),
        checkpoint_every_s=dice.choice((None, None, 0, 2, 7)),
        unsaved_stops=dice.choice((0, 1, 3)),
        preempt_s=preempt_s,
        restore_s=dice.choice((0, 1, 3)),
        narrow_first=dice.random() < 0.5,
    )
    return jobs, capacity, rules


def found(out: Outcome) -> list[object]:
    return [out.end_s, out.first_s, out.wait_s, out.preempted, out.promoted, out.held_gpu_s, out.restarts_gpu_s]


def accounted(live: ToldLive) -> None:
    """Assert that all GPU·s that jobs held are on their bills, each as what the simulation knows that it was: work that
    was kept, what a preemption lost and took, or reading a checkpoint."""
    for at, job in enumerate(live.jobs):
        bill = live.bills[at]
        bill.check()
        used, lost, restored = (job.gpus * each for each in (job.duration_s, live.lost_s[at], live.restored_s[at]))
        expected = GpuSeconds(held=used + lost + restored, used=used, preempted=lost, restarts=restored)
        assert bill == expected, f"{job}: {bill}, not {expected}"
    assert sum(bill.held for bill in live.bills.values()) == live.out.held_gpu_s


def agree(jobs: list[SimJob], capacity: int, rules: OrderRules, seed: str) -> int:
    """Assert that starts, stops, promotions and ends agree; returns how many were compared."""
    engine, live = Told(jobs, capacity, rules), ToldLive(jobs, capacity, rules)
    ours, theirs = engine.run(), live.run()
    live.queue.check()
    live.leader.check()
    assert sorted(engine.said) == sorted(live.said), f"{seed}: {capacity} GPUs, {rules}"
    assert found(ours) == found(theirs), f"{seed}: {capacity} GPUs, {rules}"
    accounted(live)
    return len(engine.said)


@pytest.mark.parametrize(
    ("seeds", "least"), [(range(40), 2000), pytest.param(range(150), 10_000, marks=pytest.mark.long)]
)
def test_the_engine_does_what_the_agents_scheduler_does_at_drawn_steps(seeds: range, least: int) -> None:
    steps = sum(agree(*case(random.Random(seed)), f"seed {seed}") for seed in seeds)
    assert steps >= least


@pytest.mark.parametrize(("trace", "gpus"), [("tiresias_60", 8), ("tiresias480r_seed2", 60)])
def test_both_do_the_same_on_a_published_trace_as_it_is_reported(trace: str, gpus: int) -> None:
    jobs = [job for job in read_trace(TRACES / f"{trace}.csv.gz").jobs if job.gpus <= gpus]
    rules = msgspec.structs.replace(COVEY, preempt_s=30, restore_s=30)
    assert agree(jobs, gpus, rules, trace) > len(jobs)

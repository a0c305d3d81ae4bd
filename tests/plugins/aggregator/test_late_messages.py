"""Aggregators that empty themselves while messages come late, twice and in any order: what is too late does no harm.

Links promise less disorder than this (`agent/rpc/rpc.py`: handled at most once); the machines do not rely on it.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.events import Heard, Send, SetTimer
from covey.core.ids import HostId, JobId
from plugins.aggregator.machine.consolidator import HandingOver
from plugins.aggregator.machine.cycle_ledger import RESERVE_S
from plugins.aggregator.machine.events import AskQuestion, QuestionAnswered, RackUpdated
from plugins.aggregator.machine.owner import Owner
from plugins.aggregator.machine.process_words import ProcessUp, Served, ServeJob
from plugins.aggregator.messages import (
    Accepted,
    AggregatorSettings,
    CycleReserved,
    Demand,
    Handover,
    Offer,
    ReleaseCycle,
    ReserveCycle,
    Retire,
)
from plugins.aggregator.policy import Candidate
from tests.families import examples
from tests.plugins.aggregator.play import G1, SECRET

COORDINATOR = HostId("coordinator")
DEMANDS = {JobId(f"j{at}"): Demand(100_000, 7_000 * at) for at in (1, 2, 3, 4)}


class Yard:
    """Three aggregators, and one coordinator that moves jobs as it is asked to, and sometimes of itself. A message
    arrives at once or much later, and may arrive again."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now_s = random.Random(seed), 0.0
        self.owners = {HostId(name): Owner(AggregatorSettings(scale_s=3.0), me=HostId(name)) for name in "xyz"}
        self.ahead_s = {name: self.rng.choice([0.0, 1.0, 1e6]) for name in self.owners}
        """The seconds by which the clock of each host is ahead."""
        self.epochs = dict.fromkeys(DEMANDS, G1)
        """The last epoch that the coordinator has used."""
        self.at: dict[JobId, tuple[HostId, int]] = {}
        """The host that accepted the job last, and its epoch."""
        self.calm = False
        self.emptied = self.late = 0
        """The number of attempts that came to their end; and of reservations, releases and offers that were too
        late."""
        self._due: list[tuple[float, Callable[[], None]]] = []
        for name in self.owners:
            self.dispatch(name, ProcessUp(f"{name}:1", {}))
        for job in DEMANDS:
            self.offer(job, self.rng.choice(list(self.owners)))

    def offer(self, job: JobId, to: HostId) -> None:
        self.epochs[job] += 1
        self.post(COORDINATOR, to, Offer(job, self.epochs[job], 1, SECRET, DEMANDS[job]))

    def run(self, seconds: int) -> None:
        for _ in range(seconds * 10):
            self.now_s += 0.1
            self.rng.shuffle(self._due)
            for what in [what for when_s, what in self._due if when_s <= self.now_s]:
                what()
            self._due = [(when_s, what) for when_s, what in self._due if when_s > self.now_s]
            if self.rng.random() < 0.1:
                self.second()

    def second(self) -> None:
        loads = [(name, owner.ledger.cycle, len(owner.jobs)) for name, owner in self.owners.items()]
        seen = tuple(Candidate(name, False, 0.0, jobs, 0.0, cycle.us, cycle.used_us) for name, cycle, jobs in loads)
        for name in self.owners:
            self.dispatch(name, RackUpdated(frozenset(), seen))
        if not self.calm and self.rng.random() < 0.1:
            self.offer(self.rng.choice(list(DEMANDS)), self.rng.choice(list(self.owners)))

    def delay_s(self) -> float:
        often = self.calm or self.rng.random() < 0.6
        return self.rng.uniform(0.0, 0.3 if often else 15.0)

    def post(self, sender: HostId, to: HostId, message: Any) -> None:
        for _ in range(1 if self.calm or self.rng.random() < 0.7 else 2):
            self._due.append((self.now_s + self.delay_s(), lambda: self.arrives(sender, to, message)))

    def arrives(self, sender: HostId, to: HostId, message: Any) -> None:
        if to == COORDINATOR:
            self.coordinator_hears(sender, message)
            return
        before = dict(self.owners[to].ledger.reserved)
        self.dispatch(to, Heard(sender, message))
        if isinstance(message, ReserveCycle | ReleaseCycle | CycleReserved | Offer) and not self.calm:
            self.late += self.is_late(sender, to, message)
            if isinstance(message, Offer) and message.job in before and message.epoch <= before[message.job].epoch:
                assert self.owners[to].ledger.reserved[message.job] == before[message.job], "an old offer took the room"

    def is_late(self, sender: HostId, to: HostId, message: Any) -> bool:
        if isinstance(message, Offer):
            return bool(message.epoch < self.epochs[message.job])
        emptier = self.owners[to if isinstance(message, CycleReserved) else sender].emptier
        return bool(message.attempt != emptier._attempt)

    def coordinator_hears(self, sender: HostId, message: Any) -> None:
        match message:
            case Accepted() if message.epoch == self.epochs[message.job]:
                former, self.at[message.job] = self.at.get(message.job), (sender, message.epoch)
                if former is not None and former[0] != sender:
                    self.post(COORDINATOR, former[0], Retire(message.job, former[1], message.epoch, "moved"))
            case Accepted() if self.at.get(message.job) != (sender, message.epoch):
                self.post(COORDINATOR, sender, Retire(message.job, message.epoch, self.epochs[message.job], "another"))
            case Handover() if self.at.get(message.job) == (sender, message.epoch) and message.to is not None:
                self.offer(message.job, message.to)
            case _:
                pass

    def dispatch(self, name: HostId, event: Any) -> None:
        owner, now_s = self.owners[name], self.now_s + self.ahead_s[name]
        before = owner.emptier.state
        for action in owner.handle(event, now_s):
            self.perform(name, action)
        owner.check()
        assert all(held.until_s <= now_s + RESERVE_S for held in owner.ledger.reserved.values())
        if isinstance(owner.emptier.state, HandingOver) and not isinstance(before, HandingOver):
            self.emptied += 1
            self.all_hold(name)

    def all_hold(self, name: HostId) -> None:
        """Check all or nothing: a host that hands over has room for each of its jobs at the new host, at that
        moment."""
        emptier = self.owners[name].emptier
        assert emptier.holding.keys() == self.owners[name].jobs.keys()
        for job, to in emptier.holding.items():
            other, here = self.owners[to], self.owners[name].jobs[job]
            held, there = other.ledger.reserved.get(job), other.jobs.get(job)
            came = there is not None and there.epoch > here.epoch
            holds = held is not None and (held.by, held.epoch, held.attempt) == (name, here.epoch, emptier._attempt)
            superseded = held is not None and held.epoch > here.epoch
            assert came or holds or superseded, f"{name} hands {job} to {to}, which holds {held}"

    def perform(self, name: HostId, action: Any) -> None:
        match action:
            case Send():
                message = msgspec.msgpack.decode(msgspec.msgpack.encode(action.message), type=type(action.message))
                self.post(name, action.to, message)
            case AskQuestion():
                answered = QuestionAnswered(action.to, action.question, self.owners[action.to].promised())
                self._due.append((self.now_s + self.rng.uniform(0.0, 0.3), lambda: self.dispatch(name, answered)))
            case SetTimer():
                self._due.append((self.now_s + action.after_s, lambda: self.dispatch(name, action.event)))
            case ServeJob():
                served = Served(action.held.job, action.held.epoch)
                self._due.append((self.now_s + self.rng.uniform(0.0, 0.3), lambda: self.dispatch(name, served)))
            case _:
                pass

    def settle(self) -> None:
        """Let messages arrive as they should from now on, and wait for those that are late."""
        self.calm = True
        self.run(20)
        for job in DEMANDS:
            if job not in self.at:
                self.offer(job, self.rng.choice(list(self.owners)))
        self.run(60)


def after(seeds: Sequence[int], seconds: int) -> tuple[int, int]:
    """The number of attempts that ended well and of messages that were late, over all seeds."""
    emptied = late = 0
    for seed in seeds:
        yard = Yard(seed)
        yard.run(seconds)
        yard.settle()
        emptied, late = emptied + yard.emptied, late + yard.late
        for job, (host, epoch) in yard.at.items():
            there = {name: owner.jobs[job].epoch for name, owner in yard.owners.items() if job in owner.jobs}
            assert there == {host: epoch}, f"seed {seed}: {job} is summed by {there}"
        assert not any(owner.ledger.reserved for owner in yard.owners.values()), f"seed {seed}"
    return emptied, late


@given(st.integers(0, 1 << 32))
@settings(max_examples=examples(30), deadline=None)
def test_whatever_comes_late_or_twice_all_hold_room_before_anything_is_handed_over(seed: int) -> None:
    """In the end each job is summed by one, and no room is held for nothing. Reference: §4.3.3.3, all or nothing."""
    after([seed], 120)


def test_such_letters_do_come_late_and_some_still_empty_themselves() -> None:
    emptied, late = after(range(12), 120)
    assert emptied > 20 and late > 100

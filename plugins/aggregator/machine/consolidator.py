"""An aggregator that sees itself the least loaded tries to empty itself into the others (AutoPS §4.3.3.3).

Where everything would go is decided by `policy.scale.emptied` on what the others say, and each of them checks again
before it holds room: all jobs find a place or none moves. Two never empty themselves into each other: an aggregator
that empties itself refuses to hold room, and one that holds room does not begin.
"""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from covey.core.events import LogEvent, Send, SetTimer
from covey.core.ids import HostId, JobId
from covey.core.transitions import CheckedState, StateTable
from plugins.aggregator import policy
from plugins.aggregator.machine.cycle_ledger import CycleLedger
from plugins.aggregator.machine.events import AskQuestion, QuestionAnswered, RackUpdated
from plugins.aggregator.machine.served_job import ServedJob
from plugins.aggregator.messages import (
    CycleHere,
    CycleNotReserved,
    CycleNow,
    CycleReserved,
    Demand,
    Handover,
    HoldMessage,
    ReleaseCycle,
    ReserveCycle,
)
from plugins.aggregator.policy import pools, scale
from plugins.aggregator.policy.assign import refusal_of
from plugins.aggregator.policy.cycle import FILL, Cycle, cycle_of
from plugins.aggregator.policy.measured import BARRED
from plugins.aggregator.policy.profile import profile_of, share_of
from plugins.aggregator.policy.scale import Emptied, OrphanedTensor

ASK_S = 1.5
"""Seconds that another aggregator may take to say what it promised."""
RESERVE_S = 4.0
"""Seconds that another aggregator may take to hold room."""
HAND_S = 12.0
"""Seconds that the coordinators may take to move their jobs; less than room is held for them."""
SOON_S = (1.0, 4.0)
"""Seconds from a change of promises to the next attempt: at least the first, and at most the second more, by a hash of
the name."""
PAUSE_S = 8.0
"""Seconds between two attempts."""


class EmptyingEnds(msgspec.Struct, frozen=True):
    """Timer: this attempt has taken long enough to find room, or to hand over."""

    attempt: int
    handing_over: bool


Action = Send | AskQuestion | LogEvent | SetTimer[EmptyingEnds]


class Resting(msgspec.Struct, frozen=True):
    """It does not try to empty itself."""


class Asking(msgspec.Struct, frozen=True):
    """The other aggregators are asked what they promised."""

    asked: Sequence[HostId]
    """Aggregators that have not answered."""
    said: Mapping[HostId, CycleNow]
    """Answers of the aggregators that take jobs."""


class Reserving(msgspec.Struct, frozen=True):
    """Others are asked to hold room, for each job one."""

    holding: Mapping[JobId, HostId]
    """Job -> host that was asked to hold room for it."""
    planned: Mapping[JobId, ServedJob]
    """Jobs that this host held when the others were asked."""
    missing: frozenset[JobId]
    """Jobs for which room has not been confirmed yet."""


class HandingOver(msgspec.Struct, frozen=True):
    """Others hold room for every job, and the coordinators move the jobs there."""

    holding: Mapping[JobId, HostId]
    """Job -> host that holds room for it."""


State = Resting | Asking | Reserving | HandingOver
TRANSITIONS: StateTable[State] = StateTable(
    "an aggregator that may empty itself",
    {
        Resting: {Asking: "an attempt is due, and by gossip it is the least loaded"},
        Asking: {
            Asking: "one answered or does not answer, others have not",
            Reserving: "all answered: it is the least loaded, and all its jobs fit elsewhere",
            Resting: "it is not the least loaded, or not all its jobs fit elsewhere; or its process is down",
        },
        Reserving: {
            Reserving: "one holds room, others have not answered",
            HandingOver: "all hold room, and its jobs are still the same",
            Resting: "one holds no room or does not answer, its jobs changed, or its process is down",
        },
        HandingOver: {Resting: "some time has passed, whatever became of the jobs; or its process is down"},
    },
)


class Consolidator:
    state = CheckedState(TRANSITIONS)

    def __init__(self, me: HostId, scale_s: float) -> None:
        self.me, self.scale_s = me, scale_s
        self.state = Resting()
        self.refused: dict[JobId, str] = {}
        """Job -> why no other aggregator took it at the last attempt."""
        self._jitter = hashlib.blake2b(me.encode(), digest_size=2).digest()[0] / 256
        self._attempt = 0
        """Time at which the last attempt began, microseconds; it is the attempt's number."""
        self._due_s: float | None = None
        self._tried_s = 0.0
        self._promises: frozenset[tuple[HostId, int, int]] | None = None
        """Promises of every aggregator, as gossip showed them last."""
        self._idle: frozenset[JobId] = frozenset()
        """Jobs held here that had not pushed anything yet at the last look."""

    @property
    def busy(self) -> bool:
        return not isinstance(self.state, Resting)

    @property
    def holding(self) -> Mapping[JobId, HostId]:
        """Job -> host that was asked by this attempt to hold room for it."""
        return self.state.holding if isinstance(self.state, Reserving | HandingOver) else {}

    def _soon(self, now_s: float) -> None:
        soon_s = max(now_s, self._tried_s + PAUSE_S) + SOON_S[0] + self._jitter * SOON_S[1]
        self._due_s = soon_s if self._due_s is None else min(self._due_s, soon_s)

    def look(
        self,
        rack: RackUpdated,
        held: Mapping[JobId, ServedJob],
        idle: frozenset[JobId],
        ledger: CycleLedger,
        now_s: float,
    ) -> Sequence[Action]:
        """Once a second, begin an attempt if one is due. `idle`: jobs held here that have not pushed anything yet."""
        self._idle = idle
        promises = frozenset((one.host, one.cycle_us, one.used_us) for one in rack.candidates)
        if self._due_s is None:
            self._due_s = now_s + self.scale_s * (0.5 + self._jitter)
        elif promises != self._promises:
            self._soon(now_s)
        self._promises = promises
        if self.busy or now_s < self._due_s:
            return ()
        self._due_s = now_s + self.scale_s
        others = self._others(rack)
        if not others or not self._may_go(held, ledger) or not self._is_least(ledger.cycle, others):
            return ()
        self._attempt, self._tried_s = int(now_s * 1e6), now_s
        hosts = [one.host for one in others]
        self.state = Asking(hosts, {})
        return [AskQuestion(host, CycleHere(), ASK_S) for host in hosts]

    def _may_go(self, held: Mapping[JobId, ServedJob], ledger: CycleLedger) -> bool:
        """May this host empty itself: it has something to move, holds no room for others, has no job on trial, and none
        that must stay?"""
        measured = all(one.demand is not None or job in self._idle for job, one in held.items())
        return bool(held) and not ledger.reserved and measured and not any(one.stays for one in held.values())

    def _others(self, rack: RackUpdated) -> list[policy.Candidate]:
        """Other aggregators of this host's pool that sum something."""
        usable = {one.host: one for one in rack.candidates if not one.suspect and one.host not in rack.gone}
        hosts = sorted({*usable, self.me})
        pool = next(pool for pool in pools.pools_of(hosts) if self.me in pool)
        return [usable[host] for host in pool if host != self.me and usable[host].jobs]

    def _is_least(self, cycle: Cycle, others: Sequence[policy.Candidate]) -> bool:
        loads = {one.host: one.cycle for one in others} | {self.me: cycle}
        return scale.least_loaded(loads, _by_name(loads)) == self.me

    def answered(
        self, event: QuestionAnswered, held: Mapping[JobId, ServedJob], ledger: CycleLedger
    ) -> Sequence[Action]:
        state = self.state
        if not isinstance(state, Asking) or event.host not in state.asked:
            return ()
        left, said = [host for host in state.asked if host != event.host], state.said
        if isinstance(event.answer, CycleNow) and event.answer.takes:
            said = {**said, event.host: event.answer}
        if not left:
            return self._plan(said, held, ledger)
        self.state = Asking(left, said)
        return ()

    def _plan(
        self, said: Mapping[HostId, CycleNow], held: Mapping[JobId, ServedJob], ledger: CycleLedger
    ) -> Sequence[Action]:
        cycles = {host: _cycle_said(now) for host, now in sorted(said.items())} | {self.me: ledger.cycle}
        if len(cycles) < 2 or not self._may_go(held, ledger) or scale.least_loaded(cycles, _by_name(cycles)) != self.me:
            return self._rest()
        found = self._emptied(said, held, cycles)
        if found is None:
            before, self.refused = self.refused, _refusals(said, held, cycles, self.me)
            notes = [(job, why) for job, why in self.refused.items() if job not in before]
            return [*(LogEvent(job, "its tensors have no room elsewhere", why) for job, why in notes), *self._rest()]
        holding = {work.job: to for work, to in found.moves}
        self.state, self.refused = Reserving(holding, dict(held), frozenset(holding)), {}
        asks = [
            Send(to, ReserveCycle(job, held[job].epoch, self._attempt, held[job].demand), RESERVE_S)
            for job, to in holding.items()
        ]
        return [*asks, SetTimer(RESERVE_S, EmptyingEnds(self._attempt, handing_over=False))]

    def _emptied(
        self, said: Mapping[HostId, CycleNow], held: Mapping[JobId, ServedJob], cycles: Mapping[HostId, Cycle]
    ) -> Emptied | None:
        """Host to which each job would go, where its demand fits best. A job on trial needs no room, but may be
        barred."""
        known = {job: one.demand for job, one in sorted(held.items()) if one.demand is not None}
        barred = {job: frozenset(host for host, now in said.items() if job in now.barred) for job in held}
        free_to = {job: sorted(said.keys() - barred[job]) for job in sorted(held.keys() - known.keys())}
        if not all(free_to.values()):
            return None
        works = [OrphanedTensor(job, "all", demand.work_us) for job, demand in known.items()]
        profiles = {job: profile_of(job, demand) for job, demand in known.items()}
        found = scale.emptied(self.me, works, cycles, profiles, barred)
        if found is None:
            return None
        rest = tuple((OrphanedTensor(job, "all", 0), hosts[0]) for job, hosts in free_to.items())
        return msgspec.structs.replace(found, moves=(*found.moves, *rest))

    def reserved(self, sender: HostId, message: CycleReserved, held: Mapping[JobId, ServedJob]) -> Sequence[Action]:
        if not self._is_asked(sender, message):
            return (Send(sender, ReleaseCycle(message.job, message.attempt)),)  # that attempt is over
        state = self.state
        if not isinstance(state, Reserving):
            return ()  # said twice
        missing = state.missing - {message.job}
        if missing:
            self.state = msgspec.structs.replace(state, missing=missing)
            return ()
        if held != state.planned:
            return self._give_up("its jobs have changed meanwhile")
        self.state = HandingOver(state.holding)
        why = f"{self.me} was the least loaded aggregator and handed over all its jobs"
        handed = [
            Send(held[job].coordinator, Handover(job, held[job].epoch, to, why))
            for job, to in sorted(state.holding.items())
        ]
        count = f"{len(handed)} jobs" if len(handed) != 1 else "1 job"
        return [
            LogEvent(self.me, "aggregator emptied", f"{count} to {', '.join(sorted(set(state.holding.values())))}"),
            *handed,
            SetTimer(HAND_S, EmptyingEnds(self._attempt, handing_over=True)),
        ]

    def not_reserved(
        self, sender: HostId, message: CycleNotReserved, held: Mapping[JobId, ServedJob]
    ) -> Sequence[Action]:
        if not isinstance(self.state, Reserving) or not self._is_asked(sender, message):
            return ()
        if message.job in held:
            self.refused[message.job] = f"{sender}: {message.reason}"
        return self._give_up(f"{sender} has no room for {message.job}: {message.reason}")

    def _is_asked(self, sender: HostId, message: HoldMessage) -> bool:
        """Did this attempt ask the sender to hold room for the job?"""
        return (message.attempt, self.holding.get(message.job)) == (self._attempt, sender)

    def ended(self, event: EmptyingEnds) -> Sequence[Action]:
        match self.state:
            case Reserving() if (event.attempt, event.handing_over) == (self._attempt, False):
                return self._give_up("not all hosts answered")
            case HandingOver() if (event.attempt, event.handing_over) == (self._attempt, True):
                return self._rest()
            case _:
                return ()

    def stop(self, why: str) -> Sequence[Action]:
        """Stop the attempt: the process is down and its jobs are dropped, or all of them go to other hosts anyway."""
        return self._give_up(why) if isinstance(self.state, Reserving) else self._rest()

    def _give_up(self, why: str) -> Sequence[Action]:
        """Give the attempt up: no job moves, and room held for some of them is released."""
        released = [Send(to, ReleaseCycle(job, self._attempt)) for job, to in sorted(self.holding.items())]
        self._rest()
        return [*released, LogEvent(self.me, "aggregator not emptied", why)]

    def _rest(self) -> Sequence[Action]:
        if self.busy:
            self.state = Resting()
        return ()


def _by_name(hosts: Mapping[HostId, Cycle]) -> dict[HostId, int]:
    """Rank hosts by name to break ties: all aggregators choose the last of equals."""
    return {host: -at for at, host in enumerate(sorted(hosts))}


def _cycle_said(said: CycleNow) -> Cycle:
    shares = {one.job: share_of(one.demand) for one in said.jobs}
    return cycle_of(shares, said.lanes, said.cycles_max, said.cycle_us, FILL)


def _refusals(
    said: Mapping[HostId, CycleNow], held: Mapping[JobId, ServedJob], cycles: Mapping[HostId, Cycle], me: HostId
) -> dict[JobId, str]:
    """Job -> why it fits nowhere, as the other aggregators would have said it."""
    others = sorted((cycle.load, host) for host, cycle in cycles.items() if host != me)
    found: dict[JobId, str] = {}
    for job, one in held.items():
        for _, host in others:
            why = _refusal(said[host], cycles[host], job, one.demand)
            if why:
                found[job] = f"{host}: {why}"
    return found


def _refusal(said: CycleNow, cycle: Cycle, job: JobId, demand: Demand | None) -> str:
    if job in said.barred:
        return BARRED
    return refusal_of(cycle, job, share_of(demand)) if demand is not None else ""

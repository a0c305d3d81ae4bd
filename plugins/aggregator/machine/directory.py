"""The aggregator of each job, for the ranks on this host. The highest epoch heard counts, and is kept on disk: ranks
outlive their agent, and a rank that asks again must never be sent back to an earlier aggregator.
"""

from collections.abc import Collection, Sequence
from typing import assert_never

import msgspec

from covey.core.events import Heard, Send, Undelivered
from covey.core.ids import HostId, JobId
from covey.tensors.numbers.tensor_wire import grant_of
from plugins.aggregator import policy
from plugins.aggregator.machine.events import GangPlaced, Keep, RackUpdated, TellRanks, Unplaced
from plugins.aggregator.messages import Assigned, Lost, OwnerWanted, ToDirectory
from plugins.facts import coordinator_place

ASK_S = 2.0
"""Seconds between two questions to the coordinator about a job without an aggregator."""

KNOWN_MAX = 1024
"""Most assignments remembered of jobs that are not placed now: an agent that is down does not hear of a job's end."""


class RankJoined(msgspec.Struct, frozen=True):
    """A rank of the job called `covey.join()` here."""

    job: JobId


class RankLost(msgspec.Struct, frozen=True):
    """A rank here cannot use the aggregator of `epoch`."""

    job: JobId
    epoch: int
    why: str


Event = GangPlaced | Unplaced | RackUpdated | Heard | RankJoined | RankLost | Undelivered
Action = Send | Keep | TellRanks


class Directory:
    takes = ToDirectory
    """Types of messages that may be heard."""

    def __init__(self, me: HostId, known: Sequence[Assigned] = ()) -> None:
        self.me = me
        self.known: dict[JobId, Assigned] = {one.job: one for one in known}
        self._placed: dict[JobId, GangPlaced] = {}
        self._gone: frozenset[HostId] = frozenset()
        self._asked_s: dict[JobId, float] = {}

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        match event:
            case GangPlaced():
                return self._place(event, now_s)
            case Unplaced():
                return self._unplace(event)
            case RackUpdated():
                back, self._gone = self._gone - event.gone, event.gone
                return [*self._meet(back, now_s), *self._ask_again(now_s)]
            case Heard():
                return self._heard(event.sender, event.message, now_s)
            case RankJoined():
                return self._joined(event.job, now_s)
            case RankLost():
                return self._lost(event)
            case Undelivered():
                return self._undelivered(event, now_s)
            case _:
                assert_never(event)

    def check(self) -> None:
        for job, placed in self._placed.items():
            known = self.known.get(job)
            assert known is None or grant_of(known.epoch) >= placed.grant

    def grant(self, job: JobId) -> int:
        """Grant of the present run of a job; 0 when it is not placed."""
        placed = self._placed.get(job)
        return placed.grant if placed is not None else 0

    def current(self, job: JobId) -> Assigned | None:
        """The assignment that ranks of the present run may be told."""
        known, placed = self.known.get(job), self._placed.get(job)
        if known is None or placed is None or not policy.of_run(known.epoch, placed.grant):
            return None
        return known

    def _place(self, event: GangPlaced, now_s: float) -> Sequence[Action]:
        placed = self._placed.get(event.job)
        if placed is not None and (placed.grant > event.grant or placed == event):
            return ()
        if placed is not None and placed.grant == event.grant:
            return self._place_anew(event, now_s)
        self._placed[event.job] = event
        known = self.known.get(event.job)
        if known is not None and grant_of(known.epoch) < event.grant:
            del self.known[event.job]
        if not self._is_here(event):
            return ()
        current = self.current(event.job)
        # From disk: ranks may have joined before the log told this host of their run.
        told = (TellRanks(current),) if current is not None else ()
        return (*told, *self._ask(event, now_s))

    def _place_anew(self, event: GangPlaced, now_s: float) -> Sequence[Action]:
        """Some ranks of the gang continue on other hosts, perhaps here: ask the coordinator if needed."""
        before = self._placed[event.job]
        came = self._is_here(event) and not self._is_here(before)
        led = coordinator_place(before.places, self._gone)
        leads = coordinator_place(event.places, self._gone)
        # what the one before it says until it knows that, the new one has not heard
        follows = self._is_here(event) and led is not None and leads is not None and led.host != leads.host
        self._placed[event.job] = event
        return self._ask(event, now_s) if came or follows else ()

    def _unplace(self, event: Unplaced) -> Sequence[Action]:
        placed = self._placed.get(event.job)
        if placed is not None and placed.grant <= event.grant:
            del self._placed[event.job]
            self._asked_s.pop(event.job, None)
        known = self.known.get(event.job)
        if known is None or grant_of(known.epoch) > event.grant:
            return ()
        del self.known[event.job]
        return (Keep(),)

    def _heard(self, sender: HostId, message: ToDirectory, now_s: float) -> Sequence[Action]:
        match message:
            case Assigned():
                return self._assigned(sender, message, now_s)
            case OwnerWanted() | Lost():
                return self._compare(sender, message)
            case _:
                assert_never(message)

    def _compare(self, sender: HostId, message: OwnerWanted | Lost) -> Sequence[Action]:
        """Tell the side that knows the lower epoch: the sender hears it from us, or we ask the sender, which knows the
        higher."""
        known, placed = self.known.get(message.job), self._placed.get(message.job)
        mine = 0 if known is None else known.epoch
        if known is not None and mine > message.epoch:
            return (Send(sender, known),)
        newer = placed is not None and message.epoch > mine and policy.of_run(message.epoch, placed.grant)
        return (Send(sender, OwnerWanted(message.job, mine), ASK_S),) if newer else ()

    def _assigned(self, sender: HostId, message: Assigned, now_s: float) -> Sequence[Action]:
        known, placed = self.known.get(message.job), self._placed.get(message.job)
        if known is not None and known.epoch >= message.epoch:
            return (Send(sender, known),) if known.epoch > message.epoch and sender != self.me else ()
        if placed is not None and grant_of(message.epoch) < placed.grant:
            return ()
        self.known[message.job] = message
        for job in [job for job in self.known if job not in self._placed][: max(0, len(self.known) - KNOWN_MAX)]:
            del self.known[job]
        return (Keep(), TellRanks(message), *self._pass_on(sender, placed, now_s))

    def _pass_on(self, sender: HostId, placed: GangPlaced | None, now_s: float) -> Sequence[Action]:
        """Tell the job's coordinator of an assignment that came from another host: that host no longer coordinates the
        job, or not yet, as far as this host knows. Otherwise the coordinator would keep the earlier owner, and so would
        ranks that only hear of that one."""
        place = coordinator_place(placed.places, self._gone) if placed is not None else None
        if placed is None or place is None or sender in (place.host, self.me) or not self._is_here(placed):
            return ()
        return self._ask(placed, now_s)

    def _joined(self, job: JobId, now_s: float) -> Sequence[Action]:
        known, placed = self.current(job), self._placed.get(job)
        if known is not None:
            return (TellRanks(known),)
        return self._ask(placed, now_s) if placed is not None else ()

    def _lost(self, event: RankLost) -> Sequence[Action]:
        known, placed = self.current(event.job), self._placed.get(event.job)
        if known is not None and known.epoch > event.epoch:
            return (TellRanks(known),)
        place = coordinator_place(placed.places, self._gone) if placed is not None else None
        if place is None:
            return ()
        return (Send(place.host, Lost(event.job, event.epoch, event.why[:300]), ASK_S),)

    def _ask_again(self, now_s: float) -> Sequence[Action]:
        actions: list[Action] = []
        for job, placed in sorted(self._placed.items()):
            if self.current(job) is None and self._is_here(placed) and now_s - self._asked_s.get(job, 0.0) >= ASK_S:
                actions += self._ask(placed, now_s)
        return actions

    def _meet(self, back: Collection[HostId], now_s: float) -> Sequence[Action]:
        """The coordinator is back. If it only stood still, it does not know which aggregator its deputy chose. Each
        host of the job asks it, so that it learns that; the deputy itself may have begun anew."""
        actions: list[Action] = []
        for job, placed in sorted(self._placed.items()):
            place = coordinator_place(placed.places, self._gone)
            if place is not None and place.host in back and self.current(job) is not None and self._is_here(placed):
                actions += self._ask(placed, now_s)
        return actions

    def _undelivered(self, event: Undelivered, now_s: float) -> Sequence[Action]:
        """Repeat the question of a host that knows an owner, and nothing else: ranks complain again by themselves, and
        a host that knows no owner asks again every `ASK_S`."""
        if not isinstance(event.message, OwnerWanted) or self.current(event.message.job) is None:
            return ()
        placed = self._placed[event.message.job]
        return self._ask(placed, now_s) if self._is_here(placed) and event.to not in self._gone else ()

    def _ask(self, placed: GangPlaced, now_s: float) -> Sequence[Action]:
        place = coordinator_place(placed.places, self._gone)
        if place is None or place.host == self.me:
            return ()
        self._asked_s[placed.job] = now_s
        known = self.current(placed.job)
        return (Send(place.host, OwnerWanted(placed.job, known.epoch if known else 0), ASK_S),)

    def _is_here(self, placed: GangPlaced) -> bool:
        return any(place.host == self.me for place in placed.places)

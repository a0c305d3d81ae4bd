"""The tables of jobs that ranks on this host own: a rank of the job sums them, and no `aggd` (*direct exchange*).

A direct offer is accepted only after it is on disk and the rank serves it. It costs this host nothing that it promises
to others: the rank belongs to the job, so no offer is declined for load, and no cycle is promised. The life of such a
table is that of the rank's process: when that ends, is silent or no longer knows the table, the coordinator is told at
once, and finds the next owner.

At the start of a job the coordinator's ranks may be earlier than those of the table's host, and no round can be
complete before all of them are there: an offer to the host that the table is to stay on waits for a first rank.

An agent that starts again knows the tables from its disk, and the rank's process has gone on: once it has joined again
and says that it sums the table, the table stays as it is.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from covey.core.events import Heard, LogEvent, Send, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from covey.tensors.numbers.blocks import job_of
from covey.tensors.numbers.tensor_wire import epoch_text, grant_of
from plugins.aggregator.machine.events import GangPlaced, Keep, RackUpdated, Unplaced
from plugins.aggregator.machine.process_words import ForgetJob
from plugins.aggregator.messages import (
    Accepted,
    AggregatorSettings,
    AssignmentDropped,
    Coordinates,
    Declined,
    Handover,
    MoveTensors,
    Offer,
    Retire,
)

WAIT_S = 2.5
"""Seconds that an offer to the host that the table is to stay on waits for a rank; its coordinator waits 4 s."""
BACK_S = 10.0
"""Seconds after a start of this agent within which a rank that owns tables has to be back."""
OVER_MAX = 4096
"""Jobs whose end is remembered, so that a late offer is refused."""
RUN_OVER = "that run of the job has ended"
NO_RANKS = "no rank there has tensors yet, or any more"
NONE_CAN = "no rank there can own its tables"


class DirectTable(msgspec.Struct, frozen=True):
    """One table that a rank on this host owns; kept on disk."""

    job: JobId
    epoch: int
    workers: int
    secret: bytes
    coordinator: HostId
    """Host that offered the table, or took over its coordination; it is told when the table is dropped."""
    rank: int
    size_bytes: int = 0
    """Bytes of its tensors, as its coordinator knew when it offered it."""


class RanksMayOwn(msgspec.Struct, frozen=True):
    """The ranks of one run on this host that can own its tables, all of them."""

    job: JobId
    grant: int
    processes: Mapping[int, int]
    """Rank -> number of its process, which the service gave it."""
    others: bool = False
    """There are ranks that cannot own tables."""


class RankSaid(msgspec.Struct, frozen=True):
    """A rank's process says which tables it sums."""

    job: JobId
    grant: int
    rank: int
    process: int
    address: str
    serves: Mapping[JobId, int]
    """Table -> epoch."""
    first: bool = False
    """This agent has heard nothing from the process before."""


class RankServes(msgspec.Struct, frozen=True):
    """The process serves this offer, which is on disk too."""

    job: JobId
    epoch: int
    process: int
    address: str


class RankFailed(msgspec.Struct, frozen=True):
    """The process has ended, is silent, or did not serve what it was told to; it gets no table until it says what it
    sums, or for good if it `cannot`."""

    process: int
    why: str
    cannot: bool = False


class RankDone(msgspec.Struct, frozen=True):
    """All ranks of the process's job are done: what it served needs no owner any more."""

    process: int


class WaitOver(msgspec.Struct, frozen=True):
    """Timer: this offer has waited long enough for a rank."""

    job: JobId
    epoch: int


class ServeByRank(msgspec.Struct, frozen=True):
    """Action: write this plugin's state to disk, then have the process serve the table, then hand back `RankServes` or
    `RankFailed`."""

    table: DirectTable
    process: int


class ForgetByRank(msgspec.Struct, frozen=True):
    """Action: let the process stop serving the table."""

    process: int
    order: ForgetJob


class WaitingOffer(msgspec.Struct, frozen=True):
    """An offer that waits for a rank."""

    sender: HostId
    offer: Offer


Event = (
    Heard | RanksMayOwn | RankSaid | RankServes | RankFailed | RankDone | WaitOver | GangPlaced | Unplaced | RackUpdated
    | Undelivered
)  # fmt: skip
Action = Send | LogEvent | SetTimer[WaitOver] | Keep | ServeByRank | ForgetByRank
ToDirectTables = Offer | Retire | Coordinates | MoveTensors


class DirectTables:
    takes = ToDirectTables
    """Types of messages that may be heard."""

    def __init__(self, settings: AggregatorSettings, me: HostId, held: Sequence[DirectTable] = ()) -> None:
        self.settings, self.me = settings, me
        self.tables: dict[JobId, DirectTable] = {one.job: one for one in held}
        self._missing = set(self.tables)
        """Tables on disk whose rank has not joined again since this agent started."""
        self._since_s: float | None = None
        self._by: dict[JobId, int] = {}
        """Table -> process that serves it, or was told to."""
        self._address: dict[JobId, str] = {}
        """Table -> address at which its process serves it."""
        self._can: dict[tuple[JobId, int], RanksMayOwn] = {}
        """Job and grant -> ranks that can own its tables."""
        self._failed: dict[int, bool] = {}
        """Process that failed -> whether it is to get no table any more."""
        self._waiting: dict[JobId, WaitingOffer] = {}
        self._over: dict[JobId, int] = {}
        """Table -> grant that is over."""

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        match event:
            case Heard():
                return self._heard(event.sender, event.message)
            case RanksMayOwn():
                return self._may_own(event)
            case RankSaid():
                return self._said(event)
            case RankServes():
                return self._served(event)
            case RankFailed():
                return self._rank_failed(event)
            case RankDone():
                return self._done(event)
            case WaitOver():
                return self._waited(event)
            case GangPlaced():
                return self._runs_over(event.job, event.grant - 1, event.grant << 32, "the job runs again")
            case Unplaced():
                return self._runs_over(event.job, event.grant, 0, "the job's run is over")
            case RackUpdated():
                return self._look(now_s)
            case Undelivered():
                message = event.message
                again = isinstance(message, Accepted) and self.serves(message.job, message.epoch)
                return (Send(event.to, message),) if again else ()
            case _:
                assert_never(event)

    def check(self) -> None:
        assert self._missing <= self.tables.keys() and not self._missing & self._by.keys()
        assert self._by.keys() | self._missing == self.tables.keys()
        assert self._address.keys() <= self._by.keys()
        assert all(grant_of(one.epoch) > self._over.get(one.job, 0) for one in self.tables.values())
        assert not any(self._is_over(job, waiting.offer.epoch) for job, waiting in self._waiting.items())

    # ---- what others may ask ----

    def serves(self, job: JobId, epoch: int) -> bool:
        held = self.tables.get(job)
        return held is not None and held.epoch == epoch and job in self._address

    def process_of(self, job: JobId) -> int | None:
        """Number of the process that serves the table; None: none does."""
        return self._by[job] if job in self._address else None

    @property
    def processes(self) -> frozenset[int]:
        """The processes that serve tables, or were told to."""
        return frozenset(self._by.values())

    @property
    def missing(self) -> frozenset[tuple[JobId, int, int]]:
        """Job, grant and rank of processes that have to say whether they serve what the disk says."""
        return frozenset(
            (job_of(job), grant_of(self.tables[job].epoch), self.tables[job].rank) for job in self._missing
        )

    # ---- messages ----

    def _heard(self, sender: HostId, message: ToDirectTables) -> Sequence[Action]:
        match message:
            case Offer():
                return self._offered(sender, message) if message.direct else ()
            case Retire():
                return self._retired(message)
            case Coordinates():
                held = self._held(message.job, message.epoch)
                if held is None or held.coordinator == sender:
                    return ()
                self.tables[held.job] = msgspec.structs.replace(held, coordinator=sender)
                return (Keep(),)
            case MoveTensors():
                held = self._held(message.job, message.epoch)
                if held is None or message.to == self.me:
                    return ()
                why = f"moved by request to {message.to}"
                return (Send(held.coordinator, Handover(held.job, held.epoch, message.to, why, wished=True)),)
            case _:
                assert_never(message)

    def _held(self, job: JobId, epoch: int) -> DirectTable | None:
        held = self.tables.get(job)
        return held if held is not None and held.epoch == epoch else None

    def _offered(self, sender: HostId, offer: Offer) -> Sequence[Action]:
        known, waiting = self.tables.get(offer.job), self._waiting.get(offer.job)
        if known is not None and (known.epoch, known.secret, known.coordinator) == (offer.epoch, offer.secret, sender):
            address = self._address.get(offer.job)
            return (Send(sender, Accepted(offer.job, offer.epoch, address)),) if address else ()
        if waiting is not None and waiting == WaitingOffer(sender, offer):
            return ()  # said twice
        above = max(known.epoch if known is not None else 0, waiting.offer.epoch if waiting is not None else 0)
        refusal = self._refusal(offer, above)
        if refusal:
            return (Send(sender, Declined(offer.job, offer.epoch, refusal, above)),)
        self._waiting[offer.job] = WaitingOffer(sender, offer)
        if self._can.get(_run_of(offer)) is None and offer.stays:
            return (SetTimer(WAIT_S, WaitOver(offer.job, offer.epoch)),)
        return self._try(offer.job)

    def _refusal(self, offer: Offer, above: int) -> str:
        if self.settings.direct == "never":
            return 'direct = "never" is set in [aggregator] there'
        if self._is_over(offer.job, offer.epoch):
            return RUN_OVER
        return f"it knows epoch {epoch_text(above)}" if above >= offer.epoch else ""

    def _try(self, job: JobId) -> Sequence[Action]:
        """Give a table that is on offer to the lowest rank that can own it; decline the offer where there is none."""
        waiting = self._waiting[job]
        found = self._able(_run_of(waiting.offer))
        if not found:
            return self._turned_down(job)
        del self._waiting[job]
        known, offer, rank = self.tables.get(job), waiting.offer, min(found)
        ends = self._forget(known, offer.epoch) if known is not None and self._by.get(job) != found[rank] else ()
        self._let_go(job)
        what = offer.job, offer.epoch, offer.workers, offer.secret, waiting.sender
        held = self.tables[job] = DirectTable(*what, rank, offer.size_bytes)
        self._by[job] = found[rank]
        return [*ends, ServeByRank(held, found[rank])]

    def _able(self, run: tuple[JobId, int]) -> dict[int, int]:
        known = self._can.get(run)
        each = known.processes.items() if known is not None else ()
        return {rank: process for rank, process in each if process not in self._failed}

    def _waited(self, event: WaitOver) -> Sequence[Action]:
        waiting = self._waiting.get(event.job)
        return self._try(event.job) if waiting is not None and waiting.offer.epoch == event.epoch else ()

    def _turned_down(self, job: JobId) -> Sequence[Action]:
        waiting = self._waiting.pop(job)
        known = self._can.get(_run_of(waiting.offer))
        some = known is not None and (known.others or bool(known.processes))
        why, epoch = NONE_CAN if some else NO_RANKS, waiting.offer.epoch
        return (Send(waiting.sender, Declined(job, epoch, why, epoch, no_ranks=not some)),)

    def _retired(self, message: Retire) -> Sequence[Action]:
        waiting = self._waiting.get(message.job)
        if waiting is not None and waiting.offer.epoch <= message.epoch:
            del self._waiting[message.job]
        held = self.tables.get(message.job)
        if held is None or held.epoch > message.epoch:
            return ()
        ends = self._forget(held, message.instead, message)
        self._remove(held.job)
        return [*ends, Keep(), LogEvent(held.job, "tensors no longer summed here", message.reason)]

    def _forget(self, held: DirectTable, instead: int, message: Retire | None = None) -> Sequence[Action]:
        """Order to the process that serves the table, if there is one."""
        process = self._by.get(held.job)
        if process is None:
            return ()
        how = (message.handed_over, message.to) if message is not None else ()
        return (ForgetByRank(process, ForgetJob(held.job, held.epoch, instead, *how)),)

    # ---- ranks ----

    def _may_own(self, event: RanksMayOwn) -> Sequence[Action]:
        run = event.job, event.grant
        self._can[run] = event
        live = {process for each in self._can.values() for process in each.processes.values()}
        self._failed = {process: cannot for process, cannot in self._failed.items() if process in live}
        actions: list[Action] = []
        for job in [job for job, waiting in self._waiting.items() if _run_of(waiting.offer) == run]:
            actions += self._try(job)
        return actions

    def _said(self, event: RankSaid) -> Sequence[Action]:
        """Compare what a process sums with what it is to sum."""
        if not self._failed.get(event.process, True):
            del self._failed[event.process]
        actions: list[Action] = []
        for job, held in sorted(self.tables.items()):
            there = event.serves.get(job) == held.epoch and bool(event.address)
            if job in self._missing and (job_of(job), grant_of(held.epoch), held.rank) == _rank_of(event):
                if not there:
                    actions += self._drop([job], f"rank {held.rank} is back, and does not know its table")
                    continue
                self._missing.discard(job)
                self._by[job], self._address[job] = event.process, event.address
            elif self.process_of(job) == event.process and not (there and event.address == self._address[job]):
                actions += self._drop([job], f"rank {held.rank} no longer sums it")
        if event.first:
            strange = {job: epoch for job, epoch in event.serves.items() if self._held(job, epoch) is None}
            actions += [ForgetByRank(event.process, ForgetJob(job, epoch, 0)) for job, epoch in sorted(strange.items())]
        return actions

    def _served(self, event: RankServes) -> Sequence[Action]:
        held = self._held(event.job, event.epoch)
        if held is None or self._by.get(event.job) != event.process:
            return ()
        self._address[held.job] = event.address
        said = f"by rank {held.rank}, epoch {epoch_text(held.epoch)}, offered by {held.coordinator}"
        return (
            Send(held.coordinator, Accepted(held.job, held.epoch, event.address)),
            LogEvent(held.job, "tensors summed here", said),
        )

    def _rank_failed(self, event: RankFailed) -> Sequence[Action]:
        self._failed[event.process] = event.cannot or self._failed.get(event.process, False)
        jobs = [job for job, process in sorted(self._by.items()) if process == event.process]
        ends = [order for job in jobs for order in self._forget(self.tables[job], 0)]  # obeyed when it is back
        return [*ends, *self._drop(jobs, event.why)]

    def _done(self, event: RankDone) -> Sequence[Action]:
        """Let go of the tables without a word to their coordinators: nobody pushes to them any more."""
        jobs = [job for job, process in sorted(self._by.items()) if process == event.process and job in self._address]
        for job in jobs:
            self._remove(job)
        why = "all ranks of the job are done"
        return [*(LogEvent(job, "tensors no longer summed here", why) for job in jobs), Keep()] if jobs else ()

    def _drop(self, jobs: Sequence[JobId], why: str) -> Sequence[Action]:
        """Tell coordinators that tables are no longer summed here; one that is not summed yet is declined."""
        actions: list[Action] = []
        for job in jobs:
            held, accepted = self.tables[job], job in self._address or job in self._missing
            self._remove(job)
            dropped = AssignmentDropped(job, held.epoch, why[:300])
            declined = Declined(job, held.epoch, why[:300], held.epoch)
            actions.append(Send(held.coordinator, dropped if accepted else declined))
            actions.append(LogEvent(job, "tensors dropped", why))
        return [*actions, Keep()] if jobs else ()

    # ---- time, and the log ----

    def _look(self, now_s: float) -> Sequence[Action]:
        self._since_s = now_s if self._since_s is None else self._since_s
        if not self._missing or now_s - self._since_s <= BACK_S:
            return ()
        why = f"its rank did not come back within {BACK_S:g} s of the start of the agent of {self.me}"
        return self._drop(sorted(self._missing), why)

    def _is_over(self, job: JobId, epoch: int) -> bool:
        return grant_of(epoch) <= self._over.get(job, 0)

    def _runs_over(self, job: JobId, grant: int, instead: int, why: str) -> Sequence[Action]:
        if grant > self._over.get(job, 0):
            self._over[job] = grant
            while len(self._over) > OVER_MAX:
                del self._over[next(iter(self._over))]
        for run in [run for run in self._can if run[0] == job_of(job) and run[1] <= grant]:
            del self._can[run]
        waiting = self._waiting.get(job)
        if waiting is not None and self._is_over(job, waiting.offer.epoch):
            del self._waiting[job]
        held = self.tables.get(job)
        if held is None or grant_of(held.epoch) > grant:
            return ()
        return self._retired(Retire(job, held.epoch, instead, why))

    def _let_go(self, job: JobId) -> None:
        self._by.pop(job, None)
        self._address.pop(job, None)
        self._missing.discard(job)

    def _remove(self, job: JobId) -> None:
        del self.tables[job]
        self._let_go(job)


def _run_of(offer: Offer) -> tuple[JobId, int]:
    return job_of(offer.job), grant_of(offer.epoch)


def _rank_of(event: RankSaid) -> tuple[JobId, int, int]:
    return event.job, event.grant, event.rank

"""The jobs whose tensors this host sums: taken on or refused when offered, dropped when the process that sums dies.

An offer is accepted only after it is on disk and the process serves it, so what was accepted survives a restart of the
agent. It does not survive a restart of the process: the sums are gone, and the job's home is told at once, which offers
it again, perhaps here, under a higher epoch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import msgspec

from covey.core import Heard, HostId, JobId, Note, Send, Undelivered
from covey.tensorwire import epoch_text, grant_of
from plugins.aggregator import policy
from plugins.aggregator.machine.events import Keep, Placed, Unplaced
from plugins.aggregator.messages import Accepted, Declined, Dropped, Offer, Retire, Settings

OVER_MAX = 4096
"""Jobs whose end is remembered, so that a late offer is refused."""


class Held(msgspec.Struct, frozen=True):
    """One job summed here."""

    job: JobId
    epoch: int
    workers: int
    secret: bytes
    home: HostId
    """Who offered it, and is told when it is dropped."""


class ProcessUp(msgspec.Struct, frozen=True):
    """The process answers: at `address`, serving these jobs under these epochs."""

    address: str
    serves: Mapping[JobId, int]


class ProcessDown(msgspec.Struct, frozen=True):
    why: str


class LoadChanged(msgspec.Struct, frozen=True):
    load: float


class Served(msgspec.Struct, frozen=True):
    """The process serves this offer; it is on disk too."""

    job: JobId
    epoch: int


class ServeJob(msgspec.Struct, frozen=True):
    """Action: write this room's state to disk, then have the process serve the job, then hand back `Served`."""

    held: Held


class ForgetJob(msgspec.Struct, frozen=True):
    """Action: the process serves the job no more; its workers are told `instead`."""

    job: JobId
    epoch: int
    instead: int


Event = Heard | ProcessUp | ProcessDown | LoadChanged | Served | Placed | Unplaced | Undelivered
Action = Send | Note | Keep | ServeJob | ForgetJob


class Owner:
    def __init__(self, settings: Settings, held: Sequence[Held] = ()) -> None:
        self.settings = settings
        self.jobs: dict[JobId, Held] = {one.job: one for one in held}
        self.address = ""
        """Where the process listens; empty while it is down."""
        self.load = 0.0
        self._serving: set[tuple[JobId, int]] = set()
        self._over: dict[JobId, int] = {}
        """Job -> grant that is over."""

    def serves(self, job: JobId, epoch: int) -> bool:
        return (job, epoch) in self._serving and bool(self.address)

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        match event:
            case Heard():
                return self._heard(event.sender, event.message)
            case ProcessUp():
                return self._up(event)
            case ProcessDown():
                return self._down(event.why)
            case LoadChanged():
                self.load = event.load
                return ()
            case Served():
                return self._served(event)
            case Placed():
                instead = event.grant << 32
                return self._runs_over(event.job, event.grant - 1, instead, "the job was taken back and runs again")
            case Unplaced():
                return self._runs_over(event.job, event.grant, 0, "the job's run is over")
            case Undelivered():
                return ()  # a home that is away asks when it is back; so does the one after it
            case _:
                assert_never(event)

    def check(self) -> None:
        assert self._serving <= {(one.job, one.epoch) for one in self.jobs.values()}
        assert self.address or not self._serving
        assert all(grant_of(one.epoch) > self._over.get(one.job, 0) for one in self.jobs.values())

    def _heard(self, sender: HostId, message: Any) -> Sequence[Action]:
        match message:
            case Offer():
                return self._offered(sender, message)
            case Retire():
                return self._retired(message)
            case _:
                return ()

    def _offered(self, sender: HostId, offer: Offer) -> Sequence[Action]:
        known = self.jobs.get(offer.job)
        held = Held(offer.job, offer.epoch, offer.workers, offer.secret, sender)
        if known == held:  # said twice
            return (Send(sender, Accepted(offer.job, offer.epoch, self.address)),) if self._is_served(held) else ()
        refusal = self._refusal(known, offer)
        if refusal:
            return (Send(sender, Declined(offer.job, offer.epoch, refusal, known.epoch if known else 0)),)
        if known is not None:
            self._serving.discard((known.job, known.epoch))
        self.jobs[offer.job] = held
        return (ServeJob(held),)

    def _refusal(self, known: Held | None, offer: Offer) -> str:
        if not self.settings.serve:
            return "it does not sum tensors (serve = false)"
        if not self.address:
            return "its process is not up"
        if grant_of(offer.epoch) <= self._over.get(offer.job, 0):
            return "that run of the job is over"
        if known is not None:
            return f"it knows epoch {epoch_text(known.epoch)}" if known.epoch >= offer.epoch else ""
        return policy.refusal(len(self.jobs), self.settings.jobs_max, self.load, self.settings.load_max)

    def _is_served(self, held: Held) -> bool:
        return self.serves(held.job, held.epoch)

    def _served(self, event: Served) -> Sequence[Action]:
        held = self.jobs.get(event.job)
        if held is None or held.epoch != event.epoch or not self.address:
            return ()
        self._serving.add((event.job, event.epoch))
        return (
            Send(held.home, Accepted(held.job, held.epoch, self.address)),
            Note(held.job, "tensors summed here", f"epoch {epoch_text(held.epoch)}, offered by {held.home}"),
        )

    def _retired(self, message: Retire) -> Sequence[Action]:
        held = self.jobs.get(message.job)
        if held is None or held.epoch > message.epoch:
            return ()
        self._remove(held)
        return (
            ForgetJob(held.job, held.epoch, message.instead),
            Keep(),
            Note(held.job, "tensors no longer summed here", message.reason),
        )

    def _runs_over(self, job: JobId, grant: int, instead: int, why: str) -> Sequence[Action]:
        if grant > self._over.get(job, 0):
            self._over[job] = grant
            while len(self._over) > OVER_MAX:
                del self._over[next(iter(self._over))]
        held = self.jobs.get(job)
        if held is None or grant_of(held.epoch) > grant:
            return ()
        return self._retired(Retire(job, held.epoch, instead, why))

    def _up(self, event: ProcessUp) -> Sequence[Action]:
        """Also after a restart of this agent: what is on disk and what the process serves must be the same."""
        self.address = event.address
        held_here = {(held.job, held.epoch) for held in self.jobs.values()}
        self._serving = held_here & set(event.serves.items())
        unknown = [
            ForgetJob(job, epoch, 0)
            for job, epoch in sorted(event.serves.items())
            if job not in self.jobs or self.jobs[job].epoch != epoch
        ]
        lost = [held for _, held in sorted(self.jobs.items()) if not self._is_served(held)]
        return [*unknown, *self._drop(lost, "its process does not know the job")]

    def _down(self, why: str) -> Sequence[Action]:
        self.address = ""
        self._serving.clear()
        return self._drop([held for _, held in sorted(self.jobs.items())], why)

    def _drop(self, lost: Sequence[Held], why: str) -> Sequence[Action]:
        actions: list[Action] = []
        for held in lost:
            self._remove(held)
            actions.append(Send(held.home, Dropped(held.job, held.epoch, why)))
            actions.append(Note(held.job, "tensors dropped", why))
        return [*actions, Keep()] if lost else ()

    def _remove(self, held: Held) -> None:
        del self.jobs[held.job]
        self._serving.discard((held.job, held.epoch))

"""This host's GPUs: which grant holds which of them.

    free -- Reserve --> held -- the log says placed --> started -- all its ranks ended --> free
                         |
                         +-- Release, a newer grant, or a lease without news of the grant --> free

The log decides in the end: it refuses a start whose GPU belongs to another job, so a lease that ran out while this host
was cut off can cost an attempt but never give one GPU to two gangs. What must survive a restart of the agent (`holds`
and `released`) goes to disk before a yes is said.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from covey.core.events import Heard, Send
from covey.core.ids import HostId, JobId
from plugins.facts import GpuUse
from plugins.gossiped import MemoryHere
from plugins.scheduler.machine.host.parts import ChosenGpus, Hold, WantedGpus, choice, refusals
from plugins.scheduler.machine.leader.shared_capacity import Sharing
from plugins.scheduler.messages.wire import NotReserved, Release, Reserve, Reserved, ToHost
from plugins.scheduler.policy.eligible import lacks_cpus, lacks_memory, workers_left
from plugins.scheduler.policy.shared import device_of

RELEASED_MAX = 4096
"""The most fences of jobs that hold nothing here."""


class GpusSeen(msgspec.Struct, frozen=True):
    """Event: these GPUs are here."""

    gpus: tuple[str, ...]
    refused: Mapping[str, str] = {}
    """The GPUs among them that take no job now, and why."""


class MemorySeen(msgspec.Struct, frozen=True):
    """Event: what this host has of memory."""

    memory: MemoryHere


class UseSeen(msgspec.Struct, frozen=True):
    """Event: how GPUs are used, where they are shared."""

    uses: tuple[GpuUse, ...]


class GrantNews(msgspec.Struct, frozen=True):
    """Event: what this host's copy of the log says about a grant it holds GPUs for."""

    job: JobId
    epoch: int
    live: bool
    """Whether the grant is being placed, running or stopping; otherwise it is over or not (yet) known."""
    over: bool
    guaranteed: bool = False
    """Whether the job is guaranteed now."""
    joins: bool = False
    """The news is about what is held for ranks that are to join others of the grant here."""


class Starting(msgspec.Struct, frozen=True):
    """Event: the log placed this grant here with these GPUs; its ranks start now."""

    job: JobId
    epoch: int
    gpus: tuple[str, ...]
    guaranteed: bool = True
    host_memory: int = 0
    """Memory of this host that the job may use, bytes; 0: not said."""
    cpus: int = 0
    """Processors of this host that these ranks may use; 0: not said."""


class RanksGone(msgspec.Struct, frozen=True):
    """Event: nothing of this grant runs here any more."""

    job: JobId
    epoch: int


class SecondWent(msgspec.Struct, frozen=True):
    """Event: a second passed; look for leases that ended."""


class KeepPort(msgspec.Struct, frozen=True):
    """Action: reserve a TCP port for rank 0, then answer `reserved` with it to `to`."""

    to: HostId
    reserved: Reserved


class ReleasePort(msgspec.Struct, frozen=True):
    job: JobId
    epoch: int


class Save(msgspec.Struct, frozen=True):
    """Action: `held()` changed; it must be on disk before the actions after this one."""


Event = Heard | GpusSeen | MemorySeen | UseSeen | GrantNews | Starting | RanksGone | SecondWent
Action = Send | KeepPort | ReleasePort | Save


class HeldReservations(msgspec.Struct, frozen=True):
    """What a host's reservations save across a restart of the agent."""

    holds: tuple[Hold, ...] = ()
    released: dict[JobId, tuple[int, int]] = {}


class Reservations:
    """The reservations of one host's GPUs."""

    def __init__(self, held: HeldReservations, lease_s: float, now_s: float, sharing: Sharing | None = None) -> None:
        """`sharing`: opportunistic jobs run beside guaranteed ones here; None: a GPU is one job's."""
        self.sharing = sharing
        self.gpus: tuple[str, ...] = ()
        self.refused: Mapping[str, str] = {}
        self.uses: dict[str, GpuUse] = {}
        self.memory: MemoryHere | None = None
        self.lease_s = lease_s
        self.holds: dict[JobId, list[Hold]] = {}
        """The holds of each job, by epoch: an older one whose ranks still end, and the newest; and the one for ranks
        that are to join them."""
        self.lease_until_s: dict[tuple[JobId, int, bool], float] = {}
        self.released: dict[JobId, tuple[int, int]] = dict(held.released)
        """The newest (epoch, attempt) that is over here; a Reserve up to it comes too late."""
        for hold in held.holds:
            self.holds.setdefault(hold.job, []).append(hold)
            self.lease_until_s[hold.key] = now_s + lease_s

    def held(self) -> HeldReservations:
        return HeldReservations(tuple(self.all()), dict(self.released))

    def all(self) -> list[Hold]:
        return [hold for job in sorted(self.holds) for hold in self.holds[job]]

    def find(self, job: JobId, epoch: int, joins: bool = False) -> Hold | None:
        return next((hold for hold in self.holds.get(job, []) if hold.key == (job, epoch, joins)), None)

    def owners(self) -> dict[str, JobId]:
        """GPU, or part of one -> job that holds it."""
        return {gpu: hold.job for hold in self.all() for gpu in hold.gpus}

    def free(self) -> list[str]:
        """GPUs that take jobs, and that no job holds, nor a part of them."""
        return [gpu for gpu in self._unheld() if not self._refusal(gpu)]

    def out(self) -> dict[str, str]:
        """GPUs that no job holds and that take none, and why."""
        return {gpu: why for gpu in self._unheld() if (why := self._refusal(gpu))}

    def _unheld(self) -> list[str]:
        taken = {device_of(name) for name in self.owners()}
        return [gpu for gpu in self.gpus if gpu not in taken]

    def _refusal(self, gpu: str) -> str:
        """Why this GPU takes no job, whoever holds it; empty: it takes one."""
        use = self.uses.get(gpu)
        return self.refused.get(gpu, "") or (use.refusal if use is not None else "")

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        match event:
            case Heard():
                return self._heard(event.sender, event.message, now_s)
            case GpusSeen():
                self.gpus, self.refused = event.gpus, event.refused
                return ()
            case MemorySeen():
                self.memory = event.memory
                return ()
            case UseSeen():
                self.uses = {use.uuid: use for use in event.uses}
                return ()
            case GrantNews():
                return self._news(event, now_s)
            case Starting():
                return self._starting(event, now_s)
            case RanksGone():
                joining = self._drop(self.find(event.job, event.epoch, joins=True))
                return [*joining, *self._drop(self.find(event.job, event.epoch))]
            case SecondWent():
                return self._leases(now_s)
            case _:
                assert_never(event)

    def check(self) -> None:
        """Raise AssertionError when a GPU is held twice, or by two guaranteed jobs, or a hold has no lease."""
        held = [gpu for hold in self.all() for gpu in hold.gpus]
        assert len(held) == len(set(held)), f"a GPU is held twice: {sorted(held)}"
        owned = [(device_of(gpu), hold.job) for hold in self.all() if not hold.is_guest for gpu in hold.gpus]
        assert len({gpu for gpu, _ in owned}) == len(set(owned)), f"a GPU has two guaranteed jobs: {sorted(owned)}"
        assert {hold.key for hold in self.all()} == set(self.lease_until_s)
        assert len(self.released) <= RELEASED_MAX

    # ---- events ----

    def _heard(self, sender: HostId, message: ToHost, now_s: float) -> Sequence[Action]:
        match message:
            case Reserve():
                return self._reserve(sender, message, now_s)
            case Release():
                return self._release(message)
            case _:
                assert_never(message)

    def _reserve(self, coordinator: HostId, ask: Reserve, now_s: float) -> Sequence[Action]:
        if (ask.epoch, ask.attempt) <= self.released.get(ask.job, (-1, -1)):
            return [self._no(coordinator, ask, "this attempt has ended")]
        newest = max((hold.epoch for hold in self.holds.get(ask.job, [])), default=-1)
        if ask.epoch < newest:
            return [self._no(coordinator, ask, f"a newer grant (epoch {newest}) was seen here")]
        ranks_here = self.find(ask.job, ask.epoch)
        is_running = ranks_here is not None and ranks_here.started
        if is_running != ask.joins:
            why = (
                "its ranks run here already"
                if is_running
                else "none of its ranks runs here that other ranks could join"
            )
            return [self._no(coordinator, ask, why)]
        held = self.find(ask.job, ask.epoch, ask.joins)
        if held is not None and held.attempt == ask.attempt:
            self.lease_until_s[held.key] = now_s + ask.lease_s
            return self._yes(held, ask.master)
        actions: list[Action] = []
        for older in [hold for hold in self.holds.get(ask.job, []) if not hold.started]:
            actions += self._drop(older)
        wanted, chosen = ask.workers * ask.gpus_per_worker, self._choice(ask)
        if chosen.there < wanted:
            but = f": {chosen.why_not}" if chosen.why_not else ""
            why = f"{wanted} GPUs were requested and {chosen.there} are free{but}"[:1000]
            return [*actions, self._no(coordinator, ask, why, chosen.there)]
        if short := self._lacks(ask):
            return [*actions, self._no(coordinator, ask, f"this host {short}", chosen.there, memory_short=True)]
        hold = Hold(
            ask.job,
            ask.epoch,
            ask.attempt,
            coordinator,
            chosen.gpus,
            0,
            guaranteed=not ask.opportunistic,
            joins=ask.joins,
            host_memory=ask.host_memory,
            cpus=ask.cpus * ask.workers,
        )
        self._hold(hold, now_s + ask.lease_s)
        return [*actions, Save(), *self._yes(hold, ask.master)]

    def promised_bytes(self, job: JobId | None = None) -> int:
        """Memory of this host that jobs may use, other than this one."""
        others = (holds for id, holds in self.holds.items() if id != job)
        return sum(max(hold.host_memory for hold in holds) for holds in others)

    def _lacks(self, ask: Reserve) -> str:
        """Why this host has no room for the memory and processors that are asked for; empty: it has. Ranks that join
        others share their memory, and have processors of their own."""
        memory = "" if ask.joins else lacks_memory(ask.host_memory, self.memory, self.promised_bytes(ask.job))
        if memory or not ask.cpus:
            return memory
        promised = sum(_cpus(holds) for id, holds in self.holds.items() if id != ask.job)
        if ask.joins:
            promised += _cpus([hold for hold in self.holds.get(ask.job, ()) if not hold.joins])
        if workers_left(ask.cpus, self.memory, promised) >= ask.workers:
            return ""
        lacks = lacks_cpus(ask.cpus * ask.workers, self.memory, promised)
        return f"{lacks}, and {ask.cpus * ask.workers} were asked for"

    def _choice(self, ask: Reserve) -> ChosenGpus:
        wanted = ask.workers * ask.gpus_per_worker
        if self.sharing is None:
            free = self.free()
            return ChosenGpus(tuple(free[:wanted]), len(free), refusals(self.out()))
        wish = WantedGpus(wanted, ask.opportunistic, ask.memory_bytes, ask.apart_from)
        return choice(wish, self.gpus, self.all(), self.uses, self.sharing, self.refused)

    def _release(self, over: Release) -> Sequence[Action]:
        self._fence(over.job, over.epoch, over.attempt)
        for hold in (self.find(over.job, over.epoch, joins=True), self.find(over.job, over.epoch)):
            if hold is not None and not hold.started and hold.attempt <= over.attempt:
                return self._drop(hold)
        return [Save()]

    def _news(self, event: GrantNews, now_s: float) -> Sequence[Action]:
        hold = self.find(event.job, event.epoch, event.joins)
        if hold is None:
            return ()
        if event.over and not hold.started:
            self._fence(hold.job, hold.epoch, hold.attempt)
            return self._drop(hold)
        if event.live:
            self.lease_until_s[hold.key] = now_s + self.lease_s
        if event.live and event.guaranteed and not hold.guaranteed:
            return self._upgraded(hold)
        return ()

    def _upgraded(self, hold: Hold) -> Sequence[Action]:
        """Make the hold guaranteed, on GPUs that were promised to gangs whose start the log refuses from now on. Not
        while an earlier guaranteed job, which is over by the log, still has its GPU here: the news is told again."""
        devices, actions = set(map(device_of, hold.gpus)), list[Action]()
        beside = [other for other in self.all() if not other.is_guest and other.job != hold.job]
        owners = [other for other in beside if devices & set(map(device_of, other.gpus))]
        if any(other.started for other in owners):
            return ()
        for other in owners:
            self._fence(other.job, other.epoch, other.attempt)
            actions += self._drop(other)
        self._exchange(hold, msgspec.structs.replace(hold, guaranteed=True))
        return [*actions, Save()]

    def _starting(self, event: Starting, now_s: float) -> Sequence[Action]:
        """Take the log's word, also for a hold whose lease ended: its GPUs are free again, or not another grant's. The
        same holds for parts, whose names a host that lost its record cannot know."""
        hold = self.find(event.job, event.epoch)
        joining = self.find(event.job, event.epoch, joins=True)
        if hold is not None and hold.started and hold.gpus == event.gpus and joining is None:
            return ()
        actions: list[Action] = []
        for other in self.all():
            overlaps = set(other.gpus) & set(event.gpus)
            if not other.started and ((other.job, other.epoch) == (event.job, event.epoch) or overlaps):
                actions += self._drop(other, keep_port=other.job == event.job)
        if hold is not None and hold.started:
            now = {"gpus": event.gpus, "guaranteed": event.guaranteed, "host_memory": event.host_memory}
            self._exchange(hold, msgspec.structs.replace(hold, **now, cpus=event.cpus))
            return [*actions, Save()]
        attempt, coordinator, port = (hold.attempt, hold.coordinator, hold.port) if hold else (0, HostId(""), 0)
        of, memory = (event.job, event.epoch, attempt, coordinator), event.host_memory
        started = Hold(*of, event.gpus, port, True, event.guaranteed, host_memory=memory, cpus=event.cpus)
        self._hold(started, now_s + self.lease_s)
        return [*actions, Save()]

    def _leases(self, now_s: float) -> Sequence[Action]:
        actions: list[Action] = []
        for hold in self.all():
            if not hold.started and self.lease_until_s[hold.key] <= now_s:
                self._fence(hold.job, hold.epoch, hold.attempt)
                actions += self._drop(hold)
        return actions

    # ---- steps ----

    def _hold(self, hold: Hold, until_s: float) -> None:
        self.holds.setdefault(hold.job, []).append(hold)
        self.lease_until_s[hold.key] = until_s

    def _exchange(self, hold: Hold, now: Hold) -> None:
        holds = self.holds[hold.job]
        holds[holds.index(hold)] = now

    def _drop(self, hold: Hold | None, keep_port: bool = False) -> list[Action]:
        if hold is None:
            return []
        self.holds[hold.job].remove(hold)
        if not self.holds[hold.job]:
            del self.holds[hold.job]
        del self.lease_until_s[hold.key]
        return [Save()] if keep_port else [Save(), ReleasePort(hold.job, hold.epoch)]

    def _fence(self, job: JobId, epoch: int, attempt: int) -> None:
        over = max((epoch, attempt), self.released.pop(job, (-1, -1)))
        self.released[job] = over
        while len(self.released) > RELEASED_MAX:
            del self.released[next(iter(self.released))]

    def _yes(self, hold: Hold, master: bool) -> list[Action]:
        answer = Reserved(hold.job, hold.epoch, hold.attempt, hold.gpus, "", 0)
        return [KeepPort(hold.coordinator, answer) if master else Send(hold.coordinator, answer)]

    def _no(
        self, coordinator: HostId, ask: Reserve, why: str, free: int | None = None, memory_short: bool = False
    ) -> Send:
        free = self._choice(ask).there if free is None else free
        beside = self.sharing is not None and ask.opportunistic
        return Send(coordinator, NotReserved(ask.job, ask.epoch, ask.attempt, free, why, beside, memory_short))


def _cpus(holds: Sequence[Hold]) -> int:
    """Processors that one job may use here: an older grant, whose ranks end, has those that the newer one gets."""
    ours = max((hold.cpus for hold in holds if not hold.joins), default=0)
    return ours + max((hold.cpus for hold in holds if hold.joins), default=0)

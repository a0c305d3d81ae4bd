"""One GPU: which jobs are on it, in which state, and what each may do.

Every event ends in `_reconcile`: from the members and the state follow targets for memory, which the ledger turns into
limits that are safe to send now, and rates, which the ladder gives. So no path through the states can forget a limit.
Events are logged in one place, too: when the state after an event is another than before.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, assert_never

import msgspec

from covey.core.events import LogEvent
from covey.core.ids import JobId
from covey.core.transitions import CheckedState
from covey.core.units import format_size
from plugins.sharing.machine.control import TRANSITIONS as CONTROL
from plugins.sharing.machine.control import Settling, Steady, Stuck, Surging, Unwatched, unstuck, without_trouble, word
from plugins.sharing.machine.device_use import TRANSITIONS as USE
from plugins.sharing.machine.device_use import DrainingDevice, InUse, LostDevice
from plugins.sharing.machine.events import (
    Acked,
    Actions,
    DeviceDraining,
    DeviceLost,
    Found,
    Freed,
    GpuAction,
    GpuEvent,
    HardLimited,
    RankArrived,
    RankEnded,
    Refuse,
    Reported,
    Resume,
    Retagged,
    SetLimits,
    StartRank,
    Suspended,
    Terminate,
    TimePassed,
)
from plugins.sharing.machine.ladder import Ladder
from plugins.sharing.machine.member import GpuMember, answered, begun
from plugins.sharing.machine.memory_search import MemorySearch
from plugins.sharing.machine.reclaim import evicted, hard_limited, press, suspended
from plugins.sharing.machine.share_ledger import ShareLedger
from plugins.sharing.messages import LEASE_S, Limits, Report
from plugins.sharing.policy import ladder, lease, memory
from plugins.sharing.policy.interference import TOLERANCE, StepSamples
from plugins.sharing.policy.ladder import FREE, STOPPED, Rates

State = Literal[
    "empty", "alone", "together", "arrival", "init", "baseline", "run",
    "verify", "idle", "surge", "stuck", "drain", "lost",
]  # fmt: skip
INIT_S_MAX = 120.0
"""Seconds after which a guaranteed job that never runs steadily is taken as it is."""
STUCK_S, STUCK_STEPS = 30.0, 20.0
"""Seconds, and mini-batches, without a finished one after which (whichever is longer) a job's feedback means nothing
although the device is busy."""
SHOWN_STEPS = 10
"""Mini-batches after which a job that did not say what memory it wants has shown it."""
RETRY_BYTES = memory.CHUNK_MIN
"""Bytes that a guaranteed job is given beyond its limit when allocations fail: how much it lacks is not known."""


class SharedGpu:
    """The state of one shared GPU. `uuid` names the device; `reserve_bytes` of its `capacity_bytes` belong to no job;
    `tolerance` is a share of the guaranteed job's own mini-batch duration; `controller`: the law for the others."""

    use = CheckedState(USE)
    control = CheckedState(CONTROL)

    def __init__(
        self,
        uuid: str,
        capacity_bytes: int,
        reserve_bytes: int,
        tolerance: float = TOLERANCE,
        controller: type[Ladder] = Ladder,
    ) -> None:
        self.uuid, self.tolerance, self.controller = uuid, tolerance, controller
        self.members: dict[JobId, GpuMember] = {}
        self.ledger = ShareLedger(capacity_bytes, reserve_bytes)
        self.use, self.control = InUse(), Unwatched()
        self.trial = MemorySearch()
        self.adopting = False
        """Whether jobs from before the agent are being found: limits stay as they are."""
        self._renew_s = -math.inf
        self._why = ""

    # ---- reading ----

    @property
    def subject(self) -> str:
        return f"gpu/{self.uuid}"

    @property
    def guaranteed(self) -> GpuMember | None:
        return next((m for m in self.members.values() if m.guaranteed and m.stage != "ended"), None)

    @property
    def opportunistic(self) -> list[GpuMember]:
        """The opportunistic jobs that hold or wait for device memory, in order of arrival."""
        return [member for member in self.members.values() if not member.guaranteed and member.present]

    @property
    def ladder(self) -> Ladder | None:
        """The ladder, once the guaranteed job runs steadily."""
        return self.control.ladder

    @property
    def state(self) -> State:
        """The state of the device and its jobs in one word, for people."""
        if not isinstance(self.use, InUse):
            return "lost" if isinstance(self.use, LostDevice) else "drain"
        guaranteed = self.guaranteed
        if guaranteed is None:
            count = len(self.opportunistic)
            return "empty" if count == 0 else "alone" if count == 1 else "together"
        if guaranteed.stage == "waiting":
            return "arrival"
        return word(self.control)

    def check(self) -> None:
        self.ledger.check()
        assert sum(m.guaranteed and m.stage != "ended" for m in self.members.values()) <= 1, "two guaranteed jobs"
        assert set(self.ledger.accounts) == set(self.members), "memory without a job, or a job without an account"
        if self.ladder is not None:
            self.ladder.check()
        runs = self.guaranteed is not None and self.guaranteed.stage != "waiting"
        watched = not isinstance(self.control, Unwatched)
        assert watched == (runs and not isinstance(self.use, LostDevice)), "a job that runs is watched, and no other"
        for member in self.members.values():
            if member.limits is not None:
                assert member.limits.failsafe > 0 and member.limits.lease_s > 0, f"{member.job} could stop for ever"
                assert member.limits.memory_bytes <= self.ledger.room_bytes

    # ---- events ----

    def handle(self, event: GpuEvent, now_s: float) -> Sequence[GpuAction]:
        before, self._why = self.state, ""
        actions = self._handle(event, now_s)
        actions += self._upgraded(now_s)
        actions += self._reconcile(now_s)
        if self._why or self.state != before:
            actions.append(LogEvent(self.subject, self.state, self._why or f"was {before}; {type(event).__name__}"))
        return actions

    def _handle(self, event: GpuEvent, now_s: float) -> Actions:
        match event:
            case RankArrived():
                return self._arrived(event)
            case Found():
                return self._found(event, now_s)
            case Reported():
                return self._reported(event.report, now_s)
            case Acked():
                return self._acked(event)
            case TimePassed():
                return self._time_passed(event.busy, now_s)
            case RankEnded():
                return self._ended(event.job)
            case Freed():
                return self._freed(event.job)
            case Retagged():
                return self._retagged(event, now_s)
            case HardLimited():
                hard_limited(self.members, self.ledger, event)
                return []
            case Suspended():
                self._why = suspended(self.members, self.ledger, event)
                return []
            case DeviceLost():
                return self._device_lost(event.reason)
            case DeviceDraining():
                return self._device_draining(event.reason)
            case _:
                assert_never(event)

    def _arrived(self, event: RankArrived) -> Actions:
        why = self._cannot_come(event)
        if why:
            return [Refuse(event.job, why), LogEvent(f"job/{event.job}", "refused", why)]
        member = self._member(event)
        self.members[event.job] = member
        self.ledger.open(event.job)
        wants = format_size(event.memory_bytes) if event.memory_bytes else "memory without saying how much"
        self._why = f"{event.kind} job {event.job} arrived, asking for {wants}"
        if member.guaranteed:
            self._why += ": the others stop and make room before it starts (AntMan §3.3)"
            self.trial.stop()
        return []

    def _member(self, event: RankArrived | Found) -> GpuMember:
        """The member of an arrived job. A job that does not say what memory it wants might want all."""
        wanted_bytes = max(memory.QUANTUM, event.memory_bytes) if event.memory_bytes else self.ledger.room_bytes
        asked = event.memory_bytes > 0
        return GpuMember(event.job, event.kind, wanted_bytes, event.weight, event.flag, asked=asked)

    def _cannot_come(self, event: RankArrived | Found) -> str:
        guaranteed, room = self.guaranteed, self.ledger.room_bytes
        leaves = isinstance(event, RankArrived) or event.kind == "opportunistic"
        if isinstance(self.use, LostDevice) or (self.use.why and leaves):
            return f"{self.uuid} cannot be used: {self.use.why}"
        if event.job in self.members:
            return f"{event.job} is on {self.uuid} already"
        if event.kind == "guaranteed" and guaranteed is not None:
            return f"{self.uuid} has a guaranteed job already, {guaranteed.job}"
        if event.memory_bytes > room and event.kind == "guaranteed":
            return f"it asks for {format_size(event.memory_bytes)}; {self.uuid} has {format_size(room)}"
        return ""

    def _found(self, event: Found, now_s: float) -> Actions:
        why = self._cannot_come(event)
        if not why and event.limit_bytes > self.ledger.free_bytes:
            free = format_size(self.ledger.free_bytes)
            why = f"it claims a limit of {format_size(event.limit_bytes)}, but only {free} are free"
        if why:
            return [Terminate(event.job, why), LogEvent(f"job/{event.job}", "refused", why)]
        member = self._member(event)
        member.stage, member.epoch = "running", event.epoch
        member.started_s = member.last_step_s = now_s
        self.members[event.job] = member
        self.ledger.open(event.job, event.limit_bytes)
        self._why = f"{event.kind} job {event.job} was here before the agent; it keeps its limit"
        if member.guaranteed:
            self._watched()
        return []

    def _watched(self) -> None:
        """Begin to watch a guaranteed job, which runs from now on."""
        self.control = Settling()
        self.trial.stop()

    def _unwatched(self) -> None:
        """Watch no more: no guaranteed job runs, or the device is lost."""
        if not isinstance(self.control, Unwatched):
            self.control = Unwatched()
        self.trial.stop()

    def _ended(self, job: JobId) -> Actions:
        member = self.members.get(job)
        if member is None or member.stage == "ended":
            return []
        was_guaranteed, member.stage = member.guaranteed, "ended"
        self._why = f"{job} ended; its memory is given to others once the device shows it free"
        if was_guaranteed:
            self._unwatched()
        return []

    def _freed(self, job: JobId) -> Actions:
        member = self.members.get(job)
        if member is None or member.stage != "ended":
            return []
        del self.members[job]
        self.ledger.close(job)
        self._why = f"{job} is gone"
        return []

    def _retagged(self, event: Retagged, now_s: float) -> Actions:
        """Change a job's class as the log did. A host may hear of an upgrade before the guaranteed job before it has
        ended here."""
        member = self.members.get(event.job)
        if member is None or member.stage == "ended" or event.grant <= member.grant:
            return []
        member.grant, member.to_upgrade = event.grant, event.kind == "guaranteed" and not member.guaranteed
        if member.kind == event.kind or member.to_upgrade:
            return []
        self._unwatched()
        member.kind = "opportunistic"
        self._why = f"{event.job} is opportunistic from now on"
        note = LogEvent(f"job/{event.job}", "downgraded", self._why)
        if isinstance(self.use, DrainingDevice):
            return [Terminate(event.job, f"{self.uuid} is being emptied: {self.use.why}"), note]
        return [note]

    def _upgraded(self, now_s: float) -> Actions:
        """Make the job that waits for it guaranteed as soon as no other is, and it is on the device."""
        member = next((m for m in self.members.values() if m.to_upgrade and m.present), None)
        if member is None or self.guaranteed is not None:
            return []
        member.upgraded()
        self._why = f"{member.job} is guaranteed from now on"
        self.trial.stop()
        if member.stage == "running":
            member.started_s = member.last_step_s = now_s
            if not isinstance(self.use, LostDevice):
                self._watched()
        return [LogEvent(f"job/{member.job}", "upgraded", self._why)]

    def _device_lost(self, reason: str) -> Actions:
        if isinstance(self.use, LostDevice):
            return []
        self.use, self._why = LostDevice(reason), reason
        self._unwatched()
        why = f"{self.uuid} cannot be used: {reason}"
        return [Terminate(member.job, why) for member in self.members.values() if member.stage != "ended"]

    def _device_draining(self, reason: str) -> Actions:
        if not isinstance(self.use, InUse):
            return []
        self.use, self._why = DrainingDevice(reason), reason
        self.trial.stop()
        why = f"{self.uuid} is being emptied: {reason}"
        there = [member for member in self.members.values() if member.stage != "ended"]
        return [Terminate(m.job, why) for m in there if not m.guaranteed or m.stage == "waiting"]

    # ---- mini-batches ----

    def _reported(self, report: Report, now_s: float) -> Actions:
        job = report.job
        member = self.members.get(job)
        if member is None or member.stage != "running":
            return []
        member.gate, member.flag, member.fixed = report.gate, report.flag, report.fixed
        if self.ledger.acked(job, report.acked):
            member.press, member.steps = 0, StepSamples()
        member.saw(report.step_s, report.peak_bytes, report.stable_bytes, report.spill_bytes, now_s)
        if member.steps.count >= SHOWN_STEPS:
            member.has_shown()
        if member.guaranteed:
            return self._guaranteed_stepped(member, report, now_s)
        why = self.trial.told(self.members, self._applied(), now_s) if self.state == "together" else None
        if why is None:
            return []
        for other in self.opportunistic:
            other.steps = StepSamples()
        return [LogEvent(self.subject, "trial", why)]

    def _acked(self, event: Acked) -> Actions:
        member = self.members.get(event.job)
        if member is not None and member.stage == "running":
            member.gate, member.flag = event.gate, event.flag
            if self.ledger.acked(event.job, event.epoch):
                member.press, member.steps = 0, StepSamples()
        return []

    def _guaranteed_stepped(self, member: GpuMember, report: Report, now_s: float) -> Actions:
        if isinstance(self.control, Unwatched):
            return []  # the device is lost
        if isinstance(self.control, Stuck):
            self.control = unstuck(self.control)
            self._why = f"{member.job} finishes mini-batches again"
        if self._surged(member, report):
            return []
        if self.ladder is not None:
            self.ladder.flag, others = member.flag, self.opportunistic
            measured = report.step_s, report.idle_s, now_s, report.ended_s
            self._why = self.ladder.stepped(*measured, answered(others), begun(others)) or self._why
        elif why := member.settled(report.step_s):
            self._steady(member, why)
        return []

    def _surged(self, member: GpuMember, report: Report) -> bool:
        """Whether the job spills, or is about to: its limit is too small, so the others give memory and stop meanwhile
        (AntMan §3.3, figure 7a)."""
        held = self.ledger.accounts[member.job].acked_bytes
        if report.retries and not report.spill_bytes:
            member.wanted_bytes = max(member.wanted_bytes, min(self.ledger.room_bytes, held + RETRY_BYTES))
        lacks = report.spill_bytes > 0 or report.retries > 0
        if lacks and held < min(self.ledger.room_bytes, member.wanted_bytes):
            if not isinstance(self.control, Surging):
                spilled = f"placed {format_size(report.spill_bytes)} in host memory"
                what = spilled if report.spill_bytes else f"failed to allocate {report.retries} times"
                self._why = f"{member.job} {what}: the other jobs stop and free memory"
                self.control = Surging(self.ladder)
            return True
        if not isinstance(self.control, Surging):
            return False
        self.control = without_trouble(self.control.ladder)
        self._why = f"{member.job} has all its memory on the device again"
        if lacks:
            self._why = f"{member.job} wants more than the device has: it continues with what there is"
        if self.ladder is not None:
            self.ladder.restart(self._why)
        return True

    def _steady(self, member: GpuMember, why: str) -> None:
        self.control, self._why = Steady(self.controller(self.tolerance, member.flag)), why
        self.control.ladder.last_step_s = member.last_step_s

    def _applied(self) -> bool:
        """Whether all opportunistic jobs go by the limits sent last."""
        return all(m.stage == "running" and not self.ledger.accounts[m.job].sent for m in self.opportunistic)

    # ---- time ----

    def _time_passed(self, busy: bool, now_s: float) -> Actions:
        guaranteed = self.guaranteed
        if guaranteed is not None and guaranteed.stage == "running":
            self._watch(guaranteed, busy, now_s)
        return [*evicted(self.members, guaranteed, now_s), *press(self.members, self.ledger, now_s)]

    def _watch(self, member: GpuMember, busy: bool, now_s: float) -> None:
        now, silent_s = self.control, now_s - member.last_step_s
        if isinstance(now, Unwatched | Stuck):
            return
        if now.ladder is not None:
            self._why = now.ladder.passed(now_s, busy) or self._why
        if busy and silent_s > max(STUCK_S, STUCK_STEPS * member.step_s):
            self.control = Stuck(now.ladder, surging=isinstance(now, Surging))
            self._why = f"{member.job} is busy but has not finished a mini-batch for {silent_s:.0f} s: is it stuck?"
            if now.ladder is not None:
                now.ladder.restart(self._why)
        elif isinstance(now, Settling) and now_s - member.started_s > INIT_S_MAX:
            self._steady(member, f"{member.job} does not run steadily after {INIT_S_MAX:g} s: measured as it is")

    # ---- what follows from the state ----

    def _reconcile(self, now_s: float) -> Actions:
        """Limits and starts that follow from members and state; the lease is renewed when it is half over."""
        targets = self._targets(now_s)
        changes = self.ledger.changes(targets)
        renew = now_s - self._renew_s >= LEASE_S / 2
        if renew:
            self._renew_s = now_s
        told = self._tell_all(changes, renew, now_s)
        starts = self._starts(targets, now_s)
        return [*told, *(self._tell_all({}, False, now_s) if starts else ()), *starts]

    def _tell_all(self, changes: Mapping[JobId, int], renew: bool, now_s: float) -> Actions:
        actions: Actions = []
        for member in self.members.values():
            if member.stage == "ended" or (member.stage == "suspended" and member.job not in changes):
                continue
            actions += self._tell(member, changes.get(member.job), renew, now_s)
        return actions

    def _targets(self, now_s: float) -> dict[JobId, int]:
        """Memory each member should hold, bytes; the guaranteed job first, so it is served first."""
        if isinstance(self.use, LostDevice) or self.adopting:
            return {}
        room, guaranteed = self.ledger.room_bytes, self.guaranteed
        others = self.opportunistic
        others += [m for m in self.members.values() if m.stage == "suspended" and self._fits_again(m)]
        if guaranteed is None:
            return self.trial.targets(room, others, now_s) if len(others) > 1 else {m.job: room for m in others}
        first = min(room, guaranteed.wanted_bytes)
        stable = [m.stable_bytes or m.wanted_bytes for m in others]
        if isinstance(self.control, Surging) or (isinstance(self.control, Stuck) and self.control.surging):
            parts = memory.shrunk(room - first, [self.ledger.accounts[m.job].told_bytes for m in others], stable)
        else:
            parts = memory.beside(room - first, stable, [min(room, m.wanted_bytes) for m in others])
        return {guaranteed.job: first, **{m.job: part for m, part in zip(others, parts, strict=True)}}

    def _fits_again(self, member: GpuMember) -> bool:
        """Whether a job that never reported still fits: it goes by no limit, and needs room for all it may want."""
        least = min(member.wanted_bytes, self.ledger.room_bytes) if member.gate is None else member.stable_bytes
        return max(least, memory.QUANTUM) <= self.ledger.free_bytes

    def _tell(self, member: GpuMember, bytes_: int | None, renew: bool, now_s: float) -> Actions:
        account, old = self.ledger.accounts[member.job], member.limits
        told = account.told_bytes if bytes_ is None else bytes_
        rates = self.rates_of(member, told < account.charged_bytes)
        head_s = None if math.isinf(rates.head_s) else rates.head_s
        failsafe = lease.failsafe(self.guaranteed is not None) if not member.guaranteed else 1.0
        new = Limits(member.job, member.epoch, rates.idle, head_s, rates.busy, told, failsafe)
        if new == old:
            return [SetLimits(new)] if renew and member.stage == "running" else []
        member.epoch += 1
        member.limits = msgspec.structs.replace(new, epoch=member.epoch)
        if bytes_ is not None:
            member.steps = StepSamples()
            self.ledger.send(member.job, member.epoch, bytes_, now_s)
            if member.stage != "running":  # nobody is there to apply it: it holds from the start
                self.ledger.acked(member.job, member.epoch)
        return [SetLimits(member.limits)]

    def rates_of(self, member: GpuMember, shrinks: bool = False) -> Rates:
        """What a job may do now; `shrinks`: it is about to be told to give memory back."""
        guaranteed = self.guaranteed
        if member.guaranteed or guaranteed is None or guaranteed.stage == "waiting":
            return FREE  # who waits needs memory, and memory is given back at the end of a mini-batch
        account = self.ledger.accounts[member.job]
        owes = not member.fixed and (shrinks or account.shrinking_since_s is not None)
        if owes or isinstance(self.control, Stuck):
            return FREE if owes and isinstance(self.control, Surging) else ladder.plain(lease.FAILSAFE_BESIDE)
        if not isinstance(self.control, Steady) or self.state not in ("run", "idle"):
            return STOPPED
        weights = sum(other.weight for other in self.opportunistic)
        return ladder.shared(self.control.ladder.rates, member.weight, weights)

    def _starts(self, targets: dict[JobId, int], now_s: float) -> Actions:
        """Starts of jobs that waited for memory and have it: a guaranteed job all it asked for, an opportunistic one
        anything."""
        actions: Actions = []
        if isinstance(self.use, DrainingDevice):
            return actions
        for job, target in targets.items():
            member = self.members[job]
            held = self.ledger.accounts[job].acked_bytes
            enough = held >= target if member.guaranteed else held >= min(target, memory.QUANTUM) and held > 0
            if member.stage in ("waiting", "suspended") and enough:
                action = StartRank(job) if member.stage == "waiting" else Resume(job)
                member.stage, member.steps = "running", StepSamples()
                member.started_s = member.last_step_s = now_s
                if member.guaranteed and isinstance(self.control, Unwatched):
                    self._watched()
                why = f"{format_size(held)} of device memory are available to it"
                actions += [action, LogEvent(f"job/{job}", type(action).__name__.lower(), why)]
                self._why = self._why or f"{job}: {why}"
        return actions

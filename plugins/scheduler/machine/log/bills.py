"""The bill of one job: for how long it held GPUs, and what became of that time.

    held = used + idle + unknown + lost (to preemption, failures, restarts)

What is held follows from the log alone: a GPU is held from the command that places the job on it to the one that gives
it back, by the rack's clock. Each start is accounted for when it ends:

    start ------ ranks run, first step ------ newest checkpoint ------ told to stop ------ all hosts reported
    | restarts (after the first start)   | used, idle, unknown     | lost, if it is to run again, or failed  |

A checkpoint that ranks write after they were told to stop keeps what came before that order. Covey knows of checkpoints
that scripts write through it; of others it does not, so what it calls lost may have been kept by the script itself.
Used, and idle, is what hosts measured of their GPUs (`Attained.uses`).
"""

from collections.abc import Collection

import msgspec

from covey.core.ids import HostId
from covey.core.job_records import GPUS_MAX, OTHERS, GpuSeconds
from plugins.facts import Place
from plugins.scheduler.messages.commands import JobUse
from plugins.scheduler.policy.shared import device_of

SAVED_AGE_MAX_S = 3600.0
"""The oldest checkpoint, seconds, whose age is believed: both times are one host's, whose clock may have been set."""


class BillMark(msgspec.Struct, frozen=True):
    """Where a job's sums stood at some moment, GPU·s: held, attained service, and what hosts had said of this start."""

    held: float = 0.0
    attained: float = 0.0
    seen: float = 0.0
    used: float = 0.0


class JobBill(msgspec.Struct):
    """The bill of a job, in the replicated state."""

    over: GpuSeconds = GpuSeconds()
    """What became of the time of starts that have ended."""
    gpus: dict[str, float] = {}
    """GPU·s for which each GPU was held, by host and UUID, without what is held now."""
    since: dict[str, float] = {}
    """What is held now, by host and GPU (or part of one) -> since when, by the rack's clock, s."""
    held_gpu_s: float = 0.0
    """GPU·s held up to `at_s`."""
    at_s: float = 0.0
    start: BillMark | None = None
    """When the present start began; None: there is none."""
    safe: BillMark = BillMark()
    """When the present start last had nothing to lose: when it began, or at its newest checkpoint."""
    stop: BillMark | None = None
    """When it was told to stop; None: it was not."""
    uses: dict[HostId, JobUse] = {}
    """What each host measured of the present start."""
    stopped_s: float | None = None
    """How long its newest start took to end once it was told to, s of each GPU; None: it ended by itself."""
    restart_s: float | None = None
    """What its newest restart took, s of each GPU: the stop before it, and from having GPUs again to the first step (of
    a script that tells no steps: until its ranks ran); None: none was measured."""
    gpu_bytes: int = 0
    host_bytes: int = 0
    """The most memory that any host saw: on one GPU, and on one host, bytes; 0: not known."""

    # ---- what is held ----

    def hold(self, place: Place, attained: float, rack_s: float) -> None:
        """Begin to count those of these GPUs that are not counted yet; a start of which nothing was counted, since a
        version without bills began it, begins now."""
        new = {name: rack_s for gpu in place.gpus if (name := f"{place.host} {gpu}") not in self.since}
        if new:
            if self.start is None:
                self.begin(attained, rack_s)
            self._pass(rack_s)
            self.since = {**self.since, **new}

    def release(self, host: HostId, gpu: str, rack_s: float) -> None:
        """Count this GPU no longer."""
        self._pass(rack_s)
        since_s = self.since.pop(f"{host} {gpu}", None)
        if since_s is not None:
            _count(self.gpus, f"{host} {device_of(gpu)}", max(0.0, rack_s - since_s))

    def only(self, names: Collection[str], rack_s: float) -> None:
        """Count no others than these."""
        for name in [name for name in self.since if name not in names]:
            host, _, gpu = name.partition(" ")
            self.release(HostId(host), gpu, rack_s)

    def by_gpu(self, rack_s: float) -> dict[str, float]:
        """GPU·s for which each GPU was held, up to now."""
        found = dict(self.gpus)
        for name, since_s in self.since.items():
            _count(found, device_of(name), max(0.0, rack_s - since_s))
        return found

    def _pass(self, rack_s: float) -> None:
        self.held_gpu_s += len(self.since) * max(0.0, rack_s - self.at_s) if self.since else 0.0
        self.at_s = max(self.at_s, rack_s)

    # ---- what happens to one start ----

    def begin(self, attained: float, rack_s: float) -> None:
        """The job was placed: a start begins."""
        self._pass(rack_s)
        self.uses = {}
        self.start = self.safe = self._mark(attained)
        self.stop = None

    def measured(self, host: HostId, use: JobUse) -> None:
        """A host measured so much of this start, up to now."""
        known = self.uses.get(host, JobUse(use.epoch))
        self.uses = {**self.uses, host: known.up_to(use)}
        self.gpu_bytes, self.host_bytes = max(self.gpu_bytes, use.gpu_bytes), max(self.host_bytes, use.host_bytes)

    def saved(self, age_s: float, attained: float, rack_s: float) -> None:
        """Ranks completed a checkpoint so many seconds ago."""
        self._pass(rack_s)
        if self.start is None:
            return
        now = self._mark(attained)
        since_then = len(self.since) * min(max(0.0, age_s), SAVED_AGE_MAX_S)
        self.safe = msgspec.structs.replace(now, held=max(self.safe.held, now.held - since_then))

    def stopping(self, attained: float, rack_s: float) -> None:
        """The job's ranks are told to stop; repeated, the first one counts."""
        self._pass(rack_s)
        if self.stop is None and self.start is not None:
            self.stop = self._mark(attained)

    def end(self, lost_to: str, again: bool, attained: float, rack_s: float, gpus: int = 0) -> None:
        """All hosts have reported: account for this start. `lost_to`: `preempted` or `failed`; empty: nothing is lost.
        `again`: it was not the first start; `gpus`: on so many GPUs, 0: not known."""
        self._pass(rack_s)
        self.over += self._accounted(lost_to, again, attained)
        self._measure(again, attained, gpus)
        self.start = self.stop = None
        self.uses = {}

    def _measure(self, again: bool, attained: float, gpus: int) -> None:
        """Note how long this start took until its first step, if ranks ran, and how long to end, if it was told to."""
        start, stop, end = self.start, self.stop, self._mark(attained)
        if start is None or not gpus:
            return
        if again and self.stopped_s is not None and attained > start.attained:
            unserved = _unserved(start, end if stop is None else stop)
            self.restart_s = self.stopped_s + (min(unserved, _unserved(start, end)) + self._begun()) / gpus
        self.stopped_s = None if stop is None else (end.held - stop.held) / gpus

    def now(self, again: bool, attained: float, rack_s: float) -> GpuSeconds:
        """What became of all time up to now, as far as hosts have said, and taking for granted that the present start
        loses nothing."""
        sums = msgspec.structs.replace(self)
        sums._pass(rack_s)
        served = sums.held_gpu_s if self.start is None else self.start.attained + sums.held_gpu_s - self.start.held
        return sums.over + sums._accounted("", again, max(attained, served))

    def _mark(self, attained: float) -> BillMark:
        seen = sum((use.seen_gpu_s for use in self.uses.values()), 0.0)
        return BillMark(self.held_gpu_s, attained, seen, sum((use.used_gpu_s for use in self.uses.values()), 0.0))

    def _begun(self) -> float:
        """GPU·s for which ranks of the present start ran before their first step."""
        return sum((use.starting_gpu_s for use in self.uses.values()), 0.0)

    def _accounted(self, lost_to: str, again: bool, attained: float) -> GpuSeconds:
        """The present start's time, every second of it once: first what is lost, then what starting again took, then
        what was in use; what hosts did not see is not known."""
        start, stop, end = self.start, self.stop, self._mark(attained)
        if start is None:
            return GpuSeconds()
        stop = end if stop is None else stop
        held = end.held - start.held
        lost = min(held, end.held - min(max(self.safe.held, start.held), stop.held)) if lost_to else 0.0
        kept = held - lost
        unserved = min(_unserved(start, stop), _unserved(start, end))
        restarts = min(kept, unserved + self._begun()) if again else 0.0
        left = kept - restarts
        seen = min(left, _kept(end.seen, self.safe.seen, lost, held) if lost else end.seen)
        used = min(seen, _kept(end.used, self.safe.used, lost, held) if lost else end.used)
        idle = min(left - used, max(seen - used, 0.0 if again else unserved))
        return GpuSeconds(
            held=held,
            used=used,
            idle=idle,
            unknown=max(0.0, left - used - idle),
            preempted=lost if lost_to == "preempted" else 0.0,
            failed=lost if lost_to == "failed" else 0.0,
            restarts=restarts,
        )

    def check(self, held: int) -> None:
        """Raise AssertionError unless all that was held is accounted for. `held`: GPUs that the log says it holds."""
        assert len(self.since) == held, f"{len(self.since)} GPUs are counted, and {held} are held"
        self.over.check()
        begun = self.held_gpu_s if self.start is None else self.start.held
        assert abs(begun - self.over.held) <= 1e-6 * max(1.0, begun), f"{self.over.held} of {begun} GPU s accounted for"
        named = sum(self.gpus.values()) + sum(self.at_s - since_s for since_s in self.since.values())
        assert abs(named - self.held_gpu_s) <= 1e-6 * max(1.0, named), f"{named} GPU s by GPU, {self.held_gpu_s} held"


def _unserved(start: BillMark, end: BillMark) -> float:
    """GPU·s held between two moments in which no rank ran."""
    return max(0.0, (end.held - start.held) - (end.attained - start.attained))


def _kept(whole: float, told: float, lost: float, held: float) -> float:
    """How much of what hosts saw of a start belongs to the part of it that is not lost: as much of it as of the time,
    and no less than what they had told when that part ended, or what does not fit into the rest."""
    return max(whole * (held - lost) / held, min(told, whole), whole - lost)


def _count(gpus: dict[str, float], name: str, gpu_s: float) -> None:
    name = name if name in gpus or len(gpus) < GPUS_MAX else OTHERS
    gpus[name] = gpus.get(name, 0.0) + gpu_s

"""Jobs in virtual time under one policy: exact whole seconds, from event to event.

    WAIT -> RUN -> done            first start: at once
     ^       |
     |     SUSP   a checkpoint: holds the GPUs, makes no progress, is in no order
     |       |
     +-------+-> WAIT -> RESUME -> RUN    a restart: holds the GPUs, makes no progress

Events of one instant come in this order, and one decision follows them: completions, ends of checkpoints and restores,
arrivals, demotions, promotions. A job attains service (GPUs times seconds) only while it makes progress, and waits only
in WAIT. The order itself is `plugins.scheduler.machine.leader.order_book`, the same walk that agents take.
"""

import bisect
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from plugins.scheduler.machine.leader.gang_clocks import GangClocks
from plugins.scheduler.machine.leader.order_book import JOB_BITS, OrderBook
from plugins.scheduler.policy.history import History
from plugins.scheduler.policy.order import due_second, promoted_after
from plugins.scheduler.policy.rules import MOVING, OrderRules
from sim.jobs.engine_losses import Losses
from sim.jobs.engine_moving import Evaluated, Paced
from sim.jobs.engine_places import Floor, Placing
from sim.kernel import PackedEvents

WAIT, RUN, RESUME, SUSP, DONE, UNBORN = range(6)
COMPLETE, READY, _ARRIVE, DEMOTE, PROMOTE = 2, 3, 4, 5, 6
"""Kinds of events of a job, in their order within one second."""
NEVER = 1 << 44
"""Later than any second: the first start of a job that has not started."""


@dataclass(frozen=True)
class SimJob:
    """One gang of a trace. Times are whole seconds."""

    id: str | int
    submit_s: int
    gpus: int
    duration_s: int
    limit_s: int | None = None
    """Time limit that was asked for, in seconds; only `backfill` looks at it."""
    tenant: str = ""
    skew: float | None = None
    """Bytes of the largest tensor over bytes of all, 0..1; None: not known. Used only where there are hosts."""
    spread_slowdown: Fraction | None = None
    """How much longer the gang takes when it is skewed and spread; None: the value of `Placing`."""


@dataclass
class Outcome:
    """What became of each job, by its index in the given list; times in seconds."""

    end_s: list[int]
    first_s: list[int]
    wait_s: list[int]
    preempted: list[int]
    promoted: list[int]
    decisions: int = 0
    restarts_gpu_s: int = 0
    """GPUs times seconds that went to checkpoints, restores, and work that was done twice."""
    held_gpu_s: int = 0
    """GPUs times seconds for which jobs held them, overheads included."""
    timeline: list[tuple[int, list[str | int]]] = field(default_factory=list)
    """(second, jobs that hold GPUs and do not checkpoint) at each change; only when it was asked for."""


class Engine:
    """One run. `jobs` may be in any order; none is wider than `capacity`."""

    def __init__(
        self,
        jobs: Sequence[SimJob],
        capacity: int,
        rules: OrderRules,
        history: History | None = None,
        watch: bool = False,
    ) -> None:
        order = sorted(range(len(jobs)), key=lambda at: (jobs[at].submit_s, jobs[at].id))
        self.given = order
        self.jobs = [jobs[at] for at in order]
        ranks = {id: rank for rank, id in enumerate(sorted(job.id for job in jobs))}
        self.by_id = [ranks[job.id] for job in self.jobs]
        self.capacity, self.rules, self.history, self.watch = capacity, rules, history or History(()), watch
        count = len(jobs)
        self.width = [job.gpus for job in self.jobs]
        self.duration = [job.duration_s for job in self.jobs]
        if any(width > capacity or width < 1 for width in self.width):
            raise ValueError(f"a job of no GPU, or of more than {capacity}, can never run")
        if len(ranks) != count:
            raise ValueError("two jobs have one id")
        self.state = [UNBORN] * count
        self.since = [0] * count
        self.remaining = list(self.duration)
        """Productive seconds still to come for each job, when it was last looked at."""
        self.ran = [0] * count
        """Productive seconds of each job since its last promotion."""
        self.waited = [0] * count
        """Waiting seconds of each job since its last promotion."""
        self.queue = [0] * count
        self.first = [NEVER] * count
        self.due = [0] * count
        """Second at which a waiting job will be promoted, if it still waits; decided at the next multiple of the
        quantum."""
        self.lead = [0] * count
        """Key of each job among the promoted; 0: it is not promoted."""
        self.losses = None if rules.checkpoint_every_s is None else Losses(self, rules)
        """What stops lose; None: nothing, since every job saves then."""
        self.lasts = [False] * count
        """Whether each job was promoted until it ends."""
        self.forgiven = [False] * count
        """Whether each job was promoted in an order without queues."""
        self.key = [0] * count
        self.out = Outcome([0] * count, [0] * count, [0] * count, [0] * count, [0] * count)
        self.events = PackedEvents(count)
        self.suspended = 0
        self.arrivals = [*(job.submit_s for job in self.jobs), NEVER]
        """Seconds of arrival, ascending; the last entry is no job."""
        self.arrived = 0
        self.left = count
        self.now = 0
        self.decided_at = -1
        self.floor: Floor | None = None
        """Hosts and the gangs on them; None: GPUs are alike."""
        self.dirty = False
        """Whether something happened since the last decision."""
        self.clocks = None if rules.gang_patience_s is None else GangClocks(rules.gang_patience_s)
        """The clocks of wide gangs; None: none is promoted for its age."""
        discipline = rules.discipline
        self.thresholds = rules.thresholds_gpu_s if discipline in ("dlas", "dgittins") else ()
        self.moving = discipline in MOVING
        self.quantum = None if discipline in ("fifo", "fjf", "gandiva") else rules.quantum_s
        merged = discipline == "sjf" or self.moving or (discipline == "dlas" and rules.inside == "first")
        self.paced = self.evaluated = None
        if discipline in ("las", "srsf", "srtf"):
            self.paced = Paced(self.width, 1 if discipline == "las" else -1, discipline != "srtf")
        elif self.moving:
            self.evaluated = Evaluated(self.width, len(self.thresholds) + 1, lambda job: self._key(job, True))
        self.book = OrderBook(
            len(self.thresholds) + 1,
            self.width,
            merged=merged,
            blocking=discipline == "fifo",
            moving=self.paced or self.evaluated,
        )
        self._prepare()

    def _prepare(self) -> None:
        """The last step of the constructor: a subclass sets up the state that it adds."""

    def on_hosts(self, hosts: int, placing: Placing) -> None:
        """Put the GPUs on `hosts` hosts, so that a job that starts gets a place on them; to be called before `run`."""
        jobs = self.jobs
        self.floor = Floor(
            hosts,
            self.capacity // hosts,
            placing,
            lambda job: (jobs[job].gpus, jobs[job].skew, jobs[job].spread_slowdown),
        )

    # ---- keys ----

    def _key(self, job: int, running: bool) -> int:
        """The job's key now in the order of its queue."""
        rules = self.rules
        match rules.discipline:
            case "dlas":
                if rules.narrow_first and not running:
                    return ((self.width[job] << 45 | self.first[job]) << JOB_BITS) | job
                return self.first[job] << JOB_BITS | job
            case "sjf":
                return self.width[job] << JOB_BITS | job
            case "las":
                rank = self._attained(job)
            case "srsf":
                rank = self._remains(job) * self.width[job]
            case "srtf":
                rank = self._remains(job)
            case "gittins":
                rank = falling(self.history.best(self._attained(job)))
            case "dgittins":
                return self._discrete_key(job, running)
            case _:
                return job
        return (rank << JOB_BITS | self.by_id[job]) << JOB_BITS | job

    def _discrete_key(self, job: int, running: bool) -> int:
        """Key under 2D-Gittins with queues: by index (Δ is the upper limit of the queue), except in the last one."""
        queue = self.queue[job]
        index = 0
        if queue < len(self.thresholds):
            index = falling(self.history.index(self._attained(job), self.thresholds[queue]))
        stays = 0 if running or self.rules.inside == "first" else 1
        return ((index << 46 | stays << 45 | self.first[job]) << JOB_BITS) | job

    def _ran(self, job: int) -> int:
        return self.ran[job] + (self.now - self.since[job] if self.state[job] == RUN else 0)

    def _remains(self, job: int) -> int:
        return self.remaining[job] - (self.now - self.since[job] if self.state[job] == RUN else 0)

    def _attained(self, job: int) -> int:
        return self._ran(job) * self.width[job]

    # ---- the run ----

    def run(self, progress: Callable[[float, str], None] | None = None) -> Outcome:
        """Run until every job has ended."""
        if self.watch:
            self._record()
        steps, total = 0, max(1, len(self.jobs))
        while self.left:
            self.now = self._next()
            if self.paced is not None:
                self.paced.now = self.now
            elif self.evaluated is not None:
                self.evaluated.now = self.now
            if self._take() or self.moving or self.dirty:
                self._decide()
            if self.clocks is not None:
                self.clocks.settle(self.capacity)
            if self.watch:
                self._record()
            steps += 1
            if progress is not None and steps % 4096 == 0:
                done = total - self.left
                progress(done / total, f"{done} of {total} jobs ended, {self.now / 86400:.1f} days of virtual time")
        return self._outcome()

    def _outcome(self) -> Outcome:
        """The outcome, in the order in which the jobs were given."""
        out = self.out
        for name in ("end_s", "first_s", "wait_s", "preempted", "promoted"):
            values = getattr(out, name)
            given = [0] * len(values)
            for at, value in zip(self.given, values, strict=True):
                given[at] = value
            setattr(out, name, given)
        return out

    def _next(self) -> int:
        """The next second at which something happens."""
        now = self.arrivals[self.arrived]
        at = self.events.next_at()
        if at is not None and at < now:
            now = at
        if self.losses is not None:
            at = self.losses.next_s()
            now = now if at is None else min(now, max(self.now + 1, at))
        if self.clocks is not None:
            due = self.clocks.next_s()
            now = now if due is None else min(now, max(self.now + 1, math.ceil(due)))
        if self.quantum is not None and (self.dirty or self.moving) and self._active():
            after = self.now if self.now > self.decided_at else self.now + 1
            now = min(now, -(-after // self.quantum) * self.quantum)
        return now

    def _active(self) -> bool:
        return self.left > len(self.jobs) - self.arrived

    def _take(self) -> bool:
        """Handle everything that happens now; returns whether a decision is needed."""
        now = self.now
        changed = False
        if self.clocks is not None:
            self.clocks.begin(now)
        for kind, job in self.events.due(now):
            if kind == COMPLETE:
                self._complete(job)
            elif kind == READY:
                if self.state[job] == RESUME:
                    self._accrue(job)
                    self._go(job)
                    continue
                self.suspended -= self.width[job]
                self._lift(job)
                self._stopped(job)
            elif kind == DEMOTE:
                self._demote(job)
            else:
                self.lasts[job] = self.clocks is not None and job in self.clocks.due()
                self._promote(job)
            changed = True
        while self.arrivals[self.arrived] == now:
            self._wait(self.arrived)
            self.arrived += 1
            changed = True
        if self.clocks is not None:
            self.clocks.settle(self.capacity)
            for job in self.clocks.due():
                self.due[job], self.lasts[job] = now, True
                self.events.cancel(job)
                self._promote(job)
                changed = True
        if self.losses is not None and self.losses.take():
            changed = True
        return changed

    def _decide(self) -> None:
        now, rules = self.now, self.rules
        if self.quantum is not None and now % self.quantum:
            self.dirty = True
            return
        self.dirty = False
        self.decided_at = now
        self.out.decisions += 1
        start, stop = self._walk()
        for job in stop:
            self._preempt(job, rules.preempt_s)
        for job in start:
            self._start(job, rules.restore_s)

    def _walk(self) -> tuple[list[int], list[int]]:
        book = self.book
        if self.rules.preempt_s == 0:
            vacant = self.capacity
        else:
            vacant = self.capacity - self.suspended - book.firm - sum(book.held)
            for _, width, running in book.promoted:
                vacant -= width if running else 0
        return book.decide(self.capacity, vacant)

    # ---- what happens to a job ----

    def _wait(self, job: int) -> None:
        self.state[job] = WAIT
        self.since[job] = self.now
        if self.clocks is not None:
            self.clocks.put(job, self.width[job], not self.lead[job], self.ran[job])
        if self.lead[job]:
            self.book.promote(self.lead[job], False)
            return
        queue = self.queue[job]
        key = self.key[job] = self._key(job, False)
        self.book.wait(queue, key)
        due = None if self.forgiven[job] else self._promotion(job, queue)
        if due is not None:
            self.due[job] = due
            quantum = self.quantum or 1
            self.events.post(job, -(-due // quantum) * quantum, PROMOTE)

    def _promotion(self, job: int, queue: int) -> int | None:
        """Second at which this job, if it waits from now on, will be promoted, after the decision that is being taken;
        None: never."""
        rules = self.rules
        after = promoted_after(queue, self.ran[job], self.waited[job], rules.knob, rules.starve_limit_s)
        return None if after is None else max(due_second(self.now, after), self.decided_at + 1)

    def _start(self, job: int, restore_s: int) -> None:
        """Give a waiting job its GPUs."""
        now = self.now
        if self.clocks is not None:
            self.clocks.put(job, self.width[job], False)
        waited = now - self.since[job]
        self.waited[job] += waited
        self.out.wait_s[job] += waited
        again = self.first[job] != NEVER
        if self.lead[job]:
            self.book.demote(self.lead[job])
        if not again:
            self.first[job] = now
        if self.floor is not None:
            self.remaining[job] = self.floor.put(job, self.remaining[job])
        self.state[job] = RESUME
        if self.lead[job]:
            self.book.promote(self.lead[job], True)
        else:
            self._enter(job)
        if self.losses is not None:
            self.losses.started(job)
        if again and restore_s:
            self.since[job] = now
            self.out.restarts_gpu_s += restore_s * self.width[job]
            self.events.post(job, now + restore_s, READY)
        else:
            self._go(job)

    def _enter(self, job: int) -> None:
        queue = self.queue[job]
        if self.paced is not None:
            self.paced.hold(job, self._key(job, True))
        elif self.evaluated is not None:
            self.evaluated.enter(job, queue)
        key = self.key[job] = job if self.moving else self._key(job, True)
        self.book.run(queue, key)

    def _go(self, job: int) -> None:
        """Let the job make progress from now on."""
        if self.paced is not None:
            self.paced.go(job)
        self.state[job] = RUN
        self.since[job] = self.now
        if self.losses is not None:
            self.losses.went(job)
        self._watch_run(job)

    def _watch_run(self, job: int) -> None:
        """Post what comes first for the job: its end, or the limit of its queue. At the same instant it ends."""
        now = self.now
        end = now + self.remaining[job]
        queue = self.queue[job]
        if queue < len(self.thresholds) and not self.lasts[job]:
            width = self.width[job]
            down = now - (self.ran[job] * width - self.thresholds[queue]) // width
            if self.quantum is not None:
                down = -(-down // self.quantum) * self.quantum
            if down < end:
                self.events.post(job, down, DEMOTE)
                return
        self.events.post(job, end, COMPLETE)

    def _accrue(self, job: int) -> None:
        """Count what a job gained since it was last looked at."""
        passed = self.now - self.since[job]
        if self.state[job] == RUN:
            self.remaining[job] -= passed
            self.ran[job] += passed
        self.out.held_gpu_s += passed * self.width[job]
        self.since[job] = self.now

    def _vacate(self, job: int) -> None:
        if self.losses is not None:
            self.losses.back(job)
        if self.lead[job]:
            self.book.demote(self.lead[job])
        else:
            self.book.stop(self.queue[job], self.key[job])
            if self.paced is not None:
                self.paced.drop(job)
            elif self.evaluated is not None:
                self.evaluated.drop(job)

    def _lift(self, job: int) -> None:
        """Free the GPUs of a job."""
        if self.floor is not None:
            self.remaining[job] = self.floor.lift(job, self.remaining[job])

    def _complete(self, job: int) -> None:
        self._accrue(job)
        self._vacate(job)
        if self.losses is not None:
            self.losses.drop(job)
        self._lift(job)
        self.state[job] = DONE
        self.out.end_s[job] = self.now
        self.out.first_s[job] = self.first[job]
        self.left -= 1
        if self.clocks is not None:
            self.clocks.drop(job)

    def _preempt(self, job: int, preempt_s: int) -> None:
        self._accrue(job)
        self._vacate(job)
        if self.losses is not None:
            lost_s = self.losses.lost_s(job) if self.state[job] == RUN else 0
            self.remaining[job] += lost_s
            self.out.restarts_gpu_s += lost_s * self.width[job]
            self.losses.drop(job)
        self.out.restarts_gpu_s += preempt_s * self.width[job]
        self.out.preempted[job] += 1
        self.state[job] = SUSP
        if preempt_s:
            self.suspended += self.width[job]
            self.out.held_gpu_s += preempt_s * self.width[job]
            self.events.post(job, self.now + preempt_s, READY)
        else:
            self.events.cancel(job)
            self._lift(job)
            self._stopped(job)

    def _stopped(self, job: int) -> None:
        """The job's ranks have ended, since it was told to stop."""
        if self.losses is not None:
            self.losses.lost_by_stop()
        self._wait(job)

    def _demote(self, job: int) -> None:
        self._accrue(job)
        attained = self.ran[job] * self.width[job]
        self._vacate(job)
        self.lead[job] = 0
        self.queue[job] = bisect.bisect_right(self.thresholds, attained)
        self._enter(job)
        if self.losses is not None:
            self.losses.settle(job)
        self._watch_run(job)

    def _promote(self, job: int) -> None:
        """Promote a waiting job. The orders with queues put it first; the others only forget its attained service,
        once."""
        self.book.leave(self.queue[job], self.key[job])
        self.out.wait_s[job] += self.now - self.since[job]
        self.since[job] = self.now
        self.ran[job] = self.waited[job] = self.queue[job] = 0
        if self.clocks is not None:
            self.clocks.put(job, self.width[job], False)
            self.clocks.forgive(job)
        if self.rules.discipline not in ("dlas", "dgittins"):
            self.out.promoted[job] += 1
            self.forgiven[job] = True
            self.key[job] = self._key(job, False)
            self.book.wait(0, self.key[job])
            return
        self.lead[job] = (self.due[job] + 1 << JOB_BITS | self.by_id[job]) << JOB_BITS | job
        self.book.promote(self.lead[job], False)
        self.out.promoted[job] += 1

    def _record(self) -> None:
        holding = sorted(self.jobs[job].id for job, state in enumerate(self.state) if state in (RUN, RESUME))
        timeline = self.out.timeline
        if timeline and timeline[-1][0] == self.now:
            timeline.pop()
        if not timeline or timeline[-1][1] != holding:
            timeline.append((self.now, list(holding)))


_FLOAT = struct.Struct("<d")
_BITS = struct.Struct("<Q")
_LARGEST = (1 << 63) - 1


def falling(index: tuple[int, int]) -> int:
    """A whole number that is smaller the larger this fraction (0 or more) is. Equal fractions give equal numbers; the
    quotient is correctly rounded, so only fractions that differ by less than 1e-16 of themselves may agree."""
    bits: int = _BITS.unpack(_FLOAT.pack(index[0] / index[1]))[0]
    return _LARGEST - bits

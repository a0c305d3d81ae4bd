"""One job with parameter servers on hosts in virtual time, and the tuner that drives it (Cruise §3.3).

What hosts do here differs from the cost model. A worker computes a mini-batch, which takes a random time, then pulls
the model and pushes its gradient: at the speed of its own card or of the server with the most to send, whichever is
slower, plus a fixed cost for each server that is asked. It works on its own blocks until all blocks of all workers are
done; then the next epoch begins. The tuner gets what a live one would: mini-batches timed and cards measured, each
with noise, and its steps take time: executors start and end, blocks cross the network, lost ones are read again. No
worker computes on a block that is on its way; other traffic is not slowed by moves.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from covey.core.events import LogEvent
from covey.core.ids import HostId, JobId
from plugins.tuner.machine.disjoint import (
    BATCHES_MIN,
    Available,
    BatchReported,
    DisjointEvent,
    DisjointTuner,
    HostLost,
    HostsChanged,
    NicReported,
    Perform,
    StepDone,
)
from plugins.tuner.policy.blocks import whole
from plugins.tuner.policy.cost import Load
from plugins.tuner.policy.gain import GAIN_MIN
from plugins.tuner.policy.plan import Configuration
from plugins.tuner.policy.steps import Add, Delete, Move, Recover, Role, Start, Stop, Switch
from sim.kernel import Kernel
from sim.report import Progress

MESSAGE_S = 0.0004
"""Seconds that a worker takes for each server that it asks, in each mini-batch. Ours."""
EXECUTOR_S = 2.5
"""Seconds to start an executor, and to end one (§3.4.6: 2 to 3 s)."""
SWITCH_S = 0.05
"""Seconds to change a role; "negligible" (§3.4.6)."""
MOVE_SHARE = 0.1
"""Share of a network card that moved blocks get: 4 blocks of 100 MB took 25.8 s over 1.25 Gbit/s (§3.4.6)."""


@dataclass(frozen=True)
class Machine:
    """One host as it really is, and what happens to it. Times are seconds from the start of the job; None for never."""

    host: HostId
    sample_s: float
    """Seconds of computing for one sample."""
    nic_bytes_per_s: float
    kind: str = ""
    joins_s: float = 0.0
    leaves_s: float | None = None
    """Time at which the host is asked back; it is emptied first."""
    lost_s: float | None = None
    """Time at which the host dies, with all that it holds."""
    slows_s: float | None = None
    slows_times: float = 1.0
    """Factor of the time of computing from `slows_s` on."""


@dataclass(frozen=True)
class Job:
    load: Load
    data_bytes: float
    """Bytes of all training data."""
    data_blocks: int = 1000
    model_blocks: int = 500


@dataclass
class Outcome:
    """What became of one run."""

    epochs: list[tuple[float, float]] = field(default_factory=list)
    """(end, length) of each epoch, in seconds."""
    splits: list[tuple[float, int, int]] = field(default_factory=list)
    """(when, workers, servers) at the start, and at the end of each plan."""
    story: list[tuple[float, str, str]] = field(default_factory=list)
    """(when, event, reason) of what the tuner logs, except decisions to stay."""
    kept: int = 0
    """Number of decisions to stay."""
    moves: int = 0
    blocks: int = 0
    moving_s: float = 0.0
    """Seconds in which a plan was under way."""
    roles: dict[HostId, Role] = field(default_factory=dict)
    """Roles of the hosts at the end."""

    @property
    def settled_s(self) -> float:
        """Time at which the last plan ended."""
        return self.splits[-1][0]

    def epoch_s(self, after_s: float = 0.0) -> float:
        """Mean seconds of the epochs that began after `after_s`; those of the last one if there is none."""
        found = [length for end, length in self.epochs if end - length >= after_s]
        return sum(found) / len(found) if found else self.epochs[-1][1]


def start_of(job: Job, machines: Sequence[Machine], workers: Sequence[HostId]) -> Configuration:
    """The configuration in which these hosts work and the other present ones serve, with equal shares of whole
    blocks."""
    there = [machine.host for machine in machines if machine.joins_s <= 0]
    servers = [host for host in there if host not in set(workers)]
    roles: dict[HostId, Role] = {host: "worker" if host in set(workers) else "server" for host in there}
    return Configuration(roles, _dealt(job.data_blocks, workers), _dealt(job.model_blocks, servers))


def _dealt(blocks: int, hosts: Sequence[HostId]) -> dict[HostId, tuple[int, ...]]:
    found, first = {}, 0
    for host, count in zip(hosts, whole(blocks, [1.0] * len(hosts)), strict=True):
        found[host] = tuple(range(first, first + count))
        first += count
    return found


class Cluster:
    """The job on its hosts. With `tunes` off the tuner gets hosts that come and go, and no measurement."""

    def __init__(
        self,
        job: Job,
        machines: Sequence[Machine],
        start: Configuration,
        noise: float,
        rng: random.Random,
        batches_min: int = BATCHES_MIN,
        gain_min: float = GAIN_MIN,
        tunes: bool = True,
    ) -> None:
        self.job, self.noise, self.rng, self.tunes = job, noise, rng, tunes
        self.machines = {machine.host: machine for machine in machines}
        self.here = {machine.host for machine in machines if machine.joins_s <= 0}
        self.tuner = DisjointTuner(JobId("job"), job.load, start, self._available(), batches_min, gain_min)
        self.kernel: Kernel[float, Callable[[], None]] = Kernel(0.0)
        self.began_s = 0.0
        self.changed_s: float | None = None
        self.left = dict.fromkeys(range(job.data_blocks), self._per_block)
        """Samples of each block that are still to do in this epoch."""
        self.to_do = job.data_blocks
        """Number of blocks that have samples to do."""
        self.busy: dict[HostId, float] = {}
        """Time at which each worker ends its mini-batch."""
        self.taken: dict[HostId, list[tuple[int, float]]] = {}
        """(block, samples) of each worker's mini-batch."""
        self.stopping: set[HostId] = set()
        self.moving: dict[tuple[int, int], Move | Recover] = {}
        self.away: set[int] = set()
        """Data blocks on their way."""
        self.outcome = Outcome()

    @property
    def _per_block(self) -> float:
        return self.job.load.samples / self.job.data_blocks

    @property
    def now_s(self) -> float:
        return self.kernel.now

    def run(self, epochs: int, progress: Progress) -> Outcome:
        """Run until `epochs` epochs are done, or nothing can happen any more."""
        self._rest()
        changes: dict[float, tuple[list[HostId], list[HostId]]] = {}
        for machine in self.machines.values():
            self._later(machine.slows_s, partial(self._slowed, machine))
            self._later(machine.lost_s, partial(self._lost, machine.host))
            for which, at_s in enumerate((machine.joins_s or None, machine.leaves_s)):
                if at_s is not None:
                    changes.setdefault(at_s, ([], []))[which].append(machine.host)
        for at_s, (joining, leaving) in sorted(changes.items()):
            self._later(at_s, partial(self._hosts, joining, leaving))
        self._cards()
        self._work()

        def happens(event: Callable[[], None]) -> None:
            event()
            self._work()
            progress(len(self.outcome.epochs) / epochs, f"epoch {len(self.outcome.epochs)}")

        self.kernel.run_while(lambda: len(self.outcome.epochs) < epochs, happens)
        self.outcome.roles = dict(self.tuner.roles)
        return self.outcome

    # ---- work ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Start a mini-batch on every worker that could compute."""
        if not self.to_do and not self.busy:
            self._next_epoch()
        for host in sorted(self.tuner.computing - self.stopping) if self.to_do else ():
            if host not in self.busy:
                self._batch(host)

    def _batch(self, host: HostId) -> None:
        """Start a mini-batch, from the worker's own blocks in their order."""
        taken, parts = 0.0, []
        for block in self.tuner.data.get(host, ()):
            if self.job.load.batch - taken < 1:
                break
            if block not in self.away and self.left[block] > 0:
                part = min(self.job.load.batch - taken, self.left[block])
                part = self.left[block] if self.left[block] - part < 1 else part  # no rest under one sample
                parts.append((block, part))
                self._give(block, -part)
                taken += part
        if not parts:
            return
        self.taken[host] = parts
        compute_s = self.machines[host].sample_s * taken * self._noisy()
        end_s = self.now_s + compute_s + self._wire(host)
        self.busy[host] = end_s
        self._later(end_s, lambda: self._timed(host, end_s, taken, compute_s))

    def _timed(self, host: HostId, end_s: float, samples: float, compute_s: float) -> None:
        if self.busy.get(host) != end_s:
            return
        del self.busy[host], self.taken[host]
        if self.tunes:
            self._tell(BatchReported(host, max(1, round(samples)), compute_s))

    def _give(self, block: int, samples: float) -> None:
        before, after = self.left[block], self.left[block] + samples
        self.left[block] = after = after if after > 1e-6 else 0.0
        self.to_do += (after > 0) - (before > 0)

    def _wire(self, host: HostId) -> float:
        """Seconds that a worker takes for one pull and push, with the present servers and workers."""
        asking = len(self.tuner.computing)
        each = self.job.load.model_bytes / self.job.model_blocks
        owned = {at: len(blocks) for at, blocks in self.tuner.model.items() if blocks}
        serving = [(blocks * each, self.machines[at].nic_bytes_per_s) for at, blocks in owned.items()]
        slowest = max((share * asking / rate for share, rate in serving), default=0.0)
        return max(self.job.load.model_bytes / self.machines[host].nic_bytes_per_s, slowest) + MESSAGE_S * len(serving)

    def _next_epoch(self) -> None:
        self.outcome.epochs.append((self.now_s, self.now_s - self.began_s))
        self.began_s = self.now_s
        self.left = dict.fromkeys(self.left, self._per_block)
        self.to_do = len(self.left)
        self._cards()

    def _cards(self) -> None:
        """Let all hosts of the job report their network."""
        if self.tunes:
            for host in sorted(self.tuner.roles):
                self._tell(NicReported(host, self.machines[host].nic_bytes_per_s * self._noisy()))

    def _noisy(self) -> float:
        return self.rng.lognormvariate(-self.noise * self.noise / 2, self.noise)

    # ---- hosts ---------------------------------------------------------------------------------------------------

    def _available(self) -> Mapping[HostId, Available]:
        found = [self.machines[host] for host in sorted(self.here)]
        return {each.host: Available(each.kind, each.nic_bytes_per_s) for each in found}

    def _hosts(self, joining: Sequence[HostId], leaving: Sequence[HostId]) -> None:
        for event, hosts in (("Joined", joining), ("Leaves", leaving)):
            if hosts:
                named = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts, {hosts[0]} to {hosts[-1]}"
                self.outcome.story.append((self.now_s, event, named))
        self.here = (self.here | set(joining)) - set(leaving)
        self._tell(HostsChanged(self._available()))

    def _lost(self, host: HostId) -> None:
        self.here.discard(host)
        self.busy.pop(host, None)
        for block, samples in self.taken.pop(host, []):
            self._give(block, samples)  # what it was computing is lost with it
        self._tell(HostLost(host))

    def _slowed(self, machine: Machine) -> None:
        slower = self.machines[machine.host].sample_s * machine.slows_times
        self.machines[machine.host] = replace(machine, sample_s=slower)
        self.outcome.story.append((self.now_s, "Slower", f"{machine.host}, {machine.slows_times:g} times"))

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _tell(self, event: DisjointEvent) -> None:
        before = self.tuner.plan
        actions = self.tuner.handle(event, self.now_s)
        self._track()
        for action in actions:
            if isinstance(action, Perform):
                self._perform(action)
            elif isinstance(action, LogEvent):
                self._note(action)
        if before is None and self.tuner.plan is not None:
            self.changed_s = self.now_s
        elif self.changed_s is not None and self.tuner.plan is None:
            self.outcome.moving_s += self.now_s - self.changed_s
            self.changed_s = None
            self._rest()

    def _track(self) -> None:
        """Forget moves that the tuner has dropped."""
        for plan, at in sorted(self.moving):
            if self.tuner.plan is None or plan != self.tuner.plans or at in self.tuner.done:
                self._arrived(plan, at)

    def _arrived(self, plan: int, at: int) -> None:
        step = self.moving.pop((plan, at))
        if step.kind == "data":
            self.away -= set(step.blocks)

    def _perform(self, order: Perform) -> None:
        step = order.step
        took_s = 0.0
        if isinstance(step, (Add, Delete)):
            took_s = EXECUTOR_S
        elif isinstance(step, Switch):
            took_s = SWITCH_S
        elif isinstance(step, Stop):
            self.stopping.add(step.host)
            took_s = max(0.0, self.busy.get(step.host, 0.0) - self.now_s)
        elif isinstance(step, (Move, Recover)):
            self.moving[order.plan, order.at] = step
            self.away |= set(step.blocks) if step.kind == "data" else set()
            self.outcome.moves += 1
            self.outcome.blocks += len(step.blocks)
            took_s = self._move_s(step)
        else:
            assert isinstance(step, Start)
        self._later(self.now_s + took_s, lambda: self._done(order))

    def _done(self, order: Perform) -> None:
        if isinstance(order.step, Stop):
            self.stopping.discard(order.step.host)
        if (order.plan, order.at) in self.moving:
            self._arrived(order.plan, order.at)
        self._tell(StepDone(order.plan, order.at))

    def _move_s(self, step: Move | Recover) -> float:
        """Seconds of a move. Moves that use one card share what it gives them, counted when this one begins."""
        of = self.job.data_bytes / self.job.data_blocks if step.kind == "data" else (
            self.job.load.model_bytes / self.job.model_blocks
        )  # fmt: skip
        ends = [_ends(each) for each in self.moving.values()]
        rates = [
            self.machines[host].nic_bytes_per_s * MOVE_SHARE / max(1, sum(host in each for each in ends))
            for host in _ends(step)
        ]
        return len(step.blocks) * of / min(rates)

    def _note(self, note: LogEvent) -> None:
        if note.event == "Kept":
            self.outcome.kept += 1
        else:
            self.outcome.story.append((self.now_s, note.event, note.reason))

    def _rest(self) -> None:
        roles = list(self.tuner.roles.values())
        self.outcome.splits.append((self.now_s, roles.count("worker"), roles.count("server")))

    def _later(self, at_s: float | None, happens: Callable[[], None]) -> None:
        if at_s is not None:
            self.kernel.post(at_s, happens)


def _ends(step: Move | Recover) -> tuple[HostId, ...]:
    return (step.source, step.target) if isinstance(step, Move) else (step.host,)

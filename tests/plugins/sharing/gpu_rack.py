"""A GPU and its jobs, for stories: they apply limits with their next mini-batch, unless they are deaf."""

import random
from typing import Any

from covey.core.events import LogEvent
from covey.core.ids import JobId
from covey.core.units import GIB
from plugins.sharing.machine.events import GpuEvent, RankArrived, Reported, SetLimits
from plugins.sharing.machine.gpu import SharedGpu
from plugins.sharing.messages import Kind, Limits, Report


class Rack:
    """A GPU with obedient jobs: they apply limits with their next mini-batch."""

    def __init__(self, gib: int = 32) -> None:
        self.gpu = SharedGpu("GPU-0", gib * GIB, 0)
        self.now_s, self.busy = 0.0, True
        self.limits: dict[str, Limits] = {}
        self.deaf: set[str] = set()
        self.keeps: dict[str, int] = {}
        """Bytes that a job took at its start: it follows no smaller limit (JAX)."""
        self.acked: dict[str, int] = {}
        self.out: list[Any] = []
        self.rng = random.Random(2)

    def tell(self, event: GpuEvent, after_s: float = 0.0) -> list[Any]:
        self.now_s += after_s
        before = self.gpu.state
        actions = list(self.gpu.handle(event, self.now_s))
        self.gpu.check()
        for action in actions:
            if isinstance(action, SetLimits):
                self.limits[action.limits.job] = action.limits
        notes = [action for action in actions if isinstance(action, LogEvent)]
        assert all(note.reason for note in notes)
        if self.gpu.state != before:
            assert any(note.subject == "gpu/GPU-0" and note.event == self.gpu.state for note in notes)
        self.out += actions
        return actions

    def arrive(self, job: str, kind: Kind, gib: int, weight: float = 1.0) -> list[Any]:
        return self.tell(RankArrived(JobId(job), kind, gib * GIB, weight))

    def step(
        self,
        job: str,
        step_s: float = 0.02,
        peak: int | None = None,
        stable: int = GIB,
        spill: int = 0,
        retries: int = 0,
        gate: bool = True,
    ) -> list[Any]:
        took = self.keeps.get(job)
        if job not in self.deaf and job in self.limits and self.limits[job].memory_bytes >= (took or 0):
            self.acked[job] = self.limits[job].epoch
        held = self.limits[job].memory_bytes if peak is None else peak
        held, stable = (held, stable) if took is None else (took, took)
        took_s = step_s * self.rng.uniform(0.99, 1.01)
        sizes = (held, min(stable, held), spill, retries)
        fixed = took is not None
        report = Report(JobId(job), self.acked.get(job, 0), 1, took_s, took_s / 2, *sizes, gate=gate, fixed=fixed)
        return self.tell(Reported(report), took_s)

    def hold(self, job: str, gib: int, stable: int = GIB) -> list[Any]:
        """Let an opportunistic job come, ask for that much memory, and have all of it in its first mini-batch."""
        self.arrive(job, "opportunistic", gib)
        return self.step(job, peak=gib * GIB, stable=stable)

    def steps(self, count: int, *jobs: str, **how: Any) -> None:
        for _ in range(count):
            for job in jobs:
                self.step(job, **how)

    def gib(self, job: str) -> float:
        return self.limits[job].memory_bytes / GIB

    def stopped(self, job: str) -> bool:
        return self.limits[job].idle == 0 and self.limits[job].busy == 0

    def steady(self) -> None:
        """Bring the GPU to a guaranteed job `g` with 8 GiB beside an opportunistic `o`, measured and running."""
        self.hold("o", 20)
        self.arrive("g", "guaranteed", 8)
        self.step("o", peak=20 * GIB)
        for _ in range(200):
            self.step("g", peak=8 * GIB)
            self.step("o", peak=20 * GIB)
            if state(self) == "run":
                return
        raise AssertionError(f"never steady: {self.gpu.state}")


def state(rack: Rack) -> str:
    return rack.gpu.state


def kinds(actions: list[Any]) -> list[type]:
    return [type(action) for action in actions if not isinstance(action, (LogEvent, SetLimits))]


def said(actions: list[Any]) -> str:
    """Reasons in these actions, which people read."""
    return " | ".join(each.reason for each in actions if isinstance(each, LogEvent))

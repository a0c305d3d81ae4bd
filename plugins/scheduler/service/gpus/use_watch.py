"""What this host sees of the use of its GPUs. It goes to reservations (a GPU that foreign processes use is given to no
job), to `agentctl gpus`, `hosts` and `jobs`, and to `/metrics`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from covey.core.ids import JobId
from covey.ports.devices import DeviceProcess, Gpu
from covey.ports.env import Env
from plugins.scheduler.machine.host.gpu_uses import GpuLook, GpusLooked, GpuUses, idle_words
from plugins.scheduler.machine.host.reservations import Reservations
from plugins.scheduler.policy.shared import device_of

LOOK_S = 5.0
"""Seconds between two looks: each asks the driver once for every GPU that no job holds."""
WORDS_MAX = 400
"""The most characters of what is said of one job's GPUs on a host."""


def is_sick(gpu: Gpu) -> bool:
    """Whether the GPU takes no job."""
    return not gpu.takes_jobs


def use_of(gpu: Gpu, processes: tuple[DeviceProcess, ...] | None) -> float | None:
    """The use of the GPU, 0..1; None: not known, as of MIG instances. Simulated devices have a use only where a story
    gives them one."""
    if gpu.condition in ("unknown", "lost") or (gpu.simulated and not processes):
        return None
    return gpu.utilization


class UseWatch:
    """Looks at how this host's GPUs are used: of GPUs that no job holds every few seconds which processes are there,
    of held ones once they seem idle."""

    def __init__(self, env: Env, reservations: Callable[[], Reservations]) -> None:
        self._env, self._reservations = env, reservations
        self.uses = GpuUses()
        self.looked: Callable[[Sequence[Gpu], Mapping[str, float | None], float], None] = lambda gpus, use, now_s: None
        """Is told at each look how much each GPU was in use, 0..1 (None: not known), and when."""

    async def keep_looking(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        now_s, held = self._env.clock.now_s(), self.held()
        idle = self.uses.idle(now_s)
        rows = []
        for gpu in self._env.probes.gpus():
            job = held.get(gpu.uuid)
            asks = job is None or gpu.uuid in idle or gpu.simulated
            processes = await self._processes(gpu) if asks else None
            rows.append(GpuLook(gpu.uuid, job, use_of(gpu, processes), processes))
        now_s = self._env.clock.now_s()
        self.uses.handle(GpusLooked(tuple(rows)), now_s)
        self.looked(self._env.probes.gpus(), {row.uuid: row.utilization for row in rows}, now_s)

    def held(self) -> dict[str, JobId]:
        """GPU -> a job that holds it or a part of it: the guaranteed one where there is one."""
        holds = sorted(self._reservations().all(), key=lambda hold: hold.guaranteed)
        return {device_of(gpu): hold.job for hold in holds for gpu in hold.gpus}

    async def _processes(self, gpu: Gpu) -> tuple[DeviceProcess, ...] | None:
        if not gpu.takes_jobs:
            return None
        try:
            return (await self._env.probes.devices.sample(gpu.uuid)).processes
        except (OSError, TimeoutError):
            return None

    def words_of(self, job: JobId) -> str:
        """What is wrong with the GPUs that this job holds here, in words; empty: nothing is known to be."""
        held, now_s = self.held(), self._env.clock.now_s()
        idle, found = self.uses.idle(now_s), []
        for gpu in self._env.probes.gpus():
            if held.get(gpu.uuid) == job:
                if gpu.condition != "ok":
                    found.append(f"GPU {gpu.index} is {gpu.condition}: {gpu.why}")
                if gpu.uuid in idle:
                    found.append(f"GPU {gpu.index} {idle_words(idle[gpu.uuid], now_s)}")
        return "; ".join(found)[:WORDS_MAX]

    def notes_of(self) -> dict[str, str]:
        """GPU -> how it is used otherwise than the log says, in words."""
        now_s = self._env.clock.now_s()
        idle = {uuid: idle_words(one, now_s) for uuid, one in self.uses.idle(now_s).items()}
        return {**idle, **self.uses.foreign(now_s)}

    def jobs_in_trouble(self) -> dict[JobId, str]:
        """Jobs that hold GPUs which are sick or idle, and which of both: `drain`, `idle`."""
        held = self.held()
        idle = {one.job: "idle" for one in self.uses.idle(self._env.clock.now_s()).values()}
        sick = {held[gpu.uuid]: gpu.condition for gpu in self._env.probes.gpus() if gpu.uuid in held and is_sick(gpu)}
        return {**idle, **sick}

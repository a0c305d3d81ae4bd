"""Room on this host's disk for what ranks write: what each may keep, what goes when there is too much, and whether this
host takes more at all. (`agent/jobs/output.py` says how output is stored.)"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, runtime_checkable

from agent.jobs.output import FENCE_S, JobsSettings, KeptOutput, output_files, output_of, rank_bytes_max, to_remove
from agent.jobs.records import Fence, forgotten_of
from covey.core.ids import JobId
from covey.core.units import format_size, parse_size
from covey.ports.env import Env

LOOK_S = 5.0
"""Seconds between two looks at the free room."""
KEEP_SHARE = 2
"""The divisor of `disk_free_min` to which ranks that run may print the disk full: only then their oldest output
goes."""
PLENTY_BYTES = 1 << 62
"""The free bytes assumed where the disk was not looked at, or cannot tell."""
MESSAGES_S = 600.0
"""Seconds for which a fence stays at least after this agent saw it first, whatever the wall clock was set to meanwhile:
far longer than any message about a job is repeated."""
FULL_LOOK_S = 0.5
"""Seconds between two looks at the free room while this host refuses ranks for want of room."""
SWEEP_EVERY = 12
"""The number of looks between two sweeps of ended jobs' output."""


@runtime_checkable
class Roomy(Protocol):
    """A disk that knows how much fits on it."""

    kept_free_bytes: int
    """Bytes of the disk's last room, which bulk and ranks' output leave to the log and to records."""

    async def free_bytes(self) -> int: ...


@runtime_checkable
class Foldered(Protocol):
    """A disk with folders, which stay when their files are gone: the real one."""

    async def prune(self, folder: str) -> None:
        """Remove the folder if nothing is in it."""


class Outputs:
    """The output of ranks on this host's disk. `live`: jobs with an epoch that is not forgotten yet, or with spares
    here; their output is never removed."""

    def __init__(self, env: Env, settings: JobsSettings, live: Callable[[], Collection[JobId]]) -> None:
        self._env, self._live = env, live
        self.files = output_files(env)
        self.reconfigure(settings)
        self._fenced_s: dict[JobId, float] = {}
        """When each fence was first seen here, on this agent's clock."""
        self._idle: set[JobId] = set()
        """Jobs with a folder of their user's here, and nothing else, at the last sweep."""
        self._free = PLENTY_BYTES
        """Free bytes at the last look."""
        self.refusal = ""
        """Why this host takes no submissions and no ranks now."""

    @property
    def free_bytes(self) -> int | None:
        """Free bytes at the last look; None: not known."""
        return None if self._free == PLENTY_BYTES else self._free

    def reconfigure(self, settings: JobsSettings) -> None:
        """Go by these settings from now on; ranks that run keep what they were promised."""
        self.settings, self._free_min = settings, parse_size(settings.disk_free_min)
        kept = self._env.disk.kept_free_bytes if isinstance(self._env.disk, Roomy) else 0
        self.keep_free = max(self._free_min // KEEP_SHARE, kept)
        """Bytes of the disk that what running ranks print leaves free."""

    def rank_bytes_max(self, promised_bytes: int, ranks: int) -> int:
        return rank_bytes_max(self.settings, promised_bytes, ranks, self._free - self.keep_free)

    async def run(self, fences: Callable[[], Mapping[JobId, Fence]], unfence: Callable[[JobId], None]) -> None:
        looks = 0
        while True:
            await self.look()
            if looks % SWEEP_EVERY == 0:
                try:
                    await self.sweep(fences(), unfence)
                except OSError as error:
                    self._env.log.error("output of ended jobs cannot be removed", why=str(error))
            looks += 1
            await asyncio.sleep(FULL_LOOK_S if self.refusal else LOOK_S)

    async def look(self) -> None:
        """Look whether there is room for more."""
        disk = self._env.disk
        try:
            free = await disk.free_bytes() if isinstance(disk, Roomy) else PLENTY_BYTES
        except OSError as error:
            self._env.log.error("the free room cannot be read", why=str(error))
            return
        self._free, before, self.refusal = free, self.refusal, ""
        if free < self._free_min:
            # Without the number of free bytes, which changes with every look: the text goes to other hosts.
            self.refusal = f"less than {format_size(self._free_min)} is free in {disk.path('jobs')} of {self._env.host}"
        if bool(self.refusal) != bool(before):
            self._env.log.warning("disk", free_bytes=free, refuses=self.refusal or "nothing")

    async def sweep(self, fences: Mapping[JobId, Fence], unfence: Callable[[JobId], None]) -> None:
        """Remove output of ended jobs that is too old, too much or of too many, and in the end their fences too."""
        live, found, wall_s = set(self._live()), await output_of(self.files), self._env.clock.wall_s()
        now_s = self._env.clock.now_s()
        self._fenced_s = {job: seen_s for job, seen_s in self._fenced_s.items() if job in fences}
        kept = [KeptOutput(job, sum(files.values()), self._ended_s(job, live, fences)) for job, files in found.items()]
        for job in to_remove(self.settings, kept, wall_s):
            for name in found.pop(job):
                await self.files.delete(name)
            await self._forget_folder(job)
            self._env.log.info("output of an ended job removed", job=job)
        for job, fence in sorted(fences.items()):
            seen_for_s = now_s - self._fenced_s.setdefault(job, now_s)
            if job not in live and job not in found and wall_s - fence.wall_s > FENCE_S and seen_for_s > MESSAGES_S:
                await self._env.disk.delete(forgotten_of(job))
                unfence(job)
                if isinstance(self._env.disk, Foldered):
                    await self._env.disk.prune(f"jobs/{job}")
                await self._forget_folder(job)

        idle = {JobId(job) for job in await self._env.starter.files.jobs()} - {*self._live(), *found, *fences}
        for job in sorted(idle & self._idle):  # processes only waited there, for ranks that never came
            if job not in self._live():
                await self._forget_folder(job)
        self._idle = idle

    async def _forget_folder(self, job: JobId) -> None:
        """Remove the folder of an ended job, if it has one: it was another user's."""
        try:
            if not self._env.starter.refusal:
                await self._env.starter.forget(job)
        except OSError as error:
            self._env.log.warning("the folder of an ended job stays", job=job, why=str(error))

    def _ended_s(self, job: JobId, live: Collection[JobId], fences: Mapping[JobId, Fence]) -> float | None:
        """When the job ended by the wall clock; None while it runs, 0 when there is no record of its end."""
        if job in live:
            return None
        return fences[job].wall_s if job in fences else 0.0

"""Starts the pager, which answers page faults of this host's arrays (`covey.remote.RemoteArray`).

The pager is a process beside the volume's, since numpy touches memory with its interpreter's lock held, and since the
descriptors that a job hands over could hold up whoever uses them. It is started when somebody asks for it, outlives
this process and ends when no array has been open for a while.
"""

import asyncio
import hashlib
import hmac

import msgspec

from covey.ports.env import Env
from covey.ports.processes import Process

START_S = 10.0
"""Seconds that a pager may take to be loaded."""
PAUSE_S = 1.0
"""Seconds between two starts: a pager that ends at once is not started again and again."""
LOOK_S = 0.02


class PagerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a volume's process gives its pager at its start."""

    volume: str
    path: str
    """Path of the volume's socket."""
    token: bytes
    """The secret by which the volume knows its pager."""
    size_bytes: int
    page_bytes: int
    uid: int
    """Unix user to whom the volume belongs; -1: no user in particular."""


def array_socket(run_dir: str, volume: str) -> str:
    return f"{run_dir}/arr-{volume}.sock"


def pager_token(secret: bytes) -> bytes:
    """Token of the pager. It stays the same when the volume's process begins anew, since its pager lives on; jobs are
    not told it."""
    return hmac.digest(secret, b"the pager of this volume", hashlib.sha256)


class ArrayDoor:
    """Starts and finds the pager of one volume."""

    def __init__(self, env: Env, config: PagerConfig) -> None:
        self._env, self._config = env, config
        self._process: Process | None = None
        self._started_s = float("-inf")
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        """Start the pager if needed. Returns when it listens, or a moment before. OSError: it cannot be started."""
        async with self._starting:
            if self._process is None:
                now_s = self._env.clock.now_s()
                if now_s < self._started_s + PAUSE_S:
                    await asyncio.sleep(self._started_s + PAUSE_S - now_s)
                self._started_s = self._env.clock.now_s()
                name = f"pager-{self._config.volume}"
                self._process = await self._env.processes.start_program("pager", name, self._config)
                self._env.spawn(name, self._watch(self._process))
            process = self._process
            for _ in range(int(START_S / LOOK_S)):
                if process.loaded:
                    return
                await asyncio.sleep(LOOK_S)

    async def _watch(self, process: Process) -> None:
        status = await process.wait()
        self._env.log.info("the pager ended", status=status)
        if self._process is process:
            self._process = None

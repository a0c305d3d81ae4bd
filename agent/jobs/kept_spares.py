"""The agent's side of spares: which epochs' spares it keeps here, and how many wait (`agent.jobs.spares.spares`)."""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from agent.jobs.launching import Launching
from agent.jobs.records import Key, StartRecord, spares_of
from agent.jobs.spares.frames import KeepSpares, SparesStatus, decoder
from agent.jobs.whose import is_theirs, start_program
from covey.core.events import Fact
from covey.core.ids import JobId
from covey.ports.env import Env
from covey.ports.streams import ByteStream
from covey.wire.frames import pack, read_frame
from plugins.facts import SparesReady

BOOT_S = 5.0
"""Seconds in which a keeper has to open its socket."""
RETRY_S = 0.1
LAUNCHES_MAX = 3
"""The number of keepers in a row that die before they answer; then this host keeps none."""


class _Kept(msgspec.Struct, eq=False):
    """The spares of one epoch."""

    record: StartRecord
    modules: tuple[str, ...]
    count: int
    is_new: bool
    """Whether the token was made for these spares: a keeper of an earlier agent has another."""
    stream: ByteStream | None = None
    launches: int = 0


class KeptSpares:
    """The spares that this host keeps. `tell`: called whenever the number that wait changes."""

    def __init__(self, env: Env, launching: Launching, tell: Callable[[Fact], None]) -> None:
        self._env, self._launching, self._tell = env, launching, tell
        self._kept: dict[Key, _Kept] = {}

    def jobs(self) -> set[JobId]:
        """Jobs of which spares wait here, or are to."""
        return {job for job, _ in self._kept}

    def token(self, key: Key) -> str | None:
        """The token of the ranks that the spares of this epoch are to become."""
        kept = self._kept.get(key)
        return None if kept is None else kept.record.token

    def keep(self, record: StartRecord, modules: tuple[str, ...], count: int, is_new: bool = False) -> None:
        """Keep spares of an epoch. Idempotent; with another `count`, that one holds. `is_new`: ranks of this epoch have
        no token here yet, and this one was made for them."""
        key = record.spec.job, record.spec.epoch
        known = self._kept.get(key)
        if known is None:
            known = self._kept[key] = _Kept(record, modules, count, is_new)
            self._env.spawn(f"spares of {key[0]}.{key[1]}", self._follow(key, known))
            return
        known.record = record
        if known.count != count:
            known.count = count
            self._env.spawn(f"spares of {key[0]}.{key[1]}", self._say(known))

    def end(self, key: Key) -> None:
        """Let no spares of this epoch wait any more. Idempotent."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept.count = 0
            self._env.spawn(f"no spares of {key[0]}.{key[1]}", self._say(kept))

    async def _say(self, kept: _Kept) -> None:
        if kept.stream is not None:
            with contextlib.suppress(ConnectionError):
                await kept.stream.write(pack(KeepSpares(kept.count)))

    async def _follow(self, key: Key, kept: _Kept) -> None:
        address = self._launching.spares_socket(kept.record.spec)
        deadline_s = 0.0
        while self._kept.get(key) is kept:
            try:
                stream = await self._env.bytes.connect(address)
            except ConnectionError:
                if self._env.clock.now_s() >= deadline_s:
                    if kept.launches >= LAUNCHES_MAX:
                        name = self._env.disk.path(f"logs/{spares_of(key)}.log")
                        self._tell(SparesReady(*key, 0, f"their parent process does not start; see {name}"))
                        return
                    deadline_s = self._env.clock.now_s() + BOOT_S
                    await self._launch(key, kept)
                await asyncio.sleep(RETRY_S)
                continue
            if not is_theirs(self._env, kept.record.spec, stream):
                stream.close()
                await asyncio.sleep(RETRY_S)
                continue
            if kept.is_new and not kept.launches:
                await self._end_older(stream)
                continue
            await self._listen(key, kept, stream)

    async def _launch(self, key: Key, kept: _Kept) -> None:
        kept.launches += 1
        config = self._launching.spares_config(kept.record, kept.modules)
        try:
            await start_program(self._env, kept.record.spec, "spares", spares_of(key), config)
        except OSError as error:
            self._env.log.error("the parent process of spares cannot start", job=key[0], epoch=key[1], why=str(error))

    async def _end_older(self, stream: ByteStream) -> None:
        """End what an earlier agent had kept, which has another token."""
        with contextlib.suppress(ConnectionError):
            await stream.write(pack(KeepSpares(0)))
        stream.close()
        await asyncio.sleep(RETRY_S)

    async def _listen(self, key: Key, kept: _Kept, stream: ByteStream) -> None:
        kept.stream = stream
        try:
            await stream.write(pack(KeepSpares(kept.count)))
            while True:
                heard = await read_frame(stream, decoder)
                if isinstance(heard, SparesStatus) and self._kept.get(key) is kept:
                    kept.launches = 1
                    self._tell(SparesReady(*key, heard.warm, heard.why))
        except ConnectionError:
            if self._kept.get(key) is kept:
                await asyncio.sleep(RETRY_S)
        finally:
            kept.stream = None
            stream.close()

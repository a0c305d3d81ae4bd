"""The keeper: a process that holds the memory of slabs, so that they outlive the slab process, and does nothing else.

    slab process -> keeper   KeeperHello, once; keeper -> slab process   KeptNow: what is held, and where it listened
    slab process -> keeper   KeepMemory, DropMemory, KeptAddress; keeper -> slab process   KeeperDone to each
    slab process -> keeper   EndKeeper, when nothing is to be kept

It opens what it holds as /proc/PID/fd/N of the slab process and maps none of it; the next slab process opens it from
here in the same way. When no slab process has come for `ALONE_S` it frees everything and ends: a borrower has other
copies, and gives its place up long before.

It is a process because systemd keeps descriptors for a service's main process alone and hands them back only when that
starts (`sd_pid_notify_with_fds(3)`), which is the agent, and is not there without systemd. The agent itself ends at an
upgrade, just when others may end too. And memory must be free once the kernel has killed for it: the keeper is killed
before the slab process (`Program.goes_first`), so what is killed second takes its memory along.
"""

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta

from covey.ports.env import Env
from covey.ports.pages import HeldMemory
from covey.ports.streams import ByteStream
from covey.wire.frames import FrameError, read_frame, write_frame
from covey.wire.handshake import is_secret
from plugins.base import Program

ALONE_S = 60.0
"""Seconds for which the keeper waits for a slab process, as long as a lease: after that a lender's slabs are
orphans."""
HELLO_S = 5.0
KEPT_TOLD = 2048
"""Most memories in one frame."""
KEEPER_GOES_FIRST = 1000
"""oom_score_adj of the keeper, the highest there is: it is killed before the slab process (800)."""
SOCKET = "slab-keeper"

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Size = Annotated[int, Meta(ge=1, le=(1 << 62))]
MemoryName = Annotated[str, Meta(max_length=64)]
AddressText = Annotated[str, Meta(max_length=100)]


class KeeperConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the slab process gives a keeper at its start."""

    secret: bytes
    """Secret that a slab process must say."""


class KeeperFrame(msgspec.Struct, frozen=True, tag=True):
    """One frame; the tag is the class name."""


class KeeperHello(KeeperFrame, frozen=True):
    secret: Annotated[bytes, Meta(max_length=64)]


class KeepMemory(KeeperFrame, frozen=True):
    """Hold this memory from now on. If it is held already under the same name, nothing changes."""

    number: Number
    name: MemoryName
    size: Size


class DropMemory(KeeperFrame, frozen=True):
    number: Number


class KeptAddress(KeeperFrame, frozen=True):
    """Address at which the slab process listens: the next one listens there again."""

    address: AddressText


class EndKeeper(KeeperFrame, frozen=True):
    """Free everything, and end."""


class KeptMemory(msgspec.Struct, frozen=True, array_like=True):
    number: Number
    name: MemoryName
    size: Size


class KeptNow(KeeperFrame, frozen=True):
    address: AddressText
    memories: tuple[KeptMemory, ...]
    more: bool = False
    """Another frame follows."""


class KeeperDone(KeeperFrame, frozen=True):
    """Answer to the oldest question that was not answered yet."""

    why: Annotated[str, Meta(max_length=400)] = ""
    """Why it was not done; empty: it was."""


Told = KeeperHello | KeepMemory | DropMemory | KeptAddress | EndKeeper
told_decoder: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)
said_decoder: msgspec.msgpack.Decoder[KeptNow | KeeperDone] = msgspec.msgpack.Decoder(KeptNow | KeeperDone)


class SlabKeeper:
    """The memories that are held, and the slab process for which: only the newest has them."""

    def __init__(self, env: Env, secret: bytes) -> None:
        self.over = asyncio.Event()
        self._env, self._secret = env, secret
        self._held: dict[int, tuple[HeldMemory, int]] = {}
        """Number -> memory, and its size in bytes."""
        self._address = ""
        self._owner: ByteStream | None = None
        self._alone: asyncio.TimerHandle | None = None
        self._be_alone()

    def _be_alone(self) -> None:
        self._alone = asyncio.get_running_loop().call_later(ALONE_S, self.end)

    def end(self) -> None:
        """Free everything. Idempotent."""
        for memory, _ in self._held.values():
            memory.close()
        self._held.clear()
        self.over.set()

    async def serve(self, stream: ByteStream) -> None:
        async with asyncio.timeout(HELLO_S):
            first = await read_frame(stream, told_decoder)
        if not isinstance(first, KeeperHello) or not is_secret(first.secret, self._secret):
            self._env.log.warning("refused a connection", peer=stream.peer)
            return
        if self._owner is not None:
            self._owner.close()
        self._owner = stream
        if self._alone is not None:
            self._alone.cancel()
        try:
            await self._tell_kept(stream)
            while self._owner is stream:
                told = await read_frame(stream, told_decoder)
                await write_frame(stream, KeeperDone(self._do(told)))
        finally:
            if self._owner is stream:
                self._owner = None
                self._be_alone()

    async def _tell_kept(self, stream: ByteStream) -> None:
        kept = [KeptMemory(number, memory.name, size) for number, (memory, size) in sorted(self._held.items())]
        for at in range(0, max(1, len(kept)), KEPT_TOLD):
            part = tuple(kept[at : at + KEPT_TOLD])
            await write_frame(stream, KeptNow(self._address, part, more=at + KEPT_TOLD < len(kept)))

    def _do(self, told: Told) -> str:
        match told:
            case KeepMemory():
                if told.number in self._held:
                    return f"number {told.number} is in use"
                try:
                    self._held[told.number] = self._env.pages.hold(told.name, told.size), told.size
                except OSError as error:
                    return str(error)[:400]
            case DropMemory():
                memory, _ = self._held.pop(told.number, (None, 0))
                if memory is not None:
                    memory.close()
            case KeptAddress():
                self._address = told.address
            case EndKeeper():
                self.end()
            case KeeperHello():
                raise FrameError("out of turn")
        return ""


async def run_keeper(env: Env, config: KeeperConfig) -> None:
    """The program. OSError when another keeper serves this host already."""
    keeper = SlabKeeper(env, config.secret)
    listener = await env.bytes.listen(f"unix:{env.run_dir}/{SOCKET}.sock", keeper.serve)
    try:
        await keeper.over.wait()
    finally:
        keeper.end()
        await listener.close()


PROGRAM = Program("keeper", KeeperConfig, run_keeper, goes_first=KEEPER_GOES_FIRST)

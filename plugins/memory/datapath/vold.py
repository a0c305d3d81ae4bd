"""The volume process: one per volume. In front a unix socket for this host's processes, behind it the lenders.

It outlives the agent and keeps running without it; the agent's `Borrower` tells it on `vold-NAME.sock` which places to
open and close. After its token a connection is driven by its bytes (`volume_session`); NBD clients have a door of their
own (`exports`).
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import msgspec

from covey.ports.env import Env
from covey.ports.probes import LoopStalls
from covey.ports.streams import ByteStream
from covey.ports.verbs import SWITCHED_OFF
from covey.wire import headers
from covey.wire import volume_wire as volumewire
from covey.wire.driven import driven
from covey.wire.handshake import is_secret
from covey.wire.headers import Status, Welcome, WireError
from covey.wire.swap_wire import SwapCounts
from covey.wire.volume_wire import OtherVersion
from plugins.base import Program
from plugins.memory.datapath.doors.array_door import ArrayDoor, PagerConfig, pager_token
from plugins.memory.datapath.doors.exports import Exports
from plugins.memory.datapath.doors.swap_door import SwapDoor
from plugins.memory.datapath.doors.volume_session import VolumeSession
from plugins.memory.datapath.volumes.members.mirror_volume import AnyVolume, MirrorVolume
from plugins.memory.datapath.volumes.members.parity_volume import ParityVolume
from plugins.memory.datapath.volumes.volume import Volume
from plugins.memory.datapath.wire import control
from plugins.memory.datapath.wire.control import (
    SLABS_TOLD,
    Answer,
    No,
    OpenPlace,
    PlaceList,
    Question,
    Yes,
)
from plugins.memory.datapath.wire.control_ends import ControlServer
from plugins.memory.datapath.wire.shape import Shape

HELLO_S = 5.0
"""Seconds that a new connection may take to present its token."""
TELL_S = 60.0
"""Seconds between two reports to the agent about clients of another version, which connect again and again."""
OPEN_WAIT_S = 3.0
"""Seconds that a question waits for a volume that opens."""
NOT_OPEN = "the volume is not open yet"
FLUSH_S = 3.0
"""Seconds that an orderly end may take to bring the queue to the disk."""


class VoldConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the agent gives a volume process at its start."""

    volume: str
    size_bytes: int
    page_bytes: int
    slab_bytes: int
    token: bytes
    """Token that a process of this host must present."""
    secret: bytes
    """Secret that an agent must say on the control socket."""
    queue_pages: int
    """Places of the ring: pages that may wait for the disk."""
    deadline_s: float
    """Seconds that one request to a lender may take."""
    sealed: bool = False
    """Pages are sealed before they leave this host."""
    uid: int = -1
    """User whose processes may use the volume; -1: any process with the token."""
    members: int = 1
    """Members of each slab; a volume with several has no disk."""
    parity: bool = False
    """One member of each slab has the parity of the others' pages; otherwise each has all pages."""
    rdma: bool = True
    """May pages be read and written one-sided, where there is a device?"""
    maps: bool = False
    """May slabs of this host be mapped?"""


def control_name(volume: str) -> str:
    return f"vold-{volume}"


def front_name(volume: str) -> str:
    return f"vol-{volume}"


def prefix(volume: str) -> str:
    """Path prefix of a volume's files on `Disk`."""
    return f"memory/volumes/{volume}"


class Front:
    """The unix socket through which processes of this host read and write. It is owned by the user to whom the volume
    belongs, and a client is identified by what the kernel says of it, not by what it says itself."""

    def __init__(
        self, env: Env, config: VoldConfig, volume: AnyVolume, tell: Callable[[control.ClientRefused], None]
    ) -> None:
        self._env, self._config, self._volume, self._tell = env, config, volume, tell
        self._told_s = float("-inf")
        self._pager_token = pager_token(config.secret)
        shape = volume.shape
        self.path = f"{env.run_dir}/{front_name(config.volume)}.sock"
        self._arrays = ArrayDoor(
            env,
            PagerConfig(
                volume=config.volume,
                path=self.path,
                token=self._pager_token,
                size_bytes=shape.size_bytes,
                page_bytes=shape.page_bytes,
                uid=config.uid,
            ),
        )
        self.refused = 0

    async def serve(self, stream: ByteStream) -> None:
        try:
            if await self._welcome(stream) is volumewire.PAGES:
                session = VolumeSession(self._env, self._volume, stream)
                driven(stream).drive(session, polite=True)
                wrong = await session.over
                if wrong:
                    raise WireError(wrong)
        except WireError as error:
            self.refused += 1
            self._env.log.debug("dropped a client", peer=stream.peer, why=str(error))

    async def _welcome(self, stream: ByteStream) -> bytes | None:
        """Let a client in and return the protocol that it wants; None: it is refused."""
        data = bytearray(volumewire.HELLO_BYTES)
        try:
            async with asyncio.timeout(HELLO_S):
                await stream.read_into(memoryview(data))
        except TimeoutError as error:
            raise WireError(f"no greeting within {HELLO_S:g} s") from error
        try:
            hello = volumewire.hello(data)
        except OtherVersion as error:
            await self._refuse_version(stream, str(error))
            raise
        answer = self._answer(hello.token, stream.uid)
        if answer.status is Status.OK and hello.door is volumewire.ARRAYS:
            await self._arrays.open()
        await stream.write(headers.pack_welcome(answer))
        self.refused += answer.status is not Status.OK
        return hello.door if answer.status is Status.OK else None

    def _answer(self, token: bytes, uid: int) -> Welcome:
        """The answer to a client: the pager and processes of the volume's user may; if the volume has no user, any with
        the token."""
        shape, owner = self._volume.shape, self._config.uid
        known = is_secret(token, self._config.token)
        if is_secret(token, self._pager_token) or (known and owner == -1):
            return Welcome(Status.OK, shape.page_bytes, shape.size_bytes)
        if owner == -1:
            return Welcome(Status.REFUSED, 0, 0)
        if uid >= 0 and (uid == owner or (known and uid == 0)):
            return Welcome(Status.OK, shape.page_bytes, shape.size_bytes)
        return Welcome(Status.OTHER_USER, 0, owner)

    async def _refuse_version(self, stream: ByteStream, why: str) -> None:
        now_s = self._env.clock.now_s()
        if now_s >= self._told_s + TELL_S:
            self._told_s = now_s
            self._tell(control.ClientRefused(why))
        await stream.write(headers.pack_welcome(Welcome(Status.VERSION, 0, 0)))


class VolumeControl:
    """Answers the agent's questions to this process."""

    def __init__(self, volume: AnyVolume, exports: Exports, swap: SwapDoor, lacks: str, stalls: LoopStalls) -> None:
        self._volume, self._exports, self._swap = volume, exports, swap
        self._lacks, self._stalls = lacks, stalls
        self.opened = asyncio.Event()
        """Set once the volume is open. Questions wait for it, and are told why it takes long: before it the volume does
        not know what it has."""
        self.stopped = asyncio.Event()
        self.forget = False
        self.byte_path = ""

    async def answer(self, question: Question) -> Answer:
        try:
            async with asyncio.timeout(OPEN_WAIT_S):
                await self.opened.wait()
        except TimeoutError:
            return No(question.id, f"{NOT_OPEN}: {self._volume.opening}")
        match question:
            case control.OpenSlabFrame():
                place = OpenPlace(question.index, question.epoch, question.lender, question.address, question.secret)
                await self._volume.open_place(place)
            case control.CloseSlabFrame():
                await self._volume.close_place(question.index, question.epoch)
            case control.CountPages():
                clients = self._exports.clients
                counts = self._volume.counts(question.id, question.life, question.since)
                return msgspec.structs.replace(
                    counts,
                    swap=self._swapping(),
                    clients=clients.connections,
                    clients_refused=clients.refused,
                    lacks=self._lacks,
                    stalls=self._stalls.count,
                    stall_s_longest=self._stalls.longest_s,
                    waits=self._stalls.waits_count,
                    wait_s_longest=self._stalls.waits_longest_s,
                    byte_path=self.byte_path,
                )
            case control.ExportVolume():
                await self._exports.open(question.path)
            case control.EndExport():
                await self._exports.close(question.path)
            case control.BeginSwapping():
                await self._swap.begin(question.backend, question.helper, question.resume)
            case control.EndSwapping():
                await self._swap.end()
            case control.ListPlaces():
                places = self._volume.places.after(question.index, question.epoch)
                return PlaceList(question.id, places[:SLABS_TOLD], len(places) > SLABS_TOLD)
            case control.PlaceDead():
                await self._volume.give_up(question.index, question.epoch, question.why)
            case control.PlaceAt():
                self._volume.places.is_at(question.index, question.epoch, question.address)
            case control.GiveUp():
                given_up = await self._volume.lenders.give_up_all("given up by request", SLABS_TOLD)
                return PlaceList(question.id, given_up, len(given_up) == SLABS_TOLD)
            case control.StopProgram():
                self.forget = question.forget
                asyncio.get_running_loop().call_later(0.05, self.stopped.set)
            case _:
                return No(question.id, f"a volume process does not know {type(question).__name__}")
        return Yes(question.id)

    def _swapping(self) -> SwapCounts:
        swap = self._swap
        return SwapCounts(swap.word, swap.device, swap.used_bytes, swap.why[:400], swap.sockets)


def _volume(env: Env, shape: Shape, config: VoldConfig, tell: Callable[[control.Told], None]) -> AnyVolume:
    where = prefix(config.volume)
    if config.parity:
        data = config.members - 1
        striped = shape._replace(slab_bytes=shape.slab_bytes * data)
        return ParityVolume(env, striped, where, config.deadline_s, tell, data, config.sealed)
    if config.members > 1:
        return MirrorVolume(env, shape, where, config.deadline_s, tell, config.sealed)
    return Volume(env, shape, where, config.queue_pages, config.deadline_s, tell, config.sealed)


async def run_vold(env: Env, config: VoldConfig, watch: Callable[[AnyVolume], None] | None = None) -> None:
    """The program. OSError when another process serves this volume already. It ends when the agent says `Stop`, or by
    SIGTERM; in good order it brings its queue to the disk first. `watch` is called with the volume that it serves."""
    shape = Shape(config.volume, config.size_bytes, config.page_bytes, config.slab_bytes)
    server: ControlServer | None = None

    def tell(frame: control.Told) -> None:
        if server is not None:
            server.tell(frame)

    if not config.rdma:
        env = replace(env, verbs=SWITCHED_OFF)
    volume = _volume(env, shape, config, tell)
    volume.may_map(config.maps)
    exports = Exports(env, volume)
    lacks = env.probes.stay_in_memory(flushes=True)
    env.probes.keep_heap(0)
    asked = VolumeControl(volume, exports, SwapDoor(env, volume, lacks), lacks, env.probes.watch_loop())
    asked.byte_path = env.byte_path[:1000]
    server = ControlServer(env, config.secret, asked.answer)
    await server.open(control_name(config.volume))  # first: whoever holds this socket owns the files
    front = None
    try:
        await volume.open()
        door = Front(env, config, volume, tell)
        front = await env.bytes.listen(f"unix:{door.path}", door.serve, config.uid, bulk=True)
        asked.opened.set()
        if watch is not None:
            watch(volume)
        env.log.info("volume serves", volume=config.volume, size_bytes=config.size_bytes)
        await asked.stopped.wait()
    finally:
        if front is not None:
            await front.close()
        await exports.close_all()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await (volume.forget() if asked.forget else volume.end())
        volume.lenders.shut()
        await volume.close()
        await server.close()


PROGRAM = Program("vold", VoldConfig, run_vold)

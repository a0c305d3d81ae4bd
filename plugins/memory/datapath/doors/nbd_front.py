"""A volume as a block device: one connection of an NBD client, as a machine that bytes drive (`nbdwire`).

Any number of connections may be open, and each may have many requests under way: they are answered as they are done.
What a client may have under way is bounded; then nothing more of it is read. A client that lies about lengths, asks for
what lies outside or stops half way loses its connection and nothing else.

An answer means: a write is at a lender, or on the disk, as any write of the volume. FLUSH: everything answered
before, on any connection, is on this host's disk and synced. FUA: the same, before that write is answered. TRIM
and WRITE_ZEROES: the bytes read as zeros; of a TRIM pages at both ends that are covered in part are left. Zeros take
room nowhere, unless WRITE_ZEROES forbids a hole: then they are written like any content.

BLOCK_STATUS (`base:allocation`, once agreed) tells what was never written, or reads as zeros since; copies skip it.
A page that a lender may hold newer than this host knows is called allocated.
"""

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from covey.ports.env import Env
from covey.ports.streams import ByteStream
from covey.wire.driven import Part, driven
from covey.wire.headers import WireError
from plugins.memory.datapath.doors import nbdwire
from plugins.memory.datapath.doors.nbd_pages import NbdPages
from plugins.memory.datapath.doors.nbdwire import (
    BLOCK_STATUS,
    DISCONNECT,
    FAST_ZERO,
    FLAGS_BYTES,
    FLUSH,
    FUA,
    LENGTH_MAX,
    NO_HOLE,
    OPTION_BYTES,
    READ,
    REQ_ONE,
    REQUEST_BYTES,
    TRIM,
    WRITE,
    NbdAnswer,
    NbdError,
    NbdOption,
    NbdRequest,
)
from plugins.memory.datapath.links.write_buffers import room
from plugins.memory.datapath.volumes.members.mirror_volume import AnyVolume
from plugins.memory.datapath.wire.shape import Undecided

UNDER_WAY_MAX: Final = 256
"""Most requests under way of one connection."""
UNDER_WAY_BYTES_MAX: Final = 64 << 20
"""Most bytes of requests under way, of one connection."""
GATHERED_MAX: Final = 1 << 20
"""Bytes that are gathered before they are sent: this shows when a client does not take its answers."""
AGAIN_S = 1.0
"""Seconds between two tries of a read."""
GREETING_S = 10.0
"""Seconds that a client may take until it has chosen an export."""
_ERRORS = {errno.EROFS: NbdError.EPERM, errno.ENOSPC: NbdError.ENOSPC}
Answer = Callable[[OSError | None], None]


@dataclass
class ServedClients:
    """Counts of the NBD clients of one export."""

    connections: int = 0
    refused: int = 0
    """Connections that broke the protocol or exceeded `CLIENTS_MAX`."""


class NbdWaiting:
    """A request under way, and the buffer of its bytes."""

    __slots__ = ("_front", "data", "request")

    def __init__(self, front: "NbdFront", request: NbdRequest, data: memoryview | None) -> None:
        self._front, self.request, self.data = front, request, data

    def read(self, error: OSError | None) -> None:
        self._front.was_read(self, error)

    def done(self, error: OSError | None) -> None:
        self._front.was_done(self, error)


class NbdFront:
    """One connection of an NBD client (`Driven`)."""

    def __init__(
        self, env: Env, volume: AnyVolume, stream: ByteStream, pages: NbdPages, clients: ServedClients
    ) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._env, self._volume, self._pages, self._clients = env, volume, pages, clients
        self._stream = driven(stream)
        self._size = volume.shape.size_bytes
        self._next: Callable[[memoryview], None] = self._flags
        """Called with the bytes that are waited for."""
        self._target = memoryview(bytearray(FLAGS_BYTES))
        self._option = 0
        self._zeroes = True
        self._structured = self._chosen = False
        self._context: str | None = None
        """The export for which the client wants to know what is allocated; None: it does not."""
        self._allocation = False
        """The client may ask what is allocated."""
        self._request: NbdRequest | None = None
        self._header = memoryview(bytearray(REQUEST_BYTES))
        self._under_way = self._under_way_bytes = 0
        self._patient = False
        self._settled: asyncio.Future[None] | None = None
        self._held = False
        self._out: list[Part] = []
        self._gathered = 0
        """Bytes read that are in `_out`, about."""
        self._flushing = False

    def begin(self) -> None:
        self._stream.drive(self, polite=True)
        self._stream.send([nbdwire.greeting()])
        asyncio.get_running_loop().call_later(GREETING_S, self._too_slow)

    def begin_agreed(self) -> None:
        """Begin without a greeting: both ends know what is served, and the first bytes are a request. Answers are
        simple ones, and a read whose content is undecided is tried again until the connection is over."""
        self._patient = True
        self._begin_requests("")
        self._stream.drive(self, polite=True)

    def close(self) -> None:
        """Close the connection. Idempotent. Requests under way are finished without an answer."""
        if not self.over.done():
            self.over.set_result(None)
        self._stream.close()

    async def settled(self) -> None:
        """Wait until no request of a connection that is over is under way. Until then its last writes may still come
        after those of another connection."""
        if self._under_way:
            self._settled = asyncio.get_running_loop().create_future()
            await self._settled

    def _too_slow(self) -> None:
        if not self._chosen and not self.over.done():
            self._refuse(f"no export chosen within {GREETING_S:g} s")

    # ---- driven ----

    def wanted(self) -> memoryview:
        return self._target

    def filled(self) -> None:
        try:
            self._next(self._target)
        except WireError as error:
            self._refuse(str(error))

    def turn(self) -> None:
        self._flush()

    def ended(self, error: ConnectionError) -> None:
        """The connection ended. Requests under way are finished without an answer."""
        if not self.over.done():
            self.over.set_result(None)

    def _refuse(self, why: str) -> None:
        self._clients.refused += 1
        self._env.log.debug("dropped an NBD client", peer=self._stream.peer, why=why)
        self._end()

    def _end(self) -> None:
        self._flush()
        if not self.over.done():
            self.over.set_result(None)
        self._stream.close()

    def _say(self, *parts: Part) -> None:
        if not self._out and not self._flushing:
            self._flushing = True
            self._stream.soon(self._flush)
        self._out += parts

    def _flush(self) -> None:
        self._flushing, self._gathered = False, 0
        if self._out and not self.over.done():
            out, self._out = self._out, []
            self._stream.send(out)

    # ---- choosing an export ----

    def _flags(self, data: memoryview) -> None:
        self._zeroes = not nbdwire.client_flags(bytes(data)) & nbdwire.NO_ZEROES
        self._await_option()

    def _await_option(self) -> None:
        self._target, self._next = memoryview(bytearray(OPTION_BYTES)), self._option_head

    def _option_head(self, data: memoryview) -> None:
        self._option, length = nbdwire.option(bytes(data))
        if length:
            self._target, self._next = memoryview(bytearray(length)), self._option_data
        else:
            self._option_data(memoryview(b""))

    def _option_data(self, data: memoryview) -> None:
        number, said = self._option, bytes(data)
        self._await_option()
        match number:
            case NbdOption.EXPORT_NAME:
                if said not in (b"", self._volume.shape.name.encode()):
                    raise WireError("there is no such export")
                self._say(nbdwire.old_export(self._size, self._zeroes, self._structured))
                self._begin_requests(said.decode())
            case NbdOption.ABORT:
                self._say(nbdwire.option_reply(number, NbdAnswer.ACK))
                self._end()
            case NbdOption.LIST if not said:
                name = self._volume.shape.name.encode()
                self._say(nbdwire.option_reply(number, NbdAnswer.SERVER, len(name).to_bytes(4, "big") + name))
                self._say(nbdwire.option_reply(number, NbdAnswer.ACK))
            case NbdOption.STRUCTURED_REPLY if not said:
                self._structured = True
                self._say(nbdwire.option_reply(number, NbdAnswer.ACK))
            case NbdOption.INFO | NbdOption.GO:
                self._info(number, said)
            case NbdOption.LIST_META_CONTEXT | NbdOption.SET_META_CONTEXT:
                self._contexts(number, said)
            case NbdOption.LIST | NbdOption.STRUCTURED_REPLY:
                self._say(nbdwire.option_reply(number, NbdAnswer.ERR_INVALID))
            case _:
                self._say(nbdwire.option_reply(number, NbdAnswer.ERR_UNSUP))

    def _info(self, number: int, said: bytes) -> None:
        name = nbdwire.wanted_export(said)
        if name is None or name not in ("", self._volume.shape.name):
            answer = NbdAnswer.ERR_INVALID if name is None else NbdAnswer.ERR_UNKNOWN
            self._say(nbdwire.option_reply(number, answer))
            return
        for info in (
            nbdwire.export_info(self._size, self._structured),
            nbdwire.block_sizes(self._volume.shape.page_bytes),
        ):
            self._say(nbdwire.option_reply(number, NbdAnswer.INFO, info))
        self._say(nbdwire.option_reply(number, NbdAnswer.ACK))
        if number == NbdOption.GO:
            self._begin_requests(name)

    def _contexts(self, number: int, said: bytes) -> None:
        """Answer which contexts there are; with SET, note which will be asked for."""
        wanted = nbdwire.wanted_contexts(said)
        if wanted is None or not self._structured:
            self._say(nbdwire.option_reply(number, NbdAnswer.ERR_INVALID))
            return
        name, queries = wanted
        if name not in ("", self._volume.shape.name):
            self._say(nbdwire.option_reply(number, NbdAnswer.ERR_UNKNOWN))
            return
        if number == NbdOption.SET_META_CONTEXT:
            found, id = nbdwire.ALLOCATION in queries, nbdwire.ALLOCATION_ID
            self._context = name if found else None
        else:
            found, id = not queries or not {nbdwire.ALLOCATION, "base:"}.isdisjoint(queries), 0
        if found:
            self._say(nbdwire.option_reply(number, NbdAnswer.META_CONTEXT, nbdwire.meta_context(id)))
        self._say(nbdwire.option_reply(number, NbdAnswer.ACK))

    def _begin_requests(self, name: str) -> None:
        """Begin with requests for this export. What was agreed about another export does not hold for it."""
        self._chosen = True
        self._allocation = self._structured and self._context == name
        self._target, self._next = self._header, self._requested

    # ---- requests ----

    def _requested(self, data: memoryview) -> None:
        request = nbdwire.request(data)
        if request.command is WRITE:
            if request.length > LENGTH_MAX:
                raise WireError(f"a write of {request.length} bytes")
            if request.length:
                self._request = request
                self._target, self._next = self._volume.buffers.take(request.length), self._write_data
                return
        if request.command is DISCONNECT:
            self._end()
            return
        self._do(request, None)

    def _write_data(self, data: memoryview) -> None:
        """The data of a write are complete. The buffer is the volume's from now on."""
        request, self._request = self._request, None
        self._target, self._next = self._header, self._requested
        assert request is not None
        self._do(request, data)

    def _do(self, request: NbdRequest, data: memoryview | None) -> None:
        command, offset, length = request.command, request.offset, request.length
        pages, in_memory = self._pages, command is READ or command is WRITE
        outside = command is not FLUSH and (not length or offset + length > self._size)
        if command is None or outside or (in_memory and length > LENGTH_MAX):
            nospace = outside and length and command is WRITE
            self._answer_error(request, NbdError.ENOSPC if nospace else NbdError.EINVAL, "out of range or not known")
            return
        if request.flags and request.flags & ~nbdwire.FLAGS.get(command, FUA):
            self._answer_error(request, NbdError.EINVAL, f"flags {request.flags:#x} are not for this command")
            return
        if command is BLOCK_STATUS:
            self._status(request)
            return
        if request.flags & FAST_ZERO and (request.flags & NO_HOLE or not pages.is_quick(offset, length)):
            self._answer_error(request, NbdError.ENOTSUP, "it would take as long as to write zeros")
            return
        if command is READ and self._structured and pages.is_zero(offset, length):
            self._say(nbdwire.hole_chunk(request.cookie, offset, length))
            return
        self._began(length if in_memory else 0)
        if command is READ:
            data = room(length)
            pages.read(offset, data, NbdWaiting(self, request, data).read)
            return
        done: Answer = NbdWaiting(self, request, data).done
        if request.flags & FUA and command is not FLUSH:
            done = self._synced_first(done)
        if command is WRITE:
            assert data is not None
            pages.write(offset, data, done)
        elif command is FLUSH:
            self._volume.submit_flush(done)
        elif command is TRIM:
            pages.trim(offset, length, done)
        else:
            pages.zero(offset, length, bool(request.flags & NO_HOLE), done)

    def _status(self, request: NbdRequest) -> None:
        """Answer what is allocated, as known at this moment without reading the disk."""
        if not self._allocation:
            self._answer_error(request, NbdError.EINVAL, "ask for base:allocation before choosing an export")
            return
        most = 1 if request.flags & REQ_ONE else nbdwire.EXTENTS_MAX
        self._say(nbdwire.status_chunk(request.cookie, self._pages.status(request.offset, request.length, most)))

    def _synced_first(self, done: Answer) -> Answer:
        def written(error: OSError | None) -> None:
            if error is None:
                self._volume.submit_flush(done)
            else:
                done(error)

        return written

    def _began(self, length: int) -> None:
        self._under_way += 1
        self._under_way_bytes += length
        if self._under_way >= UNDER_WAY_MAX or self._under_way_bytes >= UNDER_WAY_BYTES_MAX:
            self._held = True
            self._stream.hold()

    def _over(self, length: int) -> None:
        self._under_way -= 1
        self._under_way_bytes -= length
        if not self._under_way and self._settled is not None and not self._settled.done():
            self._settled.set_result(None)
        if self._held and self._under_way < UNDER_WAY_MAX // 2 and self._under_way_bytes < UNDER_WAY_BYTES_MAX // 2:
            self._held = False
            self._stream.go_on()

    def was_read(self, waiting: NbdWaiting, error: OSError | None) -> None:
        """The volume has read, or refused, a request: answer the client."""
        request, into = waiting.request, waiting.data
        assert into is not None
        if self._patient and isinstance(error, Undecided) and not self.over.done():
            asyncio.get_running_loop().call_later(AGAIN_S, self._pages.read, request.offset, into, waiting.read)
            return
        self._over(request.length)
        self._gathered += request.length
        if error is not None:
            self._failed(request, error)
        elif self._structured:
            self._say(nbdwire.data_chunk(request.cookie, request.offset, request.length), into)
        else:
            self._say(nbdwire.simple(request.cookie, 0), into)
        if self._gathered >= GATHERED_MAX:
            self._flush()

    def was_done(self, waiting: NbdWaiting, error: OSError | None) -> None:
        """The volume has done, or refused, a request that is not a read: answer the client."""
        request = waiting.request
        if request.command is WRITE:
            if waiting.data is not None:
                self._volume.buffers.give(waiting.data)
            self._over(request.length)
        else:
            self._over(0)
        if error is not None:
            self._failed(request, error)
        elif self._structured:
            self._say(nbdwire.done_chunk(request.cookie))
        else:
            self._say(nbdwire.simple(request.cookie, 0))

    def _failed(self, request: NbdRequest, error: OSError) -> None:
        command = request.command.name if request.command is not None else "?"
        self._env.log.error("a request failed", op=command, offset=request.offset, why=str(error))
        self._answer_error(request, _ERRORS.get(error.errno or 0, NbdError.EIO), error.strerror or str(error))

    def _answer_error(self, request: NbdRequest, code: NbdError, why: str) -> None:
        if self._structured:
            self._say(nbdwire.error_chunk(request.cookie, code, why))
        else:
            self._say(nbdwire.simple(request.cookie, code))

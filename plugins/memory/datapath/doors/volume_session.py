"""A volume's end of one connection of a process of this host that has shown its token: a machine that bytes drive.

Many requests may be under way; they are answered as they are done, each with its tag. What a client may have under way
is bounded; then nothing more of it is read.
"""

import asyncio

from covey.ports.env import Env
from covey.ports.streams import ByteStream
from covey.wire import headers
from covey.wire import volume_wire as volumewire
from covey.wire.driven import Part, driven
from covey.wire.headers import Op, Reply, Request, Status, WireError
from plugins.memory.datapath.links.write_buffers import room
from plugins.memory.datapath.volumes.members.mirror_volume import AnyVolume

UNDER_WAY_MAX = 64
"""Most requests under way of one connection; each is at most 256 pages."""


GATHERED_MAX = 1 << 20
"""Bytes read that are gathered before they are sent."""


class VolumeSession:
    """One connection of a client (`Driven`). `over` is set when it ends, with what the client did wrong, if
    anything."""

    def __init__(self, env: Env, volume: AnyVolume, stream: ByteStream) -> None:
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._env, self._volume, self._stream = env, volume, driven(stream)
        self._header = memoryview(bytearray(headers.REQUEST_BYTES))
        self._target = self._header
        self._request: Request | None = None
        """A write whose pages are on their way."""
        self._under_way = 0
        self._held = self._flushing = False
        self._out: list[Part] = []
        self._gathered = 0

    # ---- driven ----

    def wanted(self) -> memoryview:
        return self._target

    def filled(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            pages, self._target = self._target, self._header  # the buffer is the volume's from now on
            self._do(request, pages)
            return
        try:
            request = headers.request(bytes(self._header), self._volume.shape.pages, volumewire.OPERATIONS)
        except WireError as error:
            self._say(headers.pack_reply(Reply(Status.BAD, 0, 0)))
            self._flush()
            self._end(str(error))
            return
        if request.op is Op.WRITE:
            self._request = request
            self._target = self._volume.buffers.take(request.pages * self._volume.shape.page_bytes)
        else:
            self._do(request, None)

    def turn(self) -> None:
        self._flush()

    def ended(self, error: ConnectionError) -> None:
        """The connection ended. Requests under way are finished without an answer."""
        if not self.over.done():
            self.over.set_result("")

    def _end(self, why: str) -> None:
        if not self.over.done():
            self.over.set_result(why)
        self._stream.close()

    # ---- requests ----

    def _do(self, request: Request, pages: memoryview | None) -> None:
        self._under_way += 1
        if self._under_way >= UNDER_WAY_MAX:
            self._held = True
            self._stream.hold()
        volume = self._volume
        match request.op:
            case Op.FETCH if volume.never_written(request.page, request.pages):
                self._under_way -= 1
                self._say(headers.pack_reply(Reply(Status.OK, 0, request.tag)))
            case Op.READ | Op.FETCH:
                into = room(request.pages * volume.shape.page_bytes)
                volume.submit_read(request.page, into, lambda error: self._done(request, error, into))
            case Op.WRITE | Op.DISCARD:
                written = lambda error: self._written(request, error, pages)  # noqa: E731
                volume.submit_write(request.page, request.pages, pages, written)
            case Op.FLUSH:
                volume.submit_flush(lambda error: self._done(request, error))
            case Op.VERSIONS:
                raise AssertionError("unknown operation")

    def _written(self, request: Request, error: OSError | None, pages: memoryview | None) -> None:
        """The volume has done or refused a write: its buffer is used again."""
        if pages is not None:
            self._volume.buffers.give(pages)
        self._done(request, error)

    def _done(self, request: Request, error: OSError | None, *pages: Part) -> None:
        self._under_way -= 1
        if self._held and self._under_way < UNDER_WAY_MAX // 2:
            self._held = False
            self._stream.go_on()
        if error is None:
            self._say(headers.pack_reply(Reply(Status.OK, request.pages, request.tag)), *pages)
            self._gathered += len(pages[0]) if pages else 0
            if self._gathered >= GATHERED_MAX:
                self._flush()
            return
        self._env.log.error("a request failed", op=request.op.name, page=request.page, why=str(error))
        self._say(headers.pack_failed(request.tag, error.strerror or str(error)))

    def _say(self, *parts: Part) -> None:
        if not self._flushing:
            self._flushing = True
            self._stream.soon(self._flush)
        self._out += parts

    def _flush(self) -> None:
        self._flushing, self._gathered = False, 0
        if self._out and not self.over.done():
            out, self._out = self._out, []
            self._stream.send(out)

"""Remote memory for a job: a volume that is larger than what this host can spare, kept in the memory of others.

    with RemoteMemory.open("samples", 8 * GIB) as memory:
        memory.write(0, batch)
        batch = memory.read(0, len(batch))

The volume has a process of its own on this host (`vold`); this module connects to it over a unix socket, and to the
agent only to find it. When that process is killed the agent starts it again, and a request under way is repeated, which
is harmless for reads and writes of the same bytes. Every later read returns what was written, also after the loss of a
lender; after `flush` it is on this host's disk as well.

A volume belongs to the user who opened it first and is forgotten by `detach`, not by `close`. Calls may come from many
threads and take turns. Standard library and msgspec only: it runs inside training processes.
"""

import contextlib
import os
import socket
import threading
import time
from types import TracebackType
from typing import TypeVar

import msgspec

from covey import frames, headers, wire
from covey.headers import Op, Request, Status, Welcome, WireError
from covey.units import format_size, parse_size
from covey.version import VERSION
from covey.volumewire import REQUEST_PAGES_MAX, SPOKEN, pack_hello

ANSWER_S = 60.0
"""Longest wait for one answer; a volume whose process just started first asks its lenders what they hold, and reports
after half of this time that one does not answer."""
RECONNECT_S = 60.0
"""How long a call goes on trying to reach the volume before it gives up."""
PAUSE_S = 0.1

F = TypeVar("F", bound=wire.Frame)


# ---- the job's end ---------------------------------------------------------------------------------------------------


class RemoteMemoryError(Exception):
    """One line what, one line why, one line what to do next."""

    def __init__(self, what: str, why: str, next: str) -> None:
        super().__init__(f"{what}: {why}; next: {next}")
        self.what, self.why, self.next = what, why, next


class _HungUp(ConnectionResetError):
    """The peer closed without an answer: a volume's process of version 1 does so, and any that is just ending."""


class RemoteMemory:
    """One volume, open in this process. Made by `open`; a context manager. Offsets and sizes are bytes.

    ValueError for what lies outside the volume. RemoteMemoryError when the volume's process is away for a minute, or
    neither a lender nor the disk can do what is asked.
    """

    def __init__(self, at: wire.VolumeAt, agent_socket: str) -> None:
        self._at, self._agent_socket = at, agent_socket
        self._lock = threading.Lock()
        self._stream: socket.socket | None = None
        self._tag = 0
        self._closed = False

    @classmethod
    def open(cls, volume: str, size: int | str, agent_socket: str | None = None) -> "RemoteMemory":
        """Open the volume of this name on this host's agent, or make it. `size` in bytes or as text (`"64 MiB"`),
        rounded up to whole pages; a volume that exists must have the same. `agent_socket`: the agent's `jobs.sock`, by
        default $COVEY_SOCKET, which the runner sets. RemoteMemoryError when the agent refuses or is not there."""
        path = agent_socket or os.environ.get("COVEY_SOCKET", "")
        if not path:
            raise RemoteMemoryError(
                f"cannot open volume {volume}",
                "no agent is known here: COVEY_SOCKET is not set",
                "start the script with agentctl submit, or give agent_socket=",
            )
        size_bytes = parse_size(size) if isinstance(size, str) else size
        at = _ask_agent(path, wire.Attach(volume, size_bytes), wire.VolumeAt)
        memory = cls(at, path)
        with memory._lock:
            memory._connect(time.monotonic() + RECONNECT_S)
        return memory

    @property
    def size(self) -> int:
        """Bytes."""
        return self._at.size_bytes

    @property
    def page(self) -> int:
        """Bytes of one page. Reads and writes aligned to it transfer no additional bytes."""
        return self._at.page_bytes

    def __len__(self) -> int:
        return self.size

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on, zeros where nothing was written. Any offset, any size."""
        self._check(offset, size)
        first, end = offset // self.page, -(-(offset + size) // self.page)
        with self._lock:
            pages = self._read_pages(first, end - first)
        skip = offset - first * self.page
        return bytes(memoryview(pages)[skip : skip + size])

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write `data` at `offset`. Returns when a lender has it (the disk follows) or the disk. Not aligned to pages,
        the pages at both ends are read first; of two processes that do that to one page at the same time one may
        overwrite the other's bytes."""
        view = memoryview(data).cast("B")
        self._check(offset, len(view))
        if not len(view):
            return
        first, end = offset // self.page, -(-(offset + len(view)) // self.page)
        with self._lock:
            if offset % self.page or len(view) % self.page:
                view = self._with_edges(first, end, offset, view)
            for at in range(0, end - first, REQUEST_PAGES_MAX):
                part = view[at * self.page : (at + REQUEST_PAGES_MAX) * self.page]
                self._ask(Op.WRITE, first + at, len(part) // self.page, part)

    def discard(self, offset: int, size: int) -> None:
        """Whole pages that are not needed any more: they read as zeros from now on. ValueError for a part of a page."""
        self._check(offset, size)
        if offset % self.page or size % self.page:
            raise ValueError(f"discard wants whole pages of {self.page} bytes, not {size} bytes at {offset}")
        first, count = offset // self.page, size // self.page
        with self._lock:
            for at in range(0, count, REQUEST_PAGES_MAX):
                self._ask(Op.DISCARD, first + at, min(REQUEST_PAGES_MAX, count - at))

    def flush(self) -> None:
        """Everything written before, by any process, is on this host's disk when this returns."""
        with self._lock:
            self._ask(Op.FLUSH, 0, 0)

    def close(self) -> None:
        """The volume and its content stay; `open` finds them again."""
        with self._lock:
            self._closed = True
            self._hang_up()

    def detach(self) -> None:
        """Forget the volume and everything in it. RemoteMemoryError when the agent refuses or is not there."""
        self.close()
        _ask_agent(self._agent_socket, wire.Detach(self._at.volume), wire.Detached)

    def __enter__(self) -> "RemoteMemory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- under the lock ----

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"{size} bytes at {offset} lie outside {self._at.volume} ({format_size(self.size)})")

    def _read_pages(self, first: int, count: int) -> bytearray:
        pages = bytearray(count * self.page)
        view = memoryview(pages)
        for at in range(0, count, REQUEST_PAGES_MAX):
            part = view[at * self.page : (at + REQUEST_PAGES_MAX) * self.page]
            self._ask(Op.READ, first + at, len(part) // self.page, into=part)
        return pages

    def _with_edges(self, first: int, end: int, offset: int, data: memoryview) -> memoryview:
        """`data` completed to whole pages by what is there now."""
        whole = bytearray((end - first) * self.page)
        whole[: self.page] = self._read_pages(first, 1)
        if end - first > 1:
            whole[-self.page :] = self._read_pages(end - 1, 1)
        skip = offset - first * self.page
        whole[skip : skip + len(data)] = data
        return memoryview(whole)

    def _ask(
        self, op: Op, page: int, count: int, data: memoryview | None = None, into: memoryview | None = None
    ) -> None:
        """One request, repeated over new connections until it is answered or `RECONNECT_S` have passed."""
        give_up_s = time.monotonic() + RECONNECT_S
        while True:
            stream = self._connect(give_up_s)
            self._tag += 1
            request = Request(op, page, count, self._tag)
            try:
                status, why = _exchange(stream, request, data, into)
            except OSError:
                self._hang_up()
                continue
            if status is Status.OK:
                return
            self._hang_up()
            what = f"{op.name.lower()} of {count} pages at page {page} of {self._at.volume} failed"
            next_step = f"see agentctl volumes and agentctl why volume/{self._at.volume}, and try again"
            raise RemoteMemoryError(what, why or f"the volume said {status.name}", next_step)

    def _connect(self, give_up_s: float) -> socket.socket:
        if self._closed:
            raise ValueError(f"volume {self._at.volume} was closed here")
        while self._stream is None:
            try:
                self._stream = self._greet()
                break
            except OSError as error:
                refused = error
            if time.monotonic() >= give_up_s:
                volume, next_step = self._at.volume, f"see agentctl why volume/{self._at.volume}"
                if isinstance(refused, _HungUp):
                    next_step += f"; if it is older, end its process vold-{volume} (SIGTERM): the agent starts its own"
                raise RemoteMemoryError(f"cannot reach volume {volume}", str(refused), next_step)
            time.sleep(PAUSE_S)
            self._find_again()
        return self._stream

    def _greet(self) -> socket.socket:
        """OSError when the volume's process is not there or refuses our token; RemoteMemoryError when it is of a later
        version than this module: then trying again does not help."""
        stream = _dial(self._at.path)
        try:
            stream.sendall(pack_hello(self._at.token))
            found = _hear_welcome(stream)
            if found.status is Status.VERSION:
                what, why = f"cannot use volume {self._at.volume}", f"its process is newer than this script: {SPOKEN}"
                raise RemoteMemoryError(
                    what, why, "install the covey-job of this host's agent and start the script again"
                )
            if found != Welcome(Status.OK, self.page, self.size):
                raise WireError(f"the volume answered {found}")
        except (OSError, RemoteMemoryError):
            stream.close()
            raise
        return stream

    def _find_again(self) -> None:
        """The agent may have moved the volume's socket; without an agent the old place is tried again."""
        attach = wire.Attach(self._at.volume, self.size)
        with contextlib.suppress(OSError, RemoteMemoryError):
            self._at = _ask_agent(self._agent_socket, attach, wire.VolumeAt)

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _hear_welcome(stream: socket.socket) -> Welcome:
    data = bytearray(headers.WELCOME_BYTES)
    try:
        _receive(stream, memoryview(data))
    except ConnectionError as error:
        raise _HungUp(f"its process hangs up on us: it is just ending, or older than this script: {SPOKEN}") from error
    return headers.welcome(data)


def _exchange(
    stream: socket.socket, request: Request, data: memoryview | None, into: memoryview | None
) -> tuple[Status, str]:
    """The status, and why it failed. OSError when the connection ends before the answer is whole."""
    stream.sendall(headers.pack_request(request))
    if data is not None:
        stream.sendall(data)
    header = bytearray(headers.REPLY_BYTES)
    _receive(stream, memoryview(header))
    answer = headers.reply(header)
    if answer.status is Status.OK:
        if (answer.tag, answer.pages) != (request.tag, request.pages):
            raise WireError(f"{answer} to {request}")
        if into is not None:
            _receive(stream, into)
    reason = bytearray(headers.reason_bytes(answer))
    _receive(stream, memoryview(reason))
    return answer.status, reason.decode(errors="replace")


def _ask_agent(path: str, question: wire.Frame, kind: type[F]) -> F:
    """Join as a tool, ask once, disconnect. RemoteMemoryError when the agent is not there or refuses."""
    what = f"{type(question).__name__.lower()} {getattr(question, 'volume', '')}"
    try:
        with contextlib.closing(_dial(path)) as stream:
            stream.sendall(frames.pack(wire.Join(os.getpid(), protocol=wire.PROTOCOL, version=VERSION)))
            stream.sendall(frames.pack(question))
            while True:
                frame: msgspec.Struct | None = _receive_frame(stream)
                if isinstance(frame, kind):
                    return frame
                if isinstance(frame, wire.Joined):
                    frame = wire.other_protocol(what, "covey-agent", frame)
                if isinstance(frame, wire.Refusal):
                    raise RemoteMemoryError(frame.what, frame.why, frame.next)
    except OSError as error:
        raise RemoteMemoryError(
            what, f"the agent at {path} does not answer: {error}", "see that agentd runs here"
        ) from error


def _receive_frame(stream: socket.socket) -> msgspec.Struct:
    header = bytearray(4)
    _receive(stream, memoryview(header))
    body = bytearray(frames.body_size(header))
    _receive(stream, memoryview(body))
    return frames.unpack(body, wire.decoder)


def _dial(path: str) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.settimeout(ANSWER_S)
        stream.connect(path.removeprefix("unix:"))
    except OSError:
        stream.close()
        raise
    return stream


def _receive(stream: socket.socket, into: memoryview) -> None:
    """Fill `into`. ConnectionError when the peer ends before it is full."""
    while len(into):
        count = stream.recv_into(into)
        if count == 0:
            raise ConnectionResetError("the other end is gone")
        into = into[count:]

"""A connection to a volume's process with many requests under way, as a machine of bytes that never blocks.

    submit(...) -> [waits to be sent] -> under way -> its `done` is called, once
                                            |
              the connection ends ----------'--> sent again over the next one

Replies come in any order, each with its request's tag; pages move directly between the socket and the caller's memory,
without another copy. Reads and writes of the same bytes may be repeated, so a volume's process that ends and comes back
costs only time; after `RECONNECT_S` without it, requests that wait fail.

A caller that watches other descriptors too polls `fileno()` and calls `step`; any other caller uses `finish`.
"""

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable

from covey.wire import headers
from covey.wire.bulk import widen
from covey.wire.headers import Op, Reply, Request, Status, Welcome, WireError
from covey.wire.volume_wire import ARRAYS, NO_TOKEN, PAGES, REQUEST_PAGES_MAX, SPOKEN, pack_hello

ANSWER_S = 60.0
"""Longest wait in seconds for one answer. A volume whose process just started first asks its lenders what they hold,
and reports after half of this time that a lender does not answer."""
RECONNECT_S = 60.0
"""Seconds that a request tries to reach the volume before it fails."""
DENIED_S = 2.0
"""Seconds to try while its socket does not admit this user: the agent hands a new socket over within a moment."""
PAUSE_S = 0.1
HELLO_S = 10.0
UNDER_WAY_MAX = 32
"""Most requests under way; the volume's process stops reading at 64."""
PARTS_MAX = 64
"""Most buffers in one system call."""


class RemoteMemoryError(Exception):
    """Remote memory cannot be used: one line what, one line why, one line what to do next."""

    def __init__(self, what: str, why: str, next: str) -> None:
        super().__init__(f"{what}: {why}; next: {next}")
        self.what, self.why, self.next = what, why, next

    def __reduce__(self) -> tuple[object, ...]:
        """The arguments for pickle: a data loader's worker passes its error to the script."""
        return type(self), (self.what, self.why, self.next)


class PageRequest:
    """A request for at most `REQUEST_PAGES_MAX` pages. `done` is called with why it failed; empty: it succeeded."""

    __slots__ = ("data", "done", "into", "op", "page", "pages", "sent_s", "tag", "zeros")

    def __init__(
        self,
        op: Op,
        page: int,
        pages: int,
        done: Callable[[str], None],
        data: memoryview | None = None,
        into: memoryview | None = None,
    ) -> None:
        self.op, self.page, self.pages, self.done = op, page, pages, done
        self.data, self.into = data, into
        self.tag, self.sent_s = 0, 0.0
        self.zeros = False
        """Whether a FETCH found only pages that were never written; then nothing was put into `into`."""


class VolumeLink:
    """A connection to a volume. `find` returns the socket's path and token as they are now, and may ask the agent; it
    is called again after each failed attempt. OSError or RemoteMemoryError from it means that they are not known
    now."""

    def __init__(self, volume: str, find: Callable[[bool], tuple[str, bytes]], now_s: Callable[[], float]) -> None:
        self.volume = volume
        self.page_bytes = self.size_bytes = 0
        """Bytes of a page and of the volume, from the volume's welcome; 0 before the first connection."""
        self.heard = ""
        """What `find` learnt last, for people: why, and the next step behind `; next: `. Empty: nothing."""
        self._find, self._now_s = find, now_s
        self._stream: socket.socket | None = None
        self._unsent: deque[PageRequest] = deque()
        self._under_way: dict[int, PageRequest] = {}
        self._out: deque[memoryview] = deque()
        self._tag = 0
        self._away_s: float | None = None
        """Time since which there is no connection; None: there is one."""
        self._tried_s = float("-inf")
        self._header = memoryview(bytearray(headers.REPLY_BYTES))
        self._begin()

    def _begin(self) -> None:
        self._missing = self._header
        """Memory for the next bytes."""
        self._reply: Reply | None = None
        self._request: PageRequest | None = None
        self._reason = memoryview(b"")

    # ---- for who watches other descriptors as well ----

    def fileno(self) -> int:
        """Descriptor of the connection; -1 while there is none."""
        return -1 if self._stream is None else self._stream.fileno()

    @property
    def busy(self) -> int:
        """Number of requests that are not done."""
        return len(self._unsent) + len(self._under_way)

    @property
    def wants_write(self) -> bool:
        """Whether the socket has not taken all bytes yet."""
        return bool(self._out)

    def submit(self, request: PageRequest) -> None:
        self._tag += 1
        request.tag = self._tag
        self._unsent.append(request)

    def step(self) -> None:
        """Do what can be done now without waiting, except for a new connection's handshake."""
        if self._stream is None:
            self._try_again()
            if self._stream is None:
                return
        try:
            self._send()
            while self._receive():
                pass
            self._send()
            self._check_age()
        except OSError:
            self._lost()

    def push(self) -> None:
        """Send what can be sent now; like `step`, but without reading."""
        if self._stream is not None:
            try:
                self._send()
            except OSError:
                self._lost()

    def finish(self, until: Callable[[], bool]) -> None:
        """Call `step` until `until` returns True. Everything submitted is done or failed within bounded time."""
        while not until():
            self.step()
            if until():
                return
            if self._stream is None:
                time.sleep(PAUSE_S)
            else:
                poll = select.poll()
                poll.register(self._stream, select.POLLIN | (select.POLLOUT if self._out else 0))
                poll.poll(1000)

    def close(self, why: str = "closed here") -> None:
        """Close the connection; requests that are not done fail."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._fail_all(why)

    def anew(self) -> "VolumeLink":
        """A link to the same volume, not connected and with nothing under way, for another process."""
        found = VolumeLink(self.volume, self._find, self._now_s)
        found.page_bytes, found.size_bytes = self.page_bytes, self.size_bytes
        return found

    # ---- connection ----

    def connect(self) -> None:
        """Connect now. RemoteMemoryError after `RECONNECT_S`; sooner where the socket belongs to another user."""
        began_s = self._now_s()
        while self._stream is None:
            error = self._try_once(self._now_s() > began_s)
            if self._stream is None:
                wait_s = DENIED_S if isinstance(error.__cause__, PermissionError) else RECONNECT_S
                if self._now_s() >= began_s + wait_s:
                    raise error
                time.sleep(PAUSE_S)

    def _try_again(self) -> None:
        now_s = self._now_s()
        if self._away_s is None:
            self._away_s = now_s
        if now_s < self._tried_s + PAUSE_S:
            return
        try:
            error = self._try_once(self._tried_s > self._away_s)
        except RemoteMemoryError as refused:
            self._fail_all(f"{refused.why}; next: {refused.next}")
            return
        self._tried_s = self._now_s()
        if self._stream is None and self._now_s() >= self._away_s + RECONNECT_S:
            self._fail_all(f"{error.why}; next: {error.next}" if self.heard else error.why)
            self._away_s = None

    def _try_once(self, again: bool) -> RemoteMemoryError:
        """Try to connect once. Returns the error for a later timeout. RemoteMemoryError when trying again does not
        help."""
        next_step = f"see agentctl why volume/{self.volume}"
        try:
            path, token = self._find(again)
            stream, found = greet(self.volume, path, token, PAGES)
            if self.size_bytes and (found.page_bytes, found.size_bytes) != (self.page_bytes, self.size_bytes):
                stream.close()
                why = f"it has {found.size_bytes} bytes now, and had {self.size_bytes} when it was opened here"
                raise RemoteMemoryError(f"cannot use volume {self.volume}", why, "open it again")
        except OSError as error:
            if isinstance(error, PermissionError):
                next_step = (
                    f"check whose volume it is: agentctl volume create {self.volume} SIZE --user NAME gives it an owner"
                )
            told = RemoteMemoryError(f"cannot reach volume {self.volume}", str(error), next_step)
            if self.heard:
                why, _, step = self.heard.partition("; next: ")
                told = RemoteMemoryError(f"cannot reach volume {self.volume}", why, step or next_step)
            told.__cause__ = error
            return told
        self.page_bytes, self.size_bytes = found.page_bytes, found.size_bytes
        stream.setblocking(False)
        self._stream, self._away_s = stream, None
        self._tried_s = float("-inf")
        return RemoteMemoryError("", "", "")

    def _lost(self) -> None:
        """The connection is lost: everything under way is sent again, in its order."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._out.clear()
        self._unsent.extendleft(sorted(self._under_way.values(), key=lambda request: -request.tag))
        self._under_way.clear()
        self._begin()

    def _fail_all(self, why: str) -> None:
        failed = [*self._under_way.values(), *self._unsent]
        self._under_way.clear()
        self._unsent.clear()
        self._out.clear()
        self._begin()
        for request in failed:
            request.done(why)

    def _check_age(self) -> None:
        if self._under_way:
            oldest = next(iter(self._under_way.values()))
            if self._now_s() > oldest.sent_s + ANSWER_S:
                why = f"its process has not answered for {ANSWER_S:g} s"
                self._lost()
                self._fail_all(why)

    # ---- bytes ----

    def _send(self) -> None:
        stream = self._stream
        while stream is not None:
            while self._unsent and len(self._under_way) < UNDER_WAY_MAX and len(self._out) < PARTS_MAX:
                request = self._unsent.popleft()
                request.sent_s = self._now_s()
                self._under_way[request.tag] = request
                header = headers.pack_request(Request(request.op, request.page, request.pages, request.tag))
                self._out.append(memoryview(header))
                if request.data is not None:
                    self._out.append(request.data)
            if not self._out:
                return
            parts = [self._out[at] for at in range(min(PARTS_MAX, len(self._out)))]
            try:
                sent = stream.sendmsg(parts)
            except BlockingIOError:
                return
            while sent:
                first = self._out[0]
                if sent < len(first):
                    self._out[0] = first[sent:]
                    break
                sent -= len(first)
                self._out.popleft()

    def _receive(self) -> bool:
        """Read what has arrived. False when there is nothing more now. OSError at the end of the connection."""
        if self._stream is None:
            return False
        whole = self._missing is not self._header and self._reply is not None
        try:
            if whole:  # pages, and the header behind them, in one call
                count = self._stream.recvmsg_into([self._missing, self._header])[0]
            else:
                count = self._stream.recv_into(self._missing)
        except BlockingIOError:
            return False
        if count == 0:
            raise ConnectionResetError("the other end is gone")
        beyond = count - len(self._missing)
        if beyond < 0:
            self._missing = self._missing[count:]
            return True
        self._filled()
        if beyond:
            if self._reply is not None:  # there is no reply of several parts: its body was all that was asked for
                raise WireError("bytes beyond a reply")
            self._missing = self._header[beyond:]
            if not len(self._missing):
                self._filled()
        return True

    def _filled(self) -> None:
        reply = self._reply
        if reply is None:
            self._heard(headers.reply(bytes(self._header)))
            return
        request, why = self._request, ""
        if reply.status is not Status.OK:
            why = bytes(self._reason).decode(errors="replace") or f"the volume said {reply.status.name}"
        self._begin()
        self._settle(request, why)

    def _heard(self, reply: Reply) -> None:
        request = self._under_way.get(reply.tag)
        if request is None or reply.status in (Status.BAD, Status.REFUSED, Status.VERSION):
            raise WireError(f"the volume answered {reply}")
        body: memoryview | None = None
        if reply.status is Status.OK:
            request.zeros = request.op is Op.FETCH and reply.pages == 0
            if reply.pages != request.pages and not request.zeros:
                raise WireError(f"{reply} to a request for {request.pages} pages")
            if not request.zeros:
                body = request.into
        else:
            self._reason = memoryview(bytearray(headers.reason_bytes(reply)))
            body = self._reason
        self._reply, self._request = reply, request
        if body is None or not len(body):
            self._missing = self._header[:0]
            self._filled()
        else:
            self._missing = body

    def _settle(self, request: PageRequest | None, why: str) -> None:
        assert request is not None
        del self._under_way[request.tag]
        request.done(why)


def greet(volume: str, path: str, token: bytes, door: bytes) -> tuple[socket.socket, Welcome]:
    """A connection that was welcomed. OSError when the volume's process does not run or does not know our token;
    RemoteMemoryError when trying again does not help."""
    stream = dial(path, HELLO_S)
    what = f"cannot use volume {volume}"
    try:
        stream.sendall(pack_hello(token, door))
        found = _hear_welcome(stream)
        if found.status is Status.VERSION:
            why = f"its process speaks another version of the volume protocol: {SPOKEN}"
            step = "install the covey-job of this host's agent and start the script again"
            raise RemoteMemoryError(what, why, step)
        if found.status is Status.OTHER_USER:
            why = f"it belongs to another user (uid {found.size_bytes}), and this process has uid {os.geteuid()}"
            raise RemoteMemoryError(what, why, "choose another name, or ask its owner")
        if found.status is Status.REFUSED and token == NO_TOKEN:
            why, step = "it has no owner", "open it by its name, through its host's agent"
            raise RemoteMemoryError(what, why, step)
        if found.status is not Status.OK or found.page_bytes <= 0:
            raise WireError(f"the volume answered {found}")
    except (OSError, RemoteMemoryError):
        stream.close()
        raise
    return stream, found


def ask_for_door(volume: str, path: str, token: bytes) -> None:
    """Return when the volume's pager listens for arrays. OSError or RemoteMemoryError when it does not."""
    stream, _ = greet(volume, path, token, ARRAYS)
    stream.close()


def dial(path: str, timeout_s: float) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.settimeout(timeout_s)
        stream.connect(path.removeprefix("unix:"))
        widen(stream)
    except OSError:
        stream.close()
        raise
    return stream


def receive(stream: socket.socket, into: memoryview) -> None:
    """Fill `into`. ConnectionError when the peer ends before it is full."""
    while len(into):
        count = stream.recv_into(into)
        if count == 0:
            raise ConnectionResetError("the other end is gone")
        into = into[count:]


def _hear_welcome(stream: socket.socket) -> Welcome:
    data = bytearray(headers.WELCOME_BYTES)
    try:
        receive(stream, memoryview(data))
    except ConnectionError as error:
        raise ConnectionResetError("its process closes the connection, since it is ending") from error
    return headers.welcome(data)


PIECE_BYTES = 256 << 10
"""Bytes of a piece of a long read or write. Several are under way: the volume reads one while another crosses."""


def transfer(link: VolumeLink, op: Op, page: int, view: memoryview | None, pages: int, failed: list[str]) -> int:
    """Submit a FETCH or a WRITE of one run of pages in pieces that are under way together. Returns their number. Why
    pieces failed is added to `failed`."""
    size = link.page_bytes
    piece = max(1, min(REQUEST_PAGES_MAX, PIECE_BYTES // size))
    for at in range(0, pages, piece):
        count = min(piece, pages - at)
        submit_one(link, op, page + at, count, failed, None if view is None else view[at * size : (at + count) * size])
    return -(-pages // piece)


def submit_one(
    link: VolumeLink, op: Op, page: int, pages: int, failed: list[str], view: memoryview | None = None
) -> None:
    """Submit one request. The view of a FETCH is filled with zeros when its pages were never written."""

    def done(why: str) -> None:
        if why:
            failed.append(why)
        elif request.zeros and view is not None:
            view[:] = bytes(len(view))

    fetch = op is Op.FETCH
    request = PageRequest(op, page, pages, done, None if fetch else view, view if fetch else None)
    link.submit(request)

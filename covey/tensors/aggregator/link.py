"""One connection of a rank to its aggregator: any thread sends frames, one thread reads."""

import contextlib
import os
import queue
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from covey.core.units import format_seconds
from covey.tensors.numbers.tensor_wire import Frame, Header, Payload, is_lasting, is_placed, op_of
from covey.tensors.rdma.tensor_pair import TensorPair, rides
from covey.tensors.turns.holder import ProcessTurns
from covey.wire.bulk import widen
from covey.wire.page_pipe import PagePipe
from covey.wire.splicing import LEAST_BYTES

CONNECT_S = 2.0
"""Seconds that one attempt to connect and be welcomed may take."""
SILENT_S = 2.0
"""Seconds of quiet after which the link sends the aggregator a PING."""
DEAD_S = 6.0
"""Seconds of quiet after which the connection is given up."""

SMALL_BYTES = 4096
"""Largest payload in bytes that is copied, to be sent together with the frames before and after it."""
READ_BYTES = 16 << 10
"""Bytes that are read at a time when less is wanted."""
TURN_BYTES = 128 << 10
"""Most bytes of what is sent under a turn that the kernel keeps before they are on their way: a turn is over when they
are."""
_NOTSENT_LOWAT = 25
"""TCP_NOTSENT_LOWAT, which Python does not name."""
_DESCRIPTORS_MAX = 4
"""Most descriptors that come with one message: an aggregator sends one."""


_ROOM = socket.CMSG_SPACE(_DESCRIPTORS_MAX * struct.calcsize("@i"))
"""Bytes for the descriptors of one message."""


def found_descriptors(data: bytes) -> Iterable[int]:
    """The descriptors in the control data of a message."""
    return (number for (number,) in struct.iter_unpack("@i", data[: len(data) // 4 * 4]))


def _near(path: str) -> socket.socket | None:
    """A connection to this unix socket. None: there is none, or not for this user."""
    if not path:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(path)
        widen(sock)
    except OSError:
        sock.close()
        return None
    return sock


def _far(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class Poster:
    """A thread that sends frames for which callers need not wait, in the order in which they were posted."""

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[tuple[TensorLink, Iterable[Frame]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def post(self, link: "TensorLink", frames: Iterable[Frame]) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._send, name="covey-push", daemon=True)
                self._thread.start()
        self._posted.put((link, frames))

    def close(self) -> None:
        """End the thread after what was posted. A second call is harmless."""
        self._posted.put(None)

    def _send(self) -> None:
        while (posted := self._posted.get()) is not None:
            link, frames = posted
            link.send_posted(frames)
            link.posted_sent()


class RankSideLink(Protocol):
    """A rank's connection to the owner of a table, in another process or in this one."""

    lock: threading.RLock
    """Serialises what is sent."""
    near: bool
    """Whether the owner is on this host."""
    places: bool
    """Whether the owner may hand memory over (`covey.tensors.aggregator.push_memory`)."""
    pair: TensorPair | None
    """What large parts of numbers go over; None: they go over TCP, or through memory."""

    def say(self, frames: Iterable[Frame], at_once: bool) -> None: ...
    def send(self, frames: Iterable[Frame], careful: bool = True) -> None: ...
    def send_locked(self, frames: Iterable[Frame]) -> None: ...
    def await_byte(self, ping: Callable[[], Frame]) -> None: ...
    def read_into(self, view: memoryview) -> None: ...
    def descriptor(self) -> int: ...
    def read_payload(self, header: Header, view: memoryview) -> None: ...
    def shut(self) -> None: ...
    def close(self) -> None: ...


class TensorLink:
    """One connection. Sending is serialised by `lock`; only the link thread reads."""

    pair: TensorPair | None = None

    def __init__(
        self, address: str, poster: Poster | None = None, near: str = "", turns: ProcessTurns | None = None
    ) -> None:
        """`near`: a unix socket of the same process, which is tried first; this host may not have it. `poster`: one for
        several connections, which then take turns; without it the link has its own. `turns`: those of this process, for
        what is sent to other hosts; None: it takes none."""
        self.lock = threading.RLock()
        found = _near(near)
        self.near = found is not None
        """Whether the other end is on this host."""
        self.places = self.near
        self._descriptors: deque[int] = deque()
        """Descriptors that have come, and nobody has taken."""
        self.sock = _far(address) if found is None else found
        self._turns = None if self.near else turns
        self._paced = False
        """Whether the kernel keeps no more of what is sent than `TURN_BYTES`."""
        for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self.sock.setsockopt(socket.SOL_SOCKET, way, struct.pack("@ll", int(DEAD_S), 0))
        self.sock.settimeout(None)
        self._poll = select.poll()
        self._poll.register(self.sock, select.POLLIN)
        self._shared, self._poster = poster is not None, poster or Poster()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._read = self._buffer[:0]
        """Bytes that were received and not asked for yet."""
        self._pipe: PagePipe | None = None
        self._may_pipe = True
        self._waiting = 0
        """Number of posts that are not sent yet."""
        self._counting = threading.Lock()

    def send(self, frames: Iterable[Frame], careful: bool = True) -> None:
        """Send whole frames, or shut the connection: after half a frame it cannot be used. Never raises when `careful`:
        the link thread notices a broken connection and connects again."""
        with self.lock:
            try:
                self.send_locked(frames)
            except OSError:
                if not careful:
                    raise

    def say(self, frames: Iterable[Frame], at_once: bool) -> None:
        """Send frames after all that any thread said before. `at_once`: send in this thread if no other is sending;
        otherwise a thread of the link sends and this one continues."""
        if at_once and self.lock.acquire(blocking=False):
            try:
                with self._counting:
                    first = not self._waiting
                if first:
                    self.send(frames)
                    return
            finally:
                self.lock.release()
        with self._counting:
            self._waiting += 1
        if self._turns is not None and self._turns.on:
            self._turns.announce()
        self._poster.post(self, frames)

    def send_posted(self, frames: Iterable[Frame]) -> None:
        """Send what was posted, to another host under a turn."""
        if self._turns is None or not self._turns.on:
            self.send(frames)
            return
        with self._turns.sending(coming=1):
            self.send(frames)

    def _pace(self) -> None:
        """From now on sending to another host takes as long as it takes the network."""
        self._paced = True
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, TURN_BYTES)

    def posted_sent(self) -> None:
        """Called by the poster when one post was sent, or never will be."""
        with self._counting:
            self._waiting -= 1

    def send_locked(self, frames: Iterable[Frame]) -> None:
        whole, turns = False, self._turns if self._turns is not None and self._turns.on else None
        if turns is not None and not self._paced:
            self._pace()
        try:
            small = bytearray()
            for head, payload in frames:
                if turns is not None:
                    turns.progress()
                if self.pair is not None and rides(op_of(head), len(payload)):
                    self._send_small(small)
                    self.pair.send(head, payload)
                    continue
                small += head
                if is_placed(head):  # the owner can add it while the next one is copied
                    self.sock.sendall(small)
                    small.clear()
                    continue
                if len(payload) <= SMALL_BYTES and len(small) < READ_BYTES:
                    small += payload
                    continue
                self._send_small(small, socket.MSG_MORE)
                self._send_large(head, payload)
            self._send_small(small)
            if self.pair is not None:
                self.pair.settle()
            whole = True
        finally:
            if not whole:  # also when a person pressed Ctrl-C
                self.shut()

    def _send_small(self, small: bytearray, flags: int = 0) -> None:
        """Send these bytes, if any, after the headers of all parts that go over the pair, and forget them."""
        if small:
            if self.pair is not None:
                self.pair.settle()
            self.sock.sendall(small, flags)
            small.clear()

    def _send_large(self, head: bytes, payload: Payload) -> None:
        if not self.near or len(payload) < LEAST_BYTES or not is_lasting(head) or (pipe := self._page_pipe()) is None:
            self.sock.sendall(payload)
            return
        view, descriptor = memoryview(payload), self.sock.fileno()
        while view.nbytes:
            try:
                count = pipe.fill(view)
            except OSError:  # such memory, a device's perhaps, is copied
                self._may_pipe = False
                self.sock.sendall(view)
                return
            view = view[count:]
            while count:
                count -= pipe.drain(descriptor, count, waits=True)

    def _page_pipe(self) -> PagePipe | None:
        if self._pipe is None and self._may_pipe:
            try:
                self._pipe = PagePipe()
            except OSError:
                self._may_pipe = False
        return self._pipe if self._may_pipe else None

    def await_byte(self, ping: Callable[[], Frame]) -> None:
        """Wait until something arrives. TimeoutError when the peer is silent although it was asked."""
        if self._read:
            return
        silent_s = 0.0
        while not self._poll.poll(SILENT_S * 1000):
            silent_s += SILENT_S
            if silent_s >= DEAD_S:
                raise TimeoutError(f"was silent for {format_seconds(silent_s)}")
            if self.lock.acquire(blocking=False):  # otherwise another thread is sending, and notices
                try:
                    self.send_locked((ping(),))
                finally:
                    self.lock.release()

    def read_into(self, view: memoryview) -> None:
        """Fill `view`. TimeoutError when a frame stops in the middle."""
        while view.nbytes:
            if not self._read and view.nbytes < READ_BYTES:
                self._read = self._buffer[: self._receive(self._buffer)]
            if self._read:
                count = min(view.nbytes, len(self._read))
                view[:count], self._read = self._read[:count], self._read[count:]
            else:
                count = self._receive(view)
            view = view[count:]

    def read_payload(self, header: Header, view: memoryview) -> None:
        """Fill `view` with the payload of the frame whose header was read."""
        if self.pair is not None and rides(header.op, header.length):
            self.pair.take(view)
        else:
            self.read_into(view)

    def _receive(self, into: memoryview) -> int:
        """Receive bytes; what is large as a whole, however many pieces come: each one would wake this thread."""
        whole = socket.MSG_WAITALL if into.nbytes >= READ_BYTES and into is not self._buffer else 0
        try:
            if self.near:
                count, ancillary, _, _ = self.sock.recvmsg_into([into], _ROOM, whole | socket.MSG_CMSG_CLOEXEC)
                for level, kind, found in ancillary:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        self._descriptors.extend(found_descriptors(found))
            else:
                count = self.sock.recv_into(into, into.nbytes, whole)
        except BlockingIOError:
            raise TimeoutError(f"stopped for {format_seconds(DEAD_S)} in the middle of a frame") from None
        if count == 0:
            raise ConnectionResetError("closed the connection")
        return count

    def descriptor(self) -> int:
        """The descriptor that came with the frame read last; the caller closes it. ConnectionError when none came."""
        if not self._descriptors:
            raise ConnectionAbortedError("announced memory and handed over none")
        return self._descriptors.popleft()

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        if not self._shared:
            self._poster.close()
        with self.lock:
            self.sock.close()
            if self._pipe is not None:
                self._pipe.close()
            self._pipe, self._may_pipe = None, False
            while self._descriptors:
                os.close(self._descriptors.popleft())
            if self.pair is not None:
                self.pair.close()

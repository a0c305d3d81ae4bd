"""One rank's connection to a rank that owns a table: one thread reads, another one writes what is queued.

Both block in the kernel, for whole parts of tensors: a thread that is woken for each piece that the network brings
costs more than the sums. What is given to a rank is a tensor's state, taken when its turn comes, never a copy in a
queue, so a rank that reads slowly delays no other.
"""

import contextlib
import fcntl
import queue
import socket
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable

from covey.tensors.aggregator.link import DEAD_S, READ_BYTES
from covey.tensors.numbers.tensor_wire import Frame, Header, Payload, TensorOp, op_of
from covey.tensors.owner.rank_frames import RankFrames
from covey.tensors.owner.results import RankResults
from covey.tensors.owner.sums import TensorSum
from covey.tensors.rdma.tensor_pair import LEAST_BYTES, TensorPair, rides

QUEUE_MAX = 1 << 18
"""Most frames that wait for one rank; one that asks for more without reading is cut off."""
TOLD_BYTES_MAX = 16 << 20
"""Most bytes of other frames than results that wait for one rank."""
AT_ONCE_BYTES = 256 << 10
"""Largest result in bytes that the thread that has completed it sends itself."""
assert AT_ONCE_BYTES < LEAST_BYTES, "over a queue pair a thread may have to wait"
IDLE_S = 2
"""Seconds after which the kernel looks whether a silent rank's host lives."""

Item = Frame | tuple[int, TensorSum]


def configure(sock: socket.socket) -> None:
    """Set the options of an accepted connection."""
    if sock.family != socket.AF_UNIX:
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ):
            with contextlib.suppress(OSError):  # already gone, or a kernel without it
                sock.setsockopt(level, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(DEAD_S), 0))


def receive(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`, however long that takes. ConnectionError when the connection ends before."""
    while view.nbytes:
        count = sock.recv_into(view, view.nbytes, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError("closed the connection")
        view = view[count:]


class RankConnection:
    """The `OwnersLink` of a rank in another process."""

    def __init__(
        self,
        sock: socket.socket,
        rank: int,
        job_hash: int,
        epoch: int,
        find: Callable[[int], TensorSum | None],
        lock: threading.RLock,
        sent: Callable[[int], None],
    ) -> None:
        """`lock` guards all tensors; `sent` is called with the bytes of each part of a result that was sent."""
        self.sock, self.rank, self.frames = sock, rank, RankFrames(rank, find)
        self.near = sock.family == socket.AF_UNIX
        """The rank is on this host, so its numbers are not checked against bits that a wire has changed."""
        self.pair: TensorPair | None = None
        """What large parts go over; None: over TCP, and `no_rdma` says why, for people."""
        self.no_rdma = ""
        self.key = 0
        """The tensor of the frame heard last."""
        self._lock, self._sent = lock, sent
        self._results = RankResults(rank, job_hash, epoch, self.near)
        self._queue: deque[Item | None] = deque()
        """What is to be sent; None: nothing more."""
        self._sending = threading.Lock()
        """Held by the thread that sends; guards the next field."""
        self._left = b""
        """The rest of a frame of which the kernel took the beginning."""
        self._owed = self._said_bytes = 0
        """Number of items that are not sent yet; bytes of those that are no results."""
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._read = self._buffer[:0]
        """Bytes that were received and not asked for yet."""
        self.writer = threading.Thread(target=self._write_out, name="covey-results", daemon=True)
        self.writer.start()

    # ---- out ----

    def say(self, said: Frame) -> None:
        if self._said_bytes + len(said[1]) > TOLD_BYTES_MAX:
            if said[0][1] != TensorOp.TOLD:  # what ranks tell one another is told again
                self.cut()
            return
        self._said_bytes += len(said[1])
        self._put(said)

    def give(self, key: int, tensor: TensorSum) -> None:
        if self._results.owe(key):
            self._put((key, tensor))

    def close(self) -> None:
        self._queue.append(None)
        self._wakes.put(None)

    def pump(self) -> None:
        """Send what is queued, if it is little: this thread does, as far as the kernel takes it at once, since waking
        another one costs more. The writer sends the rest."""
        if self._first_is_small() and self._sending.acquire(blocking=False):
            try:
                while not self._left and self._first_is_small():
                    self._send_first(at_once=True)
            except OSError:
                self.cut()
            finally:
                self._sending.release()
        if self._queue or self._left:
            self._wakes.put(None)

    @property
    def is_sent(self) -> bool:
        """Whether the rank's host has received everything that was said and given; also once the connection ended."""
        if self._closed:
            return True
        if self._owed or self._left or not (self.pair is None or self.pair.is_settled):
            return False
        with contextlib.suppress(OSError):
            return not struct.unpack("@i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))[0]
        return True

    def release(self) -> None:
        """Free what the connection holds, once it has ended and its writer too."""
        if self.pair is not None and not self.writer.is_alive():
            with self._sending:
                self.pair.close()

    def cut(self) -> None:
        """End the connection now."""
        self._closed = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.close()

    def _put(self, item: Item) -> None:
        """Queue an item. The caller holds the lock of all tensors."""
        if len(self._queue) >= QUEUE_MAX:
            self.cut()
        if not self._closed:
            self._owed += 1
            self._queue.append(item)

    def _first_is_small(self) -> bool:
        with contextlib.suppress(IndexError):
            item = self._queue[0]
            if item is not None:
                what = item[1]
                size = what.declared.size_bytes if isinstance(what, TensorSum) else len(what)
                return size <= AT_ONCE_BYTES
        return False

    def _write_out(self) -> None:
        try:
            while True:
                self._wakes.get()
                with self._sending:
                    while self._left or self._queue:
                        if self._left:
                            self.sock.sendall(self._left)
                            self._left = b""
                        elif self._queue[0] is None:
                            return
                        else:
                            self._send_first(at_once=False)
                    if self.pair is not None:
                        self.pair.settle()
        except OSError:
            pass  # the reader ends the same way, and tidies up
        finally:
            self._closed = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def _send_first(self, at_once: bool) -> None:
        """Send the first item in the queue. `at_once`: without waiting for the rank to read."""
        item = self._queue.popleft()
        assert item is not None
        what = item[1]
        if isinstance(what, TensorSum):
            assert isinstance(item[0], int)
            self._send_result(item[0], what, at_once)
        else:
            assert isinstance(item[0], bytes)
            self._send(item[0], what, at_once)
        with self._lock:
            self._owed -= 1
            self._said_bytes -= 0 if isinstance(what, TensorSum) else len(what)

    def _send(self, head: bytes, payload: Payload, at_once: bool) -> None:
        if self._left:
            self._left += head + bytes(payload)
            return
        if self.pair is not None:
            if rides(op_of(head), len(payload)):
                self.pair.send(head, payload)
                return
            self.pair.settle()
        try:
            sent = self.sock.sendmsg((head, payload), (), socket.MSG_DONTWAIT if at_once else 0)
        except BlockingIOError:
            if not at_once:
                raise
            sent = 0
        if sent == len(head) + len(payload):
            return
        rest = memoryview(payload)[max(0, sent - len(head)) :]
        if at_once:
            self._left = head[sent:] + bytes(rest)
            return
        self.sock.sendall(head[sent:])
        self.sock.sendall(rest)

    def _send_result(self, key: int, tensor: TensorSum, at_once: bool) -> None:
        with self._lock:
            giving = self._results.begin(key, tensor)
        if giving is None:
            return
        try:
            for part in giving.parts:
                head, payload = self._results.frame(giving, part)
                self._send(head, payload, at_once)
                self._sent(len(payload))
        finally:
            with self._lock:
                self._results.over(giving)

    # ---- in ----

    def read_into(self, view: memoryview) -> None:
        """Fill `view`. ConnectionError when the connection ends before."""
        if not self._read and view.nbytes < READ_BYTES:
            count = self.sock.recv_into(self._buffer)
            if not count:
                raise ConnectionResetError("closed the connection")
            self._read = self._buffer[:count]
        count = min(view.nbytes, len(self._read))
        if count:
            view[:count], self._read = self._read[:count], self._read[count:]
            view = view[count:]
        if view.nbytes:
            if view.nbytes < READ_BYTES:
                self.read_into(view)
            else:
                receive(self.sock, view)

    def read_payload(self, header: Header, view: memoryview) -> None:
        """Fill `view` with the payload of the frame whose header was read. ConnectionError as of `read_into`."""
        if self.pair is not None and rides(header.op, header.length):
            self.pair.take(view)
        else:
            self.read_into(view)

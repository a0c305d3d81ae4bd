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
from collections.abc import Callable

from covey.tensors.aggregator.link import DEAD_S, READ_BYTES, SMALL_BYTES
from covey.tensors.numbers.tensor_wire import TYPES, Frame, Payload, TensorOp, frame
from covey.tensors.owner.rank_frames import RankFrames
from covey.tensors.owner.sums import TensorSum

QUEUE_MAX = 1 << 18
"""Most frames that wait for one rank; one that asks for more without reading is cut off."""
TOLD_BYTES_MAX = 16 << 20
"""Most bytes of other frames than results that wait for one rank."""
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
    """The `RankLink` of a rank in another process, or of this one."""

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
        self._hash, self._epoch, self._lock, self._sent = job_hash, epoch, lock, sent
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self.key = 0
        """The tensor of the frame heard last."""
        self._said_bytes = self._owed = 0
        self._counting = threading.Lock()
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
        self._put((key, tensor))

    def close(self) -> None:
        self._queue.put(None)

    @property
    def is_sent(self) -> bool:
        """Whether the rank's host has received everything that was said and given; also once the connection ended."""
        if self._closed:
            return True
        if self._owed:
            return False
        with contextlib.suppress(OSError):
            return not struct.unpack("@i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))[0]
        return True

    def cut(self) -> None:
        """End the connection now."""
        self._closed = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self._queue.put(None)

    def _put(self, item: Item) -> None:
        if self._queue.qsize() >= QUEUE_MAX:
            self.cut()
        if not self._closed:
            with self._counting:
                self._owed += 1
            self._queue.put(item)

    def _write_out(self) -> None:
        small = bytearray()
        try:
            while (item := self._next(small)) is not None:
                with self._counting:
                    self._owed -= 1
                if isinstance(item[1], TensorSum):
                    self._send_result(item[0], item[1], small)
                else:
                    self._said_bytes -= len(item[1])
                    self._send(item[0], item[1], small)
            self._flush(small)
        except OSError:
            pass  # the reader ends the same way, and tidies up
        finally:
            self._closed = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def _next(self, small: bytearray) -> Item | None:
        """The next item; small frames are sent once nothing else waits."""
        if small:
            with contextlib.suppress(queue.Empty):
                return self._queue.get_nowait()
            self._flush(small)
        return self._queue.get()

    def _flush(self, small: bytearray) -> None:
        if small:
            self.sock.sendall(small)
            small.clear()

    def _send(self, head: bytes, payload: Payload, small: bytearray) -> None:
        small += head
        if len(payload) <= SMALL_BYTES and len(small) < READ_BYTES:
            small += payload
            return
        sent = self.sock.sendmsg((small, payload))
        whole = len(small) + len(payload)
        if sent < len(small):
            self.sock.sendall(memoryview(small)[sent:])
            sent = len(small)
        if sent < whole:
            self.sock.sendall(memoryview(payload)[sent - len(small) :])
        small.clear()

    def _send_result(self, key: int, tensor: TensorSum, small: bytearray) -> None:
        with self._lock:
            lent = tensor.lend_to(self.rank)
            parts = tensor.parts_for(self.rank)
        if lent is None:
            return
        version, array, heads = lent
        declared = tensor.declared
        try:
            view = memoryview(array.view("u1").data)
            for part in range(parts):
                start, end = declared.state_span(part)
                kept = ~part if self.near else part  # unlike checksums
                head = heads.get(kept)
                if head is None:
                    head, _ = frame(
                        TensorOp.RESULT,
                        self._hash,
                        self._epoch,
                        key=key,
                        part=part,
                        round=version,
                        type=TYPES[declared.type][0],
                        payload=view[start:end],
                        near=self.near,
                    )
                    heads[kept] = head
                self._send(head, view[start:end], small)
                self._sent(end - start)
            self._flush(small)
        finally:
            with self._lock:
                tensor.give_back(array)

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

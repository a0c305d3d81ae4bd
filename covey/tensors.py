"""Push and pull of named float32 tensors: what a training script calls `job.tensors` (the AutoPS Agent, §4.3.1).

    with covey.join() as job:
        w = job.tensors.model("w", w0)              # every rank gets rank 0's initial value
        w = job.tensors.push_pull("w", delta)       # parameters + sum of all ranks' deltas
        g = job.tensors.push_pull("grad", g)        # a name never given to `model`: just the sum

Every rank calls the same rounds in the same order per tensor; a round's result is the floating point sum in rank order
of exactly one contribution per rank, in whatever order they arrive and however often the aggregator is replaced.

A thread of its own reads the connection, so that the aggregator can ask for the last result while the script computes.
It also connects again: to the same address until the agent names another one (`moved`), and then to that at once. Calls
block meanwhile; after 30 s they write to stderr what they wait for.

    script thread    push_pull ---- PUSH parts ---->|         |
                        | waits on the condition    |  socket |   aggd
    link thread      reads RESULT, answers ASK <----|         |
"""

import contextlib
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

import numpy as np
import numpy.typing as npt

from covey.core import JobId
from covey.handshake import NONCE_BYTES
from covey.rounds import Rounds, Stale, Superseded
from covey.tensorwire import (
    HEADER_BYTES,
    PART_BYTES,
    Frame,
    Header,
    TensorOp,
    TensorWireError,
    epoch_text,
    grant_of,
    parse,
    verify,
)
from covey.units import format_seconds
from covey.wire import AggregatorAt

Array = npt.NDArray[np.float32]

CONNECT_S = 2.0
"""How long one attempt to connect and be welcomed may take, seconds."""
SILENT_S = 2.0
"""Quiet time after which the link sends the aggregator a PING, seconds."""
DEAD_S = 6.0
"""Quiet time after which the connection is given up, seconds."""
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses between attempts to reach the same address, seconds; the last one repeats."""
BARRIER, LEAVE = "covey/barrier", "covey/leave"
LEAVE_S = 60.0
"""How long a rank that is done waits for the others, seconds. Longer than any takeover by another aggregator; it runs
out only when an aggregator dies after it told some ranks, and not all, that every rank is done."""


class TensorError(RuntimeError):
    """The aggregator refuses this tensor (shapes differ between ranks, no memory), or the client was closed."""


class TensorClient:
    """One rank's tensors. Made by `covey.join()`; `moved` may be called from any thread, the rest from the script's."""

    def __init__(
        self,
        job: JobId,
        rank: int,
        world_size: int,
        lost: Callable[[int, str], None],
        *,
        part_bytes: int = PART_BYTES,
        patience_s: float = 30.0,
        say: TextIO | None = None,
    ) -> None:
        """`lost(epoch, why)` is called from the link thread each time the address of that epoch cannot be used."""
        self.rank, self.world_size = rank, world_size
        self.communicate_s = 0.0
        """Seconds the script has spent in calls here."""
        self._lost, self._patience_s, self._say = lost, patience_s, say
        self._changed = threading.Condition()
        """Guards everything below; notified when any of it changes."""
        self._rounds = Rounds(job, rank, world_size, part_bytes)
        self._at: AggregatorAt | None = None
        self._link: _Link | None = None
        self._problem = "the agent has not named an aggregator yet"
        self._fatal: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="covey-tensors", daemon=True)
        self._thread.start()

    # ---- from the script ----

    def model(self, name: str, initial: Array) -> Array:
        """Parameters kept at the aggregator: rank 0's `initial`, on every rank, as a new float32 array of that shape.
        Blocks until all ranks called it. Errors as of `push_pull`."""
        data = _checked(name, initial)
        with self._timed():
            self._say_out(lambda: self._rounds.declare(name, "model", data.shape, _bytes(data)))
            return self._wait(name, lambda: self._rounds.tensors[name].agreed)

    def push_pull(self, name: str, array: Array) -> Array:
        """The result of this tensor's next round: the sum of all ranks' arrays, in rank order, added to the parameters
        of `model` where there are any. A new float32 array of the same shape. Blocks until every rank has pushed.

        ValueError when the shape is not that of earlier calls, TypeError when it is not float32, TensorError when the
        aggregator refuses it, Superseded when this run of the job is over.
        """
        data = _checked(name, array)
        with self._timed():
            with self._changed:
                known = self._rounds.tensors.get(name)
            if known is None:
                self._say_out(lambda: self._rounds.declare(name, "grad", data.shape))
            elif known.declared.shape != data.shape:
                raise ValueError(
                    f"tensor {name!r} has shape {known.declared.shape}, this array {data.shape}; "
                    "give an array of another shape another name"
                )
            self._say_out(lambda: self._rounds.push(name, _bytes(data)))
            return self._wait(name, lambda: self._rounds.tensors[name].unacknowledged is None)

    def barrier(self) -> None:
        """Blocks until every rank called it. Errors as of `push_pull`."""
        self.push_pull(BARRIER, np.zeros(1, np.float32))

    def leave(self, linger_s: float = LEAVE_S) -> bool:
        """The last call of a script that ended well: blocks until every rank has made it, so that no rank ends while
        another may still need its copy of a last result. False when that took longer than `linger_s` seconds. Again is
        harmless: `with covey.join()` makes it too."""
        with self._timed():
            if LEAVE in self._rounds.tensors:
                return self._rounds.tensors[LEAVE].unacknowledged is None
            self._say_out(lambda: self._rounds.declare(LEAVE, "grad", (1,)))
            self._say_out(lambda: self._rounds.push(LEAVE, bytes(4)))
            try:
                self._wait(LEAVE, lambda: self._rounds.tensors[LEAVE].unacknowledged is None, linger_s)
            except TimeoutError:
                return False
            return True

    def close(self) -> None:
        """Drops the connection and ends the thread; blocked calls raise TensorError. Again is harmless."""
        with self._changed:
            self._closed = True
            if self._link is not None:
                self._link.shut()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * CONNECT_S)

    # ---- from the agent ----

    def moved(self, at: AggregatorAt) -> None:
        """Push and pull there from now on, unless an assignment of a higher epoch is already known."""
        with self._changed:
            try:
                news = self._rounds.moved(at.epoch)
            except Superseded as error:
                self._fail(error)
                return
            if not news:
                return
            self._at = at
            self._problem = f"connecting to the aggregator on {at.host}"
            if self._link is not None:
                self._link.shut()
                self._link = None
            self._changed.notify_all()

    # ---- script side ----

    def _say_out(self, make: Callable[[], Iterable[Frame]]) -> None:
        """Change the rounds, and send the resulting frames if there is a connection; else `_serve` sends them."""
        with self._changed:
            self._raise_if_over()
            frames, link = make(), self._link
        if link is not None:
            link.send(frames)

    def _wait(self, name: str, done: Callable[[], bool], give_up_s: float | None = None) -> Array:
        """The tensor's result. TimeoutError after `give_up_s`."""
        began = time.monotonic()
        tell_at = began + self._patience_s
        with self._changed:
            tensor = self._rounds.tensors[name]
            while not done():
                self._raise_if_over()
                if tensor.fault:
                    raise TensorError(f"tensor {name!r}: {tensor.fault}")
                wake_at = tell_at if give_up_s is None else min(tell_at, began + give_up_s)
                self._changed.wait(timeout=max(0.0, wake_at - time.monotonic()) + 0.001)
                if give_up_s is not None and time.monotonic() >= began + give_up_s and not done():
                    raise TimeoutError(f"tensor {name!r} took longer than {format_seconds(give_up_s)}")
                if time.monotonic() >= tell_at and not done():
                    waited = format_seconds(time.monotonic() - began)
                    self._tell(f"has waited {waited} for tensor {name!r}: {self._why()}")
                    tell_at = time.monotonic() + self._patience_s
            return np.frombuffer(bytearray(tensor.state), dtype="<f4").reshape(tensor.declared.shape)

    def _why(self) -> str:
        if self._link is None or self._at is None:
            return self._problem
        return f"connected to the aggregator on {self._at.host}; other ranks have not pushed this round yet"

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"covey: rank {self.rank} of {self._rounds.job} {text}", file=self._say or sys.stderr, flush=True)

    def _raise_if_over(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._closed:
            raise TensorError("the tensor client is closed")

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._fatal = self._fatal or error
            self._changed.notify_all()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.communicate_s += time.monotonic() - began

    # ---- link thread ----

    def _run(self) -> None:
        tried: AggregatorAt | None = None
        attempt = 0
        while (at := self._target()) is not None:
            attempt = attempt + 1 if at is tried else 0
            tried, began = at, time.monotonic()
            try:
                self._serve(at)
            except Superseded as error:
                self._fail(error)
            except OSError as error:
                self._report(at, _words(error))
            if time.monotonic() - began > RETRY_S[-1]:
                attempt = 0
            with self._changed:
                if not self._closed and self._at is at:
                    self._changed.wait(timeout=RETRY_S[min(attempt, len(RETRY_S) - 1)])

    def _target(self) -> AggregatorAt | None:
        """Where to connect, once the agent has named it; None when the client is closed."""
        with self._changed:
            while not self._closed and self._fatal is None and self._at is None:
                self._changed.wait()
            return None if self._closed or self._fatal is not None else self._at

    def _report(self, at: AggregatorAt, why: str) -> None:
        with self._changed:
            if self._closed or self._at is not at:
                return
            self._problem = f"no aggregator: {at.address} on {at.host} (epoch {epoch_text(at.epoch)}) {why}"
        self._lost(at.epoch, why)

    def _serve(self, at: AggregatorAt) -> None:
        """Connect and carry frames until the connection ends, always by an exception."""
        link = _Link(at.address)
        try:
            with self._changed:
                hello = self._rounds.hello(at.secret, os.urandom(NONCE_BYTES)) if self._at is at else None
            if hello is None:
                raise ConnectionAbortedError("is no longer the aggregator")
            link.send((hello,))
            for expected in (TensorOp.CHALLENGE, TensorOp.WELCOME):
                header = self._take(link, at)
                if header.op is not expected:
                    raise TensorWireError(f"answered {header.op.name} to our hello")
            link.sock.settimeout(None)
            with link.lock:  # no other frame goes before those that open our tensors
                with self._changed:
                    if self._closed or self._at is not at:
                        raise ConnectionAbortedError("is no longer the aggregator")
                    frames, self._link = self._rounds.connected(), link
                link.send_locked(frames)
            while True:
                self._take(link, at)
        finally:
            with self._changed:
                if self._link is link:
                    self._link = None
            link.close()

    def _take(self, link: "_Link", at: AggregatorAt) -> Header:
        """One frame."""
        link.await_byte(self._rounds.ping)
        head = bytearray(HEADER_BYTES)
        link.read_into(memoryview(head))
        header = parse(head)
        with self._changed:
            if self._at is not at:
                raise ConnectionAbortedError("is no longer the aggregator")
            into = self._rounds.destination(header)
        link.read_into(into)
        verify(head, into)
        with self._changed:
            if self._at is not at:
                raise ConnectionAbortedError("is no longer the aggregator")
            answer = self._rounds.heard(header, into)
            self._changed.notify_all()
        link.send(answer, careful=False)
        return header


class _Link:
    """One connection. Sending is serialised by `lock`; only the link thread reads."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.lock = threading.RLock()
        self.sock = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(DEAD_S), 0))
        self._poll = select.poll()
        self._poll.register(self.sock, select.POLLIN)

    def send(self, frames: Iterable[Frame], careful: bool = True) -> None:
        """Send whole frames, or shut the connection: after half a frame it cannot be used. Never raises when `careful`:
        the link thread notices a broken connection and connects again."""
        with self.lock:
            try:
                self.send_locked(frames)
            except OSError:
                if not careful:
                    raise

    def send_locked(self, frames: Iterable[Frame]) -> None:
        whole = False
        try:
            for head, payload in frames:
                if len(payload) <= 4096:
                    self.sock.sendall(head + bytes(payload))
                else:
                    self.sock.sendall(head, socket.MSG_MORE)
                    self.sock.sendall(payload)
            whole = True
        finally:
            if not whole:  # also when a person pressed Ctrl-C
                self.shut()

    def await_byte(self, ping: Callable[[], Frame]) -> None:
        """Until something arrives. TimeoutError when the peer is silent although asked."""
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
        """Fill `view`. TimeoutError when a frame that began does not go on."""
        while view.nbytes:
            if not self._poll.poll(DEAD_S * 1000):
                raise TimeoutError(f"stopped for {format_seconds(DEAD_S)} in the middle of a frame")
            count = self.sock.recv_into(view)
            if count == 0:
                raise ConnectionResetError("closed the connection")
            view = view[count:]

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        with self.lock:
            self.sock.close()


def _checked(name: str, array: Array) -> Array:
    data = np.asarray(array)
    if data.dtype != np.float32:
        raise TypeError(f"tensor {name!r} is {data.dtype}; convert it first: array.astype(numpy.float32)")
    return np.ascontiguousarray(data, dtype="<f4").reshape(data.shape)


def _bytes(data: Array) -> memoryview:
    return data.reshape(-1).view(np.uint8).data


def _words(error: OSError) -> str:
    if isinstance(error, Stale):
        known = f"; it serves epoch {epoch_text(error.epoch)}" if grant_of(error.epoch) else ""
        return f"{error}{known}"
    return str(error) or type(error).__name__

"""Push and pull of named float32 tensors: what a training script calls `job.tensors` (the AutoPS Agent, §4.3.1).

    with covey.join() as job:
        w = job.tensors.model("w", w0)              # every rank gets rank 0's initial value
        w = job.tensors.push_pull("w", delta)       # parameters + sum of all ranks' deltas
        g = job.tensors.push_pull("grad", g)        # a name never given to `model`: just the sum
        h = job.tensors.push("grad", g, out=g)      # the same in two halves: this begins the round
        ...                                         # compute, push other names
        g = h.wait()                                # and this ends it

Every rank calls the same rounds in the same order per tensor; a round's result is the floating point sum of exactly
one contribution per rank, in a fixed order of additions (`covey.sum_order`), in whatever order they arrive and however
often the aggregator is replaced. Rounds of different names may be under way at once, from several threads.

A thread of its own reads the connection, so that the aggregator can ask for the last result while the script computes.
It also connects again: to the same address until the agent names another one (`moved`), and then to that at once. Calls
block meanwhile; after 30 s they write to stderr what they wait for.

    script threads   push ------- PUSH parts ------>|         |
                     wait: on the condition         |  socket |   aggd
    link thread      reads RESULT, answers ASK <----|         |

At the rank a round copies a tensor once, from the buffer it came into to where the script wants it.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

import numpy as np
import numpy.typing as npt

from covey.core import JobId
from covey.handshake import NONCE_BYTES
from covey.rounds import Rounds, Stale, Superseded, TensorRounds
from covey.sum_order import ORDERS, Order
from covey.tensor_link import CONNECT_S, TensorLink
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

RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses between attempts to reach the same address, seconds; the last one repeats."""
SMALL_BYTES = 64 << 10
"""Such a push is sent at once by whoever makes it: handing it to another thread costs more."""
BARRIER, LEAVE = "covey/barrier", "covey/leave"
LEAVE_S = 60.0
"""How long a rank that is done waits for the others, seconds. Longer than any takeover by another aggregator; it runs
out only when an aggregator dies after it told some ranks, and not all, that every rank is done."""


class TensorError(RuntimeError):
    """The aggregator refuses this tensor (shapes differ between ranks, no memory), or the client was closed."""


class TensorHandle:
    """A round that `TensorClient.push` began."""

    def __init__(self, client: "TensorClient", name: str, out: Array | None) -> None:
        self._client, self._name, self._out = client, name, out
        self._result: Array | None = None

    @property
    def done(self) -> bool:
        """Whether the result is here, and `wait` would not block."""
        return self._result is not None or self._client.has_result(self._name)

    def wait(self) -> Array:
        """The result: float32, in `out` if there was one, else a new array. Blocks until every rank has pushed. Again
        is harmless. Errors as of `push_pull`."""
        if self._result is None:
            self._result = self._client.finish(self._name, self._out)
        return self._result


class TensorClient:
    """One rank's tensors. Made by `covey.join()`; `moved` may be called from any thread, and so may the rest: one name
    has one round at a time, of different names there may be as many as there are."""

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
        self._thread_here = threading.local()
        self._lost, self._patience_s, self._say = lost, patience_s, say
        self._changed = threading.Condition()
        """Guards everything below; notified when any of it changes."""
        self._rounds = Rounds(job, rank, world_size, part_bytes)
        self._at: AggregatorAt | None = None
        self._link: TensorLink | None = None
        self._problem = "the agent has not named an aggregator yet"
        self._fatal: Exception | None = None
        self._open: set[str] = set()
        """Tensors with a round that nobody has waited for."""
        self._repeating = False
        """What was pushed is sent once more, over a new connection: it must stay as it is, even if its result comes."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="covey-tensors", daemon=True)
        self._thread.start()

    # ---- from the script ----

    @property
    def order(self) -> Order:
        """Of the additions of a round (`covey.sum_order`): "tree", or "rank" as a plain loop adds. To be set before the
        first tensor, to the same on every rank: ValueError."""
        return self._rounds.order

    @order.setter
    def order(self, order: Order) -> None:
        """ValueError once there are tensors, or when there is no such order."""
        if order not in ORDERS:
            raise ValueError(f"tensors are added by {' or '.join(ORDERS)}, not {order!r}")
        with self._changed:
            if self._rounds.tensors:
                raise ValueError("there are tensors already; set the order of their additions before the first one")
            self._rounds.order = order

    def model(self, name: str, initial: Array) -> Array:
        """Parameters kept at the aggregator: rank 0's `initial`, on every rank, as a new float32 array of that shape.
        Blocks until all ranks called it. Errors as of `push_pull`."""
        data = _checked(name, initial)
        with self._timed():
            self._say_out(lambda: self._rounds.declare(name, "model", data.shape, _bytes(data)), data.nbytes)
            return self._wait(name, lambda tensor: tensor.agreed)

    def push(self, name: str, array: Array, *, out: Array | None = None) -> TensorHandle:
        """Begin this tensor's next round, and go on: `push(...).wait()` is `push_pull`. `array` is read until then, and
        must stay as it is; only `wait` writes to `out`, which may be the same array and must be of its shape,
        contiguous float32. Does not wait for other ranks, nor for the network. Errors as of `push_pull`."""
        return self._push(name, array, out, False)

    def push_pull(self, name: str, array: Array, *, out: Array | None = None) -> Array:
        """The result of this tensor's next round: the sum of all ranks' arrays, added to the parameters of `model`
        where there are any. Float32 of the same shape: `out`, as of `push`, or a new array. Blocks until every rank has
        pushed.

        ValueError when the shape is not that of earlier calls or the last round of this name was not waited for,
        TypeError when it is not float32, TensorError when the aggregator refuses it, Superseded when this run of the
        job is over.
        """
        handle = self._push(name, array, out, True)
        try:
            return handle.wait()
        finally:
            with self._changed:
                self._open.discard(name)

    def has_result(self, name: str) -> bool:
        """Whether no round of this tensor is under way, and nothing of it is being sent."""
        with self._changed:
            return self._rounds.tensors[name].unacknowledged is None and not self._repeating

    def finish(self, name: str, out: Array | None) -> Array:
        """The end of the round that is under way; for its handle."""
        with self._timed():
            result = self._wait(name, lambda tensor: tensor.unacknowledged is None, out=out)
        with self._changed:
            self._open.discard(name)
        return result

    def in_background(self) -> None:
        """From now on what this thread waits for here is not counted in `communicate_s`: the script computes
        meanwhile."""
        self._thread_here.background = True

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
                self._wait(LEAVE, lambda tensor: tensor.unacknowledged is None, linger_s)
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

    def _push(self, name: str, array: Array, out: Array | None, blocks: bool) -> TensorHandle:
        data = _checked(name, array)
        if out is not None:
            _check_out(name, out, data.shape)
        with self._timed():
            with self._changed:
                known = self._rounds.tensors.get(name)
                if name in self._open:
                    raise ValueError(f"tensor {name!r} has a round that was not waited for; call wait() of its handle")
                if known is not None and known.declared.shape != data.shape:
                    raise ValueError(
                        f"tensor {name!r} has shape {known.declared.shape}, this array {data.shape}; "
                        "give an array of another shape another name"
                    )
            if known is None:
                self._say_out(lambda: self._rounds.declare(name, "grad", data.shape))
            self._say_out(lambda: self._begin(name, data), 0 if blocks else data.nbytes)
        return TensorHandle(self, name, out)

    def _begin(self, name: str, data: Array) -> Iterator[Frame]:
        frames = self._rounds.push(name, _bytes(data))
        self._open.add(name)
        return frames

    def _say_out(self, make: Callable[[], Iterable[Frame]], size: int = 0) -> None:
        """Change the rounds, and send the resulting frames if there is a connection; else `_serve` sends them. `size`:
        so many bytes are not worth waiting for."""
        with self._changed:
            self._raise_if_over()
            frames, link = make(), self._link
        if link is not None:
            link.say(frames, at_once=size <= SMALL_BYTES)

    def _wait(
        self,
        name: str,
        done: Callable[[TensorRounds], bool],
        give_up_s: float | None = None,
        out: Array | None = None,
    ) -> Array:
        """The tensor's result. TimeoutError after `give_up_s`."""
        began = time.monotonic()
        tell_at = began + self._patience_s
        with self._changed:
            tensor = self._rounds.tensors[name]
            while not done(tensor) or self._repeating:
                self._raise_if_over()
                if tensor.fault:
                    raise TensorError(f"tensor {name!r}: {tensor.fault}")
                wake_at = tell_at if give_up_s is None else min(tell_at, began + give_up_s)
                self._changed.wait(timeout=max(0.0, wake_at - time.monotonic()) + 0.001)
                if give_up_s is not None and time.monotonic() >= began + give_up_s and not done(tensor):
                    raise TimeoutError(f"tensor {name!r} took longer than {format_seconds(give_up_s)}")
                if time.monotonic() >= tell_at and not done(tensor):
                    waited = format_seconds(time.monotonic() - began)
                    self._tell(f"has waited {waited} for tensor {name!r}: {self._why()}")
                    tell_at = time.monotonic() + self._patience_s
        # only this name's next round, which nobody can begin before this ends, would write here
        found: Array = np.frombuffer(tensor.state, dtype="<f4").reshape(tensor.declared.shape)
        if out is None:
            return found.copy()
        np.copyto(out, found)
        return out

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
            if not getattr(self._thread_here, "background", False):
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
        link = TensorLink(at.address)
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
                    frames, self._link, self._repeating = self._rounds.connected(), link, True
                link.send_locked(frames)
                with self._changed:
                    self._repeating = False
                    self._changed.notify_all()
            while True:
                self._take(link, at)
        finally:
            with self._changed:
                if self._link is link:
                    self._link = None
                self._repeating = False
                self._changed.notify_all()
            link.close()

    def _take(self, link: TensorLink, at: AggregatorAt) -> Header:
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


def _checked(name: str, array: Array) -> Array:
    data = np.asarray(array)
    if data.dtype != np.float32:
        raise TypeError(f"tensor {name!r} is {data.dtype}; convert it first: array.astype(numpy.float32)")
    return np.ascontiguousarray(data, dtype="<f4").reshape(data.shape)


def _check_out(name: str, out: object, shape: tuple[int, ...]) -> None:
    if not isinstance(out, np.ndarray) or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise TypeError(f"the result of tensor {name!r} goes into a contiguous float32 array, not {_kind(out)}")
    if out.shape != shape or not out.flags.writeable:
        how = f"has shape {out.shape}, not {shape}" if out.shape != shape else "cannot be written"
        raise ValueError(f"the array for the result of tensor {name!r} {how}")


def _kind(out: object) -> str:
    return f"{out.dtype} of strides {out.strides}" if isinstance(out, np.ndarray) else type(out).__name__


def _bytes(data: Array) -> memoryview:
    return data.reshape(-1).view(np.uint8).data


def _words(error: OSError) -> str:
    if isinstance(error, Stale):
        known = f"; it serves epoch {epoch_text(error.epoch)}" if grant_of(error.epoch) else ""
        return f"{error}{known}"
    return str(error) or type(error).__name__

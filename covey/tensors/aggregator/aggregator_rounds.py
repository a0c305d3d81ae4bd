"""A rank's rounds of tensors through an aggregator, over one connection that a thread keeps and reads.

The thread connects again whenever the connection ends: to the same address until the agent names another one (`moved`),
and then to that at once. While the script computes, the thread answers an aggregator that asks for the last result.

    script threads   push ------- PUSH parts ------>|         |
                     wait: on the condition         |  socket |   aggd
    link thread      reads RESULT, answers ASK <----|         |

A round copies a tensor once at the rank: from the receive buffer to where the script wants it.
"""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Protocol

import numpy as np

from covey.core.errors import RankLeft
from covey.ports.verbs import NoVerbs
from covey.tensors.aggregator.early_copy import EarlyCopy
from covey.tensors.aggregator.link import CONNECT_S, Poster, RankSideLink, TensorLink
from covey.tensors.aggregator.present_owner import PresentOwner
from covey.tensors.aggregator.push_memory import mapped
from covey.tensors.aggregator.rounds import Rounds, Stale, Superseded, Tell, ToldByRank
from covey.tensors.numbers.arrays import Array, bytes_of
from covey.tensors.numbers.sum_order import Node
from covey.tensors.numbers.tensor_wire import (
    HEADER_BYTES,
    PAIRS,
    Declared,
    Frame,
    Header,
    TensorOp,
    TensorWireError,
    epoch_text,
    grant_of,
    parse,
    unpack_size,
    verify,
)
from covey.tensors.numbers.types import NUMBERS
from covey.tensors.rdma.rdma_here import RdmaHere, packed_words, words
from covey.tensors.rdma.tensor_pair import PairLost, pack_there, unpack_there
from covey.tensors.turns.holder import ProcessTurns
from covey.wire.handshake import NONCE_BYTES
from covey.wire.job import AggregatorAt

RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses between attempts to reach the same address, in seconds; the last one repeats."""
SMALL_BYTES = 64 << 10
"""Largest push in bytes that the calling thread sends itself: handing it to another thread costs more."""
AWAITED_BYTES = 256 << 10
"""Largest push in bytes that a thread which waits for the result sends itself where a job has several owners. Larger
ones are sent by another thread, while this one copies results that have come."""


class Waits(Protocol):
    """What a thread's wait for a tensor must offer."""

    @property
    def left_s(self) -> float:
        """Seconds until the next look, at most."""

    def look(self) -> None:
        """Raises when there is nothing to wait for any more."""


class AggregatorRounds:
    """The rounds of one rank at one aggregator. Methods may be called from any thread."""

    def __init__(
        self,
        rounds: Rounds,
        lost: Callable[[int, str], None],
        failed: Callable[[Exception], None] = lambda error: None,
        poster: Poster | None = None,
        heard: Callable[[], None] = lambda: None,
        local: Callable[[AggregatorAt], RankSideLink | None] = lambda at: None,
        rdma: RdmaHere | None = None,
        turns: ProcessTurns | None = None,
    ) -> None:
        """From the link thread, `lost(epoch, why)` is called each time the address of that epoch cannot be used,
        `failed` once nothing will be added any more, and `heard` when a result may be there. `poster`: the sending
        thread that all tables share. `local` connects to an owner in this process; None: it is another one. `rdma`:
        used to reach owners on other hosts, where the agent lets it; None: never. `turns`: those of this process."""
        self._local, self._rdma, self._turns = local, rdma, turns
        self.rounds, self._lost, self._failed, self._poster, self._heard = rounds, lost, failed, poster, heard
        self._changed = threading.Condition()
        """Guards the fields below, and the rounds; notified when any of them changes."""
        self._owner = PresentOwner()
        self._link: RankSideLink | None = None
        self._goes_beside = False
        """Whether it is on its way to the owner at which another rank of this process is."""
        self._problem = "the agent has not assigned an aggregator yet"
        self.fatal: Exception | None = None
        """Why nothing will be added any more; None: it will."""
        self._repeating = False
        """Whether pushes are being sent again over a new connection: they must not change, even if results come."""
        self._saying = False
        """Whether a KEPT frame is still to be sent: until then no thread gets the result that this rank keeps."""
        self._closed = False
        self._awaited = Counter[int]()
        """By a tensor's key, number of threads that wait for it: other threads are not woken by its result."""
        self._copies: dict[int, EarlyCopy] = {}
        """By a tensor's key, copies of results that threads wait for."""
        self._held: list[Iterable[Frame]] = []
        """Frames that are sent before the next frame on this connection."""
        self.told: Callable[[ToldByRank], None] = lambda told: None
        """Called in the link thread with the messages of other ranks."""
        self._thread = threading.Thread(target=self._run, name="covey-tensors", daemon=True)
        self._thread.start()

    # ---- from the script ----

    def declare(self, declared: Declared, initial: Array, moments: Sequence[Array] = ()) -> None:
        """Declare a new tensor, or one Block of it. `initial`: the value of a model, with the `moments` from which its
        optimizer continues. ValueError when it is declared already."""
        value = bytes_of(initial) if declared.kind == "model" else None
        size, kept = 0 if value is None else initial.nbytes, [bytes_of(each) for each in moments]
        self._say_out(lambda: self.rounds.declare_as(declared, value, moments=kept), size)

    def speak(self, declared: Declared, ranks: Node, results: Sequence[Sequence[Array]]) -> None:
        """Declare a Block for the ranks of one host. `results`: two places where the results are stored in turn, each
        with its moments; the first holds a model's initial value. ValueError when it is declared already."""
        first, second = ([bytes_of(array) for array in each] for each in results)
        self._say_out(lambda: self.rounds.declare_as(declared, None, ranks, (first, second)))

    def push(self, label: str, *sums: Array, blocks: bool, rate: float = 0.0) -> None:
        """Begin a round of a Block, with this rank's contribution, or with the sums that the ranks it speaks for have
        added. `blocks`: this thread waits for the result at once. `rate`: learning rate. ValueError when a round is
        under way."""
        size = sum(each.nbytes for each in sums)
        awaited = blocks and size > SMALL_BYTES
        if blocks and (self._poster is None or size <= AWAITED_BYTES):
            size = 0
        elif self._poster is not None:
            size = max(size, SMALL_BYTES + 1)  # several connections: this thread would wait for a slow one
        with self._turns.sending() if self._turns is not None and awaited and self.is_far else contextlib.nullcontext():
            self._say_out(lambda: self.rounds.push(label, *map(bytes_of, sums), rate=rate), size)

    @property
    def is_far(self) -> bool:
        """Whether what this thread pushes goes to another host, under a turn."""
        link = self._link
        return self._turns is not None and self._turns.on and link is not None and not link.near

    def push_soon(self, label: str, data: Array) -> None:
        """Push as `push` does, for one rank, but send the frames only with the next ones on this connection."""
        with self._changed:
            if self.fatal is not None:
                raise self.fatal
            frames = self.rounds.push(label, bytes_of(data))
            if self._link is not None:  # without a link, `_serve` sends them
                self._held.append(frames)

    def say_held(self) -> None:
        """Send the frames that wait for the next push."""
        if self._held:
            self._say_out(tuple)

    def wake(self) -> None:
        """Let threads that wait look again whether they are to wait."""
        with self._changed:
            self._changed.notify_all()

    def moments(self, label: str) -> list[Array]:
        """The moments of a Block's last result that this rank keeps; none when another rank does. They must not be
        written, and are valid only until the next round."""
        with self._changed:
            tensor = self.rounds.tensors[label]
            wide = NUMBERS[tensor.declared.type].wide
            return [np.frombuffer(each, dtype=wide) for each in tensor.moments] if tensor.keeps else []

    def own_state(self, label: str) -> list[Array]:
        """The last result of a Block whose keeper this rank is, or speaks for, and its moments; none when another rank
        is. They must not be written, and are valid until this rank pushes for the round after the next."""
        with self._changed:
            tensor = self.rounds.tensors[label]
            first, end = tensor.spoken.ranks
            if not first <= tensor.declared.keeper < end:
                return []
            numbers, kept = NUMBERS[tensor.declared.type], tensor.moments if tensor.keeps else ()
            state = np.frombuffer(tensor.state, dtype=numbers.stored)
            return [state, *(np.frombuffer(each, dtype=numbers.wide) for each in kept)]

    def tell(self, said: Tell) -> None:
        """Send a message to another rank, if both are connected."""
        with self._changed:
            link = self._link
            frame = self.rounds.tell(said) if link is not None else None
        if link is not None and frame is not None:
            link.say((frame,), at_once=len(said.data) <= SMALL_BYTES)

    def leave(self, words: bytes) -> None:
        """Tell the aggregator that this rank leaves, as in `Rounds.leave`."""
        self._say_out(lambda: self.rounds.leave(words))

    def adopt(self, declared: Declared, version: int) -> None:
        """Take over a Block from the lost rank, as in `Rounds.adopt`."""
        self._say_out(lambda: self.rounds.adopt(declared, version))

    def versions(self) -> list[tuple[bytes, int]] | None:
        """The round of each Block, as in `Rounds.versions`."""
        with self._changed:
            return self.rounds.versions()

    def has_result(self, label: str) -> bool:
        """Whether no round of this Block is under way, and nothing of it is being sent."""
        with self._changed:
            tensor = self.rounds.tensors[label]
            return tensor.unacknowledged is None and tensor.agreed and not self._repeating and not self._saying

    def round(self, label: str) -> int | None:
        """Number of a Block's round that is under way, else of the last one; None when it is not declared."""
        with self._changed:
            tensor = self.rounds.tensors.get(label)
            return None if tensor is None else tensor.unacknowledged or tensor.version

    def fault(self, label: str) -> tuple[str, bool]:
        """Why a Block is not added, for people, and whether a rank that left is the cause; empty when it is added."""
        with self._changed:
            tensor = self.rounds.tensors[label]
            return tensor.fault, tensor.in_vain

    def until(self, label: str, waits: Waits) -> None:
        """Wait until the Block's result is here. ValueError when the aggregator does not add it; RankLeft."""
        self.say_held()
        with self._changed:
            tensor = self.rounds.tensors[label]
            self._awaited[tensor.key] += 1
            try:
                while tensor.unacknowledged is not None or not tensor.agreed or self._repeating or self._saying:
                    waits.look()
                    if tensor.fault:
                        raise (RankLeft if tensor.in_vain else ValueError)(tensor.fault)
                    self._changed.wait(waits.left_s)
            finally:
                self._awaited[tensor.key] -= 1

    def wait(self, label: str, waits: Waits, out: Array) -> None:
        """Wait for the Block's result and copy it into `out`, flat. Errors as of `until`."""
        tensor = self.rounds.tensors[label]
        with self._changed:
            copy = self._copies[tensor.key] = EarlyCopy(tensor.declared, bytes_of(out), tensor.pushed)
            here = tensor.parts_here()
        for part in here:
            with self._changed:  # the link thread takes in other parts in between
                if (numbers := tensor.part_here(part)) is not None:
                    copy.came(part, numbers)
        try:
            self.until(label, waits)
        finally:
            with self._changed:  # the script may use `out` for anything from now on
                del self._copies[tensor.key]
        # only this Block's next round, which cannot begin before this ends, would write here
        copy.finish(tensor.state)

    @property
    def connected(self) -> bool:
        return self._link is not None

    def why(self) -> str:
        """Why no result comes, for people."""
        at = self._owner.at
        if self._link is None or at is None:
            return self._problem
        return f"connected to the aggregator on {at.host}; other ranks have not pushed this round yet"

    def close(self) -> None:
        """Drop the connection and end the thread; waiting threads check at once. A second call is harmless."""
        with self._changed:
            self._closed = True
            if self._link is not None:
                self._link.shut()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * CONNECT_S)

    def begin_as(self, other: "AggregatorRounds") -> None:
        """Begin at the owner at which these rounds of another rank are, also while it hands over to the next one."""
        with other._changed, self._changed:
            self._owner.begin_as(other._owner)
            if self._owner.at is not None:
                self._goes_beside = True
                self._go_to(self._owner.at)

    # ---- from the agent ----

    def moved(self, at: AggregatorAt) -> None:
        """Push and pull at this address from now on, or once the present owner hands over, unless an assignment of a
        higher epoch is already known."""
        try:
            with self._changed:
                if self._owner.told(at, self._goes_beside or self._link is not None, time.monotonic()):
                    self._go_to(at)
        except Superseded as error:
            self._fail(error)

    # ---- inside ----

    def _go_to(self, at: AggregatorAt) -> None:
        """Leave the present owner for this one. Superseded."""
        self.rounds.moved(at.epoch)
        if not at.address:
            raise Superseded("this run of the job was taken back; this process must end")
        self._problem = f"connecting to the aggregator on {at.host}"
        if self._link is not None:
            self._link.shut()
            self._link = None
        self._changed.notify_all()

    def _say_out(self, make: Callable[[], Iterable[Frame]], size: int = 0) -> None:
        """Change the rounds, and send the resulting frames if there is a connection; else `_serve` sends them. `size`:
        bytes of the frames; up to `SMALL_BYTES` the calling thread sends them."""
        with self._changed:
            if self.fatal is not None:
                raise self.fatal
            frames, link = make(), self._link
            if self._held:
                held, self._held = self._held, []
                frames = chain(*held, frames)
        if link is not None:
            link.say(frames, at_once=size <= SMALL_BYTES)

    def fail(self, error: Exception) -> None:
        """Nothing will be added any more; waiting threads check at once."""
        with self._changed:
            self.fatal = self.fatal or error
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        self.fail(error)
        self._failed(error)

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
                if not self._handed_over(at):
                    self._report(at, _words(error))
            except Exception as error:  # whoever waits here would wait for ever
                self._fail(error)
                raise
            if time.monotonic() - began > RETRY_S[-1]:
                attempt = 0
            with self._changed:
                if not self._closed and self._owner.at is at:
                    self._changed.wait(timeout=RETRY_S[min(attempt, len(RETRY_S) - 1)])

    def _target(self) -> AggregatorAt | None:
        """The address to connect to, once the agent has named it; None when the client is closed."""
        with self._changed:
            while not self._closed and self.fatal is None and self._owner.at is None:
                self._changed.wait()
            return None if self._closed or self.fatal is not None else self._owner.at

    def _handed_over(self, at: AggregatorAt) -> bool:
        """Whether the owner whose connection ended has handed over; then the next owner becomes the present one."""
        with self._changed:
            after = self._owner.ended(at)
            if after is not None:
                self._go_to(after)
            return after is not None

    def _report(self, at: AggregatorAt, why: str) -> None:
        with self._changed:
            if self._closed or self._owner.at is not at:
                return
            self._problem = f"no aggregator: {at.address} on {at.host} (epoch {epoch_text(at.epoch)}) {why}"
        self._lost(at.epoch, why)

    def _serve(self, at: AggregatorAt) -> None:
        """Connect and carry frames until the connection ends, always by an exception."""
        link: RankSideLink = self._local(at) or self._connected(at)
        try:
            if isinstance(link, TensorLink):
                self._introduce(link, at)
            with link.lock:  # no other frame is sent before those that open our tensors
                with self._changed:
                    if self._closed or self._owner.at is not at:
                        raise ConnectionAbortedError("is no longer the aggregator")
                    self.rounds.near, self.rounds.places = link.near, link.places
                    frames, self._link, self._repeating = self.rounds.connected(), link, True
                    self._goes_beside = False
                    self._held.clear()
                    for copy in self._copies.values():
                        copy.forget()
                link.send_locked(frames)
                with self._changed:
                    self._repeating = False
                    self._changed.notify_all()
            self._heard()
            while True:
                self._take(link, at)
        except Stale:
            raise
        except OSError as error:
            if self._rdma is not None and link.pair is not None and self._owner.at is at:
                self._rdma.failed(at.address, link.pair.why or _words(error))
            raise
        finally:
            with self._changed:
                if self._link is link:
                    self._link = None
                self._repeating = self._saying = False
                self._changed.notify_all()
            self._heard()
            link.close()

    def _connected(self, at: AggregatorAt) -> TensorLink:
        if self._rdma is not None and at.rdma and not at.near:
            self._rdma.warm()
        return TensorLink(at.address, self._poster, at.near, self._turns)

    def _introduce(self, link: TensorLink, at: AggregatorAt) -> None:
        """Prove who this is to an owner in another process, which proves that too."""
        pairs = PAIRS if self._rdma is not None and at.rdma and not link.near else 0
        with self._changed:
            hello = self.rounds.hello(at.secret, os.urandom(NONCE_BYTES), pairs) if self._owner.at is at else None
        if hello is None:
            raise ConnectionAbortedError("is no longer the aggregator")
        link.send((hello,))
        header, _ = self._answer(link, at, TensorOp.CHALLENGE)
        if self._rdma is not None and pairs and header.part == PAIRS:
            link.send((self.rounds.pairs(*self._pair(link, at, self._rdma)),), careful=False)
        self._answer(link, at, TensorOp.WELCOME)

    def _answer(self, link: TensorLink, at: AggregatorAt, expected: TensorOp) -> tuple[Header, memoryview]:
        header, payload = self._take(link, at)
        if header.op is not expected:
            raise TensorWireError(f"answered {header.op.name} to our hello")
        return header, payload

    def _pair(self, link: TensorLink, at: AggregatorAt, rdma: RdmaHere) -> tuple[int, bytes]:
        """Give the connection a queue pair, if both ends can. Returns what the owner is told last."""
        try:
            pair = rdma.pair(link.sock, at.address)
        except NoVerbs as why:
            return 0, packed_words(str(why))
        try:
            link.send((self.rounds.pairs(PAIRS, pack_there(pair.here)),), careful=False)
            header, payload = self._answer(link, at, TensorOp.PAIRED)
            if header.part != PAIRS:
                raise NoVerbs(words(payload))
            pair.connect(unpack_there(payload))
            pair.probe()
            link.pair = pair
            return PAIRS, b""
        except (NoVerbs, PairLost) as why:
            rdma.failed(at.address, str(why))
            return 0, packed_words(str(why))
        finally:
            if link.pair is None:
                pair.close()

    def _take(self, link: RankSideLink, at: AggregatorAt) -> tuple[Header, memoryview]:
        """Read and handle one frame; returns it."""
        link.await_byte(self.rounds.ping)
        head = bytearray(HEADER_BYTES)
        link.read_into(memoryview(head))
        header = parse(head)
        with self._changed:
            if self._owner.at is not at or self._owner.overdue(time.monotonic()):
                raise ConnectionAbortedError("is no longer the aggregator")
            into = self.rounds.destination(header)
        link.read_payload(header, into)
        verify(head, into, link.near)
        with self._changed:
            if self._owner.at is not at:
                raise ConnectionAbortedError("is no longer the aggregator")
            if header.op is TensorOp.RESULT and header.key in self._copies and self.rounds.expects(header):
                self._copies[header.key].came(header.part, into)
            answer: Iterable[Frame] = self.rounds.heard(header, into)
            if header.op is TensorOp.RESULT:  # a script with its last result may end: send KEPT before
                answer = tuple(answer)
                self._saying = bool(answer)
            if not self._saying and (header.op is not TensorOp.RESULT or self._awaited[header.key]):
                self._changed.notify_all()
        link.send(answer, careful=False)
        if self._saying:
            with self._changed:
                self._saying = False
                self._changed.notify_all()
        if header.op in (TensorOp.RESULT, TensorOp.FAULT):
            self._heard()
        if header.op is TensorOp.MEMORY:
            self._take_memory(link, header.key, unpack_size(into))
        if header.op is TensorOp.TOLD:
            self.told(ToldByRank(header.rank, header.key, header.round, into))
        return header, into

    def _take_memory(self, link: RankSideLink, key: int, size: int) -> None:
        """The owner has handed memory over for what is pushed of this tensor."""
        descriptor = link.descriptor()
        try:
            memory = mapped(descriptor, size)
        except OSError:
            return  # what is pushed is sent, as before
        with self._changed:
            if self._link is link:
                self.rounds.memory_is(key, memory)


def _words(error: OSError) -> str:
    if isinstance(error, Stale):
        known = f"; it serves epoch {epoch_text(error.epoch)}" if grant_of(error.epoch) else ""
        return f"{error}{known}"
    return str(error) or type(error).__name__

"""A queue pair for the large parts of tensors, beside the TCP connection on which everything else goes, in order.

Each end has some slots that the other end writes into, and a count of those that it has taken:

    sender                                          receiver
      copy a part into our slot n
      WRITE it to the peer's slot n ------------->  (its processor does nothing)
      READ how many slots the peer has taken <----
      both done: the part's header, over TCP ---->  copy slot n to where the part belongs; taken = n + 1

So the receiver posts nothing, and threads that send share the pair under the lock that they hold to send on the
connection. A WRITE is seen by every step after it (`covey.ports.verbs`): when the READ is done, the part is in the
peer's memory, before its header is sent. A sender whose peer has taken too few slots reads the count until it has.

Whatever fails, the whole connection ends, as if TCP had failed: the next one is without a pair, and what was under way
is pushed again. The frame's own checksum covers the part as it does over TCP: it is what tells a slot that nobody has
written, or a device that writes into a wrong one.
"""

import mmap
import select
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from covey.ports.verbs import GID_BYTES, MTU_MAX, NUMBER_BITS, NoVerbs, PairPlace, VerbsDevice, VerbStep
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import PART_BYTES_MAX, Payload, TensorWireError, has_numbers

SLOTS = 4
"""Parts that one end may have sent and the other not taken."""
SLOT_BYTES = PART_BYTES_MAX
LEAST_BYTES = (256 << 10) + 1
"""Least bytes of a part for which the pair is used: a smaller one is on its way sooner over TCP, in one piece with its
header, and a thread that must not wait can send it."""
LOCKED_BYTES = 2 * (SLOTS * SLOT_BYTES + mmap.PAGESIZE)
"""Bytes that one end of a pair locks."""
ANSWER_S = 6.0
"""Seconds without progress after which a pair is given up, as a silent connection is."""
PROBE_S = 2.0
"""Seconds that the first READ may take."""
PAUSES_S = (0.00005, 0.001)
"""First and longest pause before the count of a peer that has taken nothing is read again, in seconds."""
_COUNT_AT = SLOTS * SLOT_BYTES
_COUNT_BYTES = 8
_THERE = struct.Struct(f"<{GID_BYTES}sHIIBIQ")


class PairLost(ConnectionError):
    """The pair cannot be used any more, and its connection neither; the text says why."""


class SlotsThere(NamedTuple):
    """The other end's queue pair and memory."""

    where: PairPlace
    key: int
    address: int


def pack_there(there: SlotsThere) -> bytes:
    where = there.where
    return _THERE.pack(where.gid, where.lid, where.number, where.first_psn, where.mtu, there.key, there.address)


def unpack_there(data: Payload) -> SlotsThere:
    """The other end's queue pair and memory. TensorWireError when the bytes cannot mean that."""
    if len(data) != _THERE.size:
        raise TensorWireError(f"the place of a queue pair has {_THERE.size} bytes, not {len(data)}")
    gid, lid, number, psn, mtu, key, address = _THERE.unpack(data)
    if number >> NUMBER_BITS or psn >> NUMBER_BITS or not 1 <= mtu <= MTU_MAX:
        raise TensorWireError(f"no queue pair is at number {number}, packet {psn}, MTU {mtu}")
    return SlotsThere(PairPlace(gid, lid, number, psn, mtu), key, address)


def rides(op: int, length: int) -> bool:
    """Whether the payload of a frame goes over the pair, where there is one."""
    return length >= LEAST_BYTES and has_numbers(op)


class _Slots:
    """The slots and the count of one end, registered. A forked child does not get this memory: its writes would
    separate the pages of this process from those that the device reaches."""

    def __init__(self, device: VerbsDevice, remote: bool) -> None:
        size = LOCKED_BYTES // 2
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        self.view = memoryview(memory)
        self.count = self.view[_COUNT_AT : _COUNT_AT + _COUNT_BYTES].cast("Q")
        self.region = device.register(self.view, remote)
        self._bytes = np.frombuffer(self.view, np.uint8)

    def slot(self, number: int, size: int) -> Array:
        at = number % SLOTS * SLOT_BYTES
        return self._bytes[at : at + size]


class TensorPair:
    """One end. NoVerbs when the device refuses. `close` is not to be called while another thread uses it."""

    def __init__(self, device: VerbsDevice, connection: int, tell: Callable[[bytes], object]) -> None:
        """`connection`: descriptor of the TCP connection, whose end ends every wait; `tell` sends a header on it."""
        self.why = ""
        """Why the pair cannot be used any more; empty: it can."""
        self._device, self._connection, self._tell = device, connection, tell
        self._there: SlotsThere | None = None
        self._posted: deque[bytes | None] = deque()
        """For each post that is not done: the header that is sent then; None: it only reads the count."""
        self._ready: deque[bytes] = deque()
        """Headers of parts that are in the peer's memory."""
        self._sent = self._taken = 0
        """How many parts this end has written, and how many of them the peer has taken, as was read last."""
        self._got = 0
        """How many parts this end has taken."""
        self._closing: list[Callable[[], None]] = [device.close]
        """What is undone, the last one first."""
        try:
            self._in, self._out = self._slots(remote=True), self._slots(remote=False)
            self._pair = device.pair(self._done, watched=False)
            self._closing.append(self._pair.close)
        except NoVerbs:
            self.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._pair.descriptor, select.POLLIN)
        self._poll.register(connection, select.POLLRDHUP)

    def close(self) -> None:
        """Idempotent. Once it returns, nobody reaches this memory."""
        self.why = self.why or "it is closed"
        while self._closing:
            self._closing.pop()()

    @property
    def here(self) -> SlotsThere:
        """What the other end is told."""
        return SlotsThere(self._pair.where, self._in.region.key, self._in.region.address)

    def connect(self, there: SlotsThere) -> None:
        """NoVerbs when the device refuses."""
        self._there = there
        self._pair.connect(there.where)

    def probe(self) -> None:
        """See whether the peer can be reached. PairLost."""
        self._post(None)
        self._settle(PROBE_S)

    # ---- out ----

    def send(self, head: bytes, payload: Payload) -> None:
        """Send a frame whose payload `rides`. Its header is on the connection once `settle` or another `send` has
        seen that the part is there. Waits while the peer takes nothing. PairLost; OSError as of the connection."""
        self._await_room()
        np.copyto(self._out.slot(self._sent, len(payload)), np.frombuffer(payload, np.uint8))
        self._post(head, len(payload))
        self._look()

    @property
    def is_settled(self) -> bool:
        """Whether all headers are on the connection; for any thread."""
        return not self._posted and not self._ready

    def settle(self) -> None:
        """Wait until all headers are on the connection: what is sent there from now on comes after them. Errors as of
        `send`."""
        if self._posted:
            self._settle(ANSWER_S)

    # ---- in ----

    def take(self, view: memoryview) -> None:
        """Fill `view` with the part whose header came."""
        np.copyto(np.frombuffer(view, np.uint8), self._in.slot(self._got, view.nbytes))
        self._got += 1
        self._in.count[0] = self._got

    # ---- inside ----

    def _slots(self, remote: bool) -> _Slots:
        slots = _Slots(self._device, remote)
        self._closing.append(slots.region.close)
        return slots

    def _post(self, head: bytes | None, size: int = 0) -> None:
        """Write the next slot, when there is a header, and read the peer's count."""
        there, steps = self._there, list[VerbStep]()
        assert there is not None, "connected"
        ours, key = self._out.region.address, self._out.region.key
        if head is not None:
            at = self._sent % SLOTS * SLOT_BYTES
            steps.append(VerbStep(False, ours + at, key, there.address + at, there.key, size))
            self._sent += 1
        steps.append(VerbStep(True, ours + _COUNT_AT, key, there.address + _COUNT_AT, there.key, _COUNT_BYTES))
        self._posted.append(head)
        self._pair.post(steps)

    def _done(self, why: str) -> None:
        """The oldest post is done."""
        head, taken = self._posted[0], self._out.count[0]
        if not why and not self._taken <= taken <= self._sent:
            why = f"the peer has taken {taken} parts of {self._sent}"
        self.why = self.why or why
        if not self.why:
            self._taken = taken
            if head is not None:
                self._ready.append(head)
        self._posted.popleft()

    def _look(self) -> None:
        """Take note of what is done, and send the headers of parts that are there."""
        if not self.why:
            self._pair.completed()
        if self.why:
            raise PairLost(self.why)
        while self._ready:
            self._tell(self._ready[0])
            self._ready.popleft()

    def _settle(self, within_s: float) -> None:
        until_s, left = time.monotonic() + within_s, len(self._posted)
        self._look()
        while self._posted:
            if len(self._posted) < left:
                until_s, left = time.monotonic() + within_s, len(self._posted)
            self._wait(until_s)
            self._look()

    def _await_room(self) -> None:
        until_s, taken, pause_s = time.monotonic() + ANSWER_S, self._taken, PAUSES_S[0]
        while self._sent - self._taken >= SLOTS:
            if not self._posted:
                self._post(None)
            self._wait(until_s)
            self._look()
            if self._taken > taken:
                until_s, taken, pause_s = time.monotonic() + ANSWER_S, self._taken, PAUSES_S[0]
            elif not self._posted:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSES_S[1])

    def _wait(self, until_s: float) -> None:
        """Wait until something may be done, or the connection ends. PairLost when it is too late."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            self.why = self.why or "the peer does not answer"
            raise PairLost(self.why)
        for descriptor, _ in self._poll.poll(left_s * 1000):
            if descriptor == self._connection:
                raise ConnectionResetError("closed the connection")

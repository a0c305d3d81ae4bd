"""A rank's connection to a table that it owns itself: frames are handed over by reference, in memory.

What the rank pushes is added where it lies, and it stays as it is until its result is here, as on every way; results
are copied once, to where the rank keeps them.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from covey.tensors.direct.owned_table import OwnedTable, OwnersLink
from covey.tensors.numbers.tensor_wire import Frame, Header, Payload, TensorOp, TensorWireError, parse
from covey.tensors.owner.rank_frames import RankFrames
from covey.tensors.owner.results import RankResults
from covey.tensors.owner.speakers import Violation
from covey.tensors.owner.sums import TensorSum
from covey.tensors.rdma.tensor_pair import TensorPair


class OwnerHere(Protocol):
    """The part of `covey.tensors.direct.owner.DirectOwner` that a link uses."""

    lock: threading.RLock

    def hear(self, table: OwnedTable, link: OwnersLink, header: Header, payload: Payload) -> None: ...
    def left(self, table: OwnedTable, link: OwnersLink) -> None: ...


class OwnersEnd:
    """The end of the connection that the owner has."""

    near = True

    def __init__(self, rank: int, table: OwnedTable) -> None:
        self.rank, self.frames = rank, RankFrames(rank, table.tensors.get)
        self.results = RankResults(rank, table.hash, table.epoch, near=True)
        self.said: queue.SimpleQueue[Frame | tuple[int, TensorSum] | None] = queue.SimpleQueue()
        """What the rank is to read; None: nothing any more."""

    def say(self, said: Frame) -> None:
        self.said.put(said)

    def give(self, key: int, tensor: TensorSum) -> None:
        if self.results.owe(key):
            self.said.put((key, tensor))

    def pump(self) -> None:
        """The rank's end takes it from the queue."""

    def close(self) -> None:
        self.said.put(None)


class LocalLink:
    """The end that the rank has: a `covey.tensors.aggregator.link.RankSideLink`."""

    near, places = True, False
    pair: TensorPair | None = None

    def __init__(self, rank: int, table: OwnedTable, owner: OwnerHere) -> None:
        self.lock = threading.RLock()
        """Serialises what is sent."""
        self.end = OwnersEnd(rank, table)
        self._table, self._owner = table, owner
        self._unread: list[Payload] = []
        """What is left of the frame that is being read, the payload first."""
        self._parts: list[Frame] = []
        """Frames of the result that is being read, the last one first."""
        self._lent: Callable[[], None] | None = None
        self._over = False

    def say(self, frames: Iterable[Frame], at_once: bool) -> None:
        """Hand frames over to the owner; that takes no longer than the additions for which this was the last
        contribution."""
        self.send(frames)

    def send(self, frames: Iterable[Frame], careful: bool = True) -> None:
        """Hand frames over. ConnectionError, unless `careful`, when the table is not owned here any more."""
        try:
            with self.lock:
                self.send_locked(frames)
        except OSError:
            if not careful:
                raise

    def send_locked(self, frames: Iterable[Frame]) -> None:
        for head, payload in frames:
            header = parse(head)
            try:
                with self._owner.lock:
                    if self._over or self._table.over:
                        raise ConnectionAbortedError("no longer served here")
                    self.end.frames.expect(header)
                pushed = memoryview(payload).toreadonly() if header.op is TensorOp.PUSH else payload
                self._owner.hear(self._table, self.end, header, pushed)
            except Violation as error:
                self.shut()
                raise TensorWireError(str(error)) from error

    def await_byte(self, ping: Callable[[], Frame]) -> None:
        """Wait until a frame is there. ConnectionError when there will be none."""
        while not self._unread:
            if self._parts:
                head, payload = self._parts.pop()
                self._unread = [payload, head]
                return
            self._give_back()
            item = self.end.said.get()
            if item is None:
                raise ConnectionResetError("closed the connection")
            if isinstance(item[1], TensorSum):
                self._begin_result(item[0], item[1])
            else:
                self._unread = [item[1], item[0]]

    def read_into(self, view: memoryview) -> None:
        """Copy the header of the frame that is there, then its payload, to `view`, which has its size."""
        data = self._unread.pop()
        view[:] = data

    def descriptor(self) -> int:
        """Never there: what this rank pushes is added where it lies."""
        raise ConnectionAbortedError("announced memory and handed over none")

    def read_payload(self, header: Header, view: memoryview) -> None:
        self.read_into(view)

    def shut(self) -> None:
        """End the connection."""
        self._over = True
        self.end.close()

    def close(self) -> None:
        """End it once the rank reads no more."""
        self.shut()
        self._give_back()
        self._owner.left(self._table, self.end)

    def _begin_result(self, key: int, tensor: TensorSum) -> None:
        with self._owner.lock:
            giving = self.end.results.begin(key, tensor)
        if giving is None:
            return

        def back() -> None:
            with self._owner.lock:
                self.end.results.over(giving)

        self._lent = back
        self._parts.extend(self.end.results.frame(giving, part) for part in reversed(giving.parts))

    def _give_back(self) -> None:
        if self._lent is not None:
            self._lent()
            self._lent = None

"""One rank's view of the memory that a job's ranks on one host share (`covey.tensors.same_host.layout`): which rank
joins which tensor, and the bells."""

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

from covey.core.units import format_size
from covey.kernel import futex
from covey.kernel.host_memory import available_bytes
from covey.kernel.mapping import map_shared
from covey.tensors.numbers.tensor_wire import (
    FAULT_BYTES_MAX,
    OPEN_BYTES_MAX,
    Declared,
    TensorWireError,
    key_of,
    pack_declared,
    unpack_declared,
)
from covey.tensors.same_host import layout as tensor_layout
from covey.tensors.same_host.layout import (
    BELLS_AT,
    COUNT_AT,
    ENTRY,
    FORMING,
    FREE_AT,
    LEFT,
    LEFT_AT,
    LEFT_BEFORE,
    PAGE_BYTES,
    REFUSED,
    REFUSED_AT,
    TENSORS_MAX,
)

LOOK_NS = 200_000_000
"""Longest sleep in ns of a waiting rank, before it looks whether it is still wanted."""
FREE_SHARE = 0.5
"""Largest share of the host's available memory that one tensor takes."""
_IN_VAIN_AT, _DECLARED_AT, _FAULT_AT = 8, 16, 16 + OPEN_BYTES_MAX
_HEAD_BYTES = 2 * PAGE_BYTES
"""Head of a tensor: lengths of its declaration and its fault, whether a rank that left is the cause, and both texts."""


F_OFD_SETLKW = 38
"""Command from fcntl.h; Python 3.11 has no name for it. Such a lock belongs to an open file, so nothing else that this
process closes drops it, and it keeps out other clients of the process too."""
_LOCK = struct.Struct("=hhqqi4x")


class MemoryRefused(Exception):
    """A tensor cannot go through shared memory; the text says why."""


class MemoryFault(Exception):
    """Ranks mean different tensors by one name; the text says which."""


class TensorMemory:
    """One rank's view of the memory of `covey.tensors.same_host.layout`."""

    def __init__(self, descriptor: int, rank: int, world_size: int, lends: bool = True) -> None:
        """Takes over the descriptor. `lends`: other ranks may read this rank's memory
        (`covey.tensors.same_host.lent_rounds`). ValueError, OSError when the memory cannot be used."""
        self.lends, self.told_copies = lends, False
        self.members = tensor_layout.check(descriptor, rank, world_size)
        """Ranks that share the memory: from the first up to, and without, the second."""
        self.rank, self.world_size, self._descriptor = rank, world_size, descriptor
        ranks = self.ranks = self.members[1] - self.members[0]
        self.at = rank - self.members[0]
        """Number of this rank among them, from 0."""
        self._head = map_shared(descriptor, tensor_layout.tensors_at(ranks), 0)
        self._locks = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        self._alone = threading.Lock()
        self._places: dict[int, int] = {}
        """Place of each key in the directory, as far as it was read: a tensor keeps its place and its key."""
        self._seen = 0
        """Number of places read so far."""
        row = tensor_layout.row_bytes(ranks)
        self._bells = [futex.SharedWords(self._head, BELLS_AT + to * row, ranks) for to in range(ranks)]
        self._ringing = threading.Lock()

    def close(self) -> None:
        """Take no further tensors; again is harmless. What is mapped stays so as long as something refers to it."""
        with self._alone:
            for descriptor in (self._descriptor, self._locks):
                if descriptor >= 0:
                    os.close(descriptor)
            self._descriptor = self._locks = -1

    # ---- bells ----

    @property
    def whole_job(self) -> bool:
        """Whether all ranks of the job share the memory."""
        return self.ranks == self.world_size

    def leave(self, step: int | None) -> None:
        """Tell the other ranks that this rank pushes no tensor any more but the last one, after this step."""
        LEFT.pack_into(self._head, LEFT_AT + self.at * LEFT.size, 1 if step is None else step + LEFT_BEFORE)
        self.ring()

    def has_left(self, rank: int) -> tuple[bool, int | None]:
        """Whether a rank has left, and after which step, if it reported one."""
        (said,) = LEFT.unpack_from(self._head, LEFT_AT + (rank - self.members[0]) * LEFT.size)
        return said > 0, said - LEFT_BEFORE if said >= LEFT_BEFORE else None

    def bells(self) -> Any:
        """The words of this rank's bells, now."""
        return self._bells[self.at].values

    def ring(self) -> None:
        """Ring the bells of all ranks, also this one's: another of its threads may sleep."""
        with self._ringing:
            for bells in self._bells:
                bells.ring(self.at)

    def ring_here(self) -> None:
        """Ring only this rank's bell, from one of its threads."""
        with self._ringing:
            self._bells[self.at].ring(self.at)

    def sleep(self, bells: Any, length_ns: int = LOOK_NS) -> None:
        """Sleep until one of the bells has rung since `bells` was read, at most `length_ns`."""
        self._bells[self.at].sleep(bells, length_ns)

    # ---- tensors ----

    def join(self, declared: Declared, size: int) -> "TensorRange":
        """The memory of this tensor, of `size` bytes. MemoryRefused when the tensor uses an aggregator, MemoryFault."""
        key, packed = key_of(declared.name), pack_declared(declared)
        with self._locked():
            if self.is_refused:
                raise MemoryRefused("a rank of this job cannot use memory that is shared")
            entry = self._find(key)
            place, state, at = entry if entry is not None else self._add(key, size, packed)
            if state != FORMING:
                raise MemoryRefused("a rank of this job had no memory for it")
            try:
                head = self._map(at, _HEAD_BYTES)
                theirs = bytes(head[_DECLARED_AT : _DECLARED_AT + min(OPEN_BYTES_MAX, _number(head, 0))])
                mapped = self._map(at, size) if theirs == packed else head
            except (OSError, ValueError) as error:
                self._refuse(place, key, at)
                raise MemoryRefused(f"its memory cannot be mapped: {error}") from error
        found = TensorRange(self, place, mapped)
        if theirs != packed:
            name, why = _unlike(declared, theirs, self.rank)
            if name == declared.name:
                found.say_fault(why)
            raise MemoryFault(why)
        return found

    def is_given_up(self, place: int) -> bool:
        """Whether all ranks use an aggregator for this tensor."""
        return self._entry(place)[1] != FORMING

    def unless_given_up(self, place: int, join: Callable[[], None]) -> None:
        """Call `join`, which tells the others that this rank takes part. MemoryRefused, and `join` is not called, when
        a rank cannot share: then no rank takes part, whether it came before or comes later."""
        with self._locked():
            if self.is_refused:
                self._give_up(place)
            if self.is_given_up(place):
                raise MemoryRefused("another rank cannot share memory for it")
            join()

    def give_up_if(self, place: int, is_missing: Callable[[], object]) -> None:
        """Give up the tensor because a rank of the job cannot share memory, unless all ranks have joined it."""
        with self._locked():
            if is_missing():
                self._give_up(place)

    @property
    def is_refused(self) -> bool:
        """Whether a rank of the job cannot share memory, so that no further tensor is shared."""
        return bool(_number(self._head, REFUSED_AT))

    def refuse(self) -> None:
        """Share no further tensor, and none that has not had a round yet."""
        with self._alone:
            if self._descriptor >= 0:
                tensor_layout.refuse(self._descriptor)
        self.ring()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._alone:
            if self._locks < 0:
                raise MemoryRefused("the client is closed")
            fcntl.fcntl(self._locks, F_OFD_SETLKW, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            try:
                yield
            finally:
                fcntl.fcntl(self._locks, F_OFD_SETLKW, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))

    def _entry(self, place: int) -> tuple[int, int, int]:
        """Key and state of a tensor, and its offset in the memory."""
        found: tuple[int, int, int] = ENTRY.unpack_from(self._head, self._entry_at(place))
        return found

    def _entry_at(self, place: int) -> int:
        return tensor_layout.directory_at(self.ranks) + place * ENTRY.size

    def _find(self, key: int) -> tuple[int, int, int] | None:
        """Place and state of the tensor with this key, and its offset; None: there is none."""
        for place in range(self._seen, min(_number(self._head, COUNT_AT), TENSORS_MAX)):
            self._places.setdefault(self._entry(place)[0], place)
            self._seen = place + 1
        if key not in self._places:
            return None
        place = self._places[key]
        _, state, at = self._entry(place)
        return place, state, at

    def _add(self, key: int, size: int, packed: bytes) -> tuple[int, int, int]:
        place, free = _number(self._head, COUNT_AT), int.from_bytes(self._head[FREE_AT : FREE_AT + 8], "little")
        if place >= TENSORS_MAX:
            raise MemoryRefused(f"there are {TENSORS_MAX} tensors already")
        try:
            self._allocate(free, size)
        except (OSError, MemoryRefused) as error:
            self._refuse(place, key, 0)
            self._count(place + 1)
            raise MemoryRefused(f"no memory for it: {error}") from error
        head = len(packed).to_bytes(4, "little") + bytes(_DECLARED_AT - 4) + packed
        os.pwrite(self._descriptor, head, free)
        ENTRY.pack_into(self._head, self._entry_at(place), key, FORMING, free)
        self._head[FREE_AT : FREE_AT + 8] = (free + size).to_bytes(8, "little")
        self._count(place + 1)
        return place, FORMING, free

    def _allocate(self, at: int, size: int) -> None:
        """Allocate memory before it is touched."""
        if at % PAGE_BYTES or at < tensor_layout.tensors_at(self.ranks):
            raise MemoryRefused(f"free memory should begin at {at}, which was overwritten")
        available = available_bytes()
        if at + size > tensor_layout.SIZE_BYTES or size > FREE_SHARE * available:
            raise MemoryRefused(f"it takes {format_size(size)}, and the host has {format_size(available)} left")
        os.posix_fallocate(self._descriptor, at, size)

    def _refuse(self, place: int, key: int, at: int) -> None:
        ENTRY.pack_into(self._head, self._entry_at(place), key, REFUSED, at)
        self.ring()

    def _give_up(self, place: int) -> None:
        key, _, at = self._entry(place)
        self._refuse(place, key, at)

    def _count(self, count: int) -> None:
        self._head[COUNT_AT : COUNT_AT + 4] = count.to_bytes(4, "little")

    def _map(self, at: int, size: int) -> memoryview:
        if at % PAGE_BYTES or at + size > tensor_layout.SIZE_BYTES:
            raise ValueError(f"it lies at {at}")
        return map_shared(self._descriptor, size, at)


class TensorRange:
    """The mapped memory of one tensor."""

    HEAD_BYTES = _HEAD_BYTES
    """Bytes of the head; the rest is the tensor's data."""

    def __init__(self, memory: TensorMemory, place: int, mapped: memoryview) -> None:
        self.memory, self.mapped, self._place = memory, mapped, place

    def first(self, join: Callable[[], None]) -> None:
        """Call `join` for the first push of this tensor. MemoryRefused when all ranks use an aggregator for it."""
        self.memory.unless_given_up(self._place, join)

    def is_given_up(self, is_missing: Callable[[], object]) -> bool:
        """Whether all ranks use an aggregator for this tensor; asked while ranks are missing in its first round."""
        if self.memory.is_refused and not self.memory.is_given_up(self._place):
            self.memory.give_up_if(self._place, is_missing)
        return self.memory.is_given_up(self._place)

    @property
    def fault(self) -> str:
        """Why the tensor is not added, for people; empty when it is."""
        length = _number(self.mapped, 4)
        return bytes(self.mapped[_FAULT_AT : _FAULT_AT + min(length, FAULT_BYTES_MAX)]).decode("utf-8", "replace")

    @property
    def in_vain(self) -> bool:
        """Whether the fault is that a rank has left."""
        return bool(_number(self.mapped, _IN_VAIN_AT))

    def say_fault(self, why: str, in_vain: bool = False) -> None:
        """Tell every rank why the tensor is not added."""
        text = why.encode()[:FAULT_BYTES_MAX]
        self.mapped[_IN_VAIN_AT : _IN_VAIN_AT + 4] = int(in_vain).to_bytes(4, "little")
        self.mapped[_FAULT_AT : _FAULT_AT + len(text)] = text
        self.mapped[4:8] = len(text).to_bytes(4, "little")
        self.memory.ring()


def _number(page: memoryview, at: int) -> int:
    return int.from_bytes(page[at : at + 4], "little")


def _unlike(mine: Declared, packed: bytes, rank: int) -> tuple[str, str]:
    """The name of the tensor that is stored, and a sentence on how it differs from the one declared here."""
    try:
        theirs = unpack_declared(packed)
    except TensorWireError as error:
        return mine.name, f"its memory was overwritten: {error}"
    if theirs.name != mine.name:
        return theirs.name, f"give it another name: {theirs.name!r} has the same key of 32 bits"
    return mine.name, f"rank {rank} declares {mine.words}, another rank {theirs.words}"

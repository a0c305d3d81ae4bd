"""Rounds of tensors among ranks that are all on one host, in memory that they share, without a server.

Each rank copies its contribution into its own slot, adds its part of all slots in the order of
`covey.tensors.numbers.sum_order`, and copies the whole sum out once every rank has added its part. Where ranks may read
one another's memory, large contributions are not copied in: ranks that add read them in the scripts' memory
(`covey.tensors.same_host.lent_rounds`). A rank shows what it has done in two words that only it writes, and rings all
bells:

    rank 0   copy in, pushed = 7 |            | add part 0, added = 7 |             | copy out
    rank 1   copy in, pushed = 7 | all pushed | add part 1, added = 7 | all added   | copy out

No rank waits for room: a rank pushes round 8 after it took the result of round 7, and parts of round 8 are added when
all have pushed it, so nothing is overwritten that is still read. A small tensor is added whole by every rank, which
saves the second wait; it has two slots for each rank, used in turn, since one rank may push round 8 while another adds
round 7.

A rank that cannot take part (no memory, another version) says so before the tensor's first round is over; then all push
it to an aggregator instead. A rank that dies leaves the others waiting, as with an aggregator: its job is started anew.

Processors on which another core may see a later store first (ARM) are not supported: nothing here prevents that.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from covey.tensors.numbers.additions import Contribution, add, tree_of
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.peer_memory import Unreadable
from covey.tensors.numbers.pieces import not_finite, pieces
from covey.tensors.numbers.tensor_wire import Declared
from covey.tensors.numbers.types import NUMBERS
from covey.tensors.numbers.update_steps import take_step
from covey.tensors.same_host import lent_rounds
from covey.tensors.same_host.layout import whole_pages
from covey.tensors.same_host.lent_rounds import LentRounds, Overwritten
from covey.tensors.same_host.memory import MemoryFault, MemoryRefused, TensorMemory, TensorRange

Words = npt.NDArray[np.uint32]

SMALL_BYTES = 64 << 10
"""Largest tensor in bytes that every rank adds whole."""
_LINE = 64
"""Bytes of a rank's words: a cache line of its own."""


class _Places:
    """Offsets in the memory of one tensor."""

    def __init__(self, declared: Declared, ranks: int, whole_job: bool) -> None:
        self.small = whole_job and declared.kind == "grad" and declared.size_bytes <= SMALL_BYTES
        stride = whole_pages(max(1, declared.size_bytes))
        first = whole_pages(TensorRange.HEAD_BYTES + ranks * _LINE)
        turns = 2 if self.small else 1
        self.slots = [[first + (turn * ranks + rank) * stride for turn in range(turns)] for rank in range(ranks)]
        results = 0 if self.small else 2 if declared.kind == "model" or not whole_job else 1
        moment = whole_pages(max(1, declared.moment_bytes))
        first, each = first + turns * ranks * stride, stride + moment * declared.moments
        self.results = [
            [start, *(start + stride + at * moment for at in range(declared.moments))]
            for start in range(first, first + results * each, each)
        ]
        self.end = first + results * each


class SharedTensor:
    """One tensor of one rank: `begin` a round, `advance` until its result is there, `take` it. Several threads may
    advance it."""

    def __init__(self, declared: Declared, range_: TensorRange) -> None:
        self.declared, self._range = declared, range_
        memory = range_.memory
        rank, ranks = memory.at, memory.ranks
        self._rank, self._ranks, self._first = rank, ranks, memory.members[0]
        places = _Places(declared, ranks, memory.whole_job)
        count = declared.size_bytes // declared.element_bytes
        self._numbers = NUMBERS[declared.type]
        self._small = places.small
        self._slots = [[self._floats(start, count) for start in turns] for turns in places.slots]
        self._results = [self._floats(each[0], count) for each in places.results]
        """Memory of results. A model has two, used in turn: an interrupted addition can begin again."""
        self._moments = [[self._floats(start, count, True) for start in each[1:]] for each in places.results]
        """For each result, the moments that an optimizer keeps (`covey.tensors.numbers.updates`)."""
        self._words: Words = np.ndarray((ranks, _LINE // 4), np.uint32, range_.mapped, TensorRange.HEAD_BYTES)
        self._rates = np.ndarray((ranks, _LINE // 8), np.float64, range_.mapped, TensorRange.HEAD_BYTES)[:, 1]
        """Learning rate in the round that each rank has pushed."""
        self._part = (rank * count // ranks, (rank + 1) * count // ranks)
        self._tree = tree_of(memory.members, declared.order, self._first)
        lends = memory.lends and ranks > 1 and declared.size_bytes >= lent_rounds.LEAST_BYTES
        self._lent = LentRounds(self._words, rank, self._first, self._numbers.stored) if lends else None
        self._lock = threading.Lock()
        self.round = 0
        """Round that this rank has pushed; the first round of a model is about its initial value."""
        self._added = self._whole = self.taken = 0
        self.not_finite = 0
        """How many NaN or infinite numbers were in the sums that this rank has added."""
        self._told_not_finite = False
        self.given_up = False
        """Whether the tensor uses an aggregator instead."""
        self.failure: Exception | None = None
        """Why it could not be moved to an aggregator."""
        if self._words[rank, 0]:
            raise MemoryFault("another client of this rank uses this name, and a name belongs to one client")

    @property
    def whole_job(self) -> bool:
        """Whether the tensor needs no aggregator."""
        return self._range.memory.whole_job

    @property
    def fault(self) -> str:
        """Why the tensor is not added, for people; empty when it is."""
        return self._range.fault

    @property
    def in_vain(self) -> bool:
        """Whether the fault is that a rank has left."""
        return self._range.in_vain

    @property
    def refused(self) -> bool:
        """Whether a rank cannot take part, so that the round must use an aggregator."""
        waits = self.round == 1 and self._whole == 0 and bool(self.missing())
        return self.given_up or (waits and self._range.is_given_up(self.missing))

    def begin(self, data: Array, rate: float = 0.0, moments: Sequence[Array] = ()) -> None:
        """Begin the next round. `data` is copied or lent, and in a model's first round `moments`, from which its
        optimizer continues, are copied. `rate`: learning rate. ValueError when the result of the last round was not
        taken, MemoryRefused when all ranks use an aggregator for this tensor."""
        with self._lock:
            if self.taken != self.round:
                raise ValueError(f"tensor {self.declared.name!r} is still in round {self.round}")
            round = self.round + 1
            if not self._is_initial(round) or self._first + self._rank == 0:
                if self._lent is None or not self._lent.lend(data.reshape(-1), round):
                    np.copyto(self._slots[self._rank][self._turn(round)], data.reshape(-1))
                if moments:
                    for into, moment in zip(self._first_moments, moments, strict=True):
                        np.copyto(into, moment.reshape(-1))
            self._rates[self._rank] = rate
            if round == 1:
                if self._lent is not None:
                    self._lent.introduce()
                self._range.first(self._say_first)
            else:
                self._words[self._rank, 0] = round
            self.round = round
        self._range.memory.ring()

    def _say_first(self) -> None:
        self._words[self._rank, 0] = 1

    def advance(self) -> bool:
        """Do what can be done now. Whether the result is there. ValueError for impossible words of a rank."""
        with self._lock:
            if self._whole == self.round:
                return True
            if self._lent is not None and self._lent.copy_if_asked(self._slots[self._rank][0]):
                self._range.memory.ring()
            if not self._all(0):
                return False
            if not self._small:
                if not self._own_part():
                    return False
                if not self._all(1):
                    return False
            self._whole = self.round
            if self._lent is not None:
                self._lent.over()
            return True

    def advance_unless_busy(self) -> bool:
        """`advance`, unless another thread is in it."""
        if self._lock.locked():
            return False
        return self.advance()

    def take(self, out: Array | None) -> Array:
        """The result, once it is there, in `out` or a new array."""
        found = np.empty(self.declared.shape, self._numbers.stored) if out is None else out
        flat = found.reshape(-1)
        if self._small:
            self._add([turns[self._turn(self.round)] for turns in self._slots], flat, 0, len(flat))
        else:
            np.copyto(flat, self._results[self.round % len(self._results)])
        self.taken = self.round
        return found

    @property
    def rests(self) -> bool:
        """Whether no round is under way, and the result of the last one was taken."""
        return self.taken == self.round

    @property
    def rounds(self) -> int:
        """Number of rounds whose result was taken, without the round of a model's initial value."""
        return max(0, self.taken - (self.declared.kind == "model"))

    @property
    def steps(self) -> int:
        """Number of steps that this tensor's optimizer has made."""
        return self.declared.steps + self.rounds

    def kept(self) -> Iterator[tuple[int, list[Array]]]:
        """The moments of the last result that was taken, as far as this rank keeps them: first element, and one array
        for each moment. They must not be written, and are valid only until the next round."""
        yield 0, self._moments[self.taken % len(self._results)]

    def own_state(self) -> Iterator[tuple[int, list[Array]]]:
        """The parts of the last result, and of its moments, that this rank saves for all: first element, and arrays.
        They must not be written, and are valid until this rank pushes for the round after the next."""
        if self._first + self._rank == 0:
            at = self.taken % len(self._results)
            yield 0, [self._results[at], *self._moments[at]]

    def missing(self) -> list[int]:
        """Ranks that have not pushed this round."""
        return [self._first + at for at in range(self._ranks) if int(self._words[at, 0]) < self.round]

    def late(self) -> list[int]:
        """Ranks that have not added their part of this round, if those are awaited."""
        if self._small:
            return []
        return [self._first + at for at in range(self._ranks) if int(self._words[at, 1]) < self.round]

    def remarks(self) -> Iterator[str]:
        """Remarks for people, each given once, after a result was taken."""
        memory = self._range.memory
        if self.not_finite and not self._told_not_finite:
            self._told_not_finite = True
            yield f"found NaN or infinity in the sum of tensor {self.declared.name!r} in round {self.rounds}"
        if self._lent is not None and self._lent.why and not memory.told_copies:
            memory.told_copies = True
            yield f"copies large tensors instead of sharing them: {self._lent.why}"

    def why(self) -> str:
        """Why no result is there, for people."""
        if missing := self.missing():
            return f"rank {', '.join(map(str, missing))} has not pushed this round yet"
        late = self.late()
        why = f"; {self._lent.why}" if self._lent is not None and self._lent.why else ""
        return f"rank {', '.join(map(str, late))} has not added its part of this round yet{why}"

    def check(self) -> None:
        assert self.taken <= self._whole <= self.round <= self.taken + 1
        assert self._small or self._whole <= self._added

    # ---- inside ----

    @property
    def _first_moments(self) -> Sequence[Array]:
        """Memory of the moments of a model's initial value."""
        return self._moments[1]

    def _rate(self) -> float:
        """Learning rate of this round, which all have pushed. ValueError when ranks gave different rates."""
        rates: list[float] = self._rates.tolist()
        for rank, rate in enumerate(rates):
            if rate != rates[0]:
                of = f"has learning rate {rate} in round {self.round - 1}, and rank {self._first} has {rates[0]}"
                raise ValueError(f"rank {self._first + rank} {of}")
        return rates[0]

    def _is_initial(self, round: int) -> bool:
        return self.declared.kind == "model" and round == 1

    def _turn(self, round: int) -> int:
        return round % 2 if self._small else 0

    def _floats(self, start: int, count: int, wide: bool = False) -> Array:
        """An array at this offset. `wide`: with the type in which numbers are added."""
        type = self._numbers.wide if wide else self._numbers.stored
        return np.ndarray((count,), type, self._range.mapped, start)

    def _all(self, what: int) -> bool:
        """Whether every rank has pushed (0) or added (1) this round."""
        words = self._words[:, what]
        ahead = 1 if what == 0 else 0
        if bool((words == self.round).all()):
            return True
        for rank, word in enumerate(words.tolist(), self._first):
            if not self.round - 1 <= word <= self.round + ahead:
                raise ValueError(f"the memory it shares says rank {rank} is in round {word}, and this is {self.round}")
        return bool((words >= self.round).all())

    def _own_part(self) -> bool:
        """Add this rank's part of the round. Whether that is done."""
        if self._added < self.round:
            if not self._add_lent(self._add_part):
                return False
            self._say_added()
        return True

    def _add_lent(self, part: Callable[[Sequence[Contribution]], None]) -> bool:
        """Call `part` with all contributions; False when one cannot be read, which its rank was told."""
        slots: Sequence[Contribution] = [turns[0] for turns in self._slots]
        lent, not_finite = self._lent, self.not_finite
        if lent is None:
            part(slots)
            return True
        lent.look()
        try:
            found = lent.contributions(slots, self.round)
            if found is None:
                return False
            part(found)
        except Overwritten as error:
            self._range.say_fault(str(error))  # other ranks wait for this rank's part
            raise
        except Unreadable as error:
            self.not_finite = not_finite
            lent.could_not(self.round, error)
            self._range.memory.ring()
            return False
        return True

    def _say_added(self) -> None:
        self._added = self.round
        self._words[self._rank, 1] = self.round
        self._range.memory.ring()

    def _add_part(self, slots: Sequence[Contribution]) -> None:
        start, end = self._part
        result = self._results[self.round % len(self._results)]
        if self._is_initial(self.round):
            result[start:end] = slots[0][start:end]
        else:
            self._add(slots, result, start, end)

    def _add(self, slots: Sequence[Contribution], into: Array, start: int, end: int) -> None:
        rate = 0.0 if self.declared.update is None else self._rate()
        with np.errstate(all="ignore"):  # whatever a script asks of numpy; what is not finite is counted
            for here in pieces(start, end):
                self._add_piece(slots, into, here, rate)

    def _add_piece(self, slots: Sequence[Contribution], into: Array, here: slice, rate: float) -> None:
        numbers, update = self._numbers, self.declared.update
        found = np.empty(here.stop - here.start, numbers.wide) if numbers.rounds else into[here]
        add(self._tree, slots, numbers, here, found)
        if self.declared.mean:
            np.divide(found, numbers.wide.type(self._ranks), out=found)
        self.not_finite += not_finite(found)
        if update is not None:
            before, now = (self.round - 1) % 2, self.round % 2
            old = [numbers.widen(self._results[before][here]), *(each[here] for each in self._moments[before])]
            new = [found, *(each[here] for each in self._moments[now])]
            take_step(update, self.declared.steps + self.round - 1, rate, old, new)
        elif self.declared.kind == "model":
            np.add(numbers.widen(self._results[(self.round - 1) % 2][here]), found, out=found)
        if numbers.rounds:
            into[here] = numbers.narrow(found)


class SharedRounds:
    """All shared tensors of one rank. They advance while the script computes: a thread that waits for one tensor
    advances all of them, and when none waits a thread of this object does."""

    def __init__(
        self,
        memory: TensorMemory,
        refused: Callable[[SharedTensor], None],
        make: Callable[[Declared, TensorRange], SharedTensor] = SharedTensor,
    ) -> None:
        """`make` makes a tensor from its memory. `refused` is called once with a tensor that uses an aggregator
        instead, by the thread that notices it."""
        self.memory, self._refused, self._make = memory, refused, make
        self._open: dict[str, SharedTensor] = {}
        self._changed = threading.Condition()
        self._giving_up = threading.Lock()
        self._waiting = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def tensor(self, declared: Declared) -> SharedTensor:
        """The tensor, mapped by this rank. MemoryRefused: it uses an aggregator; MemoryFault: ranks mean different
        ones."""
        memory = self.memory
        found = memory.join(declared, _Places(declared, memory.ranks, memory.whole_job).end)
        return self._make(declared, found)

    def begin(
        self, tensor: SharedTensor, data: Array, blocks: bool, rate: float = 0.0, moments: Sequence[Array] = ()
    ) -> None:
        """Begin the tensor's next round. `blocks`: this thread waits for it at once. The other arguments and errors are
        those of `SharedTensor.begin`."""
        tensor.begin(data, rate, moments)
        self.begun(tensor, blocks)

    def begun(self, tensor: SharedTensor, blocks: bool) -> None:
        """The tensor has begun its next round, which advances from now on."""
        with self._changed:
            self._open[tensor.declared.name] = tensor
            if not blocks:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="covey-add", daemon=True)
                    self._thread.start()
                self._changed.notify_all()

    def wait(self, tensor: SharedTensor, look: Callable[[], None]) -> bool:
        """Wait until the tensor's result is there, or its fault. False when a rank refused it, and it uses an
        aggregator. `look` is called a few times a second and may raise. ValueError as of `advance`."""
        with self._changed:
            self._waiting += 1
        try:
            while True:
                bells = self.memory.bells()
                if tensor.fault or tensor.advance():
                    self._ended(tensor)
                    return True
                look()
                if tensor.refused:
                    self._give_up(tensor)
                    if tensor.failure is not None:
                        raise tensor.failure
                    return False
                self._advance(but=tensor)
                self.memory.sleep(bells)
        finally:
            with self._changed:
                self._waiting -= 1
                if self._open:
                    self._changed.notify_all()

    def close(self) -> None:
        """Close the memory; waiting threads check at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.memory.ring()
        self.memory.close()

    def _advance(self, but: SharedTensor | None = None) -> None:
        with self._changed:
            others = [tensor for tensor in self._open.values() if tensor is not but]
        for tensor in others:
            with contextlib.suppress(ValueError):  # the thread that waits for it gets the error
                tensor.advance_unless_busy()
            if tensor.refused:
                self._give_up(tensor)

    def _ended(self, tensor: SharedTensor) -> None:
        with self._changed:
            self._open.pop(tensor.declared.name, None)

    def _give_up(self, tensor: SharedTensor) -> None:
        """Move the tensor to an aggregator, once; a thread that waits for it gets the error."""
        self._ended(tensor)
        with self._giving_up:
            if tensor.given_up:
                return
            try:
                self._refused(tensor)
            except (RuntimeError, OSError, ValueError) as error:
                tensor.failure = error
            tensor.given_up = True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (self._waiting or not self._open):
                    self._changed.wait()
                if self._closed:
                    return
            bells = self.memory.bells()
            with contextlib.suppress(MemoryRefused):  # closed meanwhile, which the next turn notices
                self._advance()
            self.memory.sleep(bells)

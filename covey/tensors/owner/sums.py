"""One tensor at its aggregator: contributions in, one sum per round out, in an order of additions that is fixed.

Floating point addition is not associative, so the order of additions is part of the result. It is that of
`covey.tensors.numbers.sum_order`, part by part, whatever arrives first (AutoPS leaves this open, and BytePS adds in
order of arrival). A contribution whose partner is not here yet waits. What ranks of one host have added among
themselves comes as one contribution (`covey.tensors.numbers.spoken`): a sum of the same tree, so that the bits are the
same.

An aggregator may begin without state: at the start of a job, and after a crash or a move. It then learns from every
rank which version that rank holds (none may be missing: the missing one might hold the newest), asks one of those
with the newest version for it, for each Block another one, so that no rank brings all, and continues there. Version 0
of a model is what each rank began with, which may differ; rank 0's is the one that counts, so only rank 0 is asked for
it, or a rank that was given it. A push for a round at or below that version is one whose answer got lost with the old
aggregator, and is answered with the state.

    no state --all ranks opened--> asking a holder --its parts arrived--> state of version v
    state of version v --all ranks' parts of round v+1 added--> state of version v+1, given to all ranks

A part is given as soon as it is added, while others are awaited: sums of a large tensor go back to the ranks while they
still push. A rank is given parts of a round only once it has pushed for that round on its present connection, because a
rank ignores results of a round that it has not begun; when the round is complete each is given what it does not have
(`covey.tensors.owner.results`). A rank holds a version only with all of its parts, so the rest of this page is about
complete rounds.

Where an optimizer updates the parameters (`covey.tensors.numbers.updates`), its moments are part of the state. One
rank, the keeper, is given them with the result, and first: only once it has all of them others get the result. So
whenever a rank holds version v, its moments are with the keeper, and an aggregator that begins without state asks for
it there.

    state of version v+1 --given to the keeper, which has it--> given to all other ranks

A rank that took over from one that was lost may be `hollow`: it continues from a version of whose result it has no
copy. It is asked for none; if it asks for a sum that would not be fetched otherwise, another rank is asked for that.
When all ranks that held it are lost, one after the other, it is lost (`is_lost`), and the round is added once more.

If the earlier aggregator lives it may bring a model's state (`block_copies`): one more that holds a version. If that is
the newest that any rank holds no rank is asked, and what is pushed meanwhile is kept; else it is forgotten.

`work` does one addition of at most one part, so that a caller who yields between calls never holds up its loop. It is
`begin`, the addition itself, and `end`: others may do the additions of several parts at once (`lanes`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from covey.tensors.numbers.spoken import Piece
from covey.tensors.numbers.sum_order import Addition, Node, addition
from covey.tensors.numbers.tensor_wire import Declared, Payload, key_of
from covey.tensors.numbers.types import NUMBERS
from covey.tensors.owner.coming_copy import ComingCopy
from covey.tensors.owner.learning_rates import LearningRates, UnlikeRates
from covey.tensors.owner.memory import Arena, Memory, touched
from covey.tensors.owner.part_additions import LastAddition, PartAddition
from covey.tensors.owner.ranks_away import RoundSaid
from covey.tensors.owner.speakers import Speakers, Violation
from covey.wire.splicing import LEAST_BYTES

Array = npt.NDArray[Any]
"""Array of the tensor's type, as it is stored in memory."""


GIVES = 8
"""Times, about, that ranks are given parts of a large tensor in one round: each time wakes all of them."""
TENSORS_MAX = 1 << 16
"""Most tensors of one table at its owner."""


def refusal(known: Declared | None, declared: Declared, tensors: int, memory: Memory) -> str:
    """Why a tensor of this declaration cannot be summed, for people; empty: it can, and `memory` counts it from now on
    if it is new. `known`: what another rank has declared under its key; `tensors`: how many there are."""
    if known is not None:
        same = known == declared
        return "" if same else f"this rank declares {declared.words}, another rank declared {known.words}"
    if tensors >= TENSORS_MAX:
        return f"a job may have {TENSORS_MAX} tensors at one owner"
    if not memory.take(held_bytes(declared)):
        return (
            f"{declared.state_bytes} bytes do not fit: the owner holds {memory.used} of {memory.bytes_max} bytes "
            "(memory_bytes_max in [aggregator] of its agent.toml)"
        )
    return ""


def held_bytes(declared: Declared) -> int:
    """Bytes that an owner holds for a tensor: a sum and a state."""
    return 2 * declared.state_bytes


class StateTransfer(NamedTuple):
    """Action that a tensor asks for: `ask` a rank for its state, or `give` a rank ours."""

    what: Literal["ask", "give"]
    rank: int


class LentResult(NamedTuple):
    """A result that is being sent: its numbers are not overwritten until `TensorSum.give_back`."""

    round: int
    array: Array
    heads: dict[int, bytes]
    """A place for headers of its parts, made once for all ranks."""
    parts: Sequence[int]
    """Parts of the state that may be sent now."""
    is_whole: bool
    """Whether these are all parts that the rank is given in this round."""


class TensorSum:
    """One tensor of one job under one epoch."""

    def __init__(
        self,
        declared: Declared,
        workers: int,
        added: Callable[[Payload], None] = lambda data: None,
        arena: Arena | None = None,
        spare: Callable[[int], Payload] = bytearray,
    ) -> None:
        """`added` gets back each buffer that `push` was given, once it was added, and those from `spare`. `arena`:
        gives memory, if it has some."""
        self.declared, self.workers, self._added, self._spare = declared, workers, added, spare
        self._arena = arena or Arena()
        self.version: int | None = None
        """Number of the last complete round; None while this aggregator does not know it yet."""
        self.has_state = False
        """Does `state` hold the result of `version`? A sum that no rank waits for any more is never fetched."""
        self.rounds = 0
        """Number of rounds completed here."""
        self.not_finite = 0
        """Count of numbers in its sums that were NaN or infinite."""
        self.duplicates = 0
        self._numbers = NUMBERS[declared.type]
        mixed = declared.moments > 0 and self._numbers.rounds
        self._dtype = np.dtype(np.uint8) if mixed else self._numbers.stored
        self._count = declared.state_bytes // self._dtype.itemsize
        """Numbers in the state, in which moments follow the parameters, and may have another type."""
        self._is_over = False
        """Nothing is given any more: its memory went."""
        self._is_kept = True
        """The keeper has the moments of `version`, if there are any."""
        self._rates = LearningRates()
        self._state = self._empty(0)
        self._sum = self._empty(0)
        self._lent: dict[int, int] = {}
        """id of an array that is being sent -> how often."""
        self._spoken = Speakers(declared, workers)
        self._held_versions: dict[int, int] = {}
        self._outdated: set[int] = set()
        """Ranks whose word is over: another process has pushed for them since, to an earlier owner. It may come here
        any time; until then nothing is known of them."""
        self._wants: set[int] = set()
        """Ranks that ask for the agreed state: what they hold of version 0 is only their own initial value."""
        self._hollow: set[int] = set()
        """Ranks that have no copy of the newest result, though they, or a process before theirs, said to hold it."""
        self._behind: set[int] = set()
        """Hollow ranks whose process is in the round of `version`: it pushes that again."""
        self._late: set[int] = set()
        """Hollow ranks that wait for the result of `version`, which is fetched for them."""
        self._here: set[int] = set()
        self._holder: int | None = None
        self._fetched: set[int] = set()
        self.copy: ComingCopy | None = None
        """Copy that the earlier aggregator brings, or may bring."""
        self._held: dict[int, tuple[int, dict[int, Payload]]] = {}
        """Pushes that came before the state: rank -> round, piece -> bytes."""
        self._got: list[set[int]] = [set() for _ in range(declared.parts)]
        """Ranks whose contribution to this round is here, per part."""
        self._partial: list[dict[Node, Payload]] = [{} for _ in range(declared.parts)]
        """Sums that wait for their partner, or for `work`, per part. Each is in a contribution's own buffer."""
        self._ready: deque[tuple[int, Addition | None]] = deque()
        """Parts, and additions of which both sides are here; None: there is one rank, and nothing to add."""
        self._adding: set[tuple[int, Node]] = set()
        """Parts, and sums of them that are being made."""
        self._done: list[int] = []
        """Parts of this round that are added, in the order in which they were."""
        self._pushing: dict[int, int] = {}
        """Rank -> the round of which it pushed a piece last on its present connection: it awaits that one's result."""
        self._heads: dict[int, bytes] = {}
        self._new_heads: dict[int, bytes] = {}
        """Headers of parts of the state, and of parts of the round under way."""
        self._begun = False

    # ---- what workers say ----

    def open(
        self, rank: int, version: int, want: bool, ranks: Node | None = None, hollow: bool = False
    ) -> Sequence[StateTransfer]:
        """A rank connected and holds `version`; it may `want` the agreed state before it continues. `ranks`: it speaks
        for all of these, of its host; None: for itself. `hollow`: it has no copy of that version's result."""
        self._spoken.say(rank, ranks or (rank, rank + 1))
        self._here.add(rank)
        is_behind = self.version is not None and version < self.version
        (self._behind.add if is_behind else self._behind.discard)(rank)
        (self._hollow.add if hollow or is_behind else self._hollow.discard)(rank)
        if rank == self._holder:
            self._holder = None  # a new connection: what was asked of the old one will not come
        if self.version is not None:
            if version > self.version:
                raise Violation(f"rank {rank} holds version {version} of a tensor that is at {self.version}")
            if want:
                return self._give([rank])
            if self._late:
                return self._fetch()
            return self._kept() if version == self.version and self._keeps(rank) else ()
        self._held_versions[rank] = version
        self._outdated.discard(rank)
        if rank in self._held and self._held[rank][0] != version + 1:
            del self._held[rank]  # by a process before this one, which got the state of a step that this one is not in
        (self._wants.add if want else self._wants.discard)(rank)
        return self._recover()

    def gone(self, rank: int) -> Sequence[StateTransfer]:
        """A rank's connection ended. What it said and pushed still counts."""
        self._here.discard(rank)
        self._pushing.pop(rank, None)  # a new connection begins with no part, and its process may be another one
        if rank != self._holder:
            return ()
        self._holder = None
        return self._recover() if self.version is None else self._fetch()

    def state_part(self, rank: int, version: int, part: int, data: Payload) -> Sequence[StateTransfer]:
        """A part of the state that we asked a rank for has come."""
        held = self._held_versions.get(rank) if self.version is None else self.version
        if rank != self._holder or version != held:
            self.duplicates += 1
            return ()
        self._check_size(part, data)
        self.memory_of(part)[:] = data
        self._fetched.add(part)
        if len(self._fetched) < self.declared.asked_parts(version):
            return ()
        if self.declared.asked_parts(version) < self.declared.state_parts:
            self._state.view(np.uint8)[self.declared.size_bytes :] = 0
        if self.version is None:
            return self._begin(version, has_state=True)
        late, self._late, self._holder, self.has_state = sorted(self._late), set(), None, True
        return self._give(late)

    def await_copy(self) -> None:
        """Wait for the state that the earlier aggregator may bring."""
        if self.declared.kind == "model" and self.version is None and self._holder is None:
            self.copy = ComingCopy(self.declared.state_parts)

    def memory_of(self, part: int) -> memoryview:
        """Memory for this part of the state. Only parts that are asked for, or waited for, may be written."""
        if not len(self._state):
            self._state = self._empty(self._count)
        start, end = self.declared.state_span(part)
        return memoryview(self._state.view(np.uint8).data)[start:end]

    def go_on(self) -> Sequence[StateTransfer]:
        """`copy` has changed: continue if the state is known now."""
        return self._recover() if self.version is None else ()

    @property
    def is_lost(self) -> bool:
        """Is the result of `version` nowhere any more? It was never here, since all ranks said to hold it, and each has
        a process since that is in its round. Then the sum has to begin anew, and all push that round again."""
        return self.version is not None and not self.has_state and self._behind.issuperset(self._spoken)

    @property
    def may_be_copied(self) -> bool:
        """Can the next aggregator continue from this state, if no rank holds a newer one?"""
        return self.declared.kind == "model" and self.has_state

    def learn(self, rank: int, round: int, rate: float) -> None:
        """A rank says the learning rate of a round before it pushes that. Violation when another one said otherwise."""
        if self.version is None and rank in self._outdated:
            return
        now = self._held_versions.get(rank) if self.version is None else self.version
        if self.declared.update is None or rank not in self._spoken or now is None or not now <= round <= now + 1:
            raise Violation(f"rank {rank} says at which rate to learn in round {round}, and it is version {now}")
        try:
            self._rates.say(rank, round, rate)
        except UnlikeRates as error:
            raise Violation(str(error)) from error

    def kept(self, rank: int, round: int) -> Sequence[StateTransfer]:
        """A rank has the whole state of that round, with its moments."""
        if not self._keeps(rank):
            raise Violation(f"rank {rank} keeps no moments of this tensor")
        return self._kept() if round == self.version else ()

    def parts_for(self, rank: int) -> int:
        """Number of parts of the state that this rank is given: the keeper has the moments too."""
        return self.declared.state_parts if self._keeps(rank) else self.declared.parts

    def piece(self, rank: int, number: int) -> Piece:
        """The piece that a PUSH of this rank carries."""
        return self._spoken.piece(rank, number)

    def memory_bytes(self, rank: int) -> int:
        """Bytes of memory in which all that this rank pushes in a round lies (`Spoken.place`)."""
        return self._spoken[rank].memory_bytes

    def place(self, rank: int, number: int) -> tuple[int, int]:
        """Where a piece of this rank lies in that memory: its first byte, and the byte after its last."""
        return self._spoken[rank].place(number)

    def push(self, rank: int, round: int, number: int, data: Payload) -> Sequence[StateTransfer]:
        """A rank pushes a piece. `data` is kept until it was added: hand over a buffer that nothing else writes."""
        piece = self.piece(rank, number)
        if len(data) != piece.size:
            raise Violation(f"piece {number} has {piece.size} bytes, not {len(data)}")
        if self.declared.update is not None and not self._rates.has_said(rank, round):
            raise Violation(f"rank {rank} pushed round {round} and sent no learning rate")
        if self.version is None and rank in self._outdated:
            return ()
        if self.version is None:
            held_round, pieces = self._held.setdefault(rank, (round, {}))
            if round != held_round or round != self._held_versions[rank] + 1:
                raise Violation(f"rank {rank} holds version {self._held_versions[rank]} and pushed round {round}")
            self._pushing[rank], pieces[number] = round, data
            return ()
        if round == self.version:
            self.duplicates += 1
            return self._give([rank]) if self._is_last(rank, number) and self._may_have(rank) else ()
        if round != self.version + 1:
            raise Violation(f"rank {rank} pushed round {round} of a tensor at version {self.version}")
        begins, self._pushing[rank] = self._pushing.get(rank) != round, round
        self._offer(piece, data)
        return [StateTransfer("give", rank)] if begins and self._done else ()

    # ---- sums ----

    @property
    def under_way(self) -> bool:
        """Has a rank pushed for a round that is not complete?"""
        return self._begun or bool(self._held) or not self._is_kept

    @property
    def busy(self) -> bool:
        """Is there an addition to do?"""
        return bool(self._ready)

    @property
    def is_large(self) -> bool:
        """May other processes do its additions?"""
        return min(self.declared.part_bytes, self.declared.size_bytes) >= LEAST_BYTES

    def work(self) -> Sequence[StateTransfer]:
        """Do one addition of one part. When that completes the round, all ranks are given the result."""
        addition = self.begin()
        return self.end(addition, addition.run())

    def begin(self) -> PartAddition:
        """Begin one addition that can be done now, by this process or another, before `end`. If it fails its
        contributions are lost."""
        part, now = self._ready.popleft()
        nodes = [(0, self.workers)] if now is None else [now.left, now.right]
        sides = [self._partial[part].pop(node) for node in nodes]
        node = (0, self.workers) if now is None else now.sum
        self._adding.add((part, node))
        single = tuple(end - first == 1 for first, end in nodes)
        of = part, node, self.declared.type, single
        if node == (0, self.workers):
            old, new = self._part_of(self._state, part), self._part_of(self._sum, part)
            return PartAddition(*of, sides, None, self._last(), old, new, sides)
        if self._numbers.rounds:
            start, end = self.declared.span(part)
            wide = (end - start) // self.declared.element_bytes * self._numbers.wide.itemsize
            return PartAddition(*of, sides, self._spare(wide), None, (), (), sides)
        mine = [at for at, side in enumerate(sides) if not memoryview(side).readonly]
        into = sides[mine[0]] if mine else self._spare(len(sides[0]))
        return PartAddition(*of, sides, into, None, (), (), [side for side in sides if side is not into])

    def end(self, addition: PartAddition, not_finite: int) -> Sequence[StateTransfer]:
        """An addition is done."""
        self._adding.discard((addition.part, addition.node))
        self.not_finite += not_finite
        for buffer in addition.used:
            self._added(buffer)
        if addition.into is not None:
            self._wait(addition.part, addition.node, addition.into)
            return ()
        self._done.append(addition.part)
        if len(self._done) == self.declared.parts:
            return self._complete()
        if len(self._done) % max(1, self.declared.parts // GIVES):
            return ()
        return [StateTransfer("give", rank) for rank in sorted(self._spoken) if self._awaits_parts(rank)]

    def lend(self) -> tuple[int, Array, dict[int, bytes]]:
        """Version and state, for sending, not overwritten until `give_back`; and a place for headers of its parts."""
        assert self.version is not None
        self._lend(self._state)
        return self.version, self._state, self._heads

    def lend_to(self, rank: int) -> LentResult | None:
        """The result that this rank awaits, as far as it is there: of the round under way what is added, if the rank
        has pushed for it; else the state. None when it may not have the newest result yet, and is given it later, or
        the tensor is over here."""
        if self._is_over:
            return None
        if self.version is not None and self._done and self._awaits_parts(rank):
            self._lend(self._sum)
            return LentResult(self.version + 1, self._sum, self._new_heads, tuple(self._done), False)
        if not self.has_state or not self._may_have(rank):
            return None
        return LentResult(*self.lend(), range(self.parts_for(rank)), True)

    def give_back(self, array: Array) -> None:
        left = self._lent.pop(id(array)) - 1
        if left:
            self._lent[id(array)] = left

    def let_go(self) -> None:
        """The tensor is over: give its memory back, except what is still being sent or added."""
        self._is_over = True
        self._state = self._sum = np.empty(0, self._dtype)
        self._held.clear()
        for partial in self._partial:
            partial.clear()

    def touch(self) -> Iterator[None]:
        """Prepare the memory of a round before there is one, a piece at a time (`memory`)."""
        if not len(self._sum):
            array = self._empty(self._count)
            yield from touched(array)
            self._sum = self._sum if len(self._sum) else array
        if not len(self._state):
            array = self._empty(self._count)
            yield from touched(array)
            self._state = self._state if len(self._state) else array

    def missing(self) -> list[int]:
        """Ranks whose word or push is still to come."""
        said = self._got[-1] if self.version is not None else self._spoken.for_whom(self._outdated)
        return [rank for rank in range(self.workers) if rank not in said]

    def said(self) -> RoundSaid:
        spoken, here = self._spoken, frozenset(self._here)  # of the round under way
        if not self._is_kept:
            return RoundSaid(spoken.keepers(), spoken.firsts(spoken.keys() - spoken.keepers()), here, spoken, False)
        pushed = spoken.firsts(self._held) if self.version is None else frozenset(self._got[-1])
        return RoundSaid(self.missing(), pushed, here, spoken, self.version is not None)

    def check(self) -> None:
        for part, (got, partial) in enumerate(zip(self._got, self._partial, strict=True)):
            nodes = [*partial, *(node for at, node in self._adding if at == part)]
            held = [rank for first, end in nodes for rank in range(first, end)]
            assert len(held) == len(set(held)), "a rank's part would be added twice"
            whole = not nodes and len(got) == self.workers
            assert whole or set(held) == got, "what a rank gave is neither waiting nor in the sum"
            ready = [now for at, now in self._ready if at == part and now is not None]
            assert all(now.left in partial and now.right in partial for now in ready)
        assert len(set(self._done)) == len(self._done) < self.declared.parts, "a part is given before it is added"
        assert all(len(self._got[part]) == self.workers and not self._partial[part] for part in self._done)
        assert self.version is None or (not self._held and self.copy is None)
        assert self.copy is None or self._holder is None
        assert self.has_state or self.declared.kind == "grad" or self.version is None

    # ---- inside ----

    def _recover(self) -> Sequence[StateTransfer]:
        if self._holder is not None or self.missing():
            return ()
        newest = max(self._held_versions.values())
        outdated = {rank for rank, version in self._held_versions.items() if version < newest - 1}
        if outdated:  # the round after theirs is over: they were in it, by processes that are elsewhere yet
            for rank in outdated:
                del self._held_versions[rank]
                self._held.pop(rank, None)
            self._outdated |= outdated
            return ()
        oldest = min(self._held_versions.values())
        behind = [rank for rank, version in self._held_versions.items() if self._keeps(rank) and version < newest]
        if behind:
            raise Violation(f"rank {behind[0]} keeps moments of version {oldest}, and another rank holds {newest}")
        if self.copy is not None and self.copy.may_still_be(newest):
            return ()
        if self.copy is not None and self.copy.version == newest:
            return self._begin(newest, has_state=True)
        if self.copy is not None:
            self.copy, self._state = None, self._empty(0)  # a part of it may be on its way into what it was
        if self.declared.kind == "grad" and newest == oldest:
            return self._begin(newest, has_state=False)
        holders = [rank for rank in sorted(self._here) if self._held_versions[rank] == newest and self._has_it(rank)]
        if not holders:
            return ()
        self._holder = holders[key_of(self.declared.label) % len(holders)]
        self._fetched.clear()
        return (StateTransfer("ask", self._holder),)

    def _fetch(self) -> Sequence[StateTransfer]:
        """Fetch the result of this version for late ranks: every other rank said to hold it."""
        holders = sorted(self._here - self._hollow)
        if not self._late or self._holder is not None or not holders:
            return ()
        self._holder = holders[0]
        self._fetched.clear()
        if len(self._state) != self._count or id(self._state) in self._lent:
            self._state = self._empty(self._count)
        return (StateTransfer("ask", self._holder),)

    def _has_it(self, rank: int) -> bool:
        """Can a rank that has the newest version be asked for the state?"""
        if rank in self._hollow:
            return False
        began = self._spoken[rank].ranks[0] == 0 and not self._held_versions[rank]
        if self.declared.asked_parts(self._held_versions[rank]) > self.declared.parts:
            return began or (self._keeps(rank) and rank not in self._wants)
        return self._spoken[rank].ranks[0] == 0 or rank not in self._wants

    def _begin(self, version: int, has_state: bool) -> Sequence[StateTransfer]:
        self.version, self.has_state, self._holder, self.copy = version, has_state, None, None
        answers = sorted(self._wants)
        held, self._held = self._held, {}
        for rank, (round, pieces) in sorted(held.items()):
            if round == version + 1:
                for number, data in sorted(pieces.items()):
                    self._offer(self.piece(rank, number), data)
            elif any(self._is_last(rank, number) for number in pieces):
                answers.append(rank)
        return self._give(answers)

    def _is_last(self, rank: int, number: int) -> bool:
        return number == self._spoken[rank].count - 1

    def _offer(self, piece: Piece, data: Payload) -> None:
        got = self._got[piece.part]
        if piece.node[0] in got:
            self.duplicates += 1
            return
        if not self._begun and (len(self._sum) != self._count or id(self._sum) in self._lent):
            self._sum = self._empty(self._count)  # later in the round parts of it are being sent themselves
        got.update(range(*piece.node))
        self._begun = True
        self._wait(piece.part, piece.node, data)

    def _wait(self, part: int, node: Node, data: Payload) -> None:
        """The sum of these ranks is here."""
        partial = self._partial[part]
        partial[node] = data
        now = addition(node, self.workers, self.declared.order)
        if now is None or (now.left in partial and now.right in partial):
            self._ready.append((part, now))

    def _part_of(self, state: Array, part: int) -> list[Array]:
        """The numbers of this part, and their moments."""
        start, end = (offset // self.declared.element_bytes for offset in self.declared.span(part))
        if len(state) != self._count:
            return []  # nothing is kept between two rounds
        whole, size, each = state.view(np.uint8), self.declared.size_bytes, self.declared.moment_bytes
        firsts = (size + at * each for at in range(self.declared.moments))
        moments = [whole[first : first + each].view(self._numbers.wide) for first in firsts]
        return [row[start:end] for row in (whole[:size].view(self._numbers.stored), *moments)]

    def _last(self) -> LastAddition:
        assert self.version is not None
        declared, round = self.declared, self.version + 1
        workers = self.workers if declared.mean else 0
        if declared.update is None:
            return LastAddition(workers, declared.kind == "model")
        return LastAddition(workers, True, declared.update, declared.steps + round, self._rates.of(round))

    def _complete(self) -> Sequence[StateTransfer]:
        assert self.version is not None
        self._state, self._sum = self._sum, self._state
        self.version += 1
        self.rounds += 1
        self.has_state = True
        self._heads, self._new_heads = self._new_heads, {}
        self._done.clear()
        self._begun = False
        self._late, self._holder = set(), None
        for got in self._got:
            got.clear()
        self._is_kept = not self.declared.moments
        return self._give([rank for rank in sorted(self._spoken) if self._may_have(rank)])

    def _keeps(self, rank: int) -> bool:
        return self._spoken.keeps(rank)

    def _awaits_parts(self, rank: int) -> bool:
        """Has this rank pushed for the round under way on its present connection? Then it has the last result whole."""
        return self.version is not None and self._pushing.get(rank) == self.version + 1

    def _lend(self, array: Array) -> None:
        self._lent[id(array)] = self._lent.get(id(array), 0) + 1

    def _may_have(self, rank: int) -> bool:
        """Is this rank given the result now?"""
        return self._is_kept or self._keeps(rank)

    def _kept(self) -> Sequence[StateTransfer]:
        if self._is_kept:
            return ()
        self._is_kept = True
        return self._give([rank for rank in sorted(self._spoken) if not self._keeps(rank)])

    def _give(self, ranks: Sequence[int]) -> Sequence[StateTransfer]:
        if ranks and not self.has_state:
            if not self._hollow.issuperset(ranks):
                raise Violation("a rank asks again for a sum that every rank said to hold")
            self._late.update(ranks)
            return self._fetch()
        return [StateTransfer("give", rank) for rank in ranks if rank in self._here]  # others open it, and push again

    def _check_size(self, part: int, data: Payload) -> None:
        if part >= self.declared.state_parts:
            raise Violation(f"part {part} of a tensor with {self.declared.state_parts}")
        start, end = self.declared.state_span(part)
        if len(data) != end - start:
            raise Violation(f"part {part} has {end - start} bytes, not {len(data)}")

    def _empty(self, count: int) -> Array:
        return self._arena.take(count, self._dtype)

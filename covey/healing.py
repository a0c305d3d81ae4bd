"""A rank that is lost gets a successor while the others wait: what it needs to go on, and who gives it.

In each step a rank needs what all others push, so once one is lost the others stand in that step: what they hold *is*
the state at its beginning. Its successor asks all of them, takes the state of one that is furthest, from several at
once, and computes the step again. What the lost rank had pushed already stays true, and what its successor pushes of it
again has the same bits. What was the lost rank's own (random generators, its place in the data) lies with two
neighbours: it goes there in each step before the first push, as it will be at the step's end, and nothing is pushed
before both have it. So whoever has a result of a step need not have it alone: no rank gets ahead of what is kept.

    lost rank                            each other rank
      MIRROR(step + 1, own) ->             two neighbours keep the newest two; the script may compute meanwhile
                                        <- MIRRORED(step + 1, of which bytes); only then something is pushed
    successor
      NEED ->                              once its script waits for a tensor; from then on it waits until DONE
                                        <- HAVE(step, what was the successor's own, and others')
      FETCH(where) ->                      those that are furthest (`covey.taking_over`)
                                        <- PIECE
      DONE ->                              the script goes on

Where a job has few ranks, all of them gather what is each one's own, as one more sum that is pushed first and waited
for first (`covey.owns`): it is a part of the state then, no MIRROR is told, and no push waits for a word.

All of it goes through the job's aggregators (`covey.tensorwire`, TELL), which may lose any of it, so it is said again
until it is answered. A rank that is asked while it is a successor itself says that it has nothing.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import msgspec

from covey.aggregator_rounds import Waits
from covey.checksum import crc32
from covey.errors import CoveyError, StateLost
from covey.held_state import HeldState, Kept
from covey.likeness import Likeness, encode_likeness, likeness_decoder, unlike_bits, unlike_versions
from covey.own_gather import OwnGather
from covey.owns import JsonText, array_of_owns, owns_of_array
from covey.rounds import Tell, ToldByRank
from covey.state_pieces import CANNOT, FROM_CHECKPOINT, About, Have, encode_have, have_decoder
from covey.taking_over import (
    ASK_S,
    FIRST_ASK_S,
    HEAL_S,
    PATIENCE_S,
    WITHIN_S,
    HealingClosed,
    Recovered,
    TakingOver,
)
from covey.tensor_arrays import Array

OWN_BYTES_MAX = 32 << 10
"""Of what is a rank's own, as JSON."""
SAY_S = 1.0
"""A rank that waits for a successor says so as often."""
CANNOT_HEAL = "one that takes over with the other's would end"
WHERE_ALIKE = "submit the job to hosts that are alike, with the same environment"
OWNS = "covey/owns"
"""The array of the state in which they are, where all ranks gather them."""
KEPT = 2
"""Of a neighbour's own state: at the beginning of its step, and of the next."""


class Tells(Protocol):
    """How ranks reach one another; whatever is said may be lost. Methods may be called from any thread."""

    def tell(self, said: Tell) -> None: ...


class Healing:
    """Of one rank. The script's threads call the first group of methods, a link's thread `told`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        neighbours: Sequence[int],
        tells: Tells,
        rounds: Callable[[], bytes | None],
        step: int,
        incarnation: int,
        people: Callable[[str], None] = lambda text: None,
        like: Likeness | None = None,
        gather: OwnGather | None = None,
    ) -> None:
        """`rounds`: of each Block, before this step; None while one is under way. `step`: with which the script begins,
        unless it is a successor: `incarnation` says of how many. `people` read for what it waits.
        `like`: of this process; None: none is compared. `gather`: of what is each rank's own; None: two neighbours
        keep that of this rank."""
        self._people = people
        self.step = step
        """The one that the script is in."""
        self._rank = rank
        self._neighbours, self._tells, self._rounds = tuple(neighbours), tells, rounds
        self._first, self._incarnation, self._is_new = step, incarnation, incarnation > 0
        self._gather = gather
        self._pushing = threading.Lock()
        """Held by the thread that tells what is this rank's own: other threads push afterwards."""
        self._changed = threading.Condition()
        """Guards what follows."""
        self._state: Mapping[str, Array] = {}
        """At the beginning of this step; not written before its results are here."""
        self._rounds_before = b""
        self._has_said_own = False
        self._own: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._mirrored: dict[int, tuple[int, int]] = {}
        """Of each neighbour: what it keeps of ours, by the newest step, and its CRC-32."""
        self._kept: dict[int, dict[int, bytes]] = {}
        """What is another rank's own, by rank and step."""
        self._like, self._likes = like, dict[int, Likeness]()
        """Of this process, and of those that told theirs."""
        self._liked: set[int] = set()
        """Neighbours that know this one's."""
        self._closed = False
        self._waiting = 0
        """Threads of the script that wait for a tensor."""
        self._newest: dict[int, int] = {}
        """Which process of a rank asks, of those that did."""
        self._asked: dict[int, None] = {}
        """Successors that ask, while the script does not wait."""
        self._held: dict[int, None] = {}
        """Successors for which the script waits on."""
        self._gives: HeldState | None = None
        """Of this rank, to them."""
        self._saying: threading.Thread | None = None
        self._taking = TakingOver(
            rank, world_size, incarnation, tells.tell, self._changed, lambda: self._closed, self._keep_all
        )

    # ---- from the script ----

    def begin(self, state: Mapping[str, Array]) -> None:
        """A step: `state` is not changed until all of its results are here. CoveyError when a round is under way."""
        rounds = self._rounds()
        if rounds is None:
            what, why = (
                "a step ended too early",
                "a round of a tensor is under way, and what it gives belongs to the step",
            )
            raise CoveyError(what, why, "wait for the handles of all tensors first")
        with self._changed:
            self._state, self._rounds_before, self._has_said_own = state, rounds, False
            if self._gather is not None:
                self._gather.step_begins()
        self._say_like()

    def end(self, state: Mapping[str, Array]) -> None:
        """This step is done: the next one begins."""
        self.begin(state)
        with self._changed:
            self.step += 1
            for kept in self._kept.values():  # a successor begins with the newest step, which is not behind this one
                for old in [step for step in kept if step < self.step]:
                    del kept[old]

    def drawn(self, own: Callable[[], Any] | None) -> None:
        """What is this rank's own is as it will be when the step ends: neighbours get it while the script computes."""
        if own is None or self._gather is not None:
            return
        with self._pushing:
            if not self._has_said_own:
                data = self._own_is(own)
                for neighbour in self._neighbours:
                    self._tells.tell(Tell(neighbour, About.MIRROR, self.step + 1, data))

    def before_push(self, own: Callable[[], Any] | None) -> None:
        """Something is about to be pushed: what is this rank's own is as it will be when the step ends. CoveyError when
        it is too large."""
        if self._gather is not None and not self._has_said_own:
            with self._pushing:
                if not self._has_said_own:
                    self._gather.begin(self.step, None if own is None else _json(own))
                    self._has_said_own = True
        if own is None or self._gather is not None:
            return
        with self._pushing:
            if not self._has_said_own:
                with self._changed:
                    before = self._own[-1] if self._own else None
                data = self._own_is(own)
                with self.waiting():
                    self._mirror(self.step + 1, data, (self.step + 1, data) == before)
                self._has_said_own = True

    def _own_is(self, own: Callable[[], Any]) -> bytes:
        """At the end of this step."""
        data = _json(own)
        with self._changed:
            if self._own and self._own[-1][0] == self.step + 1:
                self._own.pop()
            self._own.append((self.step + 1, data))
        return data

    def gathered(self, waits: Callable[[str], Waits]) -> None:
        """Before a result of this step is used: once what is every rank's own is here. As of `OwnGather.end`."""
        if self._gather is not None:
            self._gather.end(waits)

    def _say_like(self) -> None:
        """Once a step, until they know."""
        for neighbour in self._neighbours if self._like is not None else ():
            if neighbour not in self._liked:
                self._tells.tell(Tell(neighbour, About.LIKE, self._incarnation, encode_likeness(self._like)))

    def _mirror(self, step: int, data: bytes, is_told: bool) -> None:
        """Returns once all neighbours have it. One that is lost has it as soon as it has a successor, for which all
        wait anyway. `is_told`: it is on its way."""
        pause_s, tell_s, kept = FIRST_ASK_S, time.monotonic() + PATIENCE_S, (step, crc32(data))
        while True:
            with self._changed:
                left = [each for each in self._neighbours if self._mirrored.get(each) != kept]
            if not left:
                return
            if self._closed:
                raise HealingClosed("the client was closed before anybody kept what is this rank's own")
            for neighbour in () if is_told else left:
                self._tells.tell(Tell(neighbour, About.MIRROR, step, data))
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._are_mirrored(kept), pause_s)
            pause_s, is_told = min(2 * pause_s, ASK_S), False
            if time.monotonic() > tell_s:
                tell_s += PATIENCE_S
                names = ", ".join(map(str, left))
                self._people(f"pushes once rank {names} keeps what is its own, which was told {PATIENCE_S:.0f} s ago")

    def _are_mirrored(self, kept: tuple[int, int]) -> bool:
        return all(self._mirrored.get(each) == kept for each in self._neighbours)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The script waits for a tensor, and on while a successor needs what it holds."""
        with self._changed:
            self._waiting += 1
            asked, self._asked = self._asked, {}
            for rank in asked:
                self._hold(rank)
        failed = True
        try:
            yield
            failed = False
        finally:
            with self._changed:
                self._changed.wait_for(lambda: failed or not self._held or self._closed)
                self._waiting -= 1

    def recover(
        self,
        say: Callable[[str], None],
        has_own: bool,
        known: Mapping[str, Array] | None = None,
        timeout_s: float = HEAL_S,
        within_s: float = WITHIN_S,
    ) -> Recovered:
        """What this successor goes on with. Errors as of `TakingOver.state`, and StateLost when nobody kept what is its
        own. `say`: to people, for what it waits; `has_own`: something is this rank's own; `known`: arrays into which
        the state goes, where they are like it."""
        have, taken = self._taking.state(say, known or {}, timeout_s, within_s, self._like)
        gather, owns = self._gather, taken.arrays.pop(OWNS, None)
        if gather is not None and owns is not None:
            gather.go_on_with(owns_of_array(owns, gather.ranks))
        own = self._own_at(have) if has_own else None
        found = None if own is None else _parsed(own)
        if own is not None and gather is None:
            self._own.append((have.step, own))
            for neighbour in self._neighbours:
                self._tells.tell(Tell(neighbour, About.MIRROR, have.step, own))
        with self._changed:
            self._is_new, self.step, self._first = False, have.step, have.first
            survivors = self._taking.survivors
        for rank in survivors:
            self._tells.tell(Tell(rank, About.DONE, self._incarnation))
        return Recovered(have.step, taken.arrays, found, taken.rounds)

    # ---- from a link ----

    def told(self, told: ToldByRank) -> None:
        """Another rank said something. What no rank says is left alone."""
        with self._changed, suppress(ValueError, msgspec.DecodeError, RecursionError):
            about = About(told.about)
            match about:
                case About.MIRROR:
                    self._keep(told.rank, told.step, bytes(told.data))
                    self._tells.tell(Tell(told.rank, About.MIRRORED, told.step, crc32(told.data).to_bytes(4, "little")))
                case About.MIRRORED:
                    if told.step >= self._mirrored.get(told.rank, (-1, 0))[0]:
                        self._mirrored[told.rank] = told.step, int.from_bytes(told.data, "little")
                case About.NEED:
                    self._need(told.rank, told.step)
                case About.HAVE:
                    self._have(told.rank, have_decoder.decode(told.data))
                case About.FETCH:
                    self._give(told)
                case About.PIECE:
                    if (
                        not self._is_new
                        or told.step != self._incarnation
                        or not self._taking.came(told.rank, told.data)
                    ):
                        return  # nobody waits for one piece
                case About.DONE:
                    self._done(told.rank, told.step)
                case About.LIKE:
                    self._compare(told.rank, likeness_decoder.decode(told.data))
                    self._tells.tell(Tell(told.rank, About.LIKED, told.step))
                case About.LIKED:
                    self._liked.add(told.rank)
            self._changed.notify_all()

    def close(self) -> None:
        """The script goes on, whoever waits for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- who waits for a successor ----

    def _need(self, rank: int, incarnation: int) -> None:
        if incarnation < self._newest.setdefault(rank, incarnation):
            return
        self._newest[rank] = incarnation
        if self._is_new:
            self._tells.tell(Tell(rank, About.HAVE, 0, encode_have(Have(incarnation, is_new=True))))
            self._taking.lost(rank)
        elif self._waiting:
            self._hold(rank)
        else:
            self._asked[rank] = None

    def _compare(self, rank: int, like: Likeness) -> None:
        if self._like is None or self._likes.get(rank) == like:
            return
        self._likes[rank] = like
        why = unlike_versions(self._like, like)
        if why := f"{why}: {CANNOT_HEAL}" if why else unlike_bits(self._like, like):
            self._people(f"is not like rank {rank}: {why}; next: {WHERE_ALIKE}")

    def _keep_all(self, kept: Kept) -> None:
        for rank, own in kept.items():
            for step, data in own.items():
                self._keep(rank, step, data)

    def _keep(self, rank: int, step: int, data: bytes) -> None:
        """What is another rank's own, of its newest steps."""
        kept = self._kept.setdefault(rank, {})
        kept[step] = data
        for old in sorted(kept)[:-KEPT]:
            del kept[old]

    def _hold(self, rank: int) -> None:
        if self._gives is None:
            owns = {} if self._gather is None else {OWNS: array_of_owns(self._gather.owns)}
            self._gives = HeldState({**self._state, **owns}, self._rounds_before)
        self._held[rank] = None
        self._say_what_is_here(rank, self._gives)
        if self._saying is None:
            self._saying = threading.Thread(target=self._say_on, name="covey-heal", daemon=True)
            self._saying.start()

    def _say_what_is_here(self, rank: int, gives: HeldState) -> None:
        kept = {**self._kept, self._rank: dict(self._own)}
        own = kept.pop(rank, {})
        yours = self._likes.get(rank)
        for have in gives.haves(self._newest[rank], self.step, self._first, own, kept, self._like, yours):
            self._tells.tell(Tell(rank, About.HAVE, self.step, encode_have(have)))

    def _say_on(self) -> None:
        """Until nobody is waited for: an answer may have been lost, and so may the word that it came."""
        summed: HeldState | None = None
        while True:
            with self._changed:
                self._changed.wait_for(partial(self._gives_other_than, summed), SAY_S)
                if self._gives is None or self._closed:
                    self._saying = None
                    return
                gives = self._gives
            if gives is not summed:
                gives.make_sum()
                summed = gives
            with self._changed:
                for rank in self._held if self._gives is gives else ():
                    self._say_what_is_here(rank, gives)

    def _gives_other_than(self, gives: HeldState | None) -> bool:
        return self._gives is not gives or self._closed

    def _give(self, asked: ToldByRank) -> None:
        if asked.rank not in self._held or asked.step != self._newest[asked.rank]:
            return
        piece = None if self._gives is None else self._gives.piece(asked.data)
        if piece is not None:
            self._tells.tell(Tell(asked.rank, About.PIECE, asked.step, piece))

    def _done(self, rank: int, incarnation: int) -> None:
        if self._newest.get(rank) != incarnation or self._held.pop(rank, 0) == 0:
            return
        if not self._held:
            self._gives = None
        for step, data in self._own if rank in self._neighbours else ():  # the one before it may not have said so
            self._tells.tell(Tell(rank, About.MIRROR, step, data))

    # ---- a successor ----

    def _have(self, rank: int, have: Have) -> None:
        if have.to != self._incarnation:
            return
        if self._is_new:
            self._taking.have(rank, have)
        elif not have.is_new:
            self._tells.tell(Tell(rank, About.DONE, self._incarnation))  # it did not hear that

    def _own_at(self, have: Have) -> bytes | None:
        """None: the job had just begun."""
        if self._gather is not None:
            owns = self._gather.owns
            if have.step not in (owns.step, have.first):
                why = f"what is its own was gathered at step {owns.step}, and the others are at step {have.step}"
                raise StateLost(CANNOT, why, FROM_CHECKPOINT)
            return owns.each[self._rank] or None
        with self._changed:
            kept = self._kept.get(self._rank, {})
        if have.step in kept or have.step == have.first:
            return kept.get(have.step)
        names = " and ".join(map(str, self._neighbours))
        if kept:
            why = f"rank {names} kept what is its own at step {max(kept)}, and the others are at step {have.step}"
        else:
            why = f"what is its own at step {have.step} was with rank {names}, lost too before it was told anew"
        raise StateLost(CANNOT, why, FROM_CHECKPOINT)


def _json(own: Callable[[], Any]) -> bytes:
    """CoveyError when it is too large."""
    value = own()
    data = (value if isinstance(value, JsonText) else json.dumps(value)).encode("ascii")
    if len(data) > OWN_BYTES_MAX:
        why = f"it has {len(data)} bytes as JSON, and goes to other ranks in each step"
        raise CoveyError("what is this rank's own is too large", why, f"keep it under {OWN_BYTES_MAX} bytes")
    return data


def _parsed(own: bytes) -> Any:
    """What a rank told its neighbours. StateLost."""
    try:
        return json.loads(own)
    except ValueError as error:
        why = f"what is its own was kept in {len(own)} bytes that cannot be read: {error}"
        raise StateLost(CANNOT, why, FROM_CHECKPOINT) from error


def neighbours_of(rank: int, here: range, world_size: int) -> list[int]:
    """Two ranks on other hosts than that of the ranks `here`, if there are any, who keep what is this rank's own."""
    away = [*range(here.stop, world_size), *range(here.start)] or [other for other in here if other != rank]
    at = rank - here.start
    return sorted({away[at % len(away)], away[-1 - at % len(away)]}) if away else []

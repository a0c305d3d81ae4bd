"""The machine that decides what a rank of a healing job sends and what it waits for (`covey.healing.healing` explains
the protocol).

It neither waits nor sends: what takes a while is a generator (`covey.healing.stepwise`), and time is given to it.
Threads run it in `covey.healing.healing`, the simulator's ranks in `covey.simulated.healing_streams`.
"""

import contextlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from covey.core.errors import CoveyError, RankLeft, StateLost
from covey.healing.held_state import HeldState, Kept
from covey.healing.likeness import (
    Likeness,
    encode_likeness,
    likeness_decoder,
    unlike_bits,
    unlike_script,
    unlike_versions,
)
from covey.healing.neighbours import Beside, HealedRank
from covey.healing.own_gather import OwnGather
from covey.healing.owns import JsonText, Owns, array_of_owns, owns_of_array
from covey.healing.state_pieces import CANNOT, FROM_CHECKPOINT, About, Have, encode_have, have_decoder
from covey.healing.stepwise import Pause, Stepwise
from covey.healing.taking_over import (
    ASK_S,
    FIRST_ASK_S,
    HEAL_S,
    PATIENCE_S,
    WITHIN_S,
    HealingClosed,
    Recovered,
    TakingOver,
)
from covey.tensors.aggregator.rounds import Tell, ToldByRank
from covey.tensors.numbers.arrays import Array
from covey.wire.checksum import crc32

OWN_BYTES_MAX = 64 << 10
"""Most bytes of a rank's own state, as JSON."""
SAY_S = 1.0
"""Seconds between the offers of its state that a rank repeats while it waits for a successor."""
CANNOT_HEAL = "one that takes over with the other's would end"
WHERE_ALIKE = "submit the job to hosts that are alike, with the same environment"
ONE_SCRIPT = "run one script in all processes of a job; a script that was changed belongs to another job"
OWNS = "covey/owns"
"""Name of the array with all ranks' own states, as a part of the state, when all ranks gather them."""
KEPT = 3
"""How many own states are kept of a neighbour: at the beginning of this rank's step, of the next, and of the one after.
The neighbour may be a step ahead, and has sent its own state at the end of that step."""
NOT_SAVED = "nothing was saved"
Says = tuple[Tell, ...]
Own = Callable[[], Any] | None


class Boundary(NamedTuple):
    """A moment between two steps."""

    step: int
    """The step that comes next."""
    owns: Sequence[bytes] | None
    """By rank: what is its own, as JSON, empty where it has none; None: neighbours keep that."""
    own: bytes | None = None
    """What neighbours keep of this rank's own, as JSON; None: nothing."""


class HealingMachine:
    """The decisions of one rank. Only one thread may use it while one of its methods runs."""

    def __init__(
        self,
        me: HealedRank,
        now_s: Callable[[], float],
        say_on: Callable[[], None],
        like: Likeness | None = None,
        gather: OwnGather | None = None,
    ) -> None:
        """`like`, `gather`: as in `Healing`. `say_on` is called when `saying` is to be run, from then until it ends."""
        self.step = me.step
        """Number of the step that the script is in."""
        self._rank, self._now_s, self._say_on, self.gather = me.rank, now_s, say_on, gather
        self._first, self._incarnation, self._is_new = me.step, me.incarnation, me.incarnation > 0
        self._as_of = me.incarnation
        """Its incarnation, or what stands for one where it carries its rank again and never stopped
        (`carried_here`)."""
        self._beside = Beside(me)
        self._neighbours = self._beside.neighbours
        self._state: Mapping[str, Array] = {}
        """The state at the beginning of this step; the script does not change it before the step's results are here."""
        self.rounds_before = b""
        """The round of each Block before this step."""
        self.has_said_own = False
        """Whether neighbours have its own state of this step, so that it may push."""
        self._own: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._mirrored: dict[int, tuple[int, int]] = {}
        """By neighbour: the newest step of which it keeps this rank's own state, and the CRC-32 of that state."""
        self._kept: dict[int, dict[int, bytes]] = {}
        """Own states of other ranks, by rank and step."""
        self._like, self._likes = like, dict[int, Likeness]()
        """Likeness of this process, and of the ranks that sent theirs."""
        self._liked: set[int] = set()
        """Neighbours that know this rank's likeness."""
        self._closed = False
        self._waiting = 0
        """How many threads of the script wait for a tensor."""
        self._met = False
        """Whether a tensor had a result, for which every rank has pushed."""
        self._newest: dict[int, int] = {}
        """By rank: the newest process that asked for the state."""
        self._asked: dict[int, None] = {}
        """Successors that asked while the script does not wait."""
        self._held: dict[int, None] = {}
        """Successors for which the script keeps waiting."""
        self._behind: dict[int, int] = {}
        """Successors that have the state, and the step they began in: pushes of a later step wait for them."""
        self._gone: dict[int, str] = {}
        """Ranks that have left for good (`covey.tensors.owner.leaving`), and a sentence for people on each."""
        self._gives: HeldState | None = None
        """The state that this rank gives to successors."""
        self._is_saying = False
        taking = me.incarnation, now_s, lambda: self._closed, self._keep_all, me.host.encode(), me.alike
        self._taking = TakingOver(me.rank, me.world_size, *taking)

    # ---- from the script ----

    def begin(self, state: Mapping[str, Array], rounds: bytes | None) -> Says:
        """Begin a step: `state` must not change until all of its results are here. `rounds`: the round of each Block
        before it. CoveyError when a round is under way (None)."""
        if rounds is None:
            what, why = (
                "a step ended too early",
                "a round of a tensor is under way, and what it gives belongs to the step",
            )
            raise CoveyError(what, why, "wait for the handles of all tensors first")
        self._state, self.rounds_before, self.has_said_own = state, rounds, False
        if self.gather is not None:
            self.gather.step_begins()
        left = [each for each in self._neighbours if each not in self._liked] if self._like is not None else []
        return tuple(Tell(each, About.LIKE, self._incarnation, encode_likeness(self._like)) for each in left)

    def end(self, state: Mapping[str, Array], rounds: bytes | None) -> Says:
        """End this step and begin the next."""
        says = self.begin(state, rounds)
        self.step += 1
        for kept in self._kept.values():  # a successor begins with the newest step, which is not behind this one
            for old in [step for step in kept if step < self.step]:
                del kept[old]
        return says

    def drawn(self, own: Own) -> Stepwise[None]:
        """This rank's own state is as it will be at the step's end: neighbours get it while the script computes."""
        if own is None or self._gathers_owns or self.has_said_own:
            return
        data = yield Pause(work=partial(json_of, own))
        self._own_is(self.step + 1, data)
        yield Pause(self._mirrors(self._neighbours, self.step + 1, data))

    def moved(self, own: Own) -> Stepwise[None]:
        """This rank's own state at the beginning of this step is another one than it said in the step before: it
        changed after that. Neighbours keep that, and it counts for a successor whoever gathers the others."""
        if own is not None:
            data = yield Pause(work=partial(json_of, own))
            self._own_is(self.step, data)
            with contextlib.suppress(RankLeft):  # once a rank is done, none that is lost goes on
                yield from self._mirror_own()

    def before_push(self, own: Own, later: bool = False) -> Stepwise[None]:
        """Called before a push, as `Healing.before_push` is."""
        yield from self._let_others_catch_up()
        if self.has_said_own or later:
            return
        data = b"" if own is None else (yield Pause(work=partial(json_of, own)))
        gathers = self._gathers_owns
        if own is not None and not gathers:
            before = self._own[-1] if self._own else None
            self._own_is(self.step + 1, data)
            yield from self._mirror_own(before)
        if self.gather is not None:
            yield Pause(work=partial(self.gather.begin, self.step, data if gathers and own is not None else None))
        self.has_said_own = True

    def waits(self) -> Says:
        """The script waits for a tensor, and longer while a successor needs its state: until `waited` or `gave_up`."""
        self._waiting += 1
        asked, self._asked = self._asked, {}
        return tuple(said for rank in asked for said in self._hold(rank))

    def waited(self) -> Stepwise[None]:
        """The script has what it waited for: it continues once no successor needs what this rank holds."""
        while self._held and not self._closed:
            yield Pause(until=lambda: not self._held or self._closed)
        self._waiting, self._met = self._waiting - 1, True

    @property
    def needed_by_none(self) -> bool:
        """Whether no successor needs what this rank holds."""
        return not self._held or self._closed

    def is_free(self) -> bool:
        """End what `waits` began, and return True; False while a successor needs what this rank holds."""
        if not self.needed_by_none:
            return False
        self._waiting -= 1
        return True

    def gave_up(self) -> None:
        """The script waits no longer, whoever needs what it holds."""
        self._waiting -= 1

    @property
    def own_said(self) -> bytes | None:
        """What this rank said in this step of its own state at the end, as JSON; None: nothing."""
        if not self.has_said_own:
            return None
        if self.gather is not None and self.gather.has_owns:
            return self.gather.said
        return self._own[-1][1] if self._own and self._own[-1][0] == self.step + 1 else None

    def boundary(self, rounds: bytes | None) -> Boundary:
        """Where this rank is between two steps: at the end of this step once something was pushed in it, else at its
        beginning. CoveyError while a round of a tensor is under way (`rounds` is None), and where it is not known
        what is each rank's own, or whether the step is over."""
        gather = self.gather
        if rounds is None or (gather is not None and gather.awaited is not None):
            why = "a round of a tensor is under way, so this rank is within a step"
            raise CoveyError(NOT_SAVED, why, "wait for the handles of all tensors first")
        step = self.step + self.has_said_own
        begins = not self.has_said_own and self.step == self._first and not self._met
        if gather is not None and begins and not self._incarnation:
            raise CoveyError(NOT_SAVED, "other ranks may not have begun", "save at the end of a step")
        if gather is None or not gather.has_owns:
            own = self._own[-1] if self._own else None
            return Boundary(step, None, own[1] if own is not None and own[0] == step else None)
        if self.has_said_own:
            return Boundary(step, gather.newest)
        owns = gather.owns
        if owns.plan.is_asked and owns.step != self.step:
            why = f"nothing was pushed in step {self.step - 1}, so it is not known what is each rank's own"
            raise CoveyError(NOT_SAVED, why, "save at the end of a step in which something is pushed")
        return Boundary(step, owns.each)

    def recover(
        self,
        has_own: bool,
        known: Mapping[str, Array] | None = None,
        timeout_s: float = HEAL_S,
        within_s: float = WITHIN_S,
    ) -> Stepwise[Recovered]:
        """The state with which a successor continues, as in `Healing.recover`."""
        have, taken = yield from self._taking.state(known or {}, timeout_s, within_s, self._like)
        gather, owns = self.gather, taken.arrays.pop(OWNS, None)
        if gather is not None and owns is not None:
            gather.go_on_with(owns_of_array(owns, gather.ranks))
        own = self._own_at(have) if has_own else None
        found = None if own is None else parsed(own)
        moved = self._kept_at(have.step)
        if own is not None and (self._rank in moved or not self._gathers_owns):
            self._own.append((have.step, own))
            yield Pause(self._mirrors(self._neighbours, have.step, own))
        if self._gathers_owns and moved and self._rank not in moved:
            names = f"{'rank' if len(moved) == 1 else 'ranks'} {', '.join(map(str, moved))}"
            why = f"{names} changed theirs (random generators) after the last push of the step before"
            yield Pause(words=f"may have another own state than the lost rank had: {why}, and it may have, too")
        self._is_new, self.step, self._first = False, have.step, have.first
        yield Pause(tuple(Tell(rank, About.DONE, self._incarnation) for rank in self._taking.survivors))
        return Recovered(have.step, taken.arrays, found, taken.rounds)

    def gone(self, ranks: Mapping[int, str]) -> None:
        """These ranks have left: this rank waits no more for their successors, or for messages of theirs."""
        self._gone.update(ranks)
        self._taking.gone.update(ranks)
        for rank in ranks:
            self._held.pop(rank, None)
            self._behind.pop(rank, None)

    def carried_here(self, incarnation: int) -> None:
        """This process is to carry its rank in the configuration that stands for this incarnation, and may never have
        stopped: what it says of the rank counts as that of a process that came by then."""
        self._as_of = max(self._as_of, incarnation)

    def carried_elsewhere(self, ranks: Mapping[int, int]) -> None:
        """Other processes carry these ranks from now on, and have what they need for that, or ask for it with at least
        the incarnation that is named for each: this rank waits no more for the processes that carried them, which may
        be gone, and takes no state from them."""
        self._taking.carried_elsewhere(ranks)
        for rank, incarnation in ranks.items():
            if self._newest.get(rank, -1) >= incarnation:
                continue  # who carries it now has asked already
            self._newest[rank] = incarnation
            for each in (self._asked, self._held, self._behind):
                each.pop(rank, None)
        if not self._held:
            self._gives = None

    def close(self) -> None:
        """Let the script continue, whoever waits for it."""
        self._closed = True

    @property
    def is_ahead(self) -> bool:
        """Whether some successor is a step behind this rank."""
        return bool(self._late())

    def ask_late(self) -> Says:
        """Questions to successors that are a step behind, whether they still are."""
        return tuple(Tell(rank, About.PAST, self._behind[rank]) for rank in self._late())

    def goes_on_from(self, other: "HealingMachine", owns: Owns) -> None:
        """This rank has what a successor needs: `other` is a rank of this process, and in the same step. `owns`: every
        rank's own state at its beginning."""
        self._is_new, self._first, self.step = False, other._first, other.step
        if self.gather is not None:
            self.gather.go_on_with(owns)

    @property
    def _gathers_owns(self) -> bool:
        """Whether all ranks gather every rank's own state; else neighbours keep this rank's."""
        return self.gather is not None and self.gather.has_owns

    # ---- who is a step behind ----

    def _let_others_catch_up(self) -> Stepwise[None]:
        """Wait for successors that are a step behind. A lost rank may have pushed for this step already: if the rounds
        of this step became complete before its successor got the results of the step before, no rank would have those
        any more."""
        if not self._late():
            return
        yield Pause(self.waits())
        in_vain, pause_s = True, FIRST_ASK_S
        try:
            while self._late() and not self._closed:
                yield Pause(self.ask_late(), until=lambda: self._closed or not self._late(), most_s=pause_s)
                pause_s = min(2 * pause_s, ASK_S)
            in_vain = False
        finally:
            if in_vain:
                self.gave_up()
        yield from self.waited()

    def _late(self) -> list[int]:
        return [rank for rank, step in self._behind.items() if step < self.step]

    # ---- what is this rank's own ----

    def _mirror_own(self, told: tuple[int, bytes] | None = None) -> Stepwise[None]:
        """Send this rank's newest own state to the neighbours; the script waits meanwhile. `told`: what they were told
        already."""
        yield Pause(self.waits())
        in_vain = True
        try:
            yield from self._mirror(*self._own[-1], self._own[-1] == told)
            in_vain = False
        finally:
            if in_vain:
                self.gave_up()
        yield from self.waited()

    def _mirrors(self, to: Sequence[int], step: int, data: bytes) -> Says:
        return tuple(Tell(each, About.MIRROR, step, data) for each in to)

    def _own_is(self, step: int, data: bytes) -> None:
        """Remember this rank's own state at the beginning of this step, the newest one."""
        if self._own and self._own[-1][0] == step:
            self._own.pop()
        self._own.append((step, data))

    def _mirror(self, step: int, data: bytes, is_told: bool) -> Stepwise[None]:
        """Repeat the own state until all neighbours have it. A lost neighbour has it as soon as it has a successor, for
        which all wait anyway. `is_told`: it was sent already."""
        pause_s, tell_s, kept = FIRST_ASK_S, self._now_s() + PATIENCE_S, (step, crc32(data))
        while True:
            left = [each for each in self._neighbours if self._mirrored.get(each) != kept]
            if not left:
                return
            if self._closed:
                raise HealingClosed("the client was closed before anybody kept what is this rank's own")
            if why := next((self._gone[each] for each in left if each in self._gone), ""):
                raise RankLeft(f"what is this rank's own cannot be kept: {why}")
            says, words = () if is_told else self._mirrors(left, step, data), ""
            if self._now_s() > tell_s:
                tell_s += PATIENCE_S
                names = ", ".join(map(str, left))
                words = f"pushes once rank {names} keeps what is its own, which was told {PATIENCE_S:.0f} s ago"
            yield Pause(says, words, until=partial(self._are_mirrored, kept), most_s=pause_s)
            pause_s, is_told = min(2 * pause_s, ASK_S), False

    def _are_mirrored(self, kept: tuple[int, int]) -> bool:
        untold = [each for each in self._neighbours if self._mirrored.get(each) != kept]
        return self._closed or not untold or any(each in self._gone for each in untold)

    # ---- from a link ----

    def told(self, told: ToldByRank) -> tuple[Says, str, bool]:
        """Handle a message of another rank. Returns the answers, a line for people, and whether a waiting thread may go
        on. A malformed message is ignored."""
        try:
            return self._heard(told)
        except (ValueError, msgspec.DecodeError, RecursionError):
            return (), "", False

    def _heard(self, told: ToldByRank) -> tuple[Says, str, bool]:
        says, words = Says(), ""
        about = About(told.about)
        match about:
            case About.MIRROR:
                self._keep(told.rank, told.step, bytes(told.data))
                says = (Tell(told.rank, About.MIRRORED, told.step, crc32(told.data).to_bytes(4, "little")),)
            case About.MIRRORED:
                is_ours = not self._is_new and told.step <= self.step + 1  # else told by a process before this
                if is_ours and told.step >= self._mirrored.get(told.rank, (-1, 0))[0]:
                    self._mirrored[told.rank] = told.step, int.from_bytes(told.data, "little")
            case About.NEED:
                says = self._need(told.rank, told.step, bytes(told.data).decode())
            case About.HAVE:
                says = self._have(told.rank, have_decoder.decode(told.data))
            case About.FETCH:
                says = self._give(told)
            case About.PIECE:
                if not self._is_new or told.step != self._incarnation:
                    return (), "", False
                says = self._taking.came(told.rank, told.data)
                return says, "", not says  # no thread waits for a single piece
            case About.NOTHING:
                if self._is_new and told.step == self._incarnation:
                    self._taking.gives_nothing(told.rank)
            case About.DONE:
                says = self._done(told.rank, told.step)
            case About.LIKE:
                words = self._compare(told.rank, likeness_decoder.decode(told.data))
                says = (Tell(told.rank, About.LIKED, told.step),)
            case About.LIKED:
                self._liked.add(told.rank)
            case About.PAST:
                if not self._is_new and self.step > told.step:
                    says = (Tell(told.rank, About.IS_PAST, told.step, self._as_of.to_bytes(8, "little")),)
            case About.IS_PAST:
                by = int.from_bytes(told.data, "little")  # a process before it may be connected yet, and be further
                if self._behind.get(told.rank) == told.step and by >= self._newest.get(told.rank, 0):
                    del self._behind[told.rank]
        return says, words, True

    # ---- who waits for a successor ----

    def saying(self) -> Stepwise[None]:
        """Repeat the offer of the state, which may be lost as its answer may, until no successor is waited for."""
        summed: HeldState | None = None
        while True:
            yield Pause(until=partial(self._gives_other_than, summed), most_s=SAY_S)
            if self._gives is None or self._closed:
                self._is_saying = False
                return
            gives = self._gives
            if gives is not summed:
                yield Pause(work=gives.make_sum)
                summed = gives
            held = tuple(self._held) if self._gives is gives else ()
            yield Pause(tuple(said for rank in held for said in self._what_is_here(rank, gives)))

    def _gives_other_than(self, gives: HeldState | None) -> bool:
        return self._gives is not gives or self._closed

    def _need(self, rank: int, incarnation: int, host: str) -> Says:
        if incarnation < self._newest.setdefault(rank, incarnation):
            return ()
        self._newest[rank] = incarnation
        self._is_at(rank, host)
        self._behind.pop(rank, None)
        if self._is_new:
            self._taking.lost(rank)
            return (Tell(rank, About.HAVE, 0, encode_have(Have(incarnation, is_new=True, host=self._beside.host))),)
        if self._waiting:
            return self._hold(rank)
        self._asked[rank] = None
        return ()

    def _is_at(self, rank: int, host: str) -> None:
        """Learn the host of a rank: one that has come to this host keeps none of this rank's own state any more."""
        self._beside.is_at(rank, host)
        self._neighbours = self._beside.neighbours

    def _compare(self, rank: int, like: Likeness) -> str:
        if self._like is None or self._likes.get(rank) == like:
            return ""
        self._likes[rank] = like
        why, script = unlike_versions(self._like, like), unlike_script(self._like, like)
        why = f"{why}: {CANNOT_HEAL}" if why else unlike_bits(self._like, like)
        if not why and not script:
            return ""
        whys, nexts = filter(None, (why, script)), (WHERE_ALIKE if why else "", ONE_SCRIPT if script else "")
        return f"is not like rank {rank}: {'; '.join(whys)}; next: {'; '.join(filter(None, nexts))}"

    def _keep_all(self, kept: Kept) -> None:
        for rank, own in kept.items():
            for step, data in own.items():
                self._keep(rank, step, data)

    def _keep(self, rank: int, step: int, data: bytes) -> None:
        """Keep another rank's own state, for its newest steps."""
        kept = self._kept.setdefault(rank, {})
        kept[step] = data
        for old in sorted(kept)[:-KEPT]:
            del kept[old]

    def _hold(self, rank: int) -> Says:
        if self._gives is None:
            owns = {} if self.gather is None else {OWNS: array_of_owns(self.gather.owns)}
            self._gives = HeldState({**self._state, **owns}, self.rounds_before, self._beside.host)
        self._held[rank] = None
        if not self._is_saying:
            self._is_saying = True
            self._say_on()
        return self._what_is_here(rank, self._gives)

    def _what_is_here(self, rank: int, gives: HeldState) -> Says:
        kept = {**self._kept, self._rank: dict(self._own)}
        own = kept.pop(rank, {})
        yours = self._likes.get(rank)
        gives.by = self._as_of
        haves = gives.haves(self._newest[rank], self.step, self._first, own, kept, self._like, yours)
        return tuple(Tell(rank, About.HAVE, self.step, encode_have(have)) for have in haves)

    def _give(self, asked: ToldByRank) -> Says:
        if asked.rank not in self._held or asked.step != self._newest[asked.rank]:
            return (Tell(asked.rank, About.NOTHING, asked.step),)  # it asks a process that was lost
        piece = None if self._gives is None else self._gives.piece(asked.data)
        return () if piece is None else (Tell(asked.rank, About.PIECE, asked.step, piece),)

    def _done(self, rank: int, incarnation: int) -> Says:
        if self._newest.get(rank) != incarnation or self._held.pop(rank, 0) == 0:
            return ()
        self._behind[rank] = self.step
        if not self._held:
            self._gives = None
        # the lost process may not have confirmed this; other ranks are neighbours only since it moved
        untold = [each for each in self._neighbours if each == rank or each not in self._mirrored]
        return tuple(Tell(each, About.MIRROR, step, data) for each in untold for step, data in self._own)

    # ---- a successor ----

    def _have(self, rank: int, have: Have) -> Says:
        if have.to != self._incarnation:
            return ()
        self._is_at(rank, have.host)
        if self._is_new:
            self._taking.have(rank, have)
        elif not have.is_new:
            return (Tell(rank, About.DONE, self._incarnation),)  # it missed the first DONE
        return ()

    def _own_at(self, have: Have) -> bytes | None:
        """The bytes of this rank's own state at the step of `have`; None when the job had just begun. StateLost."""
        if self.gather is not None and self.gather.has_owns:
            owns, moved = self.gather.owns, self._kept_at(have.step)
            if self._rank in moved:
                return moved[self._rank]
            if have.step not in (owns.step, have.first):
                why = f"what is its own was gathered at step {owns.step}, and the others are at step {have.step}"
                raise StateLost(CANNOT, why, FROM_CHECKPOINT)
            return owns.each[self._rank] or None
        kept = self._kept.get(self._rank, {})
        if have.step in kept or have.step == have.first:
            return kept.get(have.step)
        names = " and ".join(map(str, self._neighbours))
        if kept:
            why = f"rank {names} kept what is its own at step {max(kept)}, and the others are at step {have.step}"
        else:
            why = f"what is its own at step {have.step} was with rank {names}, lost too before it was told anew"
        raise StateLost(CANNOT, why, FROM_CHECKPOINT)

    def _kept_at(self, step: int) -> dict[int, bytes]:
        """By rank: the own state that neighbours keep of it at the beginning of this step."""
        return {rank: kept[step] for rank, kept in sorted(self._kept.items()) if step in kept}


def json_of(own: Callable[[], Any]) -> bytes:
    """The own state as JSON. CoveyError when it is too large."""
    value = own()
    data = (value if isinstance(value, JsonText) else json.dumps(value)).encode("ascii")
    if len(data) > OWN_BYTES_MAX:
        why = f"it has {len(data)} bytes as JSON, and goes to other ranks in each step"
        raise CoveyError("what is this rank's own is too large", why, f"keep it under {OWN_BYTES_MAX} bytes")
    return data


def parsed(own: bytes) -> Any:
    """The own state that a rank had sent to its neighbours. StateLost when it cannot be read."""
    try:
        return json.loads(own)
    except ValueError as error:
        why = f"what is its own was kept in {len(own)} bytes that cannot be read: {error}"
        raise StateLost(CANNOT, why, FROM_CHECKPOINT) from error

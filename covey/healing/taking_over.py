"""How a successor gets its state from the ranks that wait for it (`covey.healing.healing`).

    ask all      every other rank answers: what it holds, or that it is a successor itself
    contents     from those that are furthest: the names, types and shapes of their arrays, and their rounds
    state        its bytes, in pieces, from up to eight of them at once, each into the array where it belongs
    compare      the bytes that came with the checksum that each of them made of its own

A rank that is lost meanwhile gives no more, and the others give the rest. When all of these are lost the successor asks
again: another rank may have what it needs by then. That a rank was lost is known when its successor asks, or answers
that it gives nothing: a successor that carries several ranks asks as one of them.

It is a machine: it neither waits nor sends (`covey.healing.stepwise`), and time is given to it.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from covey.core.errors import OthersDone, StateLost
from covey.core.units import format_seconds, format_size
from covey.healing.held_state import Kept, contents_sum
from covey.healing.likeness import Likeness, unlike_bits, unlike_script, unlike_versions
from covey.healing.state_pieces import (
    CANNOT,
    FROM_CHECKPOINT,
    SAME,
    About,
    Have,
    PieceFetch,
    Stream,
    Which,
    array_of,
    bytes_of_state,
    contents_of,
    why_too_slow,
)
from covey.healing.stepwise import Pause, Stepwise
from covey.tensors.aggregator.rounds import Tell
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import Payload

ASK_S = 0.5
"""Seconds until a question is repeated; the first repeats come sooner, since there may be no connection yet."""
FIRST_ASK_S = 0.02
PATIENCE_S = 30.0
"""Seconds after which people are told what it waits for."""
HEAL_S = 600.0
"""Seconds that a successor asks at most: others may compute for a while before they wait."""
WITHIN_S = 300.0
"""Seconds that the state may take to arrive, while all others wait for it."""
SOURCES_MAX = 8
"""Most ranks that give at once: any two fill the link of one."""
LONGER = f"allow more (job.state(.., within_s=)), or {FROM_CHECKPOINT}"


class Taken(NamedTuple):
    """The state that came from the ranks that are furthest."""

    arrays: dict[str, Array]
    rounds: bytes


class Recovered(NamedTuple):
    """The state with which a successor begins."""

    step: int
    arrays: dict[str, Array]
    own: Any
    """The rank's own state, as JSON gives it; None: none was kept."""
    rounds: bytes
    """For each Block, its declaration and round, as the giving rank packed them."""


class HealingClosed(RuntimeError):
    """The client was closed while its rank asked for its state."""


class TakingOver:
    """The taking over of one successor."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        incarnation: int,
        now_s: Callable[[], float],
        is_closed: Callable[[], bool],
        keep: Callable[[Kept], None],
        host: bytes = b"",
        alike: Collection[int] = (),
    ) -> None:
        """`host`: this rank's host, which the others are told. `keep` is called with the own states that others kept;
        `is_closed` returns whether there is nothing to wait for any more; `now_s` is a clock that only goes forward.
        `alike`: the ranks that hold what this one needs; empty: all."""
        self._rank, self._incarnation, self._now_s = rank, incarnation, now_s
        self._is_closed, self._keep, self._host = is_closed, keep, host
        self._others = [*range(rank + 1, world_size), *range(rank)]
        """The other ranks, in the order in which they are asked: each successor begins with those after its own."""
        self._alike = [each for each in self._others if not alike or each in alike]
        """The other ranks that can give the state, in the order of `_others`."""
        self.gone: dict[int, str] = {}
        """Ranks that have left and answer nothing, with a sentence for people on each."""
        self._haves: dict[int, Have] = {}
        self._least: dict[int, int] = {}
        """By rank: the least incarnation of a process that gives its state. Earlier ones carry it no more."""
        self._parts: dict[int, set[int]] = {}
        self._fetching = PieceFetch(Which.CONTENTS, Stream(()))
        self._sources: list[int] = []
        """Ranks that give the stream under way."""
        self._changes = 0
        """Number of messages received that may end a wait."""

    # ---- what others say ----

    def have(self, rank: int, have: Have) -> None:
        if not have.is_new and have.by < self._least.get(rank, 0):
            return
        self._changes += 1
        self._keep(have.others)
        self._keep({self._rank: have.own})
        parts = self._parts.setdefault(rank, set())
        parts.add(have.part)
        if have.is_new or len(parts) >= have.parts:
            self._haves[rank] = have

    def lost(self, rank: int) -> None:
        """A successor of that rank asks, so the rank has lost its state."""
        self._changes += 1
        if rank in self._haves and not self._haves[rank].is_new:
            self._haves[rank] = Have(is_new=True)

    def gives_nothing(self, rank: int) -> None:
        """That rank was asked to give, and does not hold its state for this rank."""
        if rank in self._giving(self._sources):
            self.lost(rank)

    def carried_elsewhere(self, ranks: Mapping[int, int]) -> None:
        """Take nothing from processes of these ranks before the incarnation that is named for each: they may be gone,
        and who carries the ranks now asks nobody for their state."""
        for rank, incarnation in ranks.items():
            self._least[rank] = max(incarnation, self._least.get(rank, 0))
            if rank in self._haves and self._haves[rank].by < incarnation:
                self.lost(rank)

    def came(self, rank: int, data: Payload) -> tuple[Tell, ...]:
        """Take a piece. Returns the requests for the next pieces."""
        now_s, giving = self._now_s(), self._giving(self._sources)
        if rank in giving:  # else it may be of another step, late
            self._fetching.came(rank, data, now_s)
        if not self._fetching.left_bytes:
            self._changes += 1
        return self._asks(giving, now_s) if giving and self._fetching.left_bytes else ()

    # ---- the script's side ----

    @property
    def survivors(self) -> list[int]:
        """Ranks that wait until this rank is done."""
        return [rank for rank, have in self._haves.items() if not have.is_new]

    def state(
        self, known: Mapping[str, Array], timeout_s: float, within_s: float, like: Likeness | None = None
    ) -> Stepwise[tuple[Have, Taken]]:
        """The state of the ranks that are furthest, in arrays that are `known` here where type and shape are equal.
        StateLost when no rank has it, or it did not arrive within `within_s` seconds; HealingClosed. Pauses carry lines
        for people on what this waits for, and on where this process (`like`) computes other bits than the lost one."""
        began_s, alone = self._now_s(), False
        while True:
            yield from self._ask_all(began_s, timeout_s)
            sources = self._furthest()
            if not sources and alone:
                who = "all ranks of this job"
                if len(self._alike) < len(self._others):
                    who = f"all ranks that hold the same part of the state ({_names([self._rank, *self._alike])})"
                why = f"{who} were lost, and with them what it had learnt"
                raise StateLost(CANNOT, why, FROM_CHECKPOINT)
            if not sources:  # another one may have what it needs by now
                alone, self._haves, self._parts, self._sources = True, {}, {}, []
                continue
            alone, have = False, self._haves[sources[0]]
            if like is not None:
                yield Pause(words=self._unlike(like, sources[0]))
            found = yield from self._taken(sources, have, known, within_s)
            if found is not None:
                return have, found

    # ---- inside ----

    def _taken(
        self, sources: list[int], have: Have, known: Mapping[str, Array], within_s: float
    ) -> Stepwise[Taken | None]:
        """The state from these ranks; None: all of them were lost meanwhile."""
        data = bytearray(have.contents_bytes)
        if not (yield from self._fetch(Which.CONTENTS, [memoryview(data)], sources, within_s)):
            return None
        if contents_sum(data) != have.contents_sum:
            why = f"what rank {sources[0]} says of its arrays did not come as it was said"
            raise StateLost(CANNOT, why, FROM_CHECKPOINT)
        contents = contents_of(data, sources[0])
        arrays = {item.name: array_of(item, known.get(item.name)) for item in contents.items}
        places = [bytes_of_state(array) for array in arrays.values()]
        if not (yield from self._fetch(Which.STATE, places, sources, within_s)):
            return None
        found = yield Pause(work=Stream(places).checksum)
        return Taken(arrays, contents.rounds) if (yield from self._is_theirs(found, sources)) else None

    def _unlike(self, like: Likeness, source: int) -> str:
        """A line for people when this process computes other bits than the lost rank, if some rank knows its likeness,
        or runs another script than the rank that gives; empty when not. StateLost when versions differ from those of
        the rank that gives."""
        other = self._haves[source].like
        lost = next((have.yours for have in self._haves.values() if have.yours is not None), other)
        if other is not None and (why := unlike_versions(like, other)):
            raise StateLost(CANNOT, f"compared with rank {source}, {why}", SAME)
        found = []
        if lost is not None and (why := unlike_bits(like, lost)):
            differs = "takes over from a rank that computed otherwise, and last bits of the result will differ"
            found.append(f"{differs}: {why}")
        if other is not None and (why := unlike_script(like, other)):
            found.append(f"takes over, and runs another script than rank {source}, which gives the state: {why}")
        return "; ".join(found)

    def _ask_all(self, began_s: float, timeout_s: float) -> Stepwise[None]:
        told_s, pause_s = self._now_s(), FIRST_ASK_S
        while silent := [rank for rank in self._others if rank not in self._haves]:
            needs = tuple(Tell(rank, About.NEED, self._incarnation, self._host) for rank in silent)
            yield Pause(needs, until=self._all_answered, most_s=pause_s)
            self._raise_if_closed()
            if left := [rank for rank in silent if rank in self.gone]:
                raise OthersDone(CANNOT, self.gone[left[0]], FROM_CHECKPOINT)
            pause_s = min(2 * pause_s, ASK_S)
            now_s, names = self._now_s(), _names(silent)
            if now_s > began_s + timeout_s:
                why = f"rank {names} did not answer within {format_seconds(timeout_s)}"
                raise StateLost(CANNOT, why, "submit the job again")
            if now_s > told_s + PATIENCE_S:
                told_s = now_s
                yield Pause(words=f"took over from a rank that was lost, and asks rank {names} for what it needs")

    def _all_answered(self) -> bool:
        silent = len(self._haves) < len(self._others)
        return self._is_closed() or not silent or any(rank not in self._haves for rank in self.gone)

    def _furthest(self) -> list[int]:
        """The ranks that give: of those that hold what this one needs, the ones that are furthest. StateLost when they
        do not hold the same arrays."""
        survivors = {rank: self._haves[rank] for rank in self._alike if not self._haves[rank].is_new}
        step = max((have.step for have in survivors.values()), default=0)
        sources = [rank for rank, have in survivors.items() if have.step == step]
        unlike = [rank for rank in sources if survivors[rank].contents_sum != survivors[sources[0]].contents_sum]
        if unlike:
            one, other = sorted((sources[0], unlike[0]))
            why = f"ranks {one} and {other} hold arrays of other names, types or shapes"
            raise StateLost(CANNOT, why, "give job.state the same on every rank")
        return sources

    def _giving(self, sources: list[int]) -> list[int]:
        """The sources that were not lost since, at most `SOURCES_MAX`."""
        return [rank for rank in sources if not self._haves[rank].is_new][:SOURCES_MAX]

    def _fetch(self, which: Which, places: list[memoryview], sources: list[int], within_s: float) -> Stepwise[bool]:
        """Fetch a stream. Whether all of it came; False: all sources were lost meanwhile."""
        stream = Stream(places)
        fetching, began_s = PieceFetch(which, stream), self._now_s()
        told_s = began_s
        self._fetching, self._sources = fetching, sources
        while fetching.left_bytes:
            self._raise_if_closed()
            giving, now_s = self._giving(sources), self._now_s()
            if not giving:
                return False
            if why := why_too_slow(fetching.came_bytes, len(stream), now_s - began_s, within_s):
                raise StateLost(CANNOT, f"its state comes too slowly: {why}", LONGER)
            words = ""
            if now_s > told_s + PATIENCE_S:
                told_s, came = now_s, f"{format_size(fetching.came_bytes)} of {format_size(len(stream))}"
                words = f"takes its state over from rank {_names(giving)}: {came} by now"
            yield self._pause(self._asks(giving, now_s), words)
        return True

    def _asks(self, sources: list[int], now_s: float) -> tuple[Tell, ...]:
        asks = self._fetching.asks(sources, now_s)
        return tuple(Tell(rank, About.FETCH, self._incarnation, piece) for piece, rank in asks)

    def _pause(self, says: tuple[Tell, ...] = (), words: str = "") -> Pause:
        """A pause until something was received."""
        changes = self._changes
        return Pause(says, words, until=lambda: self._is_closed() or self._changes != changes, most_s=ASK_S)

    def _is_theirs(self, found: int, sources: list[int]) -> Stepwise[bool]:
        """Whether the bytes that came are those that the sources hold; False: all sources were lost meanwhile.
        StateLost when they differ."""
        while late := [rank for rank in self._giving(sources) if self._haves[rank].state_sum is None]:
            self._raise_if_closed()
            yield self._pause(tuple(Tell(rank, About.FETCH, self._incarnation) for rank in late))
        giving = self._giving(sources)
        unlike = [rank for rank in giving if self._haves[rank].state_sum != found]
        if unlike:
            why = f"what came is not what rank {_names(unlike)} holds: what is to be the same on every rank differs"
            raise StateLost(CANNOT, why, f"change nothing of it before a step's results are there; {FROM_CHECKPOINT}")
        return bool(giving)

    def _raise_if_closed(self) -> None:
        if self._is_closed():
            raise HealingClosed("the client was closed while its rank took over from one that was lost")


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))

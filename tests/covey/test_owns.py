"""Every rank's own state, gathered by all ranks in each step: rows, their sums, and what follows from these."""

import threading
import time
from collections.abc import Callable
from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.errors import CoveyError, StateLost
from covey.healing import owns
from covey.healing.healing import Healing
from covey.healing.machine import OWNS, HealingMachine
from covey.healing.neighbours import HealedRank
from covey.healing.own_gather import UNREAD_MAX, OwnGather
from covey.healing.owns import CALM, QUIET_MAX, ROOM, Owns, RowPlan
from covey.healing.state_pieces import About, have_decoder
from covey.tensors.aggregator.rounds import ToldByRank
from covey.tensors.numbers.sum_order import Order
from tests.covey.test_healing_words import Words, until, waits
from tests.families import examples
from tests.quiet import until_blocked

PRINTABLE = st.text(st.characters(min_codepoint=1, max_codepoint=127), max_size=900)
SHORT_S = 0.1


def total(rows: list[Any]) -> bytes:
    """The sum of the rows, added as aggregators add them."""
    found: bytes = reduce(np.add, rows).tobytes()
    return found


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(PRINTABLE, PRINTABLE, st.booleans()), min_size=1, max_size=5), st.data())
def test_what_each_rank_says_arrives_as_it_left(said: list[tuple[str, str, bool]], data: Any) -> None:
    """Characters are added as numbers, four in one; a part of the earlier state may stay unchanged."""
    ranks = len(said)
    before, now = [], []
    for old, new, is_given in said:
        at = data.draw(st.integers(0, len(old)))
        before.append(old.encode())
        now.append((old[:at] + new + old[at:]).encode() if is_given else None)
    room = owns.larger(ROOM, max(len(each or b"") for each in now))
    rows = [owns.rows_of(rank, ranks, before[rank], now[rank], room) for rank in range(ranks)]
    whole = total(rows)
    found = owns.merged(before, whole)
    assert list(found) == [old if new is None else new for old, new in zip(before, now, strict=True)]
    assert owns.room_needed(whole, ranks)[1] == any(each is not None for each in now)


def test_every_ascii_character_passes_through_an_addition_anywhere_in_a_number() -> None:
    """Minus zero, infinity and NaN need a character above 127."""
    each = bytes(range(1, 128))
    for shift in range(4):
        now = b"x" * shift + each + each[::-1]
        rows = [owns.rows_of(0, 2, b"", now, 400), owns.rows_of(1, 2, b"", b"y", 400)]
        assert owns.merged([b"", b""], total(rows)) == (now, b"y")


def test_of_much_only_what_differs_travels() -> None:
    before = b"place 1, " + b"w" * 7000
    now = b"place 22, " + b"w" * 7000
    begins, ends = owns.unchanged(before, now)
    assert before[:begins] + before[len(before) - ends :] == now[:begins] + now[len(now) - ends :]
    assert begins + ends > len(now) - ROOM, "a few more than differ"
    assert owns.unchanged(now, now) == (len(now), 0)
    rows = owns.rows_of(0, 2, before, now, ROOM)
    assert rows.nbytes == 2 * owns.row_bytes(ROOM) and owns.merged([before, b""], rows.tobytes()) == (now, b"")


def test_rows_grow_once_more_is_needed_again_and_again_and_shrink_after_calm_steps() -> None:
    once = owns.next_plan(RowPlan(), 7000, True)
    assert once.room == ROOM, "as at first, when all of it is new"
    assert owns.next_plan(once, 10, True) == RowPlan()
    grown = owns.next_plan(once, 7000, True)
    assert grown.room >= 7000
    plan = grown
    for _ in range(CALM):
        plan = owns.next_plan(plan, 20, True)
    assert plan.room == grown.room // 2
    quiet = owns.next_plan(RowPlan(), 0, False)
    assert quiet.is_asked and not owns.next_plan(quiet, 0, False).is_asked, (
        "a script may ask whether to stop until then"
    )
    assert owns.next_plan(quiet, 0, True) == RowPlan()


def test_what_is_no_such_array_is_refused() -> None:
    with pytest.raises(StateLost, match="what is each rank's own cannot be read"):
        owns.owns_of_array(np.zeros(5, np.uint8), 2)
    with pytest.raises(StateLost, match="the own of 2 ranks, not 3"):
        owns.owns_of_array(owns.array_of_owns(Owns(4, (b"a", b""))), 3)


class PlayedSums:
    """A stand-in that adds rows of ranks in threads; a result is there once all have pushed."""

    part_bytes = 1 << 16
    order = "tree"

    def __init__(self, ranks: int) -> None:
        self.ranks, self.pushed, self.changed = ranks, list[tuple[str, Any]](), threading.Condition()

    def of_a_rank(self) -> Any:
        rounds = dict[str, int]()

        def push(name: str, data: Any) -> None:
            rounds[name] = rounds.get(name, 0) + 1
            with self.changed:
                self.pushed.append((f"{name} {rounds[name]}", data))
                self.changed.notify_all()

        def wait(name: str, waits: object, out: None) -> Any:
            key = f"{name} {rounds[name]}"
            with self.changed:
                assert self.changed.wait_for(lambda: len(self._of(key)) == self.ranks, 10.0)
                return reduce(np.add, self._of(key))

        return SimpleNamespace(
            part_bytes=1 << 16, order="tree", is_declared=lambda name: True, push_soon=push, wait=wait
        )

    def _of(self, key: str) -> list[Any]:
        return [data for name, data in self.pushed if name == key]


def gathers(ranks: int) -> tuple[PlayedSums, list[OwnGather]]:
    sums = PlayedSums(ranks)
    return sums, [OwnGather(rank, ranks, 0, sums.of_a_rank()) for rank in range(ranks)]


def ended(gather: OwnGather) -> None:
    while (name := gather.awaited) is not None:
        if gather.came(rows_of(gather)(name).tobytes()):
            gather.push_again()


def rows_of(gather: OwnGather) -> Callable[[str], Any]:
    """A function that waits for the rows."""
    sums: Any = gather._sums
    return lambda name: sums.wait(name, None, None)


def stepped(each: list[OwnGather], step: int, said: list[bytes | None]) -> None:
    for gather, own in zip(each, said, strict=True):
        gather.begin(step, own)
    threads = [threading.Thread(target=ended, args=(gather,)) for gather in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)


def test_what_was_gathered_in_a_step_is_of_the_next_one() -> None:
    _, each = gathers(3)
    for step in range(2 * UNREAD_MAX + 3):
        said = [f"rank {rank} at {step} ".encode() * (1 + 40 * (step % 5 == rank)) for rank in range(3)]
        before = each[0].owns
        stepped(each, step, [*said[:2], None])
        assert [gather.owns for gather in each] == [before] * 3, "a successor begins with this step"
        for gather in each:
            gather.step_begins()
        assert all(gather.owns == each[0].owns for gather in each)
        assert each[0].owns.each == (*said[:2], b"") and each[0].owns.step == step + 1


def test_a_rank_that_took_over_goes_on_with_what_another_one_has() -> None:
    _, each = gathers(2)
    for step in range(3):
        stepped(each, step, [b"a" * 500 + b"%d" % step, b"b" * step])
        for gather in each:
            gather.step_begins()
    sums, fresh = gathers(2)
    known = owns.owns_of_array(owns.array_of_owns(each[1].owns), 2)
    for gather in fresh:
        gather.go_on_with(known)
    assert [gather.owns for gather in fresh] == [known] * 2
    stepped(fresh, 3, [b"a" * 500 + b"9", b"c"])
    fresh[0].step_begins()
    assert fresh[0].owns.each == (b"a" * 500 + b"9", b"c")
    assert {name for name, _ in sums.pushed} == {f"{owns.name_of(ROOM)} 1"}, "only what differs"


def test_nothing_is_pushed_any_more_where_no_rank_has_anything_of_its_own() -> None:
    sums, each = gathers(2)
    for step in range(4):
        stepped(each, step, [None, None])
        for gather in each:
            gather.step_begins()
    assert len(sums.pushed) == 2 * QUIET_MAX
    with pytest.raises(CoveyError, match="not known whether all ranks stop"):
        _ = each[0].stops


def healing_of(gather: OwnGather, words: Words, rank: int = 0, incarnation: int = 0) -> Healing:
    words.to = Healing(HealedRank(rank, 2, incarnation), words, lambda: b"rounds", gather=gather)
    return words.to


def test_no_result_is_given_out_before_what_is_every_ranks_own_is_here() -> None:
    words, done = Words(), threading.Event()
    _, each = gathers(2)
    healing = healing_of(each[0], words)
    healing.begin({})
    healing.before_push(lambda: [1])
    assert not words.of(About.MIRROR), "no neighbour is told"

    def use(_: Callable[[], None] | None = None) -> None:
        healing.gathered(rows_of(each[0]))
        done.set()

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    until_blocked(thread, Healing.gathered)
    assert not done.is_set()
    each[1].begin(0, b"[2]")
    assert done.wait(10.0)
    healing.end({})
    assert each[0].owns == Owns(1, (b"[1]", b"[2]"))


def test_a_rank_that_waits_gives_what_is_every_ranks_own_although_it_waits_for_that() -> None:
    """The thread that receives from other ranks must not wait for the thread that waits for a sum."""
    words, result = Words(), threading.Event()
    _, each = gathers(2)
    healing = healing_of(each[0], words)
    healing.begin({"w": np.ones(3, np.float32)})
    healing.before_push(lambda: [1])
    end = threading.Thread(target=healing.gathered, args=(rows_of(each[0]),), daemon=True)
    end.start()
    waits(healing, result)
    asked = threading.Thread(target=healing.told, args=(ToldByRank(1, About.NEED, 1, b""),), daemon=True)
    asked.start()
    asked.join(10.0)
    assert not asked.is_alive(), "it waits as well"
    assert end.is_alive()
    assert have_decoder.decode(words.of(About.HAVE)[-1].data).contents_bytes
    each[1].begin(0, b"[2]")
    end.join(10.0)
    result.set()


@pytest.mark.parametrize(("gathered_at", "given"), [(5, "[7]"), (4, None)])
def test_a_successor_takes_what_is_its_own_from_any_rank_that_is_furthest(gathered_at: int, given: str | None) -> None:
    """No rank has the own state of a step in which nothing was gathered."""
    words = Words()
    _, each = gathers(2)
    healing = healing_of(each[1], words, rank=1, incarnation=1)
    found: list[object] = []

    def recover() -> None:
        try:
            found.append(healing.recover(lambda text: None, True))
        except StateLost as error:
            found.append(error)

    thread = threading.Thread(target=recover, daemon=True)
    thread.start()
    until(lambda: words.of(About.NEED))
    state = {
        "w": np.arange(3, dtype=np.float32),
        OWNS: owns.array_of_owns(Owns(gathered_at, (b"[6]", b"[7]"))),
    }
    words.has(0, 1, 5, state)
    thread.join(10.0)
    if given is None:
        assert isinstance(found[0], StateLost) and "was gathered at step 4, and the others are at step 5" in str(
            found[0]
        )
    else:
        assert found[0].own == [7] and list(found[0].arrays) == ["w"]  # type: ignore[attr-defined]
        assert each[1].owns.each == (b"[6]", b"[7]")


def test_what_is_too_large_is_refused_with_its_size() -> None:
    healing = healing_of(gathers(2)[1][0], Words())
    healing.begin({})
    with pytest.raises(Exception, match="it has 70002 bytes as JSON"):
        healing.before_push(lambda: "x" * 70_000)


def test_a_second_thread_pushes_only_once_the_first_has_pushed_its_row() -> None:
    sums, each = gathers(2)
    healing, order = healing_of(each[0], Words()), list[str]()
    healing.begin({})

    def slow() -> list[int]:
        time.sleep(SHORT_S)
        order.append("row")
        return [1]

    def push(name: str) -> None:
        healing.before_push(slow)
        order.append(name)

    threads = [threading.Thread(target=push, args=(name,), daemon=True) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert order[0] == "row" and sorted(order[1:]) == ["a", "b"] and len(sums.pushed) == 1


def rows_at(gather: OwnGather, step: int) -> Any:
    """The rows that this rank pushes in a step."""
    sums: Any = gather._sums
    gather.begin(step, None)
    return sums.pushed.pop()


class KeptRows:
    """A stand-in that only keeps what is pushed."""

    def __init__(self) -> None:
        self.part_bytes = 1 << 16
        self.order: Order = "tree"
        self.pushed: list[Any] = []

    def is_declared(self, name: str) -> bool:
        return True

    def declare(self, declared: object, data: object) -> None: ...

    def push_soon(self, name: str, data: Any) -> None:
        self.pushed.append(data)


def test_nobody_stops_alone_by_what_only_a_lost_rank_had_heard() -> None:
    """Rank 0 has heard, and is lost with what it sums once rank 1 has the rows; its successor has not heard."""
    heard = [True, False, False]
    each = [OwnGather(rank, 3, 0, KeptRows(), lambda rank=rank: heard[rank]) for rank in range(3)]  # type: ignore[misc]
    first = [rows_at(gather, 0) for gather in each]
    assert not each[1].came(total(first))
    heard[0] = False
    each[0] = OwnGather(0, 3, 0, KeptRows(), lambda: heard[0])
    again = total([rows_at(each[0], 0), *first[1:]])
    assert not each[0].came(again) and not each[2].came(again)
    told = []
    for step in range(1, 4):
        assert [gather.stops for gather in each] in ([False] * 3, [True] * 3), f"after step {step - 1}"
        told.append(each[0].stops)
        for gather in each:
            gather.step_begins()
        rows = total([rows_at(gather, step) for gather in each])
        for gather in each:
            gather.came(rows)
    assert told == [False, False, True], "rank 1 knew alone in step 1, and all in step 2"


@pytest.mark.parametrize("mine", [0, 5])
def test_ranks_that_begin_elsewhere_do_not_go_on_together(mine: int) -> None:
    each = [OwnGather(rank, 2, 0, KeptRows()) for rank in range(2)]
    each[0].begins(mine, False, True)
    each[1].begins(0x1F, False, True)
    rows = total([rows_at(gather, 0) for gather in each])
    found = "checkpoint 00000005" if mine else "no checkpoint"
    with pytest.raises(CoveyError, match=f"this rank found {found}, and rank 1 checkpoint 0000001f"):
        each[0].came(rows)


def test_nothing_is_saved_where_it_is_not_known_what_is_each_ranks_own() -> None:
    machines, each = [], []
    for rank in range(2):
        gather = OwnGather(rank, 2, 0, KeptRows())
        machines.append(HealingMachine(HealedRank(rank, 2), lambda: 0.0, lambda: None, gather=gather))
        each.append(gather)

    def step(pushes: bool) -> None:
        rows = []
        for machine, gather in zip(machines, each, strict=True) if pushes else ():
            gather.begin(machine.step, b"%d" % machine.step)
            machine.has_said_own = True
            sums: Any = gather._sums
            rows.append(sums.pushed.pop())
            with pytest.raises(CoveyError, match="a round of a tensor is under way"):
                machine.boundary(b"")
        for gather in each if pushes else ():
            assert not gather.came(total(rows))

    for machine in machines:
        machine.begin({}, b"")
    with pytest.raises(CoveyError, match="other ranks may not have begun"):
        machines[0].boundary(b"")
    step(True)
    assert machines[0].boundary(b"") == (1, (b"0", b"0"), None)
    for machine in machines:
        machine.end({}, b"")
    assert machines[0].boundary(b"") == (1, (b"0", b"0"), None), "the same, once it has ended"
    for machine in machines:
        machine.end({}, b"")
    with pytest.raises(CoveyError, match="nothing was pushed in step 1"):
        machines[1].boundary(b"")

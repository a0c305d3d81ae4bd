"""The messages that one rank gets when another was lost: late ones, repeated ones, and those for an earlier process."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.errors import CoveyError, StateLost
from covey.healing.healing import Healing
from covey.healing.held_state import HeldState
from covey.healing.neighbours import Beside, HealedRank, neighbours_of
from covey.healing.state_pieces import About, encode_have, have_decoder
from covey.healing.taking_over import HealingClosed
from covey.tensors.aggregator.rounds import Tell, ToldByRank
from covey.wire.checksum import crc32
from tests.families import examples
from tests.quiet import until_blocked


class Words:
    """The messages that one rank sends to others, which give it what they hold if it asks for that."""

    def __init__(self) -> None:
        self.said: list[Tell] = []
        self.holds: dict[int, HeldState] = {}
        """The states that ranks give, by rank."""
        self.to: Healing

    def tell(self, said: Tell) -> None:
        self.said.append(said)
        if said.about is About.FETCH and said.rank in self.holds:
            threading.Thread(target=self._give, args=(said,), daemon=True).start()

    def _give(self, said: Tell) -> None:
        piece = self.holds[said.rank].piece(said.data)
        assert piece is not None
        self.to.told(ToldByRank(said.rank, About.PIECE, said.step, piece))

    def of(self, about: About) -> list[Tell]:
        return [said for said in self.said if said.about is about]

    def has(self, rank: int, to: int, step: int, state: dict[str, Any] | None = None, **more: object) -> None:
        """A rank answers that it has this state at the beginning of that step; `to`: which process asked."""
        held = HeldState({"w": np.arange(3, dtype=np.float32)} if state is None else state, b"rounds")
        held.make_sum()
        self.holds.setdefault(rank, held)
        have = held.haves(to, step, 0, {}, {})[0]
        self.to.told(ToldByRank(rank, About.HAVE, step, encode_have(msgspec.structs.replace(have, **more))))


def until(true: Callable[[], object]) -> None:
    end_s = time.monotonic() + 10.0
    while not true():
        assert time.monotonic() < end_s, "it never became true"
        time.sleep(0.001)


def made(words: Words, rank: int = 0, world_size: int = 2, incarnation: int = 0) -> Healing:
    words.to = Healing(HealedRank(rank, world_size, incarnation), words, lambda: b"rounds")
    return words.to


def sum_of(own: bytes) -> bytes:
    return crc32(own).to_bytes(4, "little")


def waits(healing: Healing, until_set: threading.Event) -> threading.Thread:
    """A thread of a script that waits for a tensor until the event is set."""

    def wait() -> None:
        with healing.waiting():
            until_set.wait(10.0)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until(lambda: healing.machine._waiting)
    return thread


def recovering(healing: Healing, has_own: bool = False) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []

    def recover() -> None:
        try:
            found.append(healing.recover(lambda text: None, has_own))
        except CoveyError as error:
            found.append(error)

    thread = threading.Thread(target=recover, daemon=True)
    thread.start()
    return thread, found


def test_a_survivor_goes_on_only_once_the_process_that_asks_now_is_done() -> None:
    words = Words()
    healing, result = made(words), threading.Event()
    healing.begin({"w": np.ones(3, np.float32)})
    thread = waits(healing, result)
    healing.told(ToldByRank(1, About.NEED, 2, b""))
    assert have_decoder.decode(words.of(About.HAVE)[-1].data).to == 2
    result.set()  # the lost rank had pushed all it was to
    healing.told(ToldByRank(1, About.DONE, 1, b""))
    until_blocked(thread, Healing._run)  # the process before it said so
    healing.told(ToldByRank(1, About.DONE, 2, b""))
    thread.join(10.0)
    assert not thread.is_alive()


def handed_over(healing: Healing, incarnation: int) -> None:
    """A successor takes the state of this step from a script that waits."""
    result = threading.Event()
    thread = waits(healing, result)
    healing.told(ToldByRank(1, About.NEED, incarnation, b""))
    result.set()
    healing.told(ToldByRank(1, About.DONE, incarnation, b""))
    thread.join(10.0)


def test_nothing_of_a_later_step_is_pushed_before_a_successor_is_past_its_first() -> None:
    """Pushes of the lost process for that step would complete rounds whose predecessor's result the successor lacks."""
    words, done = Words(), threading.Event()
    healing = made(words)
    healing.begin({"w": np.ones(3, np.float32)})
    handed_over(healing, 1)
    healing.before_push(None)
    assert not words.of(About.PAST), "it is in the same step"
    healing.end({"w": np.ones(3, np.float32)})

    def push() -> None:
        healing.before_push(None)
        done.set()

    threading.Thread(target=push, daemon=True).start()
    until(lambda: len(words.of(About.PAST)) > 1)
    assert words.of(About.PAST)[0] == Tell(1, About.PAST, 0) and not done.is_set()
    healing.told(ToldByRank(1, About.NEED, 2, b""))  # lost again: the next one begins where this rank is
    assert have_decoder.decode(words.of(About.HAVE)[-1].data).step == 1
    healing.told(ToldByRank(1, About.DONE, 2, b""))
    assert done.wait(10.0), "the next one is in this step"


def test_a_successor_says_when_it_is_past_the_step_that_it_began_in() -> None:
    words, done = Words(), threading.Event()
    healing = made(words)
    healing.begin({"w": np.ones(3, np.float32)})
    handed_over(healing, 1)
    healing.told(ToldByRank(1, About.PAST, 0, b""))
    assert not words.of(About.IS_PAST), "this rank is in it yet"
    healing.end({"w": np.ones(3, np.float32)})
    healing.told(ToldByRank(1, About.PAST, 0, b""))
    assert words.of(About.IS_PAST) == [Tell(1, About.IS_PAST, 0, bytes(8))], "and its incarnation"

    def push() -> None:
        healing.before_push(None)
        done.set()

    threading.Thread(target=push, daemon=True).start()
    until(lambda: words.of(About.PAST))
    asked = len(words.of(About.PAST))
    healing.told(ToldByRank(1, About.IS_PAST, 0, bytes(8)))  # by the process before it, which is connected yet
    until(lambda: len(words.of(About.PAST)) > asked)
    assert not done.is_set()
    healing.told(ToldByRank(1, About.IS_PAST, 0, (1).to_bytes(8, "little")))
    assert done.wait(10.0)


def test_a_late_question_of_a_process_that_is_over_is_not_taken_for_the_newest() -> None:
    words = Words()
    healing, result = made(words), threading.Event()
    healing.begin({"w": np.ones(3, np.float32)})
    thread = waits(healing, result)
    healing.told(ToldByRank(1, About.NEED, 3, b""))
    healing.told(ToldByRank(1, About.NEED, 2, b""))
    result.set()
    healing.told(ToldByRank(1, About.DONE, 2, b""))
    until_blocked(thread, Healing._run)
    healing.told(ToldByRank(1, About.DONE, 3, b""))
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_rank_that_does_not_hold_what_is_asked_for_says_so() -> None:
    """It came in the place of a process that said it holds the state: who asks would wait for it."""
    words = Words()
    healing, result = made(words), threading.Event()
    healing.begin({"w": np.ones(3, np.float32)})
    healing.told(ToldByRank(1, About.FETCH, 1, b""))
    assert words.of(About.NOTHING) == [Tell(1, About.NOTHING, 1)]
    thread = waits(healing, result)
    healing.told(ToldByRank(1, About.NEED, 1, b""))
    healing.told(ToldByRank(1, About.FETCH, 1, b""))
    assert len(words.of(About.NOTHING)) == 1, "it holds it, and says only what was asked for"
    result.set()
    healing.told(ToldByRank(1, About.DONE, 1, b""))
    thread.join(10.0)
    assert not thread.is_alive()


@pytest.mark.parametrize(("asked", "is_needed"), [(3 << 16, True), ((3 << 16) - 1, False)])
def test_news_of_who_carries_a_rank_that_come_after_its_question_change_nothing(asked: int, is_needed: bool) -> None:
    """A new process of an elastic job asked for the state before this process heard that there is one."""
    words = Words()
    healing, result = made(words), threading.Event()
    healing.begin({"w": np.ones(3, np.float32)})
    thread = waits(healing, result)
    healing.told(ToldByRank(1, About.NEED, asked, b""))
    healing.carried_elsewhere({1: 3 << 16})
    result.set()
    if is_needed:
        until_blocked(thread, Healing._run)
        healing.told(ToldByRank(1, About.DONE, asked, b""))
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_successor_does_not_count_what_the_process_before_it_was_told() -> None:
    words = Words()
    healing = made(words, rank=1, incarnation=2)
    thread, found = recovering(healing)
    until(lambda: words.of(About.NEED))
    assert words.of(About.NEED)[0] == Tell(0, About.NEED, 2)
    words.has(0, 1, 4)
    until_blocked(thread, Healing.recover)
    assert not found
    words.has(0, 2, 5)
    thread.join(10.0)
    assert healing.step == 5 and words.of(About.DONE) == [Tell(0, About.DONE, 2)]


def test_the_state_is_that_of_a_rank_that_is_furthest() -> None:
    words = Words()
    healing = made(words, rank=1, world_size=3, incarnation=1)
    thread, _ = recovering(healing)
    until(lambda: words.of(About.NEED))
    words.has(0, 1, 5)
    words.has(2, 1, 6)
    thread.join(10.0)
    assert healing.step == 6 and {said.rank for said in words.of(About.FETCH)} == {2}


def test_a_second_thread_pushes_only_once_the_first_has_told_what_is_the_ranks_own() -> None:
    words, order = Words(), list[str]()
    healing = made(words)
    healing.begin({})

    def push(name: str) -> None:
        healing.before_push(lambda: [1])
        order.append(name)

    threads = [threading.Thread(target=push, args=(name,), daemon=True) for name in "ab"]
    for thread in threads:
        thread.start()
    until(lambda: words.of(About.MIRROR))
    for thread in threads:
        until_blocked(thread, Healing.before_push)
    assert not order
    healing.told(ToldByRank(1, About.MIRRORED, 1, sum_of(b"[1]")))
    for thread in threads:
        thread.join(10.0)
    assert sorted(order) == ["a", "b"] and len({said.step for said in words.of(About.MIRROR)}) == 1


def test_what_is_its_own_counts_although_who_kept_it_was_lost_since() -> None:
    words = Words()
    healing = made(words, rank=1, world_size=3, incarnation=1)
    thread, found = recovering(healing, has_own=True)
    until(lambda: words.of(About.NEED))
    words.has(0, 1, 5, own={5: b"[7]"})
    healing.told(ToldByRank(0, About.NEED, 1, b""))  # another process of rank 0, which has nothing
    words.has(2, 1, 5)
    thread.join(10.0)
    assert found[0].own == [7]  # type: ignore[attr-defined]


def test_without_what_is_its_own_a_successor_does_not_go_on() -> None:
    words = Words()
    healing = made(words, rank=1, incarnation=1)
    thread, found = recovering(healing, has_own=True)
    until(lambda: words.of(About.NEED))
    words.has(0, 1, 5)
    thread.join(10.0)
    assert isinstance(found[0], StateLost) and "its own at step 5 was with rank 0" in str(found[0])


def test_ranks_that_hold_unlike_arrays_are_named() -> None:
    words = Words()
    healing = made(words, rank=2, world_size=3, incarnation=1)
    thread, found = recovering(healing)
    until(lambda: words.of(About.NEED))
    for rank, size in ((0, 3), (1, 4)):
        words.has(rank, 1, 5, {"w": np.zeros(size, np.float32)})
    thread.join(10.0)
    assert "ranks 0 and 1 hold arrays of other names" in str(found[0])


def test_nothing_is_pushed_before_a_neighbour_has_what_is_the_ranks_own() -> None:
    words, done = Words(), threading.Event()
    healing = made(words)
    healing.begin({})

    def push() -> None:
        healing.before_push(lambda: [1])
        done.set()

    thread = threading.Thread(target=push, daemon=True)
    thread.start()
    until(lambda: words.of(About.MIRROR))
    until_blocked(thread, Healing.before_push)
    assert not done.is_set()
    healing.told(ToldByRank(1, About.MIRRORED, 0, sum_of(b"[1]")))
    until_blocked(thread, Healing.before_push)
    assert not done.is_set(), "of the step before"
    healing.told(ToldByRank(1, About.MIRRORED, 1, sum_of(b"[1]")))
    assert done.wait(10.0)


def test_what_a_neighbour_says_it_keeps_of_an_earlier_process_is_not_waited_out() -> None:
    """The earlier process was a step further, so the answer to it is newer than any that this one gets in this step."""
    words, done = Words(), threading.Event()
    healing = made(words)
    healing.begin({})
    healing.told(ToldByRank(1, About.MIRRORED, 2, sum_of(b"[2]")))

    def push() -> None:
        healing.before_push(lambda: [1])
        done.set()

    thread = threading.Thread(target=push, daemon=True)
    thread.start()
    until(lambda: words.of(About.MIRROR))
    until_blocked(thread, Healing.before_push)
    assert not done.is_set()
    healing.told(ToldByRank(1, About.MIRRORED, 1, sum_of(b"[1]")))
    assert done.wait(10.0)


def test_what_was_told_while_the_script_computed_is_not_waited_for() -> None:
    words = Words()
    healing = made(words)
    healing.begin({})
    healing.drawn(lambda: [1])
    assert [said.data for said in words.of(About.MIRROR)] == [b"[1]"], "told, and not waited for"
    healing.told(ToldByRank(1, About.MIRRORED, 1, sum_of(b"[1]")))
    healing.before_push(lambda: [1])
    healing.drawn(lambda: [2])
    assert len(words.of(About.MIRROR)) == 1, "the step has been pushed in"


def test_what_was_told_too_early_is_told_again_and_waited_for() -> None:
    words, done = Words(), threading.Event()
    healing = made(words)
    healing.begin({})
    healing.drawn(lambda: [1])
    healing.told(ToldByRank(1, About.MIRRORED, 1, sum_of(b"[1]")))

    def push() -> None:
        healing.before_push(lambda: [2])  # something was drawn since
        done.set()

    thread = threading.Thread(target=push, daemon=True)
    thread.start()
    until(lambda: len(words.of(About.MIRROR)) > 1)
    until_blocked(thread, Healing.before_push)
    assert words.of(About.MIRROR)[1].data == b"[2]" and not done.is_set(), "the neighbour keeps what is older"
    healing.told(ToldByRank(1, About.MIRRORED, 1, sum_of(b"[2]")))
    assert done.wait(10.0)
    assert list(healing.machine._own) == [(1, b"[2]")]


def test_a_client_that_is_closed_pushes_nothing_that_nobody_could_repeat() -> None:
    healing = made(Words())
    healing.begin({})
    healing.close()
    with pytest.raises(HealingClosed):
        healing.before_push(lambda: [1])


def test_a_neighbour_says_which_bytes_it_keeps() -> None:
    words = Words()
    healing = made(words)
    healing.told(ToldByRank(1, About.MIRROR, 4, b"[7]"))
    assert words.of(About.MIRRORED) == [Tell(1, About.MIRRORED, 4, sum_of(b"[7]"))]


def test_what_is_too_large_to_be_kept_by_a_neighbour_is_refused_with_its_size() -> None:
    healing = made(Words())
    healing.begin({})
    with pytest.raises(CoveyError, match="it has 70002 bytes as JSON"):
        healing.before_push(lambda: "x" * 70_000)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 20), st.integers(0, 1 << 32), st.binary(max_size=300))
def test_whatever_other_ranks_say_ends_nothing(about: int, step: int, data: bytes) -> None:
    words = Words()
    for healing in (made(words), made(words, rank=1, incarnation=1)):
        healing.begin({"w": np.ones(3, np.float32)})
        healing.told(ToldByRank(1 - healing.machine._rank, about, step, data))
        assert healing.step == 0


def test_neighbours_are_on_other_hosts_where_there_are_some() -> None:
    for world_size, each in ((4, 1), (4, 2), (8, 4), (6, 3), (5, 5), (2, 1), (7, 3)):
        for rank in range(world_size):
            here = range(rank // each * each, min(world_size, rank // each * each + each))
            found = neighbours_of(rank, here, world_size)
            assert rank not in found and 1 <= len(found) <= 2
            assert len(here) == world_size or not set(found) & set(here)
    assert neighbours_of(0, range(1), 1) == []


def test_who_has_come_to_a_ranks_host_keeps_nothing_of_it_any_more() -> None:
    """It would be lost with that rank. One that moves away may keep it again; one without a host changes nothing."""
    beside = Beside(HealedRank(0, 4, 0, range(1), "h0"))
    assert beside.neighbours == (1, 3)
    for rank, host, then in ((3, "h0", (1, 2)), (1, "h0", (2,)), (2, "", (2,)), (3, "h3", (2, 3)), (0, "h9", (2, 3))):
        beside.is_at(rank, host)
        assert beside.neighbours == then, f"after rank {rank} said that it is on {host!r}"
    beside.is_at(2, "h0")
    beside.is_at(3, "h0")
    assert beside.neighbours == (1, 3), "all are here: better there than nowhere"


def test_a_successor_is_told_where_all_others_are_and_tells_them() -> None:
    """The successor has the environment of the time when its rank came to its host; other ranks have come since."""
    words = Words()
    of = words, lambda: b"rounds"
    old, new = Healing(HealedRank(0, 3, 0, [0], "h0"), *of), Healing(HealedRank(1, 3, 1, [1], "h0"), *of)
    old.begin({})
    old.told(ToldByRank(1, About.NEED, 1, b"h0"))
    assert old.machine._neighbours == (2,)
    with old.waiting():
        old.told(ToldByRank(1, About.NEED, 1, b"h0"))
        have = next(said for said in words.said if said.about == About.HAVE)
        new.told(ToldByRank(0, have.about, have.step, have.data))
        old.told(ToldByRank(1, About.DONE, 1, b""))
    assert new.machine._neighbours == (2,)


def test_people_read_for_whom_a_rank_waits_before_it_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.healing.machine.PATIENCE_S", 0.05)
    read: list[str] = []
    healing = Healing(HealedRank(0, 2), Words(), lambda: b"", read.append)
    healing.begin({})

    def push() -> None:
        with suppress(HealingClosed):
            healing.before_push(lambda: 7)

    thread = threading.Thread(target=push, daemon=True)
    thread.start()
    until(lambda: read)
    assert "pushes once rank 1 keeps what is its own" in read[0]
    healing.close()
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_script_that_fails_while_it_waits_does_not_wait_for_a_successor() -> None:
    healing = made(Words())
    healing.begin({"w": np.ones(3, np.float32)})
    with pytest.raises(ZeroDivisionError), healing.waiting():
        healing.told(ToldByRank(1, About.NEED, 1, b""))
        raise ZeroDivisionError
    assert not healing.machine._waiting

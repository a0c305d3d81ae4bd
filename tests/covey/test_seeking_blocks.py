"""Where a process gets the Blocks of the ranks that come to it."""

import random
from collections.abc import Mapping

from covey.job.blocks.block_wire import BlocksHeld, BlocksWanted
from covey.job.blocks.seeking import AGAIN_S, ASK_S, LOADS, WAITS, From, SeekingBlocks
from covey.wire.job import Carries
from plugins.scheduler.policy.carrying import carried_after, first_carried

BEFORE = Carries(1, {0: (0, 2), 1: (1, 3)})
GROWN = Carries(2, {0: (0,), 1: (1, 3), 2: (2,)})
SHRUNK = Carries(2, {0: (0, 2, 1, 3)})


def held(ask: int, *blocks: int, address: str = "10.0.0.1:5") -> BlocksHeld:
    return BlocksHeld(ask, address, (), {"data": blocks})


def where(seeking: SeekingBlocks, rank: int, now_s: float = 0.0) -> object:
    return seeking.where(rank, "data", rank, now_s)


def asked(seeking: SeekingBlocks, now_s: float = 0.0) -> dict[int, tuple[int, ...]]:
    return {process: wanted.ranks for process, wanted in seeking.questions(now_s)}


def test_a_process_that_begins_with_its_job_asks_nobody() -> None:
    seeking = SeekingBlocks(0, 0)
    seeking.carries(Carries(0, BEFORE.carried), 0.0)
    assert asked(seeking) == {} and where(seeking, 2) is LOADS and seeking.left_s(0.0) is None


def test_a_process_that_begins_later_asks_all_others() -> None:
    seeking = SeekingBlocks(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    assert asked(seeking) == {0: (2,), 1: (2,)} and where(seeking, 2) is WAITS
    seeking.answered(1, held(1, address=""))
    assert where(seeking, 2) is WAITS, "the other one may have it"
    seeking.answered(0, held(1, 2))
    assert where(seeking, 2) == From(0, "10.0.0.1:5")


def test_whose_blocks_are_sought_can_be_named_without_a_look_at_them() -> None:
    seeking = SeekingBlocks(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    assert seeking.sources() == {}
    seeking.answered(0, held(1, 2))
    assert seeking.sources() == {0: "10.0.0.1:5"}
    seeking.failed(0)
    assert seeking.sources() == {}


def test_nobody_has_a_block_once_all_have_said_so() -> None:
    seeking = SeekingBlocks(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    for process in (0, 1):
        seeking.answered(process, BlocksHeld(1))
    assert where(seeking, 2) is LOADS and seeking.left_s(0.0) is None


def test_who_carried_a_rank_before_is_asked_alone() -> None:
    seeking = SeekingBlocks(0, 0)
    seeking.carries(GROWN, 0.0)
    seeking.carries(Carries(3, {0: (0, 3), 1: (1,), 2: (2,)}), 1.0)
    assert asked(seeking, 1.0) == {1: (3,)}
    assert where(seeking, 0, 1.0) is LOADS, "its own ranks are not asked for"


def test_blocks_of_a_process_that_has_ended_are_loaded_at_once() -> None:
    seeking = SeekingBlocks(0, 0)
    seeking.carries(BEFORE, 0.0)
    seeking.carries(SHRUNK, 1.0)
    assert asked(seeking, 1.0) == {} and where(seeking, 1, 1.0) is LOADS


def test_a_process_that_ends_while_it_is_asked_is_waited_for_no_longer() -> None:
    seeking = SeekingBlocks(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    seeking.answered(0, held(1, 2))
    seeking.carries(Carries(3, {1: (1, 3), 2: (2, 0)}), 1.0)
    assert where(seeking, 2, 1.0) is WAITS and asked(seeking, 1.0) == {1: (2,)}
    seeking.answered(1, BlocksHeld(2))
    assert where(seeking, 2, 1.0) is LOADS and where(seeking, 0, 1.0) is LOADS
    silent = SeekingBlocks(2, 2 << 16)
    silent.carries(GROWN, 0.0)
    silent.carries(Carries(3, {1: (1, 3), 2: (2, 0)}), 1.0)
    assert asked(silent, 1.0) == {1: (2,)}, "an ended process that had not answered is asked no more"


def test_a_question_is_repeated_and_then_given_up() -> None:
    seeking = SeekingBlocks(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    assert asked(seeking) and not asked(seeking, AGAIN_S[0] / 2) and asked(seeking, AGAIN_S[0])
    assert where(seeking, 2, ASK_S - 0.01) is WAITS
    assert where(seeking, 2, ASK_S) is LOADS and asked(seeking, ASK_S + 1) == {} and seeking.left_s(ASK_S) is None


def test_an_answer_to_an_earlier_question_does_not_count() -> None:
    seeking = SeekingBlocks(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    seeking.carries(Carries(3, GROWN.carried), 0.0)
    assert not seeking.answered(0, held(1, 2)) and where(seeking, 2) is WAITS
    assert seeking.questions(0.0)[0][1] == BlocksWanted(2, (2,))


def test_an_older_configuration_is_not_obeyed() -> None:
    seeking = SeekingBlocks(0, 0)
    seeking.carries(GROWN, 0.0)
    seeking.carries(BEFORE, 0.0)
    assert seeking.ours == (0,)


def test_who_gave_nonsense_is_asked_for_nothing_more() -> None:
    seeking = SeekingBlocks(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    seeking.answered(0, held(1, 2))
    seeking.answered(1, BlocksHeld(1))
    seeking.failed(0)
    assert where(seeking, 2) is LOADS


def test_a_rank_that_goes_again_is_sought_no_longer() -> None:
    seeking = SeekingBlocks(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    seeking.carries(Carries(3, {0: (0, 2), 1: (1, 3)}), 0.0)
    assert seeking.left_s(0.0) is None


class Played:
    """Processes of one job that seek Blocks in virtual time; messages are lost, and processes end, as a seed says."""

    def __init__(self, seed: int, ranks: int = 8) -> None:
        self.draw, self.ranks, self.now_s, self.config = random.Random(seed), ranks, 0.0, 0
        self.carried: Mapping[int, tuple[int, ...]] = first_carried(ranks, self.draw.randint(1, ranks))
        self.seeking = {first: SeekingBlocks(first, 0) for first in self.carried}
        self.has: dict[int, set[int]] = {first: set() for first in self.carried}
        """Blocks in each process, one a rank."""
        self.loads = self.moves = 0
        self.tell()

    def tell(self) -> None:
        for first, each in self.seeking.items():
            each.carries(Carries(self.config, dict(self.carried)), self.now_s)
            assert set(each.ours) == set(self.carried[first])

    def change(self) -> None:
        ends = self.draw.sample(sorted(self.carried), self.draw.randint(0, len(self.carried) - 1))
        self.carried = carried_after(self.carried, ends, self.draw.randint(0, self.ranks - len(self.carried)))
        self.config += 1
        for first in ends:
            del self.seeking[first], self.has[first]
        for first in self.carried:
            if first not in self.seeking:
                self.seeking[first], self.has[first] = SeekingBlocks(first, self.config << 16), set()
        self.tell()

    def message(self) -> None:
        """One process asks, and those that hear it answer."""
        first = self.draw.choice(sorted(self.seeking))
        for process, wanted in self.seeking[first].questions(self.now_s):
            assert process in self.seeking, "an ended process is asked"
            if self.draw.random() < 0.7:
                found = tuple(sorted(self.has[process] & set(wanted.ranks)))
                self.seeking[first].answered(process, held(wanted.ask, *found, address="a" if found else ""))

    def use(self) -> None:
        """A process uses the Blocks of its ranks, as far as they do not have to be waited for."""
        first = self.draw.choice(sorted(self.seeking))
        for rank in self.carried[first]:
            if rank in self.has[first]:
                continue
            match self.seeking[first].where(rank, "data", rank, self.now_s):
                case From(process, _):
                    assert process in self.seeking, "an ended process is to give"
                    if rank not in self.has[process] or self.draw.random() < 0.2:  # or it began anew meanwhile
                        self.seeking[first].failed(process)
                        continue
                    self.has[first].add(rank)
                    self.has[process].discard(rank)  # once it is whole here
                    self.moves += 1
                case each if each is LOADS:
                    self.has[first].add(rank)
                    self.loads += 1

    def run(self) -> None:
        for _ in range(120):
            self.draw.choice([*[self.message] * 6, *[self.use] * 6, self.change])()
            self.now_s += self.draw.choice([0.0, 0.01, 0.1])
        self.now_s += ASK_S
        while any(not set(ranks) <= self.has[first] for first, ranks in self.carried.items()):
            self.use()  # nothing is waited for any longer
        owners = [rank for ranks in self.carried.values() for rank in ranks]
        assert sorted(owners) == list(range(self.ranks)), "each Block has one owner"


def test_each_process_has_its_blocks_in_the_end_whatever_is_lost() -> None:
    moves = loads = 0
    for seed in range(200):
        played = Played(seed)
        played.run()
        moves, loads = moves + played.moves, loads + played.loads
    assert moves > 200 < loads

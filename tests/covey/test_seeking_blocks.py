"""Where a process gets the Blocks of the ranks that come to it."""

from covey.job.blocks.block_wire import BlocksHeld, BlocksWanted
from covey.job.blocks.seeking import AGAIN_S, ASK_S, LOADS, WAITS, From, Seeking
from covey.wire.job import Carries

BEFORE = Carries(1, {0: (0, 2), 1: (1, 3)})
GROWN = Carries(2, {0: (0,), 1: (1, 3), 2: (2,)})
SHRUNK = Carries(2, {0: (0, 2, 1, 3)})


def held(ask: int, *blocks: int, address: str = "10.0.0.1:5") -> BlocksHeld:
    return BlocksHeld(ask, address, (), {"data": blocks})


def where(seeking: Seeking, rank: int, now_s: float = 0.0) -> object:
    return seeking.where(rank, "data", rank, now_s)


def asked(seeking: Seeking, now_s: float = 0.0) -> dict[int, tuple[int, ...]]:
    return {process: wanted.ranks for process, wanted in seeking.questions(now_s)}


def test_a_process_that_begins_with_its_job_asks_nobody() -> None:
    seeking = Seeking(0, 0)
    seeking.carries(Carries(0, BEFORE.carried), 0.0)
    assert asked(seeking) == {} and where(seeking, 2) is LOADS and seeking.left_s(0.0) is None


def test_a_process_that_begins_later_asks_all_others() -> None:
    seeking = Seeking(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    assert asked(seeking) == {0: (2,), 1: (2,)} and where(seeking, 2) is WAITS
    seeking.answered(1, held(1, address=""))
    assert where(seeking, 2) is WAITS, "the other one may have it"
    seeking.answered(0, held(1, 2))
    assert where(seeking, 2) == From(0, "10.0.0.1:5")


def test_nobody_has_a_block_once_all_have_said_so() -> None:
    seeking = Seeking(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    for process in (0, 1):
        seeking.answered(process, BlocksHeld(1))
    assert where(seeking, 2) is LOADS and seeking.left_s(0.0) is None


def test_who_carried_a_rank_before_is_asked_alone() -> None:
    seeking = Seeking(0, 0)
    seeking.carries(GROWN, 0.0)
    seeking.carries(Carries(3, {0: (0, 3), 1: (1,), 2: (2,)}), 1.0)
    assert asked(seeking, 1.0) == {1: (3,)}
    assert where(seeking, 0, 1.0) is LOADS, "its own ranks are not asked for"


def test_blocks_of_a_process_that_has_ended_are_loaded_at_once() -> None:
    seeking = Seeking(0, 0)
    seeking.carries(BEFORE, 0.0)
    seeking.carries(SHRUNK, 1.0)
    assert asked(seeking, 1.0) == {} and where(seeking, 1, 1.0) is LOADS


def test_a_process_that_ends_while_it_is_asked_is_waited_for_no_longer() -> None:
    seeking = Seeking(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    seeking.answered(0, held(1, 2))
    seeking.carries(Carries(3, {1: (1, 3), 2: (2, 0)}), 1.0)
    assert where(seeking, 2, 1.0) is WAITS and asked(seeking, 1.0) == {1: (2,)}
    seeking.answered(1, BlocksHeld(2))
    assert where(seeking, 2, 1.0) is LOADS and where(seeking, 0, 1.0) is LOADS
    silent = Seeking(2, 2 << 16)
    silent.carries(GROWN, 0.0)
    silent.carries(Carries(3, {1: (1, 3), 2: (2, 0)}), 1.0)
    assert asked(silent, 1.0) == {1: (2,)}, "an ended process that had not answered is asked no more"


def test_a_question_is_repeated_and_then_given_up() -> None:
    seeking = Seeking(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    assert asked(seeking) and not asked(seeking, AGAIN_S[0] / 2) and asked(seeking, AGAIN_S[0])
    assert where(seeking, 2, ASK_S - 0.01) is WAITS
    assert where(seeking, 2, ASK_S) is LOADS and asked(seeking, ASK_S + 1) == {} and seeking.left_s(ASK_S) is None


def test_an_answer_to_an_earlier_question_does_not_count() -> None:
    seeking = Seeking(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    seeking.carries(Carries(3, GROWN.carried), 0.0)
    assert not seeking.answered(0, held(1, 2)) and where(seeking, 2) is WAITS
    assert seeking.questions(0.0)[0][1] == BlocksWanted(2, (2,))


def test_an_older_configuration_is_not_obeyed() -> None:
    seeking = Seeking(0, 0)
    seeking.carries(GROWN, 0.0)
    seeking.carries(BEFORE, 0.0)
    assert seeking.ours == (0,)


def test_who_gave_nonsense_is_asked_for_nothing_more() -> None:
    seeking = Seeking(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    seeking.answered(0, held(1, 2))
    seeking.answered(1, BlocksHeld(1))
    seeking.failed(0)
    assert where(seeking, 2) is LOADS


def test_a_rank_that_goes_again_is_sought_no_longer() -> None:
    seeking = Seeking(2, 2 << 16)
    seeking.carries(GROWN, 0.0)
    seeking.carries(Carries(3, {0: (0, 2), 1: (1, 3)}), 0.0)
    assert seeking.left_s(0.0) is None

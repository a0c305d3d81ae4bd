"""Only one of several processes of one rank counts."""

from agent.jobs.socket.counted import SILENT_S, CountedProcesses
from covey.core.ids import JobId

RANK, SIBLING = (JobId("j1"), 1, 0), (JobId("j1"), 1, 1)
FIRST, SECOND = object(), object()


def test_the_first_that_steps_counts_until_it_is_gone() -> None:
    counted = CountedProcesses()
    assert [counted.counts(RANK, FIRST, False, 0.1, 0.0), counted.counts(RANK, SECOND, False, 0.1, 0.1)] == [
        True,
        False,
    ]
    assert counted.counts(RANK, FIRST, False, 0.1, 0.2) and counted.counts(SIBLING, SECOND, False, 0.1, 0.2)
    counted.gone(FIRST)
    assert counted.counts(RANK, SECOND, False, 0.1, 0.3)
    assert not counted.counts(RANK, FIRST, False, 0.1, 0.4)


def test_one_that_is_silent_for_long_is_replaced_but_not_one_whose_steps_take_long() -> None:
    counted = CountedProcesses()
    counted.counts(RANK, FIRST, False, 0.1, 0.0)
    assert not counted.counts(RANK, SECOND, False, 0.1, SILENT_S)
    assert counted.counts(RANK, SECOND, False, 0.1, SILENT_S + 0.1)
    counted.counts(SIBLING, FIRST, False, 60.0, 0.0)
    assert not counted.counts(SIBLING, SECOND, False, 0.1, 100.0)


def test_one_that_says_its_steps_is_believed_before_one_that_is_seen() -> None:
    counted = CountedProcesses()
    counted.counts(RANK, FIRST, False, 0.1, 0.0)
    assert counted.counts(RANK, SECOND, True, 0.1, 0.1)
    assert not counted.counts(RANK, FIRST, False, 0.1, 0.2)
    assert not counted.counts(RANK, FIRST, True, 0.1, 0.3)

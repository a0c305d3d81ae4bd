"""The owner to which a rank pushes, and the next one, when an owner hands its table over."""

from covey.core.ids import HostId, JobId
from covey.tensors.aggregator.present_owner import HANDOVER_S, PresentOwner
from covey.wire.job import AggregatorAt

RUN = 1 << 32


def at(epoch: int, handed_over: bool = False, run: int = RUN) -> AggregatorAt:
    return AggregatorAt(JobId("j1"), run + epoch, HostId("h1"), "127.0.0.1:1", b"s" * 16, 0, handed_over)


def connected(*told: AggregatorAt) -> PresentOwner:
    owner = PresentOwner()
    assert owner.told(at(1), False, 0.0)
    for each in told:
        owner.told(each, True, 0.0)
    return owner


def after(owner: PresentOwner) -> AggregatorAt | None:
    """The owner to which the rank goes when the connection ends."""
    assert owner.at is not None
    return owner.ended(owner.at)


def test_one_that_was_lost_is_left_at_once() -> None:
    owner = connected()
    assert owner.told(at(2), True, 0.0) and owner.at == at(2)


def test_one_that_hands_over_goes_on_until_its_connection_ends() -> None:
    owner = connected(at(2, True))
    assert owner.at == at(1) and not owner.overdue(HANDOVER_S)
    assert owner.ended(at(1)) is None, "another one of the same name"
    assert after(owner) == at(2, True) and owner.at == at(2, True)
    assert after(owner) is None, "nobody comes after that one"


def test_it_is_left_if_it_never_ends_the_connection() -> None:
    assert connected(at(2, True)).overdue(HANDOVER_S + 0.1)
    assert not connected().overdue(1e9)


def test_who_has_no_connection_waits_for_no_end() -> None:
    owner = connected()
    assert owner.told(at(2, True), False, 0.0) and owner.at == at(2, True)


def test_the_next_one_may_itself_be_lost_or_hand_over() -> None:
    owner = connected(at(2, True))
    assert owner.told(at(3), True, 0.0) and owner.at == at(3) and after(owner) is None
    owner = connected(at(2, True), at(3, True))
    assert after(owner) == at(3, True)


def test_an_older_word_that_comes_late_changes_nothing() -> None:
    owner = connected(at(3, True))
    assert not owner.told(at(2), True, 0.0) and not owner.told(at(3), True, 0.0)
    assert after(owner) == at(3, True)


def test_another_run_of_the_job_is_told_at_once() -> None:
    owner = connected()
    assert owner.told(at(0, True, run=2 * RUN), True, 0.0)

"""The owners of a job's tables as a rank knows them, and tells an agent that is back."""

from covey.core.ids import HostId, JobId
from covey.job.table_owners import TableOwners
from covey.wire.job import AggregatorAt, AggregatorLost, TableWanted


def at(epoch: int, table: int) -> AggregatorAt:
    return AggregatorAt(JobId("j1"), epoch, HostId("h1"), "127.0.0.1:1", b"s" * 16, table)


def test_each_table_has_epochs_of_its_own() -> None:
    owners = TableOwners()
    assert owners.moved(at(9, 0)) and owners.moved(at(3, 1))
    assert not owners.moved(at(2, 1)) and owners.moved(at(4, 1)) and not owners.moved(at(8, 0))
    assert sorted(owners.all(), key=lambda one: one.table) == [at(9, 0), at(4, 1)]


def test_an_owner_that_is_lost_is_said_again_until_there_is_a_newer_one() -> None:
    owners = TableOwners()
    owners.moved(at(3, 1))
    assert owners.wanted(2) == TableWanted(2, may_own=True)
    assert owners.lost(3, "reset", 1) == AggregatorLost(3, "reset", 1)
    assert owners.lost(1, "x" * 900, 2) == AggregatorLost(1, "x" * 500, 2)
    assert owners.again() == [
        TableWanted(2, may_own=True),
        AggregatorLost(3, "reset", 1),
        AggregatorLost(1, "x" * 500, 2),
    ]
    assert owners.moved(at(3, 1)), "the same one again is no news, and no answer"
    assert len(owners.again()) == 3
    owners.moved(at(4, 1))
    assert owners.lost(3, "an old word", 1) is None
    assert owners.again() == [TableWanted(2, may_own=True), AggregatorLost(1, "x" * 500, 2)]

"""What follows from a fact for everybody alike."""

from covey.core.ids import HostId, JobId
from plugins.facts import JobPlaced, Place, coordinator_place, owner_of_table

A, B, C = HostId("a"), HostId("b"), HostId("c")


def test_the_coordinator_is_where_the_lowest_live_rank_is() -> None:
    places = [Place(B, (2, 3), ()), Place(A, (0, 1), ()), Place(C, (4,), ())]
    assert coordinator_place(places, ()) == places[1]
    assert coordinator_place(places, {A}) == places[0]
    assert coordinator_place(places, {A, B, C}) is None


def test_a_place_that_lost_its_ranks_has_no_coordinator() -> None:
    places = [Place(A, (), ()), Place(B, (2, 3), ())]
    assert coordinator_place(places, ()) == places[1] and coordinator_place(places, {B}) is None


def test_a_table_without_a_named_owner_belongs_to_the_host_of_its_number() -> None:
    places = (Place(B, (0,), ()), Place(A, (1,), ()), Place(B, (2,), ()))
    placed = JobPlaced(JobId("j1"), 1, "default", 3, places, 4, owners=(C, HostId("")))
    assert [owner_of_table(placed, table) for table in range(4)] == [C, A, B, A]
    assert owner_of_table(JobPlaced(JobId("j1"), 1, "default", 3, (), 4), 0) is None

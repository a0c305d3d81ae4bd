"""A slab between two places: whichever of them is lost, the other serves, and nothing is left behind."""

from covey.core.ids import HostId
from plugins.memory.machine.borrowing import events as b
from plugins.memory.machine.borrowing.place import SlabPlace
from plugins.memory.messages import Done, Evict, Map, MrInfo, QueryMem, Renew
from tests.plugins.memory.tale import PAGE, SECRET, SLAB, Tale, noted, only, sent


class Move(Tale):
    """Slab 0 was evicted from `old` while hot and is open at `new`, being filled."""

    def __init__(self) -> None:
        super().__init__()
        self.old, self.old_epoch = self.mapped()
        asked = sent(self.hear(self.old, Evict("v", 0, self.old_epoch, 10.0)), QueryMem)
        self.epoch = asked[0][1].epoch
        ((self.new, _),) = sent(self.offers(asked, 5, 5), Map)
        only(self.hear(self.new, MrInfo("v", 0, self.epoch, "10.0.0.3:7", SECRET)), b.OpenSlab)
        assert noted(self.tell(b.SlabOpened("v", 0, self.epoch))) == ["moving"]

    @property
    def places(self) -> list[HostId | None]:
        slab = self.machine.volumes["v"].slabs[0]
        return [place.lender if place is not None else None for place in (slab.place, slab.next)]


def test_the_leases_of_both_places_are_renewed_for_as_long_as_it_moves() -> None:
    """A copy may take longer than a lease. Unrenewed, the lender would free the place that is being filled."""
    tale = Move()
    third_s = tale.machine.lease_s / 3
    both = {(tale.old, tale.old_epoch), (tale.new, tale.epoch)}
    for _ in range(4):
        renewed = sent(tale.tell(b.BorrowerTick({"v": [0]}, ()), third_s), Renew)
        assert {(host, slab.epoch) for host, renew in renewed for slab in renew.slabs} == both
    found = tale.tell(b.SlabCopied("v", 0, tale.epoch))
    assert only(found, b.CloseSlab).epoch == tale.old_epoch
    renewed = sent(tale.tell(b.BorrowerTick({"v": [0]}, ()), third_s), Renew)
    assert {(host, slab.epoch) for host, renew in renewed for slab in renew.slabs} == both, "what is left, until closed"
    tale.tell(b.SlabClosed("v", 0, tale.old_epoch))
    renewed = sent(tale.tell(b.BorrowerTick({"v": [0]}, ()), third_s), Renew)
    assert [(host, slab.epoch) for host, renew in renewed for slab in renew.slabs] == [(tale.new, tale.epoch)]


def test_when_the_new_place_fails_the_slab_leaves_the_old_one_for_the_disk() -> None:
    tale = Move()
    found = tale.tell(b.SlabFailed("v", 0, tale.epoch, "reset"))
    closed = [action.epoch for action in found if isinstance(action, b.CloseSlab)]
    assert closed == [tale.epoch, tale.old_epoch], "it was asked to leave: there is nothing to wait for"
    assert tale.places == [tale.old, None]
    assert sent(tale.tell(b.SlabClosed("v", 0, tale.epoch)), Done) == [(tale.new, Done("v", 0, tale.epoch))]
    assert sent(tale.tell(b.SlabClosed("v", 0, tale.old_epoch)), Done) == [(tale.old, Done("v", 0, tale.old_epoch))]
    assert tale.state() == "cold"


def test_when_the_old_place_fails_the_new_one_is_its_place() -> None:
    tale = Move()
    found = tale.tell(b.SlabFailed("v", 0, tale.old_epoch, "reset"))
    assert only(found, b.CloseSlab).epoch == tale.old_epoch
    assert tale.tell(b.SlabFailed("v", 0, tale.old_epoch, "reset")) == [], "told twice"
    found = tale.tell(b.SlabClosed("v", 0, tale.old_epoch))
    assert sent(found, Done) == [(tale.old, Done("v", 0, tale.old_epoch))]
    assert tale.places == [tale.new, None] and tale.state() == "mapped"
    assert tale.tell(b.SlabClosed("v", 0, tale.old_epoch)) == []
    assert tale.state() == "mapped"


def test_when_the_new_host_is_gone_only_that_place_is_closed() -> None:
    """The slab keeps its old place. Reference: §2.1, losing a lender touches its slabs only."""
    tale = Move()
    assert only(tale.tell(b.LenderLost(tale.new)), b.CloseSlab).epoch == tale.epoch
    assert tale.places == [tale.old, tale.new], "until it is closed"
    found = tale.tell(b.SlabClosed("v", 0, tale.epoch))
    assert sent(found, Done) == [(tale.new, Done("v", 0, tale.epoch))]
    assert only(found, b.CloseSlab).epoch == tale.old_epoch
    assert tale.places == [tale.old, None]


def test_when_the_old_host_is_gone_its_place_is_closed_once() -> None:
    tale = Move()
    assert only(tale.tell(b.LenderLost(tale.old)), b.CloseSlab).epoch == tale.old_epoch
    assert tale.tell(b.LenderLost(tale.old)) == [], "told twice"
    tale.tell(b.SlabClosed("v", 0, tale.old_epoch))
    assert tale.places == [tale.new, None] and tale.state() == "mapped"


def test_a_new_place_that_wants_it_back_before_it_is_filled_is_given_up() -> None:
    tale = Move()
    assert only(tale.hear(tale.new, Evict("v", 0, tale.epoch, 10.0)), b.CloseSlab).epoch == tale.epoch
    tale.tell(b.SlabClosed("v", 0, tale.epoch))
    assert tale.places == [tale.old, None]


def test_a_place_that_fails_before_it_is_known_open_is_closed_and_then_given_back() -> None:
    """A message that the process sends by itself overtakes its answers."""
    tale = Tale()
    asked = sent(tale.second(1000), QueryMem)
    epoch = asked[0][1].epoch
    ((taken, _),) = sent(tale.offers(asked, 5, 5), Map)
    tale.hear(taken, MrInfo("v", 0, epoch, "10.0.0.3:7", SECRET))
    found = tale.tell(b.SlabFailed("v", 0, epoch, "reset"))
    assert only(found, b.CloseSlab).epoch == epoch
    assert sent(found, Done) == [], "pages may have gone there already"
    assert sent(tale.tell(b.SlabClosed("v", 0, epoch)), Done) == [(taken, Done("v", 0, epoch))]


def test_a_place_that_was_filled_before_we_heard_that_it_is_open_is_moved_to_at_once() -> None:
    tale = Tale()
    old, old_epoch = tale.mapped()
    asked = sent(tale.hear(old, Evict("v", 0, old_epoch, 10.0)), QueryMem)
    epoch = asked[0][1].epoch
    ((new, _),) = sent(tale.offers(asked, 5, 5), Map)
    tale.hear(new, MrInfo("v", 0, epoch, "10.0.0.3:7", SECRET))
    assert tale.tell(b.SlabCopied("v", 0, epoch)) == []
    assert only(tale.tell(b.SlabOpened("v", 0, epoch)), b.CloseSlab).epoch == old_epoch


def test_a_slab_that_loses_its_place_while_others_are_asked_goes_on_asking() -> None:
    tale = Tale()
    old, old_epoch = tale.mapped()
    asked = sent(tale.hear(old, Evict("v", 0, old_epoch, 10.0)), QueryMem)
    assert only(tale.tell(b.SlabFailed("v", 0, old_epoch, "reset")), b.CloseSlab).epoch == old_epoch
    assert tale.state() == "lost"
    tale.offers(asked[:1], 5)
    assert sent(tale.tell(b.SlabClosed("v", 0, old_epoch)), Done) == [(old, Done("v", 0, old_epoch))]
    assert tale.state() == "asking"
    assert len(sent(tale.offers(asked[1:], 4), Map)) == 1


def test_when_its_process_began_anew_without_either_place_the_disk_serves_it() -> None:
    tale = Move()
    found = tale.tell(b.VolumeFound("v", 1, SLAB, PAGE, ()))
    gone = [(tale.old, Done("v", 0, tale.old_epoch)), (tale.new, Done("v", 0, tale.epoch))]
    assert sent(found, Done) == gone
    assert tale.places == [None, None] and tale.state() == "cold"


def test_when_its_process_has_only_the_place_it_was_leaving_that_one_is_left_in_time() -> None:
    """The grace of its lender began before the process was killed."""
    tale = Move()
    kept = SlabPlace(tale.old_epoch, tale.old, "10.0.0.2:7", SECRET)
    assert sent(tale.tell(b.VolumeFound("v", 1, SLAB, PAGE, ((0, kept),))), Done) == [
        (tale.new, Done("v", 0, tale.epoch))
    ]
    assert tale.places == [tale.old, None] and tale.state() == "moving"
    assert only(tale.tell(b.GraceOver("v", 0, tale.old_epoch)), b.CloseSlab).epoch == tale.old_epoch


def test_hole_5_while_one_slab_is_evicted_others_look_for_a_place() -> None:
    """The released code had one flag for all: nothing was mapped anywhere before the eviction was over."""
    tale = Tale(slabs=2)
    old, old_epoch = tale.mapped()
    asked = sent(tale.hear(old, Evict("v", 0, old_epoch, 10.0)), QueryMem)
    assert {query.index for _, query in asked} == {0} and tale.state(0) == "moving"
    assert {query.index for _, query in sent(tale.second(1000, 1000), QueryMem)} == {1}
    assert tale.state(1) == "asking"

"""What a borrower remembers of one slab and of one volume."""

import pytest

from covey.core import HostId
from plugins.memory.machine.slab import BorrowedSlab, BorrowedVolume, LenderSearch, SlabPlace, counted, names

A, B, C = HostId("a"), HostId("b"), HostId("c")


def place(lender: HostId, epoch: int = 1) -> SlabPlace:
    return SlabPlace(epoch, lender, "10.0.0.2:7", b"s" * 16)


def test_the_story_of_a_search_says_what_each_offered_and_who_was_silent() -> None:
    assert LenderSearch(1, (A, B), {B: 3, A: 5}).said == "a offers 5, b offers 3"
    assert LenderSearch(1, (A, B), {A: 0}).said == "a offers 0, b silent"
    assert LenderSearch(1, (A, B)).said == "a and b silent"
    assert (names([]), counted(1), counted(2)) == ("none", "1 slab", "2 slabs")


def test_hosts_that_hold_a_slab_or_are_asked_for_it_count_as_holding() -> None:
    """Slabs that turn hot together spread. Reference: §2.4.2."""
    assert BorrowedSlab("v", 0).hosts() == []
    assert BorrowedSlab("v", 0, place=place(A), next=place(B, 2)).hosts() == [A, B]
    assert BorrowedSlab("v", 0, place=place(A), search=LenderSearch(2, (B, C))).hosts() == [A, B, C]


def test_a_volume_counts_its_slabs_at_each_lender_also_those_that_are_only_promised() -> None:
    """Between equal offers the host with the fewest is taken. Reference: §2.4.2."""
    slabs = [
        BorrowedSlab("v", 0, place=place(A)),
        BorrowedSlab("v", 1, place=place(A), next=place(B, 2)),
        BorrowedSlab("v", 2, search=LenderSearch(3, (B, C), chosen=B)),
        BorrowedSlab("v", 3, search=LenderSearch(4, (B, C))),
    ]
    assert BorrowedVolume(64, 4, slabs, [0.0] * 4, 20.0, None).lenders() == {A: 2, B: 2}


def test_only_a_slab_that_was_evicted_from_a_lender_leaves_it() -> None:
    assert BorrowedSlab("v", 0, place=place(A), evicted=True).leaves(A)
    assert not BorrowedSlab("v", 0, place=place(A), evicted=True).leaves(B)
    assert not BorrowedSlab("v", 0, place=place(A)).leaves(A)
    assert not BorrowedSlab("v", 0).leaves(A)


@pytest.mark.parametrize(
    ("slab", "says"),
    [
        (BorrowedSlab("v", 0, closing=True), "closes nothing"),
        (BorrowedSlab("v", 0, evicted=True), "evicted from nowhere"),
        (BorrowedSlab("v", 0, next=place(A)), "moves from nowhere"),
        (BorrowedSlab("v", 0, place=place(A), next=place(B, 2), search=LenderSearch(3, (C,))), "searches twice"),
    ],
)
def test_a_slab_that_cannot_be_is_found_out(slab: BorrowedSlab, says: str) -> None:
    with pytest.raises(AssertionError, match=f"slab/v/0.*{says}"):
        slab.check()

"""Members of a slab without a disk, at its borrower: where each may lie, and what becomes of one that is lost."""

from collections.abc import Sequence
from typing import Any

from covey.core import HostId
from plugins.memory.machine import borrower_events as b
from plugins.memory.machine.borrower_events import CloseSlab
from plugins.memory.messages import Done, Evict, Map, MrInfo, QueryMem
from plugins.memory.policy.placement import LenderPeer

from .tale import PAGE, SECRET, SLAB, Tale, noted, only, sent


def peers(*hosts: str, rack: dict[str, str] | None = None) -> tuple[LenderPeer, ...]:
    return tuple(LenderPeer(HostId(host), "alive", 9, rack=(rack or {}).get(host, "")) for host in hosts)


ALL = peers("h2", "h3", "h4", "h5")


class Members(Tale):
    """Of one slab: numbers 0 and 1."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(slabs=2, seed=seed)
        self.tell(b.VolumeDetached("v"))
        self.tell(b.VolumeFound("v", 1, SLAB, PAGE, (), 2))

    def place(self, seconds: Sequence[Any]) -> tuple[HostId, int]:
        """The member that is looked for in these actions, brought to its place: lender and epoch."""
        asked = sent(seconds, QueryMem)
        number, epoch = asked[0][1].index, asked[0][1].epoch
        ((lender, _),) = sent(self.offers(asked, 5, 4), Map)
        self.hear(lender, MrInfo("v", number, epoch, "10.0.0.2:7", SECRET))
        self.tell(b.SlabOpened("v", number, epoch))
        return lender, epoch

    def both(self, among: tuple[LenderPeer, ...] = ALL) -> list[tuple[HostId, int]]:
        return [self.place(self.second(peers=among)) for _ in range(2)]


def test_both_members_are_placed_at_once_hot_or_not_on_two_hosts() -> None:
    for seed in range(20):
        tale = Members(seed)
        (first, _), (second, _) = tale.both()
        assert first != second
        assert [tale.state(number) for number in range(2)] == ["mapped", "mapped"]
        assert not sent(tale.second(), QueryMem)


def test_a_member_is_not_looked_for_while_the_other_is() -> None:
    tale = Members()
    asked = sent(tale.second(peers=ALL), QueryMem)
    assert {message.index for _, message in asked} == {0}
    assert not sent(tale.second(peers=ALL), QueryMem)


def test_nobody_is_asked_when_the_other_members_host_is_the_only_one_with_room() -> None:
    tale = Members()
    lender, _ = tale.place(tale.second(peers=peers("h2")))
    assert lender == "h2"
    assert noted(tale.second(peers=peers("h2"))) == ["nobody asked"]
    assert tale.state(1) == "cold"


def test_members_go_to_different_racks_by_the_labels_that_gossip_tells() -> None:
    racks = {"h2": "a", "h3": "a", "h4": "a", "h5": "b"}
    for seed in range(20):
        tale = Members(seed)
        found = tale.both(peers("h2", "h3", "h4", "h5", rack=racks))
        assert {racks[lender] for lender, _ in found} == {"a", "b"}


def test_a_lost_member_is_closed_and_looked_for_on_a_third_host() -> None:
    tale = Members()
    (first, epoch), (second, _) = tale.both()
    lost = tale.tell(b.SlabFailed("v", 0, epoch, "its link ended"))
    assert only(lost, CloseSlab).epoch == epoch
    note = next(action for action in lost if getattr(action, "event", "") == "lost")
    assert note.subject == "slab/v/0"
    assert "its other member serves it" in note.reason
    assert sent(tale.tell(b.SlabClosed("v", 0, epoch)), Done) == [(first, Done("v", 0, epoch))]
    asked = [host for host, _ in sent(tale.second(peers=ALL), QueryMem)]
    assert asked
    assert second not in asked


def test_a_member_that_is_evicted_moves_however_idle_it_is() -> None:
    tale = Members()
    (first, epoch), (second, _) = tale.both()
    asked = [host for host, _ in sent(tale.hear(first, Evict("v", 0, epoch, 10.0)), QueryMem)]
    assert asked
    assert not {first, second} & set(asked)


def test_a_members_subject_is_its_slab() -> None:
    tale = Members()
    tale.both()
    assert [slab.subject for slab in tale.machine.volumes["v"].slabs] == ["slab/v/0", "slab/v/0"]

"""Members of a slab without a disk, at its borrower: where each may lie, and what becomes of one that is lost."""

import random
from collections.abc import Sequence
from typing import Any

from covey.core.events import Heard
from covey.core.ids import HostId
from covey.core.units import GIB
from covey.ports.probes import MemoryNow
from plugins.memory.machine.borrowing import events as b
from plugins.memory.machine.borrowing.events import CloseSlab
from plugins.memory.machine.lending import events as le
from plugins.memory.machine.lending.lender import Lender
from plugins.memory.messages import Done, Evict, Map, MrInfo, QueryMem, Renew, SlabRef, Unrenewed
from plugins.memory.policy.lending import Headroom
from plugins.memory.policy.placement import LenderPeer

from .tale import ME, PAGE, SECRET, SLAB, Tale, noted, only, sent


def peers(*hosts: str, rack: dict[str, str] | None = None) -> tuple[LenderPeer, ...]:
    return tuple(LenderPeer(HostId(host), "alive", 9, rack=(rack or {}).get(host, "")) for host in hosts)


MEMORY = MemoryNow(total_bytes=GIB, available_bytes=GIB, pressure_some_avg10=0.0)
ALL = peers("h2", "h3", "h4", "h5")


class Members(Tale):
    """The two members of one slab: numbers 0 and 1."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(slabs=2, seed=seed)
        self.tell(b.VolumeForgotten("v"))
        self.tell(b.VolumeFound("v", 1, SLAB, PAGE, (), 2))

    def place(self, seconds: Sequence[Any]) -> tuple[HostId, int]:
        """Bring the member that is looked for in these actions to its place; return lender and epoch."""
        asked = sent(seconds, QueryMem)
        number, epoch = asked[0][1].index, asked[0][1].epoch
        ((lender, _),) = sent(self.offers(asked, 5, 4), Map)
        self.hear(lender, MrInfo("v", number, epoch, "10.0.0.2:7", SECRET))
        self.tell(b.SlabOpened("v", number, epoch))
        return lender, epoch

    def both(self, among: tuple[LenderPeer, ...] = ALL) -> list[tuple[HostId, int]]:
        return [self.place(self.second(peers=among)) for _ in range(2)]


def test_a_member_is_not_looked_for_while_the_other_is() -> None:
    tale = Members()
    asked = sent(tale.second(peers=ALL), QueryMem)
    assert {message.index for _, message in asked} == {0}
    assert not sent(tale.second(peers=ALL), QueryMem)


def test_nobody_is_asked_when_the_other_members_host_is_the_only_one_with_room() -> None:
    tale = Members()
    lender, _ = tale.place(tale.second(peers=peers("h2")))
    assert lender == "h2"
    assert noted(tale.second(peers=peers("h2"))) == ["no host asked"]
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


def test_an_orphan_without_a_disk_is_kept_for_ten_leases_and_one_with_a_disk_for_one() -> None:
    for members, kept_s in ((1, 20.0), (2, 200.0)):
        lender = a_lender(members)
        lender.handle(le.LenderTick(MEMORY, 0), kept_s - 1.0)
        assert [lent.state for lent in lender.lent.values()] == ["lent"]
        lender.handle(le.LenderTick(MEMORY, 0), kept_s + 1.0)
        assert [lent.state for lent in lender.lent.values()] == ["freeing"]


def test_a_lender_that_began_anew_hears_from_the_renewal_what_it_lends() -> None:
    lender = a_lender(1)
    lender.handle(Heard(ME, Renew((SlabRef("v", 7, 1),), 2)), 10.0)
    (lent,) = lender.lent.values()
    assert lent.subject == "slab/v/3"
    lender.handle(le.LenderTick(MEMORY, 0), 100.0)
    assert lent.state == "lent"


def test_a_member_is_not_taken_by_force_from_a_host_that_has_headroom() -> None:
    """Tasks of that host wait for memory since their own group may have no more: that is no reason to lose the only
    copy."""
    pressed = MemoryNow(total_bytes=GIB, available_bytes=GIB, pressure_some_avg10=30.0)
    short = MemoryNow(total_bytes=GIB, available_bytes=0, pressure_some_avg10=30.0)
    found: dict[int, list[str]] = {1: [], 2: []}
    for members, states in found.items():
        lender = a_lender(members)
        (lent,) = lender.lent.values()
        for second, memory in ((1, pressed), (21, pressed), (199, pressed)):
            lender.handle(le.LenderTick(memory, 0), float(second))
            states.append(lent.state)
    assert found == {1: ["evicting", "freeing", "freeing"], 2: ["evicting"] * 3}
    for second in range(22, 42):
        lender.handle(le.LenderTick(short, 0), float(second))
    assert lent.state == "freeing", "but from one that has to have it"
    lender = a_lender(2)
    (lent,) = lender.lent.values()
    for second in (1, 201):
        lender.handle(le.LenderTick(pressed, 0), float(second))
    assert lent.state == "freeing", "and where nobody asked for it for ten leases"


def test_a_lender_asks_about_a_member_that_nobody_renews() -> None:
    lender = a_lender(2)
    assert not sent(lender.handle(le.LenderTick(MEMORY, 0), 19.0), Unrenewed)
    asked = sent(lender.handle(le.LenderTick(MEMORY, 0), 21.0), Unrenewed)
    assert asked == [(ME, Unrenewed("v", 7, 1))]
    assert not sent(lender.handle(le.LenderTick(MEMORY, 0), 22.0), Unrenewed), "once in a third of a lease"
    tale = Members()
    (first, epoch), _ = tale.both()
    renewed = Renew((SlabRef("v", 0, epoch),), 2, page_bytes=PAGE)
    assert sent(tale.hear(first, Unrenewed("v", 0, epoch)), Renew) == [(first, renewed)]
    assert sent(tale.hear(first, Unrenewed("v", 0, epoch - 1)), Done) == [(first, Done("v", 0, epoch - 1))]
    assert sent(tale.hear(first, Unrenewed("other", 0, 1)), Done) == [(first, Done("other", 0, 1))]


def test_nothing_is_given_back_before_a_volumes_process_says_what_it_has() -> None:
    tale = Members()
    tale.machine.awaited.add("found-soon")
    for message in (Unrenewed("found-soon", 0, 1), Evict("found-soon", 0, 1, 5.0)):
        assert not sent(tale.hear(HostId("h2"), message), Done)
    tale.tell(b.VolumeFound("found-soon", 1, SLAB, PAGE, (), 2))
    assert sent(tale.hear(HostId("h2"), Unrenewed("found-soon", 0, 1)), Done)


def test_renewals_say_of_how_many_members_a_slab_is() -> None:
    tale = Members()
    tale.both()
    renewed = [message for _, message in sent(tale.tell(b.BorrowerTick({}, ALL), 30.0), Renew)]
    assert [message.members for message in renewed] == [2, 2]


def a_lender(members: int) -> Lender:
    """A lender that lends member 7 of v to the borrower, since 0 s, with a lease of 20 s and a grace of 5."""
    lender = Lender(random.Random(1), random.Random(2).randbytes, Headroom(fraction=0.1), GIB, 5.0, 20.0)
    lender.handle(le.StoreFound("10.0.0.2:7", ()), 0.0)
    lender.handle(le.LenderTick(MEMORY, 0), 0.0)
    lender.handle(Heard(ME, Map("v", 7, 1, 64 << 20, PAGE, members)), 0.0)
    lender.handle(le.SlabRegistered(ME, SlabRef("v", 7, 1), "10.0.0.2:7"), 0.0)
    assert [lent.state for lent in lender.lent.values()] == ["lent"]
    return lender

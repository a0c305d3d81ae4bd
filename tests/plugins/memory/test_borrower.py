"""Slabs that are borrowed, by story: events in, actions out."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from covey.core.events import LogEvent, SetTimer, Undelivered
from covey.core.ids import HostId
from covey.core.units import GIB, MIB
from plugins.memory.machine.borrowing import events as b
from plugins.memory.machine.borrowing.place import Link, SlabPlace
from plugins.memory.machine.lending import events as le
from plugins.memory.machine.lending.lender import Lender
from plugins.memory.machine.loan import LoanedSlab
from plugins.memory.messages import (
    Activity,
    CheckActivity,
    Done,
    Evict,
    FreeMem,
    Map,
    MrInfo,
    QueryMem,
    SlabRef,
    SlabsAreHeld,
)
from plugins.memory.policy.lending import Headroom
from plugins.memory.policy.placement import LenderPeer
from tests.plugins.memory.tale import ME, OTHERS, PAGE, PEERS, SECRET, SLAB, Tale, only, sent


def test_the_freer_host_is_taken_and_the_story_says_why() -> None:
    tale = Tale()
    *others, (last, query) = sent(tale.second(1000), QueryMem)
    assert tale.offers(others, *[3] * len(others)) == []
    actions = tale.hear(last, FreeMem("v", 0, query.epoch, 5))
    assert sent(actions, Map) == [(last, Map("v", 0, query.epoch, SLAB, PAGE))]
    reason = only(actions, LogEvent).reason
    assert all(f"{host} offers 3" in reason for host, _ in others)
    assert f"{last} offers 5" in reason
    assert f"{last} has the most room" in reason


def test_slabs_that_turn_hot_in_the_same_second_ask_different_hosts() -> None:
    tale = Tale(slabs=2)
    asked = [host for host, _ in sent(tale.second(1000, 1000), QueryMem)]
    assert set(asked) == set(OTHERS), "hosts being asked count as holding"


def test_the_two_freest_by_gossip_of_those_drawn_are_asked() -> None:
    """The look at gossip is ours; that two hosts are asked is the paper's. Reference: §2.4.2."""
    peers = tuple(LenderPeer(host, "alive", free) for host, free in zip(OTHERS, (3, 9, 1, 7), strict=True))
    asked = [host for host, _ in sent(Tale(drawn=4).second(1000, peers=peers), QueryMem)]
    assert asked == [OTHERS[1], OTHERS[3]]
    by_lot = {host for seed in range(30) for host, _ in sent(Tale(seed=seed).second(1000, peers=peers), QueryMem)}
    assert by_lot == set(OTHERS), "two drawn: gossip decides nothing"


def test_hosts_that_lend_smaller_slabs_are_not_taken_for_freer_ones() -> None:
    """Slabs of several sizes are ours. Reference: §2.4.2."""
    peers = (
        LenderPeer(OTHERS[0], "alive", 40, MIB),
        LenderPeer(OTHERS[1], "alive", 200, MIB),
        LenderPeer(OTHERS[2], "alive", 2, SLAB),
    )
    actions = Tale(drawn=6).second(1000, peers=peers)
    assert [host for host, _ in sent(actions, QueryMem)] == [OTHERS[1], OTHERS[2]], "3 and 2 slabs; 40 MiB are none"


def test_the_threshold_follows_the_size_of_the_volumes_slabs() -> None:
    """HotSlab per byte is ours. Reference: §2.4.1."""
    tale = Tale(hot=None)
    tale.tell(b.VolumeFound("large", 1, GIB, PAGE, ()))
    actions = tale.tell(b.BorrowerTick({"v": [7], "large": [7]}, PEERS), 1.0)
    assert {query.volume for _, query in sent(actions, QueryMem)} == {"v"}
    assert only(actions, LogEvent).reason.startswith("1.4 page requests/s, hot above 1.25; asked")
    asked = sent(tale.tell(b.BorrowerTick({"v": [0], "large": [100]}, PEERS), 1.0), QueryMem)
    assert {query.volume for _, query in asked} == {"large"}, "21.1: more than 20"


def test_a_slab_that_turned_cold_is_given_back_unasked_if_that_is_wished() -> None:
    """The threshold is the paper's ColdSlab. Reference: §2.4.1."""
    tale = Tale(cold_share=0.25)
    lender, epoch = tale.mapped()
    seconds = 0
    while not (actions := tale.second(0)) or not any(isinstance(action, b.CloseSlab) for action in actions):
        assert (seconds := seconds + 1) < 60
    assert tale.machine.volumes["v"].rates[0] == pytest.approx(200 * 0.8 ** (seconds + 1))
    assert 4 < tale.machine.volumes["v"].rates[0] < 5, "a quarter of 20"
    assert "cold below 5" in only(actions, LogEvent).reason
    assert tale.second(0) == [], "told once"
    assert sent(tale.tell(b.SlabClosed("v", 0, epoch)), Done) == [(lender, Done("v", 0, epoch))]
    assert tale.state() == "cold"


def test_a_silent_host_counts_as_full_after_a_while() -> None:
    tale = Tale()
    actions = tale.second(1000)
    *others, (silent, _) = sent(actions, QueryMem)
    timer = only(actions, SetTimer)
    tale.offers(others, 3)
    actions = tale.tell(timer.event, timer.after_s)
    assert sent(actions, Map)[0][0] == others[0][0]
    assert f"{silent} silent" in only(actions, LogEvent).reason


def test_a_host_that_cannot_be_reached_counts_as_full_at_once() -> None:
    tale = Tale()
    (away, query), *others = sent(tale.second(1000), QueryMem)
    tale.tell(Undelivered(away, query))
    assert sent(tale.offers(others, 1), Map)[0][0] == others[0][0]


def test_a_refusal_leads_to_the_other_host_and_the_first_is_told_to_forget_it() -> None:
    tale = Tale()
    (one, query), (two, _), *others = sent(tale.second(1000), QueryMem)
    tale.offers([(one, query), (two, query), *others], 9, 5)
    actions = tale.hear(one, MrInfo("v", 0, query.epoch, refused="just lent it"))
    assert [host for host, _ in sent(actions, Done)] == [one]
    ((taken, message),) = sent(actions, Map)
    assert taken == two
    assert message.epoch > query.epoch, "a late answer to the first Map must not be taken for this one"


def test_a_lender_that_names_no_secret_lends_nothing() -> None:
    """A stranger that listens at that address could prove to be the lender, and would be brought pages."""
    tale = Tale()
    (one, query), (two, _), *others = sent(tale.second(1000), QueryMem)
    tale.offers([(one, query), (two, query), *others], 9, 5)
    actions = tale.hear(one, MrInfo("v", 0, query.epoch, "10.0.0.3:7", b""))
    assert not [each for each in actions if isinstance(each, b.OpenSlab)]
    assert [host for host, _ in sent(actions, Done)] == [one] and sent(actions, Map)[0][0] == two


def test_epochs_of_a_later_start_are_higher() -> None:
    assert sent(Tale().second(1000), QueryMem)[0][1].epoch > 3 << 32


def test_a_slab_whose_link_ended_is_closed_first_and_looks_again_while_it_is_hot() -> None:
    tale = Tale()
    lender, epoch = tale.mapped()
    actions = tale.tell(b.SlabFailed("v", 0, epoch, "reset"))
    assert only(actions, b.CloseSlab).epoch == epoch
    assert sent(actions, Done) == [], "the disk may not have everything yet"
    assert tale.state() == "lost"
    assert tale.tell(b.SlabFailed("v", 0, epoch, "reset")) == [], "told twice"
    assert sent(tale.second(1000), QueryMem) == []
    assert sent(tale.tell(b.SlabClosed("v", 0, epoch)), Done) == [(lender, Done("v", 0, epoch))]
    assert tale.state() == "cold"
    assert sent(tale.second(1000), QueryMem)


def looked(tale: Tale, links: Mapping[int, Link]) -> Sequence[Any]:
    """Let a second pass in which the volume's process says how its links are, by epoch."""
    return tale.tell(b.BorrowerTick({}, PEERS, {"v": links}), 1.0)


def test_mapped_is_only_what_has_a_working_link() -> None:
    tale = Tale()
    _, epoch = tale.mapped()
    said: list[tuple[Link, str]] = [("open", "mapped"), ("reopening",) * 2, ("recovering",) * 2, ("open", "mapped")]
    for link, state in said:
        assert looked(tale, {epoch: link}) == []
        assert tale.state() == state
    tale.tell(b.BorrowerTick({}, PEERS, {}), 1.0)
    assert tale.state() == "reopening", "its process does not answer"
    assert not tale.machine.volumes["v"].slabs[0].is_served


def test_a_place_that_the_volumes_process_does_not_know_twice_in_a_row_is_lost() -> None:
    """A message that the process sends by itself may be overtaken by its older answer to what it has."""
    tale = Tale()
    lender, epoch = tale.mapped()
    assert only(tale.tell(b.SlabFailed("v", 0, epoch, "reset")), b.CloseSlab)
    tale.tell(b.SlabClosed("v", 0, epoch))
    tale.tell(b.VolumeFound("v", 1, SLAB, PAGE, ((0, SlabPlace(epoch, lender, "10.0.0.2:7", SECRET)),)))
    assert looked(tale, {}) == [], "our view may be a moment older than its answer"
    assert only(looked(tale, {}), b.CloseSlab).epoch == epoch
    assert sent(tale.tell(b.SlabClosed("v", 0, epoch)), Done) == [(lender, Done("v", 0, epoch))]
    assert tale.state() == "cold"


def test_a_lender_tells_what_it_holds_once_its_slab_process_has_said_so() -> None:
    lender = Lender(random.Random(1), lambda n: b"s" * n, Headroom(fraction=0.125), 64 * GIB, 10.0, 60.0)
    known = SlabRef("v", 0, 7)
    assert not lender.held(ME, [known]).known
    held = LoanedSlab(ME, known, SLAB, SECRET)
    lender.handle(le.StoreFound("10.0.0.2:7", (held,)), 1.0)
    answer = lender.held(ME, [known, SlabRef("v", 0, 6), SlabRef("v", 1, 7)])
    assert answer == SlabsAreHeld(known=True, slabs=(known,), address="10.0.0.2:7")
    assert lender.held(HostId("h9"), [known]).slabs == (), "another's"
    lender.handle(le.StoreLost("killed"), 2.0)
    assert not lender.held(ME, [known]).known


def test_an_evicted_slab_that_is_not_hot_goes_to_disk_and_done_follows_the_closing() -> None:
    """Reference: §2.4.4."""
    tale = Tale()
    lender, epoch = tale.mapped()
    for _ in range(20):
        tale.second(0)
    actions = tale.hear(lender, Evict("v", 0, epoch, 10.0))
    assert only(actions, b.CloseSlab).epoch == epoch
    assert sent(actions, Done) == [], "not before nothing depends on it"
    assert tale.hear(lender, Evict("v", 0, epoch, 10.0)) == [], "told twice"
    assert sent(tale.tell(b.SlabClosed("v", 0, epoch)), Done) == [(lender, Done("v", 0, epoch))]
    assert tale.state() == "cold"


def test_an_evicted_slab_that_is_hot_moves_to_another_host_and_only_then_leaves() -> None:
    """The slab is remapped while hot; that its content moves along is ours. Reference: §2.4.4."""
    tale = Tale()
    lender, epoch = tale.mapped()
    asked = sent(tale.hear(lender, Evict("v", 0, epoch, 10.0)), QueryMem)
    assert lender not in [host for host, _ in asked]
    assert tale.state() == "moving"
    new = asked[0][1].epoch
    ((to, _),) = sent(tale.offers(asked, 5, 5), Map)
    opened = only(tale.hear(to, MrInfo("v", 0, new, "10.0.0.3:7", SECRET)), b.OpenSlab)
    assert opened.place == SlabPlace(new, to, "10.0.0.3:7", SECRET)
    tale.tell(b.SlabOpened("v", 0, new))
    assert only(tale.tell(b.SlabCopied("v", 0, new)), b.CloseSlab).epoch == epoch
    assert sent(tale.tell(b.SlabClosed("v", 0, epoch)), Done) == [(lender, Done("v", 0, epoch))]
    assert tale.machine.volumes["v"].slabs[0].place == opened.place


def test_an_evicted_slab_asks_hosts_where_it_will_not_be_evicted_again_at_once() -> None:
    """Two slabs leave one lender: a host with room for four is asked, or else one that has any. Reference: §2.4.4."""
    for free, asked in (((1, 3, 4), [2]), ((1, 3, 3), [0, 1, 2])):
        tale = Tale(slabs=2, drawn=3)
        places = [SlabPlace(epoch, OTHERS[3], "10.0.0.5:7", SECRET) for epoch in (5, 6)]
        tale.tell(b.VolumeFound("v", 2, SLAB, PAGE, tuple(enumerate(places))))
        peers = tuple(LenderPeer(host, "alive", room) for host, room in zip(OTHERS, (*free, 50), strict=True))
        for _ in range(3):
            tale.second(1000, 1000, peers=peers)
        tale.hear(OTHERS[3], Evict("v", 0, 5, 10.0))
        found = {host for host, _ in sent(tale.hear(OTHERS[3], Evict("v", 1, 6, 10.0)), QueryMem)}
        assert found
        assert found <= {OTHERS[n] for n in asked}


def test_an_evicted_slab_that_finds_no_place_leaves_before_the_grace_is_over() -> None:
    tale = Tale()
    lender, epoch = tale.mapped()
    actions = tale.hear(lender, Evict("v", 0, epoch, 10.0))
    over = next(a for a in actions if isinstance(a, SetTimer) and isinstance(a.event, b.GraceOver))
    assert over.after_s < 10.0
    assert only(tale.tell(over.event, over.after_s), b.CloseSlab).epoch == epoch


def test_activity_is_told_of_mapped_slabs_only() -> None:
    tale = Tale()
    lender, epoch = tale.mapped()
    ours, other = SlabRef("v", 0, epoch), SlabRef("v", 0, epoch - 1)
    ((to, answer),) = sent(tale.hear(lender, CheckActivity(7, (ours, other))), Activity)
    assert (to, answer.round) == (lender, 7)
    assert [(said.slab, said.requests_per_s) for said in answer.activities] == [(ours, pytest.approx(200))]


def test_a_slab_not_opened_before_a_restart_is_given_back_and_an_open_one_is_not() -> None:
    for opened in (False, True):
        tale = Tale()
        asked = sent(tale.second(1000), QueryMem)
        epoch = asked[0][1].epoch
        ((lender, _),) = sent(tale.offers(asked, 5, 5), Map)
        tale.hear(lender, MrInfo("v", 0, epoch, "10.0.0.2:7", SECRET))
        found = ((0, SlabPlace(epoch, lender, "10.0.0.2:7", SECRET)),) if opened else ()
        given_back = sent(tale.tell(b.VolumeFound("v", 1, SLAB, PAGE, found)), Done)
        assert given_back == ([] if opened else [(lender, Done("v", 0, epoch))])
        looked(tale, {epoch: "open"} if opened else {})
        assert tale.state() == ("mapped" if opened else "cold")


def test_of_hosts_with_equal_room_the_one_with_fewer_slabs_of_the_volume_is_taken() -> None:
    """Slabs are spread over as many hosts as there are. Reference: §2.4.2."""
    many, few = OTHERS[0], OTHERS[1]
    places = [(at, SlabPlace(at + 1, host, "10.0.0.2:7", SECRET)) for at, host in enumerate((many, many, few))]
    for seed in range(6):
        tale = Tale(slabs=4, seed=seed)
        tale.tell(b.VolumeFound("v", 4, SLAB, PAGE, tuple(places)))
        asked = sent(tale.second(0, 0, 0, 1000, peers=PEERS[:2]), QueryMem)
        assert {host for host, _ in asked} == {many, few}
        assert [host for host, _ in sent(tale.offers(asked, 5, 5), Map)] == [few]


def test_words_of_another_epoch_or_of_no_slab_change_nothing() -> None:
    tale = Tale()
    lender, epoch = tale.mapped()
    assert tale.tell(b.SlabClosed("v", 0, epoch - 1)) == [] and tale.state() == "mapped"
    assert tale.hear(lender, FreeMem("v", 1, epoch, 5)) == []
    assert tale.tell(b.SlabClosed("v", 1, epoch)) == [], "the volume has one slab, number 0"


def test_a_move_that_a_restart_cut_short_is_finished() -> None:
    tale = Tale()
    old, new = SlabPlace(5, OTHERS[0], "10.0.0.2:7", SECRET), SlabPlace(6, OTHERS[1], "10.0.0.3:7", SECRET)
    actions = tale.tell(b.VolumeFound("v", 1, SLAB, PAGE, ((0, new), (0, old))))
    assert only(actions, b.CloseSlab).epoch == 5
    tale.tell(b.SlabClosed("v", 0, 5))
    assert tale.machine.volumes["v"].slabs[0].place == new


def test_detaching_gives_everything_back() -> None:
    tale = Tale()
    lender, epoch = tale.mapped()
    assert sent(tale.tell(b.VolumeForgotten("v")), Done) == [(lender, Done("v", 0, epoch))]
    assert tale.machine.volumes == {}

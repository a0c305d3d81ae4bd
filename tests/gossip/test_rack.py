"""Whole racks of gossip machines in virtual time: they find one another, notice deaths, heal, and pass facts on."""

import hashlib
import subprocess
import sys

import pytest

from chaos.crowds.gossip import Crowd
from gossip.types import HostDown, HostUp, MemberSuspected, NameConflict


@pytest.mark.parametrize(("count", "within_s"), [(2, 2), (4, 2), (10, 3), (50, 5)])
def test_a_rack_finds_itself_through_three_seeds(count: int, within_s: float) -> None:
    crowd = Crowd(seed=count)
    crowd.checking = count <= 10
    crowd.rack(count)
    assert crowd.run(within_s + 1, crowd.agree) <= within_s


@pytest.mark.parametrize(("count", "within_s"), [(2, 7.0), (3, 8.0), (4, 8.0), (10, 10.0), (50, 14.0)])
def test_a_killed_host_is_gone_everywhere_and_nobody_else_is_harmed(count: int, within_s: float) -> None:
    crowd = Crowd(seed=count)
    crowd.checking = count <= 10
    hosts = crowd.rack(count)
    crowd.run(10)
    crowd.kill(hosts[-1])
    assert crowd.run(within_s + 1, lambda: crowd.all_see(hosts[-1].name, "gone")) <= within_s
    assert crowd.agree()
    downs = {getattr(fact, "host", "") for host in hosts[:-1] for _, fact in host.told if isinstance(fact, HostDown)}
    assert downs == {hosts[-1].name}
    assert hosts[0].peers()[hosts[-1].name].suspected_by in {host.name for host in hosts[:-1]}


def test_in_a_rack_of_four_a_killed_host_is_gone_in_about_five_seconds() -> None:
    """The promise of the defaults: one period to notice, one to be sure, four of suspicion. In one of twenty the two
    others confirm late (of 120 seeds 5 to 8 took 7 to 8 s)."""
    lasted = []
    for seed in range(20):
        crowd = Crowd(seed=seed)
        hosts = crowd.rack(4)
        crowd.run(5 + seed / 20)
        crowd.kill(hosts[seed % 4])
        lasted.append(crowd.run(20, lambda: crowd.all_see(hosts[seed % 4].name, "gone")))  # noqa: B023
    lasted.sort()
    assert 4.5 <= lasted[10] <= 6.0 and lasted[-2] <= 7.0 and lasted[-1] <= 9.0, lasted


def test_two_killed_at_once_of_four_do_not_wait_for_each_others_confirmation() -> None:
    crowd = Crowd(seed=4)
    hosts = crowd.rack(4)
    crowd.run(5)
    crowd.kill(hosts[1])
    crowd.kill(hosts[2])
    assert crowd.run(30, crowd.agree) <= 12


@pytest.mark.parametrize("seed", range(3))
def test_lost_datagrams_do_not_make_anybody_gone(seed: int) -> None:
    """One datagram in ten is lost: suspicions happen, and are refuted in time."""
    crowd = Crowd(seed=seed, loss=0.1)
    hosts = crowd.rack(10)
    crowd.run(120)
    assert crowd.agree()
    assert not [fact for host in hosts for _, fact in host.told if isinstance(fact, HostDown)]


def test_a_suspicion_of_a_living_host_is_refuted() -> None:
    """Two of four cannot hear a third directly for a while, and suspect it; others pass its words on."""
    crowd = Crowd(seed=2)
    a, b, c, d = crowd.rack(4)
    crowd.run(5)
    crowd.partition([a], [b, c])
    crowd.run(60)
    assert not [fact for host in (a, b, c, d) for _, fact in host.told if isinstance(fact, HostDown)]
    assert crowd.agree()


def test_a_paused_host_is_suspected_and_back_and_buries_nobody() -> None:
    """SIGSTOP for 3 s: what it did not hear meanwhile proves nothing to it."""
    crowd = Crowd(seed=5)
    hosts = crowd.rack(10)
    crowd.run(5)
    crowd.pause(hosts[3], 3.0)
    crowd.run(30)
    assert crowd.agree()
    assert not [fact for host in hosts for _, fact in host.told if isinstance(fact, HostDown)]
    suspects = {
        getattr(fact, "host", "") for host in hosts for _, fact in host.told if isinstance(fact, MemberSuspected)
    }
    assert suspects <= {hosts[3].name}
    assert hosts[3].heard_of(hosts[3].name, MemberSuspected) == []


@pytest.mark.parametrize(("halves", "split_s"), [((2, 2), 20), ((5, 5), 60), ((7, 3), 240)])
def test_a_split_rack_merges_without_anybodys_help(halves: tuple[int, int], split_s: float) -> None:
    """serf #605, memberlist #222: there the halves never meet again. Covey's call their dead forever."""
    crowd = Crowd(seed=sum(halves))
    crowd.checking = split_s < 100
    hosts = crowd.rack(sum(halves))
    crowd.run(5)
    one, other = hosts[: halves[0]], hosts[halves[0] :]
    crowd.partition(one, other)
    crowd.run(split_s)
    for host in one:
        assert all(host.sees(far.name) == "gone" for far in other)
        assert all(host.sees(near.name) == "alive" for near in one)
    crowd.cut.clear()
    healed_s = crowd.run(120, crowd.agree)
    assert healed_s <= 90, "G6: within 90 s after the link returns"
    crowd.run(30)
    assert crowd.agree()


def test_healing_suspects_but_declares_nobody_dead_again() -> None:
    crowd = Crowd(seed=3)
    hosts = crowd.rack(8)
    crowd.run(5)
    crowd.partition(hosts[:4], hosts[4:])
    crowd.run(60)
    crowd.cut.clear()
    before = {host.name: len(host.told) for host in hosts}
    crowd.run(120)
    after = [fact for host in hosts for _, fact in host.told[before[host.name] :]]
    assert crowd.agree() and not [fact for fact in after if isinstance(fact, HostDown)]


def test_a_host_that_leaves_is_left_at_once_everywhere() -> None:
    crowd = Crowd(seed=6)
    hosts = crowd.rack(10)
    crowd.run(5)
    start_s = crowd.now_s
    crowd.leave(hosts[4])
    crowd.run(0.5)
    assert crowd.all_see(hosts[4].name, "left")
    assert max(host.heard_of(hosts[4].name, HostDown)[0] for host in crowd.running()) - start_s < 0.1
    assert not [fact for host in hosts for _, fact in host.told if isinstance(fact, MemberSuspected)]


def test_a_restarted_host_is_alive_at_once_with_its_new_boot() -> None:
    """serf: reconnect_sameIP. The host was not even missed."""
    crowd = Crowd(seed=7)
    hosts = crowd.rack(6)
    crowd.run(5)
    remembered = tuple(one for one in hosts[2].gossip.membership.records() if one.host != hosts[2].name)
    crowd.kill(hosts[2])
    crowd.run(1)
    start_s = crowd.now_s
    again = crowd.start(hosts[2].name, boot=2, remembered=remembered)
    took_s = crowd.run(10, lambda: crowd.agree() and all(h.peers()[again.name].boot == 2 for h in crowd.running()))
    assert took_s <= 3, "known hosts are enough, without seeds"
    crowd.run(10)
    assert all(host.heard_of(again.name, HostUp)[-1] - start_s < 3 for host in crowd.running() if host is not again)
    assert all(host.sees(again.name) == "alive" for host in crowd.running())


def test_a_host_that_comes_back_after_it_was_buried_is_alive_again() -> None:
    crowd = Crowd(seed=8)
    hosts = crowd.rack(4)
    crowd.run(5)
    crowd.kill(hosts[1])
    crowd.run(20)
    crowd.start(hosts[1].name, [hosts[0].name], boot=2)
    assert crowd.run(10, crowd.agree) <= 3


def test_an_agent_without_the_key_sees_nobody_and_is_seen_by_nobody() -> None:
    """memberlist: TestGossip_MismatchedKeys."""
    crowd = Crowd(seed=9)
    hosts = crowd.rack(3)
    stranger = crowd.start("stranger", [host.name for host in hosts], key=b"?" * 32)
    hosts[0].spread("secret", b"1")
    crowd.run(60)
    assert set(stranger.peers()) == {"stranger"} and crowd.all_see("h000", "alive", "unknown")
    assert all(host.sees("stranger") == "unknown" for host in hosts)
    assert {reason for host in hosts for reason in host.dropped} == {"unknown_key"}


def test_racks_with_different_labels_do_not_mix() -> None:
    """memberlist: Join_with_Labels_and_Encryption."""
    crowd = Crowd(seed=10)
    hosts = crowd.rack(2)
    other = crowd.start("other", [host.name for host in hosts], cluster="elsewhere")
    crowd.run(30)
    assert set(other.peers()) == {"other"} and crowd.all_see("other", "unknown")
    assert {reason for host in hosts for reason in host.dropped} == {"other_cluster"}


def test_a_second_machine_with_a_taken_name_is_kept_out_and_both_sides_hear_why() -> None:
    crowd = Crowd(seed=11)
    a, b, c = crowd.rack(3)
    twin = crowd.start(a.name, [b.name, c.name], uuid=b"T" * 16, place="elsewhere")
    crowd.run(40)
    assert all(host.peers()[a.name].address == "h000:7946" for host in (b, c))
    assert all(host.sees(a.name) == "alive" for host in (b, c))
    assert twin.heard_of(a.name, NameConflict) and b.heard_of(a.name, NameConflict)
    assert set(twin.peers()) == {a.name}


def test_two_machines_with_one_identity_are_told_on_all_sides() -> None:
    """A disk was copied: the later boot pushes the earlier one out, which keeps running by itself."""
    crowd = Crowd(seed=13)
    a, b, c = crowd.rack(3)
    crowd.run(5)
    clone = crowd.start(a.name, [b.name, c.name], uuid=a.gossip.me.uuid, boot=9, place="elsewhere")
    crowd.run(25)
    assert all(host.peers()[a.name].address.startswith("elsewhere") for host in (b, c))
    assert all(host.heard_of(a.name, NameConflict) for host in (a, b, c))
    assert not clone.heard_of(a.name, NameConflict)


def test_a_reinstalled_machine_gets_its_name_back_once_the_old_one_is_gone() -> None:
    """The machine has another disk, another uuid, and a boot counter that begins again."""
    crowd = Crowd(seed=12)
    hosts = crowd.rack(3)
    crowd.kill(hosts[1])
    again = crowd.start(hosts[1].name, [hosts[0].name], uuid=b"N" * 16, boot=1)
    again.spread("new", b"1")
    took_s = crowd.run(60, crowd.agree)
    crowd.run(5)
    assert 4 <= took_s <= 20
    assert all(host.peers()[again.name].values == {"new": b"1"} for host in crowd.running())


@pytest.mark.parametrize(("count", "within_s"), [(4, 1.0), (10, 3.0), (50, 6.0)])
def test_a_published_value_reaches_everybody(count: int, within_s: float) -> None:
    crowd = Crowd(seed=count)
    crowd.checking = count <= 10
    hosts = crowd.rack(count)
    crowd.run(5)
    hosts[1].spread("spare", b"17")

    def known() -> bool:
        return all(host.peers()[hosts[1].name].values.get("spare") == b"17" for host in crowd.running())

    assert crowd.run(within_s + 1, known) <= within_s
    hosts[1].spread("spare", None)
    assert crowd.run(within_s + 1, lambda: not any("spare" in h.peers()[hosts[1].name].values for h in hosts)) <= (
        within_s
    )


def test_what_was_published_before_the_rack_was_there_reaches_who_comes_late() -> None:
    crowd = Crowd(seed=12)
    first = crowd.start("first")
    first.spread("endpoints", b"here")
    crowd.run(30)
    late = crowd.start("late", ["first"])
    assert crowd.run(5, lambda: "first" in late.peers() and bool(late.peers()["first"].values)) <= 2
    assert late.peers()["first"].values == {"endpoints": b"here"}


def test_ages_stay_low_while_a_host_lives_and_grow_when_it_does_not() -> None:
    crowd = Crowd(seed=13)
    hosts = crowd.rack(10)
    crowd.run(20)
    assert max(peer.age_s for host in hosts for peer in host.peers().values()) <= 5
    assert all(host.peers()[host.name].age_s == 0 for host in hosts)
    crowd.kill(hosts[0])
    crowd.run(30)
    ages = [host.peers()[hosts[0].name].age_s for host in hosts[1:]]
    assert min(ages) >= 29 and max(ages) <= 35


def test_a_restart_takes_the_values_of_the_last_life_away() -> None:
    crowd = Crowd(seed=14)
    hosts = crowd.rack(4)
    hosts[1].spread("old", b"1")
    crowd.run(5)
    crowd.kill(hosts[1])
    again = crowd.start(hosts[1].name, [hosts[0].name], boot=2)
    again.spread("new", b"2")
    crowd.run(5)
    assert all(host.peers()[again.name].values == {"new": b"2"} for host in crowd.running())


def test_values_of_a_gone_host_are_still_listed_with_their_age() -> None:
    crowd = Crowd(seed=15)
    hosts = crowd.rack(4)
    hosts[1].spread("gpus", b"4")
    crowd.run(5)
    crowd.kill(hosts[1])
    crowd.run(15)
    peer = hosts[0].peers()[hosts[1].name]
    assert (peer.state, peer.values) == ("gone", {"gpus": b"4"})


def test_an_idle_rack_is_quiet() -> None:
    """G4: a probe and its answer per host and second, which carry what the hosts know of each other, and no more."""
    crowd = Crowd(seed=16)
    hosts = crowd.rack(10)
    crowd.run(30)
    before = [(host.sent, host.sent_bytes) for host in hosts]
    crowd.run(20)
    datagrams = sum(host.sent - sent for host, (sent, _) in zip(hosts, before, strict=True)) / 10 / 20
    sent_bytes = sum(host.sent_bytes - sent for host, (_, sent) in zip(hosts, before, strict=True)) / 10 / 20
    assert datagrams <= 3 and sent_bytes <= 400


STORY = """
from chaos.crowds.gossip import Crowd
crowd = Crowd(seed=21, loss=0.05)
hosts = crowd.rack(6)
crowd.run(3)
hosts[2].spread("a", b"1")
crowd.partition(hosts[:3], hosts[3:])
crowd.run(15)
crowd.cut.clear()
crowd.kill(hosts[5])
crowd.run(40)
print([(host.name, host.told, host.sent, host.sent_bytes, host.gossip.hosts(crowd.now_s)) for host in hosts])
"""


def test_the_same_seed_tells_the_same_story_under_any_hash_seed() -> None:
    stories = set()
    for hash_seed in ("1", "2"):
        environ = {"PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin"}
        done = subprocess.run([sys.executable, "-c", STORY], env=environ, capture_output=True, check=True)
        stories.add(hashlib.sha256(done.stdout).hexdigest())
        assert b"HostDown" in done.stdout
    assert len(stories) == 1

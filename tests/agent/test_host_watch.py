"""What is wrong with hosts is told on every host, with what to type, and is in their event logs."""

import dataclasses
import random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from agent.event_log import EventLog
from agent.host_watch import FLAPS_S, LASTING_S, SEEN_KEPT_S, HostWatch, LogSeen
from chaos.rackworld import SimRack
from covey.core.ids import HostId
from covey.core.version import RELEASE, VERSION
from covey.ports.disk import Disk
from covey.ports.env import Env
from gossip.types import HostDown, HostUp, HostView, MemberAway, MemberSuspected, NameConflict, TableFull
from plugins.facts import HostState
from plugins.gossiped import Endpoints, LogNow, WrongNow
from tests.families import in_gate

A, B, C = HostId("a"), HostId("b"), HostId("c")
OURS, THEIRS = b"our rack", b"another!"


class Clock:
    at_s = 1000.0

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return self.at_s


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def error(self, what: str, **_: Any) -> None:
        self.lines.append(what)


class Watched:
    """The watch of host a, beside b and c."""

    def __init__(self) -> None:
        self.clock, self.log = Clock(), Log()
        self.event_log = EventLog(A, cast(Any, self.clock), cast(Disk, None))
        env = cast(Env, SimpleNamespace(clock=self.clock, log=self.log, rng=random.Random(1)))
        self.watch = HostWatch(env, A, self.event_log)
        self.values: dict[HostId, dict[str, bytes]] = {host: {} for host in (A, B, C)}
        self.states: dict[HostId, HostState] = {}
        self.incarnation = 0
        for host in (B, C):
            self.says(host, log=LogNow(OURS, A))

    def says(self, host: HostId, **values: msgspec.Struct) -> None:
        self.values[host] |= {key: msgspec.msgpack.encode(value) for key, value in values.items()}

    def views(self) -> list[HostView]:
        return [
            HostView(host=host, state=self.states.get(host, "alive"), address=f"{host}:1", values=values)
            for host, values in self.values.items()
        ]

    def look(self, seconds: float = 0.0, now: LogNow = LogNow(OURS, A), voters: tuple[HostId, ...] = (A,)) -> set[str]:
        """All that is wrong, as `host: what`, this many seconds from now, looked at once a second."""
        seen = LogSeen(now, voters, "10.0.0.1:7946")
        for _ in range(int(seconds)):
            self.clock.at_s += 1.0
            self.watch.look(self.views(), seen)
        self.watch.look(self.views(), seen)
        return {f"{host}: {each.what}" for host, found in self.watch.troubles.items() for each in found}

    def heard(self, *events: Any) -> None:
        for event in events:
            self.incarnation += 1
            view = HostView(host=event.host, state="alive", address=f"{event.host}:1", incarnation=self.incarnation)
            self.watch.heard(event, view)

    def story(self, host: HostId) -> list[str]:
        return [line.event for line in self.event_log.lines_of([f"host/{host}"])]


def test_a_host_of_another_rack_is_wrong_at_once_and_what_is_typed_is_told() -> None:
    watched = Watched()
    assert watched.look() == set()
    watched.says(B, log=LogNow(THEIRS, B))
    watched.says(C, log=LogNow(THEIRS, B))
    found = watched.look()
    assert {each.split(":")[0] for each in found} == {"b", "c"}
    ((what, typed),) = {(each.what, each.next) for each in watched.watch.troubles[B]}
    assert "another rack, which it leads itself" in what
    assert "which b leads" in watched.watch.troubles[C][0].what
    assert "to have b join this one, type there: agentctl rack join 10.0.0.1:7946 --leave-own    (jobs" in typed
    assert watched.story(B) == ["is of another rack"] and watched.log.lines == ["a host of another rack"] * 2
    watched.look(30.0)
    assert watched.story(B) == ["is of another rack"], "once"
    watched.says(B, log=LogNow(OURS, A))
    watched.states[C] = "gone"
    assert watched.look() == set(), "it joined; and of one that is gone nothing is claimed"


def test_a_host_more_than_one_release_apart_is_wrong() -> None:
    watched = Watched()
    for version in ("", VERSION, f"{RELEASE[0]}.{RELEASE[1] + 1}.7"):
        watched.says(B, endpoints=Endpoints("b:2", b"", 1, version=version))
        assert watched.look() == set(), version
    for version in (f"{RELEASE[0]}.{RELEASE[1] + 2}.0", f"{RELEASE[0] + 1}.{RELEASE[1]}.0", "newest"):
        watched.says(B, endpoints=Endpoints("b:2", b"", 1, version=version))
        (found,) = watched.look()
        assert found.startswith(f"b: it runs Covey {version}, and here runs {VERSION}")
    watched.states[B] = "away"
    assert watched.look() == set()


@pytest.mark.parametrize("said", [LogNow(), LogNow(OURS), LogNow(b"", B), None])
def test_a_host_that_follows_nobody_is_wrong_when_that_lasts(said: LogNow | None) -> None:
    watched = Watched()
    watched.values[B] = {} if said is None else {"log": msgspec.msgpack.encode(said)}
    assert watched.look(LASTING_S - 1) == set(), "an election takes a moment"
    (found,) = watched.look(2.0)
    assert found.startswith("b: it knows no leader, while a leads here")
    watched.says(B, log=LogNow(OURS, A))
    assert watched.look(1.0) == set()
    watched.says(B, log=LogNow(OURS))
    assert watched.look(LASTING_S - 1) == set(), "the time begins again"
    assert watched.look(20.0, now=LogNow(OURS)) == set(), "nobody leads here either"


def test_a_host_that_knows_no_rack_itself_calls_nobody_elses_wrong() -> None:
    watched = Watched()
    watched.says(B, log=LogNow(THEIRS, B))
    assert watched.look(60.0, now=LogNow()) == set()


def test_a_twin_is_wrong_on_the_host_that_heard_it_and_on_those_it_tells() -> None:
    watched = Watched()
    watched.heard(NameConflict(C, "z:1"))
    (found,) = watched.look()
    assert found.startswith("c: two machines claim this name (the other one at z:1)")
    assert watched.watch.told() == WrongNow((C,))
    other = Watched()
    other.says(B, wrong=watched.watch.told())
    assert {each.split(":")[0] for each in other.look()} == {"c"}
    other.states[B] = "gone"
    assert other.look() == set(), "nobody who is there says so any more"
    watched.clock.at_s += 30.0
    watched.heard(NameConflict(C))
    assert "z:1" in next(iter(watched.look(SEEN_KEPT_S))), "gossip repeats it, not always with the address"
    assert watched.look(1.0) == set() and watched.watch.told() == WrongNow()
    assert watched.story(C) == ["name conflict", "name conflict over"] and watched.log.lines == ["name conflict"]


def test_a_host_that_lets_nobody_in_any_more_says_so_to_all() -> None:
    watched = Watched()
    watched.heard(TableFull(HostId("d")))
    (found,) = watched.look()
    assert found.startswith("a: it admits no more hosts, such as d")
    assert "hosts_max" in watched.watch.troubles[A][0].next
    other = Watched()
    other.says(B, wrong=watched.watch.told())
    assert {each.split(":")[0] for each in other.look()} == {"b"}
    watched.heard(TableFull(HostId("e")))
    assert watched.story(A) == ["hosts_max reached"] and watched.story(HostId("d")) == ["not admitted"]
    assert watched.look(SEEN_KEPT_S + 1) == set() and watched.story(A)[-1] == "hosts_max not reached"


LOST: dict[str, list[Any]] = {
    "suspected": [MemberSuspected(B, C), HostUp(B)],
    "gone": [MemberSuspected(B, C), HostDown(B, left=False), HostUp(B)],
    "restarted": [HostUp(B)],
}


@pytest.mark.parametrize("how", LOST)
def test_a_host_that_is_lost_and_comes_back_three_times_is_wrong(how: str) -> None:
    watched = Watched()
    watched.heard(HostUp(B))
    watched.heard(*LOST[how], *LOST[how])
    assert watched.look() == set()
    watched.clock.at_s += FLAPS_S - 100
    watched.heard(*LOST[how])
    (found,) = watched.look()
    assert found.startswith("b: it was lost and came back 3 times in the last 10 min")
    assert watched.look(101.0) == set(), "the first two are long ago"


def test_a_host_that_comes_back_and_blames_another_does_not_make_that_one_wrong() -> None:
    watched = Watched()
    watched.heard(HostUp(B), HostUp(C))
    for by in (A, HostId("d"), A):
        watched.heard(MemberSuspected(B, by), HostDown(B, left=False), HostUp(B), MemberSuspected(C, B), HostUp(C))
    (found,) = watched.look()
    assert found.startswith("b: it was lost and came back 3 times")
    alone = Watched()
    alone.heard(HostUp(B), HostUp(C))
    for _ in range(3):
        alone.heard(MemberSuspected(B, C), HostUp(B), MemberSuspected(C, B), HostUp(C))
    assert len(alone.look()) == 2, "who of two that lose one another is right cannot be said"


def test_who_suspected_a_host_before_a_planned_restart_is_not_blamed_later() -> None:
    watched = Watched()
    watched.heard(HostUp(B), HostUp(C), MemberSuspected(B, HostId("d")), MemberAway(B, 60.0), HostUp(B))
    for _ in range(3):
        watched.heard(MemberSuspected(B, C), HostUp(B), MemberSuspected(C, A), HostUp(C))
    (found,) = watched.look()
    assert found.startswith("c: it was lost"), "only c, which a lost as often, ever lost b"


def test_planned_restarts_and_leaving_are_no_losses() -> None:
    watched = Watched()
    watched.heard(HostUp(B))
    for _ in range(4):
        watched.heard(MemberAway(B, 60.0), HostUp(B), HostDown(B, left=True), HostUp(B))
    assert watched.look() == set()
    assert watched.story(B) == ["joined", *["away", "came back", "left", "joined"] * 4]


def test_the_story_of_a_host_has_all_that_gossip_told_of_it_and_once() -> None:
    watched = Watched()
    watched.heard(HostUp(B), MemberSuspected(B, C), HostUp(B), MemberSuspected(B, C), HostDown(B, left=False))
    watched.heard(HostUp(B), HostUp(B), MemberAway(B, 60.0), HostDown(B, left=False), HostUp(B))
    assert watched.story(B) == [
        *("joined", "suspected", "answers again", "suspected", "gone", "came back", "restarted", "away", "gone"),
        "came back",
    ]
    reasons = {line.event: line.reason for line in watched.event_log.lines_of(["host/b"])}
    assert reasons["suspected"] == "c could not reach it" and reasons["gone"] == "it did not come back in time"
    keys = [line.key for line in watched.event_log.lines_of(["host/b"])]
    assert len(set(keys)) == len(keys) and all(keys), "hosts that see one event note it under one key"


def test_a_voter_that_gossip_does_not_know_is_wrong_when_that_lasts() -> None:
    watched = Watched()
    voters = (A, B, HostId("v"))
    assert watched.look(LASTING_S - 1, voters=voters) == set()
    (found,) = watched.look(2.0, voters=voters)
    assert found.startswith("a: v is a voter, but gossip knows no host of that name")


# ---- whole agents ----------------------------------------------------------------------------------------------------


def wrong(rack: SimRack, on: str) -> set[str]:
    """The hosts with something wrong, as `hosts` and `status` of this agent have them."""
    rows = rack.ask(on, "agent.hosts", {})
    told = {each["host"] for each in rack.ask(on, "agent.health", {})["wrong"]}
    assert told == {row.host for row in rows if row.troubles}
    return told


@pytest.mark.long
def test_hosts_that_each_lead_a_rack_say_so_and_what_they_advise_makes_one_rack() -> None:
    with SimRack(3, hosts=4, watched=False) as rack:
        for name in rack.hosts:
            rack.configure(name, {"leader": {"voters": [name]}})
        rack.start()
        rack.run(20.0)
        for name in rack.hosts:
            assert wrong(rack, name) == set(rack.hosts) - {name}, "alive, and not of this rack"
        told = next(row.troubles[0].next for row in rack.ask("h1", "agent.hosts", {}) if row.host == "h3")
        assert f"agentctl rack join {rack.hosts['h1'].ip}:7946 --leave-own" in told
        rack.run(600.0)
        assert {agent.log.leader for agent in rack.agents.values()} == set(rack.hosts), "no agent merges them by itself"
        for name in ("h2", "h3", "h4"):
            agent = rack.hosts[name].agent
            assert agent is not None
            agent.signal(15)
        rack.run(5.0)
        for name in ("h2", "h3", "h4"):
            rack.configure(name, {"leader": {"voters": ["h1"]}})
            rack.hosts[name].disk.damage("consensus", "lost")
            rack.hosts[name].revive()
        rack.settle()
        rack.run(20.0)
        assert all(wrong(rack, name) == set() for name in rack.hosts)
        assert {agent.log.leader for agent in rack.agents.values()} == {"h1"}
        rack.ask("h3", "agent.change_voters", {"add": "h2"})
        rack.until(lambda: set(rack.agents["h4"].log.voters) == {"h1", "h2"}, 10.0, "it votes")


@pytest.mark.parametrize("copied", in_gate(1, [True, False]))
def test_two_machines_of_one_name_are_wrong_on_every_host_as_long_as_both_run(copied: bool) -> None:
    """`copied`: the second one has the first one's identity file as well, so its later boot pushes that one out."""
    with SimRack(3, hosts=4, watched=False) as rack:
        rack.trees["h4"]["name"] = "h3"
        rack.configure("h4", {})
        main = rack.hosts["h4"].main
        assert main is not None
        rack.hosts["h4"].main = lambda env: main(dataclasses.replace(env, host=HostId("h3")))
        for name in ("h1", "h2", "h3"):
            rack.hosts[name].revive()
        rack.run(10.0)
        if copied:
            rack.hosts["h4"].disk.restore("identity", rack.hosts["h3"].disk.image("identity"))
        rack.hosts["h4"].revive()
        rack.run(25.0)
        assert all("h3" in wrong(rack, name) for name in rack.hosts)
        rack.run(300.0)
        assert all("h3" in wrong(rack, name) for name in rack.hosts), "it goes on as long as they do"
        assert "name conflict" in {line.event for line in rack.ask("h1", "agent.why", {"id": "host/h3"})}
        twin = rack.hosts["h4"].agent
        assert twin is not None
        twin.signal(9)
        rack.hosts["h4"].main = None
        rack.run(SEEN_KEPT_S + 60.0)
        assert all(wrong(rack, name) == set() for name in ("h1", "h2"))

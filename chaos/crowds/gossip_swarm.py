"""Many small racks of nothing but gossip, by seed: random faults, and then, without faults, what gossip promises.

Without faults every host sees every other within 90 s, has the newest facts, and is quiet. After that, one at a time: a
published value reaches all; a second machine of a name stays out; a host that receives nothing makes no other one gone;
a host that announces an absence is away for all until its time is over; a host that dies is gone for all.
"""

import random
from collections.abc import Callable

from chaos.crowds.gossip import Crowd, Member
from covey.core.ids import HostId
from gossip.settings import GossipSettings
from gossip.spread.messages import TOMBSTONES_MAX
from gossip.types import HostDown, HostUp

WHOLE_S = 90.0
"""Seconds within which a rack is whole after the last fault."""
PUBLISHED_S = 2.0
LEFT_S = 0.5
GONE_S = 18.0
"""Seconds within which a death is noticed where at least four others live: the shortest suspicion takes 4 s, the
longest 24 s and more."""
DEAF_S = 60.0
DEAF_AT_FIRST_S, DEAF_PROBES = 10.0, 5
"""Seconds after a host becomes deaf, and most probes that it sends in them: it asks at most half as often, at once,
since it takes itself for the cause (Lifeguard IV-A)."""
AWAY_S = 8
PUSHED_S = 0.3
FAULTS = (
    "kill",
    "restart",
    "reinstall",
    "cut",
    "one way",
    "heal",
    "pause",
    "publish",
    "churn",
    "leave",
    "away",
    "wait",
)


class Swarm:
    """One story: a rack, what was done to it, and whether it recovered."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.crowd = Crowd(seed=seed, loss=self.rng.choice([0.0, 0.0, 0.02, 0.1, 0.2]))
        self.crowd.slow = self.rng.choice([0.0, 0.0, 0.1, 0.3])
        self.names = [str(host.name) for host in self.crowd.rack(self.rng.randint(3, 8))]
        for name in self.names:
            self._introduce(self.crowd.members[name])
        self.boots = dict.fromkeys(self.names, 1)
        self.log: list[tuple[float, str, str]] = []

    @property
    def now_s(self) -> float:
        return self.crowd.now_s

    @property
    def steps(self) -> int:
        return self.crowd.steps

    @property
    def faults(self) -> int:
        return len(self.log)

    @property
    def ended(self) -> object:
        return self.crowd.now_s, self.log

    def restart(self, member: Member, uuid: bytes, boot: int, remember: bool) -> None:
        records = member.gossip.membership.records() if remember else ()
        self.boots[member.name] = boot
        self.crowd.kill(member)
        again = self.crowd.start(
            member.name,
            self.names[:3],
            boot=boot,
            uuid=uuid,
            remembered=tuple(record for record in records if record.host != member.name),
        )
        self._introduce(again)

    def _introduce(self, member: Member) -> None:
        """Publish the first facts of a member, as an agent does when it starts."""
        for key in ("links", "http"):
            member.spread(key, self.rng.randbytes(4))

    def fault(self) -> None:
        rng, crowd = self.rng, self.crowd
        fault, member = rng.choice(FAULTS), crowd.members[rng.choice(self.names)]
        self.log.append((round(crowd.now_s, 2), fault, member.name))
        if fault == "kill":
            crowd.kill(member)
        elif fault == "restart":
            self.restart(member, member.gossip.me.uuid, self.boots[member.name] + 1, rng.random() < 0.7)
        elif fault == "reinstall":
            uuid = rng.randbytes(16)
            self.restart(member, uuid, self.boots[member.name] + 1 if uuid[0] % 2 else 1, remember=False)
        elif fault == "cut":
            some = rng.sample(self.names, rng.randint(1, len(self.names) - 1))
            others = [name for name in self.names if name not in some]
            crowd.partition([crowd.members[name] for name in some], [crowd.members[name] for name in others])
        elif fault == "one way":
            crowd.cut.add((rng.choice(self.names), rng.choice(self.names)))
        elif fault == "heal":
            crowd.cut.clear()
        elif member.up and fault == "pause":
            crowd.pause(member, rng.uniform(0.2, 20))
        elif member.up and fault == "publish":
            member.spread(rng.choice("abc"), rng.choice([None, rng.randbytes(5)]))
        elif member.up and fault == "churn":
            self._churn(member)
        elif member.up and fault in ("leave", "away"):
            crowd.leave(member, rng.randint(1, 60) if fault == "away" else 0)
        crowd.run(rng.choice([0.1, 1, 5, 20, 60]))

    def _churn(self, member: Member) -> None:
        """Let a member take back more facts than are remembered as taken back."""
        keys = [f"k{number}" for number in range(TOMBSTONES_MAX + 4)]
        for key in keys:
            member.spread(key, self.rng.randbytes(3))
        self.crowd.run(self.rng.uniform(0.0, 3.0))
        for key in keys:
            member.spread(key, None)

    def end_faults(self) -> float:
        """End all faults; returns the seconds until all agree."""
        self.crowd.cut.clear()
        self.crowd.loss = self.crowd.slow = 0.0
        for name in self.names:
            member = self.crowd.members[name]
            if not member.up:
                self.restart(member, member.gossip.me.uuid, self.boots[name] + 1, remember=True)
        return self.crowd.run(120, self.crowd.agree)

    def check(self) -> None:
        crowd = self.crowd
        assert crowd.agree(), "they do not agree"
        crowd.run(30)
        before = {member.name: len(member.told) for member in crowd.running()}
        crowd.run(30)
        said = [fact for member in crowd.running() for _, fact in member.told[before[member.name] :]]
        assert crowd.agree() and not said, f"something goes on: {said}"
        for member in crowd.running():
            for name in self.names:
                mine, own = member.peers()[name], crowd.members[name].peers()[name]
                assert mine.values == own.values and mine.age_s < 6, f"what {member.name} knows of {name}: {mine}"

    # ---- what gossip promises without faults -------------------------------------------------------------------------

    def promises(self) -> None:
        hosts = [self.crowd.members[name] for name in self.names]
        self._published(self.rng.choice(hosts))
        self._leaves(self.rng.choice(hosts))
        hosts = [self.crowd.members[name] for name in self.names]
        self._second_of_a_name(self.rng.choice(hosts))
        self._deaf(self.rng.choice(hosts))
        self._away(*self.rng.sample(hosts, 2))
        self._dies(self.rng.choice(self.crowd.running()))

    def _within(self, seconds: float, reached: Callable[[], bool], what: str) -> None:
        took_s = self.crowd.run(seconds + 1.0, reached)
        assert took_s <= seconds and reached(), f"not within {seconds:g} s: {what}"

    def _others(self, member: Member) -> list[Member]:
        return [other for other in self.crowd.running() if other is not member]

    def _published(self, member: Member) -> None:
        value, others = self.rng.randbytes(6), self._others(member)

        def knows(other: Member) -> bool:
            return other.peers()[member.name].values.get("new") == value

        self.crowd.run(PUSHED_S)
        member.spread("new", value)
        self.crowd.run(PUSHED_S)
        told, pushed_to = sum(knows(other) for other in others), min(len(others), GossipSettings().gossip_fanout)
        assert told >= pushed_to, f"{member.name} pushed its news to {told} and not to {pushed_to}"
        self._within(PUBLISHED_S, lambda: all(knows(other) for other in others), f"all know what {member.name} says")

    def _leaves(self, member: Member) -> None:
        """A member leaves: all are told; none has to find out by probing."""
        self.crowd.leave(member)
        self._within(LEFT_S, lambda: self.crowd.all_see(member.name, "left"), f"all know that {member.name} left")
        self.restart(member, member.gossip.me.uuid, self.boots[member.name] + 1, remember=True)
        self._within(WHOLE_S, self.crowd.agree, "all agree after one left and came back")
        self.crowd.run(3.0)

    def _second_of_a_name(self, first: Member) -> None:
        others = self._others(first)
        seeds, since_s = [other.name for other in others[:2]], self.crowd.now_s
        second = self.crowd.start(first.name, seeds, uuid=self.rng.randbytes(16), place="elsewhere")
        self.crowd.run(5.0)
        taken = [other.name for other in others if first.name in ups(other, since_s)]
        assert not taken, f"a second machine has the name of {first.name} in the eyes of {', '.join(taken)}"
        self.crowd.kill(second)
        self._within(WHOLE_S, self.crowd.agree, "all agree once the second machine of a name is off")

    def _deaf(self, deaf: Member) -> None:
        """A member receives nothing: the worst member of a rack (Lifeguard I)."""
        others = self._others(deaf)
        since_s = self.crowd.now_s
        cut = {(other.place, deaf.place) for other in others}
        self.crowd.cut |= cut
        before = deaf.gossip.membership.counts["probes"]
        self.crowd.run(DEAF_AT_FIRST_S)
        asked = deaf.gossip.membership.counts["probes"] - before
        assert asked <= DEAF_PROBES, f"{deaf.name} is deaf, and asked others {asked} times in {DEAF_AT_FIRST_S:g} s"
        self.crowd.run(DEAF_S - DEAF_AT_FIRST_S)
        harmed = {host for other in others for host in downs(other, since_s)} - {deaf.name}
        assert not harmed, f"{', '.join(sorted(harmed))} are gone since {deaf.name} is deaf"
        self.crowd.cut -= cut
        self._within(WHOLE_S, self.crowd.agree, "all agree after one was deaf")

    def _away(self, away: Member, restarts: Member) -> None:
        """One member does not come back as announced; another one starts again meanwhile, and is told."""
        since_s = self.crowd.now_s
        self.crowd.kill(restarts)
        self.crowd.leave(away, AWAY_S)
        self.restart(restarts, restarts.gossip.me.uuid, self.boots[restarts.name] + 1, remember=True)
        others = self._others(away)
        self._within(3.0, lambda: self.crowd.all_see(away.name, "away"), f"all know that {away.name} is away")
        self.crowd.run(since_s + AWAY_S + 3.0 - self.crowd.now_s)
        unknown = [other.name for other in others if away.name not in downs(other, since_s)]
        assert not unknown, f"{away.name} did not come back, and {', '.join(unknown)} were not told"

    def _dies(self, dead: Member) -> None:
        self._within(WHOLE_S, self.crowd.agree, "all agree after a restart")
        self.crowd.kill(dead)
        within_s = GONE_S if len(self.crowd.running()) >= 4 else 2 * GONE_S
        self._within(within_s, lambda: self.crowd.all_see(dead.name, "gone"), f"all know that {dead.name} is gone")


def downs(member: Member, since_s: float) -> list[HostId]:
    """Hosts that the member said are down since then."""
    return [fact.host for at_s, fact in member.told if isinstance(fact, HostDown) and at_s >= since_s]


def ups(member: Member, since_s: float) -> list[HostId]:
    """Hosts that the member said came or came back since then."""
    return [fact.host for at_s, fact in member.told if isinstance(fact, HostUp) and at_s >= since_s]


def play(seed: int) -> Swarm:
    """Play one seed. Raises AssertionError, with the faults of that seed, when something that must hold does not."""
    swarm = Swarm(seed)
    try:
        for _ in range(swarm.rng.randint(5, 20)):
            swarm.fault()
        took_s = swarm.end_faults()
        assert took_s <= WHOLE_S, f"not whole {took_s:.0f} s after the last fault"
        swarm.check()
        swarm.promises()
    except AssertionError as error:
        raise AssertionError(f"{error}; faults: {swarm.log}") from error
    return swarm

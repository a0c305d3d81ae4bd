"""A rack that began with one voter: the leader lets two more hosts vote, one after the other, while agents, power and
the network fail. None stops voting by itself, two of three lead without the third, and one of three never does."""

from chaos import faults
from chaos.rack_seen import RackSeen
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.stories.voter_replaced import now, strike
from chaos.story import ended
from chaos.world.world import World
from covey.core.ids import HostId

SETTINGS = {"leader": {"voters": ["h1"], "voters_wanted": 3}}
RACK_HOSTS = (3, 5)
GROWN_S = 120.0
"""Seconds after everything is healed within which three vote: 30 s alive, and a learner that has to catch up, twice."""


class OneByOne:
    """The voters that were ever committed form one chain, each with one host more than the one before."""

    name, every_s, after = "voters are added one at a time, and none is removed", 0.0, "moved"

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack
        self.chain: dict[int, tuple[HostId, ...]] = {}
        """Number of voters -> who they are."""

    def check(self, world: World) -> None:
        raft = self.rack.moved
        if raft is None or not raft._raft_log.configuration_committed:
            return
        hosts = raft.configuration.hosts
        known = self.chain.setdefault(len(hosts), hosts)
        assert known == hosts, f"{known} and {hosts} were both committed"
        before = self.chain.get(len(hosts) - 1)
        assert len(hosts) == 1 or (before is not None and {*before} < {*hosts}), f"{before} became {hosts}"


def play(rack: SimRack) -> None:
    rack.world.watch(OneByOne(rack))
    rack.settle()
    job = train(rack, rounds=25, workers=2)
    for _ in range(rack.rng.randrange(2, 7)):
        rack.run(rack.rng.choice((0.2, 3.0, 10.0, 25.0)))
        strike(rack, "h1", rack.rng.choice(["h2", "h3"]))
    rack.run(10.0)
    rack.heal()

    def grown() -> bool:
        found = {now(rack, name) for name in rack.hosts if name in rack.alive() and rack.began(name)}
        return len(found) == 1 and all(len(voters) == 3 and not change for voters, change in found)

    rack.until(grown, GROWN_S, "three hosts vote, and all know it")
    voters = [str(name) for name in rack.agents["h1"].log.voters]
    lost, *others = rack.rng.sample(voters, 3)
    faults.strike(rack.world, faults.Kill("host", lost, 600.0))
    rack.until(lambda: rack.leader() in others, 30.0, f"{others} lead without {lost}")
    faults.strike(rack.world, faults.Kill("host", others[0], 600.0))
    rack.run(8.0)
    assert rack.leader() is None, "one of three leads"
    rack.heal()
    rack.settle(90.0)
    rack.run(60.0)
    assert grown(), "what is enough does not grow"
    ended(rack, {job: ("done", "failed")})

"""The log of one voter is gone, or an older copy of it lies in its place, or its host is installed anew on an empty
disk that knows of no vote it gave, while another voter is away: what the other two had committed is not forgotten. The
one that was away and the one that lost its log elect no leader; once the third is back everything is there, and the
lost log is brought up to date."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended
from chaos.world.world import Broken

AWAY_S = 1000.0
FOLDER = "consensus/"


def play(rack: SimRack) -> None:
    rack.settle()
    first = train(rack, rounds=3, workers=2)
    away, loser, keeper = rack.rng.sample(sorted(rack.agents[sorted(rack.hosts)[0]].voters), 3)
    older = rack.hosts[loser].disk.image(FOLDER)
    _kill(rack, away)
    second = train(rack, rounds=3, workers=2, key="second", on=keeper)
    rack.run(rack.rng.uniform(0.5, 3.0))
    _kill(rack, loser)
    _kill(rack, keeper)
    if rack.world.seed % 3 == 0:
        rack.hosts[loser].disk.files.clear()
        rack.world.mark("fault", loser, "it is installed anew")
    elif rack.rng.random() < 0.5:
        rack.hosts[loser].disk.damage(FOLDER, "lost")
    else:
        rack.hosts[loser].disk.restore(FOLDER, older)
    for name in (away, loser):
        rack.hosts[name].revive()
    for _ in range(150):
        rack.run(0.1)
        if leader := rack.leader():
            raise Broken(f"{leader} leads without what was committed")
    rack.hosts[keeper].revive()
    rack.until(lambda: rack.leader() is not None, 30.0, "a host leads again")
    third = train(rack, rounds=3, workers=2, key="third")
    if len({first, second, third}) != 3:
        raise Broken(f"an id was given out twice: {first}, {second}, {third}")
    rack.settle()
    rack.until(lambda: not any(rack.agents[name].log.trouble for name in (loser, keeper)), 30.0, "every log has a vote")
    _kill(rack, keeper)
    rack.until(lambda: rack.leader() in (away, loser), 30.0, "the log that was lost counts again")
    rack.hosts[keeper].revive()
    ended(rack, dict.fromkeys((first, second, third), ("done", "failed")))


def _kill(rack: SimRack, name: str) -> None:
    faults.strike(rack.world, faults.Kill("agent", name, AWAY_S))

"""No rack: small racks of nothing but gossip, some for each seed (`chaos.crowds.gossip_swarm`)."""

from chaos.crowds import gossip_swarm
from chaos.story import Told, told_of_worlds

WORLDS = 2
"""For each seed."""


def worlds(seed: int) -> Told:
    played = [gossip_swarm.play(number) for number in range(seed * WORLDS, (seed + 1) * WORLDS)]
    return told_of_worlds(
        "gossip_worlds",
        seed,
        seconds=sum(swarm.crowd.now_s for swarm in played),
        steps=sum(swarm.crowd.steps for swarm in played),
        faults=sum(len(swarm.log) for swarm in played),
        ended=[(swarm.crowd.now_s, swarm.log) for swarm in played],
    )

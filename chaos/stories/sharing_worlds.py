"""No rack: gangs that are to be upgraded, some for each seed (`chaos.crowds.upgrades`)."""

from chaos.crowds import upgrades
from chaos.story import Told, told_of_worlds

WORLDS = 10
"""For each seed."""


def worlds(seed: int) -> Told:
    played = [upgrades.play(number) for number in range(seed * WORLDS, (seed + 1) * WORLDS)]
    return told_of_worlds(
        "sharing_worlds",
        seed,
        seconds=sum(gang.now_s for gang in played),
        steps=sum(gang.steps for gang in played),
        faults=0,
        ended=[(gang.now_s, gang.done) for gang in played],
    )

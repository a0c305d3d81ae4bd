"""No rack: aggregators that hold room for jobs of others, some for each seed (`chaos.crowds.reservations`)."""

from chaos.crowds import reservations
from chaos.story import Told, told_of_worlds

WORLDS = 10
"""For each seed."""


def worlds(seed: int) -> Told:
    played = [reservations.play(number) for number in range(seed * WORLDS, (seed + 1) * WORLDS)]
    return told_of_worlds(
        "aggregator_worlds",
        seed,
        seconds=sum(room.now_s for room in played),
        steps=sum(room.steps for room in played),
        faults=0,
        ended=[(room.now_s, sorted(room.epochs.items())) for room in played],
    )

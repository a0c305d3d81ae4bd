"""No rack: small racks of nothing but the replicated log, some for each seed (`chaos.crowds.log`)."""

from chaos.crowds.log import late
from chaos.crowds.log.play import run_seed
from chaos.story import Told, told_of_worlds

WORLDS = 10
"""For each seed."""


def worlds(seed: int) -> Told:
    played = [run_seed(number) for number in range(seed * WORLDS, (seed + 1) * WORLDS)]
    slow = late.play(seed)
    return told_of_worlds(
        "log_worlds",
        seed,
        seconds=sum(world.now_s for world in played) + slow.now_s,
        steps=sum(world.steps for world in played),
        faults=sum(world.seen for world in played),
        ended=[slow.leaders] + [(world.now_s, sorted(world.chosen_prefix.items())) for world in played],
    )

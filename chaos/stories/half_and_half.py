"""The rack splits into two halves for 15 s or for minutes while a job trains and another is submitted, then heals. The
half without a majority admits nothing."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    job = train(rack, rounds=30)
    rack.run(rack.rng.uniform(1.0, 5.0))
    names = sorted(rack.hosts)
    rack.rng.shuffle(names)
    half = len(names) // 2
    for_s = rack.rng.choice((15.0, 100.0))
    faults.strike(rack.world, faults.Partition(tuple(names[:half]), tuple(names[half:]), False, for_s))
    rack.run(3.0)
    second = train(rack, rounds=3, tenant="blue", workers=2, key="second", within_s=200.0)
    rack.run(for_s)
    ended(rack, {job: ("done",), second: ("done",)})

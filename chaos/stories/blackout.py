"""The power of the whole rack fails at once, and comes back host by host: every job that was accepted is still known,
and ends; ranks that died with their hosts may cost their job its success, never its place in the list."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    jobs = {}
    for number in range(4):
        job = train(rack, rounds=6, tenant="blue", workers=2, key=f"black-{number}")
        jobs[job] = ("done", "failed")
        rack.run(rack.rng.uniform(0.0, 0.05))
    for host in rack.hosts:
        faults.strike(rack.world, faults.Kill("host", host, rack.rng.uniform(1.0, 20.0)))
    rack.run(30.0)
    ended(rack, jobs)

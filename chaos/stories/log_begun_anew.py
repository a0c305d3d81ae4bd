"""Every voter loses its log while ranks run on, and the rack begins anew, as it advises: jobs and quotas are gone, and
what still ran ends; a new job never has the number of one whose ranks may still be there."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.stories.cut_off import ranks
from chaos.story import ended

AWAY_S = 1000.0
LOST = ("consensus", "acknowledged")


def play(rack: SimRack) -> None:
    rack.settle()
    spec = {"argv": ["sleeper", "300"], "tenant": "default", "workers": 2, "cwd": "/", "on_lost": "keep"}
    first = rack.submit(spec, f"before-{rack.world.seed}")
    rack.until(lambda: len(ranks(rack, first)) == 2, 30.0, "its ranks run")
    rack.run(rack.rng.uniform(2.0, 6.0))
    for name in rack.hosts:
        faults.strike(rack.world, faults.Kill("agent", name, AWAY_S))
    for host in rack.hosts.values():
        for lost in LOST:
            host.disk.damage(lost, "lost")
    rack.log_begins_anew()
    for host in rack.hosts.values():
        host.revive()
    rack.until(lambda: rack.leader() is not None, 60.0, "a host leads a new log")
    second = train(rack, rounds=3, tenant="default", workers=1, key="after")
    assert second != first or not ranks(rack, first), f"{first} was given out again while its ranks run"
    assert second != first, f"the number of {first} was given out again"
    ended(rack, {second: ("done",)})

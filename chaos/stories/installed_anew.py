"""A host is installed while its clock is ahead by minutes to a day, works for a while, and is installed anew under its
name with an empty disk and the right time: its boots are lower from then on. That is before or after the others have
called it gone. It gets work again, like any other host."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories.classes import state
from chaos.story import WHOLE_S, ended
from covey.core.ids import JobId


def play(rack: SimRack) -> None:
    rack.settle()
    host = rack.hosts[rack.rng.choice(sorted(rack.hosts))]
    host.power_off()
    host.clock.skew(1, rack.rng.choice((300.0, 8 * 3600.0, 86_400.0)), 1.0)
    rack.run(rack.rng.uniform(0.5, 3.0))
    host.power_on()
    rack.settle(WHOLE_S)
    first = on_all(rack, "ahead")
    host.power_off()
    host.clock.end_skew()
    host.disk.files.clear()
    host.lose_records()
    rack.world.mark("fault", host.name, "it is installed anew")
    rack.run(rack.rng.uniform(0.5, 45.0))
    host.power_on()
    rack.run(rack.rng.uniform(5.0, 60.0))
    rack.settle(WHOLE_S)
    if rack.rng.random() < 0.5:
        faults.strike(rack.world, faults.Restart(host.name, rack.rng.uniform(0.5, 2.0)))
        rack.settle(WHOLE_S)
    second = on_all(rack, "anew")
    ended(rack, {first: ("done",), second: ("done",)})


def on_all(rack: SimRack, key: str) -> JobId:
    """Run a gang with ranks on every host, and wait for its end."""
    spec = {"argv": ["sleeper", "2"], "workers": 2 * len(rack.hosts), "cwd": "/"}
    job = rack.submit(spec, f"{key}-everywhere-{rack.world.seed}")
    rack.until(lambda: state(rack, job) == "done", 60.0, f"{job} on all hosts ends")
    return job

"""A host whose agent started again a few times finds an older copy of its identity (a backup, a snapshot of its disk);
in half of the stories its wall clock was ahead meanwhile, by up to a day, and is right again. Its boot number may not
go back with it, or other hosts take all that it says for old messages."""

import signal

from chaos import faults
from chaos.rackworld import SimRack
from chaos.story import WHOLE_S, ended


def play(rack: SimRack) -> None:
    rack.settle()
    name = rack.rng.choice(sorted(rack.hosts))
    host = rack.hosts[name]
    older = host.disk.image("identity")
    if rack.rng.random() < 0.5:
        faults.strike(rack.world, faults.SkewClock(name, rack.rng.uniform(60.0, 86_400.0), for_s=3600.0))
    for _ in range(rack.rng.randint(2, 4)):
        faults.strike(rack.world, faults.Restart(name, rack.rng.uniform(0.5, 2.0)))
        rack.run(rack.rng.uniform(4.0, 8.0))
    rack.settle()
    host.clock.end_skew()
    assert host.agent is not None
    host.agent.signal(rack.rng.choice((signal.SIGKILL, signal.SIGTERM)))
    rack.run(rack.rng.uniform(1.0, 4.0))
    rack.world.mark("fault", name, "its identity is an older copy")
    host.disk.restore("identity", older)
    host.start_agent()
    rack.settle(WHOLE_S)
    ended(rack, {})

"""A host that sums a job's tensors is told not to (serve = false), and its agent starts again, while its aggd runs, is
dead, or is stopped. The job's sums continue elsewhere and stay exact, and no aggd is left on that host."""

import signal

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended

SETTINGS = {"aggregator": {"direct": "never"}}
STILL_S = 8.0
"""Seconds that aggd is stopped: longer than it may take to obey."""


def play(rack: SimRack) -> None:
    rack.settle()
    job = train(rack, rounds=60)
    rack.until(lambda: bool(serving(rack)), 20.0, "an aggregator sums")
    rack.run(rack.rng.uniform(0.5, 4.0))
    host = rack.rng.choice(serving(rack))
    agent = rack.hosts[host].agent
    assert agent is not None
    agent.signal(signal.SIGTERM)
    rack.until(lambda: not agent.alive, 6.0, f"the agent of {host} has ended")
    rack.configure(host, {"aggregator": {"serve": False, "direct": "never"}})
    fault = (faults.Kill("program", host, 0.0, "aggd"), faults.Pause(host, STILL_S, "aggd"), None)[rack.world.seed % 3]
    if fault is not None:
        faults.strike(rack.world, fault)
    rack.run(rack.rng.uniform(0.0, 2.0))
    rack.hosts[host].start_agent()
    rack.run(2 * STILL_S)
    assert host not in serving(rack), f"aggd is left on {host}, which serves no more"
    ended(rack, {job: ("done",)})


def serving(rack: SimRack) -> list[str]:
    """Hosts on which an aggd runs."""
    return [name for name, host in rack.hosts.items() if host.find("aggd")]

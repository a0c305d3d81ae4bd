"""The agent beside a volume is stopped for longer than a lease of slabs, as it announced: the volume's process keeps
running without it, no lender takes anything back, and every page is where it was."""

import signal

from chaos.actors.pager import LONG_RUNS
from chaos.rackworld import SimRack
from chaos.stories.rolling_restart import places
from chaos.story import READ_S, ended

SETTINGS = {"gossip": {"away_s": 200}}
LEASE_S = 60.0


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h2", "vol1", 1 << 20, 2 * LEASE_S, pace=LONG_RUNS)
    rack.until(lambda: len(places(rack, "h2")) >= 2, 60.0, "slabs are lent")
    rack.run(rack.rng.uniform(1.0, 8.0))
    before, agent = places(rack, "h2"), rack.hosts["h2"].agent
    assert agent is not None
    agent.signal(signal.SIGTERM)
    rack.until(lambda: not agent.alive, 6.0, "the agent has ended")
    rack.run(rack.rng.uniform(LEASE_S + 10.0, 2 * LEASE_S))
    for lender in {place[0] for place in before.values()}:
        lent = {
            (key.slab.volume, key.slab.index) for key in rack.plugin(lender, "memory").lending.machine.lent.values()
        }
        gone = [slab for slab, place in before.items() if place[0] == lender and slab not in lent]
        assert not gone, f"{lender} took {gone} back while the borrower's agent was away as it had said"
    rack.hosts["h2"].start_agent()
    rack.settle()
    rack.until(lambda: not pager.alive, READ_S, "the pager reads everything back")
    assert pager.code == 0
    ended(rack, {})

"""Every agent is restarted, one after another, as an upgrade does: its job, its slabs and its sums continue meanwhile,
so nothing moves, nothing is taken back, and no attempt is spent."""

import signal

from chaos.actors.pager import LONG_RUNS
from chaos.rackworld import SimRack
from chaos.stories import train, working
from chaos.stories.agent_killed import attempts
from chaos.story import ended

HEALING = {"argv": ["learner", "4000", "8", "gather"], "tenant": "blue", "workers": 2, "pack": "apart", "cwd": "/"}
"""A job whose ranks may be lost, so that its hosts are waited for less long than others."""
AWAY_S = (0.5, 18.0)
"""Least and most seconds that an agent is down; it says 60 s, and ranks have a lease of 25 s at least."""


def play(rack: SimRack) -> None:
    rack.settle()
    job = train(rack, rounds=2000)
    rack.until(lambda: len(working(rack)) >= 1, 20.0, "ranks run")
    heals = rack.submit(HEALING, f"learner-{rack.world.seed}")
    rack.until(lambda: len(learning(rack)) == HEALING["workers"], 30.0, "ranks that heal run")
    pager = rack.pager("h2", "vol1", 1 << 20, 150.0, pace=LONG_RUNS)
    rack.until(lambda: len(places(rack, "h2")) >= 2, 60.0, "slabs are lent")
    rack.run(5.0)
    before, ranks, epoch, healing = places(rack, "h2"), working(rack), grant(rack, job), learning(rack)
    for name in rack.rng.sample(sorted(rack.hosts), len(rack.hosts)):
        restarted(rack, name)
        after = places(rack, "h2")
        moved = {slab: (before[slab], after.get(slab)) for slab in before if after.get(slab) != before[slab]}
        assert not moved, f"after the restart of {name} slabs moved: {moved}"
        before = after
        assert learning(rack) == healing, f"after the restart of {name} other processes learn"
    assert working(rack) == ranks
    rack.ask("h1", "scheduler.cancel", {"id": heals})
    assert (attempts(rack, job), grant(rack, job)) == (1, epoch), "an attempt was spent"
    rack.until(lambda: not pager.alive, 300.0, "the pager reads everything back")
    assert pager.code == 0
    rack.ask("h1", "scheduler.cancel", {"id": job})
    ended(rack, {job: ("cancelled", "done"), heals: ("cancelled",)})


def learning(rack: SimRack) -> list[tuple[str, str]]:
    """Hosts and processes of the job that heals: none of its ranks is to begin anew, or elsewhere."""
    return sorted((name, str(process.id)) for name, host in rack.hosts.items() for process in host.find("learner"))


def restarted(rack: SimRack, name: str) -> None:
    """Send SIGTERM to an agent, wait some seconds, and start it; the others see it `away` meanwhile."""
    agent = rack.hosts[name].agent
    assert agent is not None
    agent.signal(signal.SIGTERM)
    rack.until(lambda: not agent.alive, 6.0, f"the agent of {name} has ended")
    rack.run(rack.rng.uniform(*AWAY_S))
    for other in rack.alive():
        seen = next(view for view in rack.agents[other].hosts() if view.host == name)
        assert seen.state == "away" and 0 < seen.away_s <= 60, f"{other} sees {name} {seen.state}"
    rack.hosts[name].start_agent()
    rack.settle()
    rack.run(rack.rng.uniform(3.0, 6.0))


def places(rack: SimRack, borrower: str) -> dict[tuple[str, int], tuple[str, int]]:
    """Slab -> its lender and epoch."""
    memory = rack.plugin(borrower, "memory")
    slabs = [] if memory is None else memory.borrowing.machine._all()
    return {(slab.volume, slab.index): (slab.place.lender, slab.place.epoch) for slab in slabs if slab.place}


def grant(rack: SimRack, job: str) -> int:
    return int(rack.plugin("h1", "scheduler").queue.jobs[job].grant.epoch)

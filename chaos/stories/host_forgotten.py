"""A host loses its power for good, now and then a voter, the leader, one that was drained, or one on which a gang has
ranks, and a person has it forgotten, while agents restart and the network fails: no host lists it, it has no vote and
no drain, its job runs elsewhere, and another host votes in its place, by itself. It is not forgotten while anybody
hears it. When it comes back all the same it is one more host without a vote; installed anew, too."""

import signal
from collections.abc import Callable

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.stories.voter_replaced import now
from chaos.story import WHOLE_S, ended
from covey.core.errors import Refused
from covey.core.ids import HostId

RACK_HOSTS = (4, 5)
REMEMBERED_S = 12.0
"""Seconds after which each host has written down which others it knows (`gossip.service.PEERS_INTERVAL_S`)."""
ASKED_S = 90.0
"""Seconds within which the request is fulfilled: gossip has to find the host gone, and a leader to be there."""
REFILLED_S = 90.0
"""Seconds within which another host votes: 30 s alive after its own restart, and a learner that has to catch up."""


def play(rack: SimRack) -> None:
    rack.settle()
    job = train(rack, rounds=25, workers=2)
    misses = rack.rng.random() < 0.4
    rack.run(rack.rng.uniform(0.0, 4.0) + misses * REMEMBERED_S)
    name = rack.leader() if rack.rng.random() < 0.3 else None
    lost = name or rack.rng.choice(sorted(rack.hosts))
    if rack.rng.random() < 0.3:
        insist(rack, "scheduler.drain", lost, lambda: drained(rack, lost))
    is_refused(rack, lost)
    rack.hosts[lost].power_off()
    others = [other for other in sorted(rack.hosts) if other != lost]
    missed = misses_it(rack, lost, others) if misses else None
    if missed is None and rack.rng.random() < 0.5:
        faults.strike(rack.world, faults.Kill("agent", rack.rng.choice(others), rack.rng.uniform(0.3, 5.0)))
    insist(rack, "agent.forget_host", lost, lambda: forgotten(rack, lost))
    rack.until(lambda: forgotten(rack, lost), WHOLE_S, f"nobody knows {lost}")
    rack.run(rack.rng.uniform(1.0, 30.0))
    if missed is not None:
        rack.hosts[missed].start_agent()
        rack.until(lambda: rack.began(missed), WHOLE_S, f"{missed} is back, and knew {lost}")
        rack.run(15.0)
        assert forgotten(rack, lost), f"{lost} is known again by {missed}, which was off meanwhile"
    restarted = rack.rng.choice([other for other in rack.alive() if rack.began(other)])
    faults.strike(rack.world, faults.Restart(restarted, rack.rng.uniform(0.5, 2.0)))
    rack.run(15.0)
    assert forgotten(rack, lost), f"{lost} is known again after {restarted} restarted"
    seats = min(3, len(others))
    rack.until(lambda: refilled(rack, seats), REFILLED_S, f"{seats} hosts vote again, without {lost}")
    if rack.rng.random() < 0.5:
        rack.hosts[lost].disk.files.clear()
        rack.world.mark("fault", lost, "it is installed anew")
    rack.hosts[lost].power_on()
    rack.settle(WHOLE_S)
    rack.run(5.0)
    for host in rack.alive():
        voters, under_way = now(rack, host)
        assert HostId(lost) not in voters and not under_way, f"{lost} votes again: {voters}, {under_way}"
        assert any(view.host == lost and view.state == "alive" for view in rack.agents[host].hosts())
    ended(rack, {job: ("done", "failed")})


def refilled(rack: SimRack, seats: int) -> bool:
    """Whether that many hosts vote, as all hosts know, and no change is under way."""
    found = {now(rack, name) for name in rack.alive() if rack.began(name)}
    return len(found) == 1 and all(len(voters) == seats and not change for voters, change in found)


def misses_it(rack: SimRack, lost: str, others: list[str]) -> str | None:
    """Stop the agent of another host, which remembers the lost one, until that is forgotten; None: the rack needs all
    others to decide."""
    voters, _ = now(rack, others[0])
    spare = [other for other in others if 2 * len(set(voters) - {lost, other}) > len(voters)]
    if not spare:
        return None
    missed = rack.rng.choice(spare)
    agent = rack.hosts[missed].agent
    assert agent is not None
    agent.signal(signal.SIGKILL)
    rack.world.mark("fault", missed, "its agent is off until the other is forgotten")
    return missed


def is_refused(rack: SimRack, host: str) -> None:
    """Nobody forgets a host that lives."""
    asked = rack.rng.choice([name for name in rack.alive() if name != host and rack.began(name)])
    try:
        rack.ask(asked, "agent.forget_host", {"id": host}, within_s=10.0)
    except Refused as refused:
        assert "only a host that is gone" in refused.why, refused
    else:
        raise AssertionError(f"{host} lives, and was forgotten")


def insist(rack: SimRack, command: str, host: str, holds: Callable[[], bool]) -> None:
    """Type a command on one host after the other until it holds; it may be typed twice."""
    end_s = rack.world.now + ASKED_S
    while not holds():
        assert rack.world.now < end_s, f"{command} {host}"
        able = [name for name in rack.alive() if name != host and rack.began(name)]
        try:
            rack.ask(rack.rng.choice(able), command, {"id": host}, within_s=15.0)
        except (Refused, TimeoutError):
            pass
        rack.run(1.0)


def drained(rack: SimRack, host: str) -> bool:
    plugins = [rack.plugin(name, "scheduler") for name in rack.alive()]
    return all(plugin is not None and host in plugin.queue.drained for plugin in plugins)


def forgotten(rack: SimRack, host: str) -> bool:
    """Whether no living agent has anything of the host."""
    for name in rack.alive():
        agent, scheduler = rack.agents[name], rack.plugin(name, "scheduler")
        if not rack.began(name) or scheduler is None or any(view.host == host for view in agent.hosts()):
            return False
        now_there = agent.log.configuration
        if host in (*now_there.hosts, now_there.learner, now_there.leaving) or host in scheduler.queue.drained:
            return False
        if any(job.awaits(HostId(host)) for job in scheduler.queue.live()):
            return False
    return True

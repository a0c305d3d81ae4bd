"""One voter takes the place of another while agents, power and the network fail: every leader continues the change,
and a job trains meanwhile. The old voter may be dead, may lead, and may be cut off; it disturbs no host when it is
back."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended
from covey.core.errors import Refused
from covey.core.ids import HostId

ASKED_S = 40.0
"""Seconds within which a leader accepts the request, whatever was struck meanwhile."""
DONE_S = 60.0
"""Seconds after everything is healed within which the change is completed everywhere."""


def play(rack: SimRack) -> None:
    rack.settle()
    job = train(rack, rounds=25)
    rack.run(rack.rng.uniform(0.0, 5.0))
    voters = [str(name) for name in rack.agents["h1"].log.voters]
    (new,) = (name for name in rack.hosts if name not in voters) if len(rack.hosts) == len(voters) + 1 else ("h4",)
    old = rack.rng.choice(voters)
    if rack.rng.random() < 0.4:
        faults.strike(rack.world, faults.Kill("host", old, rack.rng.choice((5.0, 40.0))))
        rack.run(2.0)
    begin(rack, new, old)
    for _ in range(rack.rng.randrange(1, 4)):
        rack.run(rack.rng.choice((0.01, 0.05, 0.2, 1.0)))
        strike(rack, old, new)
    rack.run(10.0)
    rack.heal()
    expected = tuple(sorted(HostId(name) for name in {*voters, new} - {old}))
    rack.until(lambda: all(now(rack, name) == (expected, "") for name in rack.hosts), DONE_S, f"{expected} vote")
    term = max(agent.log.term for agent in rack.agents.values())
    rack.run(10.0)
    after = max(agent.log.term for agent in rack.agents.values())
    assert after == term, f"nothing fails, and the term went from {term} to {after}: {old} goes on disturbing them"
    ended(rack, {job: ("done",)})


def begin(rack: SimRack, new: str, old: str) -> None:
    """Ask one agent after the other until the leader has accepted the request; asking twice is harmless."""
    end = rack.world.now + ASKED_S
    while True:
        asked = rack.rng.choice([name for name in rack.alive() if rack.began(name)])
        try:
            rack.ask(asked, "agent.change_voters", {"add": new, "remove": old}, within_s=10.0)
            return
        except (Refused, TimeoutError) as error:
            again = isinstance(error, TimeoutError) or error.code == 75 or "majority" in error.why
            assert again and rack.world.now < end, f"{new} for {old}: {error}"
            rack.run(1.0)


def strike(rack: SimRack, old: str, new: str) -> None:
    """Strike a fault, mostly at the leader, at times at the old or the new voter."""
    host = rack.rng.choice([rack.leader() or old, rack.leader() or new, old, new])
    others = tuple(name for name in rack.hosts if name != host)
    fault: faults.AnyFault = rack.rng.choice(
        (
            faults.Kill("agent", host, rack.rng.uniform(0.3, 5.0)),
            faults.Kill("host", host, rack.rng.uniform(2.0, 8.0)),
            faults.Partition((host,), others, False, rack.rng.uniform(0.5, 8.0)),
            faults.Pause(host, rack.rng.uniform(0.5, 4.0)),
        )
    )
    faults.strike(rack.world, fault)


def now(rack: SimRack, name: str) -> tuple[tuple[HostId, ...], str]:
    """The voters by this host's log, and the change that is under way there."""
    log = rack.agents[name].log
    return tuple(log.voters), f"{log.configuration.learner}{log.configuration.leaving}"

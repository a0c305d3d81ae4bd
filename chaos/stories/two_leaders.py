"""Two leaders look at a full quota: again and again the leader is cut off, or stopped, in the moment at which a job of
the tenant ends and the next ones could start. The tenant never runs more than the quota, and all jobs end."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import ended

ROUNDS = 3


def play(rack: SimRack) -> None:
    rack.settle()
    jobs = {train(rack, rounds=rack.rng.randint(4, 12), workers=2, key=f"first-{at}"): ("done",) for at in range(2)}
    jobs |= {train(rack, rounds=rack.rng.randint(2, 6), workers=2, key=f"next-{at}"): ("done",) for at in range(4)}
    for _ in range(ROUNDS):
        running = _running(rack)
        rack.run_until(lambda running=running: _running(rack) < running, 12.0)  # type: ignore[misc]
        leader = rack.leader()
        if leader is not None:
            others = tuple(name for name in rack.hosts if name != leader)
            for_s = rack.rng.uniform(1.5, 9.0)
            faults.strike(
                rack.world,
                rack.rng.choice(
                    (
                        faults.Partition((leader,), others, False, for_s),
                        faults.Partition((leader,), others, True, for_s),
                        faults.Pause(leader, for_s),
                    )
                ),
            )
        rack.run(rack.rng.uniform(0.0, 12.0))
    ended(rack, jobs)


def _running(rack: SimRack) -> int:
    """Number of ranks that run on any host."""
    return sum(len(host.find("trainer")) for host in rack.hosts.values())

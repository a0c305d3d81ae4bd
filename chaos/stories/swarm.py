"""Faults of many families at once, drawn from the seed; jobs of two tenants, a volume in use. Only what may fail does
(a killed rank fails its job, two failures take a page); and when all is healed the rack is whole, its jobs are over,
and every other page is there.

Seeds that once broke: 18 (the simulator judged wrongly who held a page), 101 (an identity that was put back from an
older copy never joined again), 660 (GPUs of ranks that had ended were held for ever), 5005 (a host that had been
stopped took its old copy of the log for the newest), 72125 (a coordinator that was back was not told who sums).
"""

from chaos import faults
from chaos.actors.pager import LONG_RUNS
from chaos.novelty import varied
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import READ_S, ended, not_stale
from covey.core.ids import JobId
from plugins.scheduler.machine.log.jobs import OVER

FAULTS_S = 60.0


def play(rack: SimRack, mischief: bool = False, others: dict[JobId, tuple[str, ...]] | None = None) -> None:
    """Play the swarm. `others`: jobs submitted by other code meanwhile, and the states in which each may end."""
    rack.settle()
    rack.world.mischief.on = mischief
    start = rack.world.now
    plan = faults.swarm(rack.world.seed, sorted(rack.hosts), start, start + FAULTS_S)
    if rack.variation:
        plan = list(varied(plan, rack.world.seed, rack.variation, sorted(rack.hosts)))
    faults.schedule(rack.world, plan)
    if any(isinstance(fault, faults.Damage) for _, fault in plan):
        rack.administered()
    end = max([start + FAULTS_S, *(at + fault.for_s + 5.0 for at, fault in plan if fault.for_s >= faults.AWAY_S[0])])
    rack.forgive()
    pager = rack.pager(rack.rng.choice(sorted(rack.hosts)), "vol1", 1 << 18, FAULTS_S, pace=LONG_RUNS)
    jobs = {} if others is None else others
    for number in range(rack.rng.randint(1, 4)):
        tenant = rack.rng.choice(("red", "blue"))
        job = train(
            rack,
            rounds=rack.rng.randint(2, 40),
            tenant=tenant,
            workers=rack.rng.randint(1, 2 if tenant == "blue" else 4),
            key=f"swarm-{number}",
            within_s=FAULTS_S + 120.0,
        )
        jobs[job] = OVER
        rack.run(rack.rng.uniform(0.0, 12.0))
    rack.run(max(0.0, end - rack.world.now))
    ended(rack, jobs)
    rack.until(lambda: not pager.alive, READ_S, "the pager is done")
    reading = rack.readers()
    rack.until(lambda: not any(process.alive for process in reading), READ_S, "every page is read back")
    not_stale(rack)

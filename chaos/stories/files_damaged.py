"""Files of one host after the other are lost, replaced by an older copy, cut, or changed in a byte while its agent is
down, or the whole host. An agent that cannot trust what it finds ends with a status of its own and says what to do,
which is done. No committed job or quota is lost, nothing is given out or run twice, no acknowledged page is lost.

Seeds that once broke: 6 (pages of a place closed in good order were not synced before its lender forgot them), 16 and
34 (ranks whose supervisor's file was lost began again under the same epoch and waited for ever).
"""

from typing import Literal

from chaos import faults
from chaos.actors.administrator import may_be_spoilt
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import READ_S, WHOLE_S, ended, not_stale
from chaos.world.world import Broken
from covey.core.ids import JobId

ROUNDS = 4
QUOTA = 3
DOWN_S = 1000.0
How = Literal["lost", "rolled back", "cut", "rotten"]


def play(rack: SimRack) -> None:
    rack.settle()
    rack.administered()
    rack.forgive()
    pager = rack.pager(rack.rng.choice(sorted(rack.hosts)), "vol1", 1 << 18, ROUNDS * 20.0)
    first = sorted(rack.hosts)[0]
    rack.ask(first, "scheduler.quota_set", {"tenant": "green", "gpus": QUOTA})
    jobs: dict[JobId, tuple[str, ...]] = {}
    for number in range(ROUNDS):
        job = train(rack, rounds=rack.rng.randint(5, 60), workers=2, key=f"damaged-{number}")
        if job in jobs:
            raise Broken(f"{job} was given out twice")
        jobs[job] = ("done", "failed")
        older = {name: host.disk.image("") for name, host in rack.hosts.items()}
        rack.run(rack.rng.uniform(0.5, 8.0))
        _spoil(rack, rack.rng.choice(sorted(rack.hosts)), older)
        rack.settle(WHOLE_S)
        rack.until(lambda: _all_vote(rack), WHOLE_S, "the log that was damaged counts again")
        for name in rack.hosts:
            _remembers(rack, name, jobs)
    ended(rack, jobs)
    rack.until(lambda: not pager.alive, READ_S, "the pager is done")
    reading = rack.readers()
    rack.until(lambda: not any(process.alive for process in reading), READ_S, "every page is read back")
    not_stale(rack)


def _spoil(rack: SimRack, name: str, older: dict[str, dict[str, bytes]]) -> None:
    """Damage one file of a host, or the folder of its log, while its agent, or all of it, is down."""
    host, rng = rack.hosts[name], rack.rng
    how: How = rng.choice(("lost", "rolled back", "cut", "rotten"))
    file = rng.choice(may_be_spoilt(host))
    if file.startswith("consensus/") and how in ("lost", "rolled back"):
        file = "consensus/"
    if rng.random() < 0.5:
        host.power_off()
    else:
        faults.strike(rack.world, faults.Kill("agent", name, DOWN_S))
    rack.run(rng.uniform(0.1, 1.0))
    rack.world.mark("fault", name, f"{file} is {how}")
    if how == "rolled back":
        host.disk.restore(file, {found: data for found, data in older[name].items() if file in found})
    else:
        host.disk.damage(file, how)
    host.power_on()
    host.revive()


def _all_vote(rack: SimRack) -> bool:
    """Whether every voter's log is one that votes, so that the next damage is the only one."""
    rafts = [rack.agents[name].log._raft for name in rack.alive()]
    return all(raft is not None and (raft._votes_here or raft.me not in raft.voters) for raft in rafts)


def _remembers(rack: SimRack, name: str, jobs: dict[JobId, tuple[str, ...]]) -> None:
    """Wait until a host that is up again knows what was committed before."""

    def known() -> bool:
        scheduler = rack.plugin(name, "scheduler")
        return (
            scheduler is not None
            and jobs.keys() <= scheduler.queue.jobs.keys()
            and scheduler.queue.quotas.get("green") == QUOTA
        )

    rack.until(known, 30.0, f"{name} knows {', '.join(jobs)} and the quota that was set")

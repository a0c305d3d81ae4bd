"""kill -9, again and again, of agents whose hosts run ranks: the ranks live on, the result is the same to the bit."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories import train, working
from chaos.story import ended


def play(rack: SimRack) -> None:
    rack.settle()
    job = train(rack, rounds=40)
    rack.until(lambda: len(working(rack)) >= 1, 20.0, "ranks run")
    for _ in range(rack.rng.randint(1, 5)):
        host = rack.rng.choice(working(rack) or sorted(rack.hosts))
        ranks = rack.hosts[host].find("trainer")
        faults.strike(rack.world, faults.Kill("agent", host, rack.rng.uniform(0.2, 6.0)))
        assert all(process.alive for process in ranks), f"ranks of {host} died with its agent"
        rack.run(rack.rng.uniform(1.0, 9.0))
    ended(rack, {job: ("done",)})
    assert attempts(rack, job) == 1, "the job was started again although its ranks never died"


def attempts(rack: SimRack, job: str) -> int:
    return int(rack.plugin("h1", "scheduler").queue.jobs[job].tally.attempt)

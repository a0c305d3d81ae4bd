"""Whole simulated agents, their aggd processes and several jobs: profiled, packed, refused and moved, to the bit."""

import random
from typing import Any, cast

import pytest

from chaos.rackworld import SimRack
from covey.core.ids import JobId
from plugins import facts
from plugins.aggregator.plugin import PLUGIN
from plugins.gossiped import AggregatorNow
from tests.families import in_gate
from tests.plugins.aggregator.ranks import Job

QUICK = {
    "aggregator": {"direct": "never", "trial_iterations": 10, "revert_iterations": 20, "scale_s": 5.0, "cycles_max": 1}
}


def quick_rack(seed: int, hosts: int = 4, **changes: Any) -> SimRack:
    settings = {"aggregator": QUICK["aggregator"] | changes}
    rack = SimRack(seed, hosts=hosts, plugins=(PLUGIN,), settings=settings).start()
    rack.settle()
    return rack


def rows(rack: SimRack) -> dict[str, Any]:
    """The rows that `agentctl tensors` shows, by job."""
    return {row.job: row for host in rack.alive() for row in rack.ask(host, "aggregator.tensors", {})}


def owner_now(job: Job) -> str:
    plugin = job.plugin(job.ranks[0].host)
    assert plugin is not None
    return str(plugin.owner_of(job.name))


@pytest.mark.parametrize("steps", in_gate(1, [True, False]))
def test_two_jobs_share_an_aggregator_and_a_third_is_refused_there(steps: bool) -> None:
    """With `steps` the script says when it made one, else its rounds are counted."""
    with quick_rack(31) as rack:
        one = Job(rack, ["h1", "h2"], rounds=400, step_s=0.2, name="j1", even=True, steps=steps)
        two = Job(rack, ["h2", "h3"], rounds=400, step_s=0.2, name="j2", even=True, steps=steps)
        rack.until(lambda: len(rows(rack)) == 2 and owner_now(one) == owner_now(two), 90, "they share one")
        host = owner_now(one)
        third = Job(rack, ["h3", "h4"], rounds=200, step_s=0.34, name="j3", even=True, steps=steps)
        rack.until(lambda: "j3" in rows(rack) and "would lose" in rows(rack)["j3"].refused, 90, "the third is refused")
        shown = rows(rack)
        assert shown["j3"].host != host and shown["j1"].host == shown["j2"].host == host
        assert shown["j3"].refused.startswith(f"{host}: in a cycle of ")
        for name in ("j1", "j2"):
            assert 190_000 < shown[name].period_us < 260_000 and shown[name].loss < 0.1
        assert 330_000 < shown["j3"].period_us < 420_000
        published = rack.agents[host].plugins["aggregator"]._published  # type: ignore[attr-defined]
        assert isinstance(published, AggregatorNow) and 190_000 < published.cycle_us < 260_000
        for job in (one, two, third):
            job.finish()


def test_a_coordinator_tells_what_its_jobs_tensors_are_and_who_sums_them() -> None:
    with quick_rack(32) as rack:
        told: list[Any] = []
        plugin = cast(Any, rack.agents["h1"].plugins["aggregator"])
        take = plugin.on_fact

        def heard(fact: Any) -> None:
            told.append(fact)
            take(fact)

        plugin.on_fact = heard
        job = Job(rack, ["h1", "h2"], rounds=60, steps=True)
        job.finish()
        seen = [fact for fact in told if isinstance(fact, facts.TensorsSeen)]
        assert seen and (seen[0].job, seen[0].epoch, seen[0].largest_bytes) == (JobId("j1"), 1, 160)
        assigned = [fact for fact in told if isinstance(fact, facts.TensorsAssigned)]
        assert assigned[-1].aggregator == job.owner() and assigned[-1].epoch == 1


@pytest.mark.parametrize("seed", in_gate(1, range(40, 44)))
def test_jobs_that_are_moved_while_things_die_end_with_the_sums_of_one_process(seed: int) -> None:
    chance = random.Random(seed)
    with quick_rack(seed, scale_s=2.0, cycles_max=8) as rack:
        jobs = [
            Job(rack, hosts, rounds=120, step_s=step_s, name=f"j{at}", even=True, steps=True)
            for at, (hosts, step_s) in enumerate(((["h1", "h2"], 0.2), (["h2", "h3"], 0.2), (["h3", "h1"], 0.4)), 1)
        ]
        rack.run(15)
        for _ in range(4):
            rack.run(chance.uniform(0.5, 5.0))
            host, what = chance.choice(["h1", "h2", "h3", "h4"]), chance.choice(["agent", "aggd", "aggd"])
            for process in rack.hosts[host].find(what):
                process.signal(9)
            rack.world.at(rack.world.now + chance.uniform(0.1, 6.0), rack.hosts[host].revive)
        for job in jobs:
            job.finish(300)
        moves = {(job.name, at.epoch) for job in jobs for rank in job.ranks for at in rank.told}
        assert len(moves) > len(jobs), "at least one job was moved"

"""`covey-sim groups`: jobs in groups against jobs on their own."""

import argparse
import json
import random
from pathlib import Path

import pytest

from covey.core.ids import JobId
from plugins.interleave.policy import model
from plugins.interleave.policy.model import JobProfile
from sim.groups import groups
from sim.groups import memory as group_memory
from sim.groups.by_agents import by_agents
from sim.groups.cluster import Cluster, Event, Rules, Shared, Work
from sim.groups.memory import Load
from sim.groups.strategies import ALONE_ON, Setting, alone, grouped, isolated, thrown
from sim.groups.workload import LENGTH_S, PROFILED_ON, Job, arriving, bursting, leaning, workload
from sim.report import Wrong


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    groups.arguments(parser)
    found = parser.parse_args(list(given))
    found.seed = 1
    return found


def alike(count: int, work_s: float = 160.0, net_s: float = 20.0, iterations: int = 60) -> list[Job]:
    return [Job(JobProfile(JobId(f"j{n}"), work_s, net_s), iterations) for n in range(count)]


def together(jobs: list[Job], hosts: int, rules: Rules) -> Cluster:
    def arrange(cluster: Cluster, event: Event, job: Work) -> None:
        if event == "ended":
            cluster.groups[0].reorder([each for each in cluster.jobs if each.end_s is None], hosts)
        elif job is cluster.jobs[-1]:
            cluster.groups = [Shared([], hosts, rules)]
            cluster.groups[0].reorder(cluster.jobs, hosts)

    return Cluster(jobs, hosts, arrange)


def test_groups_use_hosts_better_and_end_sooner_than_jobs_on_their_own() -> None:
    """Reference: §4.4.3."""
    report = groups.run(options("--jobs", "20", "--hosts", "40"), lambda share, text: None)
    assert report.data["makespan_gain"] > 1.2
    assert report.data["groups"]["cpu_utilization"] > report.data["isolated"]["cpu_utilization"]
    assert report.data["groups"]["network_utilization"] > report.data["naive"]["network_utilization"]
    assert report.data["groups_said"]["jct_gain"] > report.data["printed"]["jct_gain"]


def test_jobs_in_turns_take_what_the_model_says() -> None:
    """Reference: §4.4.6: the error of the model stays below 5 % (three jobs, no noise)."""
    jobs = alike(3)
    out = together(jobs, 8, Rules()).run()
    assert out.makespan_s == pytest.approx(60 * model.iteration_s([job.profile for job in jobs], 8), rel=0.05)


def test_reviews_come_on_time_until_the_last_job_ends_and_may_change_groups() -> None:
    """Two jobs of 1,000 s on 8 hosts; the second review gives both to 16, where computing takes half as long."""
    at_s: list[float] = []

    def review(cluster: Cluster) -> None:
        at_s.append(cluster.now_s)
        if len(at_s) == 2:
            old = cluster.groups[0]
            cluster.groups = [Shared([], 16, old.rules)]
            cluster.groups[0].at_s = cluster.now_s
            cluster.groups[0].reorder(old.jobs, 16)

    jobs = alike(2, work_s=80, net_s=10, iterations=50)
    made = together(jobs, 8, Rules())
    out = Cluster(jobs, 16, made.arrange, review=review, review_s=300.0).run()
    assert at_s == pytest.approx([300.0 * (n + 1) for n in range(len(at_s))]) and at_s[-1] <= out.makespan_s
    assert out.makespan_s == pytest.approx(1010, rel=0.02) and len(at_s) == 3, "10 s of network a job, with either"
    assert out.useful == pytest.approx(2 * 50 * 80 / (16 * out.makespan_s)), "nothing done before is forgotten"


def test_a_secondary_comm_fills_the_gaps_of_the_primary() -> None:
    """Two jobs that hardly compute: without gaps their COMMs take turns. Reference: §4.3.1."""
    jobs = alike(2, work_s=0.8, net_s=20.0, iterations=50)
    alone_s = together(jobs, 8, Rules()).run().makespan_s
    filled = together(jobs, 8, Rules(gap=0.25)).run()
    assert filled.makespan_s < 0.85 * alone_s
    assert filled.net <= 1.0


def test_a_comm_that_takes_processors_makes_comps_beside_it_slower() -> None:
    """A COMP of 10 s beside a COMM that takes half of the processors needs 20 s; alone a job loses nothing."""
    free, half = (
        together(alike(2, work_s=80.0, net_s=10.0, iterations=50), 8, Rules(talking=f)).run() for f in (0, 0.5)
    )
    assert free.makespan_s == pytest.approx(50 * 20 + 10, rel=0.01), "one computes while the other communicates"
    assert half.makespan_s == pytest.approx(50 * 30, rel=0.02), "20 s of each 30 a COMP stands beside a COMM, or is one"
    assert half.useful * half.makespan_s == pytest.approx(free.useful * free.makespan_s, rel=1e-6), "the same work"
    assert half.cpu > half.useful and free.cpu == pytest.approx(free.useful)
    jobs = alike(3)
    plain, taking = (alone(jobs, Setting(hosts=16, talking=f), 16) for f in (0.0, 0.2))
    assert taking.makespan_s == plain.makespan_s
    assert taking.cpu == pytest.approx(plain.cpu + 0.2 * plain.net)


def test_jobs_thrown_together_lose_as_much_to_comms() -> None:
    jobs = workload(8, random.Random(3))
    plain, taking = (thrown(jobs, Setting(hosts=16, talking=f), 16, together=4) for f in (0.0, 0.3))
    assert 1.02 * plain.makespan_s < taking.makespan_s < plain.makespan_s / 0.7
    assert taking.cpu <= 1 + 1e-9


def test_a_share_of_processors_is_a_share() -> None:
    with pytest.raises(Wrong, match=r"--comm-cpu 1\.5"):
        groups.run(options("--comm-cpu", "1.5"), lambda share, text: None)
    found = groups.run(options("--jobs", "6", "--hosts", "40", "--comm-cpu", "0.1"), lambda share, text: None).data
    free = groups.run(options("--jobs", "6", "--hosts", "40"), lambda share, text: None).data
    for way in ("naive", "printed", "groups", "groups_said"):
        assert found[way]["makespan_s"] != free[way]["makespan_s"]
    assert found["isolated_16"]["makespan_s"] == free["isolated_16"]["makespan_s"]
    assert found["isolated_16"]["cpu_utilization"] > free["isolated_16"]["cpu_utilization"]


def test_the_work_done_is_the_work_there_was_whatever_the_way() -> None:
    jobs = workload(12, random.Random(6))
    work = sum(job.profile.work_s * job.iterations for job in jobs)
    setting = Setting(hosts=40, declared=True)
    for out in (grouped(jobs, setting), thrown(jobs, setting, 20), alone(jobs, setting, 10)):
        assert out.useful * 40 * out.makespan_s == pytest.approx(work, rel=1e-6)
        assert out.useful <= out.cpu + 1e-9 <= 1 + 1e-6 and out.net <= 1
        assert max(out.jct_s) == pytest.approx(out.makespan_s)


def test_isolated_jobs_have_as_many_hosts_as_keep_processors_busiest() -> None:
    """Reference: §4.4.1."""
    jobs, setting = workload(30, random.Random(2)), Setting(hosts=60)
    best, each = isolated(jobs, setting)
    assert each in ALONE_ON
    assert best.cpu == max(alone(jobs, setting, on).cpu for on in ALONE_ON if on <= 60)


def test_a_full_heap_costs_more_and_more_and_spilling_gives_it_back() -> None:
    """Three jobs of which two fit. Reference: §4.1, figure 4.3; §4.3.3."""
    big = Load(comp_s=20.0, comm_s=15.0, input_gb=155 / 16, model_gb=24 / 16)
    two, three = group_memory.resident([big, big]), group_memory.resident([big, big, big])
    assert two.full < 1.3 < three.full
    spilled = group_memory.spilling([big, big, big])
    assert spilled.full < 1 and 0 < max(spilled.spilled) <= 1
    assert sum(spilled.comp_s) < 0.6 * sum(three.comp_s)


def test_a_job_that_fits_is_not_spilled() -> None:
    small = Load(comp_s=20.0, comm_s=15.0, input_gb=4.3 / 16, model_gb=2.1 / 16)
    assert group_memory.spilling([small, small]).spilled == [0.0, 0.0]


def test_a_disk_that_does_not_keep_up_stops_the_group() -> None:
    """Reference: figure 4.19, load stop time."""
    load = Load(comp_s=1.0, comm_s=1.0, input_gb=5.0, model_gb=0.0)
    felt = group_memory.felt([load], [1.0])
    assert felt.comp_s[0] + load.comm_s == pytest.approx(5.0 / group_memory.DISK_GB_S)
    two = group_memory.felt([load, load], [1.0, 1.0])
    assert sum(two.comp_s) == pytest.approx(10.0 / group_memory.DISK_GB_S)


def test_jobs_come_from_a_file_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([{"name": "a", "work_s": 640, "net_s": 20, "iterations": 5}]))
    assert groups.read(path)[0].profile == JobProfile(JobId("a"), 640, 20)
    path.write_text('[{"name": "a", "work_s": -1, "net_s": 20, "iterations": 5}]')
    with pytest.raises(Wrong, match="holds no jobs"):
        groups.read(path)


def test_a_job_cannot_come_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([{"work_s": 640, "net_s": 20, "iterations": 5, "submit_s": -5}]))
    with pytest.raises(Wrong, match="holds no jobs"):
        groups.read(path)


def test_three_hosts_are_enough_to_compare() -> None:
    report = groups.run(options("--jobs", "2", "--hosts", "3"), lambda share, text: None)
    assert report.data["isolated"]["jct_gain"] == 1.0
    for way in ("isolated", "naive", "printed", "groups", "groups_said", "agents", "agents_soon"):
        found = report.data[way]
        assert 0 < found["jct_s_mean"] <= found["makespan_s"], way
        assert 0 < found["cpu_useful"] <= found["cpu_utilization"] <= 1 and 0 < found["network_utilization"] <= 1, way
        assert 0 < found["jobs_at_once_mean"] <= 2, way


def test_three_jobs_in_eight_are_long() -> None:
    jobs = workload(80, random.Random(4), spread=0.0)
    lengths = [job.iterations * (job.profile.work_s / PROFILED_ON + job.profile.net_s) for job in jobs]
    assert sum(1 for length in lengths if length > 10_000) == 30
    assert sum(lengths) / 80 == pytest.approx(LENGTH_S, rel=0.05)


def test_the_same_seed_makes_the_same_jobs() -> None:
    assert workload(12, random.Random(4)) == workload(12, random.Random(4))
    jobs = workload(12, random.Random(4))
    assert arriving(jobs, random.Random(1), 60.0) == arriving(jobs, random.Random(1), 60.0)


def test_bursts_come_in_the_same_time_as_single_jobs_and_many_at_once() -> None:
    jobs = workload(400, random.Random(4))
    single, burst = arriving(jobs, random.Random(1), 60.0), bursting(jobs, random.Random(1), 60.0, 8.0)
    assert len({job.submit_s for job in single}) == 400
    assert 20 < len({job.submit_s for job in burst}) < 120
    assert burst[-1].submit_s == pytest.approx(single[-1].submit_s, rel=0.5)


def test_the_leaning_ones_are_the_extremes() -> None:
    """Reference: figure 4.13."""
    jobs = workload(80, random.Random(4))
    computing, talking = leaning(jobs, 60, True), leaning(jobs, 60, False)
    assert len(computing) == len(talking) == 60
    left_out = [job for job in jobs if job not in computing]
    assert max(job.lean for job in left_out) <= min(job.lean for job in computing)
    assert max(job.lean for job in talking) < max(job.lean for job in jobs)


def test_shares_that_walk_beat_the_best_share_for_all() -> None:
    """Jobs with much data and with little, a disk that is short. Reference: §4.4.8, figure 4.19."""
    loads = [
        Load(comp_s, comm_s, input_gb / 32, model_gb / 32)
        for comp_s, comm_s, input_gb, model_gb in (
            *((4.0, 5.0, 155.0, 24.0), (5.0, 3.0, 78.4, 12.0), (4.0, 5.0, 155.0, 24.0), (4.0, 3.0, 78.4, 12.0)),
            *((4.0, 6.0, 91.2, 5.0), (4.0, 5.0, 45.6, 1.0), (5.0, 4.0, 4.3, 2.1), (4.0, 4.0, 0.6, 1.1)),
        )
    ]
    fixed = [group_memory.felt(loads, [part / 20] * 8) for part in range(21)]
    walked = group_memory.spilling(loads)
    assert group_memory.iteration_s(loads, walked.comp_s) <= min(
        group_memory.iteration_s(loads, felt.comp_s) for felt in fixed
    )


def test_agents_that_decide_each_for_itself_come_near_to_the_one_mind() -> None:
    """Reference: §4.3.2, without a master. Half of the jobs compute, half send: in groups of both they fill each
    other's gaps."""
    jobs = [*alike(3, work_s=240.0, net_s=5.0), *alike(6, work_s=40.0, net_s=30.0)[3:]]
    setting = Setting(hosts=8, move_s=1.0)
    base, _ = isolated(jobs, setting)
    found, mind = by_agents(jobs, setting), grouped(jobs, setting)
    assert found.moves, "agents arranged something"
    assert base.makespan_s / found.makespan_s > 0.9 * base.makespan_s / mind.makespan_s > 1.1
    assert len(found.jct_s) == len(jobs) and min(found.jct_s) > 0

"""`covey-sim groups`: jobs in groups against jobs on their own."""

import argparse
import json
import random
from pathlib import Path

import pytest

from cli.sim import groups
from cli.sim.group_cluster import Cluster, Shared, Work, workload
from cli.sim.report import Wrong
from covey.core import JobId
from plugins.interleave.policy import model
from plugins.interleave.policy.model import Profile


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    groups.arguments(parser)
    found = parser.parse_args(list(given))
    found.seed = 1
    return found


def test_groups_use_hosts_better_and_end_sooner_than_jobs_on_their_own() -> None:
    """Reference: §4.4.3."""
    report = groups.run(options("--jobs", "20", "--hosts", "40"), lambda share, text: None)
    assert report.data["makespan_gain"] > 1.2
    assert report.data["groups"]["cpu_utilization"] > report.data["isolated"]["cpu_utilization"]
    assert report.data["groups"]["network_utilization"] > report.data["naive"]["network_utilization"]


def test_jobs_in_turns_take_what_the_model_says() -> None:
    """Reference: §4.4.6: the error of the model stays below 5 % (three jobs, no noise)."""
    jobs = [Work(Profile(JobId(f"j{n}"), 160.0, 20.0), 60) for n in range(3)]

    def arrange(cluster: Cluster, event: str, job: Work) -> None:
        if len(cluster.groups) == 0 and job is jobs[-1]:
            cluster.groups = [Shared(list(jobs), 8)]
            cluster.groups[0].reorder()

    out = Cluster(jobs, 8, arrange).run()
    assert out.makespan_s == pytest.approx(60 * model.iteration_s([job.profile for job in jobs], 8), rel=0.05)


def test_jobs_come_from_a_file_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([{"name": "a", "work_s": 640, "net_s": 20, "iterations": 5}]))
    assert groups.read(path)[0].profile == Profile(JobId("a"), 640, 20)
    path.write_text('[{"name": "a", "work_s": -1, "net_s": 20, "iterations": 5}]')
    with pytest.raises(Wrong, match="holds no jobs"):
        groups.read(path)


def test_the_same_seed_makes_the_same_jobs() -> None:
    one, other = workload(12, random.Random(4), 60.0), workload(12, random.Random(4), 60.0)
    assert [(job.profile, job.submit_s) for job in one] == [(job.profile, job.submit_s) for job in other]
    assert one[-1].submit_s > 0

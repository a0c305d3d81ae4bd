"""`harmony_group` and `parameters/harmony`: groupings and spill ratios, replayed through the interleaving policies."""

from typing import Any

import numpy as np

from covey.core.ids import JobId
from covey.core.spill_walk import spill_max
from plugins.interleave.policy import model, schedule
from plugins.interleave.policy.assign import groups_best, imbalance
from plugins.interleave.policy.model import Group, JobProfile, Use, Weights
from sim.vectors.types import Handler, answers, beside, differs, each, measured, whole_number

WITHIN = 1e-6
REACHED_MIN = 0.98
"""Least share of the reference's score that an answer must reach: another grouping is right too."""
HOSTS_MAX = 100_000
SIX_TO_FOUR = Weights(0.6, 0.4)
TWO_TO_ONE = Weights(2 / 3, 1 / 3)


def grouped(case: dict[str, Any]) -> list[str]:
    jobs = [JobProfile(JobId(str(job)), measured(work), measured(net)) for job, work, net in case["jobs"]]
    used = model.use_of_all(_groups(jobs, case["ref_groups"], case["ref_machines"]))
    reference = Use(*case["ref_util"]).score(SIX_TO_FOUR)
    return [
        *_number_of_groups(jobs, case["machines"], case["n_groups"]),
        *differs("utilisation of the reference grouping", [used.cpu, used.net], case["ref_util"], WITHIN),
        *_reaches(jobs, case["machines"], case["machines_per_group_sum"], reference, SIX_TO_FOUR),
    ]


def harmony(case: dict[str, Any]) -> list[str]:
    kind = case.get("kind")
    if kind == "alpha_max":
        return [
            line
            for blocks, process_s, load_s, alpha in case["cases"]
            for line in differs(
                f"alpha_max {blocks, process_s, load_s}", spill_max(blocks, process_s, load_s), alpha, WITHIN
            )
        ]
    if kind is not None:
        return [f"no such kind of case: {kind!r}; known: alpha_max, or none for a grouping"]
    jobs = [
        JobProfile(JobId(str(job)), measured(cpu_s) * measured(hosts), measured(net_s))
        for job, cpu_s, net_s, hosts in case["jobs"]
    ]
    found = _number_of_groups(jobs, case["M"], case["n_groups"]) if "n_groups" in case else []
    if "groups" in case:
        theirs = _groups(jobs, case["groups"], case["machines"])
        used = model.use_of_all(theirs, case["M"])
        took = [model.iteration_s(group.jobs, group.hosts) for group in theirs]
        ours = {"T_g": took, "U": [used.cpu, used.net]}
        found += answers(ours, beside(case, ours), WITHIN)
    if "oracle" in case:
        theirs = [Group(tuple(_named(jobs, members)), hosts) for members, hosts in case["oracle"]]
        found += differs(
            "oracle_score", model.use_of_all(theirs, case["M"]).score(TWO_TO_ONE), case["oracle_score"], WITHIN
        )
    return found + _reaches(jobs, case["M"], case["M"], case["polished_score"], TWO_TO_ONE)


def _number_of_groups(jobs: list[JobProfile], hosts: int, expected: int) -> list[str]:
    """Differences in the number of groups; between equals another number is right too."""
    work, net = np.array([job.work_s for job in jobs]), np.array([job.net_s for job in jobs])
    ours = groups_best(work, net, hosts)
    if 1 <= expected <= min(len(jobs), hosts) and imbalance(work, net, hosts, expected) == imbalance(
        work, net, hosts, ours
    ):
        return []
    return differs("n_groups", ours, expected)


def _reaches(jobs: list[JobProfile], hosts: int, total: int, reference: float, weights: Weights) -> list[str]:
    found = schedule.schedule(jobs, whole_number("the number of machines", hosts, 1, HOSTS_MAX), weights)
    given = sum(group.hosts for group in found.groups)
    names = [job.job for group in found.groups for job in group.jobs]
    lines = differs("machines of all groups", given, total)
    if len(set(names)) != len(names):
        lines.append(f"groups: a job is in two groups: {names}")
    if found.score < REACHED_MIN * reference:
        lines.append(f"score: ours {found.score:.6f}, at least {REACHED_MIN * reference:.6f} expected")
    return lines


def _groups(jobs: list[JobProfile], members: list[list[Any]], hosts: list[int]) -> list[Group]:
    return [Group(tuple(_named(jobs, each)), given) for each, given in zip(members, hosts, strict=True)]


def _named(jobs: list[JobProfile], names: list[Any]) -> list[JobProfile]:
    by = {job.job: job for job in jobs}
    return [by[JobId(str(name))] for name in names]


HANDLERS: dict[str, Handler] = {
    "harmony_group": lambda cases, traces: each(cases, grouped),
    "parameters/harmony": lambda cases, traces: each(cases, harmony),
}

"""Whole sentences: what people are told when a job can never run, is moved to another class, or waits for a quota."""

import os
import signal

import msgspec

from covey.core.ids import HostId, JobId
from plugins.scheduler.policy import explain
from plugins.scheduler.policy.explain import QueuePositions
from plugins.scheduler.policy.order import Row
from tests.plugins.scheduler.test_words import row, spec

TOTALS = {HostId("h1"): 4, HostId("h2"): 2}


def test_each_way_in_which_a_gang_can_never_be_placed() -> None:
    what = "bert can never be placed"
    worker = "each worker needs 5 GPUs on one host, and the largest host has"
    assert explain.over_rack(spec(1, 5), TOTALS) == explain.Never(
        7, what, f"{worker} 4", "ask for fewer gpus_per_worker"
    )
    assert explain.over_rack(spec(1, 5), {}) == explain.Never(7, what, f"{worker} 0", "ask for fewer gpus_per_worker")
    add = "or add hosts (agentctl gpus shows what there is)"
    wide = "it needs 7 GPUs, and this rack has 6 on 2 hosts"
    assert explain.over_rack(spec(7), TOTALS) == explain.Never(7, what, wide, f"ask for at most 6 workers, {add}")
    apart = "this rack's hosts have room for 3 workers with 2 GPUs each, and the job has 4"
    more = {**TOTALS, HostId("h3"): 1, HostId("h4"): 1}
    assert explain.over_rack(spec(4, 2), more) == explain.Never(7, what, apart, f"ask for at most 3 workers, {add}")
    assert explain.over_rack(spec(9, 0), {}) is None, "workers without GPUs fit anywhere"


def test_a_job_wider_than_its_quota_is_told_what_to_do() -> None:
    assert explain.over_quota(spec(5, tenant="red"), 1) == explain.Never(
        4,
        "bert can never run",
        "it needs 5 GPUs, and the quota of tenant red is 1",
        "ask for at most 1 GPU, submit with class opportunistic, or raise the quota of red",
    )


def test_what_a_change_of_class_means_is_said() -> None:
    assert explain.demoted(spec(2, tenant="red"), 300.0) == (
        "it waited 5 min for the quota of tenant red: from now on it is opportunistic: it runs on GPUs that "
        "guaranteed jobs leave free, and yields to them"
    )
    assert explain.demoted_later(300.0) == "it becomes opportunistic after a wait of 5 min"


def test_what_is_reserved_is_said_by_host_and_that_nothing_is() -> None:
    assert explain.keeps(4, {}) == "its GPUs are no longer reserved; other jobs may use them"
    assert explain.keeps(4, {HostId("h2"): 1, HostId("h1"): 2}) == "3 of 4 GPUs reserved: h1 2, h2 1"
    kept = {HostId("h1"): 1}
    assert explain.keeps_and_waits(2, kept, []) == "1 of 2 GPUs reserved: h1 1"
    assert explain.keeps_and_waits(2, kept, [row(3)]) == "1 of 2 GPUs reserved: h1 1, waiting for j3 (t, 1 GPU)"


def told(order: QueuePositions, job: str, quota: int, over: tuple[str, ...] = ()) -> str:
    return explain.waits_for(
        JobId(job), order, [JobId(id) for id in over], 8, explain.OrderInForce((1000.0,), {"t": quota}, None)
    )


def test_a_job_that_waits_for_its_quota_is_told_who_uses_it() -> None:
    order = QueuePositions([row(1, gpus=3, running=True), row(2, gpus=4)])
    place = "1st of the waiting jobs, in queue 0; it needs 4 GPUs and"
    ends = "it starts when enough of those end or the quota is raised"
    assert told(order, "j2", 4, ("j2",)) == f"{place} tenant t uses 3 of its quota of 4 by j1 (t, 3 GPUs): {ends}"
    assert told(order, "j2", 3, ("j2",)) == f"{place} the quota of tenant t is now 3: raise it, or cancel the job"
    assert told(order, "j2", 8, ("j2",)).endswith(f"its quota of 8 by j1 (t, 3 GPUs): {ends}")
    guest = msgspec.structs.replace(row(3, gpus=1, running=True), job_class="opportunistic")
    assert "uses 0 of its quota of 4 by j3 (t, 1 GPU): " in told(
        QueuePositions([guest, row(2, gpus=4)]), "j2", 4, ("j2",)
    )
    assert (
        told(QueuePositions([row(2, gpus=4)]), "j2", 4, ("j2",)) == f"{place} tenant t uses 0 of its quota of 4: {ends}"
    )


def test_a_job_that_narrower_and_newer_ones_pass_is_told_so() -> None:
    narrow, wide = row(3), row(2, gpus=8)
    ahead = "2nd of the waiting jobs, in queue 0; it needs 8 GPUs and 8 are free; ahead: j3 (t, 1 GPU)"
    assert told(QueuePositions([narrow, wide]), "j2", 8) == f"{ahead}, since jobs with fewer GPUs go first"
    older = msgspec.structs.replace(narrow, id=JobId("j1"), number=1)
    assert told(QueuePositions([older, wide]), "j2", 8) == ahead.replace("j3", "j1"), "it would be first by age too"


def test_fewer_gpus_than_jobs_hold_are_not_less_than_none_free() -> None:
    running = row(1, gpus=9, running=True)
    assert "it needs 1 GPU and 0 are free" in told(QueuePositions([running, row(2)]), "j2", 20)


def test_the_numbers_of_signals_are_those_of_linux() -> None:
    known = {int(each): each.name for each in signal.Signals if int(each) <= 31}
    assert set(explain.SIGNALS) == {*range(1, 16), 24, 25, 31}
    assert {number: known[number] for number in explain.SIGNALS} == explain.SIGNALS
    assert explain.ended_words(0, HostId("h1"), -1, "SIGHUP") == "rank 0 on h1 was killed by SIGHUP (1)"
    assert explain.job_code(-1) == 129
    assert explain.EXIT_AGAIN == os.EX_TEMPFAIL


def test_a_job_wider_than_the_hosts_that_are_alive_is_told_that_it_needs_more() -> None:
    said = explain.waits_for(
        JobId("j1"), QueuePositions([row(1, gpus=5)]), (), 4, explain.OrderInForce((1000.0,), {}, None)
    )
    more = "it needs 5 GPUs and the hosts that are alive have 4: it starts when more hosts join"
    assert said == f"1st of the waiting jobs, in queue 0; {more}"


def test_a_job_that_fits_is_told_what_hinders_it_if_something_does() -> None:
    def said(hindrance: str) -> str:
        return explain.waits_for(
            JobId("j1"), QueuePositions([row(1)]), (), 1, explain.OrderInForce((1000.0,), {}, None), hindrance
        )

    place = "1st of the waiting jobs, in queue 0"
    assert said("") == f"{place}; 1 GPU is free, and it is about to be placed"
    assert said("j2 keeps it") == f"{place}; j2 keeps it"


def test_jobs_are_said_to_sink_soonest_first_and_only_where_it_would_stop_somebody() -> None:
    late, soon = row(1, running=True, attained_gpu_s=970.0), row(2, running=True, attained_gpu_s=990.0)
    order = QueuePositions([late, soon, row(3), row(4)])

    def said(job: str, preempts: bool = True) -> str:
        return explain.waits_for(JobId(job), order, (), 2, explain.OrderInForce((1000.0,), {}, None, preempts))

    assert said("j3").endswith("or when j2 falls behind it after about 10 s of running")
    assert "falls behind" not in said("j3", preempts=False), "nobody is stopped"
    assert "falls behind" not in said("j4"), "j3 comes before it"
    assert "falls behind" not in told(QueuePositions([row(3, gpus=8), row(4)]), "j4", 8), "nobody runs"


def test_the_promoted_the_lowest_queue_and_those_without_gpus_do_not_sink_away() -> None:
    running = row(1, running=True, attained_gpu_s=990.0)
    promoted = msgspec.structs.replace(running, promoted=1.0)
    bare = row(4, gpus=0, running=True, attained_gpu_s=900.0)
    waiting, lowest = row(3), row(3, attained_gpu_s=1000.0)

    def said(*rows: Row) -> str:
        return explain.waits_for(JobId("j3"), QueuePositions(rows), (), 1, explain.OrderInForce((1000.0,), {}, None))

    assert said(bare, running, waiting).endswith("have ended, or when j1 falls behind it after about 10 s of running")
    assert said(promoted, waiting).endswith("enough of j1 (t, 1 GPU) have ended")
    below = msgspec.structs.replace(running, attained_gpu_s=1500.0)
    assert said(below, lowest).endswith("in queue 1; it needs 1 GPU and 0 are free; it starts when enough of j1 "
                                        "(t, 1 GPU) have ended")  # fmt: skip

"""The figures and turns in what people are told, to the last one."""

import msgspec

from covey.core.ids import HostId, JobId
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy import explain
from plugins.scheduler.policy.explain import QueuePositions
from plugins.scheduler.policy.order import Row


def spec(workers: int, each: int = 1, kind: str = "guaranteed", tenant: str = "t") -> JobSpec:
    given = {"argv": ["x"], "name": "bert", "workers": workers, "gpus_per_worker": each}
    return JobSpec.parse({**given, "class": kind, "tenant": tenant})


def row(number: int, gpus: int = 1, running: bool = False, attained_gpu_s: float = 0.0) -> Row:
    id = JobId(f"j{number}")
    first = 1.0 if running else None
    return Row(
        id=id, number=number, tenant="t", job_class="guaranteed", gpus=gpus, submitted=number, running=running,
        attained_gpu_s=attained_gpu_s, first=first,
    )  # fmt: skip


def waits(rows: list[Row], job: str, capacity: int, thresholds: tuple[float, ...] = (1000.0,)) -> str:
    return explain.waits_for(JobId(job), QueuePositions(rows), (), capacity, explain.OrderInForce(thresholds, {}, None))


def test_three_jobs_are_named_and_a_fourth_becomes_a_number() -> None:
    rows = [row(number) for number in range(1, 6)]
    three = "j1 (t, 1 GPU), j2 (t, 1 GPU), j3 (t, 1 GPU)"
    assert explain.named(rows[:3]) == three
    assert explain.named(rows[:4]) == f"{three} and 1 more"
    assert explain.named(rows[:3], 5) == f"{three} and 2 more"


def test_a_worker_as_large_as_the_largest_host_is_possible_and_a_larger_one_is_not() -> None:
    totals = {HostId("h1"): 4, HostId("h2"): 2}
    assert explain.over_rack(spec(1, 4), totals) is None
    assert explain.over_rack(spec(3, 2), totals) is None
    never = explain.over_rack(spec(1, 5), totals)
    assert never is not None and "the largest host has 4" in never.why
    never = explain.over_rack(spec(2, 3), totals)
    assert never is not None and never.why == (
        "this rack's hosts have room for 1 workers with 3 GPUs each, and the job has 2"
    ), "there are as many GPUs as it needs, and they are scattered"
    never = explain.over_rack(spec(7), totals)
    assert never is not None and never.why == "it needs 7 GPUs, and this rack has 6 on 2 hosts"


def test_a_job_of_exactly_the_quota_is_possible() -> None:
    assert explain.over_quota(spec(4), 4) is None
    never = explain.over_quota(spec(5), 4)
    assert never is not None and never.code == 4
    assert explain.over_quota(spec(5), None) is None
    assert explain.over_quota(spec(5, kind="opportunistic"), 4) is None
    assert explain.over_quota(spec(5, kind="auto"), 4) is not None
    assert explain.over_quota(spec(5, kind="auto"), 4, may_demote=True) is None
    assert explain.over_quota(spec(5), 4, may_demote=True) is not None


def test_an_upgrade_says_the_limit_or_that_there_is_none() -> None:
    job = spec(2, tenant="red")
    said = "its 2 GPUs count against the quota of tenant red, "
    assert explain.upgraded(job, 3, None) == f"{said}which has no limit: it is guaranteed"
    assert explain.upgraded(job, 3, 4) == f"{said}of which 3 of 4 are used now: it is guaranteed"


def test_ordinals() -> None:
    numbers = (1, 2, 3, 4, 9, 10, 11, 13, 20, 21, 22, 30, 31, 110, 111, 121, 1011)
    said = "1st 2nd 3rd 4th 9th 10th 11th 13th 20th 21st 22nd 30th 31st 110th 111th 121st 1011th"
    assert " ".join(explain.ordinal(number) for number in numbers) == said


def test_a_job_as_wide_as_all_that_is_free_is_about_to_be_placed() -> None:
    running = row(1, gpus=2, running=True)
    assert "2 GPUs are free, and it is about to be placed" in waits([running, row(2, gpus=2)], "j2", 4)
    assert "it needs 3 GPUs and 2 are free" in waits([running, row(2, gpus=3)], "j2", 4)
    assert "the hosts that are alive have 4" in waits([row(1, gpus=5)], "j1", 4)
    assert "about to be placed" in waits([row(1, gpus=4)], "j1", 4)


def test_the_whole_of_what_a_waiting_job_is_told() -> None:
    first, second = row(2, gpus=4), row(3, gpus=1)
    place = "2nd of the waiting jobs, in queue 0; it needs 1 GPU and"
    ahead = "ahead: j2 (t, 4 GPUs)"
    assert waits([first, second], "j3", 4) == f"{place} 4 are free; {ahead}", "nobody runs, and somebody is first"
    running = row(1, gpus=3, running=True, attained_gpu_s=2000.0)
    until = "it starts when enough of j1 (t, 3 GPUs) have ended"
    assert waits([running, first, second], "j3", 4) == f"{place} 1 are free; {ahead}; {until}"
    alone = "1st of the waiting jobs, in queue 0; it needs 4 GPUs and 1 are free"
    assert waits([running, first], "j2", 4) == f"{alone}; {until}"
    assert explain.waits_for(
        JobId("j2"), QueuePositions([running, first]), (), 4, explain.OrderInForce((1000.0,), {}, None), "because"
    ) == (f"{alone}; {until}; because")


def test_only_jobs_of_its_own_order_sink_below_a_job() -> None:
    mine, other = row(1, running=True, attained_gpu_s=990.0), row(2, running=True, attained_gpu_s=980.0)
    other = msgspec.structs.replace(other, tenant="u")
    order = QueuePositions([mine, other, row(3)])

    def sooner(quotas: dict[str, int | None]) -> str:
        said = explain.waits_for(JobId("j3"), order, (), 2, explain.OrderInForce((1000.0,), quotas, None))
        return said.partition("have ended, or when ")[2]

    assert sooner({"t": 4}) == sooner({"u": 4}) == sooner({}) == "j1 falls behind it after about 10 s of running"
    order = QueuePositions([other, row(3)])
    assert sooner({"t": 4, "u": 4}) == sooner({"t": 4}) == sooner({"u": 4}) == ""
    said = explain.waits_for(JobId("j3"), order, (), 1, explain.OrderInForce((1000.0,), {}, None))
    assert said.endswith("j2 falls behind it after about 20 s of running"), "tenants without a quota share one order"


def test_nothing_is_said_of_jobs_that_sink_when_they_are_too_few() -> None:
    soon, never = row(1, running=True, attained_gpu_s=990.0), row(2, gpus=3, running=True)
    never = msgspec.structs.replace(never, tenant="u")
    said = explain.waits_for(
        JobId("j3"),
        QueuePositions([soon, never, row(3, gpus=4)]),
        (),
        4,
        explain.OrderInForce((1000.0,), {"u": 4}, None),
    )
    assert said.endswith("enough of j1 (t, 1 GPU), j2 (u, 3 GPUs) have ended")


def test_at_most_three_that_sink_are_named_and_the_rest_counted() -> None:
    holders = [row(n, running=True, attained_gpu_s=1000.0 - 10 * n) for n in range(1, 6)]
    three = ", or when " + ", ".join(f"j{n} falls behind it after about {10 * n} s of running" for n in (1, 2, 3))
    assert waits([*holders, row(6, gpus=3)], "j6", 5).endswith(three)
    assert waits([*holders, row(6, gpus=4)], "j6", 5).endswith(f"{three} and 1 more later")
    assert waits([*holders, row(6, gpus=5)], "j6", 5).endswith(f"{three} and 2 more later")


def test_those_that_sank_already_need_not_sink() -> None:
    below = row(1, gpus=2, running=True, attained_gpu_s=1000.0)
    soon = row(2, gpus=2, running=True, attained_gpu_s=980.0)
    assert waits([soon, row(3, gpus=4), below], "j3", 4).endswith(
        "or when j2 falls behind it after about 10 s of running"
    )
    assert "falls behind" not in waits([soon, row(3, gpus=2), below], "j3", 4), "that one is stopped for it now"


def test_guests_are_told_who_is_ahead_and_whether_guaranteed_jobs_wait() -> None:
    guests = QueuePositions([row(1, gpus=2, running=True), row(2), row(3, gpus=2)])
    idle, busy = QueuePositions([row(8, running=True)]), QueuePositions([row(8, running=True), row(9)])
    place = "2nd of the opportunistic jobs waiting; it needs 2 GPUs that guaranteed jobs leave free"
    ahead = "; ahead: j2 (t, 1 GPU)"
    assert explain.waits_as_opportunistic(JobId("j3"), guests, idle, 2) == f"{place}, and 2 are free{ahead}"
    held = ", and guaranteed jobs come first"
    assert explain.waits_as_opportunistic(JobId("j3"), guests, busy, 2) == f"{place}, and 2 are free{held}{ahead}"
    until = "; it starts when enough of j8 (t, 1 GPU), j1 (t, 2 GPUs) have ended"
    assert explain.waits_as_opportunistic(JobId("j3"), guests, busy, 1) == f"{place}, and 1 are free{ahead}{until}"
    alone = explain.waits_as_opportunistic(JobId("j2"), QueuePositions([row(2)]), QueuePositions([]), 0)
    assert alone == (
        "1st of the opportunistic jobs waiting; it needs 1 GPU that guaranteed jobs leave free, and 0 are free"
    ), "nobody is ahead and nobody runs"
    many = QueuePositions([row(number, running=True) for number in range(4, 8)])
    assert "j4 (t, 1 GPU), j5 (t, 1 GPU), j6 (t, 1 GPU) and 2 more have ended" in explain.waits_as_opportunistic(
        JobId("j3"), guests, many, 1
    )


def test_only_hosts_with_something_free_are_listed() -> None:
    free = {HostId("h2"): 1, HostId("h1"): 1, HostId("h3"): 0}
    for pack, needs in (
        ("few", "each worker needs 2 GPUs on one host"),
        ("host", "all its workers must be on one host (--pack host), with 6 GPUs"),
        ("apart", "each of its 3 workers needs 2 GPUs on a host of its own (--nodes)"),
    ):
        spec = JobSpec.parse({"argv": ["x"], "workers": 3, "gpus_per_worker": 2, "pack": pack})
        assert explain.scattered(free, spec) == f"free GPUs by host are h1 1, h2 1, and {needs}"


def test_a_gang_that_no_host_or_too_few_hosts_could_hold_is_told_so() -> None:
    totals = {HostId("h1"): 8, HostId("h2"): 4}
    for shape, why in (
        (
            {"workers": 9, "pack": "host"},
            "all its workers must be on one host, which needs 9 GPUs, and the largest host has 8",
        ),
        ({"workers": 2, "gpus_per_worker": 6, "pack": "apart"}, "and this rack has only 1 such hosts"),
        (
            {"workers": 3, "gpus_per_worker": 0, "pack": "apart"},
            "needs a host of its own (--nodes), and this rack has only 2",
        ),
        ({"workers": 13}, "it needs 13 GPUs, and this rack has 12 on 2 hosts"),
    ):
        never = explain.over_rack(JobSpec.parse({"argv": ["x"], **shape}), totals)
        assert never is not None and never.code == 7 and why in never.why, never
    for shape in (
        {"workers": 8, "pack": "host"},
        {"workers": 2, "gpus_per_worker": 4, "pack": "apart"},
        {"workers": 12},
    ):
        assert explain.over_rack(JobSpec.parse({"argv": ["x"], **shape}), totals) is None


def test_a_rank_is_blamed_unless_it_was_asked_to_stop() -> None:
    assert explain.first_failure({0: 0, 1: 0}) is None
    assert explain.first_failure({0: -15, 1: 143, 2: 3, 3: 4}) == (2, 3)
    assert explain.first_failure({0: -15, 1: 143}) == (0, -15)
    assert (explain.job_code(3), explain.job_code(0), explain.job_code(-9)) == (3, 0, 137)
    assert explain.ended_words(1, HostId("h1"), 0, None) == "rank 1 on h1 exited with 0"
    assert explain.ended_words(1, HostId("h1"), -9, "SIGKILL") == "rank 1 on h1 was killed by SIGKILL (9)"
    assert explain.ended_words(1, HostId("h1"), -40, None) == "rank 1 on h1 was killed by signal (40)"

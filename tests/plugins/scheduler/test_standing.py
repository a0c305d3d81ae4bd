"""Where each job is in the order: one walk finds what looking at all others finds, and is kept until something
changes."""

from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import Granted, QuotaSet, Submitted
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy.explain import QueuePositions
from plugins.scheduler.policy.order import Row
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.service import views
from tests.plugins.scheduler.rack import Rack, on_a_rack, submit, until

jobs = st.lists(
    st.tuples(
        st.integers(1, 9), st.booleans(), st.sampled_from("ab"), st.sampled_from(["guaranteed", "opportunistic"])
    ),
    max_size=12,
)


@given(jobs, st.randoms(use_true_random=False))
def test_one_walk_says_what_looking_at_everybody_says(given: list[tuple[int, bool, str, str]], chance: object) -> None:
    order = [
        Row(
            id=JobId(f"j{number}"), number=number, tenant=tenant, job_class=kind, gpus=gpus, submitted=number,
            attained_gpu_s=0.0, running=running,
        )
        for number, (gpus, running, tenant, kind) in enumerate(given, 1)
    ]  # fmt: skip
    chance.shuffle(order)  # type: ignore[attr-defined]
    walk = QueuePositions(order)
    for at, row in enumerate(order):
        ahead = [other for other in order[:at] if not other.running]
        passed = any(other.number > row.number and other.gpus < row.gpus for other in ahead)
        assert (walk.positions[row.id].row, walk.positions[row.id].ahead, walk.positions[row.id].passed) == (
            row,
            len(ahead),
            passed,
        )
        assert walk.waiting[: len(ahead)] == ahead
    assert walk.holders == [row for row in order if row.running]
    assert walk.held == sum(row.gpus for row in walk.holders)
    for tenant in "ab":
        mine = [row for row in walk.holders if row.tenant == tenant]
        assert walk.holders_of.get(tenant, []) == mine
        assert walk.used.get(tenant, 0) == sum(row.gpus for row in mine if row.job_class != "opportunistic")


def test_a_standing_holds_until_the_log_or_the_rack_changes() -> None:
    queue, totals = JobTable(), {HostId("h1"): 4}
    spec = JobSpec.parse({"argv": ["x"], "workers": 2})
    apply(queue, 1, Submitted(wall_s=1.0, key="key00001", spec=spec))
    standing = views.QueueSnapshot(queue, SchedulerSettings(), totals)
    assert standing.holds(dict(totals))
    assert not standing.holds({HostId("h1"): 8}), "a host has more GPUs now"
    assert not standing.holds({**totals, HostId("h2"): 0}), "a host came"
    apply(queue, 2, QuotaSet(wall_s=1.0, tenant="*", gpus=3))
    assert not standing.holds(totals)


@on_a_rack()
async def test_reads_between_two_changes_share_one_order_and_a_change_is_seen_at_once(rack: Rack) -> None:
    for _ in range(3):
        await submit(rack, workers=8)
    await until(lambda: rack.job("j1").state == "running" and rack[rack.voters[0]].service._stood is not None)
    plugin = rack["gpu1"].service
    before = await rack["gpu1"].call("jobs")
    stood, order = plugin._standing(), plugin._standing().guaranteed
    assert await rack["gpu1"].call("jobs") == before
    await rack["gpu1"].call("job", id="j3")
    assert plugin._standing() is stood and stood.guaranteed is order, "sorted once"
    assert before[2].reason.startswith("2nd of the waiting jobs")
    assert [job.turn and (job.turn.place, job.turn.ahead) for job in before] == [
        None, (1, ""), (2, "j2 (default, 8 GPUs)"),
    ]  # fmt: skip
    await rack["gpu1"].call("cancel", id="j2")
    assert plugin._standing() is not stood
    assert (await rack["gpu1"].call("job", id="j3")).reason.startswith("1st of the waiting jobs")
    rack.gone("gpu4")
    (said,) = [job.reason for job in await rack["gpu1"].call("jobs") if job.id == "j3"]
    assert "it needs 8 GPUs" in said and plugin._standing().totals.keys() == {"gpu1", "gpu2", "gpu3"}


def test_a_quota_view_counts_each_tenants_jobs_once() -> None:
    queue = JobTable()
    apply(queue, 1, QuotaSet(wall_s=1.0, tenant="red", gpus=4))
    kinds = [("red", "guaranteed"), ("red", "opportunistic"), ("red", "guaranteed"), ("blue", "opportunistic")]
    for number, (tenant, kind) in enumerate(kinds, 1):
        spec = JobSpec.parse({"argv": ["x"], "workers": number, "tenant": tenant, "class": kind})
        apply(queue, queue.index + 1, Submitted(wall_s=1.0, key=f"key{number:05}", spec=spec))
    for id in ("j1", "j2"):
        apply(queue, queue.index + 1, Granted(wall_s=1.0, job=JobId(id), epoch=1, coordinator=HostId("h1")))
    found = [(v.tenant, v.gpus, v.used, v.queued_jobs, v.opportunistic) for v in views.quota_views(queue)]
    assert found == [("blue", None, 0, 1, 0), ("red", 4, 1, 1, 2)]

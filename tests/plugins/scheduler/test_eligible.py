"""Which hosts a job may use is one rule: who writes another one there finds it obeyed by the leader, by coordinators,
by the log, and where GPUs are shared."""

import asyncio
from collections.abc import Iterator, Mapping

import pytest

from covey.core.ids import HostId
from plugins.facts import Place
from plugins.scheduler.machine.leader.capacity import Capacity
from plugins.scheduler.machine.leader.shared_capacity import SharedCapacity, SharedGpus, Sharing, host_of
from plugins.scheduler.machine.log.replacing import refused_move
from plugins.scheduler.messages.commands import Applied, MoveAsked, NotApplied
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy import eligible
from plugins.scheduler.policy.eligible import Drain
from plugins.scheduler.policy.settings import SchedulerSettings
from tests.plugins.scheduler.rack import Rack, on_a_rack, submit, until
from tests.plugins.scheduler.test_queue import Told
from tests.plugins.scheduler.test_replacing import Healing

H1, H2, H3 = HostId("h1"), HostId("h2"), HostId("h3")
BARRED = (HostId("gpu1"), HostId("gpu3"), H1, H3)
EXCLUDES = "the job excludes it"


@pytest.fixture(autouse=True)
def picky(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set another rule: jobs named `picky` may not use these hosts."""
    drains = eligible.bars

    def bars(spec: JobSpec | None, drained: Mapping[HostId, Drain]) -> dict[HostId, str]:
        mine = dict.fromkeys(BARRED, EXCLUDES) if spec is not None and spec.name == "picky" else {}
        return {**drains(spec, drained), **mine}

    monkeypatch.setattr(eligible, "bars", bars)
    yield


def hosts_of(rack: Rack, id: str) -> set[str]:
    return {str(place.host) for place in rack.job(id).start.places}


@pytest.mark.parametrize("pack", ["few", "any", "apart"])
@on_a_rack()
async def test_ranks_start_on_hosts_that_the_job_may_use_and_it_waits_for_these(rack: Rack, pack: str) -> None:
    await submit(rack, workers=2, name="picky", pack=pack)
    await submit(rack, workers=2, name="picky", pack=pack)
    await until(lambda: rack.job("j1").state == rack.job("j2").state == "running")
    assert hosts_of(rack, "j1") | hosts_of(rack, "j2") == {"gpu2", "gpu4"}
    await submit(rack, workers=1, name="picky")
    await submit(rack, workers=3)
    await until(lambda: rack.job("j4").state == "running")
    await asyncio.sleep(5.0)
    assert hosts_of(rack, "j4") == {"gpu1", "gpu3"} and rack.job("j3").state == "queued"
    assert rack.job("j3").tally.place_failures == 0, "the leader knew that it has no room"
    rack.finish("j1")
    await until(lambda: rack.job("j3").state == "running")
    assert hosts_of(rack, "j3") <= {"gpu2", "gpu4"}


@on_a_rack()
async def test_an_opportunistic_job_does_not_wait_behind_one_that_may_use_fewer_hosts(rack: Rack) -> None:
    await submit(rack, workers=4, name="picky", pack="any")
    await until(lambda: rack.job("j1").state == "running")
    for name in ("picky", "other"):
        await submit(rack, workers=1, name=name, **{"class": "opportunistic"})
    await until(lambda: rack.job("j3").state == "running")
    assert rack.job("j2").state == "queued" and hosts_of(rack, "j3") <= {"gpu1", "gpu3"}


@on_a_rack()
async def test_a_job_without_gpus_lies_where_it_may(rack: Rack) -> None:
    await submit(rack, workers=5, gpus_per_worker=0, name="picky")
    await until(lambda: rack.job("j1").state == "running")
    assert hosts_of(rack, "j1") <= {"gpu2", "gpu4"}


@on_a_rack(settings=SchedulerSettings())
async def test_a_job_that_the_hosts_it_may_use_can_never_hold_is_refused(rack: Rack) -> None:
    with pytest.raises(Exception, match="can never be placed"):
        await submit(rack, workers=5, name="picky")
    await submit(rack, workers=5)


def test_the_log_takes_no_place_that_is_barred() -> None:
    told = Told()
    id = told.submit(1, name="picky")
    told.grant(id)
    refused = told.place(id, Place(H1, (0,), ("g0",)))
    assert isinstance(refused, NotApplied) and refused.why == EXCLUDES
    assert isinstance(told.place(id, Place(H2, (0,), ("g0",))), Applied)


def test_no_rank_moves_to_a_host_that_is_barred() -> None:
    job = Healing().job
    job.spec = JobSpec.parse({"argv": ["train"], "workers": 4, "name": "picky"})
    asked = MoveAsked(wall_s=1.0, job=job.id, epoch=job.grant.epoch, host=H2, to=H3, coordinator=H1)
    refused = refused_move(job, asked, {})
    assert refused is not None and refused.why == EXCLUDES


def test_gpus_that_are_shared_are_no_others() -> None:
    told = Told()
    job, totals = told[told.submit(1, name="picky")], {H1: 1, H2: 1}
    shared = {H1: SharedGpus(names=("a",)), H2: SharedGpus(names=("b",))}
    capacity = SharedCapacity(told.queue, totals, None, Sharing(beside=1), shared)
    for free in (capacity.free_for(job), capacity.open_for(job), capacity.plan(job, capacity.free, None, 0.3)):
        assert [host_of(unit) for unit in free] == [H2]
    plain = Capacity(told.queue, totals)
    assert plain.plan(job, plain.free, None, 0.3) == plain.free_for(job) == plain.open_for(job) == {H2: 1}
    assert list(plain.takers(job)) == [H2] and not plain.fits(told[told.submit(2, name="picky")], plain.free)

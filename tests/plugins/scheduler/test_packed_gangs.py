"""Where gangs come to lie on hosts: as few as have room, one, or a host for each worker; and what they wait for."""

import pytest

from covey.core.ids import HostId
from plugins.facts import Place
from plugins.scheduler.messages.commands import GpusKept, NotApplied, Placed
from plugins.scheduler.messages.spec import Pack
from plugins.scheduler.service import views
from tests.plugins.scheduler.little import Little
from tests.plugins.scheduler.rack import Rack, on_a_rack, submit, until

H1, H2, H3 = HostId("h1"), HostId("h2"), HostId("h3")


def fill(rack: Little, *gpus: str) -> list[str]:
    """Start one job of one GPU on each of these hosts, and return their ids."""
    ids = [rack.submit(1, "red") for _ in gpus]
    rack.look()
    for id, gpu in zip(ids, gpus, strict=True):
        rack.place(rack.queue.jobs[id], {HostId(gpu[:2]): [gpu]})
    return [str(id) for id in ids]


def hosts_of(rack: Little, id: str) -> list[HostId]:
    return [place.host for job in rack.jobs("running") if job.id == id for place in job.start.places]


def test_a_gang_for_one_host_waits_for_one_and_keeps_gpus_of_no_other() -> None:
    rack = Little([2, 3], {"red": 9})
    _, second, _, _ = fill(rack, "h1.0", "h1.1", "h2.0", "h2.1")
    gang = rack.submit(2, "red", pack="host")
    rack.end(next(job for job in rack.jobs("running") if job.id == second))
    proposed = rack.look()
    assert [each.gpus for each in proposed if isinstance(each, GpusKept)] == [{H1: 1}], (
        "two GPUs are free, on two hosts"
    )
    standing = views.QueueSnapshot(rack.queue, rack.settings, rack.totals)
    assert "1 of 2 GPUs reserved: h1 1" in standing.reason(rack.queue.jobs[gang])
    for job in rack.jobs("running"):
        if job.start.places[0].host == H1:
            rack.end(job)
    rack.settle()
    assert hosts_of(rack, gang) == [H1]


def test_nodes_lie_on_different_hosts_and_wait_for_as_many() -> None:
    rack = Little([4, 2, 2], {"red": 9})
    (one, *_) = fill(rack, "h2.0", "h3.0", "h3.1")
    nodes = rack.submit(2, "red", each=2, pack="apart")
    rack.settle()
    assert hosts_of(rack, nodes) == [], "only h1 has two free GPUs; it has four"
    rack.end(next(job for job in rack.jobs("running") if job.id == one))
    rack.settle()
    assert hosts_of(rack, nodes) == [H2, H1]


@pytest.mark.parametrize(("pack", "said"), [("host", "one host for all"), ("apart", "a host for each of 2 workers")])
def test_the_log_takes_no_places_that_lie_otherwise(pack: Pack, said: str) -> None:
    rack = Little([2, 2], {"red": 9})
    job = rack.queue.jobs[rack.submit(2, "red", pack=pack)]
    rack.look()
    places: tuple[Place, ...] = (Place(H1, (0,), ("h1.0",)), Place(H2, (1,), ("h2.0",)))
    if pack == "apart":
        places = (Place(H1, (0, 1), ("h1.0", "h1.1")),)
    answer = rack.say(Placed(wall_s=1.0, job=job.id, epoch=1, places=places, master_addr="", master_port=1))
    assert isinstance(answer, NotApplied) and said in answer.why


@on_a_rack()
async def test_agents_put_an_unknown_gang_on_the_idle_host_and_not_into_three_gaps(rack: Rack) -> None:
    for number in range(3):
        await submit(rack, workers=1, pack="any", name=f"filler{number}")
    await until(lambda: all(rack.job(f"j{number}").state == "running" for number in (1, 2, 3)))
    await submit(rack, workers=2)
    await until(lambda: rack.job("j4").state == "running")
    assert len(rack.job("j4").start.places) == 1
    await submit(rack, workers=2, pack="apart", name="nodes")
    await until(lambda: rack.job("j5").state == "running")
    assert sorted(len(place.ranks) for place in rack.job("j5").start.places) == [1, 1]

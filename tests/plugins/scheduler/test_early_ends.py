"""A rank that ends with 0 while others of its gang run: the log knows it, and the ranks that may wait for it are
told."""

from collections.abc import Sequence
from typing import Any

from covey.core.ids import JobId
from covey.wire.job import GoneRank, RanksHaveLeft
from plugins.facts import JobJoined, RankEndedHere, RankLeavesHere, RanksLeft, RankWaitsInVain
from plugins.scheduler.messages.commands import NotApplied, RanksDone
from tests.plugins.scheduler.rack import FakeHost, Rack, on_a_rack, submit, until
from tests.plugins.scheduler.test_replacing import H1, H2, Healing

J1 = JobId("j1")


class Peer:
    """A process of a rank, as its agent holds it."""

    def __init__(self, rank: int) -> None:
        self.job, self.epoch, self.rank = J1, 1, rank
        self.heard: list[Any] = []

    def send(self, frame: Any) -> None:
        self.heard.append(frame)


def joined(host: FakeHost, *ranks: int) -> list[Peer]:
    peers = [Peer(rank) for rank in ranks]

    def of_job(job: JobId) -> Sequence[Any]:
        return peers if job == J1 else ()

    host.peers = of_job  # type: ignore[method-assign]
    return peers


async def apart(rack: Rack) -> list[FakeHost]:
    """A gang of four on two hosts, two ranks on each."""
    await submit(rack, workers=4)
    await until(lambda: rack.job("j1").state == "running")
    places = rack.job("j1").start.places
    assert [len(place.ranks) for place in places] == [2, 2]
    await until(lambda: all((J1, 1) in rack.hosts[place.host].machine.ranks for place in places))
    return [rack.hosts[place.host] for place in places]


@on_a_rack()
async def test_a_rank_that_ended_before_the_others_is_named_to_all_of_them(rack: Rack) -> None:
    one, other = await apart(rack)
    beside, away = joined(one, 1), joined(other, 2, 3)
    one.publish(RankEndedHere(J1, 1, 0, 0))
    await until(lambda: all(peer.heard for peer in (*beside, *away)))
    assert rack.job("j1").healing.gone == {0: GoneRank(one.id, None)}
    assert {repr(frame) for peer in (*beside, *away) for frame in peer.heard} == {
        repr(RanksHaveLeft({0: GoneRank(one.id, None)}))
    }, "each is told once"
    for host in rack.hosts.values():
        assert RanksLeft(J1, 1, {0: GoneRank(one.id, None)}) in host.told, "any of them may sum for it"
    lines = [line[2] for line in other.notes if line[1] == "ranks left"]
    assert len(lines) == 1 and lines[0].startswith(f"rank 0 on {one.id} ended with 0") and "rank 2, 3" in lines[0]
    late = joined(other, 2)
    other.publish(JobJoined(J1, 1, 2))
    await until(lambda: late[0].heard)
    said = "tensor 'g': rank 0 on h ended with 0; it pushes nothing more; next: look"
    other.publish(RankWaitsInVain(J1, 1, 2, said))
    assert ("a rank gave up waiting" in [line[1] for line in other.notes]) and rack.job("j1").state == "running"
    assert other.service.early.codes(J1, 1) == {} and one.service.early.codes(J1, 1) == {0: 0}
    shown = {rank.rank: (rank.state, rank.code) for rank in (await other.call("job", id="j1")).ranks}
    assert shown == {0: ("ended", 0), 1: ("running", None), 2: ("running", None), 3: ("running", None)}
    other.runner.end(J1, 1, {2: 1, 3: -15})
    await until(lambda: rack.job("j1").state == "failed")
    blamed = f"rank 2 on {other.id} exited with 1: tensor 'g': rank 0 on h ended with 0; it pushes nothing more"
    assert rack.job("j1").reason == blamed


@on_a_rack()
async def test_a_rank_whose_process_left_while_its_launcher_runs_is_named_too(rack: Rack) -> None:
    one, other = await apart(rack)
    away = joined(other, 2, 3)
    one.publish(RankLeavesHere(J1, 1, 0))
    await until(lambda: all(peer.heard for peer in away))
    assert rack.job("j1").healing.gone.keys() == {0} and one.service.early.codes(J1, 1) == {}
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")


@on_a_rack()
async def test_a_host_whose_ranks_all_ended_is_named_by_its_report_and_a_failed_rank_never(rack: Rack) -> None:
    one, other = await apart(rack)
    away = joined(other, 2, 3)
    one.publish(RankEndedHere(J1, 1, 1, 1))
    one.runner.end(J1, 1, {0: 0, 1: 0})
    await until(lambda: all(peer.heard for peer in away))
    assert rack.job("j1").healing.gone.keys() == {0, 1}
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")


@on_a_rack()
async def test_of_ranks_that_end_a_moment_apart_nobody_is_told(rack: Rack) -> None:
    one, other = await apart(rack)
    away, entries = joined(other, 2, 3), len(rack.entries)
    one.publish(RankEndedHere(J1, 1, 0, 0))
    one.runner.end(J1, 1, {0: 0, 1: 0})
    await until(lambda: bool(rack.job("j1", str(other.id)).healing.gone))
    other.service.early.look([J1])
    other.service.early.second()
    other.publish(RankEndedHere(J1, 1, 2, 0))
    other.runner.end(J1, 1, {2: 0, 3: 0})
    await until(lambda: rack.job("j1").state == "done")
    assert not any(peer.heard for peer in away)
    assert not any(b"RanksDone" in entry for entry in rack.entries[entries:])
    assert not any(isinstance(fact, RanksLeft) for host in rack.hosts.values() for fact in host.told)


def test_the_log_takes_no_rank_for_gone_that_a_host_does_not_have() -> None:
    told = Healing()

    def done(host: Any, **more: Any) -> Any:
        of = {"wall_s": 1.0, "job": told.id, "epoch": told.job.grant.epoch, "host": host, "steps": {0: 19}}
        return told.say(RanksDone(**{**of, **more}))

    assert (
        isinstance(done(H2), NotApplied) and isinstance(done(H1, epoch=9), NotApplied) and told.job.healing.gone == {}
    )
    done(H1)
    done(H1, steps={0: 25})
    assert told.job.healing.gone == {0: GoneRank(H1, 19)}, "said twice"
    told.lose(H1, H2)
    told.queue.check()

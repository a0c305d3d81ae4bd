"""A rank that is stuck: who is told, when, and what its host does about it."""

import asyncio
from typing import Any

import pytest

from covey.core import HostId, JobId, Send
from plugins.facts import RanksAwaited
from plugins.scheduler.machine.hangs import NEXT_S, Hangs
from plugins.scheduler.messages.wire import RankHangs, StacksWanted
from plugins.scheduler.policy.hang import stuck
from plugins.scheduler.service.hangs import STACKS_S
from tests.plugins.scheduler.rack import Rack, until
from tests.plugins.scheduler.test_replacing import Healing
from tests.virtual_time import play

H1, H2 = HostId("h1"), HostId("h2")


def test_the_lowest_rank_that_is_awaited_for_too_long_is_stuck() -> None:
    assert stuck([3, 2], 4, 10.0, 10.0) == 2
    assert stuck([3, 2], 4, 10.0, 10.0, asked=[2]) == 3
    assert stuck([3, 2], 4, 10.0, 10.0, asked=[2, 3]) is None
    assert stuck([2], 4, 9.9, 10.0) is None
    assert stuck([2], 4, 1e6, None) is None, "nobody said how long is too long"
    assert stuck([0, 1], 2, 1e6, 10.0) is None, "where all are awaited, nobody waits"


class Waiting:
    """A gang of four on h1 and h2, and the machine of the host that sums it."""

    def __init__(self, **spec: Any) -> None:
        self.told = Healing(**{"hang_s": 30.0, **spec})
        self.machine = Hangs(self.told.queue)
        self.now_s = 100.0

    def wait(self, *ranks: int, waits_s: float = 31.0, after_s: float = 1.0, epoch: int = 1) -> list[Send]:
        self.now_s += after_s
        return list(self.machine.handle(RanksAwaited(self.told.id, epoch, ranks, waits_s), self.now_s))


def asked(sends: list[Send]) -> list[tuple[HostId, int]]:
    return [(send.to, send.message.rank) for send in sends if isinstance(send.message, RankHangs)]


def test_its_host_is_told_and_others_keep_stacks() -> None:
    it = Waiting()
    assert it.wait(3, waits_s=29.0) == []
    sends = it.wait(3)
    assert asked(sends) == [(H2, 3)]
    assert [send.to for send in sends if isinstance(send.message, StacksWanted)] == [H1]
    assert it.wait(3) == it.wait(3, after_s=20.0) == [], "once, and again only when its successor is stuck too"
    assert asked(it.wait(3, after_s=30.0)) == [(H2, 3)]


def test_one_rank_at_a_time() -> None:
    it = Waiting()
    assert asked(it.wait(1, 3)) == [(H1, 1)]
    assert it.wait(1, 3, after_s=NEXT_S - 1.0) == []
    assert asked(it.wait(1, 3, after_s=2.0)) == [(H2, 3)]
    assert it.wait(1, 3, after_s=NEXT_S) == []


@pytest.mark.parametrize("spec", [{"hang_s": None}, {"hang_s": 60.0}])
def test_nobody_is_told_before_the_time_that_the_job_gave(spec: dict[str, Any]) -> None:
    assert Waiting(**spec).wait(3) == []


def test_nor_of_another_grant_or_while_others_take_ranks_over() -> None:
    it = Waiting()
    assert it.wait(3, epoch=2) == []
    it.told.lose(H2)
    assert it.wait(3) == [], "the rank is on its way to another host"


# ---- its host --------------------------------------------------------------------------------------------------------

J1 = JobId("j1")


def played(age_s: float, message: RankHangs | StacksWanted, hang_s: float | None = 30.0) -> Any:
    """What h1, which runs both ranks of j1, does when another host says this `age_s` after they began."""

    async def story() -> Any:
        rack = Rack({"h1": 2, "h2": 0, "h3": 0})
        await rack.start()
        spec = {"argv": ["train"], "workers": 2, "gpus_per_worker": 1, "hang_s": hang_s, "pack": "host"}
        await rack["h3"].call("submit", spec=spec)
        await until(lambda: rack["h1"].machine.ranks)
        await asyncio.sleep(age_s)
        for _ in range(2):
            await rack["h2"].send("scheduler", H1, message, 1.0)
        await asyncio.sleep(STACKS_S + 1.0)
        rack.check()
        rack.stop()
        return rack["h1"]

    return play(story())


def test_the_host_of_a_stuck_rank_keeps_stacks_and_ends_it_once() -> None:
    host = played(40.0, RankHangs(J1, 1, 1, 31.0))
    (stacks, (*ended, why)) = host.runner.stuck
    assert stacks == (J1, 1) and ended == [J1, 1, 1, 101]
    assert why.startswith("the others waited 31 s for rank 1 (--hang 30 s)")
    (note,) = [reason for _, event, reason, _ in host.notes if event == "rank stuck"]
    assert "process 101 is ended, as h2 says" in note


def test_hosts_of_the_other_ranks_keep_stacks_once() -> None:
    assert played(1.0, StacksWanted(J1, 1)).runner.stuck == [(J1, 1)]


@pytest.mark.parametrize(
    ("age_s", "message", "hang_s"),
    [
        (20.0, RankHangs(J1, 1, 1, 31.0), 30.0),  # its process is younger than that: a successor
        (40.0, RankHangs(J1, 1, 1, 29.0), 30.0),  # whoever says so is mistaken about the job
        (40.0, RankHangs(J1, 1, 7, 31.0), 30.0),  # no rank of it
        (40.0, RankHangs(J1, 2, 1, 31.0), 30.0),  # another grant
        (40.0, RankHangs(JobId("j9"), 1, 1, 31.0), 30.0),
        (40.0, RankHangs(J1, 1, 1, 31.0), None),  # nobody asked for that
        (40.0, StacksWanted(J1, 1), None),
    ],
)
def test_a_rank_is_not_ended_on_the_word_of_another_host(
    age_s: float, message: RankHangs | StacksWanted, hang_s: float | None
) -> None:
    assert played(age_s, message, hang_s).runner.stuck == []

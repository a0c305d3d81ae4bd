"""A host for whose ranks others wait again and again is named; one that is waited for now and then is not."""

from typing import Any

import msgspec

from covey.core.ids import HostId, JobId
from plugins.facts import RanksAwaited
from plugins.gossiped import LateHost
from plugins.scheduler.machine.gang.late_hosts import ENOUGH, WINDOW, LateHosts
from plugins.scheduler.policy.hang import is_late
from plugins.scheduler.service.ranks.hangs import GOSSIP_BYTES_MAX, LATE_MAX, StuckRanks
from tests.plugins.scheduler.rack import Rack
from tests.plugins.scheduler.test_replacing import Healing
from tests.virtual_time import play

H1, H2 = HostId("h1"), HostId("h2")


class Seconds:
    """The seconds of a gang of six, three ranks on each of h1 and h2."""

    def __init__(self) -> None:
        self.told = Healing()
        self.id = self.told.run(6, base=10)
        self.machine = LateHosts(self.told.queue)

    def passed(self, *seconds: tuple[int, ...], epoch: int = 1) -> list[LateHost]:
        for ranks in seconds:
            self.machine.second(RanksAwaited(self.id, epoch, ranks, 0.5 if ranks else 0.0))
        return self.machine.late()


def test_whoever_is_waited_for_a_tenth_of_the_time_is_late() -> None:
    it = Seconds()
    assert it.passed(*[(4,), (), (), ()] * 10) == [], "of a minute at least"
    assert it.passed(*[(4, 5), (), (), ()] * 10) == [LateHost(H2, it.id, 25)]


def test_where_all_are_waited_for_in_turn_nobody_is() -> None:
    assert Seconds().passed(*[(4,), (1,), (), ()] * 30) == []
    assert is_late(0.31, 0.1) and not is_late(0.3, 0.11) and not is_late(0.09, 0.0)


def test_a_second_in_which_half_of_the_ranks_are_awaited_is_nobodys() -> None:
    assert Seconds().passed(*[(3, 4, 5), ()] * 60) == []
    assert Seconds().passed(*[(2, 3), ()] * 60) == [], "nor one of two hosts"


def test_it_is_forgotten_when_it_is_over() -> None:
    it = Seconds()
    assert it.passed(*[(4,), ()] * ENOUGH)
    assert it.passed(*[()] * WINDOW) == []
    assert it.passed(*[(4,)] * ENOUGH, epoch=2) == [], "another grant"
    assert it.passed(*[(4,)] * ENOUGH)
    it.told.queue.jobs[it.id].state = "stopping"
    assert it.passed(()) == [] and not it.machine.waited


def test_what_gossip_says_of_it_is_short() -> None:
    names = [HostId(f"{'x' * 60}{n}") for n in range(9)]
    late: Any = [LateHost(name, JobId("j1000000"), 99 - n) for n, name in enumerate(names)]

    async def story() -> bytes:
        rack = Rack({"h1": 2})
        stuck = StuckRanks("scheduler", rack["h1"], rack["h1"].service.queue, lambda _send: None)
        stuck.late.late = lambda: late  # type: ignore[method-assign]
        stuck.second()
        return rack.values[H1]["late"]

    said = play(story())
    assert len(said) <= GOSSIP_BYTES_MAX
    hosts = msgspec.msgpack.decode(said)["hosts"]
    assert 1 <= len(hosts) <= LATE_MAX and hosts[0]["percent"] == 99, "the worst"

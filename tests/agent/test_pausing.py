"""Ranks that may be lost stand still when no leader confirms them, so that others may run in their place."""

import asyncio
import signal

import pytest

from chaos.world.world import World
from covey.ports.env import Env
from covey.ports.processes import Command
from plugins.base import RankLease
from plugins.facts import RanksEnded, RanksHeal
from tests.agent.test_leases import GRACE_S, J1, LEASE_S, Host

PAUSE_S = 3.0


class Healing(Host):
    """Two ranks that may be lost. Each counts its seconds."""

    def __init__(self, world: World) -> None:
        self.worked_s: list[float] = []
        super().__init__(world)

    async def _train(self, env: Env, command: Command) -> int:
        while True:
            self.worked_s.append(self.world.now)
            await asyncio.sleep(0.1)

    def begin(self) -> "Healing":
        super().begin()
        self.confirm()
        self.heal(0)
        self.heal(1)
        assert self.world.run(self.world.now + 2, stop=lambda: bool(self.heals_told()))
        return self

    def heal(self, rank: int, step: int = 1) -> None:
        agent = self.host.agent
        assert agent is not None
        agent.spawn("heals", self.runner.heals(J1, 1, rank, step))

    def confirm(self) -> float:
        self.renew(RankLease(self.host.clock.boot_s(), LEASE_S, GRACE_S, PAUSE_S))
        return self.world.now

    def heals_told(self) -> list[bool]:
        return [fact.may_be_lost for fact in self.facts if isinstance(fact, RanksHeal)]

    def works(self) -> bool:
        """Whether any of the ranks does something within half a second."""
        since_s = self.world.now
        self.world.run(since_s + 0.5)
        return any(at_s > since_s for at_s in self.worked_s)

    def pass_s(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)


@pytest.mark.parametrize("agent", ["alive", "killed", "stopped"])
def test_they_stand_still_whatever_their_agent_does_and_end_with_their_lease(agent: str) -> None:
    with World(1) as world:
        host = Healing(world).begin()
        at_s = host.confirm()
        if agent != "alive":
            world.run(at_s + 0.5)
            assert host.host.agent is not None
            host.host.agent.signal(signal.SIGKILL if agent == "killed" else signal.SIGSTOP)
        world.run(at_s + PAUSE_S - 0.5)
        assert host.works(), "they have their time"
        world.run(at_s + PAUSE_S + 0.5)
        assert not host.works() and len(host.living()) == 2
        world.run(at_s + LEASE_S + 1.0)
        assert host.living() == [], "others may run in their place: they get no time to save anything"


def test_they_go_on_when_a_leader_confirms_them_after_all() -> None:
    with World(2) as world:
        host = Healing(world).begin()
        host.pass_s(PAUSE_S + 1.0)
        assert not host.works()
        host.confirm()
        host.pass_s(0.1)
        assert host.works()


def test_whoever_lets_them_go_on_meanwhile_does_so_for_a_moment() -> None:
    with World(3) as world:
        host = Healing(world).begin()
        host.pass_s(PAUSE_S + 1.0)
        for process in host.living():
            process.signal(signal.SIGCONT)
        host.pass_s(0.5)
        assert not host.works()


def test_ranks_one_of_which_may_not_be_lost_do_not_stand_still() -> None:
    with World(4) as world:
        host = Healing(world)
        Host.begin(host)
        host.confirm()
        host.heal(0)
        host.pass_s(PAUSE_S + 2.0)
        assert host.works() and host.heals_told() == []


def test_ranks_that_are_through_may_not_be_lost_any_more_and_still_stand_still() -> None:
    """The supervisor says so, but whoever decides may not have heard it."""
    with World(5) as world:
        host = Healing(world).begin()
        host.heal(1, 1 << 60)
        assert world.run(world.now + 2, stop=lambda: host.heals_told() == [True, False])
        host.pass_s(PAUSE_S + 2.0)
        assert not host.works()


def test_an_agent_that_starts_again_tells_it_again() -> None:
    with World(6) as world:
        host = Healing(world).begin()
        assert host.host.agent is not None
        host.host.agent.signal(signal.SIGKILL)
        host.facts.clear()
        host.host.start_agent()
        assert world.run(world.now + 2, stop=lambda: host.heals_told() == [True])


def test_ranks_that_are_told_to_stop_while_they_stand_still_do_not_go_on_for_it() -> None:
    with World(7) as world:
        host = Healing(world).begin()
        host.pass_s(PAUSE_S + 1.0)
        assert host.host.agent is not None and not host.works()
        before = len(host.worked_s)
        host.host.agent.spawn("stop", host.runner.stop(J1, 1, 60.0, "cancelled"))
        assert world.run(world.now + 3, stop=lambda: bool(host.ends()))
        assert len(host.worked_s) == before and set(host.ends()[0].codes.values()) == {-signal.SIGKILL}


def test_a_supervisor_after_one_that_died_with_its_agent_waits_for_the_next_word() -> None:
    with World(8) as world:
        host = Healing(world).begin()
        assert host.host.agent is not None
        host.host.agent.signal(signal.SIGKILL)
        for process in host.host.find("sup-j1-1"):
            process.signal(signal.SIGKILL)
        host.pass_s(0.2)
        host.host.start_agent()
        host.pass_s(1.5)
        assert not host.works() and len(host.living()) == 2
        host.confirm()
        host.pass_s(0.3)
        assert host.works() and not [fact for fact in host.facts if isinstance(fact, RanksEnded)]

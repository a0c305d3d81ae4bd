"""Leases of ranks: the supervisor ends them by itself when no leader renews, whatever its agent does meanwhile."""

import asyncio
import signal
from typing import Any

import msgspec
import pytest

from agent.jobs.following import AGAIN_LEASE_S
from agent.jobs.runner import SupervisedRunner
from agent.jobs.supervisor import supervisor
from chaos.world.host import SimHost
from chaos.world.world import World
from covey.core.events import Fact
from covey.core.ids import JobId
from covey.ports.env import Env
from covey.ports.processes import Command
from plugins.base import RankLease
from plugins.facts import RanksEnded
from tests.agent.here import ranks

J1 = JobId("j1")
LEASE_S, GRACE_S = 30.0, 4.0


class Host:
    """A simulated host whose agent is only a runner with one gang. `stubborn` ranks answer no SIGTERM."""

    def __init__(self, world: World, stubborn: bool = False) -> None:
        self.world, self.stubborn = world, stubborn
        self.facts: list[Fact] = []
        self.asked_s: list[float] = []
        """When ranks got SIGTERM, by the world's time."""
        self.spec = ranks("j1", "train", count=2, grace_s=60.0)
        self.runner: SupervisedRunner
        world.programs = lambda: {"supervisor": supervisor.PROGRAM}
        world.user_programs["train"] = self._train
        self.host: SimHost = world.add_host("h1")
        self.host.main = self._agent

    async def _train(self, env: Env, command: Command) -> int:
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.asked_s.append(self.world.now)
                if not self.stubborn:
                    raise

    async def _agent(self, env: Env) -> int:
        self.runner = SupervisedRunner(env, self.facts.append, "10.0.0.1", f"{env.run_dir}/jobs.sock")
        await self.runner.start_up()
        lease = RankLease(env.clock.boot_s(), LEASE_S, GRACE_S)
        await self.runner.start(msgspec.structs.replace(self.spec, lease=lease) if self.leased else self.spec)
        await asyncio.Event().wait()
        return 0

    leased = True

    def begin(self) -> "Host":
        self.host.start_agent()
        assert self.world.run(20, stop=lambda: len(self.living()) == 2)
        return self

    def living(self) -> list[Any]:
        return self.host.find("train")

    def renew(self, lease: RankLease) -> None:
        agent = self.host.agent
        assert agent is not None
        agent.spawn("renew", self.runner.renew({(J1, 1): lease}))

    def asked_now(self, lease_s: float | None = LEASE_S) -> RankLease:
        return RankLease(self.host.clock.boot_s(), lease_s, GRACE_S)

    def ends(self) -> list[RanksEnded]:
        return [fact for fact in self.facts if isinstance(fact, RanksEnded)]


@pytest.mark.parametrize("agent", ["alive", "killed", "stopped"])
def test_ranks_nobody_confirms_are_gone_after_lease_and_grace_whatever_agents_do(agent: str) -> None:
    with World(1) as world:
        host = Host(world, stubborn=True).begin()
        if agent != "alive":
            assert host.host.agent is not None
            host.host.agent.signal(signal.SIGKILL if agent == "killed" else signal.SIGSTOP)
        world.run(LEASE_S - 1)
        assert len(host.living()) == 2 and not host.asked_s, "they have their lease"
        world.run(LEASE_S + 2)
        assert len(host.asked_s) == 2 and len(host.living()) == 2, "SIGTERM comes before SIGKILL"
        world.run(LEASE_S + GRACE_S + 2)
        assert host.living() == [], f"their own grace of {host.spec.grace_s:g} s is cut"


def test_ranks_whose_lease_ran_out_count_as_lost_and_say_why() -> None:
    with World(2) as world:
        host = Host(world).begin()
        assert world.run(LEASE_S + 5, stop=lambda: bool(host.ends()))
        (end,) = host.ends()
        assert end.lost and set(end.codes.values()) == {-signal.SIGTERM}
        assert end.reason.startswith("no leader has confirmed these ranks for 30 s: h1 may be cut off")
        notice = host.host.disk.files["jobs/j1/1.preempt"].data
        assert b"cut off" in bytes(notice), "the script finds the reason in its notice"


def test_a_lease_is_counted_from_when_it_was_asked_for() -> None:
    with World(3) as world:
        host = Host(world).begin()
        asked = host.asked_now()
        began_s = world.now
        world.run(began_s + 20)
        host.renew(asked)  # the answer was under way for 20 s
        world.run(began_s + LEASE_S + 3)
        assert host.living() == []


def test_ranks_that_are_confirmed_go_on_for_ever() -> None:
    with World(4) as world:
        host = Host(world).begin()
        for _ in range(20):
            world.run(world.now + LEASE_S - 2)
            host.renew(host.asked_now())
        assert len(host.living()) == 2


def test_an_overtaken_answer_shortens_nothing_and_none_reaches_into_the_future() -> None:
    with World(5) as world:
        host = Host(world).begin()
        old = host.asked_now()
        world.run(world.now + 10)
        host.renew(host.asked_now())
        world.run(world.now + 1)
        host.renew(old)
        world.run(LEASE_S + 5)
        assert len(host.living()) == 2
        host.renew(RankLease(1e9, LEASE_S, GRACE_S))
        world.run(world.now + LEASE_S + 3)
        assert host.living() == []


def test_ranks_without_a_lease_go_on_until_one_is_given() -> None:
    with World(6) as world:
        host = Host(world)
        host.leased = False
        host.begin()
        world.run(1000)
        assert len(host.living()) == 2
        host.renew(host.asked_now())
        world.run(world.now + LEASE_S + 3)
        assert host.living() == []


def test_a_lease_without_end_has_none() -> None:
    with World(7) as world:
        host = Host(world).begin()
        host.renew(host.asked_now(None))
        world.run(1000)
        assert len(host.living()) == 2


def test_a_machine_that_slept_finds_its_leases_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's timers stood still meanwhile, the clock of leases did not."""
    with World(8) as world:
        host = Host(world).begin()
        clock, slept_s = host.host.clock, [0.0]
        monkeypatch.setattr(clock, "boot_s", lambda: clock.now_s() + slept_s[0])
        world.run(world.now + 2)
        slept_s[0] = 100.0
        world.run(world.now + 2)
        assert host.living() == []


def test_a_supervisor_started_again_by_an_agent_without_a_lease_gives_a_short_one() -> None:
    with World(9) as world:
        host = Host(world).begin()
        host.host.agent.signal(signal.SIGKILL)  # type: ignore[union-attr]
        for process in host.host.find("sup-j1-1"):
            process.signal(signal.SIGKILL)
        world.run(world.now + 1)
        host.host.start_agent()
        world.run(world.now + AGAIN_LEASE_S + 5)
        assert host.living() == []


def test_ranks_being_stopped_get_no_more_time_than_their_lease_and_keep_their_reason() -> None:
    with World(10) as world:
        host = Host(world, stubborn=True).begin()
        agent = host.host.agent
        assert agent is not None
        agent.spawn("stop", host.runner.stop(J1, 1, 600.0, "preempted"))
        assert world.run(LEASE_S + GRACE_S + 3, stop=lambda: bool(host.ends()))
        (end,) = host.ends()
        assert (end.reason, end.lost) == ("preempted", False)

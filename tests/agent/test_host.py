"""The wiring of one agent, on simulated hosts."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec
import pytest

from agent.metrics import PLUGIN_RESTARTS
from chaos.rackworld import SimRack
from covey.core.errors import Refused
from covey.core.events import Fact, Message
from covey.core.ids import HostId
from plugins.base import Command, Plugin, PluginService
from plugins.facts import SecondPassed
from plugins.gossiped import Endpoints
from plugins.memory.plugin import PLUGIN as MEMORY
from plugins.views import HostRow


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section [fragile] of agent.toml."""

    fails_in: str = "take"


class Poke(Message, frozen=True):
    """A message that is handled by failing."""


class Fragile(PluginService):
    """A plugin that fails where its settings say."""

    name: ClassVar[str] = "fragile"

    async def start(self) -> None:
        self.fails_in = self.host.settings(Settings).fails_in
        self._fail("start")
        if self.fails_in == "task":
            self.env.spawn("doomed", self._doomed())

    async def _doomed(self) -> None:
        self._fail("task")

    def _fail(self, where: str) -> None:
        if self.fails_in == where:
            raise ZeroDivisionError(f"in {where}")

    def on_fact(self, fact: Fact) -> None:
        if isinstance(fact, SecondPassed):
            self._fail("take")

    async def on_message(self, sender: HostId, message: Any) -> None:
        self._fail("hear")

    def commands(self) -> Mapping[str, Command]:
        return {"poke": self._poke}

    async def _poke(self, _arguments: Mapping[str, Any]) -> dict[str, str]:
        self._fail("command")
        return {}


FRAGILE = Plugin(
    name="fragile", paper="none", settings=Settings, messages=Poke, service=Fragile, asked_by={"poke": "anybody"}
)


def broken(where: str) -> SimRack:
    settings = {"fragile": {"fails_in": where}}
    rack = SimRack(7, hosts=2, plugins=(MEMORY, FRAGILE), settings=settings, watched=False).start()
    rack.run(20)
    return rack


def send(rack: SimRack, plugin: str, body: bytes) -> None:
    """Send a message from h2 to a plugin of h1."""
    process = rack.hosts["h2"].agent
    assert process is not None
    process.spawn("test: message", rack.agents["h2"].messenger.send(plugin, HostId("h1"), body, 3.0))


def fails_and_the_others_live(where: str, provoke: Callable[[SimRack], None] = lambda _rack: None) -> None:
    with broken(where) as rack:
        provoke(rack)
        rack.run(10)
        agent = rack.agents["h1"]
        assert agent.health["fragile"].state == "failed"
        assert where in agent.health["fragile"].why
        assert agent.health["memory"].state == "on"
        assert "fragile" not in agent.plugins
        assert rack.ask("h1", "agent.health", {})["plugins"]["fragile"].state == "failed"
        rows: list[HostRow] = rack.ask("h2", "agent.hosts", {})
        assert next(row for row in rows if row.host == "h1").plugins_failed == ("fragile",), (
            "told to every host by gossip"
        )
        assert rack.ask("h1", "memory.volumes", {}) == []


def test_a_plugin_that_fails_while_starting_does_not_take_the_others_down() -> None:
    fails_and_the_others_live("start")


def test_a_plugin_that_fails_at_a_fact_is_stopped_and_reported() -> None:
    fails_and_the_others_live("take")


def test_a_plugin_whose_task_fails_is_stopped_and_reported() -> None:
    fails_and_the_others_live("task")


def test_a_plugin_that_fails_at_a_message_is_stopped_and_reported() -> None:
    fails_and_the_others_live("hear", lambda rack: send(rack, "fragile", msgspec.msgpack.encode(Poke())))


def test_hosts_that_everybody_may_read_are_told_by_every_agent() -> None:
    rack = SimRack(7, hosts=3, plugins=(MEMORY,), watched=False)
    rack.configure("h1", {"http": {"bind": "127.0.0.1:8470"}})
    with rack.start():
        rack.run(20)
        older = rack.agents["h2"]  # one that does not refuse such a setting
        at = older.env.links.address, older.env.links.public_key, older.boot

        async def tell() -> None:
            older.spread("endpoints", Endpoints(*at, "0.0.0.0:8470", read_open=True))

        process = rack.hosts["h2"].agent
        assert process is not None
        process.spawn("tell", tell())
        rack.run(10)
        for name in ("h1", "h3"):
            (note,) = rack.ask(name, "agent.health", {})["notes"]
            assert note.startswith("anyone who can reach h2 (0.0.0.0:8470) may read all jobs")


def test_letters_for_nobody_and_malformed_ones_are_dropped_and_counted() -> None:
    with broken("nowhere") as rack:
        for plugin, body in (("kitchen", b"\x80"), ("fragile", b"\xc1"), ("memory", b"\x00" * 50)):
            send(rack, plugin, body)
        rack.run(5)
        agent = rack.agents["h1"]
        tries = 3
        assert agent.counters["without_plugin"] >= 3 * tries, "not acknowledged, so each came again"
        assert agent.counters["malformed_bodies"] == agent.counters["without_plugin"] * 2 // 3
        assert agent.health["fragile"].state == agent.health["memory"].state == "on"


def test_a_command_that_fails_is_refused_in_words_and_stops_its_plugin() -> None:
    with broken("command") as rack:
        with pytest.raises(Refused) as refused:
            rack.ask("h1", "fragile.poke", {})
        assert "ZeroDivisionError" in refused.value.why
        assert rack.agents["h1"].health["fragile"].state == "failed"


# ---- plugins that the world failed start again ----


class Sick(PluginService):
    """A plugin whose disk is sick for its first lives; it says which one it is."""

    name: ClassVar[str] = "sick"
    lives: ClassVar[list["Sick"]] = []
    sick_lives: ClassVar[int] = 0

    async def start(self) -> None:
        self.lives.append(self)
        self.heard: list[Fact] = []
        self.env.spawn("ticks", self._tick())
        if len(self.lives) <= self.sick_lives:
            raise OSError(5, "the disk is sick")

    async def _tick(self) -> None:
        while True:
            self.host.spread("sick", Poke())
            await asyncio.sleep(1.0)

    def on_fact(self, fact: Fact) -> None:
        self.heard.append(fact)

    def commands(self) -> Mapping[str, Command]:
        return {"fill": self._fill}

    async def _fill(self, _arguments: Mapping[str, Any]) -> dict[str, str]:
        raise OSError(28, "no space left")


SICK = Plugin(name="sick", paper="none", settings=Settings, messages=Poke, service=Sick, asked_by={"fill": "operators"})


@pytest.fixture
def sick_rack() -> Iterator[Callable[[int], SimRack]]:
    """A rack of one whose room `sick` cannot start in that many of its lives."""
    racks: list[SimRack] = []

    def make(sick_lives: int) -> SimRack:
        Sick.lives, Sick.sick_lives = [], sick_lives
        racks.append(SimRack(7, hosts=1, plugins=(MEMORY, SICK), settings={"sick": {}}, watched=False).start())
        return racks[0]

    yield make
    for rack in racks:
        rack.close()


def test_a_plugin_kept_from_starting_by_a_sick_disk_is_retried_with_growing_pauses(
    sick_rack: Callable[[int], SimRack],
) -> None:
    rack = sick_rack(3)
    began = rack.until(lambda: len(Sick.lives) == 1, 5.0, "it tries")
    rack.run(0.5)
    seen = rack.agents["h1"].health["sick"]
    assert (seen.state, seen.again_s) == ("failed", 1.0) and "the disk is sick" in seen.why
    took = rack.until(lambda: rack.agents["h1"].health["sick"].state == "on", 20.0, "it is on")
    assert began < 5 and 5.5 < took < 8.0, "1 + 2 + 4 s, less the half second before"
    agent = rack.agents["h1"]
    assert (agent.health["sick"].restarts, agent.health["memory"].restarts) == (3, 0)
    assert "the disk is sick" in agent.health["sick"].why
    assert agent.metrics()[PLUGIN_RESTARTS.of("sick")] == 3
    rows: list[HostRow] = rack.ask("h1", "agent.hosts", {})
    assert rows[0].plugins_failed == (), "gossip no longer tells of it"
    story = [line.event for line in rack.ask("h1", "agent.why", {"id": "h1"})]
    assert "plugin sick failed" in story and "plugin sick is on again" in story


def test_a_life_that_is_over_says_nothing_more_and_the_next_has_a_higher_boot(
    sick_rack: Callable[[int], SimRack],
) -> None:
    rack = sick_rack(0)
    rack.until(lambda: bool(Sick.lives) and "sick" in rack.agents["h1"].plugins, 5.0, "it is on")
    with pytest.raises(Refused) as refused:
        rack.ask("h1", "sick.fill", {})
    assert "no space left" in refused.value.why
    rack.until(lambda: len(Sick.lives) == 2 and "sick" in rack.agents["h1"].plugins, 10.0, "it is on again")
    old, new = Sick.lives
    assert new.host.boot > old.host.boot == rack.agents["h1"].boot
    assert not old.host._tasks and len(new.host._tasks) == 1  # type: ignore[attr-defined]
    before = len(new.heard)
    old.host.publish(SecondPassed(0.0))
    assert SecondPassed(0.0) not in new.heard[before:]
    new.host.publish(SecondPassed(0.0))
    assert SecondPassed(0.0) in new.heard[before:]
    old_boot = new.host.boot
    rack.hosts["h1"].agent.signal(9)  # type: ignore[union-attr]
    rack.hosts["h1"].revive()
    rack.until(lambda: len(Sick.lives) == 3, 10.0, "the agent is back")
    assert Sick.lives[-1].host.boot > old_boot, "what a life took is never given again"


def test_a_plugin_that_failed_by_its_own_fault_is_not_started_again() -> None:
    with broken("start") as rack:
        rack.run(120)
        health = rack.agents["h1"].health["fragile"]
        assert (health.state, health.restarts, health.again_s) == ("failed", 0, None)


def test_a_scheduler_that_starts_again_has_the_whole_queue_and_its_jobs_go_on() -> None:
    with SimRack(11, hosts=3, watched=True) as rack:
        rack.start().settle()
        ends = rack.submit({"name": "ends", "argv": ["sleeper", "20"], "workers": 2, "cwd": "/"}, "first-key")
        lasts = rack.submit({"name": "lasts", "argv": ["sleeper", "60"], "workers": 3, "cwd": "/"}, "second-key")

        def state(job: str, on: str) -> str:
            scheduler = rack.plugin(on, "scheduler")
            return "" if scheduler is None or job not in scheduler.queue.jobs else scheduler.queue.jobs[job].state

        rack.until(lambda: all(state(job, "h1") == "running" for job in (ends, lasts)), 30.0, "both run")

        async def full(_plugin: PluginService) -> None:
            raise OSError(28, "no space left")

        async def fills(name: str) -> None:
            with pytest.raises(Refused, match="no space left"):
                await rack.agents[name].plugin_runtime.ask("scheduler", full)

        for name in rack.hosts:
            process = rack.hosts[name].agent
            assert process is not None
            process.spawn("test: full", fills(name))
        rack.run(0.3)
        assert {rack.agents[name].health["scheduler"].state for name in rack.hosts} == {"failed"}
        boots = {name: rack.agents[name].boot for name in rack.hosts}
        rack.until(lambda: all(rack.plugin(name, "scheduler") for name in rack.hosts), 5.0, "all are on again")
        for name in rack.hosts:
            assert state(ends, name) == state(lasts, name) == "running", "the log's state went over"
            assert rack.plugin(name, "aggregator")._tables.grant(lasts) > 0
        rack.until(lambda: state(ends, "h1") == state(lasts, "h1") == "done", 90.0, "both end as if nothing had been")
        assert boots == {name: rack.agents[name].boot for name in rack.hosts}, "no agent was restarted"


def test_a_host_whose_identity_is_an_older_copy_is_heard_again() -> None:
    """A state directory is put back from a copy: a smaller boot number would be taken for a replay by all others."""
    with SimRack(11, hosts=3) as rack:
        rack.start()
        rack.settle()
        host = rack.world.hosts["h3"]
        older = host.disk.image("identity")
        for life in range(4):
            host.power_off()
            if life == 3:
                host.disk.restore("identity", older)
            rack.run(12.0)  # long enough to be called gone
            seen = rack.agents["h1"].gossip.peer(HostId("h3"))
            assert seen is not None and seen.state == "gone"
            host.power_on()
            rack.run(1.0)
            agent = rack.agents["h3"]
            rack.run(2.0)
            rack.settle(60.0)
            assert rack.agents["h3"] is agent, "nobody had to tell it that it was not heard"


def test_a_host_that_others_know_under_a_later_boot_begins_again_above_it() -> None:
    """The identity file is an older copy, and the wall clock was ahead by ten minutes when the newer one was
    written."""
    with SimRack(12, hosts=3) as rack:
        rack.start()
        rack.settle()
        host = rack.world.hosts["h3"]
        older = host.disk.image("identity")
        host.clock.skew(1, 600.0, 1.0)
        host.power_off()
        rack.run(2.0)
        host.power_on()
        rack.run(2.0)
        rack.settle(10.0)
        ahead = rack.agents["h3"].boot
        host.clock.end_skew()
        host.power_off()
        host.disk.restore("identity", older)
        host.power_on()
        rack.run(2.0)
        assert rack.agents["h3"].boot < ahead
        rack.settle(20.0)
        assert rack.agents["h3"].boot == ahead + 1

"""The wiring of one agent, on simulated hosts."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec
import pytest

from chaos.rackworld import SimRack
from covey.core import Fact, HostId, Message
from plugins import memory
from plugins.base import Command, Refused, Room, RoomService
from plugins.facts import SecondPassed
from plugins.views import HostRow


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[fragile]"""

    fails_in: str = "take"


class Poke(Message, frozen=True):
    """Handled by failing."""


class Fragile(RoomService):
    """Fails where its settings say."""

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

    def take(self, fact: Fact) -> None:
        if isinstance(fact, SecondPassed):
            self._fail("take")

    async def hear(self, sender: HostId, message: Any) -> None:
        self._fail("hear")

    def commands(self) -> Mapping[str, Command]:
        return {"poke": self._poke}

    async def _poke(self, _arguments: Mapping[str, Any]) -> dict[str, str]:
        self._fail("command")
        return {}


FRAGILE = Room(name="fragile", paper="none", settings=Settings, messages=Poke, service=Fragile)


def broken(where: str) -> SimRack:
    settings = {"fragile": {"fails_in": where}}
    rack = SimRack(7, hosts=2, rooms=(memory.ROOM, FRAGILE), settings=settings, watched=False).start()
    rack.run(20)
    return rack


def letter(rack: SimRack, room: str, body: bytes) -> None:
    """From h2 to a room of h1."""
    process = rack.hosts["h2"].agent
    assert process is not None
    process.spawn("test: letter", rack.agents["h2"].courier.send(room, HostId("h1"), body, 3.0))


def fails_and_the_others_live(where: str, provoke: Callable[[SimRack], None] = lambda _rack: None) -> None:
    with broken(where) as rack:
        provoke(rack)
        rack.run(10)
        agent = rack.agents["h1"]
        assert agent.health["fragile"].state == "failed"
        assert where in agent.health["fragile"].why
        assert agent.health["memory"].state == "on"
        assert "fragile" not in agent.rooms
        assert rack.ask("h1", "agent.health", {})["rooms"]["fragile"].state == "failed"
        rows: list[HostRow] = rack.ask("h2", "agent.hosts", {})
        assert next(row for row in rows if row.host == "h1").rooms_failed == ("fragile",), (
            "told to every host by gossip"
        )
        assert rack.ask("h1", "memory.volumes", {}) == []


def test_a_room_that_fails_while_starting_does_not_take_the_others_down() -> None:
    fails_and_the_others_live("start")


def test_a_room_that_fails_at_a_fact_is_stopped_and_reported() -> None:
    fails_and_the_others_live("take")


def test_a_room_whose_task_fails_is_stopped_and_reported() -> None:
    fails_and_the_others_live("task")


def test_a_room_that_fails_at_a_letter_is_stopped_and_reported() -> None:
    fails_and_the_others_live("hear", lambda rack: letter(rack, "fragile", msgspec.msgpack.encode(Poke())))


def test_letters_for_nobody_and_malformed_ones_are_dropped_and_counted() -> None:
    with broken("nowhere") as rack:
        for room, body in (("kitchen", b"\x80"), ("fragile", b"\xc1"), ("memory", b"\x00" * 50)):
            letter(rack, room, body)
        rack.run(5)
        agent = rack.agents["h1"]
        assert agent.counters["letters for nobody"] == 3
        assert agent.counters["malformed letters"] == 2
        assert agent.health["fragile"].state == agent.health["memory"].state == "on"


def test_a_command_that_fails_is_refused_in_words_and_stops_its_room() -> None:
    with broken("command") as rack:
        with pytest.raises(Refused) as refused:
            rack.ask("h1", "fragile.poke", {})
        assert "ZeroDivisionError" in refused.value.why
        assert rack.agents["h1"].health["fragile"].state == "failed"

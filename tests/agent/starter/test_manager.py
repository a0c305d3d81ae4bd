"""What is said to systemd's manager on the bus, and what is made of its answers: a bus of this test's own."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jeepney import DBusAddress, HeaderFields, Message, MessageType, Parser, new_error, new_method_return, new_signal

from agent.starter import manager
from agent.starter.manager import EXISTS, MANAGER, NAME, NO_SUCH, PATH, Manager, ManagerError, system_manager

OWN, OTHER = ":1.1", ":1.66"
JOB = "/org/freedesktop/systemd1/job/7"


class FakeBus:
    """A bus with one manager. `answers`: member -> type and body of its reply, or the name of an error; `before_end`:
    signals that come before the job's end."""

    def __init__(self, path: Path, answers: dict[str, tuple[str, tuple[Any, ...]] | str], result: str = "done") -> None:
        self.answers, self.result = answers, result
        self.asked: list[tuple[Any, ...]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            parser, said = Parser(), self._authenticated(connection)
            while True:
                parser.add_data(said)
                while (message := parser.get_next_message()) is not None:
                    for reply in self._replies(message):
                        connection.sendall(reply)
                if not (said := connection.recv(65_536)):
                    return

    def _authenticated(self, connection: socket.socket) -> bytes:
        """Let the client in; returns what it said after that."""
        said = b""
        while b"BEGIN\r\n" not in said:
            said += (more := connection.recv(4096))
            if b"AUTH" in more:
                connection.sendall(b"OK 1234deadbeef\r\n")
        return said.partition(b"BEGIN\r\n")[2]

    def _replies(self, message: Message) -> Iterator[bytes]:
        member = message.header.fields[HeaderFields.member]
        if member == "Hello":
            yield self._sent(new_method_return(message, "s", (OWN,)))
        elif member == "GetNameOwner":
            yield self._sent(new_method_return(message, "s", (":1.0",)))
        else:
            self.asked.append((member, *message.body))
            answer = self.answers.get(member, ("", ()))
            if isinstance(answer, str):
                yield self._sent(new_error(message, answer, "s", ("the reason",)))
                return
            if member == "StartTransientUnit" and "JobRemoved" in self.answers:
                for sender, job, result in ((OTHER, JOB, "failed"), (":1.0", f"{JOB}7", "failed")):
                    yield self._ended(sender, job, result)
            yield self._sent(new_method_return(message, answer[0] or None, answer[1]))
            if member == "StartTransientUnit":
                yield self._ended(":1.0", JOB, self.result)

    def _ended(self, sender: str, job: str, result: str) -> bytes:
        signal = new_signal(DBusAddress(PATH, None, MANAGER), "JobRemoved", "uoss", (7, job, "u.service", result))
        signal.header.fields[HeaderFields.sender] = sender
        return self._sent(signal)

    def _sent(self, message: Message) -> bytes:
        if message.header.message_type is not MessageType.signal:
            message.header.fields[HeaderFields.sender] = ":1.0"
        return bytes(message.serialise(serial=9))


@contextmanager
def talking(
    folder: Path, monkeypatch: pytest.MonkeyPatch, result: str = "done", **answers: Any
) -> Iterator[tuple[Manager, FakeBus]]:
    path = folder / f"bus{len(os.listdir(folder))}"
    bus = FakeBus(path, answers, result)
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={path}")
    with system_manager() as systemd:
        yield systemd, bus
    bus.close()


def test_a_unit_has_begun_once_systemd_itself_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any program on the bus may send the signal; ends of other jobs come too."""
    answers: dict[str, Any] = {"StartTransientUnit": ("o", (JOB,)), "JobRemoved": ("", ())}
    for result in ("done", "failed"):
        with talking(tmp_path, monkeypatch, result, **answers) as (systemd, bus):
            assert systemd.start("u.service", [("User", ("s", "alice")), ("UMask", ("u", 23))]) == result
        (match, rule), subscribed, started = bus.asked
        assert (match, subscribed) == ("AddMatch", ("Subscribe",)) and "sender=':1.0'" in rule
        properties = [("User", ("s", "alice")), ("UMask", ("u", 23))]
        assert started == ("StartTransientUnit", "u.service", "fail", properties, [])
    monkeypatch.setattr(manager, "ANSWER_S", 0.3)
    answers["StartTransientUnit"] = "o", (f"{JOB}8",)
    with (
        talking(tmp_path, monkeypatch, **answers) as (systemd, _),
        pytest.raises(ManagerError, match="did not say within"),
    ):
        systemd.start("u.service", [])


def test_units_are_listed_killed_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = ("a.service", "d", "loaded", "inactive", "dead", "", "/u", 0, "", "/")
    listed = ("a(ssssssouso)", ([unit],))
    with talking(tmp_path, monkeypatch, ListUnitsByPatterns=listed, KillUnit=NO_SUCH, StopUnit=NO_SUCH) as (
        systemd,
        bus,
    ):
        assert systemd.units("a*") == ["a.service"]
        systemd.kill("a.service")
        systemd.stop("a.slice")
    assert bus.asked == [
        ("ListUnitsByPatterns", [], ["a*"]),
        ("KillUnit", "a.service", "all", 9),
        ("StopUnit", "a.slice", "replace"),
    ]
    answers = {"KillUnit": "org.freedesktop.DBus.Error.AccessDenied"}
    with talking(tmp_path, monkeypatch, **answers) as (systemd, _), pytest.raises(ManagerError, match="the reason"):
        systemd.kill("a.service")


def test_properties_are_asked_for_and_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"GetUnit": ("o", ("/u/1",)), "Get": ("v", (("u", 77),)), "StartTransientUnit": EXISTS}
    with talking(tmp_path, monkeypatch, **answers) as (systemd, bus):
        assert systemd.main_pid("a.service") == 77
        systemd.set("a.slice", [("TasksMax", ("t", 9))])
        with pytest.raises(ManagerError) as refused:
            systemd.make("a.slice", [], [("b.service", [("Type", ("s", "exec"))])])
        assert refused.value.name == EXISTS
    assert bus.asked[1] == ("Get", f"{NAME}.Service", "MainPID")
    assert bus.asked[2] == ("SetUnitProperties", "a.slice", True, [("TasksMax", ("t", 9))])
    assert bus.asked[3][-1] == [("b.service", [("Type", ("s", "exec"))])]


def test_a_bus_that_goes_away_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "bus"))
    listener.listen()
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/bus")
    threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
    with pytest.raises(ManagerError, match="the system bus does not answer"), system_manager():
        pass
    listener.close()

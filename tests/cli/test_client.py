"""Finding an agent, passing over dead ones, and saying so quickly when there is none."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli import client
from cli.client import Agent, AgentctlError, checked_address, find, rack_addresses
from tests.cli.conftest import FakeAgent


def dead_socket(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    return f"unix:{path}"


def silent_socket(path: Path) -> tuple[str, socket.socket]:
    """A socket like a stopped agent's: the kernel accepts, and no process speaks."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(8)
    return f"unix:{path}", listener


def failure(call: Callable[[], Any]) -> AgentctlError:
    with pytest.raises(AgentctlError) as caught:
        call()
    return caught.value


def write_rack(folder: Path, *sockets: str) -> Path:
    place = folder / ".rack" / "rack.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps({"schema": 1, "hosts": [{"name": "gpu1", "socket": name} for name in sockets]}))
    return place


def test_an_answer_carries_who_and_when(agent: FakeAgent) -> None:
    agent.replies["GET /v1/hosts"] = [1]
    assert Agent([agent.address]).get("hosts")[:3] == ([1], "gpu1", 1000.0)


def test_ids_and_queries_are_quoted(agent: FakeAgent) -> None:
    agent.replies |= {"GET /v1/jobs/a%2Fb%20c": {}, "GET /v1/why/slab/v/1": []}
    asking = Agent([agent.address])
    asking.get("jobs", "a/b c", rank=1, offset=None)
    asking.get("why", "slab/v/1")
    assert [target for target, _ in agent.asked] == ["GET /v1/jobs/a%2Fb%20c?rank=1", "GET /v1/why/slab/v/1"]


def test_an_error_view_keeps_its_code_and_words(agent: FakeAgent) -> None:
    agent.replies["GET /v1/hosts"] = (75, 503)
    error = failure(lambda: Agent([agent.address]).get("hosts"))
    assert (error.code, error.what, error.why, error.next) == (75, "no", "because", "do this")


def test_dead_and_silent_agents_are_passed_over(agents: Callable[[], FakeAgent], tmp_path: Path) -> None:
    agent = agents()
    agent.replies["GET /v1/hosts"] = []
    silent, listener = silent_socket(tmp_path / "s")
    with listener:
        asking = Agent([f"unix:{tmp_path}/absent", dead_socket(tmp_path / "d"), silent, agent.address])
        assert asking.get("hosts").data == []
        assert asking.address == agent.address


def test_a_read_is_asked_again_when_its_agent_dies_half_way(agents: Callable[[], FakeAgent], tmp_path: Path) -> None:
    agent = agents()
    agent.replies["GET /v1/hosts"] = []
    asking = Agent([f"unix:{tmp_path}/absent", agent.address])
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(str(tmp_path / "dying"))
        listener.listen(1)
        asking.address = f"unix:{tmp_path}/dying"
        listener.settimeout(5)

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(10)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert asking.get("hosts").data == []
        thread.join()


def test_a_change_that_may_have_been_made_is_not_repeated_silently(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "dying"))
        listener.listen(1)

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(10)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        error = failure(lambda: Agent([f"unix:{tmp_path}/dying"]).post("jobs", "j1", "cancel"))
        thread.join()
    assert error.code == client.TRY_AGAIN
    assert "may or may not have been made" in error.why


def test_a_silent_agent_is_a_deadline_not_a_hang(tmp_path: Path) -> None:
    address, listener = silent_socket(tmp_path / "s")
    with listener:
        assert failure(lambda: Agent([address], timeout_s=0.1).get("hosts")).code == client.TOO_LATE


@pytest.mark.parametrize("answer", [b"<html>hello</html>", b"[1, 2]", b'{"hello": 1}', b"", b"\xff\xfe"])
def test_something_that_is_not_an_agent_is_named(tmp_path: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "other"))
        listener.listen(1)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)

        thread = threading.Thread(target=serve)
        thread.start()
        error = failure(lambda: Agent([f"unix:{tmp_path}/other"]).get("hosts"))
        thread.join()
    assert error.code == client.FAILED
    assert "not a Covey agent" in error.what
    assert "HTTP status 200" in error.why


@pytest.mark.parametrize("names", [[], ["unix:{}/absent"], ["dead", "dead", "dead", "dead"], ["127.0.0.1:1"]])
def test_when_nobody_is_there_it_says_so_in_under_a_second(tmp_path: Path, names: list[str]) -> None:
    dead = [
        dead_socket(tmp_path / f"d{i}") if name == "dead" else name.format(tmp_path) for i, name in enumerate(names)
    ]
    began_s = time.monotonic()
    error = failure(lambda: Agent(dead, "here").get("hosts"))
    assert time.monotonic() - began_s < 1.0
    assert error.code == client.NO_AGENT
    assert error.why and error.next


def test_an_agent_is_looked_for_in_order(agent: FakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    rack = write_rack(tmp_path, "/r/1.sock", "/r/2.sock")
    monkeypatch.chdir(inner)
    assert find("localhost:80", {"COVEY_AGENT": "unix:/x"}).addresses == ["localhost:80"]
    assert find(None, {"COVEY_AGENT": "unix:/x,/y"}).addresses == ["unix:/x", "unix:/y"]
    found = find(None, {})
    assert (found.addresses, found.found_by) == (["unix:/r/1.sock", "unix:/r/2.sock"], str(rack))


def test_the_rack_beside_the_virtual_environment_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rack(tmp_path / "project", "/r/1.sock")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "project" / ".venv"))
    assert find(None, {}).addresses == ["unix:/r/1.sock"]


def test_last_comes_the_machines_own_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "x" / ".venv"))
    monkeypatch.setattr(client, "SYSTEM_SOCKET", str(tmp_path / "system.sock"))
    assert find(None, {}).addresses == []
    (tmp_path / "system.sock").touch()
    assert find(None, {}).addresses == [f"unix:{tmp_path}/system.sock"]


def test_this_users_agent_is_found_before_the_systems_and_none_in_anothers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "x" / ".venv"))
    monkeypatch.setattr(client, "SYSTEM_SOCKET", str(tmp_path / "system.sock"))
    (tmp_path / "system.sock").touch()
    (tmp_path / "covey").mkdir()
    (tmp_path / "covey" / "agent.sock").touch()
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert find(None, environ).addresses == [f"unix:{tmp_path}/covey/agent.sock"]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert find(None, environ).addresses == [f"unix:{tmp_path}/system.sock"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hosts": 3}', '{"hosts": [{"name": 1}]}', "\x00"])
def test_a_rack_file_that_is_no_rack_file_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "rack.json").write_text(text)
    assert rack_addresses(tmp_path / "rack.json") == []


def test_a_rack_file_of_another_user_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write_rack(tmp_path, "/r/1.sock")
    assert rack_addresses(place) == ["unix:/r/1.sock"]
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    owner = os.stat(place).st_uid
    assert rack_addresses(place) == ([] if owner else ["unix:/r/1.sock"])


def test_nothing_is_changed_over_http_and_the_next_step_is_said(agent: FakeAgent) -> None:
    """The refusal comes before anything is sent: a change that an agent refuses would have told its environment to the
    network."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        asking = Agent([checked_address(f"http://{address}")], "COVEY_AGENT")
        for change in (lambda: asking.post("jobs", body={"argv": ["x"]}), lambda: asking.delete("volumes", "v1")):
            error = failure(change)
            assert (error.code, error.what) == (client.REFUSED, "nothing can be changed over http")
            assert f"at {address} (from COVEY_AGENT)" in str(error)
            assert "leave COVEY_AGENT out" in error.next and "--agent unix:/run/covey/agent.sock" in error.next
            assert f"agentctl login, then --agent https://{address}" in error.next
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_of_several_agents_a_change_goes_to_one_with_a_socket(agent: FakeAgent) -> None:
    agent.replies["POST /v1/jobs"] = {"id": "j1"}
    asking = Agent(["127.0.0.1:1", agent.address], "COVEY_AGENT")
    asking.address = "127.0.0.1:1"  # who answered a read
    assert asking.post("jobs", body={}).data == {"id": "j1"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("/a/b", "unix:/a/b"), ("unix:/a", "unix:/a"), ("gpu1:80", "gpu1:80"), (" http://[::1]:80/ ", "[::1]:80")],
)
def test_addresses_are_understood(text: str, expected: str) -> None:
    assert checked_address(text) == expected


@pytest.mark.parametrize("text", ["gpu1", "gpu1:http", ":80", "gpu1:99999", "unix:", "gpu1:²"])
def test_what_is_no_address_is_wrong_usage(text: str) -> None:
    assert failure(lambda: checked_address(text)).code == client.USAGE


def test_agentctl_keeps_within_its_budget_of_imports(agent: FakeAgent) -> None:
    agent.replies["GET /v1/hosts"] = []
    code = (
        "import sys; from cli.main import main; code = main(['hosts']); "
        "heavy = {'asyncio', 'msgspec', 'numpy', 'aiohttp', 'structlog', 'zmq', 'uvloop', 'subprocess', 'threading', "
        "'textual', 'rich'}; "
        "sys.exit(code or ' '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")

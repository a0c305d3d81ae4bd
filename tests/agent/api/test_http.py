"""The HTTP listeners against a fake agent: routes, refusals, both listeners, and bytes nobody should send."""

import asyncio
import contextlib
import gzip
import io
import json
import os
import random
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import msgspec
import pytest
from aiohttp import ClientConnectorError, ClientError, ClientSession, UnixConnector
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.api import http
from agent.api.admission import network_of
from agent.api.http import PAGE, HttpApi
from agent.authority.service import HostAuthority
from agent.config import HttpSettings
from chaos.askers import ROOT
from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.ids import HostId
from covey.core.metrics import Measured
from covey.ports.env import Env
from covey.ports.users import FixedUsers
from plugins.askers import ASKER, Asker
from plugins.base import Command
from plugins.facts import HostState, HostView
from plugins.memory.service.metrics import SLAB_EVICTIONS, SLABS
from plugins.views import ErrorView, HostRow, LeaderView, PluginHealth
from tests.agent.api.test_metrics import read_back
from tests.families import examples

_BOMB = gzip.compress(b" " * (20 << 20))


HTTP = HttpSettings(group="", bind="127.0.0.1:0", names=("gpu1.rack.example.org",))


class FakeClock:
    def now_s(self) -> float:
        return 5.0

    def wall_s(self) -> float:
        return 1_800_000_000.0

    def boot_s(self) -> float:
        return self.now_s()

    def cpu_s(self) -> float:
        return 0.0


class FakeLog:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def error(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))


def spawn(name: str, work: Coroutine[Any, Any, None]) -> object:
    return asyncio.get_running_loop().create_task(work, name=name)


class FakeApi:
    """An agent of one host; every command notes what it was asked."""

    def __init__(self) -> None:
        self.id = HostId("gpu1")
        self.boot = 3
        self.started_wall_s = 1_799_999_000.0
        self.loop_lag_s = 0.001
        self.log = FakeLog()
        users = FixedUsers(own_uid=os.geteuid())
        self.authority = HostAuthority(lambda: (b"k" * 32,), FakeClock())
        ports = {"clock": FakeClock(), "log": self.log, "rng": random.Random(1), "users": users, "spawn": spawn}
        self.env = cast(Env, SimpleNamespace(**ports))
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.askers: list[Asker] = []
        self.known: dict[int, Asker] = {os.geteuid(): ROOT}
        """Whom the agent takes for whom, by uid."""
        self.plugins = {"memory": PluginHealth("on"), "scheduler": PluginHealth("on")}
        self.commands: dict[str, Command] = {
            name: self.answering(name, answer)
            for name, answer in {
                "agent.hosts": [HostRow(HostId("gpu1"), "alive", 0.0, "127.0.0.1:1", True, 9.0)],
                "agent.gpus": [],
                "agent.leader": LeaderView(HostId("gpu1"), 2, 4.0, 17, 0.0),
                "agent.why": [],
                "agent.rack_slabs": [],
                "agent.rack_volumes": [],
                "agent.rack_tensors": [],
                "aggregator.move": {},
                "scheduler.jobs": [],
                "scheduler.job": {"id": "j1"},
                "scheduler.logs": {"text": ""},
                "scheduler.curve": {"points": []},
                "scheduler.env": {"variables": {}},
                "scheduler.submit": {"id": "j2"},
                "scheduler.cancel": {"id": "j1"},
                "scheduler.quotas": [],
                "scheduler.quota_set": {},
                "memory.create": {},
                "memory.remove": {},
                "memory.give_up": {},
                "scheduler.move": {},
                "scheduler.scale": {},
                "scheduler.arrange": {},
                "scheduler.hold": {},
                "scheduler.priority": {},
                "memory.export": {},
            }.items()
        }
        self.commands["agent.health"] = self.health
        self.counts = {"log": 1, "hosts": 1}

    def answering(self, name: str, answer: Any) -> Command:
        async def command(given: Mapping[str, Any]) -> Any:
            asked = dict(given)
            self.askers.append(asked.pop(ASKER))
            self.asked.append((name, asked))
            return answer

        return command

    def hosts(self) -> Sequence[HostView]:
        return []

    async def health(self, _given: Mapping[str, Any]) -> Any:
        return {"plugins": self.plugins}

    async def asker(self, uid: int) -> Asker | None:
        return self.known.get(uid)

    def refuse(self, name: str, refusal: Exception) -> None:
        async def command(_given: Mapping[str, Any]) -> Any:
            raise refusal

        self.commands[name] = command

    def metrics(self) -> Measured:
        return {SLABS.of("lent"): 4.0, SLAB_EVICTIONS.of("pressure"): 2.0, SLABS.of("borrowed"): 0.5}


class Rig:
    """A fake agent behind real listeners."""

    def __init__(self, folder: str) -> None:
        self.api = FakeApi()
        self.path = os.path.join(folder, "agent.sock")
        self.http = HttpApi(self.api, self.path, HTTP)

    async def ask(self, method: str, path: str, *, tcp: bool = False, **options: Any) -> tuple[int, Any]:
        base = f"http://{self.http.address}" if tcp else "http://localhost"
        connector = None if tcp else UnixConnector(self.path)
        async with (
            ClientSession(connector=connector) as session,
            session.request(method, base + path, **options) as answer,
        ):
            text = await answer.text()
            return answer.status, json.loads(text) if text and answer.content_type == "application/json" else text

    async def raw(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self.path)
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            writer.write_eof()
            await writer.drain()
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return answer


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="cv") as folder:
        rig = Rig(folder)
        await rig.http.start()
        try:
            yield rig
        finally:
            await rig.http.stop()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with opened() as found:
        yield found


async def test_an_answer_says_who_spoke_and_when(rig: Rig) -> None:
    status, body = await rig.ask("GET", "/v1/hosts")
    assert status == 200
    assert (body["schema"], body["host"], body["as_of_wall_s"]) == (1, "gpu1", 1_800_000_000.0)
    assert body["data"][0]["host"] == "gpu1"


@pytest.mark.parametrize(
    ("method", "path", "body", "command", "given"),
    [
        ("GET", "/v1/gpus", None, "agent.gpus", {}),
        ("GET", "/v1/leader", None, "agent.leader", {}),
        ("GET", "/v1/jobs", None, "scheduler.jobs", {"all": False, "mine": False}),
        ("GET", "/v1/jobs?all=1&state=held&x=1", None, "scheduler.jobs", {"all": True, "mine": False, "state": "held"}),
        ("GET", "/v1/jobs/j1", None, "scheduler.job", {"id": "j1"}),
        ("GET", "/v1/jobs/j1/curve", None, "scheduler.curve", {"id": "j1"}),
        ("GET", "/v1/jobs/j1/env", None, "scheduler.env", {"id": "j1"}),
        ("GET", "/v1/jobs/j1/logs", None, "scheduler.logs", {"id": "j1", "offset": 0}),
        ("GET", "/v1/jobs/j1/logs?rank=2&offset=77", None, "scheduler.logs", {"id": "j1", "rank": 2, "offset": 77}),
        ("GET", "/v1/jobs/j1/logs?since_s=9", None, "scheduler.logs", {"id": "j1", "offset": 0, "since_s": 9}),
        ("GET", "/v1/why/slab/v1/3", None, "agent.why", {"id": "slab/v1/3"}),
        ("GET", "/v1/slabs", None, "agent.rack_slabs", {}),
        ("GET", "/v1/volumes", None, "agent.rack_volumes", {}),
        ("GET", "/v1/tensors", None, "agent.rack_tensors", {}),
        ("GET", "/v1/quotas", None, "scheduler.quotas", {}),
        ("POST", "/v1/jobs", {"argv": ["true"]}, "scheduler.submit", {"argv": ["true"]}),
        ("POST", "/v1/jobs/j1/cancel", None, "scheduler.cancel", {"id": "j1"}),
        ("POST", "/v1/jobs/j1/cancel", {"tasks": "3-7"}, "scheduler.cancel", {"id": "j1", "tasks": "3-7"}),
        ("POST", "/v1/jobs/j1%5B3%5D/hold", None, "scheduler.hold", {"id": "j1[3]"}),
        ("POST", "/v1/jobs/j1/priority", {"up": True}, "scheduler.priority", {"id": "j1", "up": True}),
        ("POST", "/v1/volumes/demo/give-up", None, "memory.give_up", {"volume": "demo"}),
        ("POST", "/v1/jobs/j1/move", {"what": "2", "id": "j9"}, "scheduler.move", {"what": "2", "id": "j1"}),
        ("POST", "/v1/jobs/j1/scale", {"workers": 7}, "scheduler.scale", {"workers": 7, "id": "j1"}),
        ("POST", "/v1/jobs/j1/arrange", {"owners": []}, "scheduler.arrange", {"owners": [], "id": "j1"}),
        (
            "POST",
            "/v1/volumes/demo/export",
            {"socket": "/run/d.sock", "end": False, "volume": "other"},
            "memory.export",
            {"socket": "/run/d.sock", "end": False, "volume": "demo"},
        ),
        (
            "POST",
            "/v1/volumes",
            {"volume": "v1", "size_bytes": 4096},
            "memory.create",
            {"volume": "v1", "size_bytes": 4096},
        ),
        ("DELETE", "/v1/volumes/v1", None, "memory.remove", {"volume": "v1"}),
        ("POST", "/v1/tensors/move", {"job": "j1", "to": "h2"}, "aggregator.move", {"job": "j1", "to": "h2"}),
        ("POST", "/v1/quotas", {"tenant": "a", "gpus": 4}, "scheduler.quota_set", {"tenant": "a", "gpus": 4}),
    ],
)
async def test_each_route_asks_its_command(
    rig: Rig, method: str, path: str, body: Any, command: str, given: dict[str, Any]
) -> None:
    status, _ = await rig.ask(method, path, json=body)
    assert status == 200
    assert rig.api.asked == [(command, given)]


@pytest.mark.parametrize(
    ("code", "status"), [(1, 500), (2, 400), (3, 404), (4, 403), (6, 504), (7, 422), (75, 503), (9, 500)]
)
async def test_a_refusal_keeps_its_words_and_gets_a_matching_status(rig: Rig, code: int, status: int) -> None:
    rig.api.refuse("scheduler.job", Refused(code, "no such job", "never submitted", "agentctl jobs"))
    assert await rig.ask("GET", "/v1/jobs/j9") == (
        status,
        {"code": code, "what": "no such job", "why": "never submitted", "next": "agentctl jobs"},
    )


async def test_no_leader_is_a_try_again(rig: Rig) -> None:
    rig.api.refuse("scheduler.submit", NoLeader())
    status, body = await rig.ask("POST", "/v1/jobs", json={})
    assert (status, body["code"]) == (503, 75)


async def test_an_unknown_outcome_is_said_to_be_unknown_and_not_to_have_changed_nothing(rig: Rig) -> None:
    rig.api.refuse("scheduler.submit", OutcomeUnknown())
    status, body = await rig.ask("POST", "/v1/jobs", json={})
    assert (status, body["code"], body["what"]) == (503, 75, "the outcome is unknown")
    assert body["next"] == "check with agentctl jobs -a" and rig.api.log.lines == []
    rig.api.refuse("scheduler.submit", NoLeader())
    assert (await rig.ask("POST", "/v1/jobs", json={}))[1]["what"] == "nothing was changed"


@pytest.mark.parametrize(
    ("method", "path", "data", "what", "why"),
    [
        ("GET", "/v1/nothing", None, "there is no /v1/nothing", "unknown path"),
        ("PUT", "/v1/jobs", None, "/v1/jobs does not take PUT", "wrong method"),
        pytest.param(
            *(
                "POST",
                "/v1/jobs",
                b"[" + b" " * http.BODY_BYTES_MAX,
                "the request is too long",
                "at most 4194304 bytes",
            ),
            id="4 MiB",  # by itself pytest takes all of it for a name, which pytest-xdist sends to each worker
        ),
        ("POST", "/v1/jobs", b"[1]", "the body is not a JSON object", "it is a list"),
        ("GET", "/v1/jobs/j1/logs?offset=-1", None, "invalid offset='-1'", "a whole number, 0 or more"),
        ("GET", "/v1/jobs/" + "a" * 201, None, "invalid id", "1 to 200 printable characters"),
    ],
)
async def test_what_is_malformed_is_refused_with_what_is_wrong_and_why(
    rig: Rig, method: str, path: str, data: bytes | None, what: str, why: str
) -> None:
    _, body = await rig.ask(method, path, data=None if data is None else io.BytesIO(data))
    assert body["what"] == what and why in body["why"]
    status, _ = await rig.ask("GET", "/v1/jobs/" + "a" * 200)
    assert status == 200, "the longest id there may be"


async def test_a_plugin_that_is_off_is_named(rig: Rig) -> None:
    del rig.api.commands["memory.create"]
    status, body = await rig.ask("POST", "/v1/volumes", json={})
    assert status == 500
    assert "`memory`" in body["why"]


async def test_a_defect_in_a_command_is_logged_once_and_the_next_request_is_served(rig: Rig) -> None:
    rig.api.refuse("scheduler.job", ZeroDivisionError("division by zero"))
    status, body = await rig.ask("GET", "/v1/jobs/j1")
    assert (status, body["code"]) == (500, 1)
    assert [event for event, _ in rig.api.log.lines] == ["request failed"]
    assert "division by zero" in body["why"], "an operator is told"
    rig.api.refuse("scheduler.job", KeyError("/home/ann/secret.py"))
    status, body = await rig.ask("GET", "/v1/jobs/j1", tcp=True)
    assert (status, body["why"]) == (500, "a defect in the agent (KeyError)"), "its words may be of another's job"
    assert (await rig.ask("GET", "/v1/hosts"))[0] == 200


async def test_a_command_that_hangs_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ANSWER_S_MAX", 0.05)

    async def hang(_given: Mapping[str, Any]) -> Any:
        await asyncio.Event().wait()

    rig.api.commands["agent.rack_slabs"] = hang
    status, body = await rig.ask("GET", "/v1/slabs")
    assert (status, body["code"]) == (504, 6)


async def test_closing_the_doors_waits_for_answers_under_way_but_not_for_one_that_hangs(rig: Rig) -> None:
    closing = asyncio.Event()

    async def hang(_given: Mapping[str, Any]) -> Any:
        await asyncio.Event().wait()

    async def soon(_given: Mapping[str, Any]) -> Any:
        await closing.wait()
        await asyncio.sleep(0.05)
        return ["in time"]

    rig.api.commands |= {"agent.rack_slabs": hang, "agent.rack_volumes": soon}
    hanging = asyncio.create_task(rig.ask("GET", "/v1/slabs"))
    waiting = asyncio.create_task(rig.ask("GET", "/v1/volumes", tcp=True))
    await asyncio.sleep(0.1)
    closing.set()
    async with asyncio.timeout(http.STOP_S + 1.0):  # without a limit it takes as long as the command may
        await rig.http.stop()
    assert (await waiting)[1]["data"] == ["in time"]
    with pytest.raises(ClientError):
        await hanging
    with pytest.raises(ClientConnectorError):
        await rig.ask("GET", "/v1/hosts", tcp=True)
    with pytest.raises(FileNotFoundError):
        os.stat(rig.path)
    await rig.http.stop()


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("POST", "/v1/jobs", {"data": b"{"}, 400),
        ("POST", "/v1/jobs", {"data": b""}, 400),
        ("POST", "/v1/jobs", {"data": b"[1]"}, 400),
        ("POST", "/v1/jobs", {"data": b"[" * 100_000}, 400),
        ("POST", "/v1/jobs", {"data": b'"\xff"'}, 400),
        ("POST", "/v1/jobs", {"data": io.BytesIO(b"{" + b" " * http.BODY_BYTES_MAX + b"}")}, 413),
        ("POST", "/v1/jobs", {"data": b"no gzip at all", "headers": {"Content-Encoding": "gzip"}}, 400),
        ("POST", "/v1/jobs", {"data": _BOMB, "headers": {"Content-Encoding": "gzip"}}, 413),
        ("POST", "/v1/jobs", {"data": b'{"argv": ' + b"[" * 40 + b"]" * 40 + b"}"}, 400),
        ("GET", "/v1/jobs/j1/logs?offset=-1", {}, 400),
        ("GET", "/v1/jobs/j1/logs?rank=two", {}, 400),
        ("GET", "/v1/jobs/j1/logs?rank=%C2%B2", {}, 400),
        ("GET", "/v1/why/" + "a" * 300, {}, 400),
        ("GET", "/v1/jobs/%00", {}, 400),
        ("GET", "/v1/nothing", {}, 404),
        ("PUT", "/v1/jobs", {}, 405),
    ],
)
async def test_what_is_malformed_is_refused_and_counted_and_reaches_no_plugin(
    rig: Rig, method: str, path: str, options: dict[str, Any], status: int
) -> None:
    found, body = await rig.ask(method, path, **options)
    assert found == status
    assert msgspec.convert(body, ErrorView).code in (2, 3)
    assert rig.api.asked == []
    assert rig.http.refused == {f"http_{status}": 1}


async def test_only_our_user_may_open_the_unix_socket(rig: Rig) -> None:
    assert stat.S_IMODE(os.stat(rig.path).st_mode) == 0o600


async def test_a_socket_of_a_live_agent_is_not_stolen_but_a_dead_ones_is_replaced(rig: Rig) -> None:
    with pytest.raises(OSError, match="running"):
        await HttpApi(rig.api, rig.path, HttpSettings(group="")).start()
    dead = rig.path + "2"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(dead)
    second = HttpApi(rig.api, dead, HttpSettings(group=""))
    await second.start()
    await second.stop()
    with pytest.raises(FileNotFoundError):
        os.stat(dead)


async def test_a_taken_tcp_port_is_an_error_that_names_it_and_leaves_no_socket_open(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rig.http.address):
        await HttpApi(rig.api, str(tmp_path / "b.sock"), HttpSettings(group="", bind=rig.http.address)).start()


async def test_tcp_connections_are_bounded_and_keep_nobody_from_the_unix_socket(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "TCP_CONNECTIONS_MAX", 3)
    host, port = rig.http.address.rsplit(":", 1)
    held = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
    for reader, _ in held[3:]:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(1), 5) == b""
    assert rig.http.refused["full"] == 2
    assert (await rig.ask("GET", "/v1/hosts"))[0] == 200
    for _, writer in held:
        writer.close()


async def test_one_address_leaves_room_for_the_others(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ADDRESS_CONNECTIONS_MAX", 2)
    host, port = rig.http.address.rsplit(":", 1)
    held = [await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0)) for _ in range(3)]
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(held[2][0].read(1), 5) == b""
    for _, writer in held[:2]:
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(held[0][0].readuntil(b"\r\n\r\n"), 5) if writer is held[0][1] else None
    held.append(await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0)))
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(held[3][0].read(1), 5) == b"", "those that have asked already count"
    assert rig.http.refused["full"] == 2
    assert (await rig.ask("GET", "/livez", tcp=True))[0] == 200, "from another address"
    for _, writer in held:
        writer.close()


def test_an_address_counts_as_its_machine() -> None:
    assert network_of("10.0.0.1") == network_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:2%eth0") != network_of("2001:db8:0:1::1")


async def test_liveness_readiness_and_health_tell_three_different_things(rig: Rig) -> None:
    for path in ("/livez", "/readyz", "/healthz"):
        assert (await rig.ask("GET", path))[0] == 200
    rig.api.plugins = rig.api.plugins | {"memory": PluginHealth("failed", "disk is full")}
    assert (await rig.ask("GET", "/livez"))[0] == 200
    status, body = await rig.ask("GET", "/readyz")
    assert (status, body["data"]["plugins_failed"]) == (503, ["memory"])
    status, body = await rig.ask("GET", "/healthz")
    assert (status, body["data"]) == (503, {"ok": False}), "why is for agentctl status"
    rig.api.loop_lag_s = 9.0
    assert (await rig.ask("GET", "/livez"))[0] == 503


async def test_metrics_are_prometheus_text_with_each_family_once(rig: Rig) -> None:
    await rig.ask("GET", "/v1/hosts")
    await rig.ask("GET", "/v1/nothing")
    status, text = await rig.ask("GET", "/metrics", headers={"Accept": "application/openmetrics-text;version=x"})
    assert status == 200
    families = read_back(text)
    assert families["covey_http_refused"].samples[0][:3] == ("covey_http_refused_total", {"why": "http_404"}, 1.0)
    assert families["covey_http_requests"].samples[0][:3] == ("covey_http_requests_total", {"status": "200"}, 1.0)
    slabs = {sample.labels["role"]: sample.value for sample in families["covey_slabs"].samples}
    assert slabs == {"lent": 4, "borrowed": 0.5}
    assert (families["covey_slabs"].type, families["covey_slab_evictions"].type) == ("gauge", "counter")
    assert {"covey_boot", "covey_build_info"} <= families.keys()


async def test_metrics_say_in_which_format_they_are(rig: Rig) -> None:
    async with (
        ClientSession(connector=UnixConnector(rig.path)) as session,
        session.get("http://localhost/metrics") as answer,
    ):
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_the_page_comes_with_a_strict_policy(rig: Rig) -> None:
    async with ClientSession(connector=UnixConnector(rig.path)) as session:
        for path, _, kind in PAGE:
            async with session.get("http://localhost" + path) as answer:
                assert (answer.status, answer.content_type) == (200, kind)
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                assert answer.headers["Server"] == "covey"


async def test_the_page_reads_from_the_agent_how_each_state_of_a_host_is_shown(rig: Rig) -> None:
    async with ClientSession(connector=UnixConnector(rig.path)) as session:
        async with session.get("http://localhost/states.json") as answer:
            tones = await answer.json()
        async with session.get("http://localhost/page.js") as answer:
            assert 'read("/states.json")' in await answer.text()
    assert {*get_args(HostState)} <= tones.keys()
    assert (tones["alive"], tones["suspect"], tones["gone"]) == ("good", "warning", "bad")


_VALID = [
    b"GET /v1/hosts HTTP/1.1\r\nHost: x\r\n\r\n",
    b'POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"argv":["ls"]}',
    b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
]
_MUTATED = st.tuples(
    st.sampled_from(_VALID),
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 255)), max_size=8),
    st.integers(0, 140),
).map(lambda parts: _mutate(*parts))


def _mutate(data: bytes, changes: list[tuple[int, int]], length: int) -> bytes:
    found = bytearray(data)
    for place, value in changes:
        found[place % len(found)] = value
    return bytes(found[:length]) if length < 110 else bytes(found)


def test_random_and_mutated_bytes_never_hurt_the_agent() -> None:
    sent: list[bytes] = []

    @settings(max_examples=examples(250), deadline=None)
    @given(st.one_of(st.binary(max_size=200), _MUTATED))
    def gather(data: bytes) -> None:
        sent.append(data)

    gather()

    async def story() -> None:
        async with opened() as rig:
            for data in sent:
                await rig.raw(data)
            assert (await rig.ask("GET", "/v1/hosts"))[0] == 200
            assert rig.api.log.lines == []
            assert rig.http.refused["not_http"] > 0
            for command, given_ in rig.api.asked:
                assert command in rig.api.commands
                assert isinstance(given_, dict)

    asyncio.run(story())

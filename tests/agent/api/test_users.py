"""Users of this machine at an agent's real socket: every route by each role, and who is not let in at all."""

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from agent.api import http, sockets
from agent.api.access import RULES
from agent.api.admission import Network, OwnSocket
from agent.api.http import HttpApi
from agent.config import HttpSettings
from agent.ports.network.peers import is_in_group
from chaos.askers import ANN, BOB, EVE, ROOT, VISITOR
from covey.ports.users import FixedUsers, User
from plugins.askers import ASKER, Asker
from tests.agent.api.test_gate import GuardedFake
from tests.agent.api.test_http import FakeApi, opened
from tests.covey.test_volume_users import as_user

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
MEMBERS, NAMELESS, OTHER_GROUP = 64_010, 64_009, 64_020
KINDS: Mapping[str, tuple[str, ...]] = {
    "look": (
        *("GET /v1/hosts", "GET /v1/leader", "GET /v1/memory/accounts", "GET /v1/quotas", "GET /v1/tenants"),
        *("GET /v1/status", "GET /v1/gpus", "GET /v1/slabs", "GET /v1/volumes", "GET /v1/tensors"),
        *("GET /v1/shared_gpus", "GET /v1/interference", "GET /v1/groups", "GET /v1/voters", "GET /v1/jobs"),
        "GET /v1/starts",
        *("GET /v1/jobs/{id}", "GET /v1/why/{id}", "GET /v1/keys", "GET /v1/gossip", "GET /v1/links"),
        "GET /v1/hosts/{id}/ping",
        *("GET /v1/history", "GET /v1/report", "GET /v1/jobs/{id}/report"),  # which show own jobs alone
    ),
    "stream": ("GET /v1/events",),  # which has no end: tests/agent/api/streams
    "own": (
        *(
            "GET /v1/jobs/{id}/tuner",
            "GET /v1/jobs/{id}/logs",
            "GET /v1/jobs/{id}/curve",
            "GET /v1/jobs/{id}/env",
            "POST /v1/jobs/{id}/cancel",
            "POST /v1/jobs/{id}/move",
        ),
        *("POST /v1/jobs/{id}/scale", "POST /v1/jobs/{id}/arrange", "POST /v1/jobs/{id}/tune"),
        *(f"POST /v1/jobs/{{id}}/{verb}" for verb in ("hold", "release", "requeue", "priority", "update")),
        *(f"POST /v1/jobs/{{id}}/{verb}" for verb in ("sessions", "turn", "stacks", "checkpoint")),
        *("POST /v1/volumes/{id}/give-up", "DELETE /v1/volumes/{id}"),
    ),
    "log in": ("POST /v1/login",),
    "use": ("POST /v1/jobs", "POST /v1/starts", "POST /v1/volumes"),
    "operate": (
        *("POST /v1/gpus/{id}/forget", "POST /v1/hosts/{id}/give-up", "POST /v1/hosts/{id}/drain"),
        *("POST /v1/hosts/{id}/cordon", "POST /v1/hosts/{id}/uncordon", "POST /v1/hosts/{id}/forget"),
        *("POST /v1/hosts/{id}/resume", "POST /v1/volumes/{id}/export", "POST /v1/volumes/{id}/swap"),
        *("POST /v1/tensors/move", "POST /v1/voters", "POST /v1/quotas", "POST /v1/tenants"),
        *("POST /v1/keys/turn", "POST /v1/tokens"),
    ),
}
"""What each route needs. Job j1 and volume v1 are ann's."""
CLAIMS = {"asker": {"uid": 0, "user": "root", "role": "operator"}, "by": "root", "role": "operator", "owner": None}
"""What a request may say of whoever sends it."""


class UsersApi(FakeApi):
    """An agent with all commands, behind the gate."""

    def __init__(self) -> None:
        super().__init__()
        guarded = GuardedFake(FixedUsers(*(User(each.user, each.uid) for each in (ANN, BOB, EVE))))
        guarded.tenants = {"ann": ["ml"], "bob": ["ml"]}
        self.gate = guarded.gate
        own = {name: self.answering(name, []) for name in RULES} | {"agent.health": self.health}
        self.commands = {name: self.gate.guarded(name, command) for name, command in own.items()}

    async def asker(self, uid: int) -> Asker | None:
        return await self.gate.asker(uid)


class Doors:
    """The listeners of such an agent. The group of its socket is `MEMBERS`."""

    def __init__(self, folder: Path) -> None:
        self.api, self.path = UsersApi(), str(folder / "agent.sock")
        self.http = HttpApi(self.api, self.path, HttpSettings(group="members"))

    async def ask(self, uid: int, groups: tuple[int, ...], *asked: tuple[str, Mapping[str, Any]]) -> list[Any]:
        """What a user in these groups is answered: status and JSON of each; a word where there is no connection."""
        said = await asyncio.to_thread(as_member, uid, groups, partial(answers, self.path, asked))
        return list(json.loads(said)) if said.startswith("[") else [said]


def as_member(uid: int, groups: tuple[int, ...], work: Callable[[], object]) -> str:
    """The answer that this user gets in these groups, as `as_user` has it."""

    def inner() -> object:
        os.setgroups(list(groups))
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        return work()

    return as_user(0, inner)


def answers(path: str, asked: tuple[tuple[str, Mapping[str, Any]], ...]) -> str:
    found = []
    for route, body in asked:
        method, _, target = route.partition(" ")
        data = json.dumps(body).encode()
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(path)
            client.sendall(head.encode() + data)
            said = b""
            while part := client.recv(65536):
                said += part
        status, _, rest = said.partition(b"\r\n")
        found.append((int(status.split()[1]), json.loads(rest.partition(b"\r\n\r\n")[2])))
    return json.dumps(found)


@pytest.fixture
async def doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Doors]:
    monkeypatch.setattr(http, "gid_of", lambda group: MEMBERS if group == "members" else None)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp/") and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    found = Doors(tmp_path)
    await found.http.start()
    yield found
    await found.http.stop()


def filled(route: str) -> str:
    return route.replace("{id}", "v1" if "/volumes/" in route else "h1" if "/hosts/" in route else "j1")


def body_of(route: str) -> dict[str, Any]:
    return {**CLAIMS, "volume": "v1", "argv": ["true"]} if route == "POST /v1/volumes" else {**CLAIMS, "argv": ["true"]}


# ---- every route by each role ----------------------------------------------------------------------------------------


def test_every_route_has_its_kind(doors: Doors) -> None:
    door = OwnSocket(0, doors.api.asker)
    routes = set[str]()
    for route in doors.http._app(door).router.routes():
        if route.resource is not None and route.method != "HEAD" and route.resource.canonical.startswith("/v1/"):
            routes.add(f"{route.method} {route.resource.canonical.replace('{id:.*}', '{id}')}")
    assert routes == {route for kind in KINDS.values() for route in kind}


@pytest.mark.parametrize(
    ("asker", "may"),
    [
        (ROOT, ("look", "own", "use", "operate")),
        (ANN, ("look", "own", "use", "log in")),
        (BOB, ("look", "use", "log in")),
        (EVE, ("look", "log in")),
    ],
    ids=["an operator", "the owner", "another user", "a viewer"],
)
async def test_each_role_gets_what_it_may_over_the_real_socket(
    doors: Doors, asker: Asker, may: tuple[str, ...]
) -> None:
    routes = [(kind, route) for kind, each in KINDS.items() if kind != "stream" for route in each]
    asked = [(filled(route), body_of(route)) for _, route in routes]
    told = await doors.ask(asker.uid, (MEMBERS,), *asked)
    got = {route: status for (_, route), (status, _) in zip(routes, told, strict=True)}
    assert got == {route: 200 if kind in may else 403 for kind, route in routes}
    for (_, route), (status, answer) in zip(routes, told, strict=True):
        if status == 403:
            assert answer["code"] == 4 and answer["what"] and answer["why"] and answer["next"], route
    heard = {each.uid for each in doors.api.askers}
    assert heard == {asker.uid}, "each command heard from the kernel who asks"
    assert {(each.user, each.role) for each in doors.api.askers} <= {(asker.user, asker.role), ("", "operator")}


async def test_what_a_request_says_of_its_sender_reaches_no_command_as_the_asker(doors: Doors) -> None:
    (answer,) = await doors.ask(ANN.uid, (MEMBERS,), ("POST /v1/jobs", {**CLAIMS, "argv": ["true"]}))
    assert answer[0] == 200 and doors.api.askers == [ANN]
    assert doors.api.asked == [
        ("scheduler.submit", {"argv": ["true"], **{k: v for k, v in CLAIMS.items() if k != ASKER}})
    ]


# ---- who is not let in -----------------------------------------------------------------------------------------------


async def test_the_socket_is_for_its_group_and_nobody_else(doors: Doors) -> None:
    found = os.stat(doors.path)
    assert (stat.S_IMODE(found.st_mode), found.st_gid, found.st_uid) == (0o660, MEMBERS, 0)
    look: tuple[str, dict[str, Any]] = ("GET /v1/hosts", {})
    assert (await doors.ask(ANN.uid, (OTHER_GROUP, MEMBERS), look))[0][0] == 200
    for groups in ((), (OTHER_GROUP,)):
        assert await doors.ask(ANN.uid, groups, look) == ["EACCES"]


async def test_a_mode_that_somebody_opened_lets_nobody_in(doors: Doors) -> None:
    os.chmod(doors.path, 0o666)
    for uid, groups in ((ANN.uid, ()), (ANN.uid, (OTHER_GROUP,)), (EVE.uid, ())):
        ((status, answer),) = await doors.ask(uid, groups, ("GET /v1/hosts", {}))
        assert status == 403 and f"and uid {uid} sent the request" in answer["why"]
        assert "for root and for group members" in answer["why"]
    assert doors.http.refused == {"uid": 3} and not doors.api.asked


async def test_a_user_without_a_name_is_refused_whatever_the_group(doors: Doors) -> None:
    for route in ("GET /v1/hosts", "GET /metrics", "POST /v1/jobs"):
        ((status, answer),) = await doors.ask(NAMELESS, (MEMBERS,), (route, {}))
        assert (status, answer["code"]) == (403, 4)
        assert answer["why"] == f"this host knows no name of uid {NAMELESS}"
    assert not doors.api.asked


async def test_the_primary_group_counts_too(doors: Doors) -> None:
    """The gid of the process, without supplementary groups."""

    def work() -> object:
        os.setgroups([])
        os.setresgid(MEMBERS, MEMBERS, MEMBERS)
        os.setresuid(ANN.uid, ANN.uid, ANN.uid)
        return answers(doors.path, (("GET /v1/hosts", {}),))

    assert json.loads(await asyncio.to_thread(as_user, 0, work))[0][0] == 200


def test_a_group_is_told_by_the_kernel_and_not_of_a_connection_that_is_over() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for gid in (os.getegid(), *os.getgroups()):
            assert is_in_group(ours, gid)
        assert not is_in_group(ours, OTHER_GROUP)
    assert not is_in_group(ours, os.getegid())
    with socket.socket(socket.AF_INET) as tcp:
        assert not is_in_group(tcp, OTHER_GROUP)


async def test_no_user_takes_all_connections_of_the_socket(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "USER_CONNECTIONS_MAX", 3)

    def hold() -> object:
        held = [socket.socket(socket.AF_UNIX) for _ in range(6)]
        for each in held:
            each.settimeout(5)
            each.connect(doors.path)
        closed = sum(ended(each) for each in held[3:])
        return f"{closed} closed, {sum(ended(each, 0.05) for each in held[:3])} of the first"

    assert await asyncio.to_thread(as_member, ANN.uid, (MEMBERS,), hold) == "3 closed, 0 of the first"
    assert doors.http.refused == {"full": 3}
    held = [await asyncio.open_unix_connection(doors.path) for _ in range(6)]  # root's
    for uid in (BOB.uid, ROOT.uid, ANN.uid):
        assert (await doors.ask(uid, (MEMBERS,), ("GET /v1/hosts", {})))[0][0] == 200
    for _, writer in held:
        writer.close()
        await writer.wait_closed()


def ended(connection: socket.socket, wait_s: float = 5.0) -> bool:
    connection.settimeout(wait_s)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


# ---- the group's name ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["", "no-such-group-here"])
async def test_without_such_a_group_the_socket_is_the_agents_alone(tmp_path: Path, group: str) -> None:
    api = HttpApi(UsersApi(), str(tmp_path / "agent.sock"), HttpSettings(group=group))
    await api.start()
    assert stat.S_IMODE(os.stat(api.unix_path).st_mode) == 0o600
    await api.stop()


def test_a_group_that_the_agent_may_not_let_in_is_left_out(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp/") and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    os.chown(folder, ANN.uid, ANN.uid)

    def work() -> object:
        listener, gid = sockets.unix_socket(str(folder / "agent.sock"), MEMBERS)
        listener.close()
        return f"{gid} {os.stat(folder / 'agent.sock').st_mode & 0o777:o} {os.stat(folder).st_mode & 0o777:o}"

    assert as_member(ANN.uid, (), work) == "None 600 700"
    os.unlink(folder / "agent.sock")
    assert as_member(ANN.uid, (MEMBERS,), work) == f"{MEMBERS} 660 711"


# ---- over TCP --------------------------------------------------------------------------------------------------------


async def test_on_loopback_whoever_connects_is_a_viewer_and_with_read_open_reads_all() -> None:
    for read_open in (False, True):
        door = Network("gpu1", (), "s", "127.0.0.1:1", read_open)
        found = await door.admit(request("GET", "/v1/jobs", "127.0.0.1:1"))
        assert found == msgspec.structs.replace(VISITOR, reads_all=read_open)
    async with opened() as rig:
        assert (await rig.ask("GET", "/v1/jobs", tcp=True))[0] == 200
        assert [(each.role, each.uid, each.reads_all) for each in rig.api.askers] == [("viewer", VISITOR.uid, False)]


@pytest.mark.parametrize("bind", ["0.0.0.0:8470", "10.0.0.7:1", "[::]:1", "[fd00::7]:1", "what is this"])
async def test_beyond_loopback_health_and_counters_alone_are_read(bind: str) -> None:
    door = Network("gpu1", ("gpu1.example",), "/run/agent.sock", bind, False)
    for path in ("/livez", "/readyz", "/healthz", "/metrics"):
        assert isinstance(await door.admit(request("GET", path, "gpu1")), Asker)
    for path in ("/", "/page.js", "/states.json", "/v1/jobs", "/v1/hosts", "/v1/jobs/j1/logs", "/metrics/", "/none"):
        for method in ("GET", "HEAD"):
            no = await door.admit(request(method, path, "gpu1.example"))
            assert not isinstance(no, Asker) and no.reason == "closed", path
            assert bind in no.why and "agentctl --agent unix:/run/agent.sock" in no.next
    door = Network("gpu1", (), "s", bind, read_open=True)
    assert not isinstance(await door.admit(request("GET", "/v1/jobs", "gpu1")), Asker), "whatever agent.toml says"


def request(method: str, path: str, host: str) -> Any:
    return cast(Any, SimpleNamespace(method=method, path=path, headers={"Host": host}, transport=None))


async def test_prometheus_reads_counters_by_any_name_where_other_machines_reach() -> None:
    door = Network("gpu1", (), "s", "0.0.0.0:8470", False)
    for name in ("gpu1.rack.example.org:8470", "metrics.example", "", "10.1.2.3"):
        assert isinstance(await door.admit(request("GET", "/metrics", name)), Asker), name
    assert not isinstance(await door.admit(request("GET", "/healthz", "metrics.example")), Asker)

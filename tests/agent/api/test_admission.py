"""Who may ask what over which listener of the agent's HTTP, and every way in which a client may end its connection."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.api.admission import Door, Network, NotAdmitted, OwnSocket, is_known_name
from chaos.askers import ROOT
from tests.agent.api import visitor
from tests.agent.api.test_http import Rig, opened
from tests.agent.api.visitor import ENDINGS, PATIENT
from tests.agent.here import until
from tests.covey.test_volume_users import as_user
from tests.families import examples


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with opened() as found:
        yield found


async def test_over_tcp_jobs_are_read_under_names_that_no_attacker_can_point_here(rig: Rig) -> None:
    assert (await rig.ask("GET", "/v1/hosts", tcp=True))[0] == 200
    for name in (
        "localhost:1",
        "gpu1",
        "GPU1:80",
        "[::1]:80",
        "127.0.0.1",
        "gpu1.rack.example.org",
        "Gpu1.Rack.example.org.:9",
    ):
        assert (await rig.ask("GET", "/v1/hosts", tcp=True, headers={"Host": name}))[0] == 200
    for name in ("evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "gpu1.evil.example", "", "["):
        for path in ("/v1/hosts", "/", "/healthz", "/v1/jobs/j1/logs", "/nothing"):
            status, body = await rig.ask("GET", path, tcp=True, headers={"Host": name})
            assert (status, body["code"]) == (403, 4)
            assert "`names` of [http]" in body["next"]
    assert rig.http.refused["host"] == 6 * 5


async def test_a_name_counts_from_the_reload_that_adds_it(rig: Rig) -> None:
    headers = {"Host": "new.example.org"}
    assert (await rig.ask("GET", "/v1/hosts", tcp=True, headers=headers))[0] == 403
    rig.http.rename(("new.example.org",))
    assert (await rig.ask("GET", "/v1/hosts", tcp=True, headers=headers))[0] == 200
    gone = {"Host": "gpu1.rack.example.org"}
    assert (await rig.ask("GET", "/v1/hosts", tcp=True, headers=gone))[0] == 403


async def test_machines_read_counters_by_any_name(rig: Rig) -> None:
    """Prometheus scrapes by whatever name its targets have."""
    for name in ("gpu1.rack.example.org:8470", "metrics.example", "10.1.2.3:8470", "[::1]:1", ""):
        for path in ("/metrics", "/livez", "/readyz"):
            for method in ("GET", "HEAD"):
                assert (await rig.ask(method, path, tcp=True, headers={"Host": name}))[0] == 200
    assert not rig.http.refused


def test_the_listener_of_tcp_has_no_route_that_changes_anything(rig: Rig) -> None:
    def methods(door: Door) -> set[tuple[str, str]]:
        routes = rig.http._app(door).router.routes()
        return {(each.method, each.resource.canonical) for each in routes if each.resource is not None}

    over_tcp, own = methods(Network("gpu1", (), "s", "127.0.0.1:1", False)), methods(OwnSocket(0, rig.api.asker))
    assert {method for method, _ in over_tcp} == {"GET", "HEAD"}
    assert over_tcp == {each for each in own if each[0] in ("GET", "HEAD")}
    assert len(own - over_tcp) == 35, "a new change: is it refused over TCP, and does agentctl say so?"


async def test_no_change_exists_over_tcp_whoever_asks_and_it_is_said_where_it_does(rig: Rig) -> None:
    """Root and the agent's own user get no more than others; nor does a page of agentctl, or whoever knows its
    header."""
    asked = [
        ("POST", "/v1/jobs"),
        ("DELETE", "/v1/volumes/v1"),
        ("PUT", "/v1/jobs"),
        ("POST", "/metrics"),
        ("OPTIONS", "/"),
    ]
    mine = {"X-Covey": "1", "Origin": f"http://{rig.http.address}", "X-HTTP-Method-Override": "GET"}
    for method, path in asked:
        for headers in ({}, mine):
            status, body = await rig.ask(method, path, tcp=True, json={}, headers=headers)
            assert (status, body["code"], body["what"]) == (403, 4, "nothing can be changed over http")
            assert f"agentctl --agent unix:{rig.path}" in body["next"]
    assert rig.api.asked == [] and dict(rig.http.refused) == {"change": 10}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("whose", ["ours", "another user's"])
async def test_however_a_connection_over_tcp_ends_it_changes_nothing(rig: Rig, ending: str, whose: str) -> None:
    """The whole request has come and the client is gone before the agent looks: the loop stands still meanwhile."""
    if whose != "ours" and os.geteuid() != 0:
        pytest.skip("only root can be another user")
    ip, _, port = rig.http.address.rpartition(":")
    uid = -1 if whose == "ours" else 64_999
    if ending in PATIENT:
        said = await asyncio.to_thread(visitors, ip, port, uid, ending)
        refusals = said.count(f"{ending} HTTP/1.1 403"), said.count("nothing can be changed over http")
        assert refusals == (2, 2) or ending == "half_closed", said
    else:
        visitors(ip, port, uid, ending)
    await until(lambda: not rig.http._runners[1].server.connections)  # type: ignore[union-attr]
    for tcp, status in ((True, 403), (False, 200)):  # what was under way before them is done
        assert (await rig.ask("POST", "/v1/jobs", tcp=tcp, json={"argv": ["x"]}))[0] == status
    assert rig.api.asked == [("scheduler.submit", {"argv": ["x"]})]


def visitors(ip: str, port: str, uid: int, ending: str) -> str:
    """The words that two visitors print."""
    command = [sys.executable, "-I", "-S", visitor.__file__, ip, port, str(uid), "1", "1", ending]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout


async def test_of_whom_nothing_is_known_is_no_user_of_the_unix_socket(rig: Rig) -> None:
    """The user is unknown of a connection that ended before its request was read, of one over TCP, and of one without a
    client."""
    unconnected, gone = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    gone.close()
    own = OwnSocket(os.geteuid(), rig.api.asker, os.getegid(), "covey")
    with unconnected:
        for transport in (None, Transport(None), Transport(unconnected), Transport(gone)):
            stopped = await own.admit(cast(Any, SimpleNamespace(transport=transport, method="GET")))
            assert isinstance(stopped, NotAdmitted) and stopped.reason == "uid"
            assert "a user unknown to the kernel sent the request" in stopped.why
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert await own.admit(cast(Any, SimpleNamespace(transport=Transport(ours)))) is ROOT


class Transport(SimpleNamespace):
    def __init__(self, connection: socket.socket | None) -> None:
        super().__init__(get_extra_info={"socket": connection}.get)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_user_who_reaches_the_unix_socket_is_asked_who_he_is(rig: Rig) -> None:
    """Even where somebody changed a mode or a list: it admits nobody to changes, nor to what jobs say."""
    os.chmod(rig.path, 0o666)
    os.chmod(os.path.dirname(rig.path), 0o711)
    for method, path in (("POST", "/v1/jobs"), ("GET", "/v1/hosts"), ("GET", "/metrics")):
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
        said = await asyncio.to_thread(as_user, 64_999, partial(raw, rig.path, head.encode()))
        assert "403" in said and "for uid 0 and root, and uid 64999 sent the request" in said, said
    assert rig.api.asked == [] and rig.http.refused == {"uid": 3}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("change", ["scale", "tune", "arrange", "move", "cancel"])
async def test_a_job_is_changed_by_nobody_but_the_user_whose_jobs_the_agent_runs(rig: Rig, change: str) -> None:
    """Whoever connects says that they are root; the kernel says who they are, and they are told in three lines."""
    os.chmod(rig.path, 0o666)
    os.chmod(os.path.dirname(rig.path), 0o711)
    body = b'{"workers": 5, "on": true, "by": "root", "uid": 0}'
    head = f"POST /v1/jobs/j1/{change} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Covey: 1\r\n"
    asked = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    said = await asyncio.to_thread(as_user, 64_999, partial(raw, rig.path, asked))
    status, _, answer = said.partition("\n\n")  # a pipe of text has no returns
    assert status.startswith("HTTP/1.1 403 ")
    refusal = json.loads(answer)
    assert refusal["what"] == "this request is not allowed"
    assert refusal["why"] == "this socket is for uid 0 and root, and uid 64999 sent the request"
    assert refusal["next"] == "run agentctl as the agent's user, or as root"
    assert rig.api.asked == [], "nothing was changed, and nobody was asked to"
    said = await asyncio.to_thread(as_user, 0, partial(raw, rig.path, asked))
    assert "not allowed" not in said
    assert f"scheduler.{change}" in [name for name, _ in rig.api.asked] or f"does not answer scheduler.{change}" in said


def raw(path: str, data: bytes) -> str:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(path)
        client.sendall(data)
        found = b""
        while part := client.recv(4096):
            found += part
        return found.decode()


@settings(max_examples=examples(60), deadline=None)
@given(st.text(max_size=60), st.text(max_size=20))
def test_any_host_header_gets_an_answer(host: str, own: str) -> None:
    assert is_known_name(host, frozenset((own,))) in (True, False)

"""The TCP door with real TLS over loopback: who is let in as whom, who is not, and what agentctl says of it."""

import asyncio
import contextlib
import os
import select
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from agent.api import http, tcp_door
from agent.api.access import RULES
from agent.api.http import HttpApi
from agent.authority.certificates import CURVE, Named, authority_of, host_certificate, pem_of, user_certificate
from agent.authority.service import HostAuthority
from agent.config import HttpSettings
from agent.ports.clock import RealClock
from agent.tasks import Tasks
from chaos.askers import ANN, BOB, EVE
from cli import tls
from cli.client import FAILED, REFUSED, TRY_AGAIN, Agent, AgentctlError
from covey.ports.users import FixedUsers, User
from plugins.askers import Asker
from tests.agent.api.test_gate import GuardedFake
from tests.agent.api.test_http import FakeApi

KEY, OTHER_KEY, NEW_KEY = b"k" * 32, b"o" * 32, b"n" * 32
MEMBERS = frozenset(("members",))
USERS = (
    User(ANN.user, ANN.uid, MEMBERS),
    User(BOB.user, BOB.uid, MEMBERS),
    User(EVE.user, EVE.uid),
    User("carol", 64011, MEMBERS),
    User("covey", 990, MEMBERS),
)
"""Eve is in no group; carol is an operator; covey is the agent's own user."""


class SetClock(RealClock):
    """A clock that runs ahead of this machine's."""

    ahead_s = 0.0

    def wall_s(self) -> float:
        return super().wall_s() + self.ahead_s


class TlsApi(FakeApi):
    """An agent with all commands, behind the gate. `keys`: those of its gossip."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: tuple[bytes, ...] = (KEY,)
        self.clock = SetClock()
        self.authority = HostAuthority(lambda: self.keys, self.clock)
        users = FixedUsers(*USERS, own_uid=990)
        self.env.users = users  # type: ignore[misc]
        guarded = GuardedFake(users)
        self.gate = guarded.gate
        own = {name: self.answering(name, []) for name in RULES} | {"agent.health": self.health}
        self.commands = {name: self.gate.guarded(name, command) for name, command in own.items()}

    async def asker(self, uid: int) -> Asker | None:
        return await self.gate.asker(uid)


class OpenDoor:
    """The agent's listeners, and a user's config folder."""

    def __init__(self, folder: Path) -> None:
        self.api, self.folder = TlsApi(), folder / "config" / "covey"
        settings = HttpSettings(group="members", bind="127.0.0.1:0", names=("GPU1.example.org.",))
        self.http = HttpApi(self.api, str(folder / "agent.sock"), settings)
        self.folder.mkdir(parents=True)

    @property
    def url(self) -> str:
        return f"https://{self.http.address}"

    def take(self, named: Named, key: bytes = KEY, trusted: bytes = KEY) -> None:
        """Have this user's certificate, of the authority of a key, and believe hosts of another one."""
        self.keep(lambda public: pem_of(user_certificate(authority_of(key), public, named, time.time(), b"s" * 16)))
        (self.folder / tls.AUTHORITY).write_text(authority_of(trusted).pem)

    def keep(self, made: Callable[[ec.EllipticCurvePublicKey], str]) -> None:
        private = ec.generate_private_key(CURVE)
        text = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        path = self.folder / tls.LOGIN
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(text + made(private.public_key()))

    async def ask(self, *path: str, url: str = "") -> Any:
        """`url`: several with commas."""
        return await asyncio.to_thread(lambda: Agent((url or self.url).split(",")).get(*path).data)

    async def post(self, *path: str, body: Mapping[str, Any] | None = None) -> Any:
        return await asyncio.to_thread(lambda: Agent([self.url]).post(*path, body=body).data)

    async def no(self, *path: str, url: str = "") -> AgentctlError:
        with pytest.raises(AgentctlError) as refused:
            await self.ask(*(path or ("hosts",)), url=url)
        assert refused.value.what and refused.value.why and refused.value.next
        return refused.value

    async def bare(self, text: str, with_certificate: bool = True) -> str:
        """The answer to this request, word by word."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.folder / tls.AUTHORITY)
        if with_certificate:
            context.load_cert_chain(self.folder / tls.LOGIN)
        host, port = self.http.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="gpu1")
        writer.write(text.replace("\n", "\r\n").encode())
        said = (await reader.read()).decode()
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()
        return said


def named(asker: Asker = ANN, for_s: float = 600.0) -> Named:
    return Named(asker.user, asker.uid, time.time() + for_s)


@pytest.fixture
async def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenDoor]:
    found = OpenDoor(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    await found.http.start()
    yield found
    await found.http.stop()


def test_no_descriptor_of_a_key_stays_open() -> None:
    """The library reads keys from files alone, and one that is on no disk is made for each context."""
    authority = HostAuthority(lambda: (KEY,), RealClock())
    before = sorted(os.listdir("/proc/self/fd"))
    for n in range(20):
        authority.context(("gpu1", f"gpu{n}"), f"10.0.0.{n}")
    assert sorted(os.listdir("/proc/self/fd")) == before


# ---- who is let in ---------------------------------------------------------------------------------------------------


async def test_over_tls_a_user_may_what_the_user_may_on_the_host(door: OpenDoor) -> None:
    door.take(named())
    for url in (door.url, door.url.replace("127.0.0.1", "localhost")):
        await door.ask("hosts", url=url)
    await door.post("jobs", body={"argv": ["true"], "asker": "root", "user": "root"})
    assert door.api.askers == [msgspec.structs.replace(ANN, by_certificate=True)] * 3
    await door.post("jobs", "j1", "cancel")
    for refused in (("hosts", "h1", "drain"), ("jobs", "j2", "cancel"), ("quotas",)):
        with pytest.raises(AgentctlError) as no:
            await door.post(*refused)
        assert no.value.code == REFUSED
    door.take(named(BOB))
    with pytest.raises(AgentctlError, match="not allowed"):
        await door.post("jobs", "j1", "cancel")
    door.take(named(Asker(64011, "carol", "operator")))
    await door.post("hosts", "h1", "drain")
    assert door.api.askers[-1].role == "operator" and not door.api.askers[-1].is_agent


async def test_what_a_request_says_of_its_sender_counts_for_nothing(door: OpenDoor) -> None:
    door.take(named())
    claims = "X-Covey-User: carol\nX-Forwarded-User: root\nAuthorization: Basic cm9vdDo=\nX-SSL-Client-CN: root\n"
    said = await door.bare(f"GET /v1/hosts?user=carol HTTP/1.1\nHost: gpu1\nConnection: close\n{claims}\n")
    assert "HTTP/1.1 200" in said and [each.user for each in door.api.askers] == ["ann"]


async def test_no_certificate_is_made_for_whoever_came_with_one(door: OpenDoor) -> None:
    """It would be good for ever."""
    for asker in (named(), named(Asker(64011, "carol", "operator"))):
        door.take(asker)
        with pytest.raises(AgentctlError, match="only a host's kernel says who logs in"):
            await door.post("login", body={"csr": "x"})


async def test_without_a_certificate_health_and_counters_alone_are_read(door: OpenDoor) -> None:
    (door.folder / tls.AUTHORITY).write_text(authority_of(KEY).pem)
    for path, status in (("/metrics", 200), ("/livez", 200), ("/healthz", 200), ("/v1/jobs", 403), ("/", 403)):
        said = await door.bare(f"GET {path} HTTP/1.1\nHost: gpu1\nConnection: close\n\n", with_certificate=False)
        assert said.startswith(f"HTTP/1.1 {status}"), path
    said = await door.bare("POST /v1/jobs HTTP/1.1\nHost: gpu1\nConnection: close\n\n", with_certificate=False)
    assert "403" in said and "agentctl login" in said
    assert door.http.refused == {"no_certificate": 3} and not [name for name, _ in door.api.asked if "jobs" in name]
    no = await door.no()
    assert no.why.startswith("you have no certificate of a rack") and "agentctl login" in no.next


# ---- who is not ------------------------------------------------------------------------------------------------------


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not become so")


async def counted(door: OpenDoor, reason: str) -> None:
    """Wait until one refusal for this reason is counted, and there is no other."""
    await until(lambda: door.http.refused == {reason: 1})
    assert not door.api.asked


async def test_a_certificate_of_another_rack_is_refused_and_counted(door: OpenDoor) -> None:
    door.take(named(), key=OTHER_KEY)
    no = await door.no()
    assert (no.code == REFUSED and "does not believe your certificate" in no.what) or no.code == 75
    await counted(door, "certificate_of_others")


async def test_a_certificate_that_is_out_of_date_is_refused_and_counted(door: OpenDoor) -> None:
    door.take(named(for_s=-5))
    no = await door.no()
    assert no.code == REFUSED and "does not believe your certificate" in no.what
    await counted(door, "certificate_out_of_date")
    path = door.folder / tls.LOGIN
    path.write_text(tls.head("ann", time.time() - 5) + path.read_text())
    no = await door.no()
    assert "the certificate of ann" in no.why and "is out of date since" in no.why, "agentctl sees it by itself"


async def test_a_certificate_that_is_not_good_yet_names_the_clock(door: OpenDoor) -> None:
    """The host that signed is ahead of the one that is asked; OpenSSL tells both as a bad certificate."""
    rack, then_s = authority_of(KEY), time.time() + 3600
    door.take(named())
    door.keep(lambda key: pem_of(user_certificate(rack, key, named(for_s=7200), then_s, b"s" * 16)))
    for url in (door.url, f"{door.url},{door.url}"):
        no = await door.no(url=url)
        assert (no.code == REFUSED and "compare clocks" in no.why) or no.code == TRY_AGAIN
    await until(lambda: set(door.http.refused) == {"certificate_out_of_date"})


async def test_a_connection_that_stays_open_ends_with_its_certificate(door: OpenDoor) -> None:
    """TLS looks at a certificate once, when the connection begins."""
    door.take(named(for_s=60))
    host, port = door.http.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls.context(door.url), server_hostname="gpu1")

    async def asked() -> str:
        writer.write(b"GET /v1/hosts HTTP/1.1\r\nHost: gpu1\r\n\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line.split()[1] for line in head.splitlines() if line.lower().startswith("content-length"))
        return head + (await reader.readexactly(int(length))).decode()

    assert "HTTP/1.1 200" in await asked()
    door.api.clock.ahead_s = 61
    said = await asked()
    assert "HTTP/1.1 403" in said and "it is not good since" in said
    assert door.http.refused == {"certificate_out_of_date": 1} and len(door.api.asked) == 1
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()


async def test_the_certificate_of_a_host_is_no_users(door: OpenDoor) -> None:
    """Whoever has one is root there, and still is nobody by it."""
    door.take(named())
    rack = authority_of(KEY)
    door.keep(lambda key: pem_of(host_certificate(rack, key, ["ann"], time.time(), 600, b"s" * 16)))
    await door.no()
    await counted(door, "certificate")


@pytest.mark.parametrize(
    ("who", "reason", "why"),
    [
        (Asker(BOB.uid, "ann", "user"), "certificate_of_nobody", f"gpu1 has that name for uid {ANN.uid}"),
        (Asker(64099, "dora", "user"), "certificate_of_nobody", "gpu1 does not know that user"),
        (EVE, "group", "eve is not in group members of gpu1"),
        (Asker(990, "covey", "operator"), "certificate_of_nobody", "knows no user by this certificate"),
    ],
)
async def test_whom_this_host_does_not_know_so_is_refused(door: OpenDoor, who: Asker, reason: str, why: str) -> None:
    door.take(named(who))
    no = await door.no()
    assert no.code == REFUSED and why in no.why
    assert door.http.refused == {reason: 1} and not door.api.asked


async def test_a_key_that_was_removed_ends_what_its_authority_signed(door: OpenDoor) -> None:
    """install, use, remove: as `agentctl keys rotate` has it."""
    door.take(named())
    door.api.keys = (KEY, NEW_KEY)
    await door.ask("hosts")
    door.api.keys = (NEW_KEY, KEY)
    several = f"https://127.0.0.1:1,{door.url},{door.url.replace('127.0.0.1', 'localhost')}"
    for url in (door.url, several):
        no = await door.no(url=url)
        assert (no.code, no.next) == (FAILED, tls.AGAIN), "one that is down says less"
        assert "is not an agent of your rack" in no.what and "since your login" in no.why
    with pytest.raises(AgentctlError, match="since your login"):
        await asyncio.to_thread(lambda: Agent([door.url]).text("/metrics"))
    (door.folder / tls.AUTHORITY).write_text(door.api.authority.pem)
    await door.ask("hosts")
    door.api.keys = (NEW_KEY,)
    await door.no()
    door.take(named(), NEW_KEY, NEW_KEY)
    await door.ask("hosts")


async def test_a_host_of_another_rack_is_told_nothing(door: OpenDoor) -> None:
    door.take(named(), key=KEY, trusted=OTHER_KEY)
    no = await door.no()
    assert "is not an agent of your rack" in no.what and not door.api.asked


async def test_a_door_is_asked_under_its_names_alone(door: OpenDoor) -> None:
    door.take(named())
    get = "GET /v1/hosts HTTP/1.1\nHost: {}\nConnection: close\n\n"
    for name, status in (("gpu1", 200), ("gpu1.example.org:8470", 200), ("evil.example", 403)):
        assert f"HTTP/1.1 {status}" in await door.bare(get.format(name)), name
    door.http.rename(("Evil.Example.",))
    assert "HTTP/1.1 200" in await door.bare(get.format("evil.example"))
    context = tls.context(door.url)
    host, port = door.http.address.split(":")
    for name, good in (("evil.example", True), ("gpu1.example.org", False)):
        has = True
        try:
            _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name)
        except ssl.SSLCertVerificationError:
            has = False
        else:
            writer.close()
            await writer.wait_closed()
        assert has == good, name


async def test_a_web_page_changes_nothing_with_its_visitors_certificate(door: OpenDoor) -> None:
    door.take(named())
    post = "POST /v1/jobs HTTP/1.1\nHost: gpu1\nOrigin: https://{}\nContent-Length: 2\nConnection: close\n\n{{}}"
    for origin in ("evil.example", "gpu1"):
        assert "HTTP/1.1 403" in await door.bare(post.format(origin))
    assert door.http.refused == {"web_page": 2} and not door.api.asked


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "covey").mkdir()
    (tmp_path / "covey" / tls.LOGIN).touch(mode=0o640)
    with pytest.raises(AgentctlError, match="can be read by others"):
        Agent(["https://127.0.0.1:1"]).get("hosts")


# ---- what is neither -------------------------------------------------------------------------------------------------


async def test_what_is_no_tls_and_who_says_nothing_is_counted_and_closed(
    door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_door, "FIRST_S", 0.2)
    host, port = door.http.address.split(":")

    def said(text: bytes) -> bytes:
        with socket.create_connection((host, int(port)), 5) as client:
            client.sendall(text)
            with contextlib.suppress(ConnectionError):
                return client.recv(4096)
            return b""

    texts = (b"\x16\x03\x01\xff\xff" + b"x" * 600, b"\x16\x03\x01\x00\x05hello", b"", b"\x16", b"\x16\x03\x01")
    for text in texts:
        answer = await asyncio.to_thread(said, text)
        assert b"HTTP" not in answer, text
    assert (await asyncio.to_thread(said, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 200")
    await until(lambda: sum(door.http.refused.values()) == len(texts))
    assert door.http.refused == {"not_tls": 2, "silent": 3}, "nothing said, or no whole handshake"


async def test_whoever_is_refused_and_does_not_hang_up_is_counted_once(
    door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_door, "FIRST_S", 0.5)
    door.take(named(), key=OTHER_KEY)
    context = tls.context(door.url)
    host, port = door.http.address.split(":")

    def stays() -> bytes:
        """In TLS 1.3 a client is through before its certificate is looked at."""
        client = socket.create_connection((host, int(port)), 5)
        with client, context.wrap_socket(client, server_hostname=host) as over:
            with pytest.raises(ssl.SSLError, match="UNKNOWN_CA"):
                over.recv(1)
            assert select.select([over], [], [], 5)[0], "it stays open"
            return os.read(over.fileno(), 1)

    assert await asyncio.to_thread(stays) == b"", "the host ends it"
    assert door.http.refused == {"certificate_of_others": 1}


async def test_a_host_that_cannot_make_its_certificate_counts_and_logs_it(
    door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    door.take(named())

    def fails(error: Exception) -> Callable[..., ssl.SSLContext]:
        def context(names: object, address: str) -> ssl.SSLContext:
            raise error

        return context

    for error in (OSError("no descriptor"), ValueError("no name"), ZeroDivisionError("a defect")):
        monkeypatch.setattr(door.api.authority, "context", fails(error))
        await door.no()
    assert door.http.refused == {"no_context": 2}
    said = [(event, fields.get("why", fields.get("error"))) for event, fields in door.api.log.lines]
    assert said == [
        ("no TLS: this host has no certificate", "OSError('no descriptor')"),
        ("no TLS: this host has no certificate", "ValueError('no name')"),
        ("a connection failed", "ZeroDivisionError('a defect')"),
    ]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(door.folder.parent))
    await door.ask("hosts")


async def test_a_door_that_accepts_no_more_ends_the_agent(door: OpenDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd starts it again; unnoticed, the door would stay shut."""
    fatal: list[tuple[str, str]] = []
    tasks = Tasks(cast(Any, door.api.log), lambda name, error: fatal.append((name, repr(error))))
    door.api.env.spawn = tasks.spawn  # type: ignore[misc]
    await door.http.stop()
    await door.http.start()
    monkeypatch.setattr(http, "network_of", lambda address: 1 // 0)
    host, port = door.http.address.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5):
        await until(lambda: bool(fatal))
    assert fatal == [("http: accept", "ZeroDivisionError('integer division or modulo by zero')")]

"""What the starter does when it is asked, by whom, and what it refuses."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.ports.network.root_helper import received
from agent.ports.starter.starter_wire import (
    CONFIG_BYTES_MAX,
    PART_BYTES,
    Answer,
    AskStarter,
    EndAs,
    ForgetFolder,
    GiveConfig,
    LimitAs,
    StartAs,
    StartedAs,
    StarterDone,
    StarterFrame,
    StarterHere,
    StarterRefused,
    from_starter,
    to_starter,
)
from agent.starter.accounts import Rules, UnixAccount
from agent.starter.folders import JobFolders
from agent.starter.helper import Starter
from covey.ports.starter import EpochLimits
from covey.wire import frames
from covey.wire.frames import FrameError
from tests.agent.starter.starter_here import ALICE, BOB, lookup
from tests.covey.test_volume_users import as_user

START = StartAs("j1", 3, "supervisor", "alice", ALICE)


class FakeUnits:
    """Units of a test: what was started and ended."""

    enforces, lacks = True, ("memory",)

    def __init__(self) -> None:
        self.started: list[tuple[StartAs, UnixAccount, str, bytes]] = []
        self.limited: list[LimitAs] = []
        self.ended: list[tuple[EndAs, int | None]] = []
        self.forgotten: list[str] = []

    def start(self, ask: StartAs, account: UnixAccount, folder: str, given: bytes) -> int:
        self.started.append((ask, account, folder, given))
        return os.getpid()

    def limit(self, ask: LimitAs) -> None:
        self.limited.append(ask)

    def end(self, ask: EndAs, uid: int | None) -> None:
        self.ended.append((ask, uid))

    def forget(self, job: str) -> None:
        self.forgotten.append(job)

    def clear(self, folder: str, uid: int, gid: int) -> None:
        """The folders of these tests are none."""


class FakeFolders(JobFolders):
    """Folders that are nobody's yet, so that these tests need not be root's."""

    def __init__(self) -> None:
        super().__init__("/nonexistent", os.geteuid())
        self.made: dict[str, int] = {}

    def make(self, job: str, account: UnixAccount) -> str:
        self.made[job] = account.uid
        return f"/nonexistent/jobs/{job}"

    def owner(self, job: str) -> tuple[int, int] | None:
        return (self.made[job], self.made[job]) if job in self.made else None

    def forget(self, job: str, clear: object) -> None:
        self.made.pop(job, None)


class Asked:
    """A starter that serves in a thread."""

    def __init__(self, agent_uid: int | None = None) -> None:
        self.units, self.folders, self.said = FakeUnits(), FakeFolders(), list[str]()
        rules = Rules(os.geteuid() if agent_uid is None else agent_uid)
        self.starter = Starter(rules, self.folders, self.units, self.said.append, lookup)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind("")
        self.listener.listen()
        threading.Thread(target=self.starter.serve, args=(self.listener,), daemon=True).start()

    def client(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(10)
        client.connect(self.listener.getsockname())
        return client


@pytest.fixture
def asked() -> Iterator[Asked]:
    found = Asked()
    yield found
    found.listener.shutdown(socket.SHUT_RDWR)
    found.listener.close()


def told(client: socket.socket, *messages: StarterFrame) -> Answer:
    client.sendall(b"".join(frames.pack(message) for message in messages))
    data = bytearray()
    while True:
        part = client.recv(65_536)
        assert part, "it ended the connection"
        data += part
        for found in frames.whole(data, from_starter):
            return found


def test_a_program_starts_with_its_whole_configuration(asked: Asked) -> None:
    with asked.client() as client:
        assert told(client, AskStarter()) == StarterHere(True, ("memory",), {})
        started = told(client, GiveConfig(b"ab"), GiveConfig(b"c"), START)
        assert isinstance(started, StartedAs) and (started.pid, started.started > 0) == (os.getpid(), True)
        assert [(ask, given) for ask, _, _, given in asked.units.started] == [(START, b"abc")]
        assert isinstance(told(client, GiveConfig(b"d"), START), StartedAs)
        assert asked.units.started[1][3] == b"d", "not the one before it"
        assert told(client, AskStarter()) == StarterHere(True, ("memory",), {"started": 2})


def test_an_environment_of_ten_megabytes_is_refused_in_words(asked: Asked) -> None:
    parts = [GiveConfig(bytes(PART_BYTES))] * (10 * (1 << 20) // PART_BYTES)
    with asked.client() as client:
        refused = told(client, *parts, START)
        assert isinstance(refused, StarterRefused) and "10 MiB; at most 8" in refused.why
        assert isinstance(told(client, GiveConfig(b"x"), START), StartedAs), "the next one may come"
    assert CONFIG_BYTES_MAX < 10 << 20
    assert asked.starter.counted["refused"] == 1


def test_a_program_without_a_configuration_is_refused(asked: Asked) -> None:
    with asked.client() as client:
        assert isinstance(told(client, START), StarterRefused)
    assert asked.units.started == []


@pytest.mark.parametrize(
    ("user", "uid", "why"),
    [
        ("alice", BOB, "has uid"),
        ("root", 0, "never run as root"),
        ("daemon", 1, "a system user"),
        ("eve", 64_200, "no user"),
    ],
)
def test_a_user_who_may_have_no_jobs_is_refused_and_counted(asked: Asked, user: str, uid: int, why: str) -> None:
    with asked.client() as client:
        refused = told(client, GiveConfig(b"x"), msgspec.structs.replace(START, user=user, uid=uid))
    assert isinstance(refused, StarterRefused) and why in refused.why and refused.next
    assert (asked.starter.counted["refused"], asked.units.started, asked.folders.made) == (1, [], {})


def test_an_epoch_is_limited_and_ended_as_its_folders_user_and_of_no_other_job(asked: Asked) -> None:
    with asked.client() as client:
        told(client, GiveConfig(b"x"), START)
        assert told(client, EndAs("j2", 3)) == StarterDone()
        assert told(client, EndAs("j1", 3)) == StarterDone()
        assert asked.units.ended == [(EndAs("j2", 3), None), (EndAs("j1", 3), ALICE)], "a folder that is lost ends none"
        assert told(client, LimitAs("j1", 3, EpochLimits(gpus=(1,)))) == StarterDone()
        assert asked.units.limited == [LimitAs("j1", 3, EpochLimits(gpus=(1,)))]
        assert told(client, ForgetFolder("j1")) == StarterDone()
    assert (asked.folders.made, asked.units.forgotten) == ({}, ["j1"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"job": "../etc"},
        {"job": "j1/../../etc"},
        {"job": "j*"},
        {"job": "j1\n"},
        {"job": ""},
        {"job": "-j"},
        {"program": "sh"},
        {"program": "supervisor --x"},
        {"user": "-alice"},
        {"user": "ali ce"},
        {"user": "alice\n"},
        {"user": "../alice"},
        {"user": "%h"},
        {"uid": -1},
        {"uid": (1 << 32) - 1},
        {"epoch": -1},
        {"limits": {"memory_bytes": -1}},
        {"limits": {"gpus": ["../sda"]}},
        {"limits": {"caps": [-1]}},
        {"limits": {"device": "/dev/sda"}},
        {"seconds": -1},
        {"argv": "/bin/sh"},
    ],
)
def test_what_is_on_no_list_ends_the_connection(asked: Asked, wrong: dict[str, object]) -> None:
    body = {"type": "StartAs", "job": "j1", "epoch": 3, "program": "supervisor", "user": "alice", "uid": ALICE, **wrong}
    data = msgspec.msgpack.encode(body)
    with asked.client() as client:
        client.sendall(frames.pack(GiveConfig(b"x")) + len(data).to_bytes(4, "little") + data)
        assert client.recv(100) == b""
    assert asked.units.started == [] and asked.starter.counted["malformed"] == 1


def test_nobody_but_the_agents_user_is_answered() -> None:
    """Run as root, a process of another user asks; run as anybody else, this user asks a starter of another one."""
    found = Asked(os.geteuid() if os.geteuid() == 0 else os.geteuid() + 1)

    def asks() -> str:
        with found.client() as client:
            client.sendall(frames.pack(AskStarter()))
            return str(client.recv(100))

    said = as_user(64_999 if os.geteuid() == 0 else os.geteuid(), asks)
    assert said in ("b''", "ECONNRESET", "EPIPE")
    assert found.starter.counted["strangers"] == 1
    found.listener.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as root")
def test_root_itself_is_not_answered_where_the_agent_is_another_user() -> None:
    found = Asked(ALICE)
    with found.client() as client, contextlib.suppress(ConnectionError):
        client.sendall(frames.pack(AskStarter()))
        assert client.recv(100) == b""
    found.listener.close()


@given(st.binary(max_size=200))
def test_no_bytes_make_the_starter_stumble(data: bytes) -> None:
    one, other = socket.socketpair()
    found: list[object] = []
    with one, other:
        one.sendall(data)
        one.shutdown(socket.SHUT_WR)
        other.settimeout(5)
        with contextlib.suppress(FrameError):
            while (message := received(other, to_starter)) is not None:
                found.append(message)
    assert len(found) <= len(data) // 4, "each has its length before it"


ODD = (
    st.text(max_size=8) | st.integers() | st.binary(max_size=4) | st.none() | st.sampled_from(["j1", "alice", "spares"])
)


@given(st.fixed_dictionaries(dict.fromkeys(("job", "epoch", "program", "user", "uid"), ODD)))
def test_whatever_is_asked_for_is_of_the_form_that_a_command_may_have(values: dict[str, object]) -> None:
    try:
        found = frames.unpack(msgspec.msgpack.encode({"type": "StartAs", **values}), to_starter)
    except (FrameError, OverflowError):
        return
    assert isinstance(found, StartAs)
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,62}", found.job) and re.fullmatch(r"\w[\w.@\\-]*", found.user, re.ASCII)
    assert found.program in ("supervisor", "spares") and 0 <= found.uid < (1 << 32) - 1


def test_a_part_that_is_too_long_ends_the_connection(asked: Asked) -> None:
    with asked.client() as client:
        client.sendall((2 << 20).to_bytes(4, "little"))
        assert client.recv(100) == b"", "before anything of it was read"
    assert asked.starter.counted["malformed"] == 1

"""Commands beside ranks: the bytes between a command and whoever typed it, and real sessions on this machine."""

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.jobs.beside import ports, session
from agent.jobs.beside.messages import (
    ERR,
    NOTICE,
    OUT,
    OUTPUT_BYTES_MAX,
    OpenSession,
    SessionConfig,
    SessionTurn,
    Turned,
    turned,
    turns,
)
from agent.jobs.beside.ports import listeners
from agent.jobs.beside.stacks import stacks_in, why_none
from agent.jobs.beside.streams import SessionInput, SessionOutput
from agent.ports.processes.procfs import start_ticks
from cli.beside.piped import WRITES, PipedInput
from cli.beside.shell import IN_JOB
from covey.core.errors import Refused
from covey.ports.env import Env
from covey.ports.processes import Command, ProcessId
from covey.wire.frames import FrameError, pack, read_frame, unpack
from tests.agent.here import here, until

# ---- the two directions ----

SENT = st.lists(st.tuples(st.integers(-2, 9), st.integers(0, 20), st.integers(0, 9)))
"""Turns: how far before what was taken each begins, its length, and how much the command reads then."""


@given(st.lists(st.tuples(st.sampled_from((OUT, ERR)), st.binary(max_size=9)), max_size=20), st.data())
def test_output_arrives_whole_and_in_order_whatever_is_taken_and_repeated(
    written: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    output, taken, seen = SessionOutput(64), b"", 0
    whole = b"".join(each for _, each in written)
    for where, each in written:
        output.add(where, each)
        output.seen(data.draw(st.sampled_from((seen, seen, output.start, -1, 1 << 40))))
        output.check()
        if data.draw(st.booleans()):
            parts = output.held(data.draw(st.integers(0, 16)))
            taken = taken[: output.start] + b"".join(part for _, part in parts)
            seen = len(taken)
    output.seen(seen)
    assert taken + b"".join(part for _, part in output.held(1 << 20)) == whole


@given(st.binary(min_size=1, max_size=40), SENT)
@example(b"abcdef", [(0, 3, 0), (3, 5, 2)])
def test_input_is_taken_once_in_order_and_never_more_than_has_room(
    typed: bytes, turns_: list[tuple[int, int, int]]
) -> None:
    waiting, read = SessionInput(8), b""
    for back, length, count in turns_:
        at = max(0, waiting.taken - back)
        waiting.take(at, typed[at : at + length])
        waiting.check()
        read += waiting.held()[:count]
        waiting.written(min(count, len(waiting.held())))
        assert read + waiting.held() == typed[: waiting.taken]


def test_the_end_of_input_comes_once_all_before_it_was_taken() -> None:
    waiting = SessionInput(4)
    waiting.take(0, b"abcdef", ended=True)
    assert (waiting.taken, waiting.ended) == (4, False)
    waiting.written(4)
    waiting.take(4, b"ef", ended=True)
    assert (waiting.held(), waiting.ended) == (b"ef", True)
    waiting.take(6, b"more")
    assert waiting.taken == 6, "nothing follows the end"


@given(st.binary(max_size=200))
def test_what_is_no_turn_is_refused_and_nothing_else_happens(body: bytes) -> None:
    found: list[object] = []
    with contextlib.suppress(FrameError):
        found.append(unpack(body, turns))
    with contextlib.suppress(FrameError):
        found.append(unpack(body, turned))
    assert all(isinstance(each, SessionTurn | Turned) for each in found)


@pytest.mark.parametrize(
    "fields",
    [
        *({"seen": -2}, {"at": -1}, {"at": 1 << 70}, {"wait_s": 1e9}, {"wait_s": -1.0}, {"rows": 70_000}, {"more": 1}),
        *({"signals": -1}, {"data": b"x" * 70_000}, {"leaves": "yes"}),
    ],
)
def test_a_turn_out_of_bounds_is_none(fields: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, SessionTurn)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"job": "../x", "rank": 0, "kind": "exec", "session": "ex-1"}, OpenSession)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"job": "j1", "rank": 0, "kind": "exec", "session": "../../x"}, OpenSession)


# ---- sessions ----


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="covey-") as directory:
        yield Path(directory)


class Typed:
    """A session on this machine, and whoever typed its command."""

    def __init__(self, env: Env, config: SessionConfig) -> None:
        self.env, self.config = env, config
        self.seen = self.at = 0
        self.program: asyncio.Task[None] | None = None
        self.said = {OUT: b"", ERR: b"", NOTICE: b""}

    async def turn(self, **fields: object) -> Turned:
        stream = await self.env.bytes.connect(self.config.socket)
        try:
            await stream.write(pack(SessionTurn(**fields)))  # type: ignore[arg-type]
            return await read_frame(stream, turned)
        finally:
            stream.close()

    async def type(self, data: bytes) -> None:
        end = self.at + len(data)
        while self.at < end:
            found = await self.turn(at=self.at, data=data[len(data) - (end - self.at) :][:60_000], wait_s=2.0)
            self.at = found.taken

    async def code(self) -> int:
        """Take output to the end, and return how the command ended."""
        while (found := await self.read()).code is None:
            pass
        return found.code

    async def read(self) -> Turned:
        found = await self.turn(seen=self.seen, wait_s=5.0)
        for where, data in found.parts:
            self.said[where] += data
        self.seen = found.at + sum(len(data) for _, data in found.parts)
        return found

    async def until(self, word: bytes) -> None:
        async with asyncio.timeout(60.0):
            while word not in self.said[OUT]:
                assert (await self.read()).code is None, self.said


async def _no_strays(grace_s: float) -> int:
    return 0


@asynccontextmanager
async def begun(directory: Path, *argv: str, terminal: bool = False, **more: Any) -> AsyncIterator[Typed]:
    async with here(str(directory)) as host:
        env = {"PATH": os.environ["PATH"], "COVEY_RANK": "3"}
        config = SessionConfig(
            command=Command(argv=argv, cwd="/", env=env, output=""),
            terminal=terminal,
            rows=24,
            columns=80,
            socket=f"unix:{host.env.run_dir}/ex-1.sock",
            agent_uid=-1,
            ends_with=None,
            kept_s=30.0,
            idle_s=0.0,
        )
        # a session has a process of its own, whose children it ends; this process is pytest's
        processes: Any = host.env.processes
        processes.adopt, processes.end_strays = lambda: None, _no_strays
        typed = Typed(host.env, msgspec.structs.replace(config, **more))
        program = asyncio.create_task(session.run_session(host.env, typed.config))
        typed.program = program
        await until(Path(typed.config.socket.removeprefix("unix:")).exists)
        try:
            yield typed
        finally:
            program.cancel()
            await asyncio.wait([program])


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LOOK_S", 0.02)
    monkeypatch.setattr(session, "HANG_UP_S", 0.3)


async def test_a_command_has_its_environment_input_and_two_outputs_and_its_code_is_told(short: Path) -> None:
    script = "cat; echo $COVEY_RANK ${TERM-none} >&2; pwd; exit 7"
    async with begun(short, "sh", "-c", script) as typed:
        await typed.type(b"typed\n")
        await typed.turn(at=typed.at, ended=True)
        assert await typed.code() == 7
        assert typed.said == {OUT: b"typed\n/\n", ERR: b"3 none\n", NOTICE: b""}


async def test_a_command_whose_output_nobody_takes_waits_and_loses_nothing(short: Path) -> None:
    size = 3_000_000
    async with begun(short, "sh", "-c", f"head -c {size} /dev/zero; echo end >&2") as typed:
        held = 0
        while held < OUTPUT_BYTES_MAX // 2:  # nothing is taken: it fills what may be held, and no more
            held = sum(len(data) for _, data in (await typed.turn(seen=0, wait_s=1.0)).parts)
        assert held <= OUTPUT_BYTES_MAX and typed.said[ERR] == b""
        assert await typed.code() == 0
        assert (len(typed.said[OUT]), typed.said[ERR]) == (size, b"end\n")


async def test_an_interrupt_reaches_all_of_a_command_and_a_leave_ends_what_ignores_it(short: Path, fast: None) -> None:
    script = "trap 'echo int' INT; echo on; while :; do sleep 0.05; done"
    async with begun(short, "sh", "-c", script) as typed:
        await typed.until(b"on")
        for _ in range(2):  # the same turn again is the same interrupt
            await typed.turn(signals=1)
        await typed.until(b"int")
        await typed.turn(leaves=True)
        assert await typed.code() in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
        assert typed.said[OUT].count(b"int") == 1


async def test_a_terminal_has_its_size_and_its_keys_and_ends_with_the_shell(short: Path) -> None:
    async with begun(short, "sh", terminal=True) as typed:
        await typed.turn(rows=33, columns=111)
        await typed.type(b"PS1=; stty size\n")
        await typed.until(b"33 111")
        await typed.type(b"sh -c 'echo it sl\"\"eeps; exec sleep 50'\n")
        await typed.until(b"it sleeps")  # a key typed before is the shell's own
        await typed.type(b"\x03echo code $?\n")
        await typed.until(b"code 130")
        await typed.turn(at=typed.at, ended=True)  # of a terminal that was lost
        await typed.type(b"exit 5\n")
        assert await typed.code() == 5


async def test_a_shell_that_nobody_looks_at_keeps_its_newest_output(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.jobs.beside.conversation.ATTENDED_S", 0.0)
    async with begun(short, "sh", "-c", "seq 200000; echo last; sleep 50", terminal=True) as typed:
        found = Turned(at=0)
        while not b"".join(data for _, data in found.parts).endswith(b"last\r\n"):
            found = await typed.turn(seen=0)
        assert found.at > 0 and sum(len(data) for _, data in found.parts) <= OUTPUT_BYTES_MAX


async def test_a_command_that_cannot_be_started_says_why(short: Path) -> None:
    async with begun(short, "/none/such") as typed:
        assert await typed.code() == session.NOT_FOUND
        assert typed.said[ERR] == b"/none/such cannot be started: No such file or directory\n"


@pytest.mark.parametrize("why", ["nobody comes back", "it is idle", "the job ends"])
async def test_a_session_ends_by_itself(short: Path, fast: None, why: str) -> None:
    gone = ProcessId(os.getpid(), 1)
    cases: dict[str, dict[str, Any]] = {
        "nobody comes back": {"kept_s": 0.3},
        "it is idle": {"idle_s": 0.6},
        "the job ends": {"ends_with": gone},
    }
    more = cases[why]
    async with begun(short, "sh", "-c", "trap '' HUP; sleep 50", terminal=True, **more) as typed:
        if why == "nobody comes back":
            assert typed.program is not None
            await asyncio.wait_for(typed.program, 10.0)
            return
        assert await typed.code() in (128 + signal.SIGHUP, 128 + signal.SIGKILL)
        said = typed.said[NOTICE].decode()
        assert {"it is idle": "this shell ends in", "the job ends": "the job has ended"}[why] in said


async def test_the_rank_that_is_there_for_a_shell_hears_of_its_begin_and_end(short: Path) -> None:
    rank = await asyncio.create_subprocess_exec(*IN_JOB)
    try:
        started = start_ticks(rank.pid)
        assert started is not None
        async with begun(short, "sh", "-c", "true", holds=ProcessId(rank.pid, started)) as typed:
            assert await typed.code() == 0
            assert await asyncio.wait_for(rank.wait(), 10.0) == 0
    finally:
        if rank.returncode is None:
            rank.kill()


# ---- ports ----


async def test_a_connection_to_a_port_carries_bytes_both_ways_and_others_ports_are_refused(short: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert listeners(port) == [("127.0.0.1", os.getuid())]
    async with here(str(short)) as host:
        stream = await ports.connected(host.env, port, os.getuid())
        typed, back, at = os.urandom(300_000), b"", 0
        answer = Turned(at=0)
        while answer.code is None:
            part = typed[at : at + 50_000]
            sent = SessionTurn(seen=len(back), at=at, data=part, ended=at == len(typed), wait_s=0.2)
            answer = await asyncio.wait_for(stream.conversation.turn(sent), 5.0)
            back, at = back + b"".join(data for _, data in answer.parts), answer.taken
        assert back == typed
        stream.close()
        with pytest.raises(Refused, match="another user"):
            await ports.connected(host.env, port, os.getuid() + 1)
        server.close()
        await server.wait_closed()
        with pytest.raises(Refused, match="nothing listens"):
            await ports.connected(host.env, port, os.getuid())


# ---- stacks ----


def test_stacks_are_found_among_what_a_rank_writes() -> None:
    head = "Current thread 0x00007fa2aa86eb80 (most recent call first):"
    frames = '  File "/a b.py", line 4 in deep\n  File "<stdin>", line 5 in <module>'
    assert stacks_in(f"step 3\n{head}\n{frames}\nstep 4\n  File of mine\n") == f"{head}\n{frames}"
    assert stacks_in('  File "/a.py", line 4 in deep\n') == "", "without a thread it is a traceback's"
    assert "--no-hooks" in why_none(False, "") and "/err.txt" in why_none(True, "/err.txt")


def test_piped_input_is_that_of_rank_0_of_the_first_start_alone(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}

    def begun(argv: Sequence[str], given: bytes = b"", **more: str) -> "subprocess.Popen[bytes]":
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env={**env, **more})
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(given)
        return process

    command = PipedInput().command(["cat"])
    writes = ["sh", "-c", WRITES, *command[3:5]]
    again = begun(command, COVEY_RANK="0", COVEY_ATTEMPT="2")
    assert again.wait(30.0) == 4 and again.stderr is not None and b"read by an earlier start" in again.stderr.read()
    other = begun(command, b"its own", COVEY_RANK="1", COVEY_ATTEMPT="2")
    assert (other.wait(30.0), other.stdout and other.stdout.read()) == (0, b"its own")
    first = begun(command, COVEY_RANK="0", COVEY_ATTEMPT="1")
    writer = begun(writes, b"x" * 60_000)
    assert first.stdout is not None and first.stdout.read() == b"x" * 60_000
    assert (writer.wait(30.0), first.wait(30.0), list(tmp_path.iterdir())) == (0, 0, [])

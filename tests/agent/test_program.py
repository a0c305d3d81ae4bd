"""The entry point of Covey's own programs."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from agent.jobs.spares.frames import SparesConfig
from agent.jobs.supervision import SupervisorState, read_state
from agent.jobs.supervisor.supervisor import PROGRAM
from agent.ports.processes.processes import WORDS_MAX, ProgramBase, RealProcesses, leave_words
from agent.program import JsonLog, NoLinks, program_named, run
from covey.core.ids import HostId, JobId
from covey.ports.env import Env
from covey.ports.processes import Command, ProcessId
from plugins.base import Program
from plugins.registry import PLUGINS
from tests.agent.here import Lines, here, until


class Nothing(msgspec.Struct):
    """No configuration."""


def log() -> tuple[JsonLog, Lines]:
    lines = Lines()
    return JsonLog(lines, "info", program="x"), lines  # type: ignore[arg-type]


def test_lines_are_json_and_secrets_are_not_written() -> None:
    written, lines = log()
    written.debug("not wanted at this level")
    written.warning("something", count=3, COVEY_TOKEN="abc", token="abc", gossip_key=b"abc", odd=object)
    written.error("failed", exc_info=ValueError("why"))
    first, second = (json.loads(line) for line in lines.text.splitlines())
    assert (first["event"], first["count"], first["program"], first["level"]) == ("something", 3, "x", "warning")
    assert (first["token"], first["gossip_key"]) == ("(hidden)", "(hidden)")
    assert "abc" not in json.dumps({**first, "COVEY_TOKEN": ""})
    assert "ValueError: why" in second["exception"]


def test_a_log_on_a_full_disk_ends_nothing() -> None:
    class Full(Lines):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "full")

    lines = Full()
    JsonLog(lines).error("lost", why="full")  # type: ignore[arg-type]
    assert lines.text == ""


def test_every_program_of_every_plugin_is_found_by_its_name() -> None:
    assert program_named("supervisor") is PROGRAM
    for plugin in PLUGINS:
        for program in plugin.programs:
            assert program_named(program.name) is program
    with pytest.raises(KeyError):
        program_named("no-such-program")


async def test_programs_have_no_control_links() -> None:
    links = NoLinks()
    with pytest.raises(OSError, match="unix socket"):
        await links.open("127.0.0.1:0", lambda host, data: None)
    assert links.send(HostId("h2"), b"x") is False


def base(tmp_path: Path) -> ProgramBase:
    return ProgramBase("h1", str(tmp_path / "state"), str(tmp_path / "run"), "127.0.0.1")


def last_words(tmp_path: Path) -> str:
    return RealProcesses(base(tmp_path)).last_words("")


async def test_a_program_that_gives_up_leaves_words_for_who_starts_it_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()

    async def fails(env: Env, config: Nothing) -> None:
        raise KeyError("segments")

    async def works(env: Env, config: Nothing) -> None:
        pass

    written, _ = log()
    assert last_words(tmp_path) == "", "it never ran"
    await run(Program("x", Nothing, works), base(tmp_path), Nothing(), written)
    assert last_words(tmp_path) == "", "it ended in good order"
    await run(Program("x", Nothing, fails), base(tmp_path), Nothing(), written)
    assert last_words(tmp_path) == "KeyError: 'segments'"
    leave_words(str(tmp_path / "run"), "", ValueError("of two\n lines " + "x" * 1000))
    assert last_words(tmp_path).startswith("of two lines xxx")
    assert len(last_words(tmp_path)) == WORDS_MAX


async def test_a_program_that_fails_ends_with_1_wherever_it_fails(tmp_path: Path) -> None:
    async def fails(env: Env, config: Nothing) -> None:
        raise ValueError("in main")

    async def fails_in_a_task(env: Env, config: Nothing) -> None:
        async def task() -> None:
            raise ValueError("in a task")

        env.spawn("task", task())
        await asyncio.Event().wait()

    async def works(env: Env, config: Nothing) -> None:
        await env.disk.replace("done", env.host.encode())

    (tmp_path / "run").mkdir()
    written, lines = log()
    assert await run(Program("x", Nothing, fails), base(tmp_path), Nothing(), written) == 1
    assert await run(Program("x", Nothing, fails_in_a_task), base(tmp_path), Nothing(), written) == 1
    assert "in main" in lines.text
    assert "in a task" in lines.text
    assert last_words(tmp_path) == "in a task"
    assert await run(Program("x", Nothing, works), base(tmp_path), Nothing(), written) == 0
    assert (tmp_path / "state/done").read_text() == "h1"


async def test_what_nobody_needs_for_long_is_ended_by_the_kernel_before_any_job() -> None:
    known = [program for plugin in PLUGINS for program in plugin.programs]
    assert [program.name for program in known if program.goes_first] == ["slabd", "keeper"]
    with tempfile.TemporaryDirectory(prefix="covey-") as short:
        async with here(short) as host:
            command = Command(argv=("true",), cwd="/", env={}, output=f"{short}/log", run=f"{short}/1")
            config = SparesConfig(job=JobId("j1"), epoch=1, command=command, modules=(), socket=f"unix:{short}/sock")
            process = await host.env.processes.start_program("spares", "spares", config)
            await until(lambda: Path(f"/proc/{process.id.pid}/oom_score_adj").read_text() == "800\n", 20.0)
            process.signal(signal.SIGTERM)
            assert await process.wait() in (0, -signal.SIGTERM)  # it may not have come to its handler


def test_started_by_hand_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "agent.program"], input="", capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "started by hand" in done.stderr
    assert "next: " in done.stderr


def test_a_supervisor_imports_no_plugin_and_nothing_heavy() -> None:
    code = """import sys, agent.program
agent.program.program_named("supervisor")
heavy = ("numpy", "zmq", "aiohttp", "structlog", "cryptography", "plugins.registry", "plugins.memory", "pynvml")
print([name for name in heavy if name in sys.modules])"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def starting_a_supervisor(tmp_path: Path) -> tuple["subprocess.Popen[bytes]", ProcessId]:
    """A process in a group of its own that has started a supervisor of one rank, which sleeps; and that supervisor."""
    code = f"""
import asyncio, sys
from agent.ports.processes.processes import ProgramBase, RealProcesses
from agent.jobs.supervision import RankStart, SupervisorConfig
from covey.ports.processes import Command
import msgspec
async def main():
    d = {str(tmp_path)!r}
    rank = RankStart(0, Command(argv=("/bin/sleep", "600"), cwd="/", env={{}}, output=d + "/rank.log"))
    config = SupervisorConfig(job="j1", epoch=1, ranks=(rank,), grace_s=5.0, state="st", preempt="pr",
                              socket=f"unix:{{d}}/x.sock")
    port = RealProcesses(ProgramBase("h1", d + "/state", d, ""))
    process = await port.start_program("supervisor", "sup-1", config)
    before, began = process.loaded, asyncio.get_running_loop().time()
    while not process.loaded and asyncio.get_running_loop().time() - began < 60:
        await asyncio.sleep(0.01)
    assert (before, process.loaded) == (False, True), "it says when its code is loaded"
    print(process.id.pid, process.id.started, flush=True)
    await asyncio.sleep(60)
import os
os.makedirs({str(tmp_path)!r} + "/state")
asyncio.run(main())
"""
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert starter.stdout is not None
    pid, started = map(int, starter.stdout.readline().split())
    return starter, ProcessId(pid, started)


def stored(path: Path) -> SupervisorState:
    found = read_state(path.read_bytes())
    assert found is not None
    return found


async def test_killing_its_starters_group_does_not_touch_a_program_and_sigterm_ends_it(tmp_path: Path) -> None:
    starter, supervisor = starting_a_supervisor(tmp_path)
    state = tmp_path / "state/st"
    await until(lambda: state.exists() and stored(state).pids)
    os.killpg(starter.pid, signal.SIGKILL)
    starter.communicate()
    found = RealProcesses(base(tmp_path)).find(supervisor)
    assert found is not None
    os.kill(supervisor.pid, signal.SIGTERM)
    await found.wait()
    ended = stored(state)
    assert (ended.ended, ended.codes) == (True, {0: -signal.SIGTERM})
    assert ended.reason == "their supervisor was told to end"


def test_what_a_program_imports_is_left_out_of_collections() -> None:
    """A full collection of it stops a volume's process for 15 ms, and its requests with it."""
    code = """import gc, io, sys, msgspec, agent.program
from agent.ports.processes.processes import ProgramBase, ProgramStart
from plugins.base import Program
class Nothing(msgspec.Struct):
    pass
async def look(env, config):
    print(gc.get_freeze_count() > 10_000)
agent.program.program_named = lambda name: Program("look", Nothing, look)
start = ProgramStart(ProgramBase("h1", sys.argv[1], sys.argv[1], "127.0.0.1", "look"), msgspec.Raw(b"\\x80"))
sys.stdin = io.TextIOWrapper(io.BytesIO(msgspec.msgpack.encode(start)))
agent.program.main()"""
    with tempfile.TemporaryDirectory() as directory:
        argv = [sys.executable, "-P", "-c", code, directory]
        ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr

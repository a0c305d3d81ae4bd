"""Programs that are forked from their agent: like executed ones from outside, and outliving forker and agent."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent.ports.processes.procfs import environment, is_alive, live_ticks, stat, words
from covey.ports.processes import ProcessId

AGENT = """
import asyncio, json, os, sys
import agent.ports.processes.forker
from agent.ports.processes.forker import NotForked, begin, of_program

def program():
    from agent.program import say_loaded
    say_loaded()
    mode = sys.stdin.read()
    print(mode, sys.argv, os.getcwd(), sorted(map(int, os.listdir("/proc/self/fd"))), flush=True)
    if mode == "asks":
        asyncio.run(asks(of_program[0], "waits"))
    elif mode == "waits":
        import time
        time.sleep(60)
    sys.exit(7)

async def asks(forker, *modes, cwd=None):
    async def one(mode):
        handed = os.memfd_create("handed")
        os.write(handed, mode.encode())
        os.lseek(handed, 0, 0)
        output = os.open(f"{folder}/{mode}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        hears, tells = os.pipe()
        words = (sys.executable, "-P", "-m", "agent.program", mode, f"{mode}-1")
        try:
            forked = await forker.start(words, cwd or folder, (handed, output, tells), "COVEY_LOADED_FD")
        except NotForked as error:
            print(json.dumps(["not forked", str(error)]), flush=True)
            return
        finally:
            for each in (handed, output, tells):
                os.close(each)
        assert await asyncio.to_thread(os.read, hears, 1) == b"1"
        print(json.dumps(["runs", forked.id.pid, forked.id.started]), flush=True)
        print(json.dumps(["ended", mode, await forked.status]), flush=True)
    await asyncio.gather(*(one(mode) for mode in modes))

async def main():
    print(json.dumps(["forker", forker.pid]), flush=True)
    for line in iter(sys.stdin.readline, ""):
        line = json.loads(line)
        if line.get("cancel"):
            work = asyncio.create_task(asks(forker, *line["modes"]))
            while not forker._asked:
                await asyncio.sleep(0)
            work.cancel()
            await asyncio.wait([work])
            print(json.dumps(["cancelled"]), flush=True)
            continue
        await asks(forker, *line["modes"], cwd=line.get("cwd"))

folder = sys.argv[1]
agent.ports.processes.forker.FORKED_S = 0.5
os.environ["SECRET"], os.environ["NOTIFY_SOCKET"] = "kept", "/x"
leak = os.open("/dev/zero", os.O_RDONLY)
forker = begin(program)
asyncio.run(main())
"""


class Driven:
    """An agent of this test: it forks what it is asked to, and says what it sees."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.forker = int(self.said()[1])

    def asks(self, *modes: str, **more: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"modes": modes, **more}) + "\n")
        self.process.stdin.flush()

    def said(self) -> list[Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found: list[Any] = json.loads(line)
        return found


@contextmanager
def driven(folder: Path) -> Iterator[Driven]:
    line = [sys.executable, "-c", AGENT, str(folder)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        agent = Driven(process)
        forker = ProcessId(agent.forker, live_ticks(agent.forker) or 0)
        try:
            yield agent
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
            if is_alive(forker) and "forker" in words(forker.pid, "cmdline"):
                time.sleep(0.2)  # it is about to see that its agent has ended
                with contextlib.suppress(ProcessLookupError):
                    os.kill(forker.pid, signal.SIGKILL)


def gone(process: ProcessId) -> None:
    until_s = time.monotonic() + 10.0
    while is_alive(process):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_forked_program_is_as_an_executed_one_and_several_run_at_once(tmp_path: Path) -> None:
    with driven(tmp_path) as agent:
        agent.asks("waits", "ends")
        said = [agent.said() for _ in range(3)]
        (over,) = (each for each in said if each[0] == "ended")
        assert over == ["ended", "ends", 7]
        left = next(ProcessId(*each[1:]) for each in said if each[0] == "runs" and is_alive(ProcessId(*each[1:])))
        assert words(left.pid, "cmdline") == [sys.executable, "-P", "-m", "agent.program", "waits", "waits-1"]
        assert words(agent.forker, "cmdline")[-1] == "forker"
        found = environment(left.pid)
        assert found["SECRET"] == "kept" and "NOTIFY_SOCKET" not in found and found["COVEY_LOADED_FD"] == "3"
        assert os.getsid(left.pid) == os.getpgid(left.pid) == left.pid
        assert Path(f"/proc/{left.pid}/comm").read_text().strip() == Path(sys.executable).name[:15]
        line = (tmp_path / "waits").read_text()
        # 3: the listing itself; 4: the forker
        assert line == f"waits ['agent.program', 'waits', 'waits-1'] {tmp_path} [0, 1, 2, 3, 4]\n"
        os.killpg(left.pid, signal.SIGKILL)
        assert agent.said() == ["ended", "waits", -signal.SIGKILL]


def test_what_cannot_be_forked_is_said_and_a_program_may_ask_too(tmp_path: Path) -> None:
    with driven(tmp_path) as agent:
        agent.asks("ends", cwd="/nowhere")
        assert agent.said() == ["not forked", "No such file or directory"]
        agent.asks("asks")
        asking = ProcessId(*agent.said()[1:])
        until_s = time.monotonic() + 10.0
        while len(lines := (tmp_path / "asks").read_text().splitlines()) < 2:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        asked = ProcessId(*json.loads(lines[1])[1:])
        parents = {int((stat(each.pid) or [])[1]) for each in (asking, asked)}
        assert parents == {agent.forker}
        os.kill(asking.pid, signal.SIGTERM)
        assert agent.said() == ["ended", "asks", -signal.SIGTERM]
        assert is_alive(asked), "it has another session"
        os.kill(asked.pid, signal.SIGKILL)
        gone(asked)


def test_programs_outlive_a_killed_forker_and_agent(tmp_path: Path) -> None:
    with driven(tmp_path) as agent:
        agent.asks("waits")
        first = ProcessId(*agent.said()[1:])
        os.kill(agent.forker, signal.SIGTERM)  # it ends with its agent alone
        os.kill(agent.forker, signal.SIGKILL)
        assert agent.said() == ["ended", "waits", None], "nobody tells"
        assert is_alive(first)
        agent.asks("waits")
        assert agent.said()[0] == "not forked"
        os.kill(first.pid, signal.SIGKILL)
    with driven(tmp_path) as agent:
        agent.asks("waits")
        second = ProcessId(*agent.said()[1:])
        forker = ProcessId(agent.forker, live_ticks(agent.forker) or 0)
        agent.process.kill()
        gone(forker)
        assert is_alive(second)
        os.kill(second.pid, signal.SIGKILL)
        gone(second)


def test_a_program_that_nobody_waits_for_does_not_begin(tmp_path: Path) -> None:
    """Whoever asked was cancelled; or took the forker for gone, and executes the program instead."""
    with driven(tmp_path) as agent:
        agent.asks("ends", cancel="yes")
        assert agent.said() == ["cancelled"]
        agent.asks("waits")
        first = ProcessId(*agent.said()[1:])
        os.kill(first.pid, signal.SIGKILL)
        assert agent.said() == ["ended", "waits", -signal.SIGKILL]
        os.kill(agent.forker, signal.SIGSTOP)
        agent.asks("late")
        assert agent.said()[0] == "not forked"
        forker = ProcessId(agent.forker, live_ticks(agent.forker) or 0)
        os.kill(agent.forker, signal.SIGCONT)
        gone(forker)
    assert (tmp_path / "ends").read_text() == (tmp_path / "late").read_text() == ""

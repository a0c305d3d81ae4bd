"""Processes of this machine: started as told, signalled as groups, told apart from later ones with the same number."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from agent.ports.processes import held_back, shim
from agent.ports.processes import processes as processes_module
from agent.ports.processes.processes import ProgramBase, RealProcesses, holding
from agent.ports.processes.procfs import descendants, is_alive, start_ticks
from covey.ports.processes import Command, ProcessId
from plugins.starting import why_ended
from tests.agent.here import both_loops, until


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[RealProcesses]:
    yield RealProcesses(ProgramBase("h1", str(tmp_path), str(tmp_path), "127.0.0.1"))


def command(tmp_path: Path, *argv: str, cwd: str = "/", **env: str) -> Command:
    return Command(argv=argv, cwd=cwd, env=env, output=str(tmp_path / "out/log"))


async def test_a_command_gets_its_own_directory_and_environment_and_nothing_else(
    port: RealProcesses, tmp_path: Path
) -> None:
    process = await port.start(command(tmp_path, "/bin/sh", "-c", "pwd; env; echo late >&2", cwd="/usr", A="b c"))
    assert await process.wait() == 0
    lines = (tmp_path / "out/log").read_text().splitlines()
    assert [line for line in lines if not line.startswith(("PWD=", "OLDPWD=", "SHLVL=", "_="))] == [
        "/usr",
        "A=b c",
        "late",
    ]


async def test_output_is_appended_and_for_its_owner_only(port: RealProcesses, tmp_path: Path) -> None:
    for word in ("one", "two"):
        await (await port.start(command(tmp_path, "/bin/echo", word))).wait()
    assert (tmp_path / "out/log").read_text() == "one\ntwo\n"
    assert (tmp_path / "out/log").stat().st_mode & 0o777 == 0o600


async def test_output_goes_to_files_of_the_users_choice_as_well(port: RealProcesses, tmp_path: Path) -> None:
    def told(script: str, **names: str) -> Command:
        base = msgspec.structs.replace(command(tmp_path, "/bin/sh", "-c", script, COVEY_UMASK="027"), **names)
        return msgspec.structs.replace(base, run=str(tmp_path / f"r{next(number)}"))

    number = itertools.count()
    one, two = tmp_path / "made/here/out", tmp_path / "err"
    both = {"stdout": str(one), "stderr": str(two)}
    assert await (await port.start(told("echo 1; echo 2 >&2; exit 3", **both))).wait() == 3
    assert (one.read_text(), two.read_text()) == ("1\n", "2\n")
    assert sorted((tmp_path / "out/log").read_text().splitlines()) == ["1", "2"]
    assert (one.stat().st_mode & 0o777, one.parent.stat().st_mode & 0o777) == (0o640, 0o750)
    assert await (await port.start(told("echo 3; echo 4 >&2", stdout=str(one)))).wait() == 0
    assert one.read_text() == "1\n3\n4\n", "it is added, and both streams go there"
    with pytest.raises(OSError, match="Is a directory"):
        await port.start(told("echo 5", stdout=str(tmp_path)))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device or address"):
        await asyncio.wait_for(port.start(told("echo 5", stdout=str(tmp_path / "pipe"))), 20.0)
    assert await (await port.start(told("echo 6; echo 7 >&2", stdout="/dev/full"))).wait() == 0
    log = (tmp_path / "out/log").read_text()
    assert "[covey: /dev/full gets nothing more: No space left on device]" in log and log.count("7\n") == 1


def test_who_writes_on_after_a_ranks_end_does_not_keep_it_from_being_told() -> None:
    """A shim moves what was in the pipes when its rank ended, and then writes down how."""
    streams, moved = object.__new__(shim.Streams), 0

    def pump(pipe: int) -> int:
        nonlocal moved
        moved += 4096
        assert moved <= 2 * shim.PIPE_BYTES, "it goes on as long as somebody writes"
        return 4096

    streams.files, streams.pump = dict.fromkeys((3, 4)), pump  # type: ignore[method-assign, assignment]
    streams.drain()
    assert moved == 2 * shim.PIPE_BYTES, "all that may be in two pipes"


async def test_a_command_inherits_no_files_and_has_a_session_of_its_own(port: RealProcesses, tmp_path: Path) -> None:
    leak = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leak, True)
    script = """import os
print(sorted(map(int, os.listdir('/proc/self/fd')))[:4], os.getsid(0) == os.getpid() == os.getpgrp())"""
    await (await port.start(command(tmp_path, sys.executable, "-c", script))).wait()
    os.close(leak)
    assert (tmp_path / "out/log").read_text() == "[0, 1, 2, 3] True\n"


@pytest.mark.parametrize(
    ("argv", "at_fault"), [(("/no/such/file",), "/no/such/file"), (("/etc/passwd",), "/etc/passwd"), ((), "empty")]
)
async def test_what_cannot_be_started_says_what_is_at_fault(
    port: RealProcesses, tmp_path: Path, argv: tuple[str, ...], at_fault: str
) -> None:
    with pytest.raises(OSError, match=at_fault):
        await port.start(command(tmp_path, *argv))


async def test_a_directory_that_is_not_there_and_odd_arguments_are_os_errors(
    port: RealProcesses, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="/no/such/directory"):
        await port.start(command(tmp_path, "/bin/true", cwd="/no/such/directory"))
    with pytest.raises(OSError, match="null"):
        await port.start(command(tmp_path, "/bin/echo", "a\0b"))
    with pytest.raises(OSError):
        await port.start(command(tmp_path, "/bin/echo", "x" * (3 << 20)))


@both_loops
@pytest.mark.parametrize("pidfd", [True, False])
async def test_ends_are_told_as_they_were(pidfd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pidfd:
        monkeypatch.setattr(processes_module.os, "pidfd_open", _unknown_call)  # type: ignore[attr-defined]
        monkeypatch.setattr(processes_module, "POLL_S", 0.002)
    port = RealProcesses(ProgramBase("h1", str(tmp_path), str(tmp_path), "127.0.0.1"))
    exited = await port.start(command(tmp_path, "/bin/sh", "-c", "exit 7"))
    killed = await port.start(command(tmp_path, "/bin/sh", "-c", "kill -KILL $$"))
    assert list(await asyncio.gather(exited.wait(), killed.wait(), exited.wait())) == [7, -9, 7]


def _unknown_call(_pid: int) -> int:
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize("found", [False, True])
async def test_a_signal_reaches_one_process_and_kill_its_group_and_then_nobody(
    port: RealProcesses, tmp_path: Path, found: bool
) -> None:
    script = "trap 'echo asked' TERM; sleep 600 & echo $!; while :; do wait; done"
    started = await port.start(command(tmp_path, "/bin/sh", "-c", script))
    await until(lambda: (tmp_path / "out/log").read_text().strip())
    sleeping = int((tmp_path / "out/log").read_text())
    ticks = start_ticks(sleeping)
    assert ticks is not None
    other = RealProcesses(ProgramBase("h1", str(tmp_path), str(tmp_path), "127.0.0.1"))
    process = other.find(started.id) if found else started
    assert process is not None
    process.signal(signal.SIGTERM)
    await until(lambda: "asked" in (tmp_path / "out/log").read_text())
    assert is_alive(ProcessId(sleeping, ticks))
    process.kill()
    assert await started.wait() == -signal.SIGKILL
    await until(lambda: not is_alive(ProcessId(sleeping, ticks)))
    process.signal(signal.SIGTERM)
    process.kill()
    assert port.find(process.id) is None


async def test_a_process_is_found_by_number_and_start_time_only(port: RealProcesses, tmp_path: Path) -> None:
    process = await port.start(command(tmp_path, "/bin/sleep", "600"))
    assert port.find(process.id) is process
    other = RealProcesses(ProgramBase("h1", str(tmp_path), str(tmp_path), "127.0.0.1"))
    for each in (port, other):
        assert each.find(ProcessId(process.id.pid, process.id.started + 1)) is None
    found = other.find(process.id)
    assert found is not None
    assert found.id == process.id
    waiting = asyncio.ensure_future(found.wait())
    found.signal(signal.SIGKILL)
    assert await waiting is None
    assert await process.wait() == -signal.SIGKILL
    assert await found.wait() is None
    found.signal(signal.SIGKILL)
    assert other.find(process.id) is None


async def test_waiting_can_be_given_up_without_losing_the_end(port: RealProcesses, tmp_path: Path) -> None:
    process = await port.start(command(tmp_path, "/bin/sleep", "600"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await process.wait()
    process.signal(signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL


def test_a_process_with_an_odd_name_is_read_right(tmp_path: Path) -> None:
    odd = tmp_path / "a) (b c"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "600"]) as process:
        ticks = start_ticks(process.pid)
        assert ticks is not None
        assert is_alive(ProcessId(process.pid, ticks))
        assert ProcessId(process.pid, ticks) in descendants(os.getpid())
        process.kill()
        process.wait()
        assert not is_alive(ProcessId(process.pid, ticks))


ADOPTING = """
import asyncio, os, sys
from agent.ports.processes.processes import ProgramBase, RealProcesses
from agent.ports.processes.procfs import descendants
from covey.ports.processes import Command
async def main():
    port = RealProcesses(ProgramBase("h1", sys.argv[1], sys.argv[1], ""))
    port.adopt()
    script = "setsid sleep 600 & setsid sh -c 'trap \\"\\" TERM; sleep 600 & wait' & (setsid true &) ; sleep 0.05"
    process = await port.start(Command(argv=("/bin/sh", "-c", script), cwd="/", env={}, output=sys.argv[1] + "/o"))
    assert await process.wait() == 0
    assert len(descendants(os.getpid())) >= 3
    print(await port.end_strays(0.05) >= 3, descendants(os.getpid()))
asyncio.run(main())
"""


def test_who_adopts_ends_every_descendant_and_leaves_no_zombie(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ADOPTING, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True []\n", "")


class Nothing(msgspec.Struct):
    """No configuration."""


async def test_a_program_that_does_not_exist_ends_with_2_and_says_why_in_its_log(
    port: RealProcesses, tmp_path: Path
) -> None:
    process = await port.start_program("no-such-program", "x-1", Nothing())
    assert not process.loaded
    assert await process.wait() == 2
    assert "program not started" in (tmp_path / "logs/x-1.log").read_text()


async def test_last_words_are_not_those_of_an_earlier_start(port: RealProcesses) -> None:
    first = await port.start_program("no-such-program", "x-1", Nothing())
    await first.wait()
    assert port.last_words("x-1") == "KeyError: 'no-such-program'"
    assert await why_ended(port, "x-1", first) == "x-1 ended: KeyError: 'no-such-program'"
    second = await port.start_program("no-such-program", "x-1", Nothing())
    second.signal(9)  # it has not even read what it is to run
    assert await second.wait() == -9
    assert port.last_words("x-1") == ""
    assert await why_ended(port, "x-1", second) == "x-1 was killed by signal 9 (SIGKILL); see logs/x-1.log"
    assert port.last_words("another") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run before others")
def test_what_runs_for_users_has_no_privilege_over_them(tmp_path: Path) -> None:
    output = tmp_path / "out"
    code = textwrap.dedent(f"""
        import asyncio, os, sys
        from agent.ports.processes.processes import ProgramBase, RealProcesses
        from covey.ports.processes import Command
        os.setpriority(os.PRIO_PROCESS, 0, -5)
        async def main():
            script = "sleep 0.2; nice"
            command = Command(argv=("sh", "-c", script), cwd="/", env=dict(os.environ), output={str(output)!r})
            base = ProgramBase("h1", {str(tmp_path)!r}, {str(tmp_path)!r}, "127.0.0.1")
            process = await RealProcesses(base).start(command)
            sys.exit(await process.wait())
        asyncio.run(main())
    """)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert output.read_text().split() == ["0"]


async def test_processes_are_ended_by_their_environment_whoevers_children_they_are(
    port: RealProcesses, tmp_path: Path
) -> None:
    away = "setsid sleep 600 & exec sleep 600"
    ours = await port.start(command(tmp_path, "/bin/sh", "-c", away, MARK="this", MORE="1"))
    other = await port.start(command(tmp_path, "/bin/sleep", "600", MARK="thisthat"))
    await until(lambda: len(holding({"MARK": "this"})) == 2)
    assert holding({"MARK": "this", "MORE": "2"}) == []
    assert holding({}) == [], "to hold nothing in particular is no mark"
    assert await port.end_holding({"MARK": "this", "MORE": "1"}) >= 2
    assert holding({"MARK": "this"}) == []
    assert await ours.wait() == -signal.SIGKILL
    assert is_alive(other.id)
    other.signal(signal.SIGKILL)
    assert await other.wait() == -signal.SIGKILL


GROUPS = Path("/proc/self/autogroup").exists()
SPREADS = """
import os, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
if not os.fork():
    os.setsid()
    time.sleep(60)
print("begun", flush=True)
time.sleep(60)
"""


async def test_a_rank_that_may_be_let_go_again_starts_held_back(port: RealProcesses, tmp_path: Path) -> None:
    held = msgspec.structs.replace(command(tmp_path, "/bin/sleep", "60"), run=str(tmp_path / "r"), held_back=True)
    process = await port.start(held)
    try:
        if shim.may_be_let_go():
            await until(lambda: os.getpriority(os.PRIO_PROCESS, process.id.pid) == 19)
        if GROUPS:
            await until(lambda: held_back._group_is_held(process.id.pid))
        assert await port.let_go(process.id.pid)
        assert os.getpriority(os.PRIO_PROCESS, process.id.pid) == max(0, os.getpriority(os.PRIO_PROCESS, 0))
        assert not held_back._group_is_held(process.id.pid)
    finally:
        process.signal(signal.SIGKILL)
        await process.wait()
    assert await port.let_go(process.id.pid), "one that is gone"


@pytest.mark.skipif(not shim.may_be_let_go(), reason="this user may raise no priority again")
def test_who_is_let_go_is_so_with_all_that_it_started_meanwhile() -> None:
    """Threads and children, also one with a session of its own, inherit what it had."""
    process = subprocess.Popen([sys.executable, "-c", SPREADS], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    found = held_back.tree(process.pid)
    threads = [thread for one in found for thread in held_back._threads(one)]
    try:
        assert len(found) == 2 and len(threads) == 3
        for thread in threads:
            os.setpriority(os.PRIO_PROCESS, thread, 19)
        assert held_back.let_go(process.pid)
        own = max(0, os.getpriority(os.PRIO_PROCESS, 0))
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {own}
    finally:
        for one in reversed(found):
            os.kill(one, signal.SIGKILL)
        process.wait()
        process.stdout.close()

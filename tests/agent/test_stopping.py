"""Ranks that are asked to stop, as real processes: who is told, in which order, and what becomes of the others."""

import os
import signal
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from agent.jobs.runner import SupervisedRunner
from agent.jobs.socket.jobs_socket import JobSocket
from covey.core.ids import JobId
from covey.wire.job import Frame
from plugins.base import JobPeer
from plugins.facts import RanksEnded
from tests.agent.here import Here, here, ranks, until

J1 = JobId("j1")

TRAINER = textwrap.dedent("""
    import multiprocessing, os, signal, sys, time

    asked = []

    def ask(number, frame):
        with open(os.environ["COVEY_PREEMPT_FILE"]) as notice:  # it is there before SIGTERM
            asked.append(notice.read())

    def square(number):
        time.sleep(0.01)
        return number * number

    if __name__ == "__main__":
        # As a data loader does it: the workers have no handler of their own.
        with multiprocessing.get_context("fork").Pool(4) as pool:
            signal.signal(signal.Signals["SIG" + os.environ.get("COVEY_STOP_SIGNAL", "TERM")], ask)
            print("training", flush=True)
            while not asked:
                assert pool.map(square, range(8)) == [n * n for n in range(8)]
            saved = pool.map_async(square, range(100)).get(timeout=5)  # would hang, or break, without its workers
            print("saved", sum(saved), asked[0], flush=True)
        sys.exit(75)
""")
MARK = f"stopping-{os.getpid()}"
SAVED = "saved 328350 preempted by bob"


@pytest.fixture
def short() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="covey-", ignore_cleanup_errors=True) as directory:
        Path(directory, "train.py").write_text(TRAINER)
        yield directory


@pytest.fixture
async def host(short: str) -> AsyncIterator[Here]:
    async with here(short) as found:
        yield found


class Stopped:
    """A job of one rank that was started and is asked to stop once it has said `training`."""

    def __init__(self, host: Here, short: str) -> None:
        self.host, self.runner, self.python = host, host.runner(), f"{sys.executable} {short}/train.py"

    async def play(self, *argv: str, grace_s: float = 20.0) -> RanksEnded:
        await self.begin(*argv)
        return await self.ask(grace_s)

    async def begin(self, *argv: str, stop_signal: str = "TERM") -> None:
        spec = ranks("j1", *argv, MARK=MARK, PATH=os.environ["PATH"])
        await self.runner.start(msgspec.structs.replace(spec, stop_signal=stop_signal))
        await until(lambda: "training" in self.output() and bool(self.runner.running()))

    async def ask(self, grace_s: float = 20.0) -> RanksEnded:
        await self.runner.stop(J1, 1, grace_s, "preempted by bob")
        await until(lambda: self.host.told(RanksEnded), 30.0)
        assert left() == []
        return self.host.told(RanksEnded)[0]

    def output(self) -> str:
        try:
            with open(self.runner.log_path(J1, 0)) as log:
                return log.read()
        except FileNotFoundError:
            return ""


def left() -> list[str]:
    """The live processes of these tests."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if f"MARK={MARK}".encode() in file.read():
                    found.append(pid)
        except OSError:
            continue
    return found


async def test_a_trainer_saves_with_the_help_of_its_four_workers_since_only_it_is_asked(host: Here, short: str) -> None:
    stopped = Stopped(host, short)
    told = await stopped.play(*stopped.python.split())
    assert SAVED in stopped.output() and "Traceback" not in stopped.output()
    assert (told.codes, told.reason) == ({0: 75}, "preempted by bob")


async def test_a_trainer_that_is_suspended_with_its_workers_goes_on_to_save(host: Here, short: str) -> None:
    stopped = Stopped(host, short)
    await stopped.begin(*stopped.python.split())
    (pid,) = stopped.runner.running()[J1, 1].values()
    os.killpg(pid, signal.SIGSTOP)
    told = await stopped.ask()
    assert SAVED in stopped.output() and told.codes == {0: 75}


async def test_a_shell_with_a_trap_passes_it_on_as_it_likes(host: Here, short: str) -> None:
    stopped = Stopped(host, short)
    script = f"trap 'kill -TERM $child' TERM; {stopped.python} & child=$!; wait; wait $child; echo code $?; exit 3"
    told = await stopped.play("/bin/sh", "-c", script)
    assert SAVED in stopped.output() and "code 75" in stopped.output()
    assert told.codes == {0: 3}


@pytest.mark.parametrize(("wrapped", "name"), [("{}; echo never", "USR1"), ("sh -c '{}; true'; true", "TERM")])
async def test_what_a_shell_without_a_trap_was_running_is_asked_in_its_place(
    host: Here, short: str, wrapped: str, name: str
) -> None:
    """The shell dies of the job's stop signal; the trainer it waited for gets its own and the rest of the grace, its
    workers none."""
    stopped = Stopped(host, short)
    await stopped.begin("/bin/sh", "-c", wrapped.format(stopped.python), stop_signal=name)
    told = await stopped.ask()
    assert SAVED in stopped.output() and "never" not in stopped.output()
    assert told.codes == {0: -signal.Signals[f"SIG{name}"]}


async def test_who_ignores_it_is_killed_with_all_it_started_also_in_other_sessions(host: Here, short: str) -> None:
    stopped = Stopped(host, short)
    deaf = "trap '' TERM; sleep 600 & setsid sleep 600 & echo training; while :; do sleep 600; done"
    told = await stopped.play("/bin/sh", "-c", deaf, grace_s=0.3)
    assert told.codes == {0: -signal.SIGKILL}


async def test_what_a_shell_left_running_is_killed_when_the_grace_is_over(host: Here, short: str) -> None:
    stopped = Stopped(host, short)
    deaf = "sh -c 'trap \"\" TERM; echo training; while :; do sleep 600; done'; true"
    told = await stopped.play("/bin/sh", "-c", deaf, grace_s=0.5)
    assert told.codes == {0: -signal.SIGTERM}


SAVER = """
import sys, time
import covey
with covey.join() as job:
    job.defer_stop()
    print("training", flush=True)
    while not job.stopping or job.grace_left_s > 1e9:  # the file and SIGTERM may come before the agent's word
        time.sleep(0.01)
    assert 0 < (left := job.grace_left_s) <= 1.0, left
    assert 2.5 < (more := job.extend_grace(2.5)) <= 3.5, more
    try:
        job.extend_grace(100)
    except covey.CoveyError as error:
        print(error.what, error.why, sep=": ", flush=True)
    time.sleep(1.5)
    print("saved", flush=True)
"""


async def test_a_job_hears_of_it_and_may_ask_for_more_time_once(host: Here, short: str) -> None:
    async def deliver(_peer: JobPeer, _frame: Frame) -> None:
        raise AssertionError("no plugin is asked")

    stopped = Stopped(host, short)
    runner: SupervisedRunner = stopped.runner
    jobs = JobSocket(host.env, runner, host.facts.append, deliver)
    runner.on_stopping = jobs.say_stopping
    await jobs.start()
    try:
        told = await stopped.play(sys.executable, "-c", SAVER, grace_s=1.0)
        assert (told.codes, stopped.output().split("\n")[1:]) == (
            {0: 0},
            ["the time to end was not extended: it was extended before, or cannot be", "saved", ""],
        )
    finally:
        await jobs.stop()

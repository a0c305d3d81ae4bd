"""The job side: joining an agent, and surviving whatever happens to it."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import covey
from covey.core.errors import CoveyError
from covey.core.ids import HostId, JobId
from covey.core.version import VERSION
from covey.healing.kernels import kernel
from covey.job.client import STEPS_WAITING_MAX, JobClient
from covey.job.this_job import join
from covey.kernel.this_process import OtherProcess
from covey.wire.frames import pack
from covey.wire.job import PROTOCOL, AggregatorAt, AggregatorLost, Joined, Stopping
from plugins.facts import JobJoined, TableUsed
from tests.agent.here import until
from tests.covey.agents import J1, Agent
from tests.quiet import quiet


def test_outside_a_job_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVEY_SOCKET", raising=False)
    with pytest.raises(CoveyError, match="COVEY_SOCKET is not set") as refused:
        covey.join()
    assert str(refused.value).splitlines()[-1].startswith("next: agentctl submit")


@pytest.mark.parametrize("name", ["COVEY_JOB_ID", "COVEY_RANK", "COVEY_EPOCH", "COVEY_TABLES", "COVEY_TOKEN"])
def test_half_an_environment_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    environ = {"COVEY_SOCKET": "/x", "COVEY_JOB_ID": "j1", "COVEY_RANK": "0", "COVEY_WORLD_SIZE": "1"}
    environ |= {"COVEY_EPOCH": "1", "COVEY_TABLES": "1", "COVEY_TOKEN": "t"}
    del environ[name]
    with pytest.raises(CoveyError, match=name):
        JobClient(environ)


async def test_a_rank_joins_and_reports_its_steps(agent: Agent) -> None:
    job = await agent.client(COVEY_HOST="")
    assert (job.id, job.rank, job.world_size, job.host, job.connected) == ("j1", 1, 2, "h1", True)
    job.step(loss=0.5)
    await until(lambda: len(agent.steps()) == 1)
    job.step(step_s=2.0, compute_s=1.5, communicate_s=0.5)
    await until(lambda: len(agent.steps()) == 2)
    job.step(10, accuracy=1)
    await until(lambda: len(agent.steps()) == 3)
    assert [step.step for step in agent.steps()] == [0, 1, 10]
    assert agent.steps()[0].metrics == {"loss": 0.5}
    assert (agent.steps()[1].step_s, agent.steps()[1].compute_s, agent.steps()[1].communicate_s) == (2.0, 1.5, 0.5)
    assert 0 <= agent.steps()[2].step_s < 5
    await asyncio.to_thread(job.close)
    await until(lambda: not agent.socket.peers(J1))


async def test_a_step_of_a_state_counts_once_with_what_is_told_in_it(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.job.client.GOODBYE_S", 10.0)  # here others need the processors, too
    job = await agent.client(COVEY_RANK="0", COVEY_WORLD_SIZE="1")
    state = await asyncio.to_thread(job.state, dict, lambda *_: None)
    await until(lambda: job.connected)  # only the newest step is kept before
    for step in state.steps(3):
        job.step(loss=3.0 - step)
        job.step(step, lr=0.5, input_s=0.0)
    job.step(accuracy=0.9)
    await asyncio.to_thread(job.close)
    await until(lambda: len(agent.steps()) == 4)
    told = [(each.step, each.metrics, each.step_s > 0) for each in agent.steps()]
    assert told == [
        *((step, {"loss": 3.0 - step, "lr": 0.5}, True) for step in range(3)),
        (2, {"accuracy": 0.9}, False),
    ]


@pytest.mark.parametrize(("how", "says"), [("well", True), ("pushed nothing", False), ("error", False)])
async def test_a_process_that_has_pushed_says_when_it_leaves_well(agent: Agent, how: str, says: bool) -> None:
    job = await agent.client(COVEY_RANK="0", COVEY_WORLD_SIZE="1")
    if how != "pushed nothing":
        job.tensors._ways["g"] = None
    (peer,) = agent.socket.peers(J1)
    if how == "error":
        with pytest.raises(KeyError):
            await asyncio.to_thread(_fails, job)
    await asyncio.to_thread(job.close)
    await until(lambda: not agent.socket.peers(J1))
    assert peer.leaves is says


def _fails(job: JobClient) -> None:
    with job:
        raise KeyError


async def test_a_wrong_token_is_an_error_with_the_agents_words(agent: Agent) -> None:
    with pytest.raises(CoveyError, match="COVEY_TOKEN is wrong"):
        await agent.client(COVEY_TOKEN="guess")


async def test_a_script_goes_on_while_its_agent_is_away_and_its_newest_step_arrives_after(agent: Agent) -> None:
    job = await agent.client()
    await agent.socket.stop()
    await until(lambda: not job.connected)
    for number in range(100):
        job.step(loss=float(number))
    await agent.restart()
    await until(lambda: agent.steps())
    assert [(step.step, step.metrics) for step in agent.steps()] == [(99, {"loss": 99.0})]
    assert JobJoined(J1, 1, 1, kernel()) in agent.facts
    await asyncio.to_thread(job.close)


async def test_a_script_that_starts_while_the_agent_is_away_joins_later(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await agent.socket.stop()
    for name, value in agent.environ().items():
        monkeypatch.setenv(name, value)
    job = await asyncio.to_thread(join, 0.02)
    assert (job.connected, job.rank, job.host) == (False, 1, "h1")
    await agent.restart()
    await until(lambda: job.connected)
    await asyncio.to_thread(job.close)


async def test_no_step_waits_for_an_agent_that_does_not_read(agent: Agent) -> None:
    class Stuck:
        """A server that takes a connection, welcomes it, and never reads again."""

        def __init__(self, path: str) -> None:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.bind(path)
            self.socket.listen()
            self.thread = threading.Thread(target=self.run)
            self.thread.start()
            self.connection: socket.socket | None = None

        def run(self) -> None:
            self.connection, _ = self.socket.accept()
            self.connection.sendall(pack(Joined(HostId("h1"), J1, 1, 2, 1)))

    path = f"{agent.host.env.run_dir}/stuck.sock"
    stuck = Stuck(path)
    job = await agent.client(COVEY_SOCKET=path)
    began_s = time.monotonic()
    for _ in range(20_000):
        job.step(loss=1.0)
    assert time.monotonic() - began_s < 5.0
    assert len(job._steps) <= STEPS_WAITING_MAX
    began_s = time.monotonic()
    await asyncio.to_thread(job.close)
    assert time.monotonic() - began_s < 2.0
    assert stuck.connection is not None
    stuck.connection.close()
    stuck.socket.close()


async def test_an_agent_that_speaks_otherwise_is_named_with_both_versions(agent: Agent) -> None:
    other = Joined(HostId("h1"), J1, 1, 2, 1, PROTOCOL + 1, "9.8.7")
    path = f"{agent.host.env.run_dir}/other.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        job = JobClient(agent.environ(COVEY_SOCKET=path))
        connection, _ = await asyncio.to_thread(listening.accept)
        with connection:
            connection.sendall(pack(other))
            with pytest.raises(CoveyError) as raised:
                await asyncio.to_thread(job.wait_joined, 10.0)
    assert not job.connected
    assert (raised.value.what, raised.value.next.split()[0]) == ("rank 1 cannot join job j1", "install")
    spoken = f"covey-agent 9.8.7 speaks version {PROTOCOL + 1} of jobs.sock, covey-job {VERSION} here speaks {PROTOCOL}"
    assert raised.value.why == spoken


async def test_what_an_agent_must_know_is_said_again_to_the_next_one(agent: Agent) -> None:
    job = await agent.client()
    lost = [AggregatorLost(4, "reset by peer"), AggregatorLost(9, "reset by peer", 2)]
    job._owner_lost(4, "reset by peer", 0)
    job._owner_lost(9, "reset by peer", 2)
    job._table_wanted(2)
    used = TableUsed(J1, 1, 2)
    await until(lambda: agent.heard == lost and used in agent.facts)
    await agent.restart()
    await until(lambda: agent.heard == lost and used in agent.facts)
    assert used in agent.socket.facts(), "a plugin that starts later is told too"
    (peer,) = agent.socket.peers(J1)
    peer.send(AggregatorAt(J1, 5, HostId("h2"), "127.0.0.1:1", b"s" * 16))
    await until(lambda: job._owners.all())
    job._owner_lost(4, "an old word", 0)
    await agent.restart()
    await until(lambda: agent.socket.peers(J1))
    await until(lambda: agent.heard == [lost[1]] and used in agent.facts)
    await quiet()
    assert agent.heard == [lost[1]]
    await asyncio.to_thread(job.close)


async def test_tensors_are_told_where_to_go_also_when_they_are_made_later(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tensors:
        def __init__(
            self, job: JobId, rank: int, world_size: int, lost: object, undecided: bool, **others: object
        ) -> None:
            self.made_for, self.moves, self.closed = (job, rank, world_size), list[AggregatorAt](), False
            self.communicate_s, self.undecided, self.saves = 0.0, undecided, SimpleNamespace()

        def moved(self, at: AggregatorAt) -> None:
            self.moves.append(at)

        may_be_awaited = False

        def gone(self, ranks: object) -> None:
            self.told = ranks

        def close(self) -> None:
            self.closed = True

    import covey.job.tensors

    monkeypatch.setattr(covey.job.tensors, "TensorClient", Tensors)
    job = await agent.client()
    await until(lambda: agent.socket.peers(J1))
    (peer,) = agent.socket.peers(J1)

    def at(epoch: int, of: str = "j1") -> AggregatorAt:
        return AggregatorAt(JobId(of), epoch, HostId("h2"), "127.0.0.1:1", b"s" * 16)

    peer.send(at(5))
    await until(lambda: job._owners.all() == [at(5)])
    tensors = job.tensors
    assert isinstance(tensors, Tensors)
    assert tensors.made_for == ("j1", 1, 2) and tensors.undecided
    for move in (at(4), at(9, "j2"), at(6)):
        peer.send(move)
    await until(lambda: len(tensors.moves) == 2)
    assert tensors.moves == [at(5), at(6)]
    tensors.communicate_s = 3.0
    job.step(step_s=4.0)
    await until(lambda: agent.steps())
    assert (agent.steps()[0].compute_s, agent.steps()[0].communicate_s) == (1.0, 3.0)
    await asyncio.to_thread(job.close)
    assert tensors.closed


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", pack(AggregatorLost(1, "x")), b""])
async def test_an_agent_that_talks_nonsense_is_left_and_tried_again(agent: Agent, garbage: bytes) -> None:
    path = f"{agent.host.env.run_dir}/odd.sock"

    async def talk(stream: object) -> None:
        calls.append(1)
        await stream.write(garbage)  # type: ignore[attr-defined]
        if len(calls) > 1:
            await asyncio.sleep(10)

    calls: list[int] = []
    listener = await agent.host.env.bytes.listen(f"unix:{path}", talk)
    job = JobClient(agent.environ(COVEY_SOCKET=path))
    await until(lambda: len(calls) >= 2)
    assert not job.connected
    job.step(loss=1.0)
    await asyncio.to_thread(job.close)
    await listener.close()


def _exit_status_of_child(job: JobClient) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(OtherProcess, match=r"belong to process \d+.*\nnext: .*covey\.join\(\)"):
                job.step(loss=-1.0)
            with job:  # whose end waits for the other ranks, in the process that is one
                job.hooked("", "a hook of ours ends no script")
            status = 0 if job._wakes.closed else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_a_forked_data_loader_leaves_the_connection_to_its_parent(agent: Agent) -> None:
    job = await agent.client()
    assert _exit_status_of_child(job) == 0
    job.step(loss=1.0)
    await until(lambda: agent.steps())
    assert [step.metrics["loss"] for step in agent.steps()] == [1.0]
    assert job.connected
    await asyncio.to_thread(job.close)


@pytest.fixture
def python() -> Iterator[list[str]]:
    yield [sys.executable, "-W", "error", "-c"]


def test_importing_covey_costs_no_numpy_and_nothing_of_the_agent(python: list[str]) -> None:
    code = """import covey, sys
covey.join, covey.Job
heavy = ('numpy', 'torch', 'asyncio', 'agent', 'plugins', 'covey.job.tensors')
print([name for name in heavy if name in sys.modules])"""
    assert subprocess.run([*python, code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_name_that_covey_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'jion'"):
        covey.jion  # noqa: B018
    names = ["Adam", "CoveyError", "Job", "Moments", "RankLeft", "RemoteMemory", "RemoteMemoryError", "SGD"]
    names += ["TensorError", "join"]
    assert sorted(covey.__all__) == names and all(callable(getattr(covey, name)) for name in names)
    assert covey.Job is JobClient


@pytest.mark.parametrize(
    "code",
    [
        "import covey\njob = covey.join()\njob.step(accuracy=0.97)\n",
        "from covey.job.this_job import of_process\nof_process().step(accuracy=0.97)\n",
    ],
)
async def test_the_last_figures_leave_when_a_script_just_ends(agent: Agent, python: list[str], code: str) -> None:
    """The second one has not joined yet when it ends, as hooks have not in a script of three steps."""
    environ = {**os.environ, **agent.environ()}
    script = await asyncio.create_subprocess_exec(*python, code, env=environ)
    assert await script.wait() == 0
    await until(lambda: agent.steps())
    assert agent.steps()[-1].metrics == {"accuracy": 0.97}


# ---- asked to end ----


async def test_a_script_sees_that_it_is_asked_to_end_by_its_agent_or_else_by_a_file(
    agent: Agent, tmp_path: Path
) -> None:
    with await agent.client(COVEY_PREEMPT_FILE=f"{tmp_path}/preempt") as job:
        assert (job.stopping, job.grace_left_s) == (False, float("inf"))
        agent.runner.asked = Stopping(30.0, "preempted")
        agent.socket.say_stopping(J1, 1)
        await until(lambda: job.stopping)
        assert 25.0 < job.grace_left_s <= 30.0
    with await agent.client(COVEY_PREEMPT_FILE=f"{tmp_path}/preempt", COVEY_RANK="0") as other:
        await until(lambda: other.grace_left_s < 31.0)
    agent.runner.asked = None
    with await agent.client(COVEY_PREEMPT_FILE=f"{tmp_path}/preempt") as alone:
        await agent.socket.stop()
        assert not alone.stopping
        os.close(os.open(f"{tmp_path}/preempt", os.O_CREAT))
        assert alone.stopping
        with pytest.raises(CoveyError, match=r"did not answer|is not running"):
            await asyncio.to_thread(alone.extend_grace, 5.0, 0.05)


async def test_more_time_is_refused_in_words(agent: Agent) -> None:
    with await agent.client() as job, pytest.raises(CoveyError, match="no host asked"):
        await asyncio.to_thread(job.extend_grace, 5.0)


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda job: job.carried(0), "the job has no state to carry"),
        (lambda job: job.data(4), "load= is missing"),
        (lambda job: job.table().update("w", None, None), "no rank was entered"),
    ],
)
async def test_what_a_script_asks_too_early_is_refused_in_three_lines(agent: Agent, ask: Any, why: str) -> None:
    with await agent.client() as job, pytest.raises(CoveyError, match=why) as refused:
        await asyncio.to_thread(ask, job)
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize("before", [True, False])
async def test_a_rank_that_cannot_be_healed_any_more_says_so_whenever_it_joins(agent: Agent, before: bool) -> None:
    """Before and after it has registered its state."""
    from agent.jobs.successors import NEVER

    job = await agent.client(COVEY_RANK="0", COVEY_WORLD_SIZE="1")
    if before:
        job.heals()
    state = await asyncio.to_thread(job.state, dict, lambda *_: None)
    if not before:
        await until(lambda: agent.runner.healing == {0: 0})
        job.heals()
    state.done()
    await until(lambda: len(agent.steps()) == 1)  # after all that was said before
    assert agent.runner.healing == {0: NEVER}
    await asyncio.to_thread(job.close)

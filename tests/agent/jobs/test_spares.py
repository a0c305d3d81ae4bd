"""Processes that wait to become a rank: what can become what, a supervisor that takes one, in the simulator and as real
processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.jobs.spares import spares
from agent.jobs.spares.frames import KeepSpares, SparesConfig, SparesStatus, common, decoder, unlike
from agent.jobs.supervision import HealRank, RankStart, SupervisorConfig, SupervisorState, read_state
from agent.jobs.supervisor import supervisor
from agent.ports.processes.processes import holding
from agent.ports.processes.shim import GOES_FIRST, ORDINARY
from agent.ports.processes.shims import start_waiting
from chaos.world.host import SimHost
from chaos.world.spares import SimSpare
from chaos.world.world import World
from covey import hooks
from covey.core.ids import JobId
from covey.hooks import warm
from covey.ports.env import Env
from covey.ports.processes import Command
from covey.wire.frames import pack, read_frame
from plugins.base import RanksSpec
from plugins.facts import RankReplaced, RanksEnded, RanksStarted, SparesReady
from tests.agent.here import Here, here, ranks, until
from tests.agent.jobs.test_successors import last_word, meet

J1 = JobId("j1")
COMMAND = Command(argv=("train",), cwd="/", env={"RANK": "1", "A": "1", "COVEY_TOKEN": "t"}, output="/log", run="/1.1")


# ---- what can become what ----


def test_a_spare_can_be_any_rank_of_its_job_and_nothing_else() -> None:
    other = {"RANK": "3", "A": "1", "COVEY_TOKEN": "t", "COVEY_GPUS": "g7", "CUDA_VISIBLE_DEVICES": "g7"}
    assert unlike(COMMAND, msgspec.structs.replace(COMMAND, env=other, run="/1.3.2", output="/other")) == ""
    assert "another A" in unlike(COMMAND, msgspec.structs.replace(COMMAND, env={**other, "A": "2"}))
    assert "another OMP_NUM_THREADS" in unlike(
        COMMAND, msgspec.structs.replace(COMMAND, env={**other, "OMP_NUM_THREADS": "8"})
    )
    assert "another COVEY_TOKEN" in unlike(COMMAND, msgspec.structs.replace(COMMAND, env={**other, "COVEY_TOKEN": "u"}))
    assert "another program" in unlike(COMMAND, msgspec.structs.replace(COMMAND, argv=("train", "-v")))
    assert "another directory" in unlike(COMMAND, msgspec.structs.replace(COMMAND, cwd="/tmp"))


def test_what_waits_does_not_know_which_rank_it_is_but_is_found_with_its_epoch() -> None:
    env = {"RANK": "1", "COVEY_RANK": "1", "COVEY_JOB_ID": "j1", "COVEY_EPOCH": "2", "COVEY_TOKEN": "t", "PATH": "/bin"}
    assert common(env) == {"COVEY_JOB_ID": "j1", "COVEY_EPOCH": "2", "COVEY_TOKEN": "t", "PATH": "/bin"}


# ---- in the simulator ----


class Spared:
    """A story of rank 1 on a simulated host, its supervisor, and a keeper of spares. Each process of the rank lives for
    `lives_s` and is lost; the last one ends well."""

    def __init__(self, world: World, lives_s: list[float]) -> None:
        self.world, self.lives_s = world, lives_s
        self.numbers: list[str] = []
        self.twice = False
        world.programs = lambda: {"supervisor": supervisor.PROGRAM, "spares": spares.PROGRAM}
        world.user_programs["train"] = self._train
        self.host: SimHost = world.add_host("h1")
        self.spares = f"unix:{self.host.run_dir}/spares.sock"

    async def _train(self, env: Env, command: Command) -> int:
        alive = [pid for pid, process in self.host.processes.items() if process.alive and self._is_rank(pid)]
        self.twice |= len(alive) > 1
        self.numbers.append(command.env.get("COVEY_INCARNATION", "0"))
        turn = len(self.numbers) - 1
        await asyncio.sleep(self.lives_s[min(turn, len(self.lives_s) - 1)])
        return 0 if turn >= len(self.lives_s) - 1 else -9

    def _is_rank(self, pid: int) -> bool:
        return pid in self.host.commands and "RANK" in self.host.commands[pid].env

    def command(self) -> Command:
        env = {"RANK": "1", "COVEY_JOB_ID": "j1", "COVEY_EPOCH": "1", "COVEY_TOKEN": "t"}
        return Command(argv=("train",), cwd="/", env=env, output="/log", run="/1.1")

    def supervised(self) -> SupervisorConfig:
        return SupervisorConfig(
            job=J1,
            epoch=1,
            ranks=(RankStart(1, self.command()),),
            grace_s=5.0,
            state="jobs/j1/1.state",
            preempt="jobs/j1/1.preempt",
            socket=f"unix:{self.host.run_dir}/sup.sock",
            spares=self.spares,
        )

    def kept(self) -> SparesConfig:
        return SparesConfig(job=J1, epoch=1, command=self.command(), modules=("numpy",), socket=self.spares)


def play(lives_s: list[float], story: Callable[[Env, Spared], Awaitable[None]], seed: int = 1) -> Spared:
    with World(seed) as world:
        spared, done = Spared(world, lives_s), list[bool]()

        async def agent(env: Env) -> int:
            await story(env, spared)
            done.append(True)
            return 0

        spared.host.main = agent
        spared.host.start_agent()
        assert world.run(2000, stop=lambda: bool(done))
        return spared


async def keep(env: Env, spared: Spared, count: int = 1) -> Any:
    await env.processes.start_program("spares", "spares", spared.kept())
    for _ in range(200):
        try:
            stream = await env.bytes.connect(spared.spares)
            break
        except ConnectionError:
            await asyncio.sleep(0.05)
    await stream.write(pack(KeepSpares(count)))
    while True:
        heard = await read_frame(stream, decoder)
        assert isinstance(heard, SparesStatus)
        if heard.warm == count or heard.why:  # whoever strikes may have ended several in a row while they began
            return stream


async def begin(env: Env, spared: Spared) -> Any:
    await env.processes.start_program("supervisor", "sup", spared.supervised())
    stream = await meet(env, spared.supervised())
    await stream.write(pack(HealRank(1, 0)))
    return stream


def test_a_rank_that_is_lost_goes_on_in_a_process_that_waits() -> None:
    async def story(env: Env, spared: Spared) -> None:
        stream = await begin(env, spared)
        await keep(env, spared)
        (waits,) = [pid for pid in spared.host.processes if pid in spared.host.commands and not spared._is_rank(pid)]
        last = await last_word(stream)
        assert last.pids[1].pid == waits and dict(last.codes) == {1: 0}

    assert play([20.0, 5.0], story).numbers == ["0", "1"]


def test_there_are_as_many_again_after_one_was_taken() -> None:
    async def story(env: Env, spared: Spared) -> None:
        agent = await keep(env, spared, 2)
        stream = await begin(env, spared)  # it begins in one already
        heard: list[int] = []
        while not heard or heard[-1] != 2:
            status = await read_frame(agent, decoder)
            assert isinstance(status, SparesStatus)
            heard.append(status.warm)
        assert heard[0] == 1
        await last_word(stream)

    assert play([1.0, 1.0, 20.0], story).numbers == ["0", "1", "2"]


def test_a_keeper_whose_agent_is_gone_ends_with_all_that_wait() -> None:
    async def story(env: Env, spared: Spared) -> None:
        (await keep(env, spared, 3)).close()
        await asyncio.sleep(spares.ALONE_S - 5.0)
        assert len(spared.host.find("spares")) == 1 and len(spared.host.find("train")) == 3
        await asyncio.sleep(10.0)
        assert not spared.host.find("spares") and not spared.host.find("train")

    assert play([1.0], story).numbers == []


def test_one_that_ends_while_it_waits_is_replaced() -> None:
    async def story(env: Env, spared: Spared) -> None:
        agent = await keep(env, spared)
        spared.host.find("train")[0].end(-9)
        heard = [await read_frame(agent, decoder) for _ in range(2)]
        assert [status.warm for status in heard if isinstance(status, SparesStatus)] == [0, 1]

    assert play([1.0], story).numbers == []


async def kept_again(env: Env, spared: Spared) -> None:
    with contextlib.suppress(ConnectionError):
        await keep(env, spared)


def test_a_spare_that_may_have_become_a_rank_is_ended_before_another_process_is_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    become = SimSpare.become

    async def become_and_lose_the_keeper(spare: SimSpare, command: Command) -> None:
        await become(spare, command)
        spare.process.host.find("spares")[0].end(-9)  # type: ignore[attr-defined]

    async def story(env: Env, spared: Spared) -> None:
        stream = await begin(env, spared)
        await keep(env, spared)
        monkeypatch.setattr(SimSpare, "become", become_and_lose_the_keeper)
        assert dict((await last_word(stream)).codes) == {1: 0}

    spared = play([20.0, 5.0, 5.0], story)
    assert not spared.twice, "two processes of one rank at one time"
    assert spared.numbers == ["0", "1", "2"]


@pytest.mark.parametrize("seed", range(1, 25))
def test_a_rank_never_runs_twice_whoever_dies_while_it_takes_a_spare(seed: int) -> None:
    async def story(env: Env, spared: Spared) -> None:
        await keep(env, spared)
        stream = await begin(env, spared)

        async def strike() -> None:
            """Kill the keeper, the supervisor or both at some moment around the loss of each process."""
            while True:
                await asyncio.sleep(env.rng.uniform(1.9, 2.05))
                for name in env.rng.choice((["spares"], ["spares", "sup"], ["sup"])):
                    for process in spared.host.find(name):
                        process.end(-9)
                await asyncio.sleep(0.3)
                await env.processes.start_program("supervisor", "sup", spared.supervised())
                env.spawn("agent of spares", kept_again(env, spared))

        env.spawn("strikes", strike())
        while not (read_state(await env.disk.read("jobs/j1/1.state")) or SupervisorState()).ended:
            await asyncio.sleep(0.05)
            with contextlib.suppress(ConnectionError):
                await stream.write(pack(HealRank(1, len(spared.numbers))))
                continue
            with contextlib.suppress(ConnectionError):
                stream = await env.bytes.connect(spared.supervised().socket)

    spared = play([2.0] * 12, story, seed)
    assert not spared.twice, "two processes of one rank at one time"
    assert len(set(spared.numbers)) == len(spared.numbers), "no two processes of a rank have one number"


# ---- real processes ----

SCRIPT = (
    "import os, sys, time\n"
    'print(os.getpid(), os.environ.get("COVEY_INCARNATION", "0"), "msgspec" in sys.modules, flush=True)\n'
    'time.sleep(0.5 if os.environ.get("COVEY_INCARNATION") == os.environ.get("LAST", "1") else 600)\n'
)


def spec(**env: str) -> RanksSpec:
    """The spec of one rank, with a spare. `LAST`: the process of it that ends well."""
    given = {"PYTHONPATH": os.pathsep.join(sys.path), **env}
    return msgspec.structs.replace(ranks("j1", sys.executable, "-c", SCRIPT), env=given, spares=1, hooks=True)


def warm_now(host: Here) -> int:
    told = host.told(SparesReady)
    return told[-1].warm if told else 0


async def output(runner: Any) -> list[list[str]]:
    data = (await runner.read_log(J1, 0, 0, 1 << 16)).data.decode()
    return [line.split() for line in data.splitlines()]


def has_said(runner: Any) -> bool:
    """Whether the rank has said a whole line: Python writes one in parts where its output is not buffered."""
    return Path(runner.log_path(J1, 0)).read_text().endswith("\n")


def left() -> list[Any]:
    return list(holding({"COVEY_JOB_ID": "j1", "SPARED": str(os.getpid())}))


def oom_score(pid: int) -> int:
    with open(f"/proc/{pid}/oom_score_adj") as file:
        return int(file.read())


def on_this_host(story: Callable[[Here, Any], Awaitable[None]]) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="covey-", ignore_cleanup_errors=True) as short:
            async with here(short) as host:
                await story(host, host.runner())
                await until(lambda: not left(), 20.0)

    asyncio.run(run())


def test_a_real_rank_goes_on_in_a_spare_and_nothing_is_left_when_the_job_ends() -> None:
    async def story(host: Here, runner: Any) -> None:
        await runner.start(spec(SPARED=str(os.getpid())))
        await until(lambda: host.told(RanksStarted) and has_said(runner), 20.0)
        lost = runner.running()[J1, 1][0]
        await runner.heals(J1, 1, 0, 0, lost, ("msgspec",))
        await until(lambda: warm_now(host) == 1, 20.0)
        assert [line[2] for line in await output(runner)] == ["False"], "nothing of a spare's is in the rank's output"
        os.kill(lost, signal.SIGKILL)
        await until(lambda: host.told(RanksEnded), 20.0)
        assert host.told(RanksEnded) == [RanksEnded(J1, 1, {0: 0}, "")]
        (replaced,) = host.told(RankReplaced)
        assert await output(runner) == [[str(lost), "0", "False"], [str(replaced.pid), "1", "True"]]

    on_this_host(story)


def test_ranks_that_come_to_a_host_begin_in_what_waits_there() -> None:
    async def story(host: Here, runner: Any) -> None:
        coming = msgspec.structs.replace(spec(LAST="65536", SPARED=str(os.getpid())), since=1)
        await runner.keep_spares(coming, ("msgspec",))
        await until(lambda: warm_now(host) == 1, 20.0)
        assert [oom_score(process.pid) for process in left()] == [GOES_FIRST], "it is nobody's yet"
        await runner.start(coming)
        await until(lambda: runner.running() and has_said(runner), 20.0)
        assert oom_score(runner.running()[J1, 1][0]) == ORDINARY
        await until(lambda: host.told(RanksEnded), 20.0)
        (line,) = await output(runner)
        assert line[1:] == ["65536", "True"]

    on_this_host(story)


def test_a_spare_of_another_environment_is_not_taken() -> None:
    async def story(host: Here, runner: Any) -> None:
        await runner.keep_spares(spec(A="1", LAST="0", SPARED=str(os.getpid())), ("msgspec",))
        await until(lambda: warm_now(host) == 1, 20.0)
        await runner.start(spec(A="2", LAST="0", SPARED=str(os.getpid())))
        await until(lambda: host.told(RanksStarted) and has_said(runner), 20.0)
        assert [line[2] for line in await output(runner)] == ["False"]
        await runner.stop(J1, 1, 0.0, "over")
        await until(lambda: host.told(RanksEnded), 20.0)

    on_this_host(story)


def test_ranks_that_a_shell_starts_have_no_spares_and_it_is_said_why() -> None:
    async def story(host: Here, runner: Any) -> None:
        await runner.start(spec(LAST="0", SPARED=str(os.getpid())))
        await until(lambda: host.told(RanksStarted), 20.0)
        pid = runner.running()[J1, 1][0]
        await runner.heals(J1, 1, 0, 0, pid + 1, ("msgspec",))
        assert (
            host.told(SparesReady)[-1].why == "the Python of its ranks is started by another process, such as a shell"
        )
        await runner.stop(J1, 1, 0.0, "over")
        await until(lambda: host.told(RanksEnded), 20.0)

    on_this_host(story)


def test_what_nobody_wants_any_more_ends_before_its_script_begins(tmp_path: Any) -> None:
    began = tmp_path / "began"
    argv = (sys.executable, "-c", f"open({str(began)!r}, 'w')")
    env = {"PYTHONPATH": hooks.SITE}
    command = Command(argv=argv, cwd="/", env=env, output=str(tmp_path / "log"), run=str(tmp_path / "1.spare1"))

    async def story() -> None:
        spare = await start_waiting(command, {})
        assert [await spare.says(), await spare.says()] == ["here", "warm"]
        spare.end()
        await until(lambda: not os.path.exists(f"/proc/{spare.id.pid}"))

    asyncio.run(story())
    assert not began.exists() and not (tmp_path / "log").exists()


def test_a_spare_becomes_what_its_user_may_have(tmp_path: Any) -> None:
    """Where it runs as another user: the home of that user, and output that the agent may read."""
    argv = (sys.executable, "-c", "import os; print(os.environ['HOME'], flush=True)")
    env = {"PYTHONPATH": hooks.SITE}
    command = Command(argv=argv, cwd="/", env=env, output=str(tmp_path / "log"), run=str(tmp_path / "1.rank0"))

    async def story() -> None:
        def of_user(given: Command) -> Command:
            return msgspec.structs.replace(given, env=given.env | {"HOME": "/home/ann"}, output_mode=0o640)

        spare = await start_waiting(msgspec.structs.replace(command, run=f"{command.run}.spare1"), {}, of_user)
        assert [await spare.says(), await spare.says()] == ["here", "warm"]
        await spare.become(command)
        await until(lambda: (tmp_path / "log").read_text() == "/home/ann\n")

    asyncio.run(story())
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o640


# ---- in the rank's Python ----


def imported(*options: str) -> list[str]:
    """The modules that a rank that is started with these would have imported ahead."""
    script = "import msgspec, json\nfrom covey.kernel.spare_modules import imported\nprint(json.dumps(imported()))"
    env = {"PYTHONPATH": os.pathsep.join([hooks.SITE, *sys.path]), "COVEY_SOCKET": "/nowhere"}
    said = subprocess.run([sys.executable, *options, "-c", script], env=env, capture_output=True, check=True, cwd="/")
    return list(msgspec.json.decode(said.stdout))


def test_a_rank_tells_what_it_imported_from_packages_and_not_from_python_itself() -> None:
    found = imported()
    assert "msgspec" in found and "covey.kernel.spare_modules" in found
    assert not {"os", "sys", "json", "json.decoder", "__main__", "sitecustomize"} & set(found)


def test_a_rank_whose_python_does_not_load_covey_has_no_spares() -> None:
    assert imported("-S") == []


def test_a_module_that_opens_a_gpu_makes_a_spare_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm.opened_device() == ""
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidia3")
    assert warm.opened_device() == "a module opens /dev/nvidia3 when it is imported"

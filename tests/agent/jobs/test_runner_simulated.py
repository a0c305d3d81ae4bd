"""The code that runs ranks under their supervisor, in the simulator: agents and supervisors are killed at every
moment, disks are sick or full."""

import asyncio
import dataclasses
import random
import signal
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.jobs.following import BOOT_S, LAUNCHES_MAX
from agent.jobs.output import JobsSettings
from agent.jobs.records import StartRecord
from agent.jobs.records import decoder as record_decoder
from agent.jobs.runner import SupervisedRunner
from agent.jobs.supervision import SupervisorConfig, SupervisorState
from agent.jobs.supervisor import supervisor
from chaos.world.disk import SimFile
from chaos.world.host import SimHost
from chaos.world.world import World
from covey.core.events import Fact
from covey.core.ids import JobId
from covey.ports.disk import Disk
from covey.ports.env import Env
from covey.ports.processes import Command, ProcessId
from covey.wire.checked import load, seal
from plugins.base import Program
from plugins.facts import RanksEnded
from tests.agent.here import ranks
from tests.families import examples

J1 = JobId("j1")


# ---- the same code in the simulator ----------------------------------------------------------------------------------


class SimRack:
    """One simulated host whose agent is only a runner. Jobs count how often each rank was started."""

    def __init__(self, world: World, seconds: float, code: int = 0) -> None:
        self.starts: list[tuple[str, str]] = []
        self.facts: list[Fact] = []
        self.seconds, self.code = seconds, code
        world.programs = lambda: {"supervisor": supervisor.PROGRAM}
        world.user_programs["train"] = self._train
        self.host: SimHost = world.add_host("h1")
        self.host.main = self._agent
        self.wanted = ranks("j1", "train", count=3)
        self.forget = False
        self.settings = JobsSettings()
        self.runner: SupervisedRunner | None = None

    def _told(self, fact: Fact) -> None:
        self.facts.append(fact)
        if isinstance(fact, RanksEnded) and self.forget and self.runner is not None:
            self.runner.forget(fact.job, fact.epoch)

    async def _train(self, env: Env, command: Command) -> int:
        self.starts.append((command.env["COVEY_EPOCH"], command.env["RANK"]))
        await asyncio.sleep(self.seconds)
        return self.code + int(command.env["RANK"])

    async def _agent(self, env: Env) -> int:
        socket = f"{env.run_dir}/jobs.sock"
        self.runner = runner = SupervisedRunner(env, self._told, "10.0.0.1", socket, self.settings)
        await runner.start_up()
        assert 0 < await runner.reserve_port(J1, 1) < 65536
        await runner.start(self.wanted)
        await asyncio.Event().wait()
        return 0

    def ends(self) -> list[RanksEnded]:
        return [fact for fact in self.facts if isinstance(fact, RanksEnded)]


@pytest.mark.parametrize("seed", range(20))
def test_whenever_the_agent_is_killed_each_rank_starts_once_and_its_code_arrives(seed: int) -> None:
    with World(seed) as world:
        rack = SimRack(world, seconds=3.0, code=20)
        rack.host.start_agent()
        for _ in range(6):
            world.run(world.now + world.chance.uniform(0.0, 0.8))
            assert rack.host.agent is not None
            rack.host.agent.signal(signal.SIGKILL)
            world.run(world.now + world.chance.uniform(0.0, 0.5))
            rack.host.start_agent()
        assert world.run(world.now + 60, stop=lambda: bool(rack.ends()))
        assert sorted(rack.starts) == [("1", "0"), ("1", "1"), ("1", "2")]
        assert sorted(rack.ends()[-1].codes.items()) == [(0, 20), (1, 21), (2, 22)]


@pytest.mark.parametrize("seed", [*range(20), 111, 123, 153])  # the last: between a rank's start and its number on disk
def test_whenever_a_supervisor_is_killed_no_rank_starts_twice_and_an_end_is_told(seed: int) -> None:
    with World(seed) as world:
        rack = SimRack(world, seconds=600.0)
        rack.host.start_agent()
        world.run(world.chance.uniform(0.05, 0.5))
        for process in rack.host.find("sup-j1-1"):
            process.signal(signal.SIGKILL)
        assert world.run(world.now + 900, stop=lambda: bool(rack.ends()))
        assert len(rack.starts) == len(set(rack.starts))
        assert set(rack.ends()[-1].codes) == {0, 1, 2}
        assert rack.host.find("train") == []


@pytest.mark.parametrize("seed", range(10))
def test_after_a_power_failure_no_rank_of_the_old_epoch_runs_and_its_end_is_told(seed: int) -> None:
    with World(seed) as world:
        rack = SimRack(world, seconds=600.0)
        rack.host.start_agent()
        assert world.run(30, stop=lambda: len(rack.starts) == 3)
        world.run(world.now + world.chance.uniform(0.0, 0.2))
        rack.host.power_off()
        rack.facts.clear()
        world.run(world.now + 1.0)
        rack.host.power_on()
        assert world.run(world.now + 120, stop=lambda: bool(rack.ends()))
        assert rack.host.find("train") == []
        assert len(rack.starts) == 3


def test_a_rank_that_fails_comes_first_and_takes_its_siblings_with_it() -> None:
    with World(1) as world:
        rack = SimRack(world, seconds=600.0)

        async def fails(env: Env, command: Command) -> int:
            await asyncio.sleep(1.0 if command.env["RANK"] == "1" else 600.0)
            return 3

        world.user_programs["train"] = fails
        rack.host.start_agent()
        assert world.run(30, stop=lambda: bool(rack.ends()))
        (end,) = rack.ends()
        assert next(iter(end.codes.items())) == (1, 3)
        assert end.codes == {0: -signal.SIGTERM, 1: 3, 2: -signal.SIGTERM}
        assert end.reason == "rank 1 exited with 3; the job's other ranks on this host were stopped"


def test_a_newer_epoch_does_not_wait_for_one_that_was_written_down_and_never_started() -> None:
    """The agent died between the record of epoch 1 and its supervisor; meanwhile the job was placed anew."""
    with World(21) as world:
        rack = SimRack(world, seconds=1.0, code=30)

        async def agent(env: Env) -> int:
            await env.disk.replace("jobs/j1/1.start", seal(StartRecord(rack.wanted, "token")))
            rack.wanted = msgspec.structs.replace(rack.wanted, epoch=2)
            return await rack._agent(env)

        rack.host.main = agent
        rack.host.start_agent()
        assert world.run(BOOT_S + 10, stop=lambda: bool(rack.ends()))
        assert [(end.epoch, sorted(end.codes.values())) for end in rack.ends()] == [(2, [30, 31, 32])]
        assert {epoch for epoch, _ in rack.starts} == {"2"}
        assert "jobs/j1/1.start" not in rack.host.disk.files, "it is not found again after every restart"


@pytest.mark.parametrize("known", [True, False])
def test_where_no_supervisor_starts_the_ranks_end_in_words_and_nothing_runs_on(known: bool) -> None:
    """This holds also when the supervisor that died had not written down which processes the ranks are."""
    launched: list[float] = []

    async def dies(env: Env, _config: Any) -> None:
        launched.append(env.clock.now_s())
        raise OSError(8, "Exec format error")

    with World(22) as world:
        rack = SimRack(world, seconds=600.0)
        rack.host.start_agent()
        assert world.run(30, stop=lambda: len(rack.starts) == 3)
        (process,) = rack.host.find("sup-j1-1")
        world.programs = lambda: {"supervisor": Program("supervisor", SupervisorConfig, dies)}
        process.signal(signal.SIGKILL)
        if not known:
            rack.host.disk.files["jobs/j1/1.state"].data[:] = seal(SupervisorState())
        assert len(rack.host.find("train")) == 3
        assert world.run(world.now + 120, stop=lambda: bool(rack.ends()))
        (end,) = rack.ends()
        assert end.lost and "its supervisor does not start on h1; see " in end.reason
        assert end.reason.endswith("logs/sup-j1-1.log")
        assert set(end.codes) == {0, 1, 2} and set(end.codes.values()) <= {-signal.SIGKILL, 127}
        assert rack.host.find("train") == [] and len(launched) == LAUNCHES_MAX
        world.run(world.now + 60)
        assert len(launched) == LAUNCHES_MAX, "it is not tried for ever"


@settings(max_examples=examples(40), deadline=None)
@given(st.one_of(st.binary(max_size=80), st.integers(0, 1 << 30)))
def test_no_record_however_damaged_keeps_the_runner_from_starting(attack: bytes | int) -> None:
    if isinstance(attack, int):
        rng = random.Random(attack)
        good = bytearray(seal(StartRecord(ranks("j1", "/bin/true"), "token", ProcessId(1 << 22, 1))))
        for _ in range(rng.randint(1, 3)):
            good[rng.randrange(len(good))] = rng.randrange(256)
        attack = bytes(good)

    async def main(env: Env) -> int:
        await env.disk.replace("jobs/j1/1.start", attack)
        await env.disk.replace("jobs/j1/1.state", attack[:20])
        runner = SupervisedRunner(env, facts.append, "10.0.0.1", "/x")
        await runner.start_up()
        await runner.start(ranks("j2", "train"))
        return await asyncio.sleep(3, 0)

    facts: list[Fact] = []
    with World(1) as world:
        rack = SimRack(world, seconds=0.1, code=9)
        rack.host.main = main
        rack.host.start_agent()
        world.run(4)
    assert RanksEnded(JobId("j2"), 1, {0: 9}, "") in facts


# ---- sick disks ------------------------------------------------------------------------------------------------------


class SickDisk:
    """A disk that fails what `refuses(operation, name)` says."""

    def __init__(self, disk: Disk, refuses: Callable[[str, str], bool]) -> None:
        self._disk, self._refuses = disk, refuses

    def __getattr__(self, operation: str) -> Any:
        real = getattr(self._disk, operation)
        if operation in ("path", "kept_free_bytes"):
            return real

        async def tried(name: str = "", *arguments: Any) -> Any:
            if self._refuses(operation, name):
                raise OSError(5, "the disk is sick", name)
            return await (real(name, *arguments) if name else real())

        return tried


def test_ranks_whose_supervisors_id_cannot_be_written_run_to_their_own_end() -> None:
    """The record was durable before; only its second writing, with the supervisor's id, fails."""
    writes: list[str] = []

    def refuses(operation: str, name: str) -> bool:
        if operation == "replace" and name == "jobs/j1/1.start":
            writes.append(name)
            return len(writes) > 1
        return False

    with World(3) as world:
        rack = SimRack(world, seconds=2.0, code=20)

        async def agent(env: Env) -> int:
            sick = dataclasses.replace(env, disk=cast(Disk, SickDisk(env.disk, refuses)))
            return await rack._agent(sick)

        rack.host.main = agent
        rack.host.start_agent()
        assert world.run(30, stop=lambda: bool(rack.ends()))
        assert len(writes) == 2, "it was tried"
        assert sorted(rack.starts) == [("1", "0"), ("1", "1"), ("1", "2")]
        assert sorted(rack.ends()[0].codes.items()) == [(0, 20), (1, 21), (2, 22)]
        assert rack.ends()[0].reason == ""


def test_ranks_whose_state_cannot_be_read_now_do_not_count_as_never_begun() -> None:
    """Their record was deleted, and with it the token: they were not let in by their agent again, for ever."""
    writes: list[str] = []

    def refuses(operation: str, name: str) -> bool:
        if operation == "replace" and name == "jobs/j1/1.start":
            writes.append(name)
        late = operation == "replace" and name == "jobs/j1/1.start" and len(writes) > 1
        return late or (operation == "read" and name == "jobs/j1/1.state" and sick[-1])

    sick = [False]
    with World(3) as world:
        rack = SimRack(world, seconds=60.0)

        async def agent(env: Env) -> int:
            return await rack._agent(dataclasses.replace(env, disk=cast(Disk, SickDisk(env.disk, refuses))))

        async def again(env: Env) -> int:
            disk = cast(Disk, SickDisk(env.disk, refuses))
            there = dataclasses.replace(env, disk=disk)
            rack.runner = SupervisedRunner(there, rack._told, "10.0.0.1", f"{env.run_dir}/jobs.sock")
            await rack.runner.start_up()
            return await asyncio.sleep(1000, 0)

        rack.host.main = agent
        first = rack.host.start_agent()
        assert world.run(30, stop=lambda: len(rack.starts) == 3) and rack.runner is not None
        rack.host.main = again
        token = rack.runner.token(J1, 1)
        first.signal(signal.SIGKILL)
        rack.host.start_agent()
        world.run(world.now + BOOT_S + 5)
        sick.append(True)
        (process,) = rack.host.find("sup-j1-1")
        process.signal(signal.SIGKILL)
        world.run(world.now + 5)
        assert rack.runner.token(J1, 1) == token and len(rack.starts) == 3
        sick.append(False)
        assert world.run(world.now + 100, stop=lambda: bool(rack.ends()))
        assert rack.ends()[-1].codes == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("read", ["names", "read"])
def test_records_that_a_sick_disk_kept_from_being_read_are_read_by_the_next_who_asks(read: str) -> None:
    failures = iter([True])

    def refuses(operation: str, name: str) -> bool:
        return operation == read and name.startswith("jobs/") and next(failures, False)

    async def again(env: Env) -> int:
        sick = dataclasses.replace(env, disk=cast(Disk, SickDisk(env.disk, refuses)))
        runner = SupervisedRunner(sick, rack.facts.append, "10.0.0.1", f"{env.run_dir}/jobs.sock")
        with pytest.raises(OSError, match="sick"):
            await runner.start_up()
        await runner.start(rack.wanted)
        known = await load(env.disk, "jobs/j1/1.start", record_decoder)
        assert known is not None
        tokens.append((known.token, runner.token(J1, 1)))
        return await asyncio.sleep(60, 0)

    tokens: list[tuple[str, str | None]] = []
    with World(4) as world:
        rack = SimRack(world, seconds=5.0)
        rack.host.start_agent()
        assert world.run(30, stop=lambda: len(rack.starts) == 3)
        assert rack.host.agent is not None
        rack.host.agent.signal(signal.SIGKILL)
        rack.facts.clear()
        rack.host.main = again
        rack.host.start_agent()
        assert world.run(world.now + 30, stop=lambda: bool(rack.ends()))
        assert tokens[0][0] == tokens[0][1], "its ranks may join again"
        assert len(rack.starts) == 3, "what runs already is found, not started once more"
        assert rack.ends()[0].codes == {0: 0, 1: 1, 2: 2}


# ---- room on the disk ----


def test_a_host_refuses_while_its_disk_is_nearly_full_and_no_longer() -> None:
    with World(1) as world:
        rack = SimRack(world, seconds=600.0)
        rack.host.start_agent()
        world.run(20)
        assert rack.runner is not None and rack.runner.refusal == ""
        rack.host.disk.filled_bytes = rack.host.disk.capacity_bytes - (1 << 20)
        world.run(30)
        assert rack.runner.refusal == "less than 1 GiB is free in /var/lib/covey/h1/jobs of h1"
        rack.runner.reconfigure(JobsSettings(disk_free_min="64 KiB"))
        world.run(world.now + 30)
        assert rack.runner.refusal == "", "by a reload"
        rack.runner.reconfigure(JobsSettings())
        world.run(world.now + 30)
        assert rack.runner.refusal
        rack.host.disk.filled_bytes = 0
        world.run(world.now + 30)
        assert rack.runner.refusal == ""


def test_output_of_an_ended_job_goes_in_time_and_its_fence_after_a_day() -> None:
    with World(1) as world:
        rack = SimRack(world, seconds=1.0)
        rack.settings = JobsSettings(keep_ended_for="1 h")
        rack.forget = True
        rack.host.start_agent()
        for name in ("jobs/j1/rank0.log", "jobs/j1/rank0.log.000000000001000"):
            rack.host.disk.files[name] = SimFile(data=bytearray(b"said"), durable=bytearray(b"said"))
        assert world.run(60, stop=lambda: bool(rack.ends()))
        world.run(world.now + 3_500)
        assert {"jobs/j1/rank0.log", "jobs/j1/forgotten"} <= rack.host.disk.files.keys()
        world.run(world.now + 200)
        assert [name for name in rack.host.disk.files if name.startswith("jobs/")] == ["jobs/j1/forgotten"]
        world.run(world.now + 86_400)
        assert [name for name in rack.host.disk.files if name.startswith("jobs/")] == []

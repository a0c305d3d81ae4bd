"""Ranks of other users than the agent's, started by a starter, as real processes. Only root can be several users."""

import asyncio
import dataclasses
import os
import resource
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from agent.jobs import following as following_module
from agent.jobs import runner as runner_module
from agent.jobs.beside.messages import OpenSession, SessionOpened, SessionTurn, Turned, TurnSession
from agent.jobs.beside.service import BesideSessions
from agent.jobs.output import JobsSettings
from agent.jobs.outputs import Outputs
from agent.jobs.records import Fence
from agent.jobs.runner import SupervisedRunner
from agent.jobs.supervision import RanksStatus, SupervisorState
from agent.jobs.whose import believed
from agent.ports.processes.procfs import start_ticks, user_of
from agent.ports.starter.starter_wire import EndAs
from agent.starter.accounts import UnixAccount
from agent.starter.sessions import Sessions
from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from covey.ports.processes import ProcessId
from covey.ports.starter import EpochLimits, MemoryPeak, NobodyElse
from covey.wire.frames import pack
from plugins.base import RankLease, RankSpec, RanksSpec
from plugins.facts import MemoryKilled, RanksEnded, RanksStarted
from tests.agent.here import Here, ranks, until
from tests.agent.jobs.test_runner import gone
from tests.agent.starter.starter_here import ALICE, BOB, StarterHere, host_with_starter
from tests.covey.test_volume_users import as_user

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user"),
    pytest.mark.xdist_group("starter"),  # its sessions are known by job, epoch and user
]
J1 = JobId("j1")
ACCOUNT = UnixAccount("alice", ALICE, ALICE, "/home/alice", "/bin/sh")


@pytest.fixture
def short() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="covey-", ignore_cleanup_errors=True) as directory:
        yield directory


@pytest.fixture
async def both(short: str) -> AsyncIterator[tuple[Here, StarterHere]]:
    async with host_with_starter(short) as found:
        yield found
        Sessions().end(EndAs(J1, 1), ALICE)  # what a test that failed left


def of_alice(*argv: str, job: str = "j1", grace_s: float = 5.0) -> RanksSpec:
    return msgspec.structs.replace(ranks(job, *argv, grace_s=grace_s), user="alice", uid=ALICE)


async def output(runner: SupervisedRunner, job: JobId = J1) -> str:
    return (await runner.read_log(job, 0, 0, 1 << 20)).data.decode()


async def running(host: Here, runner: SupervisedRunner, spec: RanksSpec) -> int:
    """The pid of the rank, which runs. What the test before it ran has gone."""
    await until(lambda: not programs("supervisor-j1-1"), 20.0)
    await runner.start(spec)
    await until(lambda: host.told(RanksStarted), 20.0)
    return host.told(RanksStarted)[-1].pids[0]


def prioritise(nice: int) -> None:
    """Give all threads of this process a priority: what they start inherits it."""
    for thread in os.listdir("/proc/self/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), nice)


OOM_SCORE = str(max(0, int(Path("/proc/self/oom_score_adj").read_text())))
SCRIPT = """
id -u; id -g; id -G; umask; echo $HOME $USER $LOGNAME $SHELL; cat /proc/self/oom_score_adj; nice
grep -e CapEff -e CapPrm -e CapAmb -e NoNewPrivs /proc/self/status | tr -d '\\t\\n'; echo
ulimit -n; ps -o sid= -p $$ | tr -d ' '; echo $$
"""


async def test_a_job_runs_as_its_user_and_has_what_a_login_gives(both: tuple[Here, StarterHere]) -> None:
    host, starter = both
    assert host.env.starter.refusal == ""
    runner, groups = host.runner(), os.getgroups()
    os.setgroups([*groups, 4])  # the starter's own
    try:
        await runner.start(of_alice("/bin/sh", "-c", SCRIPT))
        await until(lambda: host.told(RanksEnded), 20.0)
    finally:
        os.setgroups(groups)
    assert host.told(RanksEnded) == [RanksEnded(J1, 1, {0: 0}, "")], (starter.said, host.lines.text)
    said = (await output(runner)).split("\n")
    assert said[:7] == [str(ALICE)] * 3 + ["0077", "/home/alice alice alice /bin/sh", OOM_SCORE, "0"]
    none = "0" * 16
    assert said[7] == f"CapPrm:{none}CapEff:{none}CapAmb:{none}NoNewPrivs:0"
    assert int(said[8]) <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] and said[9] == said[10]


async def test_a_command_beside_it_runs_as_its_user_in_its_epoch_and_ends_with_it(
    both: tuple[Here, StarterHere],
) -> None:
    host, starter = both
    runner = host.runner()

    class Agent:
        id, env = HostId("h1"), host.env

    Agent.runner = runner  # type: ignore[attr-defined]
    sessions = BesideSessions(Agent(), f"{host.env.run_dir}/jobs.sock")  # type: ignore[arg-type]
    await running(host, runner, of_alice("/bin/sleep", "600"))
    script = "id -u; echo $USER $COVEY_JOB_ID ${COVEY_TOKEN-none}; test -t 0 && exec sleep 600"
    said, session = {}, ""
    for terminal in (False, True):
        argv = ("sh", "-c", script)
        ask = OpenSession(job=J1, rank=0, kind="exec", session=f"ex-{int(terminal)}", argv=argv, terminal=terminal)
        opened = await sessions.answer(ask)
        assert isinstance(opened, SessionOpened), starter.said
        said[terminal], session = b"", opened.session
        while b"none" not in said[terminal]:
            turn = SessionTurn(seen=len(said[terminal]), wait_s=5.0)
            found = await sessions.answer(TurnSession(job=J1, epoch=1, session=session, turn=turn))
            assert isinstance(found, Turned)
            said[terminal] += b"".join(data for _, data in found.parts)
    assert said[False].decode() == f"{ALICE}\nalice j1 none\n"
    elsewhere = TurnSession(job=JobId("j2"), epoch=1, session=session, turn=SessionTurn())
    with pytest.raises(Refused, match="has ended"):
        await sessions.answer(elsewhere)
    assert programs("beside-j1-1"), "it is of the epoch"
    await runner.stop(J1, 1, 0.0, "over")
    await until(lambda: host.told(RanksEnded))
    runner.forget(J1, 1)
    await until(lambda: not programs("beside-j1-1"), 20.0)


async def test_neither_it_nor_its_supervisor_runs_before_others(both: tuple[Here, StarterHere]) -> None:
    host, _ = both
    runner = host.runner()
    prioritise(-5)
    try:
        pid = await running(host, runner, of_alice("/bin/sleep", "600"))
    finally:
        prioritise(0)
    (supervisor,) = programs("supervisor-j1-1")
    assert [os.getpriority(os.PRIO_PROCESS, each) for each in (pid, supervisor)] == [0, 0]
    await runner.stop(J1, 1, 0.0, "over")
    await until(lambda: host.told(RanksEnded))


async def test_what_it_wrote_is_its_users_and_the_agents_and_goes_with_the_job(
    both: tuple[Here, StarterHere], short: str
) -> None:
    host, starter = both
    runner = host.runner()
    await running(host, runner, of_alice("/bin/sh", "-c", "echo secret; sleep 600"))
    folder = Path(short, "u/jobs/j1")
    with os.scandir(folder) as entries:
        assert {(entry.stat().st_uid, entry.stat().st_mode & 0o007) for entry in entries} == {(ALICE, 0)}
    assert as_user(BOB, lambda: os.listdir(folder)) == "EACCES"
    assert as_user(BOB, lambda: (folder / "rank0.log").read_text()) == "EACCES"
    assert await host.env.disk.names("jobs/j1/rank0") == [], "the agent's own folder has none of it"
    await runner.stop(J1, 1, 5.0, "cancelled")
    await until(lambda: host.told(RanksEnded))
    assert host.told(RanksEnded)[0].codes == {0: -signal.SIGTERM}
    runner.forget(J1, 1)
    await until(lambda: not list(folder.glob("1.*")))
    assert await output(runner) == "secret\n", "output stays"
    outputs = Outputs(host.env, JobsSettings(keep_ended_for="1 s"), lambda: ())
    await outputs.sweep({J1: Fence(1, 0.0)}, lambda job: None)
    assert os.listdir(folder.parent) == []
    starter.folders.make("j2", ACCOUNT)
    starter.folders.make("j3", ACCOUNT)
    outputs = Outputs(host.env, JobsSettings(), lambda: {JobId("j3")})
    await outputs.sweep({}, lambda job: None)
    assert sorted(os.listdir(folder.parent)) == ["j2", "j3"], "ranks may be about to begin"
    await outputs.sweep({}, lambda job: None)
    assert os.listdir(folder.parent) == ["j3"], "processes only waited there, for ranks that never came"


@pytest.mark.parametrize("forced", [False, True])
async def test_what_the_kernel_killed_is_told_with_the_end(
    both: tuple[Here, StarterHere], monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    """Its count is the slice's, which is gone once all that runs was ended."""
    monkeypatch.setattr(runner_module, "LATE_S", 0.3)
    host, _ = both
    ended: list[EndAs] = []
    end = Sessions.end

    def ends(self: Sessions, ask: EndAs, uid: int | None) -> None:
        ended.append(ask)
        end(self, ask, uid)

    async def peak(job: JobId, epoch: int) -> MemoryPeak | None:
        return None if ended else MemoryPeak(1 << 30, 1, 1 << 30)

    monkeypatch.setattr(Sessions, "end", ends)
    monkeypatch.setattr(host.env.starter, "memory_peak", peak)
    runner = host.runner()
    if forced:
        await running(host, runner, of_alice("/bin/sleep", "600", grace_s=0.2))
        os.kill(programs("supervisor-j1-1")[0], signal.SIGSTOP)
        await runner.stop(J1, 1, 0.2, "cancelled")
    else:
        await runner.start(of_alice("/bin/sh", "-c", "kill -9 $$"))
    await until(lambda: host.told(RanksEnded), 20.0)
    assert host.told(RanksEnded)[0].oom == MemoryKilled(1, 1 << 30, 1 << 30)


async def test_limits_follow_ranks_that_join_others(
    both: tuple[Here, StarterHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have their GPUs and processors before they begin; ranks that leave, until they are gone."""
    host, _ = both
    limits: list[tuple[int, bool]] = []

    async def limit(job: JobId, epoch: int, now: EpochLimits) -> None:
        limits.append((now.cpus, len(runner.running()[J1, 1]) == 1))

    monkeypatch.setattr(host.env.starter, "limit", limit)
    runner = host.runner()
    one = msgspec.structs.replace(of_alice("/bin/sleep", "600", grace_s=0.2), cpus=3)
    await running(host, runner, one)
    two = msgspec.structs.replace(one, ranks=(*one.ranks, RankSpec(1, 1, ())), since=1)
    await runner.start(two)
    await until(lambda: len(host.told(RanksStarted)) > 1 and len(limits) > 1, 20.0)
    assert limits == [(6, True), (6, False)]
    one = msgspec.structs.replace(one, config=1, since=1)
    await runner.start(one)
    assert len(limits) == 2, "who leaves may need it to the end"
    await until(lambda: len(limits) > 2, 20.0)
    assert limits[2:] == [(3, True)], "what it gave back is not its own any more"
    await runner.stop(J1, 1, 0.0, "over")
    await until(lambda: host.told(RanksEnded), 20.0)
    runner.forget(J1, 1)
    await until(lambda: not programs("supervisor-j1-1"), 20.0)


async def test_another_agent_finds_it_again_and_ends_it(both: tuple[Here, StarterHere]) -> None:
    host, starter = both
    first = host.runner()
    pid = await running(host, first, of_alice("/bin/sleep", "600"))
    await first.stop_up()
    starter.stop()  # what runs needs no starter
    host.facts.clear()
    second = host.runner()
    await second.start_up()
    await until(lambda: host.told(RanksStarted))
    assert (host.told(RanksStarted)[0].pids, user_of(pid)) == ({0: pid}, ALICE)
    await second.stop(J1, 1, 5.0, "cancelled")
    await until(lambda: host.told(RanksEnded) and gone(pid))


async def test_a_supervisor_that_was_killed_is_followed_by_another_one_of_the_user(
    both: tuple[Here, StarterHere],
) -> None:
    host, _ = both
    runner = host.runner()
    pid = await running(host, runner, of_alice("/bin/sleep", "600"))
    (supervisor,) = programs("supervisor-j1-1")
    os.kill(supervisor, signal.SIGKILL)
    await until(lambda: programs("supervisor-j1-1") not in ([], [supervisor]), 20.0)
    (again,) = programs("supervisor-j1-1")
    assert (user_of(again), gone(pid)) == (ALICE, False)
    await runner.stop(J1, 1, 5.0, "cancelled")
    await until(lambda: host.told(RanksEnded) and gone(pid), 20.0)


def programs(instance: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if instance.encode() in words:
                found.append(int(entry.name))
    return sorted(found)


async def test_without_a_starter_own_jobs_run_and_others_are_refused_in_words(
    both: tuple[Here, StarterHere],
) -> None:
    host, starter = both
    starter.stop()
    await host.env.starter.look()  # type: ignore[attr-defined]
    runner = host.runner()
    await runner.start(of_alice("/bin/true"))
    await until(lambda: host.told(RanksEnded))
    (ended,) = host.told(RanksEnded)
    assert ended.codes == {0: 127} and "jobs of alice are not possible on h1: no starter answers" in ended.reason
    assert ended.reason.endswith("next: systemctl enable --now covey-starter")
    await runner.start(msgspec.structs.replace(ranks("j2", "/bin/true"), user="root", uid=os.geteuid()))
    await until(lambda: len(host.told(RanksEnded)) == 2)
    assert host.told(RanksEnded)[1].codes == {0: 0}


async def test_a_host_that_does_not_know_who_it_runs_as_runs_nobody_elses_jobs(short: str) -> None:
    async with host_with_starter(short) as (host, _):
        closed = Here(dataclasses.replace(host.env, starter=NobodyElse(-1, "no starter here")), host.base, host.lines)
        runner = closed.runner()
        await runner.start(of_alice("/bin/true"))
        await until(lambda: closed.told(RanksEnded))
        assert "no starter here" in closed.told(RanksEnded)[0].reason


async def test_a_user_whose_name_has_another_number_here_starts_nothing(both: tuple[Here, StarterHere]) -> None:
    host, starter = both
    runner = host.runner()
    await runner.start(msgspec.structs.replace(of_alice("/bin/true"), uid=BOB))
    await until(lambda: host.told(RanksEnded))
    assert f"alice has uid {ALICE} on this host" in host.told(RanksEnded)[0].reason
    assert starter.starter.counted["refused"] == 1


async def test_a_supervisor_that_does_not_end_its_ranks_is_ended_with_them(
    both: tuple[Here, StarterHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user may stop it, or put something else in its place."""
    monkeypatch.setattr(runner_module, "LATE_S", 0.3)
    host, _ = both
    runner = host.runner()
    pid = await running(host, runner, of_alice("/bin/sleep", "600", grace_s=0.2))
    (supervisor,) = programs("supervisor-j1-1")
    os.kill(supervisor, signal.SIGSTOP)
    await runner.stop(J1, 1, 0.2, "cancelled")
    await until(lambda: host.told(RanksEnded), 20.0)
    await until(lambda: gone(pid) and gone(supervisor), 20.0)
    assert "did not end it in time" in host.told(RanksEnded)[0].reason


async def test_an_end_by_force_is_told_once_it_is_sure(
    both: tuple[Here, StarterHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of this job may start elsewhere once their end is told."""
    monkeypatch.setattr(runner_module, "LATE_S", 0.3)
    monkeypatch.setattr(following_module, "UNREADABLE_S", 0.05)
    host, starter = both
    runner = host.runner()
    pid = await running(host, runner, of_alice("/bin/sleep", "600", grace_s=0.2))
    (supervisor,) = programs("supervisor-j1-1")
    starter.stop()
    os.kill(supervisor, signal.SIGSTOP)
    await runner.stop(J1, 1, 0.2, "cancelled")
    await until(lambda: host.lines.text.count("processes of another user are not ended") > 3, 20.0)
    assert (host.told(RanksEnded), gone(pid)) == ([], False)
    starter.start()
    await until(lambda: host.told(RanksEnded), 20.0)
    assert gone(pid) and gone(supervisor)


async def test_ranks_whose_lease_is_over_end_though_their_supervisor_does_not_look(
    both: tuple[Here, StarterHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "LATE_S", 0.3)
    host, _ = both
    runner = host.runner()
    lease = RankLease(host.env.clock.boot_s(), 5.0, 0.2)
    pid = await running(host, runner, msgspec.structs.replace(of_alice("/bin/sleep", "600"), lease=lease))
    (supervisor,) = programs("supervisor-j1-1")
    os.kill(supervisor, signal.SIGSTOP)
    await until(lambda: host.told(RanksEnded), 20.0)
    (ended,) = host.told(RanksEnded)
    assert ended.lost and "no leader has confirmed" in ended.reason and gone(pid)


async def test_only_the_agents_user_may_ask_a_supervisor(both: tuple[Here, StarterHere], short: str) -> None:
    host, _ = both
    runner = host.runner()
    await running(host, runner, of_alice("/bin/sleep", "600"))
    path = f"{short}/u/jobs/j1/sup-1.sock"

    def asks() -> str:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(path)
            return str(client.recv(100))

    assert as_user(BOB, asks) == "EACCES"
    assert as_user(ALICE, asks) == "b''", "the user has signals for that"
    await runner.stop(J1, 1, 0.0, "over")
    await until(lambda: host.told(RanksEnded))


async def test_a_socket_that_is_not_the_users_is_no_supervisor(both: tuple[Here, StarterHere], short: str) -> None:
    """A user puts a link to a socket of another user, or of the agent, in the place of the supervisor's."""
    host, _ = both
    runner = host.runner()
    pid = await running(host, runner, of_alice("/bin/sleep", "600"))
    await runner.stop_up()
    heard: list[bytes] = []

    async def hears(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(pack(RanksStatus(J1, 1, SupervisorState(codes={0: 0}, ended=True))))
        heard.append(await reader.read(100))

    other = await asyncio.start_unix_server(hears, f"{short}/other.sock")
    path = f"{short}/u/jobs/j1/sup-1.sock"
    os.rename(path, f"{path}.kept")
    os.symlink(f"{short}/other.sock", path)
    host.facts.clear()
    second = host.runner()
    await second.start_up()
    await until(lambda: "a job's socket is not its user's" in host.lines.text)
    assert host.told(RanksEnded) == [] and b"".join(heard) == b""
    os.rename(f"{path}.kept", path)
    await until(lambda: host.told(RanksStarted), 20.0)
    other.close()
    await second.stop(J1, 1, 0.0, "over")
    await until(lambda: host.told(RanksEnded) and gone(pid), 20.0)


async def test_a_supervisor_names_no_process_of_another_user(both: tuple[Here, StarterHere]) -> None:
    """What the agent hears of pids is told to plugins, which signal them."""
    host, _ = both
    assert host.env.starter.owner(ProcessId(os.getpid(), 0)) is None, "of another time"
    here = ProcessId(os.getpid(), start_ticks(os.getpid()) or 0)
    state = SupervisorState(pids={0: here}, codes={0: 0, 7: 3}, leaving=(here,), reason="a\nb\x1b[2J" + "x" * 5000)
    state = msgspec.structs.replace(state, unstarted="host")
    found = believed(host.env, of_alice("/bin/true"), state)
    assert (found.pids, found.codes, found.leaving, len(found.reason)) == ({}, {0: 0}, (), 998)
    assert found.reason.isprintable() and found.unstarted == "job", "no user says that a host fails"
    assert believed(host.env, ranks("j2", "/bin/true"), state) == state, "the agent's own supervisor is believed"


async def test_a_state_that_its_user_replaced_ends_the_job_and_nothing_else(
    both: tuple[Here, StarterHere], short: str
) -> None:
    host, _ = both
    runner = host.runner()
    pid = await running(host, runner, of_alice("/bin/sleep", "600"))
    folder = Path(short, "u/jobs/j1")
    (folder / "1.state").unlink()
    os.symlink("/etc/hostname", folder / "1.state")
    (supervisor,) = programs("supervisor-j1-1")
    os.kill(supervisor, signal.SIGKILL)
    await until(lambda: host.told(RanksEnded), 30.0)
    await until(lambda: gone(pid), 10.0)
    (ended,) = host.told(RanksEnded)
    assert (ended.job, set(ended.codes)) == (J1, {0}) and ended.codes[0] != 0, "nobody believes that it went well"
    assert [started.pids for started in host.told(RanksStarted)] == [{0: pid}], "it was started once"

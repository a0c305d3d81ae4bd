"""Ranks of a real job on a real rack are killed, again and again, and the job ends as if nothing had happened."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cli.client import AgentctlError
from tests.rack.living_rack import EXAMPLES, LivingRack, living_rack, wait

pytestmark = [pytest.mark.rack, pytest.mark.xdist_group("rack")]

STEPS, STEP_S = 600, 0.01
SCRIPT = EXAMPLES / "healing.py"
OPTIONS = f"--steps={STEPS}", f"--step-seconds={STEP_S}", "--width=2048"
"""The options of the job: its weights of 80 KB are in a table of their own where hosts are two."""


@pytest.fixture(scope="module")
def living() -> Iterator[LivingRack]:
    with living_rack() as found:
        yield found


def digest(living: LivingRack, job: str, attempts: int = 1) -> str:
    """The digest with which a job that ended well ended."""
    ended = wait("the job has ended", lambda: (now := living.job(job))["over"] and now, 90)
    assert (ended["state"], ended["exit_code"], ended["tally"]["attempt"]) == ("done", 0, attempts), (
        f"{ended['reason']}\n{living.agentctl('logs', job)[1]}\n{living.agentctl('why', job)[1]}"
    )
    found = re.search(r"state sha256=([0-9a-f]{64}) +accuracy=(0\.\d+)", living.output(job))
    assert found and float(found[2]) > 0.9, living.output(job)[-500:]
    return found[1]


@pytest.fixture(scope="module")
def undisturbed(living: LivingRack) -> str:
    return digest(living, living.submit(SCRIPT, *OPTIONS))


def ranks(living: LivingRack, job: str) -> dict[int, int]:
    """The job's ranks, once all of them run: rank -> pid."""
    view: dict[str, Any] = wait("all ranks run", lambda: (now := living.job(job))["step"] and now)
    return {rank["rank"]: rank["pid"] for rank in view["ranks"] if rank["pid"]}


def successor(living: LivingRack, job: str, rank: int, lost: int) -> None:
    wait(f"rank {rank} has a successor", lambda: ranks(living, job).get(rank) not in (None, lost))


def test_ranks_that_are_killed_are_replaced_and_nobody_else_begins_anew(living: LivingRack, undisturbed: str) -> None:
    draws, job = Random(14), living.submit(SCRIPT, *OPTIONS)
    first = ranks(living, job)
    assert len(first) == 4
    lost: dict[int, int] = {}
    for _ in range(3):
        now = ranks(living, job)
        rank = draws.choice([0, 1, 2])
        os.kill(now[rank], signal.SIGKILL)
        lost[rank] = lost.get(rank, 0) + 1
        successor(living, job, rank, now[rank])
    last = ranks(living, job)
    assert digest(living, job) == undisturbed
    assert {rank for rank in first if first[rank] == last[rank]} == set(range(4)) - set(lost), "others went on"
    said = [event["event"] for event in living.agent().get("why", job).data]
    assert said.count("rank replaced") == 3


@pytest.mark.long
def test_a_rank_and_the_owner_of_a_table_and_then_a_rank_and_its_agent_are_killed(
    living: LivingRack, undisturbed: str
) -> None:
    job = living.submit(SCRIPT, *OPTIONS)
    pids = ranks(living, job)
    by = next(row["by"] for row in living.agent().get("tensors").data if row["job"] == job)
    owner = int(by.removeprefix("rank "))
    for rank in {owner, 3}:
        os.kill(pids[rank], signal.SIGKILL)
    for rank in {owner, 3}:
        successor(living, job, rank, pids[rank])
    pids = ranks(living, job)
    host = living.job(job)["places"][0]["host"]
    for pid in (living.agentd(host), pids[0]):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    living.start()
    assert digest(living, job) == undisturbed


@pytest.mark.long
def test_a_rank_that_is_stuck_is_replaced_and_stacks_are_kept(living: LivingRack, undisturbed: str) -> None:
    job = living.submit(SCRIPT, *OPTIONS, hang_s=2.0)
    first = ranks(living, job)
    time.sleep(2.0)  # a process younger than that is nobody's fault
    os.kill(first[3], signal.SIGSTOP)
    successor(living, job, 3, first[3])
    last = ranks(living, job)
    assert digest(living, job) == undisturbed
    assert {rank for rank in first if first[rank] == last[rank]} == {0, 1, 2}
    said = {event["event"]: event["reason"] for event in living.agent().get("why", job).data}
    assert "for rank 3 (--hang 2.0 s)" in said["rank stuck"], said
    assert "most recent call first" in living.output(job, 0), "where the others were"


@pytest.mark.long
def test_processes_of_an_elastic_job_come_and_go_and_are_killed(living: LivingRack, undisturbed: str) -> None:
    job = living.submit(EXAMPLES / "elastic.py", *OPTIONS, workers=1, workers_max=4)
    assert len(ranks(living, job)) == 1

    def scaled(processes: int) -> None:
        def has_state() -> bool:
            code, said = living.agentctl("scale", job, str(processes))
            assert code in (0, 75), said
            return code == 0

        wait("the state is registered, and the job is scaled", has_state)
        wait("these processes run", lambda: len(ranks(living, job)) == processes)

    scaled(4)
    scaled(2)
    scaled(3)
    now = ranks(living, job)
    wait("others have the state", lambda: len(living.job(job)["elastic"]["have"]) > 1)
    os.kill(now[0], signal.SIGKILL)
    successor(living, job, 0, now[0])
    wait("it has the state", lambda: 0 in living.job(job)["elastic"]["have"])
    scaled(2)
    assert digest(living, job) == undisturbed, "whoever carried which of its four ranks"
    said = [event["event"] for event in living.agent().get("why", job).data]
    assert (said.count("grew"), said.count("shrank"), said.count("rank replaced")) == (2, 2, 1), said


@pytest.mark.long
def test_jobs_that_are_preempted_save_by_themselves_and_end_with_the_same_bits(
    living: LivingRack, undisturbed: str
) -> None:
    slowly = "--step-seconds=0.03"  # a drain first waits some seconds for room elsewhere
    jobs = [
        living.submit(EXAMPLES / "healing.py", *OPTIONS, slowly),
        living.submit(EXAMPLES / "elastic.py", *OPTIONS, slowly, workers=2, workers_max=4),
    ]

    def all_have(holds: Callable[[dict[str, Any]], object]) -> bool:
        return all(holds(living.job(job)) for job in jobs)

    wait("steps", lambda: all_have(lambda now: (now["step"] or 0) >= 30))
    hosts = [host.name for host in living.hosts]
    for words in ("cordon {}", "drain {} --stop-jobs"):
        for name in hosts:
            assert living.agentctl("hosts", *words.format(name).split())[0] == 0
    wait("both wait for GPUs", lambda: all_have(lambda now: now["state"] == "queued"))
    saved = {job: living.job(job)["seen"]["saved"] for job in jobs}
    assert all(30 <= each["step"] < STEPS and Path(each["path"]).is_file() for each in saved.values()), saved
    for name in hosts:
        assert living.agentctl("hosts", "resume", name)[0] == 0
    for job in jobs:
        assert digest(living, job, 2) == undisturbed
        assert f"goes on with step {saved[job]['step']}, from " in living.output(job)
        assert f"/checkpoints/{job}-" in living.agentctl("job", job)[1]


def owners(living: LivingRack, job: str) -> dict[str, str]:
    """Who sums each table of the job now: table -> host."""
    rows = living.agent().get("tensors").data
    return {row["job"]: row["host"] for row in rows if row["job"].partition("/")[0] == job}


@pytest.mark.long
def test_shares_and_owners_of_an_elastic_job_change_while_it_runs(living: LivingRack, undisturbed: str) -> None:
    """A host without processes of the job can own its tables too; it only adds."""
    job = living.submit(EXAMPLES / "elastic.py", *OPTIONS, workers=2, workers_max=4)
    ranks(living, job)
    (home,) = places(living, job)
    worker, server = [host.name for host in living.hosts if host.name != home][:2]

    def arranged(**wanted: Any) -> dict[str, Any]:
        def has_state() -> Any:
            with suppress(AgentctlError):
                return living.agent().post("jobs", job, "arrange", body=wanted).data

        found: dict[str, Any] = wait("it is arranged so", has_state)
        return found

    tables = living.job(job)["elastic"]["tables"]
    assert tables == 4, "however few hosts it has at its start"
    now = arranged(processes={home: 1, worker: 1}, shares={home: 1, worker: 3}, owners=[worker] * tables)
    assert now["elastic"]["shares"] == {home: 1, worker: 3} and not now["elastic"]["equal"]
    wait("both run", lambda: {each["host"] for each in living.job(job)["ranks"] if each["pid"]} == {home, worker})
    wait("its new process owns all tables", lambda: set(owners(living, job).values()) == {worker})
    arranged(shares={home: 3, worker: 1}, owners=[server, home, server, worker])
    wait("a host without processes owns tables", lambda: server in owners(living, job).values())
    wait("the others are where they are to be", lambda: _as_said(living, job, [server, home, server, worker]))
    with pytest.raises(AgentctlError, match="the shares of the hosts are 5 ranks together"):
        living.agent().post("jobs", job, "arrange", body={"shares": {home: 3, worker: 2}})
    assert digest(living, job) == undisturbed, "whoever carried which of its ranks, and wherever they were added"


def test_data_that_spills_to_other_hosts_leaves_the_bits_as_they_are(living: LivingRack) -> None:
    """A volume goes with its process, also with one that is killed."""

    def submitted(*more: str) -> str:
        options = "--blocks=16", "--rows=4096", "--features=64", "--steps=24", *more
        return living.submit(EXAMPLES / "elastic" / "mlr.py", *options, workers=1, workers_max=4, gpus_per_worker=0)

    def trained(job: str) -> str:
        ended = wait("the job has ended", lambda: (now := living.job(job))["over"] and now, 90)
        assert ended["exit_code"] == 0, (ended["reason"], living.output(job))
        return living.output(job)

    def volumes() -> set[str]:
        return {each["volume"] for each in living.agent().get("volumes").data}

    killed = submitted("--spill=remote", "--resident=4 MiB", "--step-seconds=0.05")
    wait("its Blocks lie elsewhere", volumes)
    os.kill(ranks(living, killed)[0], signal.SIGKILL)
    spilled, kept = trained(submitted("--spill=remote", "--resident=4 MiB")), trained(submitted())
    assert "the others in remote memory (volume j" in spilled
    found = [re.findall("state sha256=([0-9a-f]{64})", said) for said in (spilled, kept)]
    assert len(found[0]) == 1 and found[0] == found[1]
    wait("no volume is left", lambda: not volumes())


def test_a_job_keeps_within_the_memory_that_it_may_take_on_a_host(living: LivingRack) -> None:
    """Blocks of 512 MiB, of which the agent's view says what is in memory. Reference: §4.3.3."""
    limit = 240 << 20
    script = Path(__file__).parents[1] / "covey" / "spilling_script.py"
    job = living.submit(script, "60", "64", "8", "disk", workers=1, gpus_per_worker=0, host_memory=limit, name="spills")

    def has() -> Any:
        return [each for each in living.job(job)["seen"]["memory"].values() if each["blocks_bytes"]]

    wait("it says what it has", has)
    ended = wait("it has ended", lambda: (now := living.job(job))["over"] and now, 90)
    assert ended["exit_code"] == 0, (ended["reason"], living.output(job))
    said = living.output(job)
    assert "the others in /" in said and int(re.findall(r"peak_mib=(\d+)", said)[0]) << 20 <= limit, said
    assert ended["seen"]["host_memory"] == limit


def _as_said(living: LivingRack, job: str, hosts: list[str]) -> bool:
    found = owners(living, job)
    return bool(found) and all(host == hosts[int(table.partition("/")[2] or 0)] for table, host in found.items())


def places(living: LivingRack, job: str) -> dict[str, list[int]]:
    return {place["host"]: place["ranks"] for place in living.job(job)["places"]}


@pytest.mark.long
def test_ranks_join_those_on_the_other_host_and_the_bits_are_the_same(living: LivingRack) -> None:
    """The job begins on two hosts, since a GPU of each is taken while it starts."""
    blocks = living.submit(SCRIPT, argv=["sleep", "600"], pack="apart")
    wait("a GPU of each host is taken", lambda: living.job(blocks)["state"] == "running")
    job = living.submit(SCRIPT, *OPTIONS, workers=2)
    wait("both ranks run", lambda: living.job(job)["step"])
    at = places(living, job)
    assert sorted(map(len, at.values())) == [1, 1]
    living.agent().post("jobs", blocks, "cancel")
    wait("it may lose a host", lambda: living.job(job)["over"] or not living.job(job)["losses"]["heals_not"])
    leaves, stays = list(at)
    try:
        living.agent().post("jobs", job, "move", body={"what": str(at[leaves][0]), "to": stays})
    except AgentctlError as error:  # the leader joined them first, since both hosts have room now
        assert any(why in str(error) for why in ("its ranks are there already", "are about to move")), error
    assert f"from {leaves}, beside the ranks that it has" in living.job(job)["reason"]
    assert [len(each) for each in places(living, job).values()] == [2]
    assert digest(living, job) == digest(living, living.submit(SCRIPT, *OPTIONS, workers=2))


@pytest.mark.long
def test_ranks_are_moved_to_another_host_and_nobody_else_begins_anew(living: LivingRack, undisturbed: str) -> None:
    job = living.submit(SCRIPT, *OPTIONS)
    first, at = ranks(living, job), places(living, job)
    wait("it may lose a host", lambda: not living.job(job)["losses"]["heals_not"])
    leaves, stays = list(at)
    said = living.agent().post("jobs", job, "move", body={"what": str(at[leaves][1])}).data
    assert f"takes over ranks {at[leaves][0]}, {at[leaves][1]} from {leaves}" in said["reason"]
    with pytest.raises(AgentctlError, match=f"'7' is neither a rank of it nor a host with its ranks.*{stays}"):
        living.agent().post("jobs", job, "move", body={"what": "7"})
    for rank in at[leaves]:
        successor(living, job, rank, first[rank])
    now = ranks(living, job)
    assert digest(living, job) == undisturbed
    assert {rank for rank in first if now[rank] == first[rank]} == set(at[stays]) and leaves not in places(living, job)


@pytest.mark.long
def test_a_host_is_drained_and_its_job_ends_elsewhere_with_the_same_bits(living: LivingRack, undisturbed: str) -> None:
    job = living.submit(SCRIPT, *OPTIONS)
    first, at = ranks(living, job), places(living, job)
    leaves, stays = list(at)
    code, said = living.agentctl("hosts", "drain", leaves, "--wait", "--timeout", "60s")
    assert code == 0 and f"{leaves} is empty" in said
    row = next(row for row in living.agent().get("hosts").data if row["host"] == leaves)
    assert row["drained_by"] and not (row["drained_jobs"] or row["aggregator_jobs"])
    now = wait("all run elsewhere", lambda: (found := ranks(living, job)) and len(found) == 4 and found)
    assert leaves not in places(living, job) and {now[rank] for rank in at[stays]} == {
        first[rank] for rank in at[stays]
    }
    with pytest.raises(AgentctlError, match=f"{leaves} is drained"):
        living.agent().post("jobs", job, "move", body={"what": stays, "to": leaves})
    assert living.agentctl("hosts", "resume", leaves)[0] == 0
    assert digest(living, job) == undisturbed


def where_spares_wait(living: LivingRack, job: str) -> dict[str, str]:
    """Where spares of the job wait, by host, as the newest event says."""
    told = [event for event in living.agent().get("why", job).data if event["event"] == "spares here"]
    return {event["host"]: event["reason"] for event in told}


def processes_of(script: Path) -> set[int]:
    """The processes that run a script, ranks and spares."""
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and str(script).encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found


@pytest.mark.long
def test_a_host_is_lost_with_two_ranks_and_they_go_on_in_spares_elsewhere(living: LivingRack, undisturbed: str) -> None:
    job = living.submit(SCRIPT, *OPTIONS, spares=2)
    first, at = ranks(living, job), places(living, job)
    wait("it may lose a host", lambda: not living.job(job)["losses"]["heals_not"])

    def all_wait() -> bool:
        said = where_spares_wait(living, job)
        return len(said) == 3 and all("2 processes wait" in each for each in said.values())

    wait("spares wait on both hosts and on one more", all_wait)
    waited = processes_of(SCRIPT) - set(first.values())
    lost, stays = list(at)
    living.lose(lost)
    now = wait("others run in their place", lambda: (found := ranks(living, job)) and len(found) == 4 and found)
    assert digest(living, job) == undisturbed
    assert {rank for rank in first if now[rank] == first[rank]} == set(at[stays]) and lost not in places(living, job)
    assert {now[rank] for rank in at[lost]} <= waited, "they had been started before"
    wait("no spare is left", lambda: not processes_of(SCRIPT))
    living.start()

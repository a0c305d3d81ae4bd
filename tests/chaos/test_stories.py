"""Whole simulated racks: stories by seed hold, the same seed is the same story, and planted bugs are found."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.config import parse
from agent.jobs.runner import SupervisedRunner
from agent.raft import policy as raft_policy
from chaos.faults import Partition, strike
from chaos.rackworld import SimRack
from chaos.stories import train
from chaos.story import held_stories, known_stories, tell
from chaos.world import disk
from chaos.world.world import Broken
from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.log import job_starts
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.messages.commands import Granted
from tests.families import in_gate

LONG = (
    *("struck_in_eviction", "swarm_idle", "over_budget", "rolling_restart", "bytes_stopped", "files_damaged"),
    *("borrower_away", "places_joined", "memory_measured", "hosts_replaced", "log_writer_killed", "rearranged"),
    *("parity", "memory_short", "gang_upgraded", "closing_killed", "classes", "tables_moved", "lost_killed"),
    *("environments", "voters_apart", "voters_grown", "idle_volume", "packs", "struck_in_change", "half_and_half"),
    *("mirrored", "links_cut", "disk_refuses", "calm", "lender_killed", "block_device", "log_clients"),
)
"""Stories that take more than two processor seconds each: with LONG=1, and in `make soak`, which plays all."""
DIRECTED = [name for name in held_stories() if name not in ("swarm", *LONG)]
CHEAP = {"default_slabs": 4}
"""First seed of a story, where seed 1 takes too long."""


@pytest.mark.parametrize(
    ("story", "seed"),
    [
        *((story, CHEAP.get(story, 1)) for story in DIRECTED),
        pytest.param("mischief", 2, marks=pytest.mark.long),
        ("swarm_idle", 807),
        *(pytest.param(story, 1, marks=pytest.mark.long) for story in LONG),
        pytest.param("struck_in_eviction", 1601, marks=pytest.mark.long),
        *(pytest.param("rearranged", seed, marks=pytest.mark.long) for seed in range(2, 22)),
    ],
)
def test_every_directed_story_holds(story: str, seed: int) -> None:
    """One seed of each story; `make soak` plays more."""
    tell(story, seed)


@pytest.mark.parametrize("story", sorted(known_stories().keys() - set(held_stories())))
def test_a_story_that_is_known_to_be_broken_is_broken(story: str) -> None:
    """When a story passes, the fault is fixed: remove its `KNOWN_BROKEN`."""
    assert found_by([story], range(1, 9))


@pytest.mark.parametrize("seed", in_gate(4, range(1, 13)))
def test_a_swarm_of_faults_breaks_nothing_that_must_hold(seed: int) -> None:
    told = tell("swarm", seed)
    assert told.steps > 1000


@pytest.mark.parametrize(("story", "seed"), in_gate(1, [("half_and_half", 48), ("half_and_half", 4), ("swarm", 23)]))
def test_hosts_that_were_cut_off_while_their_job_moved_learn_of_it(story: str, seed: int) -> None:
    """Ranks there could still use the former aggregator, so none complained and the job hung for ever."""
    tell(story, seed)


def test_ranks_whose_agent_starts_again_before_it_knows_their_run_are_told_who_sums() -> None:
    """A rank had joined as its agent was killed, and again before the new one had read the log: it waited for ever."""
    tell("agent_killed", 90030)


@pytest.mark.parametrize("seed", in_gate(1, [2004, 2078]))
def test_ranks_that_started_are_not_said_to_have_ended_when_the_disk_fails_just_then(seed: int) -> None:
    """The ranks' GPUs were given to the next job while they still ran on them."""
    tell("swarm", seed)


@pytest.mark.parametrize("seed", in_gate(1, [602, 660]))
def test_a_rack_whose_disks_were_sick_finishes_its_jobs(seed: int) -> None:
    tell("swarm", seed)


def test_what_is_a_ranks_own_is_kept_for_others_that_stand_a_step_behind_it() -> None:
    """A rank had told what it has two steps later, and what the others needed was dropped."""
    tell("ranks_healed", 271)


def test_a_coordinator_that_stood_still_learns_whom_its_deputy_chose() -> None:
    """The coordinator learns it even if the deputy's agent began anew meanwhile."""
    tell("swarm", 72125)


def test_a_page_written_while_no_agent_opened_its_place_is_the_disks_alone() -> None:
    """A lender had granted the place, the agent ended before it was opened, and power took what was not synced."""
    tell("swarm", 80034)


def test_a_page_written_in_the_instant_without_a_link_is_the_disks_alone() -> None:
    """The link was there again 0.1 s later, the copy to the lender failed on a sick disk, and power took the page."""
    tell("mischief", 83043, vary=1)


def test_a_host_that_lends_what_was_closed_long_ago_holds_no_page() -> None:
    """The lender in use lost its power, then the volume's host; a cut-off one had not heard that it may forget."""
    tell("swarm", 80670)


@pytest.mark.parametrize("seed", in_gate(1, [10, 13, 22]))
def test_memory_is_not_used_again_while_an_ended_connection_may_still_send_it(seed: int) -> None:
    """One member of a mirrored slab was silent and the other acknowledged: what the first was sent, once it continued,
    was the next write by then. With sealed pages (seed 13), its lender was blamed for it."""
    tell("silent_lenders", seed)


def test_a_log_that_was_lost_counts_once_its_host_says_so() -> None:
    tell("log_lost", 71107)


@pytest.mark.long
def test_pages_of_a_place_that_was_closed_survive_a_loss_of_power() -> None:
    tell("files_damaged", 6)


@pytest.mark.parametrize(
    ("story", "seed"),
    in_gate(
        2,
        [
            *(("identity_older", 2), ("lenders_paused", 313)),
            *(("mischief", seed) for seed in (111, 24, 30, 46, 71006, 300145)),
        ],
    ),
)
def test_seeds_that_once_waited_in_vain_come_to_their_end(story: str, seed: int) -> None:
    """Earlier faults: a slab was not lent within its time; a page that was in both places of a disk was called damaged
    for ever, and so were pages that a volume found torn whose disk then failed while it was opened; a host was not
    heard whose boot number was older than others knew; settings were drawn under which two jobs stop one another for
    ever."""
    tell(story, seed)


@pytest.mark.parametrize(
    ("story", "seed", "vary"),
    in_gate(1, [("people", 13, 1), ("people", 8, 0), ("strangers", 26, 2), ("strangers", 28, 2)]),
)
def test_people_and_strangers_find_nothing_again_where_they_did(story: str, seed: int, vary: int) -> None:
    """Earlier faults: a log that was whole in the kernel alone; a record of ranks that was deleted, since their state
    could not be read for a moment; ranks that were started once more by one supervisor too many; a lender whose port
    another program took while the volume's process was away."""
    told = tell(story, seed, vary=vary)
    assert told.faults > 5


def test_the_same_seed_is_the_same_story_under_two_hash_seeds() -> None:
    def told(hash_seed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "chaos.main", "hash", "--seed", "5", "--until", "20"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    first = told("1")
    assert len(first) == 8
    assert first == told("2") == f"{tell('swarm', 5, until=20.0).story_hash:08x}"


def test_a_rack_of_seven_with_five_voters_lives_too() -> None:
    with SimRack(3, hosts=7) as rack:
        rack.start()
        rack.settle()
        assert {len(agent.voters) for agent in rack.agents.values()} == {5}
        rack.run(5.0)


def test_an_impossible_job_is_refused_and_says_why() -> None:
    with SimRack(4) as rack:
        rack.start()
        rack.settle()
        with pytest.raises(Refused, match="can never be placed"):
            rack.ask("h2", "scheduler.submit", {"spec": {"argv": ["sleeper", "1"], "workers": 40, "cwd": "/"}})


def test_an_agent_without_the_gossip_key_is_never_seen() -> None:
    with SimRack(5) as rack:
        stranger = rack.hosts["h4"]
        config = parse(
            {
                "name": "h4",
                "state_dir": stranger.disk.root,
                "run_dir": stranger.run_dir,
                "advertise": stranger.ip,
                "gossip": {"bind": f"{stranger.ip}:7946", "seeds": [f"{rack.hosts['h1'].ip}:7946"]},
                "control": {"bind": f"{stranger.ip}:7947"},
                "leader": {"voters": ["h1", "h2", "h3"]},
            },
            "h4",
            {},
            tuple(rack.plugins),
        )
        stranger.main = rack._main(stranger, config, [b"k" * 32])
        rack.start()
        rack.run(20.0)
        for name in ("h1", "h2", "h3"):
            assert {view.host for view in rack.agents[name].hosts()} == {"h1", "h2", "h3"}
        assert {view.host for view in rack.agents["h4"].hosts()} == {"h4"}


# ---- planted bugs ----------------------------------------------------------------------------------------------------


def found_by(stories: Sequence[str], seeds: Sequence[int]) -> str:
    """Message of the first seed that breaks; empty when all held."""
    for seed in seeds:
        for story in stories:
            try:
                tell(story, seed)
            except Broken as broken:
                return str(broken)
    return ""


def test_a_leader_that_commits_what_it_alone_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_policy, "commit_index", max)
    with SimRack(1) as rack:
        rack.start()
        rack.settle()
        alone = rack.leader()
        assert alone is not None
        others = tuple(name for name in rack.hosts if name != alone)
        strike(rack.world, Partition((alone,), others, False, 20.0))
        train(rack, rounds=2, key="minority", on=alone)
        with pytest.raises(Broken, match=r"logs agree on what is committed|has committed another command"):
            train(rack, rounds=3, key="majority", on=others[0])
            rack.run(40.0)


def test_a_queue_that_forgets_quotas_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    granted = job_starts.granted

    def without_quota(queue: JobTable, job: Any, command: Any) -> Any:
        kept, queue.quotas = queue.quotas, {}
        try:
            return granted(queue, job, command)
        finally:
            queue.quotas = kept

    monkeypatch.setattr(job_starts, "granted", without_quota)
    with SimRack(1, quotas={"red": 2}) as rack:
        rack.start()
        rack.settle()
        for number in range(2):
            spec = {"argv": ["sleeper", "30"], "tenant": "red", "workers": 2, "gpus_per_worker": 1, "cwd": "/"}
            rack.submit(spec, f"quota-key-{number}")
        queue = rack.plugin("h1", "scheduler").queue
        waiting = [job for job in queue.jobs.values() if job.state == "queued"]
        if waiting:  # the leader kept to it; the log must not have to rely on that
            grant(rack, waiting[0].id)
        with pytest.raises(Broken, match="no tenant runs more than its quota"):
            rack.run(20.0)


def grant(rack: SimRack, job: JobId) -> None:
    """Let the leader, as if out of its mind, grant a job over quota."""
    leader = rack.leader()
    assert leader is not None
    scheduler, process = rack.plugin(leader, "scheduler"), rack.hosts[leader].agent
    assert process is not None
    process.spawn("mad", scheduler.queue_log.propose(Granted(wall_s=0.0, job=job, epoch=1, coordinator=HostId(leader))))


@pytest.mark.long
def test_ranks_that_nobody_stops_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(self: SupervisedRunner, job: JobId, epoch: int, grace_s: float, why: str) -> None:
        return

    monkeypatch.setattr(SupervisedRunner, "stop", deaf)
    assert found_by(["host_lost"], range(1, 9))


def test_a_log_that_is_not_synced_before_it_answers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def lazy(self: disk.Append) -> None:
        file = self.disk.files.setdefault(self.name, disk.SimFile())
        file.write(len(file.data), self.content)

    monkeypatch.setattr(disk.Append, "finish", lazy)
    assert found_by(["blackout"], range(1, 9))


@pytest.mark.long
def test_a_disk_that_forgets_pages_is_found_when_their_lender_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    write_at = disk.WriteAt.finish

    def forgetful(self: disk.WriteAt) -> None:
        if "volumes" in self.name:
            self.content = bytes(len(self.content))
        write_at(self)

    monkeypatch.setattr(disk.WriteAt, "finish", forgetful)
    assert found_by(["lender_killed", "volume_killed"], range(1, 9))

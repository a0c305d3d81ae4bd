"""Many small worlds must hold, and the same worlds must notice when the core is wrong."""

import os
from collections.abc import Callable

import msgspec
import pytest

from agent.raft import policy
from agent.raft.disk import Store
from agent.raft.machine import Outcome, Raft, SessionTable
from agent.raft.machine.raft_log import RaftLog
from agent.raft.machine.types import ConfigurationWanted, Snapshot
from agent.raft.messages import Configuration, Entry, TimeoutNow, Voter
from chaos.crowds.log.nodes import Violation
from chaos.crowds.log.play import run_seed, run_seeds
from tests.families import in_gate

SLICES = [(first, 50) for first in range(0, 200, 50)]


@pytest.mark.parametrize(("begins", "count"), in_gate(1, SLICES))
def test_two_hundred_worlds_keep_every_promise_of_raft(begins: int, count: int) -> None:
    """Reference: Raft Figure 3; `simulation` lists what is checked."""
    events, commands, seen = run_seeds(begins, count)
    assert events >= count * 2000
    assert commands > count * 20, "hardly anything was acknowledged: the worlds were too harsh to say something"
    assert seen > count * 5, "hardly anything crashed or fell behind: the worlds were too kind to say something"


def test_a_seed_plays_the_same_world_again() -> None:
    first, second = run_seed(77), run_seed(77)
    assert (first.now_s, first.matching, first.chosen) == (second.now_s, second.matching, second.chosen)


@pytest.mark.parametrize("seed", [510422, 3000576, 3001655])
def test_a_world_that_did_not_converge_once_does(seed: int) -> None:
    """A leader heard a lost log after the next one; a host that had heard only how its log began was asked by, or was
    to follow, hosts that did not vote then."""
    assert run_seed(seed).seen > 0


@pytest.mark.skipif(
    "COVEY_CONSENSUS_SEEDS" not in os.environ, reason="a longer search: COVEY_CONSENSUS_SEEDS=first:count"
)
@pytest.mark.timeout(0)
@pytest.mark.cpu_seconds(0)
def test_as_many_worlds_as_asked_for() -> None:
    first, _, count = os.environ["COVEY_CONSENSUS_SEEDS"].partition(":")
    assert run_seeds(int(first), int(count))[0] > 0


# ---- planted bugs: what the worlds must notice ----


def truncate_without_conflict(patch: pytest.MonkeyPatch) -> None:
    """Patch in the bug of PySyncObj: a delayed Append shortens the log by entries that were acknowledged."""

    def merge(self: RaftLog, prev_index: int, entries: tuple[Entry, ...]) -> None:
        known = max(0, self.commit - prev_index)
        if len(entries) > known:
            if prev_index + known < self.log.last_index:
                self._cut(prev_index + known + 1)
            self.append(entries[known:])

    patch.setattr(RaftLog, "merge", merge)


def vote_for_anybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy, "up_to_date", lambda *logs: True)


def promise_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RaftLog, "promise", RaftLog.send)


def help_to_replace_a_leader_that_lives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Raft, "_loyal", lambda self: False)


def take_half_for_a_majority(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy, "quorum", lambda voters: max(1, voters // 2))


def apply_every_copy(patch: pytest.MonkeyPatch) -> None:
    def apply(self: SessionTable, index: int, entry: Entry, run: Callable[[int, bytes], bytes]) -> Outcome:
        return Outcome("applied", index, run(index, entry.command))

    patch.setattr(SessionTable, "apply", apply)


def lead_on_after_the_order(patch: pytest.MonkeyPatch) -> None:
    """Patch in a leader that hands its office over and keeps it: a lease runs on beside the new leader's."""

    def hand_over(self: Raft) -> None:
        successor = self.leading.successor(self._now_s) if self.leading else None
        if successor is not None:
            self._raft_log.send(successor, TimeoutNow(self.term))

    patch.setattr(Raft, "_hand_over", hand_over)


def obey_an_order_of_long_ago(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Raft, "_told_to_stand", lambda self, sender, order: self._stand(handed_over=True))


def vote_with_any_log(patch: pytest.MonkeyPatch) -> None:
    """Patch in a voter that votes on although its log is not the one that votes under its name."""
    patch.setattr(Raft, "_votes_here", property(lambda self: self.me in self.voters))


def find_nothing_missing(patch: pytest.MonkeyPatch) -> None:
    """Patch in a host that does not look at the second record of what was acknowledged."""
    patch.setattr(Store, "_is_less", lambda self, record: False)


def keep_the_voters_of_an_entry_that_is_gone(patch: pytest.MonkeyPatch) -> None:
    cut = RaftLog._cut

    def forgetting(self: RaftLog, first: int) -> None:
        newest = self.configuration
        cut(self, first)
        index, _ = self._configurations.pop()
        self._configurations.append((index, newest))

    patch.setattr(RaftLog, "_cut", forgetting)


def let_two_voters_go_at_once(patch: pytest.MonkeyPatch) -> None:
    """Patch in a replacement in one step: a majority before and one after need not share a voter."""

    def promoted(configuration: Configuration, voter: Voter) -> Configuration:
        return (
            policy_removed(policy_promoted(configuration, voter))
            if configuration.leaving
            else policy_promoted(configuration, voter)
        )

    policy_promoted, policy_removed = policy.promoted, policy.removed
    patch.setattr(policy, "promoted", promoted)
    patch.setattr(policy, "one_step", lambda old, new: True)


def leave_a_change_to_the_one_who_began_it(patch: pytest.MonkeyPatch) -> None:
    drive, lead = Raft._drive, Raft._configuration_wanted

    def began(self: Raft, wanted: ConfigurationWanted) -> None:
        self.began = self.term  # type: ignore[attr-defined]
        lead(self, wanted)

    patch.setattr(Raft, "_configuration_wanted", began)
    patch.setattr(Raft, "_drive", lambda self: drive(self) if getattr(self, "began", -1) == self.term else None)


def send_a_snapshot_without_its_voters(patch: pytest.MonkeyPatch) -> None:
    install = RaftLog.install

    def installed(self: RaftLog, image: Snapshot) -> None:
        install(self, msgspec.structs.replace(image, configuration=self.configuration))

    patch.setattr(RaftLog, "install", installed)


SEEN_FROM: dict[Callable[[pytest.MonkeyPatch], None], int] = {help_to_replace_a_leader_that_lives: 380}
"""The bugs that few worlds see, each with a seed shortly before one that does."""


@pytest.mark.parametrize(
    "plant",
    in_gate(
        4,
        [
            keep_the_voters_of_an_entry_that_is_gone,
            let_two_voters_go_at_once,
            leave_a_change_to_the_one_who_began_it,
            send_a_snapshot_without_its_voters,
            truncate_without_conflict,
            vote_for_anybody,
            promise_before_it_is_durable,
            help_to_replace_a_leader_that_lives,
            take_half_for_a_majority,
            apply_every_copy,
            lead_on_after_the_order,
            obey_an_order_of_long_ago,
            vote_with_any_log,
            find_nothing_missing,
        ],
    ),
)
def test_a_planted_bug_is_noticed(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        run_seeds(SEEN_FROM.get(plant, 0), 250)

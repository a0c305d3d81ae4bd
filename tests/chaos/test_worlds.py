"""Stories of machines alone: told by their seed like the others, and they notice what they are made for."""

import pytest

from agent.rpc.rpc import Messenger
from chaos.crowds import gossip_swarm, messengers, reservations
from chaos.story import stories_of_worlds, tell
from chaos.world.world import Broken
from gossip.membership import policy
from plugins.aggregator.machine.cycle_ledger import CycleLedger
from tests.families import in_gate


@pytest.mark.parametrize("story", in_gate(1, stories_of_worlds()))
def test_a_seed_plays_the_same_worlds_again_and_another_one_others(story: str) -> None:
    assert tell(story, 3).story_hash == tell(story, 3).story_hash != tell(story, 4).story_hash


def test_what_breaks_in_a_world_comes_with_the_line_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CycleLedger, "release", lambda self, job, by, attempt: self.leave(job))
    with pytest.raises(Broken, match=r"repeat with: covey-chaos sim --seed 1 --story aggregator_worlds"):
        tell("aggregator_worlds", 1)


def test_a_release_of_an_older_attempt_that_takes_the_room_of_a_later_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CycleLedger, "release", lambda self, job, by, attempt: self.leave(job))
    with pytest.raises(AssertionError, match="room is held for"):
        for seed in range(20):
            reservations.play(seed)


def test_one_letter_to_the_dead_that_holds_up_all_others_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def settled(self, to):  # type: ignore[no-untyped-def]
        return min((id for ids in self._unsettled.values() for id in ids), default=self._next_id)

    monkeypatch.setattr(Messenger, "_settled", settled)
    with pytest.raises(Broken, match="did not arrive though nothing fails"):
        messengers.play(4)


@pytest.mark.parametrize(
    ("name", "wrong", "noticed"),
    [
        ("health", lambda score, change: 0, "is deaf, and asked others"),
        (
            "change",
            lambda state, claimed, news: "reclaim" if claimed != "same" else "news" if news else "none",
            "which lives",
        ),
        ("STATES", ("alive", "gone", "suspect", "left"), "is gone, and goes on as before"),
    ],
)
def test_what_a_rack_of_gossip_gets_wrong_is_noticed(
    name: str, wrong: object, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, name, wrong)
    with pytest.raises(AssertionError, match=noticed):
        for seed in range(8):
            gossip_swarm.play(seed)

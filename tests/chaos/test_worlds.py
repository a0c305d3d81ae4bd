"""Stories of machines alone: told by their seed like the others, and they notice what they are made for."""

import pytest

from chaos.crowds import reservations, upgrades
from chaos.story import stories_of_worlds, tell
from chaos.world import Broken
from plugins.aggregator.machine.ledger import Ledger
from plugins.sharing.machine.upgrade import Upgrades


@pytest.mark.parametrize("story", stories_of_worlds())
def test_a_seed_plays_the_same_worlds_again_and_another_one_others(story: str) -> None:
    assert tell(story, 3).story_hash == tell(story, 3).story_hash != tell(story, 4).story_hash


def test_what_breaks_in_a_world_comes_with_the_line_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "release", lambda self, job, by, attempt: self.leave(job))
    with pytest.raises(Broken, match=r"repeat with: covey-chaos sim --seed 1 --story aggregator_worlds"):
        tell("aggregator_worlds", 1)


def test_a_release_of_an_older_attempt_that_takes_the_room_of_a_later_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ledger, "release", lambda self, job, by, attempt: self.leave(job))
    with pytest.raises(AssertionError, match="room is held for"):
        for seed in range(20):
            reservations.play(seed)


def test_a_gang_that_is_upgraded_by_the_first_yes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = Upgrades._answered

    def all_at_once(self, host, answer, now_s):  # type: ignore[no-untyped-def]
        asked = self.asked.get(answer.job)
        if asked is not None and not answer.refused:
            asked.yes = set(asked.gpus) - {host}
        return answered(self, host, answer, now_s)

    monkeypatch.setattr(Upgrades, "_answered", all_at_once)
    with pytest.raises(AssertionError, match=r"before .* said yes"):
        for seed in range(40):
            upgrades.play(seed)

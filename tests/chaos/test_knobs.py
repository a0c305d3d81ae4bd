"""Settings at their extremes: accepted by the agent, repeated by the seed, and printed."""

from typing import Any

import pytest

from agent.config import parse
from chaos import knobs
from chaos.rackworld import SMALL_SLABS
from chaos.story import tell

EVERY = [
    (section, {name: value} if name else value)
    for section, of in knobs.KNOBS.items()
    for name, extremes in of.items()
    for value in extremes
]


@pytest.mark.parametrize(("section", "values"), EVERY, ids=str)
def test_every_extreme_is_a_setting_that_an_agent_accepts(section: str, values: dict[str, Any]) -> None:
    assert parse(knobs.joined({"memory": SMALL_SLABS}, {section: values}), "here", {}).source == "here"


def test_every_setting_of_a_story_is_accepted_together() -> None:
    drawn = [knobs.drawn(seed) for seed in range(1000)]
    for tree in drawn:
        parse(knobs.joined({"memory": SMALL_SLABS}, tree), "here", {})
    assert 150 <= sum(bool(tree) for tree in drawn) <= 250
    assert {section for tree in drawn for section in tree} == set(knobs.KNOBS)


def test_no_story_has_settings_under_which_jobs_stop_one_another_for_ever() -> None:
    """Found by `covey-chaos sim --story mischief --seed 300145`: two jobs were started thirteen times each."""
    scheduler = [knobs.drawn(seed).get("scheduler", {}) for seed in range(100_000)]
    hasty = [one for one in scheduler if one.get("starve_limit_s") == 0.0]
    assert len(hasty) > 500
    assert not any("queue_thresholds_gpu_s" in one for one in hasty)
    assert any("queue_thresholds_gpu_s" in one for one in scheduler)


def test_they_are_told_when_the_story_begins_and_are_the_same_every_time() -> None:
    lines: list[str] = []
    first = tell("swarm", 3, until=10.0, log=lines.append)
    assert "settings: [gossip]" in lines[0]
    assert first.story_hash == tell("swarm", 3, until=10.0).story_hash


def test_who_waits_is_as_patient_as_the_settings_ask_for() -> None:
    assert knobs.patience_s({}) == 0
    assert knobs.patience_s({"scheduler": {"host_lost_after_s": 120.0}}) == 60
    assert knobs.patience_s({"gossip": {"suspicion_factor": 20, "probe_interval_s": 3.0}}) > 100

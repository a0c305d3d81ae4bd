"""Settings are added to an agent.toml, and every line of a person's survives."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.joining.toml_lines import CannotWrite, with_settings

SHIPPED = (Path(__file__).parents[2] / "systemd" / "agent.toml").read_text()
SEEDS = {("gossip", "seeds"): ["gpu1:7946"], ("leader", "voters"): ["gpu1"]}
MEANT = {"gossip": {"seeds": ["gpu1:7946"]}, "leader": {"voters": ["gpu1"]}}
PERSONS = """\
name = "gpu2"  # the second
[leader]
heartbeat_s = 0.2
[gpus]
cpu = [
    {cores = "0-3", memory = "2 GiB"},
]
"""


@pytest.mark.parametrize("text", ["", "# nothing", "[gossip]", SHIPPED, PERSONS, "[ leader ]   # who votes\n"])
def test_settings_are_added_and_no_line_is_lost(text: str) -> None:
    found = with_settings(text, SEEDS)
    assert set(text.splitlines()) <= set(found.splitlines())
    before, after = tomllib.loads(text), tomllib.loads(found)
    assert after.get("gossip") == MEANT["gossip"] and after["leader"]["voters"] == ["gpu1"]
    assert {key: value for key, value in after.items() if key not in MEANT} == {
        key: value for key, value in before.items() if key not in MEANT
    }
    assert with_settings(found, SEEDS) == found, "what is there is not written again"


def test_a_setting_of_a_person_is_not_changed_unless_that_is_asked_for() -> None:
    text = '[gossip]\nseeds = [\n  "old:7946",  # the old rack\n]\ncluster = "lab"\n'
    with pytest.raises(CannotWrite, match="old:7946"):
        with_settings(text, SEEDS)
    found = with_settings(text, SEEDS, instead=True)
    assert tomllib.loads(found) == {
        "gossip": {"seeds": ["gpu1:7946"], "cluster": "lab"},
        "leader": {"voters": ["gpu1"]},
    }
    assert '#  "old:7946",  # the old rack' in found


@pytest.mark.parametrize("text", ["gossip.cluster = 'x'\n", "gossip = {cluster = 'x'}\n"])
def test_a_file_that_is_written_in_an_unusual_way_is_not_spoiled(text: str) -> None:
    with pytest.raises(CannotWrite, match="write there yourself"):
        with_settings(text, SEEDS)


@given(
    st.lists(st.sampled_from(["[gossip]", "[leader]", "[log]", 'level = "info"', "# [leader]", "", "x = '''", "'''"]))
)
def test_whatever_comes_out_says_what_was_meant(lines: list[str]) -> None:
    text = "\n".join(lines)
    try:
        before = tomllib.loads(text)
        after = tomllib.loads(with_settings(text, SEEDS))
    except (tomllib.TOMLDecodeError, CannotWrite):
        return
    for section, settings in MEANT.items():
        assert {**before.get(section, {}), **settings} == after[section]

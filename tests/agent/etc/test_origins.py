"""`agentd --show-config`: every setting, its value, where it came from; and what is printed means the same again."""

import tomllib
from pathlib import Path

import pytest

from agent.config import load, parse
from agent.etc import origins
from agent.etc.reload import LIVE

TOML = """\
name = "gpu1"
[gossip]
seeds = ["gpu1:7946"]
[memory]
budgets = {vision = "4 GiB"}
[scheduler]
promote_knob = inf
"""
ENVIRON = {"STATE_DIRECTORY": "/var/lib/covey"}


def shown(tmp_path: Path, text: str = TOML) -> list[str]:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    return list(origins.shown(load(str(path), ENVIRON), origins.written_in(str(path)), ENVIRON))


def test_every_setting_is_shown_with_where_it_came_from(tmp_path: Path) -> None:
    lines = shown(tmp_path)
    words = {" ".join(line.split()) for line in lines}
    path = tmp_path / "agent.toml"
    assert f'name = "gpu1" # {path}' in words
    assert f'seeds = ["gpu1:7946"] # {path}' in words
    assert 'state_dir = "/var/lib/covey" # $STATE_DIRECTORY' in words
    assert 'bind = "0.0.0.0:7946" # default' in words
    assert 'level = "info" # default, live' in words
    assert f'budgets = {{"vision" = "4 GiB"}} # {path}, live' in words
    config = load(str(path), ENVIRON)
    assert sum(" = " in line or line.startswith("#") for line in lines) == len(origins.settings_of(config)) + 1


def test_what_is_shown_is_a_file_that_means_the_same(tmp_path: Path) -> None:
    tree = tomllib.loads("\n".join(shown(tmp_path)))
    again = parse(tree, "again", ENVIRON)
    assert origins.settings_of(again) == origins.settings_of(load(str(tmp_path / "agent.toml"), ENVIRON))


def test_only_settings_that_exist_are_called_live(tmp_path: Path) -> None:
    known = origins.settings_of(parse({}, "none", ENVIRON))
    assert set(LIVE) <= set(known)


@pytest.mark.parametrize(
    ("name", "environ", "where"),
    [
        ("state_dir", {"STATE_DIRECTORY": "/x"}, "$STATE_DIRECTORY"),
        ("run_dir", {"RUNTIME_DIRECTORY": "/x"}, "$RUNTIME_DIRECTORY"),
        ("name", {}, "the machine's host name"),
        ("plugins", {}, "all there are"),
        ("leader.voters", {}, "default"),
    ],
)
def test_a_setting_that_no_file_has_names_its_source(name: str, environ: dict[str, str], where: str) -> None:
    assert origins.origin(name, set(), "agent.toml", environ) == where

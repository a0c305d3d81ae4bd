"""The command line: what it prints, what it returns."""

import pytest

from chaos import main as command
from chaos.novelty import Seen
from chaos.story import Told, stories_of_worlds
from chaos.world.world import Broken

PLAYED = len(stories_of_worlds()) + 3
"""Number of stories for each seed of a soak: all worlds, the swarm and two directed ones."""


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    return int(ended.value.code or 0)


def test_a_story_is_told_with_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("sim", "--seed", "1", "--story", "calm", "--until", "5") == 0
    printed = capsys.readouterr().out
    assert "agent started" in printed
    assert "calm seed 1: 5 s" in printed.splitlines()[-1]
    assert exit_code("hash", "--seed", "1", "--story", "calm", "--until", "5") == 0
    assert capsys.readouterr().out.strip() in printed


def test_the_log_has_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code("sim", "--seed", "1", "--story", "calm", "--until", "3")
    short = capsys.readouterr().out
    exit_code("sim", "--seed", "1", "--story", "calm", "--until", "3", "--log")
    assert len(capsys.readouterr().out) > 2 * len(short)


def test_what_breaks_is_printed_with_the_line_that_repeats_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Told:
        raise Broken("a rule: it broke\nat 1 s of seed 9; repeat with: covey-chaos sim --seed 9")

    monkeypatch.setattr(command, "tell", broken)
    assert exit_code("sim", "--seed", "9") == 1
    assert "repeat with: covey-chaos sim --seed 9" in capsys.readouterr().out
    assert exit_code("soak", "--seeds", "9-9") == 1
    assert f"{PLAYED} broke" in capsys.readouterr().out


def test_a_soak_counts_what_it_played(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "tell", lambda name, seed, seen: Told(name, seed, 100.0, 1, 2, 3, {}))
    assert exit_code("soak", "--seeds", "1-3") == 0
    assert f"{3 * PLAYED} stories held, 0 broke" in capsys.readouterr().out


def test_a_soak_varies_a_seed_that_shows_a_state_never_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[tuple[int, int]] = []

    def tell(name: str, seed: int, *, seen: Seen, vary: int = 0) -> Told:
        if name == "swarm":
            played.append((seed, vary))
            seen.states.add(seed // 2)
        return Told(name, seed, 100.0, 1, 2, 3, {})

    monkeypatch.setattr(command, "tell", tell)
    monkeypatch.setattr(command, "VARIED_AFTER", 0)
    assert exit_code("soak", "--seeds", "2-5") == 0
    assert played == [(2, 0), (2, 1), (2, 2), (3, 0), (4, 0), (4, 1), (4, 2), (5, 0)]
    assert "2 states seen, 2 seeds kept, 4 variations played" in capsys.readouterr().out


def test_a_crowd_prints_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("crowd", "--hosts", "10", "--seed", "1") == 0
    printed = capsys.readouterr().out
    assert "MemoryResult hosts=10" in printed
    assert "GossipResult hosts=10" in printed


@pytest.mark.parametrize("wrong", [("sim",), ("sim", "--seed", "x"), ("soak", "--seeds", "a-b"), ("nothing",)])
def test_wrong_usage_ends_with_status_2(wrong: tuple[str, ...]) -> None:
    assert exit_code(*wrong) == 2

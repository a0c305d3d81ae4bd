"""The picture of docs/design/ARCHITECTURE.md is what the imports are, and not what they were."""

import pytest

from tools.picture import PICTURE, Panel, boxes, lanes, part, picture, svg

TWO = [["high"], ["low"]]


def test_the_picture_shows_the_imports_of_now() -> None:
    assert PICTURE.read_text() == picture(), "next: make picture"


def test_an_import_more_is_an_arrow_more() -> None:
    without = svg([Panel("t", TWO, {"high": "", "low": ""}, frozenset())])
    with_one = svg([Panel("t", TWO, {"high": "", "low": ""}, frozenset({("high", "low")}))])
    assert without.count('class="arrow"') == 0 and with_one.count('class="arrow"') == 1


def test_an_import_upwards_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="low imports high, which is above it"):
        list(lanes(frozenset({("low", "high")}), boxes(TWO)))


def test_modules_of_a_plugin_belong_to_its_parts() -> None:
    assert part("plugins.memory.plugin") == ("memory", "plugin") and part("plugins.memory") is None
    assert part("plugins.memory.machine.lending.lender") == ("memory", "machine")
    assert part("gossip.machine") is None

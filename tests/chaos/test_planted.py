"""Every planted bug still fits the code and names a check that exists; `make mutants` tries whether that notices."""

from pathlib import Path

import msgspec
import pytest

from chaos.planted import Mutant, known_mutants, problems, range_of, with_bug
from chaos.story import known_stories

STORIES = frozenset(known_stories())
GOOD = Mutant(
    file="gossip/types.py",
    find="class HostDown(",
    replace="class HostDown (",
    why="Nothing goes wrong: it is for tests.",
    hosts="one",
    tests=("tests/chaos/test_planted.py::test_a_range_of_seeds_is_two_numbers_or_one",),
)


def test_a_planted_bug_fits_the_code_and_has_a_check() -> None:
    """One test for all of them: a test for each of a thousand costs more than what it looks at."""
    found = {mutant.name: problems(mutant, STORIES) for mutant in known_mutants()}
    assert len(found) > 1000 and {name: why for name, why in found.items() if why} == {}


def test_a_bug_replaces_the_only_place_where_its_text_stands() -> None:
    assert problems(GOOD, STORIES) == []
    assert "class HostDown (" in with_bug(GOOD)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"find": "class "}, "not once"),
        ({"find": "no such text"}, "occurs 0 times"),
        ({"replace": GOOD.find}, "changes nothing"),
        ({"file": "gossip/none.py"}, "does not exist"),
        ({"file": "chaos/story.py", "find": "WHOLE_S = 90.0", "replace": "WHOLE_S = 9.0"}, "part of the checks"),
        ({"replace": "class ("}, "does not compile"),
        ({"tests": ()}, "neither tests nor a story"),
        ({"tests": ("tests/chaos/test_planted.py::test_none",)}, "has no test_none"),
        ({"tests": ("tests/chaos/test_none.py",)}, "does not exist"),
        ({"story": "none"}, "no story"),
        ({"seeds": "some"}, "not a range"),
    ],
)
def test_a_mutant_that_proves_nothing_is_named(change: dict[str, object], said: str) -> None:
    found = problems(msgspec.structs.replace(GOOD, **change), STORIES)
    assert any(said in why for why in found), found


def test_a_range_of_seeds_is_two_numbers_or_one() -> None:
    assert list(range_of("3-5")) == [3, 4, 5]
    assert list(range_of("7")) == [7]


def test_a_file_with_an_unknown_key_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "chaos/mutants/log"
    folder.mkdir(parents=True)
    (folder / "odd.toml").write_text('file = "x"\nkill = "y"\n')
    with pytest.raises(ValueError, match=r"log/odd\.toml"):
        known_mutants(tmp_path)

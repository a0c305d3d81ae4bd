"""The coverage that `make coverage` measures may not fall."""

from pathlib import Path

from coverage import Coverage
from coverage.results import should_fail_under

ROOT = Path(__file__).parents[1]


def test_coverage_that_falls_by_a_tenth_of_a_percent_fails_make_coverage() -> None:
    """pytest-cov asks `should_fail_under` with these, and its exit status is make's."""
    config = Coverage(config_file=str(ROOT / "pyproject.toml")).config
    assert should_fail_under(config.fail_under - 0.1, config.fail_under, config.precision)
    assert not should_fail_under(config.fail_under, config.fail_under, config.precision)
    (recipe,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if "--cov" in line)
    assert " --cov " in recipe and "fail-under" not in recipe and "|" not in recipe, "its exit status counts"

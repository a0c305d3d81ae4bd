"""`covey-sim tuner`: the tables of the tuner."""

import argparse

import pytest

from cli.sim import tuner
from cli.sim.report import Wrong


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tuner.arguments(parser)
    found = parser.parse_args(list(given))
    found.seed = 1
    return found


def test_the_tuner_comes_as_close_to_the_best_split_as_the_paper_says() -> None:
    """Reference: §3.4.3: less than 6.5 % from the optimum found by grid search."""
    report = tuner.run(options(), lambda share, text: None)
    reached = [each["reached_percent"] for app in report.data["apps"].values() for each in app["choices"]]
    assert len(reached) == 8 and min(reached) >= 93.5


def test_the_searches_reach_the_optimum_in_time() -> None:
    report = tuner.unequal_hosts(1, 20, lambda share, text: None)
    assert report.data["worst_percent"] <= 0.1 and report.data["worst_descent_percent"] <= 0.1


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(Wrong, match="outside"):
        tuner.run(options("--hosts", "1"), lambda share, text: None)

"""What people type and read of elastic jobs."""

from collections.abc import Callable

import pytest

from cli.main import main
from tests.cli.conftest import FakeAgent

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs agentctl; returns exit code, stdout, stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.mark.parametrize(
    ("said", "workers", "most"), [("4..16", 4, 16), ("4..4", 4, None), ("4", 4, None), ("16..4", 16, 4)]
)
def test_a_range_of_workers_is_given_as_two_fields(
    run: Run, agent: FakeAgent, said: str, workers: int, most: int | None
) -> None:
    run("submit", "--workers", said, "--", "true")
    body = agent.asked[-1][1]
    assert (body["workers"], body.get("workers_max")) == (workers, most)


@pytest.mark.parametrize("said", ["few", "4..", "..16", "4-16", "4..8..16", "1.5"])
def test_what_is_no_range_is_refused_in_three_lines(run: Run, said: str) -> None:
    code, out, err = run("submit", "--workers", said, "--", "true")
    lines = err.splitlines()
    assert (code, out, len(lines)) == (2, "", 3)
    assert lines[0] == f"agentctl: invalid --workers '{said}'"
    assert lines[2] == "  next: --workers 4, or --workers 4..16"

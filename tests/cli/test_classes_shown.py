"""What agentctl shows of classes: what a job runs as and asked for, what is reserved, what is used beyond a quota."""

from collections.abc import Callable
from typing import Any

import pytest

from cli.main import main
from tests.cli.conftest import FakeAgent

Shown = Callable[..., str]


@pytest.fixture
def shown(agent: FakeAgent, job: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> Shown:
    """A function that runs a noun about one job with these fields; returns its output."""

    def of(*argv: str, **fields: Any) -> str:
        view = job(**fields)
        agent.replies |= {"GET /v1/jobs": [view], "GET /v1/jobs/j1": view}
        assert main(list(argv)) == 0
        return capsys.readouterr().out

    return of


def test_a_job_that_is_what_it_asked_for_says_just_that(shown: Shown) -> None:
    lines = shown("jobs", runs_as="guaranteed").splitlines()
    assert "CLASS" in lines[0] and "guaranteed" in lines[1] and "was" not in lines[1]


@pytest.mark.parametrize("now", ["opportunistic", "guaranteed"])
def test_a_demoted_or_upgraded_job_says_what_it_was(shown: Shown, now: str) -> None:
    assert f"{now} (was auto)" in shown("jobs", job_class="auto", runs_as=now)
    assert f"default, {now} (was auto)" in shown("job", "j1", job_class="auto", runs_as=now)


def test_the_answer_of_an_older_agent_is_shown_too(shown: Shown) -> None:
    assert "auto" in shown("jobs", job_class="auto")
    assert "GPUs reserved" not in shown("job", "j1", job_class="auto")


def test_a_job_says_how_much_is_reserved_for_it(shown: Shown) -> None:
    assert "1 of 2 GPUs" in shown("job", "j1", state="queued", reserved_gpus=1)


def test_a_tenant_sees_what_it_uses_beyond_its_quota(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.replies["GET /v1/quotas"] = [{"tenant": "red", "gpus": 4, "used": 4, "queued_jobs": 1, "opportunistic": 3}]
    assert main(["quota"]) == 0
    titles, row = capsys.readouterr().out.splitlines()[:2]
    assert titles.split()[:4] == ["TENANT", "GPUS", "USED", "BEYOND"] and row.split()[:5] == ["red", "4", "4", "3", "1"]

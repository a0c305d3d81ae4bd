"""Options of a job are declared once: what an agent takes, what agentctl asks, and the words of both."""

import argparse
import contextlib
import io
import re
from typing import Annotated, Any

import msgspec
import pytest

from cli.client import AgentctlError
from cli.jobs import submit
from cli.main import Parser
from plugins.scheduler.messages import options
from plugins.scheduler.messages.options import OPTIONS, Option
from plugins.scheduler.messages.spec import JobSpec, SpecError, within

NEW = Option(
    "cool_s", "seconds", 2, 40, words=", or nothing", flag="--cool", metavar="TIME", help="how long its GPUs rest"
)


def asked(*words: str) -> dict[str, Any]:
    """The spec that agentctl would send to an agent."""
    parser = Parser("agentctl submit", allow_abbrev=False)
    submit.arguments(parser)
    return submit.spec_of(parser.parse_args(words), ["true"], {"PATH": "/bin"}, "/")


def helped() -> str:
    parser = argparse.ArgumentParser("agentctl submit")
    submit.arguments(parser)
    with io.StringIO() as said, contextlib.redirect_stdout(said):
        parser.print_help()
        return said.getvalue()


def test_an_option_that_is_declared_reaches_the_job_the_flags_and_their_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "OPTIONS", (*OPTIONS, NEW))

    class Spec(JobSpec, frozen=True, kw_only=True):
        cool_s: Annotated[float, within("cool_s")] | None = None

    given = asked("--cool", "30s")
    assert given["cool_s"] == 30.0 and "cool_s" not in asked()
    job = Spec.parse(given)
    assert isinstance(job, Spec) and job.cool_s == 30.0
    assert re.search(r"--cool TIME +how long its GPUs rest", helped())
    for wrong in ("1s", "41s"):
        with pytest.raises(SpecError) as caught:
            Spec.parse(asked("--cool", wrong))
        assert caught.value.why == "expected a number of seconds from 2 to 40, or nothing"
    with pytest.raises(AgentctlError, match="invalid --cool soon"):
        asked("--cool", "soon")


def test_every_field_of_a_job_is_declared_and_has_the_bounds_that_are() -> None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(JobSpec)}
    assert fields.keys() - {"owner", "title"} == {option.field for option in OPTIONS}, (
        "nobody says whose a job is, or its name twice"
    )
    for option in OPTIONS:
        if option.low is not None and option.high is not None:
            known = JobSpec.parse({"argv": ["true"], "time_limit_s": 1e6, option.field: option.high})
            assert msgspec.to_builtins(known)[option.field] == option.high
            for wrong in (option.low - 1, option.high + 1, *([option.low] if option.over_low else [])):
                with pytest.raises(SpecError, match=option.field):
                    JobSpec.parse({"argv": ["true"], option.field: wrong})


def test_the_default_that_help_names_is_the_jobs() -> None:
    job = msgspec.to_builtins(JobSpec.parse({"argv": ["true"]}))
    named = {option.field: found[1] for option in OPTIONS if (found := re.search(r"default (\d+)", option.help))}
    assert named.keys() == {"workers", "gpus_per_worker", "retries", "spares", "grace_s"}
    assert {field: float(text) for field, text in named.items()} == {field: job[field] for field in named}
    said = {
        option.field: found[1]
        for option in OPTIONS
        if option.kind == "choice" and (found := re.search(r"(\w+) \(default\)", option.help))
    }
    assert said == {"class": "guaranteed", "on_lost": "heal"}
    assert all(job[field] in (text, "stop") for field, text in said.items())

"""`agentctl history` and `report`, and how a job that ended badly is told of."""

import base64
import csv
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.books import ending, history
from cli.main import main as agentctl
from cli.table import Paint
from plugins.history_views import HistoryRow, JobReportView, ReportRow, ReportView, gpu_seconds, history_row
from plugins.scheduler.machine.books import asked_for
from sim.jobs.trace import read_trace
from sim.main import main as covey_sim
from sim.parquet import MAGIC, csv_of
from sim.report import Wrong
from tests.agent.ports.test_job_records import HELD, record
from tests.cli.conftest import FakeAgent
from tests.cli.rack_answers import Job, Run
from tests.cli.rack_answers import answers as answers
from tests.cli.rack_answers import run as run

WHOLE: dict[str, Any] = {"unanswered": {}, "missing": 0, "trimmed": 0, "damaged": ""}


def row(number: int, **said: Any) -> HistoryRow:
    at = 1_790_000_000.0 + number
    began = None if said.get("attempts") == 0 else at + 10.0
    times = {"submitted_wall_s": at, "started_wall_s": began, "ended_wall_s": at + 35.0, "took_s": 25.0}
    return history_row(record(number, **{**times, "attempts": 1, **said}))


def parquet_of(path: Path) -> Any:
    return pyarrow.parquet.read_table(path)


def told(*rows: HistoryRow, **said: Any) -> Any:
    return msgspec.to_builtins({"jobs": list(rows), **WHOLE, **said})


ROWS = (
    row(3, state="failed", ended_as="oom, peak 31 GiB", exit_code=137, user="bob"),
    row(2, gpus=0, seconds=HELD.times(0.0), by_gpu={}),
    row(1, time_limit_s=7200.0),
    row(
        4,
        state="cancelled",
        ended_as="cancelled",
        exit_code=143,
        attempts=0,
        started_wall_s=None,
        seconds=HELD.times(0),
    ),
)


def test_history_asks_for_what_was_typed_and_lists_it(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/history"] = told(*ROWS)
    words = ("--user", "ann", "--tenant", "ml", "--name", "tr*", "--state", "oom", "--host", "gpu1", "--limit", "5")
    code, out, _ = run("history", *words, "--since", "2026-11-01")
    assert code == 0 and "oom, peak 31 GiB" in out and "j3" in out and "4 jobs" in out
    asked = next(path for path, _ in agent.asked if path.startswith("GET /v1/history"))
    since = time.mktime((2026, 11, 1, 0, 0, 0, 0, 0, -1))
    for part in ("user=ann", "tenant=ml", "name=tr", "state=oom", "host=gpu1", "limit=5", f"since_wall_s={since}"):
        assert part in asked, asked


def test_what_records_lack_is_said_and_not_shown_as_nothing(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/history"] = told(missing=3, trimmed=50, damaged="jobs.db could not be read")
    _, out, _ = run("history")
    assert "3 more jobs of which no record was found" in out and "jobs up to j50 were dropped" in out
    assert "jobs.db could not be read" in out
    agent.replies["GET /v1/history"] = told(*ROWS)
    assert "the newest 4 jobs, there may be more: --limit N" in run("history", "--limit", "4")[1]
    code, out, error = run("history", "--limit", "4", "-o", "csv")
    assert (code, len(out.splitlines())) == (0, 5) and "there may be more" in error
    assert "there may be more" not in "".join(run("history", "-o", "csv")[1:])
    assert history.LIMIT == asked_for.LIMIT


@pytest.mark.parametrize("words", [("--since", "yesterday"), ("-o", "feather"), ("--limit", "many"), ("--by", "user")])
def test_what_cannot_be_asked_is_refused_in_three_lines(run: Run, words: tuple[str, ...]) -> None:
    code, _, error = run("history", *words)
    assert code == 2 and len(error.strip().splitlines()) == 3


def test_csv_parquet_and_sacct_are_read_back_by_covey_sim(
    run: Run,
    agent: FakeAgent,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent.replies["GET /v1/history"] = told(*ROWS)
    jobs = {}
    for form, reader in (("csv", "covey"), ("sacct", "sacct"), ("parquet", "covey")):
        with (tmp_path / form).open("w") as file, monkeypatch.context() as there:
            there.setattr("sys.stdout", file)
            assert agentctl(("history", "-o", form)) == 0
        out = tmp_path / f"{form}.trace.csv"
        assert covey_sim(["import", reader, str(tmp_path / form), "-o", str(out), "--json", "--quiet"]) == 0
        counted = json.loads(capsys.readouterr().out)["counted"]
        assert counted["kept"] == 2 and counted["without GPUs"] + counted["cancelled before it started"] == 2, form
        jobs[form] = [(job.submit_s, job.gpus, job.duration_s, job.tenant) for job in read_trace(out).jobs]
    assert jobs["csv"] == jobs["sacct"] == jobs["parquet"] == [(0, 4, 25, "ml"), (2, 4, 25, "ml")], (
        "held for 100 GPU s each, of 4 GPUs"
    )
    lines = list(csv.DictReader(io.StringIO((tmp_path / "csv").read_text())))
    assert [line["ended_as"] for line in lines][:1] == ["oom, peak 31 GiB"] and lines[0]["used_gpu_s"] == "40.0"
    states = [line.split("|")[5] for line in (tmp_path / "sacct").read_text().splitlines()[1:]]
    assert states == ["OUT_OF_MEMORY", "COMPLETED", "COMPLETED", "CANCELLED"]
    assert run("history", "-o", "json")[1] == run("history", "--json")[1]
    table = parquet_of(tmp_path / "parquet").to_pylist()
    assert [{name: "" if value is None else str(value) for name, value in row.items()} for row in table] == lines
    assert (table[0]["used_gpu_s"], table[0]["exit_code"], table[0]["time_limit_s"]) == (40.0, 137, None)


def test_parquet_without_its_library_or_a_file_is_refused_in_three_lines(
    run: Run, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.replies["GET /v1/history"] = told(*ROWS)
    with monkeypatch.context() as there:
        there.setitem(sys.modules, "pyarrow", None)
        code, out, error = run("history", "-o", "parquet")
        assert (code, out, len(error.strip().splitlines())) == (1, "", 3) and "pip install 'pyarrow" in error
        with pytest.raises(Wrong, match="cannot be read"):
            csv_of(MAGIC, "jobs.parquet")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, out, error = run("history", "-o", "parquet")
    assert (code, out, len(error.strip().splitlines())) == (2, "", 3) and "> jobs.parquet" in error


@given(st.data())
@settings(max_examples=60)
def test_a_damaged_parquet_file_is_read_or_refused_in_words(data: st.DataObject) -> None:
    held = io.BytesIO()
    columns = {name: ["7"] * 3 for name in ("job_id", "submit_time_s")}
    pyarrow.parquet.write_table(pyarrow.table(columns), held)
    whole = held.getvalue()
    at, junk = data.draw(st.integers(0, len(whole))), data.draw(st.binary(max_size=20))
    for each in (whole[:at], whole[:at] + junk + whole[at + len(junk) :]):
        try:
            csv_of(each, "file")
        except Wrong as error:
            assert error.what.startswith("file") and error.why and error.next
    with pytest.raises(Wrong, match="too large"):
        csv_of(whole, "file", 20)
    nested = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"job_id": [[1, 2]]}), nested)
    with pytest.raises(Wrong, match="no table of jobs"):
        csv_of(nested.getvalue(), "file")


def test_a_report_adds_up_and_says_what_is_not_known(run: Run, agent: FakeAgent) -> None:
    seconds = gpu_seconds(HELD.times(360.0))
    view = ReportView(by="tenant", rows=[ReportRow("ml", 2, seconds), ReportRow("red", 1, seconds)], live=1,
                      total=gpu_seconds(HELD.times(720.0)), **WHOLE | {"missing": 2})  # fmt: skip
    agent.replies["GET /v1/report"] = msgspec.to_builtins(view)
    code, out, _ = run("report", "--by", "tenant", "--since", "7d")
    assert code == 0 and "2 more jobs of which no record was found" in out and "1 job of these not ended" in out
    assert out.splitlines()[1].split() == ["ml", "2", *["10.0", "4.000", "1.000", "0.500", "2.000", "1.500", "1.000"]]
    assert out.splitlines()[3].split()[:2] == ["all", "3"]


def test_a_report_of_one_job_says_what_is_known_and_what_is_not(run: Run, agent: FakeAgent) -> None:
    job = row(7, step_s=0.2, input_s=0.124, preemptions=2, attempts=3, gpu_bytes=20 << 30)
    agent.replies["GET /v1/jobs/j7/report"] = msgspec.to_builtins(JobReportView(job=job, over=True))
    code, out, _ = run("report", "j7")
    assert code == 0
    for words in (
        "3: preempted 2 times",
        "200 ms, of which it waited for data 62 %",
        "at most 20 GiB on one",
        "host memory  not known",
        "80 % of the time that was seen",
        "not known 0.001, lost to preemption 0.006",
    ):
        assert words in out, out
    bare = row(8, seconds=HELD.times(0.0), gpu_bytes=0, step_s=None, attempts=0)
    agent.replies["GET /v1/jobs/j8/report"] = msgspec.to_builtins(JobReportView(job=bare, over=False))
    out = run("report", "j8")[1]
    assert "it never started" in out and "too few steps were seen" in out and "GPU memory   not known" in out
    assert run("report", "j8", "--user", "ann")[0] == 2


def test_hours_are_readable_at_any_size() -> None:
    told = {0.0: "0.000", 3.6: "0.001", 3600.0: "1.000", 36_000.0: "10.0", 3.6e6: "1000.0"}
    assert {gpu_s: history.hours(gpu_s) for gpu_s in told} == told


# ---- how a job ended -------------------------------------------------------------------------------------------------


def output(text: bytes) -> Any:
    def reply(asked: Any) -> Any:
        return {"data": base64.b64encode(text).decode(), "offset": 0, "size": len(text), "end": True, "host": "gpu2"}

    return reply


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"ended_as": "failed 3", "exit_code": 3}, "failed 3: rank 1 on gpu1 exited with 3"),
        ({"ended_as": "timeout", "exit_code": 143}, "failed (timeout): rank 1 on gpu1 exited with 3"),
        (
            {"ended_as": "oom, peak 31 GiB", "exit_code": 137},
            "failed (oom, peak 31 GiB): rank 1 on gpu1 exited with 3",
        ),
    ],
)
def test_a_failed_job_says_why_on_one_line_and_shows_its_ranks_last_lines(
    run: Run, agent: FakeAgent, job: Job, said: dict[str, Any], line: str
) -> None:
    text = b"".join(b"line %d\n" % number for number in range(40)) + b"1 %\r2 %\rKeyError: \x1b[31m'x'"
    view = job(state="failed", failed_rank=1, reason="rank 1 on gpu1 exited with 3", **said)
    agent.replies |= {"GET /v1/jobs/j1": view, "GET /v1/jobs/j1/logs": output(text)}
    for words in (("wait", "j1"), ("why", "j1"), ("job", "j1")):
        out = run(*words)[1]
        assert (line if words != ("job", "j1") else str(said["ended_as"])) in out, out
        assert "the last lines of rank 1" in out and "  line 21\n" in out and "line 20\n" not in out, out
        assert "2 %" not in out and "KeyError" in out and "\x1b" not in out
        assert [path for path, _ in agent.asked if "logs" in path][-1].endswith("rank=1&offset=0"), agent.asked[-3:]


def test_where_the_last_lines_cannot_be_read_that_is_said_and_nothing_else_changes(
    run: Run, agent: FakeAgent, job: Job
) -> None:
    agent.replies["GET /v1/jobs/j1"] = job(state="failed", failed_rank=1, reason="x", ended_as="failed 3", exit_code=3)
    agent.replies["GET /v1/jobs/j1/logs"] = (4, 403)
    code, out, _ = run("wait", "j1")
    assert code == 3 and "the last lines of rank 1 cannot be shown: because" in out
    agent.replies["GET /v1/jobs/j1/logs"] = output(b"")
    assert "rank 1 wrote nothing" in run("wait", "j1")[1]


def test_long_lines_are_cut_and_a_part_of_a_line_is_not_shown_as_one() -> None:
    data = b"rest of a line\n" + b"x" * 1000 + b"\n\n"
    assert ending.lines_of(data, whole=False) == ["x" * 400 + "..."]
    assert ending.lines_of(data, whole=True)[0] == "rest of a line" and ending.lines_of(b"", whole=True) == []
    running = {"state": "running", "reason": "all ranks run", "ended_as": ""}
    assert ending.ended(running, Paint("never")) == "running: all ranks run"

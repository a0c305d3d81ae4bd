"""Slurm's accounting as a trace: what counts, what does not, and why."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.sim.main import main
from cli.sim.report import Wrong
from cli.sim.sacct import WHY, busiest, read_sacct
from cli.sim.trace import read_trace

HEAD = "JobID|User|Account|State|Submit|Eligible|Start|End|Elapsed|Timelimit|AllocTRES"
DAY = "2025-05-01T"


def line(id: str, state: str = "COMPLETED", tres: str = "cpu=8,gres/gpu=2,mem=4G", submit: str = "00:00:00",
         start: str = "00:10:00", elapsed: str = "01:00:00", limit: str = "1-00:00:00") -> str:  # fmt: skip
    began = start if start in ("None", "Unknown") else DAY + start
    return f"{id}|ann|lab|{state}|{DAY}{submit}|{DAY}{submit}|{began}|Unknown|{elapsed}|{limit}|{tres}"


def text(*lines: str) -> str:
    return "\n".join([HEAD, *lines]) + "\n"


def test_a_job_with_gpus_becomes_a_job_of_the_trace() -> None:
    (job,), counts = read_sacct(text(line("7")))
    assert (job.id, job.gpus, job.ran_s, job.limit_s, job.tenant) == ("7", 2, 3600, 86400, "lab")
    assert counts == {"kept": 1}


@pytest.mark.parametrize(
    ("tres", "gpus"),
    [
        ("billing=8,cpu=8,gres/gpu:a100=4,gres/gpu=4,node=1", 4),
        ("cpu=8,gres/gpu:a100=4,gres/gpu:v100=2", 6),
        ("gres/gpu=16", 16),
        ("gres/gpumem=40G,gres/gpu=1,gres/gpuutil=100", 1),
    ],
)
def test_gpus_are_counted_once_whatever_their_types(tres: str, gpus: int) -> None:
    assert read_sacct(text(line("1", tres=tres)))[0][0].gpus == gpus


@pytest.mark.parametrize(
    ("gres", "nodes", "gpus"), [("gpu:2", "3", 6), ("gpu:tesla:2", "1", 2), ("gres:gpu:1", "2", 2)]
)
def test_older_accounting_counts_gpus_per_node(gres: str, nodes: str, gpus: int) -> None:
    head = "JobID|State|Submit|ElapsedRaw|AllocGRES|NNodes"
    assert read_sacct(f"{head}\n1|COMPLETED|1714521600|60|{gres}|{nodes}\n")[0][0].gpus == gpus


@pytest.mark.parametrize(
    ("elapsed", "seconds"),
    [("00:00:07", 7), ("01:02:03", 3723), ("2-03:00:00", 183600), ("05:30", 330), ("01:00.500", 60)],
)
def test_spans_are_read_as_slurm_writes_them(elapsed: str, seconds: int) -> None:
    assert read_sacct(text(line("1", elapsed=elapsed)))[0][0].ran_s == seconds


def test_everything_left_out_is_counted_and_explained() -> None:
    found, counts = read_sacct(
        text(
            line("1"),
            line("1.batch", tres="cpu=8"),
            line("1.0"),
            line("2", tres="cpu=8,mem=4G"),
            line("3", "CANCELLED by 1000", start="None", elapsed="00:00:00"),
            line("4", "CANCELLED by 1000"),
            line("5", "RUNNING"),
            line("6", "PENDING", start="Unknown", elapsed="00:00:00"),
            line("7_[3-9%2]", "PENDING", start="Unknown", elapsed="00:00:00"),
            line("7_1"),
            line("7_2", "FAILED"),
            line("8", "REQUEUED"),
            line("9", "COMPLETED", elapsed="00:00:00"),
            line("10", "REVOKED"),
        )
    )
    assert [job.id for job in found] == ["1", "4", "7_1", "7_2"]
    assert counts == {
        "kept": 3, "kept, cancelled while running": 1, "steps": 2, "without GPUs": 1, "cancelled before it started": 1,
        "still running": 1, "still waiting": 2, "requeued": 1, "ended at once": 1, "moved to another cluster": 1,
    }  # fmt: skip
    assert sum(counts.values()) == 14 and set(counts) <= set(WHY)


def test_a_job_that_waits_is_not_said_to_want_no_gpus_when_nobody_knows() -> None:
    waits = line("2", "PENDING", tres="", start="Unknown", elapsed="00:00:00")
    plain = line("3", "PENDING", tres="cpu=4,node=1", start="Unknown", elapsed="00:00:00")
    assert read_sacct(text(line("1"), waits, plain))[1] == {"kept": 1, "still waiting": 1, "without GPUs": 1}


def test_a_requeued_job_counts_once_with_its_last_run_and_its_first_submission() -> None:
    found, counts = read_sacct(
        text(
            line("1", "REQUEUED", submit="00:00:00", start="00:01:00", elapsed="00:30:00"),
            line("1", "NODE_FAIL", submit="00:31:00", start="00:40:00", elapsed="00:20:00"),
            line("1", "COMPLETED", submit="01:00:00", start="01:10:00", elapsed="02:00:00"),
            line("2", submit="00:05:00"),
        )
    )
    assert [(job.id, job.ran_s) for job in found] == [("1", 7200), ("2", 3600)]
    assert (counts["kept"], counts["requeued"]) == (2, 2)


def test_the_busiest_moment_is_the_size_of_the_cluster_that_was_used() -> None:
    found, _ = read_sacct(text(line("1"), line("2", start="00:30:00"), line("3", start="01:10:00")))
    assert busiest(found) == 4


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ([line("1").replace("|lab", "")], "line 2: 10 fields"),
        ([line("1", "Odd")], "line 2, column State"),
        ([line("1", "SLEEPING")], "line 2, column State"),
        ([line("1"), line("2", submit="25:00:00")], "line 3, column Submit"),
        ([line("1", elapsed="1:2:3:4")], "line 2, column Elapsed"),
        ([line("1", "RUNNING")], "no job to simulate"),
    ],
)
def test_a_line_that_cannot_be_used_is_refused_with_its_place(lines: list[str], where: str) -> None:
    with pytest.raises(Wrong) as wrong:
        read_sacct(text(*lines))
    assert where in wrong.value.what


def test_other_formats_are_refused_with_what_to_do() -> None:
    with pytest.raises(Wrong) as wrong:
        read_sacct("       JobID    JobName\n------------ ----------\n")
    assert "--parsable2" in wrong.value.why + wrong.value.next + wrong.value.what
    with pytest.raises(Wrong) as wrong:
        read_sacct("JobID|State|Submit|Elapsed\n")
    assert "no column AllocTRES" in wrong.value.what


def test_the_trace_runs_and_is_compared_with_backfill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, trace = tmp_path / "may.txt", tmp_path / "may.csv"
    source.write_text(text(*[line(str(at), submit=f"00:{at:02}:00") for at in range(20)]))
    assert main(["import", "sacct", str(source), "-o", str(trace), "--gpus", "2x4", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counted"]["kept"] == 20 and set(found["compared"]) == {"backfill", "covey"}
    assert len(read_trace(trace).jobs) == 20 and read_trace(trace).limits == 20


def test_without_an_output_the_trace_is_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "may.txt"
    source.write_text(text(line("1")))
    assert main(["import", "sacct", str(source)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "job_id,submit_time_s,num_gpus,duration_s,tenant,status,time_limit_s,wait_in_trace_s",
        "1,0,2,3600,lab,COMPLETED,86400,600",
    ]
    assert "ended, with GPUs" in said.err


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=80), max_size=5))
def test_any_lines_are_read_or_refused(lines: list[str]) -> None:
    try:
        found, _ = read_sacct(text(*lines))
    except Wrong as wrong:
        assert wrong.what and wrong.why and wrong.next
    else:
        assert found


@given(st.integers(0, 10), st.text(max_size=12))
def test_a_changed_field_is_read_or_refused(at: int, value: str) -> None:
    fields = line("1").split("|")
    fields[at] = value
    try:
        found, _ = read_sacct(text("|".join(fields)))
    except Wrong as wrong:
        assert wrong.what
    else:
        assert all(job.gpus > 0 and job.ran_s > 0 for job in found)

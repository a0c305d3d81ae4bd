"""Slurm's accounting as a trace: what counts, what does not, and why."""

import gzip
import io
import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import files
from sim.jobs.sacct import busiest
from sim.jobs.sacct_lines import WHY, Accounting
from sim.jobs.sacct_lines import read_sacct as read_lines
from sim.jobs.sacct_runs import Found
from sim.jobs.trace import read_trace
from sim.main import main
from sim.report import Wrong

HEAD = "JobID|User|Account|State|Submit|Eligible|Start|End|Elapsed|Timelimit|AllocTRES"
DAY = "2025-05-01T"


def line(id: str, state: str = "COMPLETED", tres: str = "cpu=8,gres/gpu=2,mem=4G", submit: str = "00:00:00",
         start: str = "00:10:00", elapsed: str = "01:00:00", limit: str = "1-00:00:00") -> str:  # fmt: skip
    began = start if start in ("None", "Unknown") else DAY + start
    return f"{id}|ann|lab|{state}|{DAY}{submit}|{DAY}{submit}|{began}|Unknown|{elapsed}|{limit}|{tres}"


def text(*lines: str) -> str:
    return "\n".join([HEAD, *lines]) + "\n"


def read_sacct(text: str) -> tuple[list[Found], Counter[str]]:
    read = read_lines(text)
    assert set(read.counts) <= set(WHY)
    assert sum(read.counts.values()) == sum(1 for each in text.split("\n")[1:] if each.strip()), "every line is counted"
    return read.jobs, read.counts


RAW = "JobID|Account|Partition|State|Submit|Eligible|Start|End|ElapsedRaw|AllocTRES|ReqTRES"


def raw(id: str, state: str = "COMPLETED", submit: str = DAY + "10:00:00", eligible: str = "",
        start: str = DAY + "10:05:00", end: str = "Unknown", ran: str = "3600", alloc: str = "gres/gpu=2",
        asked: str = "", of: str = "gpu") -> str:  # fmt: skip
    return f"{id}|lab|{of}|{state}|{submit}|{eligible or submit}|{start}|{end}|{ran}|{alloc}|{asked}"


def read_raw(*lines: str, partitions: tuple[str, ...] = ()) -> Accounting:
    return read_lines("\n".join([RAW, *lines]) + "\n", partitions=partitions)


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


def test_a_requeued_job_counts_once_with_all_its_runs_and_its_first_submission() -> None:
    found, counts = read_sacct(
        text(
            line("1", "REQUEUED", submit="00:00:00", start="00:01:00", elapsed="00:30:00"),
            line("1", "NODE_FAIL", submit="00:31:00", start="00:40:00", elapsed="00:20:00"),
            line("1", "COMPLETED", submit="01:00:00", start="01:10:00", elapsed="02:00:00"),
            line("2", submit="00:05:00"),
        )
    )
    assert [(job.id, job.ran_s) for job in found] == [("1", 1800 + 1200 + 7200), ("2", 3600)]
    assert (counts["kept"], counts["requeued"]) == (2, 2)


def test_the_earlier_runs_of_a_requeued_job_are_no_waiting() -> None:
    (job,), _ = read_sacct(
        text(
            line("1", "REQUEUED", submit="00:00:00", start="00:01:00", elapsed="00:30:00"),
            line("1", "NODE_FAIL", tres="gres/gpu=1", submit="00:31:00", start="00:40:00", elapsed="00:20:00"),
            line("1", "COMPLETED", submit="01:00:00", start="01:10:00", elapsed="02:00:00", limit="03:00:00"),
        )
    )
    assert job.waited_s() == 70 * 60 - 30 * 60 - 20 * 60
    assert job.ran_s == (30 + 10 + 120) * 60, "20 minutes on one GPU are 10 on two"
    assert job.limit_s == (30 + 10 + 180) * 60
    assert [(run.ran_s, run.gpus) for run in job.runs()] == [(1800, 2), (1200, 1), (7200, 2)]


def test_an_earlier_run_counts_to_the_gpus_that_were_held_at_once() -> None:
    """The other job runs beside the first attempt only."""
    read, _ = read_sacct(
        text(
            line("1", "REQUEUED", submit="00:00:00", start="00:01:00", elapsed="00:30:00"),
            line("1", submit="01:00:00", start="01:10:00"),
            line("2", submit="00:00:00", start="00:05:00", elapsed="00:10:00"),
        )
    )
    assert busiest(read) == 4


def test_the_busiest_moment_is_the_size_of_the_cluster_that_was_used() -> None:
    found, _ = read_sacct(text(line("1"), line("2", start="00:30:00"), line("3", start="01:10:00")))
    assert busiest(found) == 4


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ([line("1").replace("|lab", "")], "line 2: 10 fields"),
        ([line("1", "Odd")], "line 2, column State"),
        ([line("1", "SLEEPING")], "no job to simulate"),
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


class Stdin:
    """Standard input as a pipe: it cannot be read twice."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BufferedReader(Pipe(data))


class Pipe(io.RawIOBase):
    """A pipe whose bytes come in pieces: one byte, then up to seven at a time."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self.data[self.at : self.at + min(len(buffer), 7 if self.at else 1)]
        buffer[: len(piece)] = piece
        self.at += len(piece)
        return len(piece)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("piped", [False, True])
def test_accounting_is_read_plain_or_packed_from_a_file_or_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes], piped: bool
) -> None:
    data, out = pack(text(line("1"), line("2")).encode()), tmp_path / "out.csv"
    (tmp_path / "may").write_bytes(data)
    monkeypatch.setattr("sys.stdin", Stdin(data))
    assert main(["import", "sacct", "-" if piped else str(tmp_path / "may"), "-o", str(out), "--quiet"]) == 0
    assert len(read_trace(out).jobs) == 2


@pytest.mark.parametrize("piped", [False, True])
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"J" * 5001, "is too large"),
        (gzip.compress(b"J" * 5001), "is too large"),
        (random.Random(1).randbytes(6000), "is too large"),
        (b"\x1f\x8b" + random.Random(1).randbytes(6000), "is too large"),
        (gzip.compress(b"J" * 4000)[:-9], "cannot be read"),
        (b"\x1f\x8b", "cannot be read"),
    ],
    ids=["text", "packed", "noise", "noise after the mark of gzip", "torn", "the mark alone"],
)
def test_accounting_that_is_too_large_or_torn_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, says: str, piped: bool
) -> None:
    monkeypatch.setattr(files, "BYTES_MAX", 5000)
    (tmp_path / "may").write_bytes(data)
    monkeypatch.setattr("sys.stdin", Stdin(data))
    with pytest.raises(Wrong) as wrong:
        files.bytes_of("-" if piped else tmp_path / "may")
    assert says in wrong.value.what
    assert wrong.value.next


def test_no_more_is_read_or_unpacked_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is a bomb: a thousandth of its size on the disk."""
    monkeypatch.setattr(files, "BYTES_MAX", 100_000)
    (tmp_path / "bomb").write_bytes(gzip.compress(bytes(50_000_000)))
    pipe = Stdin(b"J" * 500_000)
    monkeypatch.setattr("sys.stdin", pipe)
    tracemalloc.start()
    try:
        for file in (tmp_path / "bomb", "-"):
            with pytest.raises(Wrong, match="is too large"):
                files.bytes_of(file)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert len(pipe.buffer.read()) > 300_000, "the rest was left in the pipe"


def test_bytes_that_are_no_text_are_read_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "may").write_bytes(text(line("1")).encode().replace(b"ann", b"\xe4nn"))
    assert main(["import", "sacct", str(tmp_path / "may")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


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


def test_only_a_requeued_job_waits_from_its_first_attempt() -> None:
    dependent = raw("1", eligible=DAY + "20:00:00", start=DAY + "20:05:00")
    attempts = raw("3", "REQUEUED", ran="60"), raw("3", submit=DAY + "10:30:00", start=DAY + "10:40:00")
    alone, beside = read_raw(dependent), read_raw(dependent, *attempts)
    assert (beside.counts["kept"], beside.counts["requeued"]) == (2, 1)
    again, one = beside.jobs
    assert one == alone.jobs[0] and one.start_s is not None and one.start_s - one.submit_s == 300
    assert again.start_s is not None and again.start_s - again.submit_s == 2400
    assert again.waited_s() == 2340, "it ran for a minute"


@pytest.mark.parametrize("again", [DAY + "10:15:00", DAY + "10:00:00"], ids=["submitted again", "one submission"])
def test_a_job_that_was_resized_keeps_its_first_part(again: str) -> None:
    """The job had 4 GPUs for 600 s, 8 for 300 s, then 2 for 900 s, and waited once."""
    parts = (
        raw("1", "RESIZING", end=DAY + "10:15:00", ran="600", alloc="gres/gpu=4"),
        raw("1", "RESIZING", again, start=DAY + "10:15:00", end=DAY + "10:20:00", ran="300", alloc="gres/gpu=8"),
        raw("1", "COMPLETED", again, start=DAY + "10:20:00", end=DAY + "10:35:00", ran="900", alloc="gres/gpu=2"),
    )
    read = read_raw(*parts, parts[0])
    (job,) = read.jobs
    assert read.counts == {"kept": 1, "resized": 2, "repeated": 1}
    assert job.gpus * job.ran_s == 4 * 600 + 8 * 300 + 2 * 900 and job.waited_s() == 300
    assert [(run.gpus, run.ran_s) for run in job.runs()] == [(4, 600), (8, 300), (2, 900)]


def test_a_job_that_is_being_resized_still_runs() -> None:
    read = read_raw(raw("1", "RESIZING"), raw("2"), raw("3", "RESIZING", end=DAY + "10:15:00", ran="600"))
    assert [job.id for job in read.jobs] == ["2"] and read.counts == {"kept": 1, "still running": 2}


def test_a_job_whose_last_attempt_still_runs_or_waits_is_not_over() -> None:
    read = read_raw(
        raw("1", "NODE_FAIL"), raw("1", "PENDING", submit=DAY + "11:05:00", start="Unknown", ran="0"), raw("2")
    )
    assert [job.id for job in read.jobs] == ["2"]
    assert read.counts == {"kept": 1, "requeued": 1, "still waiting": 1}


def test_a_line_of_an_overlapping_export_counts_once() -> None:
    read = read_raw(raw("1"), raw("1"), raw("2", "RUNNING", ran="600"), raw("2"), raw("2", "RUNNING", ran="700"))
    assert [(job.id, job.ran_s) for job in read.jobs] == [("1", 3600), ("2", 3600)]
    assert read.counts == {"kept": 2, "repeated": 3}


def test_parts_of_a_heterogeneous_job_are_one_gang() -> None:
    read = read_raw(
        raw("107+0", alloc="gres/gpu=4"), raw("107+1", ran="4000"), raw("107+2", alloc="cpu=64"), raw("108")
    )
    assert [(job.id, job.gpus, job.ran_s) for job in read.jobs] == [("107", 6, 4000), ("108", 2, 3600)]
    assert read.counts == {"kept": 2, "joined": 1, "without GPUs": 1}


def test_states_not_known_and_missing_submissions_are_counted_and_named() -> None:
    read = read_raw(raw("1"), raw("2", "LAUNCH_FAILED"), raw("3", "DREAMING"), raw("4", "EXPEDITING"),
                    raw("5", submit="Unknown", eligible="Unknown"), raw("6", "OUT_OF_ME+"))  # fmt: skip
    assert [job.id for job in read.jobs] == ["1", "2", "6"] and read.jobs[2].state == "OUT_OF_MEMORY"
    assert read.counts == {"kept": 3, "in an unknown state": 1, "still running": 1, "without a submission time": 1}
    assert any("DREAMING" in note for note in read.notes)


def test_gpus_that_slurm_did_not_account_for_are_those_asked_for() -> None:
    read = read_raw(raw("1", alloc="cpu=8,node=1", asked="cpu=8,gres/gpu=4"), raw("2", asked="gres/gpu=8"))
    assert [job.gpus for job in read.jobs] == [4, 2]
    assert any(
        "1 job with GPUs in what was asked for only" in note and "AccountingStorageTRES" in note for note in read.notes
    )


def test_a_file_without_any_gpu_is_refused_with_what_slurm_lacks() -> None:
    with pytest.raises(Wrong) as wrong:
        read_raw(raw("1", alloc="cpu=8,node=1"))
    assert "AccountingStorageTRES=gres/gpu" in wrong.value.next


def test_elements_of_an_array_that_were_cancelled_wait_no_more() -> None:
    rest = raw("1_[3-5]", "CANCELLED by 5", start="None", ran="0"), raw("2_[3-5]", "PENDING", start="Unknown", ran="0")
    assert read_raw(raw("1_1"), *rest).counts == {"kept": 1, "cancelled before it started": 1, "still waiting": 1}


@pytest.mark.parametrize(
    ("line", "where"),
    [
        (raw("2", ran="999999999999"), "line 3, column ElapsedRaw: '999999999999'"),
        (raw("2", ran="-5"), "line 3, column ElapsedRaw: '-5'"),
        (raw("2", submit="1970-01-01T00:00:00"), "line 3, column Submit: '1970-01-01T00:00:00'"),
        (raw("2", submit=DAY + "13:00:00"), "line 3, column Start"),
        (raw("2", ran="", end=DAY + "08:00:00"), "line 3, column End"),
        (raw("2", alloc="gres/gpu=2000000"), "line 3, column AllocTRES"),
    ],
)
def test_what_cannot_be_is_left_out_with_its_line(line: str, where: str) -> None:
    read = read_raw(raw("1"), line)
    assert [job.id for job in read.jobs] == ["1"] and read.counts == {"kept": 1, "impossible": 1}
    assert any(where in note and "expected" in note for note in read.notes)


def test_an_hour_of_a_clock_that_was_set_back_is_given_back() -> None:
    day = "2025-10-26T"
    read = read_raw(
        raw("1", submit=day + "02:50:00", start=day + "02:10:00", end=day + "02:30:00", ran="1200"),
        raw("2", submit=day + "01:00:00", start=day + "02:50:00", end=day + "02:10:00", ran=""),
    )
    second, first = read.jobs
    assert first.start_s is not None and first.start_s - first.submit_s == 20 * 60
    assert second.ran_s == 20 * 60
    assert any(note.startswith("2 times lay up to an hour before") and "TZ=UTC" in note for note in read.notes)


def test_seconds_since_1970_are_times_of_no_zone() -> None:
    local, exact = read_raw(raw("1")), read_raw(raw("1", submit="1746093600", start="1746093900"))
    assert exact.jobs == local.jobs
    assert any("no time zone" in note for note in local.notes) and exact.notes == []


def test_one_partition_of_several_can_be_read() -> None:
    lines = raw("1", of="a100", alloc="gres/gpu:a100=2,gres/gpu=2"), raw("2", of="v100", alloc="gres/gpu:v100=2")
    both, one = read_raw(*lines), read_raw(*lines, partitions=("v100",))
    assert any("a100, v100 are taken for one pool" in note for note in both.notes)
    assert [job.id for job in one.jobs] == ["2"] and one.counts == {"kept": 1, "in other partitions": 1}
    with pytest.raises(Wrong, match="no column Partition"):
        read_lines(text(line("1")), partitions=("v100",))


def test_the_command_says_what_it_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "may.txt"
    source.write_text("\n".join([RAW, raw("1"), raw("2", of="long")]), encoding="utf-8-sig")
    assert main(["import", "sacct", str(source), "--partition", "long", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["jobs"] == 1 and found["counted"]["in other partitions"] == 1 and found["partitions"] == {"long": 1}
    with pytest.raises(SystemExit):
        main(["import", "--help"])
    assert "--duplicates" in capsys.readouterr().out


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=80), max_size=5))
def test_any_lines_are_read_or_refused(lines: list[str]) -> None:
    try:
        found = read_lines(text(*lines)).jobs
    except Wrong as wrong:
        assert wrong.what and wrong.why and wrong.next
    else:
        assert found


@given(st.integers(0, 10), st.text(max_size=12))
def test_a_changed_field_is_read_or_refused(at: int, value: str) -> None:
    fields = line("1").split("|")
    fields[at] = value
    try:
        found = read_lines(text("|".join(fields))).jobs
    except Wrong as wrong:
        assert wrong.what
    else:
        assert all(job.gpus > 0 and job.ran_s > 0 for job in found)

"""Traces as they were published, and the CSV of `agentctl history`: each job once, and what is left out is counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.jobs.published import COVEY, HELIOS, PAI, READERS
from sim.jobs.sacct_lines import WHY
from sim.main import main
from sim.report import Wrong

CSV = {
    "covey": [
        ",".join(COVEY),
        "j1,1000,4,25,ml,done,,1010",
        "j2,1100,0,5,ml,done,,1110",
        "j3,1200,2,0,ml,cancelled,,",
        "j4,900,2,7,red,cancelled,7200.0,905",
        "j5,oops,2,7,red,done,,905",
    ],
    "helios": [
        ",".join(HELIOS),
        "1425511,vcJkd,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:05,36848",
        "1425512,vchbv,4,FAILED,2020-06-09 18:40:27,2020-06-09 18:41:27,249",
        "1425513,vcpDC,0,CANCELLED,2020-06-09 18:41:28,2020-06-09 18:41:28,675233",
        "1425514,vcpDC,8,COMPLETED,2020-06-09,2020-06-09 18:41:28,675233",
    ],
    "pai": [
        "a,ps,1.0,Terminated,100.0,220.0,600.0,29.3,,MISC",
        "a,worker,3.0,Terminated,110.0,230.0,600.0,29.3,50.0,T4",
        "b,tensorflow,2.0,Running,110.0,,600.0,29.3,100.0,T4",
        "c,tensorflow,1.0,Failed,90.0,95.0,600.0,29.3,25.0,T4",
        "d,tensorflow,1.0,Terminated,90.0,95.0,600.0,29.3,0.0,T4",
    ],
}


def attempt(start: Any, end: Any, *hosts: int) -> dict[str, Any]:
    detail = [{"ip": f"m{number}", "gpus": [f"gpu{at}" for at in range(gpus)]} for number, gpus in enumerate(hosts)]
    return {"start_time": start, "end_time": end, "detail": detail}


def philly(id: str, *attempts: dict[str, Any], **said: Any) -> dict[str, Any]:
    known = {"status": "Pass", "vc": "ee9e8c", "jobid": id, "submitted_time": "2017-10-07 01:11:39", "user": "ce2f4c"}
    return {**known, "attempts": list(attempts), **said}


DAY = "2017-10-07"
WIDE = attempt(f"{DAY} 01:13:30", f"{DAY} 02:13:30", 8, 8)
PHILLY = json.dumps(
    [
        philly("one", attempt(f"{DAY} 01:12:09", f"{DAY} 01:13:23", 8), WIDE),
        philly("never"),
        philly("runs", attempt("2017-10-07 01:13:30", None, 8)),
        philly("without", attempt("2017-10-07 01:13:30", "2017-10-07 01:13:31")),
        philly("unlogged", attempt(None, "2017-10-07 01:13:31", 4)),
    ]
)  # fmt: skip


def of(form: str, text: str) -> tuple[list[tuple[Any, ...]], dict[str, int]]:
    read = READERS[form](text, "file")
    assert set(read.counts) <= set(WHY)
    return [(job.id, job.gpus, job.ran_s, job.tenant) for job in read.jobs], dict(read.counts)


def test_the_csv_of_history_is_read_and_what_never_ran_is_counted() -> None:
    jobs, counts = of("covey", "\n".join(CSV["covey"]))
    assert jobs == [("j4", 2, 7, "red"), ("j1", 4, 25, "ml")]
    assert counts == {"kept": 1, "kept, cancelled while running": 1, "without GPUs": 1,
                      "cancelled before it started": 1, "impossible": 1}  # fmt: skip
    read = READERS["covey"]("\n".join(CSV["covey"]), "file")
    assert [(job.limit_s, job.waited_s()) for job in read.jobs] == [(7200, 5), (None, 10)] and "'oops'" in read.notes[0]


def test_helios_is_read_as_published() -> None:
    jobs, counts = of("helios", "\n".join(CSV["helios"]))
    assert jobs == [("1425512", 4, 249, "vchbv"), ("1425511", 1, 36848, "vcJkd")]
    assert counts == {"kept": 2, "without GPUs": 1, "impossible": 1}


def test_philly_is_read_as_published_with_the_gpu_time_of_earlier_attempts() -> None:
    jobs, counts = of("philly", PHILLY)
    assert jobs == [("one", 16, 3600 + 37, "ee9e8c")], "74 s of 8 GPUs are 37 s of 16"
    assert counts == {"kept": 1, "without GPUs": 2, "still running": 1, "impossible": 1}


def test_tasks_of_pai_are_gangs_of_whole_gpus() -> None:
    for head in ("", ",".join(PAI) + "\n"):
        jobs, counts = of("pai", head + "\n".join(CSV["pai"]))
        assert jobs == [("c", 1, 5, ""), ("a", 2, 130, "")]
        assert counts == {"kept": 2, "still running": 1, "without GPUs": 1}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("covey", ""),
        ("covey", "job_id,submit_time_s\nj1,2"),
        ("covey", ",".join(COVEY) + "\nj1,2"),
        ("covey", ",".join(COVEY) + '\n"j1,2'),
        ("helios", ",".join(COVEY)),
        ("philly", "{}"),
        ("philly", "[1]"),
        ("philly", "not JSON"),
        ("philly", "[]"),
        ("pai", "a,b"),
    ],
)
def test_another_file_is_refused_in_words(form: str, text: str) -> None:
    with pytest.raises(Wrong) as error:
        READERS[form](text, "file")
    assert error.value.what.startswith("file") and error.value.why and error.value.next


@given(st.sampled_from(sorted(READERS)), st.text(max_size=200), st.data())
def test_whatever_a_file_holds_is_read_or_refused_in_words(form: str, text: str, data: st.DataObject) -> None:
    whole = PHILLY if form == "philly" else "\n".join(CSV[form])
    at = data.draw(st.integers(0, len(whole)))
    for each in (text, whole[:at] + text + whole[at + len(text) :]):
        try:
            of(form, each)
        except Wrong as error:
            assert error.what.startswith("file")


def test_partitions_are_slurms_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text("\n".join(CSV["helios"]))
    assert main(["import", "helios", str(tmp_path / "log.csv"), "--partition", "gpu"]) == 2
    assert "--partition" in capsys.readouterr().err
    assert main(["import", "helios", str(tmp_path / "log.csv"), "--gpus", "8", "--json", "--quiet"]) == 0

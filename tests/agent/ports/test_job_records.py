"""Records of ended jobs in a file: what is asked for is found, sums are those of the rows, the file is bounded, and one
that cannot be read is told of, moved aside and begun anew."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from agent.ports import job_records
from agent.ports.job_records import RecordFile, ThreadedRecords
from covey.core.job_records import By, GpuSeconds, JobRecord, RecordsAsked, lacking, ranges_of
from plugins.scheduler.machine.books.asked_for import joined, without

HELD = GpuSeconds(held=100.0, used=40.0, idle=10.0, unknown=5.0, preempted=20.0, failed=15.0, restarts=10.0)


def record(number: int, **said: Any) -> JobRecord:
    known: dict[str, Any] = {
        "number": number,
        "submitted_wall_s": 1000.0 + number,
        "ended_wall_s": 2000.0 + number,
        "name": "train",
        "tenant": "ml",
        "user": "ann",
        "uid": 64001,
        "job_class": "guaranteed",
        "state": "done",
        "ended_as": "done",
        "reason": "all 4 ranks exited with 0",
        "exit_code": 0,
        "workers": 4,
        "gpus": 4,
        "hosts": ("gpu1", "gpu2"),
        "seconds": HELD,
        "by_gpu": {"gpu1 GPU-0": 75.0, "gpu2 GPU-1": 25.0},
    }
    return JobRecord(**{**known, **said})


@pytest.fixture
def file(tmp_path: Path) -> RecordFile:
    return RecordFile(str(tmp_path / "scheduler" / "jobs.db"))


def numbers(file: RecordFile, **asked: Any) -> list[int]:
    return [each.number for each in file.find(RecordsAsked(**asked))]


# ---- what is asked for ----


def test_what_is_asked_for_is_found_the_newest_end_first(file: RecordFile) -> None:
    file.put([record(1), record(2, user="bob", uid=64002, state="failed", ended_as="failed 3")])
    file.put([record(3, tenant="vision", name="BERT", ended_as="oom, peak 31 GiB", state="failed", hosts=("gpu12",))])
    assert numbers(file) == [3, 2, 1] and numbers(file, limit=2) == [3, 2]
    assert numbers(file, user="bob") == [2] and numbers(file, uid=64001) == [3, 1]
    assert numbers(file, tenant="vision") == numbers(file, name="BE*") == numbers(file, state="oom") == [3]
    assert numbers(file, state="failed") == [3, 2] and numbers(file, state="done") == [1]
    assert numbers(file, host="gpu1") == [2, 1] and numbers(file, host="gpu12") == [3] == numbers(file, name="BERT")
    assert numbers(file, since_wall_s=2002.0) == [3, 2] and numbers(file, number=2, user="ann") == []
    assert numbers(file, numbers=((1, 1), (3, 9))) == [3, 1]
    assert file.find(RecordsAsked(number=1)) == [record(1)], "as it was put"


def test_a_record_is_there_once_and_of_a_number_given_twice_the_newer_job_stays(
    file: RecordFile,
) -> None:
    file.put([record(1), record(1)])
    file.put([record(1, name="earlier", submitted_wall_s=1.0)])
    assert [each.name for each in file.find(RecordsAsked())] == ["train"]
    file.put([record(1, name="later", submitted_wall_s=5000.0)])
    assert [each.name for each in file.find(RecordsAsked())] == ["later"]


def test_sums_are_those_of_the_rows_and_a_gpu_has_its_part_of_its_jobs(file: RecordFile) -> None:
    file.put([record(1), record(2), record(3, user="bob")])
    (ann, bob) = file.sums(RecordsAsked(), "user")
    assert (ann.of, ann.jobs, ann.seconds) == ("ann", 2, HELD + HELD) and (bob.of, bob.seconds) == ("bob", HELD)
    (all_of,) = file.sums(RecordsAsked(), "tenant")
    assert all_of.seconds == HELD + HELD + HELD
    one, other = file.sums(RecordsAsked(user="bob"), "gpu")
    assert (one.of, one.seconds, other.of) == ("gpu1 GPU-0", HELD.times(0.75), "gpu2 GPU-1")
    (one.seconds + other.seconds).check()
    assert file.sums(RecordsAsked(user="nobody"), "user") == []
    for by in get_args(By):
        assert file.sums(RecordsAsked(limit=1), by) == file.sums(RecordsAsked(), by), "a sum is of all jobs"


# ---- bounds ----


def test_the_oldest_go_where_there_are_too_many_and_which_is_told(tmp_path: Path) -> None:
    file = RecordFile(str(tmp_path / "jobs.db"), rows_max=100)
    file.put([record(number) for number in range(1, 151)])
    assert numbers(file)[-1] == 51 and len(numbers(file)) <= 100
    assert file.trimmed == 50 and file.ranges() == ((51, 150),)
    file.close()
    assert RecordFile(str(tmp_path / "jobs.db")).ranges() == ((51, 150),)
    size = len(msgspec.msgpack.encode(record(1000)))
    file = RecordFile(str(tmp_path / "others.db"), bytes_max=10 * size)
    for number in range(1000, 1100):
        file.put([record(number)])
    assert 1 <= len(numbers(file)) <= 10 and numbers(file)[0] == 1099


# ---- damage ----


def damages(path: Path) -> list[tuple[str, Any]]:
    whole = path.read_bytes()
    return [
        ("cut short", lambda: path.write_bytes(whole[: len(whole) // 2])),
        ("cut within its head", lambda: path.write_bytes(whole[:50])),
        ("empty", lambda: path.write_bytes(b"")),
        ("something else", lambda: path.write_bytes(b"not a data base" * 500)),
        ("of another version", lambda: alter(path, "PRAGMA user_version = 99")),
        ("another table", lambda: alter(path, "ALTER TABLE jobs RENAME COLUMN record TO what")),
        ("a record of garbage", lambda: alter(path, "UPDATE jobs SET record = x'c1'")),
    ]


def alter(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as base:
        base.execute(statement)
    base.close()


@pytest.mark.parametrize("which", range(7))
def test_a_file_that_cannot_be_read_is_told_of_moved_aside_and_begun_anew(tmp_path: Path, which: int) -> None:
    path = tmp_path / "jobs.db"
    file = RecordFile(str(path))
    file.put([record(number) for number in range(1, 201)])
    file.close()
    what, damage = damages(path)[which]
    damage()
    file = RecordFile(str(path))
    assert numbers(file) == [], what
    assert str(path) in file.told and "a new one was begun" in file.told and Path(f"{path}.damaged").exists(), what
    file.put([record(201)])
    file.close()
    again = RecordFile(str(path))
    assert numbers(again) == [201] and again.told == "", what


def test_a_disk_that_fails_is_an_error_and_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordFile(str(tmp_path / "jobs.db"))
    file.put([record(1)])
    with pytest.raises(OSError, match="database or disk is full"), monkeypatch.context() as patch:
        patch.setattr(job_records, "PUT", "SELECT raise_full(" + ", ".join("?" * len(job_records.COLUMNS)) + ")")
        patch.setattr(job_records, "_size", full)
        file.put([record(2)])
    assert numbers(file) == [1] and file.told == "", "what was there is there"
    (tmp_path / "taken").write_text("a file, where a folder is to be")
    with pytest.raises(OSError):
        RecordFile(str(tmp_path / "taken" / "jobs.db")).put([record(1)])


def full(*_: object) -> tuple[int, int]:
    raise sqlite3.OperationalError("database or disk is full")


# ---- the thread ----


def test_the_event_loop_never_does_the_work_itself_and_damage_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.write_bytes(b"not a data base" * 500)
    said = structlog.testing.CapturingLogger()
    records = ThreadedRecords(str(path), structlog.wrap_logger(said, processors=[]))
    threads = set[str]()
    put = records._file.put

    def noted(given: Sequence[JobRecord]) -> None:
        threads.add(threading.current_thread().name)
        put(given)

    records._file.put = noted  # type: ignore[assignment, method-assign]

    async def work() -> list[JobRecord]:
        await records.put([record(1)])
        return await records.find(RecordsAsked())

    assert asyncio.run(work()) == [record(1)]
    records.close()
    assert len(threads) == 1 and threads.pop().startswith("records")
    assert [call.method_name for call in said.calls] == ["error"] and "begun" in records.told
    assert os.stat(path).st_mode & 0o077 == 0, "whose jobs these were is for the agent alone"


# ---- numbers ----

NUMBERS = st.sets(st.integers(1, 30)).map(sorted)


@given(NUMBERS, NUMBERS)
def test_ranges_are_the_numbers_that_they_stand_for(one: list[int], other: list[int]) -> None:
    def of(ranges: Any) -> list[int]:
        return [number for low, high in ranges for number in range(low, high + 1)]

    first, second = ranges_of(one), ranges_of(other)
    assert of(first) == one
    assert of(joined(first, second)) == sorted({*one, *other})
    assert of(without(first, second)) == sorted({*one} - {*other})
    assert of(lacking(20, first)) == sorted({*range(1, 20)} - {*one})

"""What ranks write is bounded: for each rank by its ring, for the host by its budget, and in time."""

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.jobs.output import (
    RANK_BYTES_MIN,
    JobsSettings,
    KeptOutput,
    output_of,
    rank_bytes_max,
    read_log,
    read_since,
    times_in,
    to_remove,
    written_from,
)
from agent.jobs.runner import SupervisedRunner
from agent.ports.disk import DirectoryDisk
from agent.ports.processes import shim, shims
from covey.core.ids import JobId
from plugins.base import LogRead
from plugins.facts import RanksEnded, RanksStarted
from tests.agent.here import here, ranks, until
from tests.agent.jobs.test_runner import short as short

J1 = JobId("j1")
LIMIT = 64 * 1024
NAME = "jobs/j1/rank0.log"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DirectoryDisk]:
    found = DirectoryDisk(str(tmp_path))
    (tmp_path / "jobs/j1").mkdir(parents=True)
    yield found
    found.close()


def lines(first: int, last: int) -> list[str]:
    return [f"line {number:08d}" for number in range(first, last)]


def on_disk(disk: DirectoryDisk) -> int:
    folder = Path(disk.path("jobs/j1"))
    return sum(file.stat().st_size for file in folder.iterdir())


async def read_all(disk: DirectoryDisk) -> list[LogRead]:
    found: list[LogRead] = []
    offset = 0
    while (part := await read_log(disk, NAME, offset, 10_000)).data:
        found.append(part)
        offset = part.offset + len(part.data)
    assert offset == part.size
    return found


@pytest.mark.parametrize("written", [0, 10, 800, 5_000, 50_000])
async def test_the_beginning_and_the_newest_part_are_kept_within_the_limit(disk: DirectoryDisk, written: int) -> None:
    half = written // 2
    for first, last in ((0, half), (half, written)):  # two attempts of a job, one after the other
        output = shim.Output(disk.path(NAME), LIMIT)
        for line in lines(first, last):
            output.take(f"{line}\n".encode())
        assert on_disk(disk) <= LIMIT
        os.close(output.file)
    parts = await read_all(disk)
    text = b"".join(part.data for part in parts).decode().splitlines()
    wanted = lines(0, written)
    real = set(wanted)
    kept = [line for line in text if line in real]
    if len("\n".join(wanted)) < LIMIT // 4 - LIMIT // 16 - shim.LINE_BYTES:
        assert text == wanted
        return
    assert kept[:800] == wanted[:800] and kept[-2000:] == wanted[-2000:]
    assert sum("bytes until here" in line for line in text) == 1


async def test_offsets_keep_their_meaning_when_the_ring_goes_on(disk: DirectoryDisk) -> None:
    output = shim.Output(disk.path(NAME), LIMIT)
    said = b""
    for number in range(2_000):
        output.take(data := f"{number:019d}\n".encode())
        said += data
    early = await read_log(disk, NAME, 100, 40)
    assert early == LogRead(said[100:140], 100, output.end)
    for number in range(2_000, 9_000):
        output.take(f"{number:019d}\n".encode())
    after = await read_log(disk, NAME, 20_000, 40)
    assert after.offset > 20_000, "dropped: the next that was kept, and where it stood"
    late = await read_log(disk, NAME, -20, 100)
    assert late == LogRead(b"%019d\n" % 8_999, output.end - 20, output.end)


def refused(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Writing:
    """A rank that writes a byte now and then, at times of a clock that a test sets."""

    def __init__(self, disk: DirectoryDisk, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_700_000_000.0
        self.written: list[float] = []
        self.disk = disk
        monkeypatch.setattr("agent.ports.processes.shim.time.time", lambda: self.now_s)
        self.output = shim.Output(disk.path(NAME), 1 << 20)

    def write(self, after_s: float) -> None:
        self.now_s += after_s
        self.output.take(b"x")
        self.written.append(self.now_s)


@pytest.mark.parametrize("pause_s", [0.3, 7.0])
async def test_output_is_found_by_when_it_was_written(
    disk: DirectoryDisk, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    """Nothing that is no older is left out, and what is shown is older by a second and 4 % of the age at most, after a
    day of output as well; the file of times stays within its bound."""
    rank = Writing(disk, monkeypatch)
    for _ in range(12_000):
        rank.write(pause_s)
    rank.now_s += 20.0
    assert await disk.size(f"{NAME}.times") <= shim.TIMES_BYTES
    for age_s in (0.0, 10.0, 21.0, 25.0, 60.0, 600.0, 3000.0, 1e6):
        read = await read_since(disk, NAME, rank.now_s - age_s, 10)
        first = next((at for at, wrote_s in enumerate(rank.written) if wrote_s >= rank.now_s - age_s), 12_000)
        assert read.timed and read.offset <= first
        if read.offset < first:
            assert rank.now_s - rank.written[read.offset] <= age_s + 1.0 + 0.04 * age_s
    os.close(rank.output.file)


async def test_what_was_written_before_times_were_noted_is_said_to_be_unknown(
    disk: DirectoryDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await disk.replace(NAME, b"old")
    assert await read_since(disk, NAME, 0.0, 10) == LogRead(b"old", 0, 3)
    os.utime(disk.path(NAME), (1_600_000_000.0,) * 2)
    rank = Writing(disk, monkeypatch)
    rank.write(5.0)
    assert not (await read_since(disk, NAME, 1_500_000_000.0, 10)).timed
    assert await read_since(disk, NAME, 1_650_000_000.0, 10) == LogRead(b"x", 3, 4, timed=True)
    monkeypatch.setattr(shim.Times, "_write", refused)  # a disk that takes output, and no more times
    rank.write(60.0)
    assert not (await read_since(disk, NAME, rank.now_s, 10)).timed
    os.close(rank.output.file)


@given(st.binary(max_size=200), st.integers(0, 1 << 40), st.floats(0, 1e12))
def test_a_damaged_file_of_times_gives_an_offset_of_the_output_or_none(text: bytes, size: int, at_s: float) -> None:
    for given_text in (text, text.replace(b"\x00", b"1"), b"0 0.00 5.00\n" + text):
        found = written_from(times_in(given_text), size, at_s)
        assert found is None or 0 <= found <= size


async def test_a_full_disk_costs_output_and_a_line_says_how_much(disk: DirectoryDisk) -> None:
    output = shim.Output(disk.path(NAME), LIMIT)
    output.take(b"before\n")
    right, output.file = output.file, os.open("/dev/full", os.O_WRONLY)
    output.take(b"x" * 500)
    output.take(b"y" * 500)
    os.close(output.file)
    output.file = right
    output.take(b"after\n")
    (part,) = await read_all(disk)
    lost = os.strerror(errno.ENOSPC)
    assert part.data.decode().splitlines() == [
        "before",
        "",
        f"[covey: 1000 bytes of output were lost here: {lost}]",
        "after",
    ]


async def test_a_rank_that_writes_without_end_keeps_its_limit_and_its_exit_code(short: str) -> None:
    async with here(short) as host:
        settings = JobsSettings(output_rank_max="1 MiB")
        runner = SupervisedRunner(host.env, host.facts.append, "127.0.0.1", "/x", settings)
        await runner.start(ranks("j1", "/bin/sh", "-c", "echo first; yes | head -c 30000000; echo last; exit 3"))
        await until(lambda: host.told(RanksEnded), 20.0)
        assert host.told(RanksEnded)[0].codes == {0: 3}
        found = (await output_of(host.env.disk))[J1]
        await runner.keep_curve(J1, b"points")
        assert await runner.curve(J1) == b"points" and await runner.curve(JobId("j2")) is None
        assert {*await output_of(host.env.disk)} == {J1} and "jobs/j1/curve" in (await output_of(host.env.disk))[J1]
        assert len(found) == 14 and sum(found.values()) <= 1 << 20
        assert (await runner.read_log(J1, 0, 0, 6)).data == b"first\n"
        assert (await runner.read_log(J1, 0, -5, 6)).data == b"last\n"
        assert (await runner.read_log(J1, 0, 0, 6)).size > 30_000_000


async def test_who_writes_without_end_is_stopped_as_fast_as_any_other(short: str) -> None:
    async with here(short) as host:
        settings = JobsSettings(output_rank_max="1 MiB")
        runner = SupervisedRunner(host.env, host.facts.append, "127.0.0.1", "/x", settings)
        await runner.start(ranks("j1", "/bin/sh", "-c", "exec yes"))
        await until(lambda: host.told(RanksStarted))
        await runner.stop(J1, 1, 5.0, "enough")
        await until(lambda: host.told(RanksEnded))
        assert host.told(RanksEnded)[0].codes == {0: -signal.SIGTERM}


# ---- how much is kept ----

SETTINGS = JobsSettings(output_rank_max="8 MiB", output_host_max="32 MiB", keep_ended=3, keep_ended_for="100 s")
MIB = 1 << 20


@pytest.mark.parametrize(
    ("promised", "count", "room", "each"),
    [
        (0, 1, 999, 8),
        (0, 4, 999, 8),
        (0, 8, 999, 4),
        (24, 1, 999, 8),
        (28, 2, 999, 2),
        (32, 4, 999, 1),
        (99, 4, 999, 1),
        (0, 4, 32, 4),
        (0, 4, -5, 1),
    ],
)
def test_ranks_that_start_share_what_others_were_not_promised_or_half_of_the_disk(
    promised: int, count: int, room: int, each: int
) -> None:
    assert rank_bytes_max(SETTINGS, promised * MIB, count, room * MIB) == each * MIB
    assert each * MIB >= RANK_BYTES_MIN


def job(number: int, mib: int, ended_s: float | None) -> KeptOutput:
    return KeptOutput(JobId(f"j{number}"), mib * MIB, ended_s)


@pytest.mark.parametrize(
    ("kept", "gone"),
    [
        ([], []),
        ([job(1, 1, 900.0), job(2, 1, 950.0)], []),
        ([job(1, 1, 899.0), job(2, 1, 950.0)], ["j1"]),  # too old
        ([job(n, 1, 1000.0 - n) for n in range(1, 6)], ["j5", "j4"]),  # too many: the oldest go
        ([job(1, 20, 950.0), job(2, 20, 960.0)], ["j1"]),  # too much
        ([job(1, 20, 950.0), job(2, 20, None)], ["j1"]),  # with what runs
        ([job(1, 40, None), job(2, 0, 960.0)], []),  # what runs does not go, and nothing is won by the rest
        ([job(1, 1, None), job(2, 1, 0.0)], ["j2"]),
    ],
)
def test_output_of_ended_jobs_goes_by_age_number_and_size(kept: list[KeptOutput], gone: list[str]) -> None:
    assert to_remove(SETTINGS, kept, wall_s=1000.0) == gone


@given(st.lists(st.tuples(st.integers(0, 20), st.one_of(st.none(), st.floats(0, 1000))), max_size=12))
def test_whatever_there_is_the_budget_holds_for_all_that_may_go(found: list[tuple[int, float | None]]) -> None:
    kept = [job(number, mib, ended_s) for number, (mib, ended_s) in enumerate(found)]
    gone = to_remove(SETTINGS, kept, 1000.0)
    left = [each for each in kept if each.job not in gone]
    ended = [each for each in left if each.ended_s is not None]
    assert all(each.ended_s is not None for each in kept if each.job in gone)
    assert len(ended) <= 3 and all((each.ended_s or 0.0) >= 900.0 for each in ended)
    assert sum(each.size_bytes for each in left) <= 32 * MIB or not any(each.size_bytes for each in ended)


@pytest.mark.parametrize(
    "wrong", [{"output_rank_max": "1 KiB"}, {"output_host_max": "0 B"}, {"keep_ended": 0}, {"keep_ended_for": "0 s"}]
)
def test_settings_that_keep_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, JobsSettings)


# ---- what a shim writes at the end ----


def test_a_shim_says_at_its_end_what_was_lost_and_syncs_before_it_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, ended = shim.Output(str(tmp_path / "rank0.log"), LIMIT), shim.ExitFile(str(tmp_path / "1.rank0.exit"))
    output.dropped, output.why = 77, "no room"
    calls: list[str] = []
    sync, rename = os.fsync, os.rename

    def synced(file: int) -> None:
        calls.append("fsync")
        sync(file)

    def renamed(old: str, new: str) -> None:
        calls.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    made = os.fork()  # a shim keeps all children of its process, and this one may have others
    if made == 0:
        pipe, into = os.pipe()
        os.set_blocking(pipe, False)
        rank = os.fork()
        if rank == 0:
            os._exit(3)
        os.close(into)
        kept = shim.keep(rank, shim.Streams(output, {"also": ("", ""), "env": {}}, pipe), ended)
        os._exit(kept if calls == ["fsync", "rename", "fsync"] else 99)  # content, name, and that the name is there
    assert os.waitstatus_to_exitcode(os.waitpid(made, 0)[1]) == 3
    assert shims.unsealed((tmp_path / "1.rank0.exit").read_bytes(), "exit") == "3"
    assert "[covey: 77 bytes of output were lost here: no room]" in (tmp_path / "rank0.log").read_text()


def test_a_line_of_a_shim_that_is_torn_or_changed_says_nothing() -> None:
    line = shim.sealed("exit 1 3")
    assert shims.unsealed(line, "exit") == "3"
    for wrong in (line.replace(b" 3 ", b" 0 "), line[:-4], b"", b"exit 1 3\n", shim.sealed("run 1 3")):
        assert shims.unsealed(wrong, "exit") is None

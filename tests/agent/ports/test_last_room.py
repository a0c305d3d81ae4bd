"""A small disk that is full: who still gets room on it, who does not, and what is said."""

import errno
import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import identity
from agent.event_log import EventLog
from agent.jobs.output import read_log
from agent.locks import StateLock
from agent.ports.clock import RealClock
from agent.ports.disk import DirectoryDisk
from agent.ports.last_room import RESERVE, LastingLog, free_in, kept_free, reserve_of
from agent.ports.processes import shim
from covey.core.ids import HostId
from plugins.memory.datapath.spill.spill_writer import left_name, list_name

MIB = 1 << 20
DISK_BYTES = 32 * MIB
RECORDS = ("scheduler/state", "gossip/peers", "aggregator/state", "memory/agent", "jobs/j1/1.start", "acknowledged")
OUTPUT = "jobs/j1/rank0.log"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    state = tmp_path / "state"
    state.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", state], check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield state
    finally:
        subprocess.run(["umount", "-l", state], check=True)


@pytest.fixture
def disk(place: Path) -> Iterator[DirectoryDisk]:
    found = DirectoryDisk(str(place), reserve_bytes=32 * MIB)
    (place / "jobs/j1").mkdir(parents=True)
    yield found
    found.close()


def fill(place: Path, leave: int = 0, name: str = "filler") -> None:
    """Fill the disk by somebody else's file, to the last byte that is not to be left."""
    with open(place / name, "ab", buffering=0) as filler:
        while (size := min(MIB, free_in(str(place)) - leave)) > 0:
            filler.write(bytes(size))


def reserved(place: Path) -> int:
    return (place / RESERVE).stat().st_blocks * 512


def printing(disk: DirectoryDisk, name: str = OUTPUT) -> shim.Output:
    return shim.Output(disk.path(name), 1 << 30, disk.kept_free_bytes)


async def test_log_and_records_get_pieces_of_the_reserve_on_a_full_disk_and_bulk_none(
    place: Path, disk: DirectoryDisk
) -> None:
    assert reserved(place) == reserve_of(str(place)) == DISK_BYTES // 8
    fill(place)
    with pytest.raises(OSError, match="No space"):
        await disk.append("events.log", b"x" * 9000)
    for name in ("memory/volumes/v1/log/00000000", "scheduler/env/0123"):
        with pytest.raises(OSError, match="less than 6 MiB is free, and the log of this host may need it"):
            await disk.replace(name, b"x")
    assert reserved(place) == DISK_BYTES // 8, "nobody of these may have it"
    await disk.append("consensus/log-00000001", b"entry")
    assert reserved(place) >= DISK_BYTES // 8 - 2 * MIB, "a piece, not all of it"
    for round in range(50):
        for name in RECORDS:
            await disk.replace(name, b"%d" % round * 500)
    assert reserved(place) >= DISK_BYTES // 8 - 2 * MIB, "a record takes the place of the one before it"
    (place / "filler").unlink()
    assert await disk.free_bytes() > 20 * MIB
    assert reserved(place) == DISK_BYTES // 8, "set aside again"


async def test_the_reserve_is_used_to_its_end_though_somebody_takes_what_he_can(
    place: Path, disk: DirectoryDisk
) -> None:
    fill(place)
    await disk.append("consensus/log-00000001", b"x")
    entries = 1
    with pytest.raises(OSError, match="No space"):
        for _ in range(10_000):
            fill(place, name="taker")
            await disk.append("consensus/log-00000001", b"x" * 4096)
            entries += 1
    assert entries >= 3, "each piece was used before it was taken"
    assert len(await disk.read("consensus/log-00000001") or b"") == 1 + 4096 * (entries - 1), "and nothing is torn"


async def test_what_ranks_print_leaves_the_last_room_and_keeps_beginning_and_newest(
    place: Path, disk: DirectoryDisk
) -> None:
    """The limits of ranks' output are far beyond the disk: 1 GiB each."""
    first = printing(disk)
    first.part_bytes = first.head_bytes = 2 * MIB
    line = b"%063d\n"
    for number in range(0, 16 * DISK_BYTES // 64, 1024):
        first.take(b"".join([line % (number + each) for each in range(1024)]))
        assert free_in(str(place)) >= kept_free(str(place)) - MIB // 4
    last = 16 * DISK_BYTES // 64 - 1
    assert (await read_log(disk, OUTPUT, -64, 64)).data == line % last, "the newest is there"
    assert (await read_log(disk, OUTPUT, 0, 64)).data == line % 0, "and how it began"
    assert len(first.parts) > 2 and not first.dropped, "the oldest went, one after the other"
    second = printing(disk, "jobs/j1/rank1.log")
    second.take(b"it begins\n")
    assert (await read_log(disk, "jobs/j1/rank1.log", 0, 10)).data == b"it begins\n", "whoever comes later is heard too"


async def test_a_rank_that_has_nothing_old_loses_what_is_new_and_both_ends_are_said(
    place: Path, disk: DirectoryDisk
) -> None:
    output = printing(disk)
    output.take(b"before\n")
    fill(place, 8192)
    for _ in range(100):
        output.take(b"x" * 1000 + b"\n")
    lost = (await read_log(disk, OUTPUT, 0, 1000)).data.decode().splitlines()
    assert lost == [
        "before",
        "",
        "[covey: output is lost from here on: less than 3 MiB would be free on this host]",
    ]
    os.unlink(place / "filler")
    output.take(b"after\n")
    assert (await read_log(disk, OUTPUT, 0, 1000)).data.decode().splitlines()[3:] == [
        "",
        "[covey: 100100 bytes of output were lost here: less than 3 MiB would be free on this host]",
        "after",
    ]
    fill(place, 8192)
    output.take(b"y" * 500)
    output.close()
    assert b"500 bytes of output were lost here" in (await read_log(disk, OUTPUT, -200, 200)).data, "also at the end"


async def test_what_the_log_frees_of_the_reserve_is_taken_by_no_rank_and_no_volume(
    place: Path, disk: DirectoryDisk
) -> None:
    output = printing(disk)
    fill(place, 100_000)
    for _ in range(3):
        await disk.append("consensus/log-00000001", bytes(200_000))
        assert free_in(str(place)) > MIB // 2
        before = free_in(str(place))
        output.take(bytes(100_000))
        with pytest.raises(OSError, match="less than"):
            await disk.write_parts_at("memory/volumes/v/log/00000000", 0, [bytes(4096)])
        assert free_in(str(place)) >= before - 8192, "a line about what was lost, at most"
        fill(place)


async def test_a_volume_writes_over_what_it_has_on_a_full_disk(place: Path, disk: DirectoryDisk) -> None:
    name = "memory/volumes/v/log/00000000"
    await disk.write_at(name, 0, bytes(8192))
    fill(place)
    await disk.write_parts_at(name, 4096, [b"x" * 4096])
    await disk.write_at(name, 0, b"y" * 4096)
    assert await disk.read_at(name, 0, 8192) == b"y" * 4096 + b"x" * 4096
    with pytest.raises(OSError, match="less than"):
        await disk.write_at(name, 8192, b"z")


async def test_what_a_killed_process_left_is_saved_where_the_log_could_be_written(
    place: Path, disk: DirectoryDisk
) -> None:
    """Its log is written over in place, so near the last room too; what the process had acknowledged must not be lost
    for want of the same room."""
    fill(place, MIB)
    name = left_name("memory/volumes/v")
    with pytest.raises(OSError, match="less than"):
        await disk.replace(list_name("memory/volumes/v"), b"x")
    await disk.replace(name, b"x" * (MIB // 2))
    assert await disk.read(name) == b"x" * (MIB // 2)


async def test_an_agent_has_a_new_boot_on_a_disk_that_takes_nothing_at_all(place: Path, disk: DirectoryDisk) -> None:
    await identity.save(disk, identity.Identity(b"u" * 16, 1_795_000_000))
    os.unlink(place / RESERVE)
    fill(place)
    fill(place, name="more")
    await identity.save(disk, identity.Identity(b"u" * 16, 1_795_000_001))
    assert await identity.load(disk) == identity.Identity(b"u" * 16, 1_795_000_001)
    lock = StateLock(str(place))
    lock.release()


async def test_event_logs_wait_in_bounded_memory_and_are_written_once_there_is_room(
    place: Path, disk: DirectoryDisk
) -> None:
    log = EventLog(HostId("h1"), RealClock(), disk)
    fill(place)
    for number in range(50):
        log.note("host/h1", "event", "x" * 5000 + str(number))
        with pytest.raises(OSError, match="No space"):
            await log.write()
    assert len(log._unwritten) == 1
    os.unlink(place / "filler")
    await log.write()
    again = EventLog(HostId("h1"), RealClock(), disk)
    await again.load()
    assert [line.reason for line in again.lines_of(["host/h1"])] == [f"{'x' * 5000}{n}" for n in range(50)]


@pytest.mark.parametrize("left", [0, 2 * MIB])
def test_a_log_of_ours_loses_and_counts_lines_and_ends_nobody_who_writes_them(place: Path, left: int) -> None:
    path = place / "vold.log"
    with path.open("w", buffering=1) as out:
        log = LastingLog(out)
        print("before", file=log, flush=True)
        fill(place, left)
        for _ in range(1000):
            print("x" * 100, file=log, flush=True)
        assert path.stat().st_size < 8192
        os.unlink(place / "filler")
        print("after", file=log, flush=True)
    lines = path.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after") and '"lines": 1000}' in lines[-2]


def test_a_log_that_is_no_file_is_written_whatever_is_free() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "sick")

    text = io.StringIO()
    print("one", file=LastingLog(text), flush=True)
    assert text.getvalue() == "one\n"
    print("lost", file=LastingLog(Broken()), flush=True)

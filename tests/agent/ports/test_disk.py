"""A real directory as a disk: what is durable when, and what no name can reach. (Promises that the simulated disk
shares stand in chaos/checks/conformance.py.)"""

import asyncio
import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.locks import StateDirectoryTaken, StateLock
from agent.ports.disk import NAME, OPEN_FILES_MAX, DirectoryDisk
from covey.ports.disk import UnsyncedWrite


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[DirectoryDisk]:
    found = DirectoryDisk(str(tmp_path / "state"))
    yield found
    found.close()


@given(st.text(alphabet="ab./~\\\0\n-_", max_size=12))
def test_no_name_leads_out_of_the_directory(name: str) -> None:
    if NAME.match(name) and not name.endswith("\n"):
        assert os.path.normpath(f"/there/{name}") == f"/there/{name}"


async def test_directories_and_files_are_for_their_owner_only(disk: DirectoryDisk, tmp_path: Path) -> None:
    await disk.replace("jobs/j1/state", b"x")
    await disk.append("jobs/j2/log", b"x")
    for path in (tmp_path / "state", tmp_path / "state/jobs", tmp_path / "state/jobs/j1"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for file in ("jobs/j1/state", "jobs/j2/log"):
        assert stat.S_IMODE(os.stat(disk.path(file)).st_mode) == 0o600


async def test_a_link_is_not_followed(disk: DirectoryDisk, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("theirs")
    os.symlink(tmp_path / "secret", disk.path("link"))
    for attempt in (disk.read("link"), disk.append("link", b"x"), disk.read_at("link", 0, 6)):
        with pytest.raises(OSError):
            await attempt
    await disk.replace("link", b"ours")
    assert (tmp_path / "secret").read_text() == "theirs"


class Calls:
    """Records the system calls of the disk, and lets one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail: str = "") -> None:
        self.seen: list[str] = []
        for name in ("fsync", "fdatasync", "rename", "unlink"):
            monkeypatch.setattr(os, name, self._recorded(name, getattr(os, name), fail))

    def _recorded(self, name: str, real: Callable[..., Any], fail: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            is_directory = isinstance(arguments[0], int) and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            self.seen.append(f"{name} directory" if is_directory else name)
            if fail == self.seen[-1]:
                raise OSError(errno.EIO, "sick")
            return real(*arguments)

        return call


async def test_a_replacement_is_durable_before_it_takes_the_name_and_the_name_on_return(
    disk: DirectoryDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await disk.replace("state", b"old")
    calls = Calls(monkeypatch)
    await disk.replace("state", b"new")
    assert calls.seen == ["fsync", "rename", "fsync directory"]
    calls.seen.clear()
    await disk.replace("a/b", b"new")
    assert calls.seen == ["fsync directory", "fsync", "rename", "fsync directory"]


@pytest.mark.parametrize("step", ["fsync", "rename", "fsync directory"])
async def test_when_replacing_fails_the_file_is_the_old_one_or_the_new_one(
    disk: DirectoryDisk, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    await disk.replace("state", b"old")
    with monkeypatch.context() as patch:
        Calls(patch, fail=step)
        with pytest.raises(OSError):
            await disk.replace("state", b"new")
    assert await disk.read("state") == (b"new" if step == "fsync directory" else b"old")
    assert await disk.names("") == ["state"]
    assert os.listdir(os.path.dirname(disk.path("state"))) == ["state"]


async def test_an_append_is_synced_and_a_new_file_is_listed_durably(
    disk: DirectoryDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    await disk.append("log", b"one")
    assert calls.seen == ["fsync directory", "fdatasync"]
    await disk.append("log", b"two")
    assert calls.seen == ["fsync directory", "fdatasync", "fdatasync"]


async def test_a_note_of_an_append_comes_once_that_is_durable_in_the_same_hop(
    disk: DirectoryDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await disk.append("log", b"one|")
    await disk.write_at("noted", 0, bytes(8))
    with monkeypatch.context() as patch:
        Calls(patch, fail="fdatasync")
        with pytest.raises(OSError):
            await disk.append_noted("log", b"two|", UnsyncedWrite("noted", 4, b"2222"))
    assert await disk.read("noted") == bytes(8)
    await disk.truncate("log", 4)
    hops, submit = [], disk._thread.submit

    def counted(*work: Any) -> Any:
        hops.append(work)
        return submit(*work)

    monkeypatch.setattr(disk._thread, "submit", counted)
    calls = Calls(monkeypatch)
    await disk.append_noted("log", b"two|", UnsyncedWrite("noted", 4, b"2222"))
    assert (calls.seen, len(hops)) == (["fdatasync"], 1)
    assert (await disk.read("log"), await disk.read("noted")) == (b"one|two|", bytes(4) + b"2222")


async def test_an_append_that_fails_half_way_leaves_nothing_behind(
    disk: DirectoryDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await disk.append("log", b"whole record|")
    real = os.pwrite

    def full(file: int, data: memoryview, offset: int) -> int:
        if offset > len(b"whole record|"):
            raise OSError(errno.ENOSPC, "full")
        return real(file, data[:5], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="full"):
            await disk.append("log", b"torn record|")
    await disk.append("log", b"next record|")
    assert await disk.read("log") == b"whole record|next record|"


async def test_a_file_left_unfinished_by_a_crash_is_no_file(disk: DirectoryDisk) -> None:
    os.close(os.open(disk.path("state") + "~4711", os.O_CREAT))
    assert await disk.names("") == []
    assert await disk.read("state") is None
    with pytest.raises(OSError):
        disk.path("state~4711")


async def test_a_replaced_or_deleted_file_is_not_written_through_an_old_descriptor(disk: DirectoryDisk) -> None:
    await disk.append("log", b"first")
    await disk.replace("log", b"second")
    await disk.append("log", b" third")
    assert await disk.read("log") == b"second third"
    await disk.delete("log")
    await disk.write_at("log", 0, b"new")
    assert await disk.read("log") == b"new"


async def test_descriptors_do_not_pile_up(disk: DirectoryDisk) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3 * OPEN_FILES_MAX):
        await disk.append(f"many/{number}", b"x")
    assert len(os.listdir("/proc/self/fd")) <= before + OPEN_FILES_MAX + 2
    assert await disk.read("many/0") == b"x"


async def test_sizes_are_told_without_reading(disk: DirectoryDisk) -> None:
    await disk.write_at("pages", 1 << 30, b"x")
    assert await disk.size("pages") == (1 << 30) + 1
    with pytest.raises(FileNotFoundError):
        await disk.size("nowhere")


@pytest.mark.parametrize("offset", [0, 4096, 100])
async def test_what_is_read_into_memory_is_what_was_written_whichever_way(disk: DirectoryDisk, offset: int) -> None:
    """A read goes past the page cache where it is aligned, through it where not; what is not there is zeros."""
    memory = memoryview(mmap.mmap(-1, 4 * 4096))
    memory[:] = os.urandom(len(memory))
    await disk.write_parts_at("pages", 0, [memory[:4096], memory[4096:]])
    await disk.write_at("pages", 4200, b"later, through the page cache")
    expected = await disk.read_at("pages", offset, 5 * 4096)
    for into in (memoryview(mmap.mmap(-1, 5 * 4096)), memoryview(bytearray(5 * 4096 + 1))[1:]):
        into[:] = b"\1" * len(into)
        await disk.read_into_at("pages", offset, into)
        assert into == expected
    nothing = memoryview(bytearray(b"\1" * 4096))
    await disk.read_into_at("nowhere", 0, nothing)
    assert nothing == bytes(4096)


async def test_the_loop_goes_on_while_the_disk_is_slow(disk: DirectoryDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[int] = []
    release = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def slow(_file: int) -> None:
        asyncio.run_coroutine_threadsafe(_wait(release), loop).result(5)

    monkeypatch.setattr(os, "fdatasync", slow)
    writing = asyncio.ensure_future(disk.append("log", b"x"))
    for number in range(10):
        await asyncio.sleep(0.001)
        passed.append(number)
    assert not writing.done()
    release.set_result(None)
    await writing
    assert passed == list(range(10))


async def _wait(future: "asyncio.Future[None]") -> None:
    await future


# ---- one agent per state directory -----------------------------------------------------------------------------------


def test_a_second_agent_is_told_who_lives_in_the_state_directory(tmp_path: Path) -> None:
    first = StateLock(str(tmp_path / "state"))
    with pytest.raises(StateDirectoryTaken) as refused:
        StateLock(str(tmp_path / "state"))
    assert refused.value.pid == os.getpid()
    assert str(os.getpid()) in refused.value.why
    assert "state_dir" in refused.value.next
    first.release()
    first.release()
    assert os.listdir(tmp_path / "state") == []
    StateLock(str(tmp_path / "state")).release()


def test_a_lock_is_free_after_kill_9_of_its_holder(tmp_path: Path) -> None:
    code = f"from agent.locks import StateLock\nlock = StateLock({str(tmp_path)!r})\nprint('held', flush=True)\ninput()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(StateDirectoryTaken) as refused:
        StateLock(str(tmp_path))
    assert refused.value.pid == holder.pid
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    StateLock(str(tmp_path)).release()

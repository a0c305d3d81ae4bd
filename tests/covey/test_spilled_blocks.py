"""Blocks that have no room in memory lie on a disk or elsewhere, and come back in time, as they were."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.core.errors import CoveyError
from covey.job.blocks import spilling_store
from covey.job.blocks.block_arrays import items_in_block
from covey.job.blocks.block_wire import BlockArrays, DeclaredBlocks
from covey.job.blocks.data_blocks import KeptHere, added, declared_blocks, store_of
from covey.job.blocks.exchange import Exchange, ExchangingProcess
from covey.job.blocks.memory_use import MemoryUse
from covey.job.blocks.spilled import DiskSpill, NoRoom, RemoteSpill, SpilledAt, spill_folder
from covey.job.blocks.spilling_store import AHEAD_MAX, STEPS_MEASURED, SpillingStore

SIZE = 10_000
OF = DeclaredBlocks("data", 64, SIZE)
WITHIN_S = 20.0


def block(k: int) -> BlockArrays:
    return {"x": np.full(SIZE // 8 - 3, k, np.float64), "y": np.arange(3, dtype=np.int32) + k, "none": np.empty((0, 2))}


def is_block(k: int, found: BlockArrays | None) -> bool:
    return (
        found is not None
        and found.keys() == block(k).keys()
        and all((found[name] == each).all() and found[name].dtype == each.dtype for name, each in block(k).items())
    )


class Memory:
    """A place for Blocks that a test looks into; a read waits while `gate` is closed."""

    where = "a place of a test"

    def __init__(self) -> None:
        self.kept: dict[int, BlockArrays] = {}
        self.reads: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.full = False
        self.error: Exception | None = None

    def write(self, block: int, arrays: BlockArrays) -> SpilledAt:
        if self.full:
            raise NoRoom("a place of a test is full")
        self.kept[block] = arrays
        return SpilledAt(block, items_in_block(arrays), 0)

    def read(self, at: SpilledAt) -> BlockArrays:
        assert self.gate.wait(WITHIN_S)
        if self.error is not None:
            raise self.error
        self.reads.append(at.slot)
        if at.slot not in self.kept:
            raise OSError("it is gone")
        return dict(self.kept[at.slot])

    def drop(self, at: SpilledAt) -> None:
        self.kept.pop(at.slot, None)

    def close(self) -> None:
        self.gate.set()

    def abandon(self) -> None: ...


class Clock:
    """A clock of which each step takes what a test says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def small(k: int) -> BlockArrays:
    return {"": np.full(10, k, np.uint8)}


def test_blocks_over_the_share_lie_outside_and_come_back_as_they_were(tmp_path: Path) -> None:
    store = SpillingStore("data", DiskSpill(OF, str(tmp_path)), 3 * SIZE, lambda text: None)
    for k in range(12):
        store.put(k, block(k))
    assert list(store) == list(range(12)) and 5 in store and store.resident_bytes <= 3 * SIZE
    for _ in range(3):
        assert all(is_block(k, store.used(k)) for k in range(12))
        assert store.resident_bytes <= 5 * SIZE, "the share, the one in use and the next"
        store.stepped()
    store.close()
    assert list(tmp_path.iterdir()) == [], "the file has no name: nothing is left, also by a process that is killed"


def test_the_next_block_is_read_while_one_is_used() -> None:
    place = Memory()
    store = SpillingStore("data", place, 10, lambda text: None)
    for k in range(4):
        store.put(k, small(k))
    for k in range(4):
        store.used(k)
    assert store.used(0) is not None
    place.reads.clear()
    for k in (1, 2, 3, 0, 1):
        with store._changed:
            assert store._changed.wait_for(lambda: store._next is None or store._next[1] is not None, WITHIN_S)
        before = store.waited
        assert store.used(k) is not None and store.waited == before, "it was here before it was wanted"
    store.close()


def test_a_block_that_comes_late_is_waited_for_and_read_once() -> None:
    place = Memory()
    store = SpillingStore("data", place, 0, lambda text: None)
    for k in range(3):
        store.put(k, small(k))
    for k in (0, 1, 2, 0, 1):
        store.used(k)
    with store._changed:
        assert store._changed.wait_for(lambda: store._next is None or store._next[1] is not None, WITHIN_S)
    place.gate.clear()
    place.reads.clear()
    store.used(2)
    before = store.waited
    threading.Timer(0.05, place.gate.set).start()
    assert store.used(0) is not None
    assert place.reads.count(0) == 1 and store.waited == before + 1
    store.close()


@pytest.mark.parametrize("error", [MemoryError("none is left"), ValueError("it was closed"), TypeError("a bug")])
def test_a_read_ahead_that_fails_leaves_the_script_waiting_for_nothing(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    place = Memory()
    store = SpillingStore("data", place, 0, lambda text: None)
    for k in range(3):
        store.put(k, small(k))
    for k in (0, 1, 2, 0):
        store.used(k)
    with store._changed:
        assert store._changed.wait_for(lambda: store._next is None or store._next[1] is not None, WITHIN_S)
    place.error = error
    store.used(1)
    with store._changed:
        assert store._changed.wait_for(lambda: store._next is None, WITHIN_S), "nobody waits for Block 2"
    place.error = None
    store.used(2)
    store.used(0)
    with store._changed:
        assert store._changed.wait_for(lambda: store._next is not None and store._next[1] is not None, WITHIN_S)
    store.close()


def test_a_place_that_is_full_is_named_once_and_nothing_is_lost() -> None:
    said: list[str] = []
    place = Memory()
    store = SpillingStore("data", place, 10, said.append)
    store.put(0, small(0))
    place.full = True
    for k in range(1, 6):
        store.put(k, small(k))
    assert all((each := store.used(k)) is not None and each[""][0] == k for k in range(6))
    assert len(said) == 1 and "is full" in said[0] and len(said[0].splitlines()) == 3
    store.close()


def test_a_disk_that_is_full_is_noticed_before_a_block_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = DiskSpill(OF, str(tmp_path))

    def full(file: int, at: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoRoom, match=rf"{tmp_path} has no room for .*No space left"):
        spill.write(1, block(1))
    monkeypatch.undo()
    assert is_block(1, spill.read(spill.write(1, block(1))))
    spill.close()


def test_a_block_that_rots_is_loaded_again(tmp_path: Path) -> None:
    said: list[str] = []
    spill = DiskSpill(OF, str(tmp_path))
    store = SpillingStore("data", spill, 0, said.append)
    for k in range(3):
        store.put(k, block(k))
    os.pwrite(spill._file, b"rotten", 100)
    exchange = Exchange(
        ExchangingProcess("j1", 0, 0, 1, lambda: None, lambda text: None), lambda: pytest.fail("it asked")
    )
    loads: list[int] = []

    def load(k: int) -> BlockArrays:
        loads.append(k)
        return block(k)

    data = added(exchange, declared_blocks("data", 3, load, SIZE), load, 1, lambda: 0, lambda: store)
    assert all(is_block(k, each) for k, each in data.of(0)) and loads == [0]
    assert "is not what was written" in said[0]
    exchange.close()


def test_a_slot_is_not_written_to_while_somebody_reads_what_was_there(tmp_path: Path) -> None:
    spill = DiskSpill(OF, str(tmp_path))
    at = spill.write(1, block(1))
    kept = spill.read(at)
    spill.drop(at)
    other = spill.write(2, block(2))
    assert other.slot != at.slot and is_block(1, kept)
    del kept
    assert spill.write(3, block(3)).slot == at.slot
    spill.close()


def test_a_block_that_was_dropped_is_not_read_and_its_slot_is_given_back_once(tmp_path: Path) -> None:
    spill = DiskSpill(OF, str(tmp_path))
    at = spill.write(1, block(1))
    spill.drop(at)
    with pytest.raises(OSError, match="dropped"):
        spill.read(at)
    other = spill.write(2, block(2))
    spill.drop(at)
    assert other.slot == at.slot and spill.write(3, block(3)).slot != other.slot, "the slot was given back once"
    with pytest.raises(OSError, match="dropped"):
        spill.read(at)
    assert is_block(2, spill.read(other))
    spill.close()


def test_a_slot_goes_to_one_block_however_many_read_what_rots(tmp_path: Path) -> None:
    said: list[str] = []
    spill = DiskSpill(OF, str(tmp_path))
    store = SpillingStore("data", spill, 0, said.append)
    store.put(0, block(0))
    at = store._outside[0]
    os.pwrite(spill._file, b"rotten", 100)
    assert store._read(0, at) is None and store._read(0, at) is None and len(said) == 1 and 0 not in store
    store.put(1, block(1))
    store.put(2, block(2))
    assert is_block(1, store.get(1)) and is_block(2, store.get(2))
    store.close()


def test_a_block_that_is_dropped_while_it_is_written_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Memory()
    store = SpillingStore("data", place, 0, lambda text: None)
    write = place.write

    def dropped_meanwhile(k: int, arrays: BlockArrays) -> SpilledAt:
        store.drop(k)
        return write(k, arrays)

    monkeypatch.setattr(place, "write", dropped_meanwhile)
    store.put(1, small(1))
    assert 1 not in store and not place.kept and store.resident_bytes == 0
    store.close()


def test_a_store_that_was_closed_writes_to_no_other_file(tmp_path: Path) -> None:
    spill = DiskSpill(OF, str(tmp_path))
    store = SpillingStore("data", spill, 0, lambda text: None)
    store.put(0, block(0))
    number = spill._file
    store.close()
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    if other != number:
        os.dup2(other, number)
        os.close(other)
    try:
        store.put(1, block(1))
        assert store.get(0) is None and store.used(0) is None
        with pytest.raises(OSError, match="Bad file"):
            spill.write(1, block(1))
        spill.close()
        assert os.fstat(number).st_size == 0, "nothing was written to it, and it is open"
    finally:
        os.close(number)


def test_a_volume_that_was_closed_is_not_made_anew() -> None:
    store = SpillingStore("data", RemoteSpill(OF, "j1-blocks"), 0, lambda text: pytest.fail(text))
    store.close()
    store.put(1, block(1))
    assert is_block(1, store.get(1))
    with pytest.raises(NoRoom, match="was closed"):
        spill = RemoteSpill(OF, "j1-blocks")
        spill.close()
        spill.write(1, block(1))


def test_a_forked_child_keeps_no_room_of_a_disk_taken(tmp_path: Path) -> None:
    spill = DiskSpill(OF, str(tmp_path))
    store = SpillingStore("data", spill, 0, lambda text: None)
    store.put(0, block(0))
    number = spill._file
    assert store.used(0) is not None
    with store._changed:
        store.abandon()  # as in a child, where another thread of the parent had the lock
    assert store._using is None
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)


def test_a_block_takes_the_room_that_it_needs(tmp_path: Path) -> None:
    spill = DiskSpill(DeclaredBlocks("data", 64, 64 << 20), str(tmp_path))
    ats = [spill.write(k, block(k)) for k in range(3)]
    assert os.fstat(spill._file).st_blocks * 512 < 10 * SIZE
    assert all(is_block(k, spill.read(at)) for k, at in enumerate(ats))
    spill.close()


class Volume:
    """A volume in memory of its own, which says how many bytes were moved."""

    def __init__(self, name: str, shape: int, dtype: str, way: str) -> None:
        assert (dtype, way) == ("uint8", "explicit")
        self.content, self.moved = bytearray(shape), 0

    def write_from(self, rows: np.ndarray[Any, Any], first: int = 0) -> None:
        self.content[first : first + len(rows)] = rows.tobytes()
        self.moved += len(rows)

    def read_into(self, into: np.ndarray[Any, Any], first: int = 0) -> None:
        into[:] = np.frombuffer(self.content, np.uint8, len(into), first)
        self.moved += len(into)


def test_a_volume_moves_the_bytes_of_a_block_and_not_those_of_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    spill = RemoteSpill(DeclaredBlocks("data", 4, 1 << 20), "j1-blocks")
    volume = Volume("j1-blocks", 4 * spill._slot, "uint8", "explicit")
    monkeypatch.setattr(spill, "_opened", lambda: volume)
    ats = [spill.write(k, block(k)) for k in range(4)]
    assert all(is_block(k, spill.read(at)) for k, at in enumerate(ats)) and volume.moved < 8 * 2 * SIZE
    with pytest.raises(NoRoom, match="no slot left"):
        spill.write(4, block(4))
    spill.drop(ats[1])
    assert spill.write(4, block(4)).slot == ats[1].slot


def test_what_a_step_costs_does_not_grow_with_the_blocks_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []

    def ten(arrays: object) -> int:
        summed.append(1)
        return 10

    monkeypatch.setattr(spilling_store, "bytes_in_block", ten)
    place, count = Memory(), 400
    store = SpillingStore("data", place, 10 * count - 10, lambda text: None)
    for k in range(count):
        store.put(k, small(k % 200))
    after = store._after = Counted()
    for k in (*range(count), *range(count)):
        store.used(k)
    assert len(summed) <= 2 * count and after.gets <= 2 * count * (AHEAD_MAX + 1)
    store.close()


class Counted(dict[int, int]):
    """A dict that counts how often it is asked."""

    gets = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.gets += 1
        return super().get(key, default)


def test_the_walk_ends_with_blocks_of_unequal_sizes() -> None:
    clock, said = Clock(), list[str]()
    store = SpillingStore("data", Memory(), 4000, said.append, clock)
    for k in range(40):
        store.put(k, {"": np.full(50 + 37 * k % 300, k, np.uint8)})
    for _ in range(400):
        store.stepped()
        assert all(store.used(k) is not None for k in range(40))
        assert store.resident_bytes <= 4000 + 2 * 350
        clock.now_s += 1.0 + abs(len(store._away) - 25)
        if said:
            break
    assert len(store._away) == 25 and said == [store.words]
    store.close()


def test_the_share_walks_to_the_shortest_step() -> None:
    """Harmony finds how much of the input lies on disk by trying. Reference: §4.3.3."""
    clock, said = Clock(), list[str]()
    store = SpillingStore("data", Memory(), 400, said.append, clock)
    for k in range(40):
        store.put(k, small(k))
    for _ in range(400):
        store.stepped()
        assert all(store.used(k) is not None for k in range(40))
        clock.now_s += 1.0 + abs(len(store._away) - 13)
        if said:
            break
    assert len(store._away) == 13 and said == [store.words] and "keeps 27 of 40 Blocks" in said[0]
    assert STEPS_MEASURED == 3
    store.close()


def test_never_more_lies_in_memory_than_was_allowed() -> None:
    clock = Clock()
    store = SpillingStore("data", Memory(), 200, lambda text: None, clock)
    for k in range(40):
        store.put(k, small(k))
    for _ in range(300):
        store.stepped()
        clock.now_s += 1.0 + (40 - len(store._away))  # steps get longer with each Block that is outside no more
        assert all(store.used(k) is not None for k in range(40))
        assert store.resident_bytes <= 220
    store.close()


def test_a_block_that_went_to_another_process_leaves_its_place() -> None:
    place = Memory()
    store = SpillingStore("data", place, 0, lambda text: None)
    store.put(1, small(1))
    store.drop(1)
    assert 1 not in store and store.get(1) is None and not place.kept
    store.close()


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"spill": "tape", "resident": None}, "tape"),
        ({"spill": None, "resident": 5}, "None is no place"),
        ({"spill": "disk", "resident": -1}, "resident=-1"),
    ],
)
def test_places_that_cannot_be_are_refused_in_three_lines(more: dict[str, Any], word: str) -> None:
    me = ExchangingProcess("j1", 0, 0, 1, lambda: None, lambda text: None)
    with pytest.raises(CoveyError, match=word) as refused:
        store_of(OF, KeptHere(more["spill"], more["resident"], MemoryUse(0, 1)), me)
    assert len(str(refused.value).splitlines()) == 3


def test_a_folder_that_is_none_is_refused_in_three_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/proc/nowhere")
    me = ExchangingProcess("j1", 0, 0, 1, lambda: None, print)
    with pytest.raises(CoveyError, match="/proc/nowhere") as refused:
        store_of(OF, KeptHere("disk", None, MemoryUse(0, 1)), me)
    assert len(str(refused.value).splitlines()) == 3 and spill_folder({}) == "/var/tmp"

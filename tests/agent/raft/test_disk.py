"""What the disk gives back after a crash: everything acknowledged, or a refusal that says what to do."""

import errno
import random
from collections.abc import Sequence
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.raft.disk import FOLDER, VERSION, DiskRefused, Store, write_length
from agent.raft.machine.types import HardState, Persist, Saved, SaveSnapshot, Snapshot
from agent.raft.messages import IDENTITY_BYTES, Entry, configuration_entry, configuration_of, crc
from agent.raft.policy import founders
from chaos.crowds.memory_disk import MemoryDisk, PowerLost, run
from covey.core.ids import HostId
from tests.agent.raft.stage import entry, log_of
from tests.families import examples

FILE = f"{FOLDER}/log-00000001"


def store(disk: MemoryDisk) -> Store:
    return Store(disk, random.Random(3).randbytes)


def opened(disk: MemoryDisk) -> Store:
    found = store(disk)
    run(found.load())
    return found


def reread(disk: MemoryDisk) -> Saved:
    return run(store(disk).load())


def persist(first: int, *entries: Entry, term: int = 1, vote: str = "", commit: int = 0) -> Persist:
    return Persist(0, HardState(term, vote, commit), first, entries)


def snapshot(index: int, base: int, entries: Sequence[Entry], data: bytes = b"state", term: int = 1) -> SaveSnapshot:
    return SaveSnapshot(
        0, HardState(term, "", index), Snapshot(index, 1, data, crc(data)), base, min(base, 1), tuple(entries)
    )


def test_an_empty_disk_is_an_empty_log_and_stays_one() -> None:
    disk = MemoryDisk(random.Random(1))
    saved = reread(disk)
    assert len(saved.hard.identity) == IDENTITY_BYTES, "a log has an identity from its first moment on"
    assert reread(disk) == saved == Saved(HardState(identity=saved.hard.identity))


def test_what_was_written_is_read_back() -> None:
    disk = MemoryDisk(random.Random(1))
    files = opened(disk)
    run(files.append([persist(1, *log_of(1, 1, 1)), persist(4, term=2, vote="b", commit=2)]))
    run(files.append([persist(3, entry(2, "new"), term=2, vote="b", commit=2)]))
    saved = reread(disk)
    assert saved.hard == HardState(2, "b", 2)
    assert saved.entries == (*log_of(1, 1), entry(2, "new")), "a conflict replaced the third entry"


def test_what_is_found_is_durable_before_it_is_told_also_where_its_sync_had_failed() -> None:
    """Found so: the kernel shows what was written and forgets that it did not reach the disk: behind it the next frame
    was whole, and the log counted as damaged after a loss of power."""
    disk = MemoryDisk(random.Random(1))
    files = opened(disk)
    run(files.append([persist(1, *log_of(1))]))
    durable = disk.files[FILE]
    run(files.append([persist(2, entry(1, "two"))]))
    disk.unsynced[FILE] = durable
    assert len(reread(disk).entries) == 2
    assert not disk.unsynced


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_too_full_for_a_second_copy_lets_a_host_start_and_a_sick_one_does_not(number: int) -> None:
    disk = MemoryDisk(random.Random(1))
    run(opened(disk).append([persist(1, *log_of(1, 1))]))
    run(disk.append(FILE, b"torn"))

    async def refused(name: str, data: bytes) -> None:
        if "log-" in name:
            raise OSError(number, "refused")
        await MemoryDisk.replace(disk, name, data)

    disk.replace = refused  # type: ignore[method-assign]
    if number == errno.EIO:
        with pytest.raises(OSError, match="refused"):
            reread(disk)
        return
    assert reread(disk).entries == log_of(1, 1)
    assert not disk.files[FILE].endswith(b"torn")


def test_a_snapshot_begins_a_new_generation_and_the_old_one_goes() -> None:
    disk = MemoryDisk(random.Random(1))
    files = opened(disk)
    run(files.append([persist(1, *log_of(1, 1, 1, 1, 1))]))
    run(files.checkpoint(snapshot(4, 3, log_of(1, 1, 1, 1, 1)[3:])))
    run(files.append([persist(6, entry(1, "six"))]))
    assert sorted(disk.files) == ["acknowledged", f"{FOLDER}/log-00000002", f"{FOLDER}/snapshot-00000002"]
    saved = reread(disk)
    assert (saved.base_index, saved.base_term, len(saved.entries)) == (3, 1, 3)
    assert saved.image == Snapshot(4, 1, b"state", crc(b"state"))


@pytest.mark.parametrize("moment", range(7))
@pytest.mark.parametrize("seed", range(8))
def test_a_crash_at_any_moment_of_a_snapshot_leaves_the_old_or_the_new(moment: int, seed: int) -> None:
    disk = MemoryDisk(random.Random(seed))
    files = opened(disk)
    entries = log_of(1, 1, 1, 1, 1)
    run(files.append([persist(1, *entries)]))
    run(files.checkpoint(snapshot(2, 1, entries[1:], b"older")))
    disk.fail_after = moment
    try:
        run(files.checkpoint(snapshot(4, 3, entries[3:], b"newer")))
    except PowerLost:
        pass
    disk.fail_after = None
    saved = reread(disk)
    assert saved.image is not None
    assert (saved.image.data, saved.base_index) in [(b"older", 1), (b"newer", 3)]
    assert saved.entries == entries[saved.base_index :]
    assert len(disk.files) == 3, "what no longer counts is swept away"
    assert not saved.hard.lost, "nothing that was acknowledged is missing"
    assert reread(disk) == saved


@pytest.mark.parametrize("first", range(0, 300, 60))
def test_after_a_torn_write_everything_acknowledged_is_there_and_writing_goes_on(first: int) -> None:
    for seed in range(first, first + 60):
        goes_on_after_a_torn_write(seed)


def goes_on_after_a_torn_write(seed: int) -> None:
    rng = random.Random(seed)
    disk = MemoryDisk(rng)
    files = opened(disk)
    acknowledged: list[Entry] = []
    for _ in range(rng.randrange(1, 6)):
        new = [entry(1, f"e{len(acknowledged) + n}") for n in range(rng.randrange(0, 4))]
        run(files.append([persist(len(acknowledged) + 1, *new)]))
        acknowledged += new
    pending = [Entry(1, bytes(16), 0, rng.randbytes(rng.randrange(300))) for _ in range(3)]
    disk.fail_after = 0
    with pytest.raises(PowerLost):
        run(files.append([persist(len(acknowledged) + 1, *pending)]))
    disk.fail_after = None
    again = store(disk)
    recovered = run(again.load())
    found = list(recovered.entries)
    assert not recovered.hard.lost, "nobody was told of what was torn"
    assert found in (acknowledged, acknowledged + pending)
    run(again.append([persist(len(found) + 1, entry(2, "after"), term=2)]))
    assert list(reread(disk).entries) == [*found, entry(2, "after")]


def written() -> tuple[MemoryDisk, list[int]]:
    """A disk with six writes, and where each of them ends."""
    disk = MemoryDisk(random.Random(1))
    files = opened(disk)
    ends = [len(disk.files[FILE])]
    for number in range(1, 7):
        run(files.append([persist(number, entry(1, f"e{number}"), commit=number - 1)]))
        ends.append(len(disk.files[FILE]))
    return disk, ends


@settings(max_examples=examples(150))
@given(st.data())
def test_a_file_cut_anywhere_gives_back_every_whole_write_or_is_refused(data: st.DataObject) -> None:
    disk, ends = written()
    cut = data.draw(st.integers(0, ends[-1]))
    disk.files[FILE] = disk.files[FILE][:cut]
    if cut < ends[0]:
        with pytest.raises(DiskRefused, match="next: restore the file"):
            reread(disk)
        return
    whole = sum(end <= cut for end in ends[1:])
    assert [each.command for each in reread(disk).entries] == [f"e{n}".encode() for n in range(1, whole + 1)]


@settings(max_examples=examples(300))
@given(st.data())
def test_a_file_changed_anywhere_is_refused_unless_the_damage_reaches_its_last_write(data: st.DataObject) -> None:
    disk, ends = written()
    whole = bytearray(disk.files[FILE])
    at = data.draw(st.integers(0, len(whole) - 1))
    length = data.draw(st.integers(1, 12))
    change = data.draw(st.binary(min_size=length, max_size=length))
    before = bytes(whole)
    whole[at : at + length] = change[: len(whole) - at]
    disk.files[FILE] = bytes(whole)
    if bytes(whole) == before:
        return
    changed = [n for n in range(len(whole)) if whole[n] != before[n]]
    try:
        saved = reread(disk)
    except DiskRefused as refused:
        assert refused.what
        assert refused.next
        return
    assert changed[-1] >= ends[-2], "a damaged middle was accepted"
    whole_writes = sum(end <= changed[0] for end in ends[1:])
    assert [each.command for each in saved.entries] == [f"e{n}".encode() for n in range(1, whole_writes + 1)]


@given(st.binary(max_size=200))
def test_random_bytes_in_place_of_a_file_are_refused(data: bytes) -> None:
    disk = MemoryDisk(random.Random(1))
    disk.files[FILE] = data
    with pytest.raises(DiskRefused):
        reread(disk)


@given(st.data())
def test_a_snapshot_changed_anywhere_is_refused(data: st.DataObject) -> None:
    disk = MemoryDisk(random.Random(1))
    run(opened(disk).checkpoint(snapshot(4, 4, (), b"the state")))
    name = f"{FOLDER}/snapshot-00000002"
    whole = bytearray(disk.files[name])
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    disk.files[name] = bytes(whole[: data.draw(st.integers(at + 1, len(whole)))])
    with pytest.raises(DiskRefused):
        reread(disk)


def test_a_command_that_looks_like_a_write_is_not_taken_for_one() -> None:
    """The salt tells them apart: a torn write whose commands hold a copy of a real frame is still a torn write."""
    other = MemoryDisk(random.Random(1))
    run(Store(other, random.Random(99).randbytes).load())
    disk = MemoryDisk(random.Random(1))
    files = opened(disk)
    before = dict(disk.files)
    run(files.append([persist(1, Entry(1, b"x", 0, other.files[FILE]), Entry(1, b"x", 0, bytes(50)))]))
    disk.files = before | {FILE: disk.files[FILE][:-20]}
    assert reread(disk).entries == ()
    assert disk.files[FILE] == before[FILE]


@pytest.mark.parametrize("kind", ["log", "snapshot"])
def test_a_newer_format_is_refused_and_left_alone(kind: str) -> None:
    disk = MemoryDisk(random.Random(1))
    run(opened(disk).checkpoint(snapshot(4, 4, ())))
    name = f"{FOLDER}/{kind}-00000002"
    body = disk.files[name][:8] + (VERSION + 1).to_bytes(2, "big") + disk.files[name][10:14]
    disk.files[name] = body + crc32(body).to_bytes(4, "big") + disk.files[name][18:]
    before = dict(disk.files)
    with pytest.raises(DiskRefused, match=f"has format {VERSION + 1}.*start the version that wrote the file"):
        reread(disk)
    assert disk.files == before


def test_the_files_say_who_takes_part() -> None:
    """They say so in the head, with the snapshot, and in the entries since."""
    disk = MemoryDisk(random.Random(1))
    three, four = (founders([HostId(name) for name in names], b"rack one") for names in ("abc", "abcd"))
    image = Snapshot(4, 1, b"state", crc(b"state"), four)
    later = configuration_entry(1, three)
    run(opened(disk).checkpoint(SaveSnapshot(9, HardState(1, "", 4), image, 2, 1, (entry(1), entry(1), later), three)))
    saved = reread(disk)
    assert saved.configuration == three
    assert saved.image is not None and saved.image.configuration == four
    assert configuration_of(saved.entries[-1]) == three


@pytest.mark.parametrize(("kind", "why"), [("snapshot", "it is missing"), ("log", "the log that belongs to it")])
def test_half_a_generation_is_refused(kind: str, why: str) -> None:
    disk = MemoryDisk(random.Random(1))
    run(opened(disk).checkpoint(snapshot(4, 4, ())))
    del disk.files[f"{FOLDER}/{kind}-00000002"]
    with pytest.raises(DiskRefused, match=why):
        reread(disk)


def test_entries_that_do_not_follow_are_refused() -> None:
    disk = MemoryDisk(random.Random(1))
    run(opened(disk).append([persist(3, entry(1, "x"))]))
    with pytest.raises(DiskRefused, match="entry 3 does not follow"):
        reread(disk)


def test_one_write_joins_requests_up_to_a_size_and_never_none() -> None:
    small = [persist(n, entry(1, "x")) for n in range(1, 500)]
    large = [persist(n, Entry(1, b"", 0, bytes(250_000))) for n in range(1, 100)]
    assert write_length(small) == len(small)
    assert 10 < write_length(large) < 20
    assert write_length([persist(1, *(Entry(1, b"", 0, bytes(250_000)),) * 100)]) == 1

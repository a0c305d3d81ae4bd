import asyncio

from hypothesis import given
from hypothesis import strategies as st

from agent.event_log import FILE, EventLog, frame, lines, merged
from covey.core.ids import HostId
from plugins.views import EventLine

GPU1, GPU2 = HostId("gpu1"), HostId("gpu2")


class Wall:
    def __init__(self) -> None:
        self.at = 100.0

    def now_s(self) -> float:
        return self.at

    def wall_s(self) -> float:
        self.at += 1.0
        return self.at

    def boot_s(self) -> float:
        return self.now_s()

    def cpu_s(self) -> float:
        return 0.0


class MemoryDisk:
    """A disk with just the calls that the journal makes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.sick = False

    async def read(self, name: str) -> bytes | None:
        return self.files.get(name)

    async def append(self, name: str, data: bytes) -> None:
        if self.sick:
            self.files[name] = self.files.get(name, b"") + data[: len(data) // 2]
            raise OSError(28, "No space left on device")
        self.files[name] = self.files.get(name, b"") + data

    async def replace(self, name: str, data: bytes) -> None:
        self.files[name] = data

    async def truncate(self, name: str, size: int) -> None:
        self.files[name] = self.files[name][:size]


WALL = Wall()


def journal(disk: MemoryDisk, host: HostId = GPU1) -> EventLog:
    return EventLog(host, WALL, disk)  # type: ignore[arg-type]


async def test_an_event_log_survives_a_restart_and_a_torn_tail() -> None:
    disk = MemoryDisk()
    before = journal(disk)
    before.note("j1", "submitted", "by alice")
    before.note("j1", "granted", "first in the queue")
    await before.write()
    disk.files[FILE] = disk.files[FILE] + frame(EventLine(1.0, GPU1, "j1", "lost", ""))[:-3]
    after = journal(disk)
    await after.load()
    assert [line.event for line in after.lines_of(["j1"])] == ["submitted", "granted"]
    after.note("j1", "ended", "exit status 0")
    await after.write()
    again = journal(disk)
    await again.load()
    assert [line.event for line in again.lines_of(["j1"])] == ["submitted", "granted", "ended"]


async def test_notes_that_could_not_be_written_are_written_later() -> None:
    disk = MemoryDisk()
    disk.sick = True
    log = journal(disk)
    log.note("j1", "submitted", "")
    try:
        await log.write()
    except OSError:
        disk.sick = False
    await log.write()
    log.note("j1", "placed", "")
    await log.write()
    again = journal(disk)
    await again.load()
    assert [line.event for line in again.lines_of(["j1"])] == ["submitted", "placed"]


def test_the_same_key_is_the_same_event() -> None:
    log = journal(MemoryDisk())
    log.note("j1", "submitted", "", key="log/3")
    log.note("j1", "submitted", "", key="log/3")
    assert len(log.lines_of(["j1"])) == 1


def test_what_many_hosts_saw_is_told_once_at_its_earliest() -> None:
    one = [EventLine(5.0, GPU1, "j1", "granted", "", "log/4"), EventLine(6.0, GPU1, "j1", "started", "")]
    two = [EventLine(4.5, GPU2, "j1", "granted", "", "log/4")]
    told = merged([one, two])
    assert [(line.event, line.host) for line in told] == [("granted", GPU2), ("started", GPU1)]


@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_an_error(data: bytes) -> None:
    found, used = lines(data)
    assert 0 <= used <= len(data)
    assert b"".join(map(frame, found)) == data[:used] or found


@given(st.integers(0, 200), st.integers(0, 255))
def test_damage_never_adds_or_changes_a_line(place: int, value: int) -> None:
    whole = [EventLine(float(i), GPU1, f"j{i}", "event", "why") for i in range(4)]
    data = bytearray(b"".join(map(frame, whole)))
    data[place % len(data)] = value
    found, _ = lines(bytes(data))
    assert found == whole[: len(found)]


def test_the_file_is_rewritten_when_it_has_grown(monkeypatch: object) -> None:
    import agent.event_log

    disk = MemoryDisk()
    log = journal(disk)
    old, agent.event_log.FILE_BYTES_MAX = agent.event_log.FILE_BYTES_MAX, 2000
    try:
        for number in range(300):
            log.note("j1", "step", str(number))
            asyncio.run(log.write())
    finally:
        agent.event_log.FILE_BYTES_MAX = old
    kept, _ = lines(disk.files[FILE])
    assert kept[-1].reason == "299"
    assert len(kept) <= 201, "no more than what is remembered, and the last batch"

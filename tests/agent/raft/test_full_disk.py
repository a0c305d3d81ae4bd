"""A log whose disk has no room: it promises nothing that is not written, says so, and recovers by itself."""

import asyncio
import errno
import random

import pytest

from agent.raft.disk import NO_ROOM
from agent.raft.messages import ID_BYTES, ProposeEntry, ProposeReply, decode_asked, encode_asked
from agent.raft.service.consensus import WAITS
from agent.raft.service.writer import RETRY_S
from chaos.crowds.memory_disk import MemoryDisk, run
from covey.core.errors import NoLeader, OutcomeUnknown
from tests.agent.raft.rack import Rack, virtual
from tests.agent.raft.stage import log_of
from tests.agent.raft.test_disk import FILE, opened, persist, reread, snapshot


class FullDisk(MemoryDisk):
    """A disk that is full from the write number `full_from` on (replace and append count); a refused append leaves a
    part behind."""

    full_from: int | None = None

    def _refuse(self) -> None:
        if self.full_from is not None:
            self.full_from -= 1
            if self.full_from < 0:
                raise OSError(errno.ENOSPC, "No space left on device")

    async def replace(self, name: str, data: bytes) -> None:
        self._refuse()
        await super().replace(name, data)

    async def append(self, name: str, data: bytes) -> None:
        try:
            self._refuse()
        except OSError:
            self.files[name] += data[: len(data) // 2]
            raise
        await super().append(name, data)


def test_an_append_that_was_refused_half_way_is_tried_again_and_all_is_there() -> None:
    disk = FullDisk(random.Random(1))
    files = opened(disk)
    run(files.append([persist(1, *log_of(1))]))
    disk.full_from = 0
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            run(files.append([persist(2, *log_of(1, 1)[1:])]))
    assert disk.files[FILE] != (acknowledged := disk.files[FILE][: files._size]), "a part of it is there"
    disk.full_from = None
    run(files.append([persist(2, *log_of(1, 1)[1:])]))
    assert disk.files[FILE].startswith(acknowledged)
    assert reread(disk).entries == log_of(1, 1)


@pytest.mark.parametrize("refused", range(2))
def test_a_snapshot_that_was_refused_changes_nothing_until_there_is_room(refused: int) -> None:
    """Either its image is refused, or its log."""
    disk = FullDisk(random.Random(1))
    files = opened(disk)
    run(files.append([persist(1, *log_of(1, 1, 1))]))
    before = dict(disk.files)
    disk.full_from = refused
    with pytest.raises(OSError, match="No space"):
        run(files.checkpoint(snapshot(2, 1, log_of(1, 1, 1)[1:])))
    assert disk.files == before, "and what was written of it takes no room"
    disk.full_from = None
    assert reread(disk).entries == log_of(1, 1, 1) and not reread(disk).hard.lost
    run(files.append([persist(4, *log_of(1, 1, 1, 1)[3:])]))
    assert reread(disk).entries == log_of(1, 1, 1, 1), "it goes on behind the head that is there"
    run(files.checkpoint(snapshot(2, 1, log_of(1, 1, 1, 1)[1:])))
    saved = reread(disk)
    assert (saved.base_index, len(saved.entries), saved.hard.lost) == (1, 3, False)


def test_the_record_of_what_was_acknowledged_takes_no_room() -> None:
    disk = FullDisk(random.Random(1))
    run(opened(disk).append([persist(1, *log_of(1))]))
    disk.full_from = 0
    assert reread(disk).entries == log_of(1), "a start of an agent, on a disk that takes nothing"


@virtual
async def test_a_leader_without_room_gives_way_and_follows_once_it_has_some() -> None:
    async with Rack("a", "b", "c") as rack:
        leader = await rack.led()
        await leader.log.propose(b"x")
        leader.disk.refuses = errno.ENOSPC
        others = [member for member in rack.members.values() if member is not leader]
        assert await others[0].log.propose(b"y") == b"2", "two disks are a majority"
        asked = ProposeEntry(leader.log.rack, b"i" * ID_BYTES, 1, 0, b"forwarded")
        reply = decode_asked(await leader.log.answer(others[0].name, encode_asked(asked)))
        assert isinstance(reply, ProposeReply) and reply.outcome == "busy", "what others forward does not wait for room"
        end_s = asyncio.get_running_loop().time() + 8
        while rack.leader() not in others:
            assert asyncio.get_running_loop().time() < end_s, "it keeps the lead"
            await asyncio.sleep(0.02)
        await asyncio.sleep(10)
        assert leader.log.open and leader.log.trouble.endswith(WAITS)
        assert leader.quiet.errors == ["the log waits for room"], "once, and it has not ended"
        assert await others[1].log.propose(b"z") == b"3"
        leader.disk.refuses = 0
        await asyncio.sleep(3)
        assert leader.commands == ["x", "y", "z"] and not leader.log.trouble
        assert leader.quiet.errors == ["the log waits for room"]


@virtual
async def test_nothing_is_acknowledged_while_a_majority_has_no_room() -> None:
    """No vote is given either, whoever asks: what comes back after a crash of all is what was acknowledged."""
    async with Rack("a", "b", "c", seed=3) as rack:
        leader = await rack.led()
        await leader.log.propose(b"x")
        full = [member for member in rack.members.values() if member is not leader]
        written = [len(member.disk.files[FILE]) for member in full]
        for member in full:
            member.disk.refuses = errno.EDQUOT
        with pytest.raises(OutcomeUnknown):
            await leader.log.propose(b"y", timeout_s=3)
        assert leader.commands == ["x"]
        leader.kill()
        await asyncio.sleep(20)
        assert rack.leader() is None and all(member.log.open for member in full)
        for member in full:
            member.disk.refuses = 0
        assert await full[0].log.propose(b"z", timeout_s=20) in (b"2", b"3")
        await asyncio.sleep(3)
        assert all(member.commands in (["x", "z"], ["x", "y", "z"]) for member in full)
        assert all(len(member.disk.files[FILE]) > size for member, size in zip(full, written, strict=True))
        await leader.start()
        await asyncio.sleep(3)
        assert leader.commands == full[0].commands


@virtual
async def test_a_host_alone_starts_without_room_says_why_and_leads_once_it_has_some() -> None:
    async with Rack("a", voters=0) as rack:
        member = rack.members["a"]
        await member.log.propose(b"x")
        member.kill()
        member.disk.refuses = errno.ENOSPC
        async with asyncio.timeout(5):
            await member.start()
        assert "No space left" in member.log.trouble and not member.log.is_leader
        with pytest.raises(NoLeader):
            await member.log.propose(b"y", timeout_s=1)
        member.disk.refuses = 0
        await rack.led()
        assert await member.log.propose(b"z") == b"2"
        member.disk.refuses = errno.ENOSPC
        with pytest.raises(OutcomeUnknown):
            await member.log.propose(b"unknown", timeout_s=1)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(NoLeader, match="No space left"):
            await member.log.propose(b"refused", timeout_s=5)
        assert asyncio.get_running_loop().time() - began_s < 0.1, "refused at once, since it is known why"
        member.disk.refuses = 0
        await asyncio.sleep(2 * RETRY_S)
        assert await member.log.propose(b"last", timeout_s=5) == b"4"
        assert member.commands == ["x", "z", "unknown", "last"]


def test_a_quota_that_is_used_up_counts_as_a_full_disk() -> None:
    assert set(NO_ROOM) == {errno.ENOSPC, errno.EDQUOT}

"""What the processes of a job say of their memory to their agent, and what each is told of the others."""

import tempfile
from collections.abc import Iterator

import msgspec
import pytest

from agent.jobs.socket.memory_reports import BYTES_MAX, is_possible, on_host, together
from covey.ports.streams import ByteStream
from covey.wire.frames import pack, read_frame
from covey.wire.job import MEMORY_S, Frame, HostMemory, Joined, MemoryHeld, decoder
from plugins.facts import MemoryInUse, MemoryMeasured, RankDisconnected
from tests.agent.here import until
from tests.agent.jobs.test_jobs_socket import FOUR, GOOD, J1, door


@pytest.fixture
def short() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="covey-") as directory:
        yield directory


async def test_a_process_is_told_what_the_job_may_take_and_others_need(short: str) -> None:
    async with door(short) as found:
        found.runner.known = msgspec.structs.replace(FOUR, host_memory=1000)
        zero, answer = await found.say(msgspec.structs.replace(GOOD, rank=0), MemoryHeld(5, 6, 300, 900))
        assert isinstance(answer, Joined) and answer.memory_s == MEMORY_S
        assert await told(zero) == HostMemory(1000, 2)
        one, _ = await found.say(GOOD, MemoryHeld(7, 8, 200, 800))
        assert await told(one) == HostMemory(1000, 2, 300, 1)
        assert found.facts[-1] == MemoryMeasured(J1, 3, MemoryInUse(12, 14, 1700))
        zero.close()
        await until(lambda: RankDisconnected(J1, 3, 0) in found.facts)
        await one.write(pack(MemoryHeld(7, 8, 200, 800)))
        assert await told(one) == HostMemory(1000, 2), "a process that has ended needs nothing"


async def told(stream: ByteStream) -> HostMemory:
    """What a process is told next of its host's memory."""
    while not isinstance(frame := await read_frame(stream, decoder), HostMemory):
        pass
    return frame


@pytest.mark.parametrize("wrong", [MemoryHeld(-1), MemoryHeld(0, 1 << 60), HostMemory(1, 1)])
async def test_impossible_memory_ends_the_connection(short: str, wrong: Frame) -> None:
    async with door(short) as found:
        stream, _ = await found.say(GOOD, wrong)
        await until(lambda: found.socket.counters["malformed"] == 1)
        with pytest.raises(ConnectionError):
            await told(stream)
        assert not any(isinstance(fact, MemoryMeasured) for fact in found.facts)


def test_a_process_that_has_said_nothing_is_none_of_the_others_that_have() -> None:
    spec = msgspec.structs.replace(FOUR, host_memory=1000)
    assert on_host(spec, [None, MemoryHeld(1, 2, 30, 4), None]) == HostMemory(1000, len(spec.ranks), 30, 1)


def test_what_all_have_together_is_never_more_than_can_be_said() -> None:
    most = MemoryHeld(BYTES_MAX, BYTES_MAX, BYTES_MAX, BYTES_MAX)
    assert is_possible(most) and together([most, most]) == MemoryInUse(BYTES_MAX, BYTES_MAX, BYTES_MAX)
    assert together([]) == MemoryInUse()

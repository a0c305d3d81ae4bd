import tracemalloc
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId
from covey.ports.pages import Handed
from covey.wire.frames import FRAME_BYTES_MAX, FrameError, pack, read_frame, unpack
from covey.wire.job import Join, Joined, Refusal, decoder


class Pipe:
    """A stream with bytes that have come, and then the end."""

    peer, uid, same_host = "unix:/test", 0, True

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def read_into(self, view: memoryview) -> None:
        if len(self.data) < len(view):
            raise ConnectionError("closed")
        view[:] = self.data[: len(view)]
        self.data = self.data[len(view) :]

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        self.data += b"".join(parts)

    async def write_with(self, data: bytes, pages: Sequence[Handed]) -> None:
        raise ConnectionError("nobody sends pages here")

    def close(self) -> None:
        self.data = b""


@pytest.mark.parametrize("length", [0, 10, 70_000, 900_000])
async def test_frames_of_any_length_come_back_as_they_went(length: int) -> None:
    frame = Refusal(what="x" * length, why="", next="")
    pipe = Pipe(pack(frame) + pack(Join(pid=7)))
    assert await read_frame(pipe, decoder) == frame
    assert await read_frame(pipe, decoder) == Join(pid=7)
    with pytest.raises(ConnectionError):
        await read_frame(pipe, decoder)


async def test_a_length_over_the_limit_is_refused_before_anything_is_read() -> None:
    with pytest.raises(FrameError, match="announced"):
        await read_frame(Pipe((FRAME_BYTES_MAX + 1).to_bytes(4, "little")), decoder)
    with pytest.raises(ValueError, match="over the limit"):
        pack(Refusal(what="x" * FRAME_BYTES_MAX, why="", next=""))


async def test_a_frame_that_is_only_announced_takes_no_memory() -> None:
    tracemalloc.start()
    with pytest.raises(ConnectionError):
        await read_frame(Pipe(FRAME_BYTES_MAX.to_bytes(4, "little") + b"x"), decoder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < FRAME_BYTES_MAX / 4


@given(st.binary(max_size=300))
def test_any_body_is_a_frame_or_a_frame_error(data: bytes) -> None:
    try:
        assert isinstance(unpack(data, decoder), msgspec.Struct)
    except FrameError:
        pass


@given(st.integers(0, 60), st.integers(0, 255))
def test_a_mutated_frame_is_a_frame_or_a_frame_error(place: int, value: int) -> None:
    body = bytearray(pack(Joined(host=HostId("gpu1"), rank=3))[4:])
    body[place % len(body)] = value
    try:
        assert isinstance(unpack(body, decoder), msgspec.Struct)
    except FrameError:
        pass

"""A small durable file is what was written, or it is refused with a reason."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.ports.disk import DirectoryDisk
from covey.wire.checked import Damaged, OtherFormat, load, save, seal, unseal


class Thing(msgspec.Struct, frozen=True):
    name: str
    counts: dict[str, int] = {}


decoder = msgspec.msgpack.Decoder(Thing)
THING = Thing("gpu1", {"a": 1, "b": 2})


def test_what_was_saved_is_loaded_and_no_file_is_none(tmp_path: Path) -> None:
    async def story() -> None:
        disk = DirectoryDisk(str(tmp_path))
        assert await load(disk, "room/thing", decoder) is None
        await save(disk, "room/thing", THING)
        assert await load(disk, "room/thing", decoder) == THING
        (tmp_path / "room/thing").write_bytes(seal(THING)[:-1])
        with pytest.raises(Damaged, match=rf"{tmp_path}/room/thing is damaged: it has \d+ bytes after its header"):
            await load(disk, "room/thing", decoder)
        disk.close()

    asyncio.run(story())


@given(st.integers(0, len(seal(THING)) - 1), st.integers(1, 255))
def test_a_file_that_was_changed_anywhere_is_refused(at: int, change: int) -> None:
    whole = bytearray(seal(THING))
    whole[at] ^= change
    with pytest.raises(Damaged):
        unseal(bytes(whole), decoder)


@given(st.integers(0, len(seal(THING)) - 1))
def test_a_file_that_was_cut_anywhere_is_refused(at: int) -> None:
    with pytest.raises(Damaged):
        unseal(seal(THING)[:at], decoder)


@given(st.binary(max_size=100))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Damaged):
        unseal(data, decoder)
    with pytest.raises(Damaged, match="bytes after its header"):
        unseal(seal(THING) + b"x" + data, decoder)


def test_another_version_and_another_kind_are_refused_in_words() -> None:
    with pytest.raises(OtherFormat) as other:
        unseal(seal(THING, version=2), decoder, name="the thing")
    assert (other.value.what, other.value.status) == ("the thing has format 2", 3)
    assert "reads and writes format 1" in other.value.why and "start the version that wrote" in other.value.next
    with pytest.raises(Damaged, match="its content is invalid"):
        unseal(seal(Thing("x")), msgspec.msgpack.Decoder(int))

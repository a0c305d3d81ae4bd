"""The checksum is the same whichever library computes it: agents and scripts need not have the same library."""

import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.wire import checksum
from covey.wire.checksum import crc32


@given(st.binary(max_size=5000), st.binary(max_size=40), st.integers(0, 2**32 - 1))
def test_it_is_zlibs_number_in_one_piece_and_in_two(data: bytes, more: bytes, seed: int) -> None:
    assert crc32(data, seed) == zlib.crc32(data, seed)
    assert crc32(memoryview(bytearray(more)), crc32(data)) == zlib.crc32(data + more)


def test_without_the_fast_library_zlib_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert checksum.fastest() is zlib.crc32
    monkeypatch.undo()
    assert checksum.fastest() is not zlib.crc32, "the agent's own environment has it"

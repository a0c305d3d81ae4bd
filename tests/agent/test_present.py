"""Which pages of an array's memory are there: what is not must neither be read nor sent."""

import ctypes
import os
from collections.abc import Iterator

import pytest

from agent.arrays.present import fill, there, whole_pages

PAGE = 4096


@pytest.fixture
def memory() -> Iterator[int]:
    """Memory of 16 pages, of which 2, 3 and 7 are there."""
    descriptor = os.memfd_create("array")
    os.ftruncate(descriptor, 16 * PAGE)
    os.pwrite(descriptor, b"a" * 2 * PAGE, 2 * PAGE)
    os.pwrite(descriptor, b"b" * PAGE, 7 * PAGE)
    yield descriptor
    os.close(descriptor)


def in_pages(found: list[tuple[int, int]]) -> list[tuple[float, float]]:
    return [(begin / PAGE, end / PAGE) for begin, end in found]


def test_what_is_there_is_found_within_the_part_that_is_asked_for(memory: int) -> None:
    assert in_pages(there(memory, 0, 16 * PAGE)) == [(2, 4), (7, 8)]
    assert in_pages(there(memory, 3 * PAGE, 4 * PAGE)) == [(3, 4)]
    assert there(memory, 8 * PAGE, 8 * PAGE) == []


def test_only_pages_that_are_there_from_end_to_end_are_sent(memory: int) -> None:
    """Pages of the volume may be longer than those of the machine."""
    assert in_pages(whole_pages(memory, 0, 16 * PAGE, PAGE)) == [(2, 4), (7, 8)]
    assert in_pages(whole_pages(memory, 0, 16 * PAGE, 2 * PAGE)) == [(2, 4)]
    assert whole_pages(memory, 0, 16 * PAGE, 4 * PAGE) == []
    assert in_pages(whole_pages(memory, 2 * PAGE, 2 * PAGE, PAGE)) == [(2, 4)]
    assert whole_pages(memory, 6 * PAGE, 2 * PAGE, 2 * PAGE) == []


def test_holes_are_filled_and_what_is_there_stays(memory: int) -> None:
    source = ctypes.create_string_buffer(b"f" * 8 * PAGE, 8 * PAGE)
    fill(memory, PAGE, 8 * PAGE, ctypes.addressof(source))
    found = b"".join(bytes([os.pread(memory, 1, page * PAGE)[0]]) for page in range(16))
    assert found == b"\0faafffbf" + bytes(7)
    assert in_pages(there(memory, 0, 16 * PAGE)) == [(1, 9)]

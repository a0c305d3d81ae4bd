"""The division of tensors into Blocks, and the table of each Block."""

import itertools
import re
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.core.ids import JobId
from covey.tensors.numbers.blocks import (
    TABLE_PATTERN,
    TABLES_MAX,
    Sizes,
    blocks_of,
    job_of,
    number_of,
    speaker,
    table_id,
    tables_of,
)
from covey.tensors.numbers.tensor_wire import key_of

SIZES = Sizes()
MIB = 1 << 20


@given(st.integers(0, (1 << 32) - 1), st.integers(0, 1 << 28), st.integers(1, TABLES_MAX))
@example(0, 0, 3)
@example(7, 16384, 16)
def test_blocks_cover_a_tensor_once_and_in_order(key: int, elements: int, tables: int) -> None:
    blocks = blocks_of(key, elements, 4, tables)
    assert blocks[0].first == 0 and blocks[-1].end == elements
    assert all(before.end == after.first for before, after in itertools.pairwise(blocks))
    assert all(block.first < block.end for block in blocks) or elements == 0
    assert all(0 <= block.table < tables for block in blocks)
    assert all(block.first % SIZES.aligned == 0 for block in blocks)
    if tables > 1:
        assert all(4 * (block.end - block.first) <= SIZES.most_bytes + 4 * SIZES.aligned for block in blocks)


@given(st.integers(0, (1 << 32) - 1), st.integers(MIB, 1 << 26), st.integers(2, TABLES_MAX))
def test_every_table_has_the_same_part_of_a_large_tensor(key: int, elements: int, tables: int) -> None:
    held = [0] * tables
    for block in blocks_of(key, elements, 4, tables):
        held[block.table] += block.end - block.first
    assert max(held) - min(held) <= SIZES.aligned * len(blocks_of(key, elements, 4, tables)) // tables + SIZES.aligned


def test_a_small_tensor_is_one_block_and_a_smaller_one_is_in_table_0() -> None:
    assert blocks_of(5, 1000, 4, 4) == ((0, 1000, 0),)
    assert blocks_of(5, 20_000, 4, 4) == ((0, 20_000, 1),)
    assert blocks_of(6, 20_000, 4, 4) == ((0, 20_000, 2),)
    assert blocks_of(6, 10**9, 4, 1) == ((0, 10**9, 0),)


def test_medium_tensors_are_dealt_among_all_tables() -> None:
    used = {block.table for key in range(100) for block in blocks_of(key, 40_000, 4, 7)}
    assert used == set(range(7))


@pytest.mark.parametrize(("hosts", "tables"), [(0, 1), (1, 1), (5, 5), (16, 16), (400, 16)])
def test_a_job_has_a_table_for_each_host_up_to_sixteen(hosts: int, tables: int) -> None:
    assert tables_of(hosts) == tables


def test_a_table_is_named_after_its_job_and_table_0_like_it() -> None:
    job = JobId("train-7.x")
    assert table_id(job, 0) == job
    for table in range(TABLES_MAX):
        name = table_id(job, table)
        assert re.fullmatch(TABLE_PATTERN, name)
        assert (job_of(name), number_of(name)) == (job, table)
    for wrong in ("train/", "train/0", "train/16", "train/01", "train/1/1", "/1", "train/1\n"):
        assert not re.fullmatch(TABLE_PATTERN, wrong)


@pytest.mark.parametrize(("tables", "ranks"), [(2, 2), (4, 2), (2, 8), (3, 5), (16, 4)])
def test_every_rank_of_a_host_speaks_for_about_as_many_blocks(tables: int, ranks: int) -> None:
    """This holds for a large tensor, and for many small ones."""
    large = blocks_of(key_of("g"), 25 << 20, 4, tables)
    spoken = Counter(speaker(key_of("g"), at, tables, ranks) for at in range(len(large)))
    assert len(spoken) == ranks and max(spoken.values()) - min(spoken.values()) <= 1
    small = Counter(speaker(key_of(f"layer{at}"), 0, tables, ranks) for at in range(1000))
    assert len(small) == ranks and max(small.values()) < 2 * min(small.values())

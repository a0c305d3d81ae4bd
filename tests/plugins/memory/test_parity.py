"""The content of a slot, the moments at which a row is in use, and volumes with parity on a simulated rack."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.errors import Refused
from plugins.memory.datapath.volumes.members.row_locks import RowLocks
from plugins.memory.policy import parity
from plugins.memory.service.record import KnownProcess, KnownVolume
from tests.quiet import quiet

from .test_mirror import VOLUME, a_rack

K = parity.KINDS


def versions(*found: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]":
    return np.array(found, np.uint64)


# ---- what a slot says ----


@pytest.mark.parametrize("text", ["1+1", "8+1", "2", "2+2", "+1", "two+1", "", "2+1+1", "-2+1", 3])
def test_what_is_no_parity_is_refused_in_words(text: object) -> None:
    with pytest.raises(ValueError, match=r"K\+1|2 to 7 members"):
        parity.parsed(text)


def test_parity_is_written_as_people_say_it() -> None:
    assert [parity.parsed(text) for text in ("2+1", "4 + 1", "7+1")] == [2, 4, 7]


def test_a_slot_older_than_a_page_is_no_parity() -> None:
    newest = np.array([[2 * K, K], [K, K], [3 * K, 0], [0, 0]], np.uint64)
    slots = versions(K, 2 * K, 3 * K, 0)
    assert parity.is_parity(slots, newest).tolist() == [False, True, True, False]
    assert not parity.is_parity(versions(parity.slot_version(5 * K, 0)), newest[:1]).any()


def test_a_copy_is_of_one_column_and_of_the_newest() -> None:
    slots = versions(parity.slot_version(2 * K, 0), parity.slot_version(2 * K, 1), 2 * K)
    assert parity.is_copy(slots, versions(K, K, K), 0).tolist() == [True, False, False]
    assert parity.is_copy(slots, versions(3 * K, K, K), 0).tolist() == [False, False, False]


def test_all_members_there_and_a_page_newer_than_its_slot() -> None:
    found = parity.settled([versions(K, 3 * K), versions(2 * K, K)], versions(2 * K, 2 * K))
    assert (found.lost, found.stale.tolist()) == (False, [1])
    assert found.newest.tolist() == [[K, 2 * K], [3 * K, K]]


def test_a_missing_page_is_what_its_slot_says_or_lost() -> None:
    slots = versions(2 * K, parity.slot_version(3 * K, 0), 0)
    found = parity.settled([None, versions(K, 2 * K, 0)], slots)
    assert (found.lost, found.newest.tolist()) == (False, [[2 * K, K], [3 * K, 2 * K], [0, 0]])
    found = parity.settled([None, versions(3 * K, 2 * K, 0)], slots)
    assert (found.lost, found.newest[0].tolist()) == (True, [0, 3 * K])
    assert parity.settled([None, versions(K, K, 0)], None).lost
    assert parity.settled([None, None], versions(K)).lost
    assert not parity.settled([versions(K), versions(0)], None).lost


def test_a_copy_that_is_newer_than_its_member_is_what_the_page_is() -> None:
    found = parity.settled([versions(K), versions(2 * K)], versions(parity.slot_version(3 * K, 0)))
    assert (found.lost, found.newest.tolist(), found.stale.tolist()) == (False, [[3 * K, 2 * K]], [])


class Row:
    """A row of three members that die between any two steps of a write, as the rules have it: no code of the volume."""

    def __init__(self) -> None:
        self.pages: list[tuple[int, int] | None] = [(0, 0), (0, 0)]
        """The version and content of each page; None: no member."""
        self.slot = (0, 0)
        self.now = [0, 0]
        self.version = 0

    def content(self, column: int) -> int:
        page = self.pages[column]
        if page is not None:
            return page[1]
        newest = np.array([[0 if p is None else p[0] for p in self.pages]], np.uint64)
        is_copy = parity.is_copy(versions(self.slot[0]), newest[:, column], column)[0]
        return self.slot[1] if is_copy else self.slot[1] ^ (self.pages[1 - column] or (0, 0))[1]

    def steps(self, column: int, value: int) -> list[str]:
        """The steps of a write, in order."""
        return ["page", "slot"] if None not in self.pages else ["slot", "page"]

    def do(self, step: str, column: int, value: int) -> None:
        missing = next((at for at, page in enumerate(self.pages) if page is None), None)
        if step == "page" and self.pages[column] is not None:
            self.pages[column] = (self.version, value)
        if step == "slot" and missing is None:
            self.slot = (parity.slot_version(self.version, None), value ^ self.content(1 - column))
        elif step == "slot" and missing is not None:
            kept = value if column == missing else self.content(missing)
            self.slot = (parity.slot_version(self.version, missing), kept)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 255)), max_size=5),
    st.integers(0, 1),
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 255)), max_size=3),
    st.tuples(st.integers(0, 1), st.integers(1, 255), st.integers(0, 2)),
)
def test_after_a_crash_between_two_steps_no_page_is_another(
    before: list[tuple[int, int]], lost: int, after: list[tuple[int, int]], last: tuple[int, int, int]
) -> None:
    """Writes, a member dies, writes, and the process dies in the middle of the last write: the page of the lost member
    is the old one or the new one."""
    row = Row()
    for at, (column, value) in enumerate([*before, *after]):
        if at == len(before):
            row.pages[lost] = None
        row.version += K
        for step in row.steps(column, value):
            row.do(step, column, value)
        row.now[column] = value
    row.pages[lost] = None
    column, value, steps = last
    row.version += K
    for step in row.steps(column, value)[:steps]:
        row.do(step, column, value)
    said = [None if page is None else versions(page[0]) for page in row.pages]
    found = parity.settled(said, versions(row.slot[0]))
    assert not found.lost, "it was one loss"
    may_be = {row.now[lost], value} if column == lost else {row.now[lost]}
    assert row.content(lost) in may_be or (not found.newest[0, lost] and 0 in may_be)


# ---- rows in use ----


async def test_rows_are_used_by_one_at_a_time_in_the_order_of_asking() -> None:
    locks, order = RowLocks(), []

    async def use(name: str, first: int, count: int, hold: asyncio.Event) -> None:
        async with locks.locked(first, count):
            order.append(name)
            await hold.wait()

    gates = {name: asyncio.Event() for name in "abcd"}
    tasks = {
        name: asyncio.create_task(use(name, first, count, gates[name]))
        for name, first, count in (("a", 0, 4), ("b", 2, 4), ("c", 5, 1), ("d", 8, 1))
    }
    await quiet()
    assert order == ["a", "d"], "c waits for b, who came before it"
    tasks["b"].cancel()
    await quiet()
    assert order == ["a", "d", "c"]
    for gate in gates.values():
        gate.set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert not locks.is_held(0, 100)


# ---- on a rack ----


def test_a_volume_with_parity_takes_half_as_much_again() -> None:
    known = KnownVolume("v", 256 << 10, 4096, 64 << 10, b"", -1, KnownProcess(b""), members=3, parity=True)
    assert (known.data, known.slabs, known.taken_bytes) == (2, 2, 384 << 10)


def test_members_that_share_a_rack_are_said_to() -> None:
    for labels, said in (("aabbb", True), ("aabcd", False)):
        racks = {f"h{at + 1}": label for at, label in enumerate(labels)}
        with a_rack(5, racks=racks) as rack:
            rack.attach("h1", VOLUME, "128 KiB", parity="2+1")
            told = [why for event, why in rack.story(f"volume/{VOLUME}") if event == "racks shared"]
            assert bool(told) is said, told
            assert not told or "two members of slab 0 are in one rack" in told[0]


@pytest.mark.parametrize(
    ("mirror", "text", "said"),
    [
        (0, "1+1", "2 to 7 members"),
        (0, "two", "expected K"),
        (2, "2+1", "choose one of them"),
        (0, "4+1", r"5 slabs at lenders \(1 slab, each on 5 other hosts\), and only 3 were"),
    ],
)
def test_bad_parity_is_refused_in_words(mirror: int, text: str, said: str) -> None:
    with a_rack(4) as rack:
        with pytest.raises(Refused, match=said) as refused:
            rack.attach("h1", VOLUME, "128 KiB", mirror=mirror, parity=text)
        assert "--parity" in str(refused.value) or "--parity" in refused.value.next
        assert rack.command("h1", "volumes") == []
        rack.run(2)
        assert not any(rack.agents[name].lending.machine.lent for name in rack.agents)

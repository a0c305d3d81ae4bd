"""What data Blocks may take of a host's memory: the limit less the rest, for each process of the job there."""

import numpy as np
import pytest

from covey.core.errors import CoveyError
from covey.job.blocks.block_wire import DeclaredBlocks
from covey.job.blocks.data_blocks import KeptHere, store_of
from covey.job.blocks.exchange import ExchangingProcess
from covey.job.blocks.memory_share import (
    BLOCKS_AROUND,
    BesideBlocks,
    kept_bytes,
    seen,
    share_bytes,
)
from covey.job.blocks.memory_use import MemoryUse
from covey.kernel.resident import Resident, resident
from covey.wire.job import HostMemory, MemoryHeld

MIB = 1 << 20


@pytest.mark.parametrize(
    ("on_host", "beside", "share"),
    [
        (HostMemory(1000, 1), 300, 700),
        (HostMemory(1000, 2), 300, 200),  # the other one has not said what it needs: it counts as this one
        (HostMemory(1000, 2, 100, 1), 300, 300),
        (HostMemory(1000, 4, 100, 1), 100, 150),
        (HostMemory(1000, 2, 900, 3), 50, 25),  # more processes have said something than the job has ranks here
        (HostMemory(1000, 2, 900, 1), 300, 0),
        (HostMemory(0, 1), 300, 2000),
        (HostMemory(0, 4), 300, 500),
    ],
)
def test_the_share_is_the_limit_less_the_rest_for_each_process(on_host: HostMemory, beside: int, share: int) -> None:
    """Without a limit it is a fourth of what the host had available, for all processes together."""
    assert share_bytes(on_host, beside, 8000) == share


def test_shares_and_what_processes_need_are_never_more_than_the_limit() -> None:
    for limit in range(0, 2000, 7):
        needs = [limit % 300, limit % 170 + 20, limit % 89]
        shares = [share_bytes(HostMemory(limit, 3, sum(needs) - need, 2), need, 10**9) for need in needs if limit]
        assert sum(shares) + sum(needs) <= max(limit, sum(needs))


def test_blocks_around_the_one_in_use_are_in_the_share() -> None:
    assert kept_bytes(1000, 100) == 1000 - BLOCKS_AROUND * 100
    assert kept_bytes(300, 100) == 0


def test_a_peak_that_nobody_saw_counts_and_what_was_needed_once_is_kept_free() -> None:
    first = seen(BesideBlocks(), 400, 900, 100)
    assert first == BesideBlocks(300, 900), "the peak before there were Blocks is over"
    assert seen(first, 500, 900, 300) == BesideBlocks(300, 900)
    peaked = seen(first, 500, 1000, 300)
    assert peaked == BesideBlocks(700, 1000)
    assert seen(peaked, 400, 1000, 300) == peaked


class Kept:
    """A set of Blocks in memory."""

    def __init__(self, spills: bool, resident_bytes: int) -> None:
        self.spills, self.resident_bytes = spills, resident_bytes


class Measured:
    """What a test says is resident and available; it counts how often it is asked what is available."""

    def __init__(self) -> None:
        self.now, self.available, self.asked, self.now_s = Resident(400, 500), 8000, 0, 0.0

    def available_now(self) -> int:
        self.asked += 1
        return self.available

    def use(self, limit: int, processes: int = 1) -> MemoryUse:
        return MemoryUse(limit, processes, lambda: self.now, self.available_now, lambda: self.now_s)


def test_sets_share_what_is_left_and_those_in_memory_come_first() -> None:
    measured = Measured()
    use = measured.use(2000)
    assert use.share_bytes() == 1600
    use.keeps(Kept(False, 0), 600)
    assert use.share_bytes() == 1000, "what a set will have is its own before it is there"
    use.keeps(Kept(True, 100))
    use.keeps(Kept(True, 0))
    assert use.share_bytes() == 500 and use.blocks_bytes == 100
    assert use.room_bytes() == 1000, "another set that does not spill may have all of it"


def test_a_set_that_does_not_spill_may_have_what_two_that_do_leave() -> None:
    use, me = Measured().use(2000), ExchangingProcess("j1", 0, 0, 1, lambda: None, lambda text: None)
    for _ in range(2):
        use.keeps(Kept(True, 0))
    assert not store_of(DeclaredBlocks("data", 10, 120, ""), KeptHere(None, None, use), me).spills
    assert use.share_bytes() == 200, "the other two have the rest"
    with pytest.raises(CoveyError, match=r"are 500 B, and --mem 2\.0 KiB leaves 400 B"):
        store_of(DeclaredBlocks("more", 5, 100, ""), KeptHere(None, None, use), me)


def test_arrays_of_the_state_count_though_they_were_not_touched_yet() -> None:
    use = Measured().use(2000)
    use.arrays_bytes = 900
    assert use.share_bytes() == 1100


def test_what_is_no_array_is_not_counted() -> None:
    """A script that runs without a limit runs with one."""
    use = Measured().use(2000)
    state = {"w": np.zeros(4), "step": 3.0}
    assert use.counts(lambda: state)() == state and use.arrays_bytes == 32  # type: ignore[arg-type,return-value]


def test_processes_that_come_and_go_change_the_share() -> None:
    measured = Measured()
    use = measured.use(0, 2)
    use.keeps(Kept(True, 0))
    assert use.share_bytes() == 1000
    measured.available = 10
    assert use.heard(HostMemory(0, 4)) and not use.heard(MemoryHeld())
    assert use.share_bytes() == 500 and measured.asked == 1, "Blocks of its own are not what the host lacks"
    use.heard(HostMemory(0, 0))
    assert use.share_bytes() == 2000


def test_a_process_says_what_it_has_where_the_agent_wants_it() -> None:
    measured = Measured()
    use = measured.use(2000)
    assert use.due() == [] and use.left_s(3.0) == 3.0, "an older agent knows no such report"
    use.every_s = 1.0
    use.keeps(Kept(True, 100))
    use.arrays_bytes = 350
    assert use.left_s(None) == 0.0 and use.due() == [MemoryHeld(100, 350, 350, 500)]
    assert use.due() == [] and use.left_s(9.0) == 1.0
    plain = measured.use(0)
    plain.every_s = 1.0
    assert plain.due() == [] and plain.left_s(None) is None, "nobody needs to know"


def test_the_kernel_says_what_is_resident() -> None:
    before = resident()
    block = bytearray(b"1" * (32 * MIB))
    now = resident()
    assert now.now_bytes - before.now_bytes > 30 * MIB and now.peak_bytes >= now.now_bytes and len(block) > 0

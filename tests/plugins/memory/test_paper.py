"""Infiniswap's claims (Gu 2021, chapter 2), one per test, against this plugin."""

import asyncio
import random
import statistics

import pytest

from covey.core.ids import HostId
from plugins.memory.machine.borrowing.borrower import Borrower
from plugins.memory.machine.borrowing.events import BorrowerTick, VolumeFound
from plugins.memory.messages import (
    Activity,
    CheckActivity,
    Done,
    Evict,
    FreeMem,
    Map,
    MrInfo,
    QueryMem,
)
from plugins.memory.policy import placement
from plugins.memory.policy.lending import Headroom
from plugins.memory.policy.settings import MemorySettings
from tests.plugins.memory.ports import PAGE, a_volume, read, write
from tests.plugins.memory.ports import placed as opened
from tests.plugins.memory.test_service import a_rack, keep_hot, read_all, until_done, write_all
from tests.quiet import quiet

HOSTS = [HostId(f"h{n}") for n in range(32)]


def placed(rng: random.Random, slabs: int, choices: int) -> list[int]:
    """Slabs per host after so many were placed one by one, always on the freest of `choices` hosts."""
    free = dict.fromkeys(HOSTS, 1000)
    for _ in range(slabs):
        asked = placement.hosts_to_ask(HOSTS, [], rng, choices)
        host = placement.freest(asked, {host: free[host] for host in asked})
        assert host is not None
        free[host] -= 1
    return [1000 - slabs for slabs in free.values()]


def test_there_are_eight_control_messages() -> None:
    """Four messages are for placement, four for eviction. Reference: §2.6.1"""
    eight = (QueryMem, FreeMem, Map, MrInfo, CheckActivity, Activity, Evict, Done)
    assert [kind.__struct_config__.tag for kind in eight] == [kind.__name__ for kind in eight]


def test_activity_is_a_moving_average_of_page_requests_that_starts_at_zero() -> None:
    """The weight alpha is 0.2, over periods of one second. Reference: §2.4.1"""
    rate = 0.0
    for _ in range(30):
        rate = placement.activity(rate, 100)
    assert rate == pytest.approx(100 * (1 - 0.8**30))


def test_a_slab_is_bound_late_and_stays_unmapped_while_it_is_not_hot() -> None:
    """Placement of a slab of 1 GiB begins when activity crosses 20 page requests per second. Reference: §2.4.1"""
    borrower = Borrower(HostId("h1"), random.Random(1), 1, MemorySettings().hot, 60.0)
    borrower.handle(VolumeFound("v", 1, 1 << 30, 4096, ()), 0.0)
    peers = tuple(placement.LenderPeer(host, "alive", 9) for host in HOSTS[1:])
    for second in range(100):
        assert list(borrower.handle(BorrowerTick({"v": [20]}, peers), float(second))) == []
    assert borrower.volumes["v"].slabs[0].state == "cold"
    for second in range(100, 140):
        borrower.handle(BorrowerTick({"v": [25]}, peers), float(second))
    assert borrower.volumes["v"].slabs[0].state == "asking"


def test_two_choices_balance_memory_far_better_than_one() -> None:
    """The freer of two random hosts is taken, without coordination. Reference: §2.4.2"""
    rng = random.Random(7)
    one = statistics.mean(max(placed(rng, 32 * 16, 1)) for _ in range(10))
    two = statistics.mean(max(placed(rng, 32 * 16, 2)) for _ in range(10))
    assert two - 16 < (one - 16) / 3


def test_slabs_of_one_device_spread_over_as_many_hosts_as_there_are() -> None:
    """Hosts without its slabs come first. Reference: §2.4.2"""
    rng = random.Random(3)
    holding: set[HostId] = set()
    for n in range(32):
        asked = placement.hosts_to_ask(HOSTS, holding, rng)
        chosen = placement.freest(asked, dict.fromkeys(asked, 5))
        assert chosen is not None
        holding.add(chosen)
        assert len(holding) == n + 1


async def test_a_request_waits_for_all_its_pages_wherever_they_lie() -> None:
    """Multi-page requests may cross mapped and unmapped slabs. Reference: §2.4.3"""
    async with a_volume() as (bench, volume):
        await opened(volume, bench.register(0))
        bench.disk.gate.clear()
        writing = asyncio.ensure_future(write(volume, 15, 1, 2))
        await quiet()
        assert not writing.done(), "page 16 is of an unmapped slab"
        bench.disk.gate.set()
        await writing
        assert await read(volume, 15, 2) == [1, 2]


def test_the_loss_of_one_lender_touches_its_slabs_only() -> None:
    """Failures affect a fraction of the address space. Reference: §2.1"""
    with a_rack(4) as rack:
        rack.attach("h1", "data", "192 KiB")
        keep_hot(rack, "h1", "data", slabs=3)
        lenders = [rack.lender("h1", "data", index) for index in range(3)]
        assert len(set(lenders)) == 3
        rack.host(lenders[0]).power_off()
        rack.declare(lenders[0], "gone")
        until_done(rack, rack.client("h1", read_all, "data"))
        assert [rack.lender("h1", "data", index) for index in (1, 2)] == lenders[1:]


def test_headroom_is_an_eighth_of_the_machine() -> None:
    """Headroom is 8 GB of 64 GB. Reference: §2.5.1"""
    assert MemorySettings().headroom_kept == Headroom(fraction=0.125)


def test_a_slab_is_released_only_after_done() -> None:
    """First comes EVICT, then DONE, then the memory is released. Reference: §2.5.2"""
    with a_rack(2) as rack:
        rack.attach("h1", "data", "64 KiB")
        keep_hot(rack, "h1", "data", slabs=1)
        until_done(rack, rack.client("h1", write_all, "data"))
        probes = rack.host("h2").probes
        probes.filled_bytes = probes.total_bytes - probes.used_bytes
        rack.until(lambda: not rack.agents["h2"].lending.machine.lent)
        talk = [type(message).__name__ for _, _, message in rack.messages if isinstance(message, Evict | Done)]
        assert talk == ["Evict", "Done"]
        events = [event for event, _ in rack.story("slab/data/0")]
        assert events[-2:] == ["done", "done"]
        probes.filled_bytes = 0
        until_done(rack, rack.client("h1", read_all, "data"))


def test_pages_are_four_kib() -> None:
    """Reference: §2.2.1"""
    assert MemorySettings().page_bytes == PAGE == 4096

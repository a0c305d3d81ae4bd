"""How long requests took: which are counted, which place answered them, and what people and machines are told."""

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.api.exposition import exposition
from covey.core.metrics import Distribution, Risen
from plugins.memory.datapath.volumes import latencies as datapath
from plugins.memory.datapath.wire.control import LatencyCounts
from plugins.memory.policy import latencies
from plugins.memory.service import measured, metrics
from tests.agent.api.test_metrics import read_back
from tests.plugins.memory.ports import PAGE, SHAPE, a_volume, page, placed, read, soon, write
from tests.plugins.memory.test_service import a_rack, keep_hot, read_all, until_done, write_all


@given(st.lists(st.floats(min_value=2e-6, max_value=10.0), min_size=1, max_size=200), st.floats(0.01, 0.99))
def test_a_quantile_of_the_counts_is_that_of_the_times_within_a_fifth(times_s: list[float], share: float) -> None:
    counts = latencies.counted(np.array(times_s)).tolist()
    true_s = sorted(times_s)[max(0, int(np.ceil(share * len(times_s))) - 1)]
    assert latencies.quantile_s(counts, share) == pytest.approx(true_s, rel=0.2)
    bounds = latencies.below(counts)
    assert bounds[-1] == (float("inf"), len(times_s))
    for upto_s, count in bounds[:-1]:
        assert sum(each < upto_s * 0.999 for each in times_s) <= count <= sum(each < upto_s * 1.001 for each in times_s)


@given(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 9), max_size=6))
def test_what_came_since_is_the_difference_unless_it_began_anew(older: list[int], more: list[int]) -> None:
    newer = [a + b for a, b in zip(older, [*more, *[0] * 6], strict=False)] + more[len(older) :]
    assert latencies.since(newer, older) == [*more[: len(newer)], *[0] * (len(newer) - len(more))]
    assert latencies.since([1], [2]) == [1] and latencies.since([], [3]) == []


async def test_each_request_is_counted_with_who_answered_it() -> None:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 0, 1)  # slab 0 has a lender, slab 1 has none
        await write(volume, SHAPE.slab_pages, 2)
        bench.disk.gate.clear()
        await write(volume, 1, 3)
        await read(volume, 1, 1)
        bench.disk.gate.set()
        await volume.flush()
        for first in (0, SHAPE.slab_pages, 5):
            data = bytearray(PAGE)
            await volume.read(first, memoryview(data))
        found = {(each.op, each.answered): sum(each.counts) for each in volume.counts(1).latencies}
        assert found == {
            ("write", "lender"): 2, ("write", "disk"): 1,
            ("read", "ring"): 1, ("read", "lender"): 1, ("read", "disk"): 1, ("read", "zeros"): 1,
        }  # fmt: skip


async def test_requests_that_nobody_awaits_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datapath, "GATHERED_MAX", 3)
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        for at in range(8):
            answered: list[object] = []
            data = memoryview(page(at + 1))
            volume.submit_write(at, 1, data, answered.append)
            await soon(lambda: answered)  # noqa: B023
        await volume.flush()
        answered = []
        volume.submit_read(0, memoryview(bytearray(PAGE)), answered.append)
        volume.submit_read(9, memoryview(bytearray(PAGE)), answered.append)
        await soon(lambda: len(answered) == 2)
        found = {(each.op, each.answered): sum(each.counts) for each in volume.counts(1).latencies}
        assert found == {("write", "lender"): 8, ("read", "lender"): 1, ("read", "zeros"): 1}
        writes = next(each for each in volume.counts(1).latencies if each.op == "write")
        assert 0 < writes.sum_s < 8 * 2.0 and latencies.quantile_s(writes.counts, 0.5) < 2.0


def test_an_agent_shows_the_last_minute_and_gives_histograms_and_links() -> None:
    with a_rack(2) as rack:
        rack.attach("h1", "data", "128 KiB")
        keep_hot(rack, "h1", "data", slabs=2)
        until_done(rack, rack.client("h1", write_all, "data"))
        until_done(rack, rack.client("h1", read_all, "data"))
        rack.run(3.0)
        view = rack.command("h1", "volumes")[0]
        found = {(each.op, each.answered) for each in view.latencies}
        assert found and found <= {(op, who) for op in ("read", "write") for who in ("zeros", "ring", "lender", "disk")}
        assert all(0 <= each.p50_s <= each.p99_s for each in view.latencies)
        assert view.links.open == 2
        before = view.latencies
        rack.run(150.0)
        after = rack.command("h1", "volumes")[0].latencies
        assert sum(each.requests for each in after) < sum(each.requests for each in before), "older than a minute"
        lines = exposition(rack.agents["h1"].metrics()).decode().splitlines()
        assert 'covey_memory_links{state="open"} 2.0' in lines
        family = f"covey_memory_{before[0].op}_seconds"
        assert f"# TYPE {family} histogram" in lines


class Volume:
    """A volume that counted some reads of a lender."""

    places: dict[int, object] = {}

    def __init__(self, name: str, reads: tuple[int, ...], torn: int = 0, life: int = 1) -> None:
        answered = (LatencyCounts("read", "lender", reads, 0.01 * sum(reads)),)
        self.known = SimpleNamespace(volume=name)
        self.counts = msgspec.structs.replace(
            measured.NOTHING, latencies=answered, pages_refused=2, torn_pages=torn, life=life
        )


def test_a_histogram_is_one_family_with_rising_bounds() -> None:
    volumes: list[Any] = [Volume("data", (0,) * 20 + (3, 1))]
    families = read_back(exposition(measured.volume_metrics(volumes, Risen())).decode())
    *buckets, count, total = families["covey_memory_read_seconds"].samples
    assert {sample.labels["answered"] for sample in buckets} == {"lender"}
    assert all("volume" not in sample.labels for sample in buckets), "people choose such names"
    assert [sample.value for sample in buckets] == sorted(sample.value for sample in buckets)
    bounds = [float(sample.labels["le"]) for sample in buckets]
    assert bounds == sorted(bounds) and bounds[-1] == math.inf
    assert (buckets[-1].value, count.value, total.value) == (4, 4, 0.04)
    assert families["covey_memory_pages_refused"].samples[0].value == 2


def test_what_volumes_counted_never_falls_whichever_of_them_end_or_begin_anew() -> None:
    """Prometheus takes a count that falls for one that began anew, and would count all of the rest once more."""
    risen, read = Risen(), metrics.READ_SECONDS.of("lender")

    def now(*volumes: Any) -> tuple[int, float | Distribution]:
        found = measured.volume_metrics(volumes, risen)
        reads = found[read]
        assert isinstance(reads, Distribution)
        return reads.below[-1][1], found[metrics.PAGES_TORN.of()]

    assert now(Volume("one", (3,), 1), Volume("two", (5,), 2)) == (8, 3)
    assert now(Volume("two", (6,), 2)) == (9, 3), "volume one was removed"
    assert now(Volume("two", (1,), 0, life=2)) == (10, 3), "its process began anew"
    assert now(Volume("two", (7,), 0, life=3)) == (17, 3), "the next one counted more before it was first seen"
    assert now(Volume("one", (2,)), Volume("two", (7,), life=3)) == (19, 3)

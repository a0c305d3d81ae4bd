"""Memory limits on a GPU: the decisions (`device_memory`), and their effect on PyTorch's allocator, which is played
(`cuda_stand_in`). `test_gpu.py` has tests on a real GPU."""

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.units import GIB, MIB
from covey.hooks.limits import cuda_memory, device_memory
from covey.hooks.limits.cuda_calls import SpillMemory, runtime_path
from covey.hooks.limits.cuda_memory import CudaMemory, LimitNotHeld
from covey.hooks.limits.cuda_peaks import ScriptPeaks
from covey.hooks.limits.device_memory import PIECE_MIN, SEGMENT, Room, Used, Wanted
from tests.covey.hooks import cuda_stand_in
from tests.covey.hooks.cuda_stand_in import PlayedCuda, Runtime

SIZES = st.integers(0, 200 * GIB)


# ---- what is decided ----


@given(limit=st.integers(1, 200 * GIB), pool=SIZES, device=st.integers(GIB, 200 * GIB))
def test_the_fraction_allows_the_limit_and_the_pool_to_the_byte(limit: int, pool: int, device: int) -> None:
    share = device_memory.fraction(limit, pool, device)
    assert 0 <= share < 1, "1.0 is no limit"
    assert int(share * float(device)) == min(limit + pool, device - 1)


@given(wanted=SIZES, moved=SIZES, limit=SIZES, device=st.integers(GIB, 200 * GIB), host=SIZES)
def test_a_pool_is_within_the_host_and_leaves_a_limit(
    wanted: int, moved: int, limit: int, device: int, host: int
) -> None:
    pool = device_memory.pool_bytes(Wanted(wanted, moved), limit, Room(device, host))
    assert 0 <= pool <= host // 2 and (not pool or limit + pool < device)


@given(wanted=st.integers(GIB, 100 * GIB), share=st.floats(0.1, 0.95), moved=SIZES)
def test_what_is_not_moved_has_its_place_in_the_pool(wanted: int, share: float, moved: int) -> None:
    limit = int(wanted * share)
    pool = device_memory.pool_bytes(Wanted(wanted, moved), limit, Room(1000 * GIB, 4000 * GIB))
    assert limit + moved + pool >= wanted + wanted // 8 - 1 or moved > wanted - limit
    assert pool >= wanted // 8
    assert device_memory.pool_bytes(Wanted(wanted, 0), wanted, Room(1000 * GIB, 4000 * GIB)) == 0


def test_a_rank_that_was_never_seen_free_has_a_pool_nevertheless() -> None:
    room = Room(80 * GIB, 500 * GIB)
    assert device_memory.pool_bytes(Wanted(0), 8 * GIB, room) == 2 * GIB
    assert device_memory.pool_bytes(Wanted(0), 60 * GIB, room) == 4 * GIB


@given(nbytes=SIZES)
def test_a_pool_is_one_piece_of_the_size_that_the_allocator_asks_for(nbytes: int) -> None:
    assert device_memory.pieces(0) == ()
    for powers in (False, True):
        found = device_memory.pieces(nbytes, powers=powers)
        assert len(found) == bool(nbytes) and sum(found) >= nbytes
        assert all(
            size % SEGMENT == 0 and size >= PIECE_MIN and (not powers or size & (size - 1) == 0) for size in found
        )
        assert powers or sum(found) <= max(PIECE_MIN, nbytes + SEGMENT)


@given(nbytes=st.integers(1, 20 * GIB), split_max=st.integers(20, 600))
def test_pieces_can_be_split_where_large_blocks_are_not(nbytes: int, split_max: int) -> None:
    assert all(size < split_max * MIB for size in device_memory.pieces(nbytes, split_max * MIB))
    assert sum(device_memory.pieces(nbytes, split_max * MIB)) >= nbytes


def test_pools_grow_by_what_lacks_and_begin_anew_when_far_too_large() -> None:
    assert device_memory.to_prepare(0, 4 * GIB) == 4 * GIB
    assert device_memory.to_prepare(3 * GIB, 4 * GIB) == GIB
    assert device_memory.to_prepare(4 * GIB, GIB) == 0
    assert device_memory.to_prepare(5 * GIB, GIB) is None
    assert device_memory.to_prepare(GIB, 0) is None and device_memory.to_prepare(0, 0) == 0


def test_what_lies_in_the_pool_is_what_the_device_never_had() -> None:
    used = Used(allocated_peak=900, reserved_peak=700, allocated=100, reserved=700, pool=300)
    assert device_memory.device_peak(used) == 400 and device_memory.on_device(used) == 400
    assert device_memory.spilled(used) == 300, "no more than the pool has"
    assert device_memory.spilled(used._replace(allocated_peak=500)) == 100
    assert device_memory.spilled(used._replace(allocated_peak=300)) == 0


def test_a_pool_that_was_nearly_used_up_grows_where_there_is_room() -> None:
    used = Used(int(2.8 * GIB), 2 * GIB + 1024 * MIB, GIB, 3 * GIB, GIB)
    assert device_memory.more_pool(used, 2 * GIB, Room(80 * GIB, 100 * GIB)) == GIB // 2
    assert device_memory.more_pool(used, 2 * GIB, Room(80 * GIB, GIB // 2)) == GIB // 4
    assert device_memory.more_pool(used, 2 * GIB, Room(3 * GIB, 100 * GIB)) == 0
    assert device_memory.more_pool(used._replace(allocated_peak=2 * GIB), 2 * GIB, Room(80 * GIB, 100 * GIB)) == 0


@pytest.mark.parametrize(
    ("environ", "settings", "found"),
    [
        ({}, "", False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "", True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: true"}, "", True),
        ({}, "expandable_segments:True", True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "max_split_size_mb:64", False),
    ],
)
def test_segments_that_expand_are_known(environ: dict[str, str], settings: str, found: bool) -> None:
    assert cuda_memory.expands(environ, settings) is found


def test_the_runtime_is_that_of_pytorchs_version() -> None:
    row = "7f0000-7f1000 r-xp 00000000 08:01 12 "
    one, two = "/site/nvidia/cu13/lib/libcudart.so.13", "/usr/local/cuda/lib64/libcudart.so.12.4.127"
    maps = (
        f"{row}{one}\n{row}{one}\n{row}{two}\n{row}/usr/lib/libc.so.6\n7f0 rw-p 0 00:00 0 \n7f0 rw-p 0 00:00 0 [heap]"
    )
    assert runtime_path(maps, "13") == one and runtime_path(maps, "12") == two
    assert runtime_path(maps, "11") is None, "one of two would be a guess"
    assert runtime_path(f"{row}{two}", "11") == two and runtime_path(f"{row}/libcuda.so.1", "12") is None


# ---- what the allocator does ----


M = 8 * MIB


class Played:
    """A rank on a device of 8 GiB that allocates tensors of 256 MiB and frees them at the boundary."""

    def __init__(self, total: int = 8 * GIB, host: int = 64 * GIB, split_max: int = -1) -> None:
        library = cuda_stand_in.native()
        assert library is not None
        self.runtime, self.told = Runtime(), list[str]()
        self.cuda = PlayedCuda(self.runtime, total, split_max)
        self.spill = SpillMemory(library, self.runtime)
        self.graphs, self.settings = False, ""
        self.memory = CudaMemory(
            self.cuda, self.spill, self._tell, lambda: self.graphs, lambda: self.settings, lambda: host
        )

    def _tell(self, error: LimitNotHeld) -> None:
        self.told.append(str(error))

    def batch(self, count: int = 20, size: int = 32 * M) -> Used:
        taken = [self.cuda.malloc(size) for _ in range(count)]
        for address in taken:
            self.cuda.free(address)
        return self.memory.ended()

    def close(self) -> None:
        self.memory.lift()
        self.cuda.synchronize()
        self.spill.trim()


@pytest.fixture
def played() -> Iterator[Played]:
    if cuda_stand_in.native() is None:
        pytest.skip("there is no C++ compiler")
    made = Played()
    yield made
    made.close()
    assert made.spill.used() == (0, 0) and made.runtime.bytes == 0, "host memory is given back"


def test_under_a_limit_nothing_fails_and_the_device_has_no_more(played: Played) -> None:
    """Reference: §3.1.1: what does not fit is placed in host memory, and counted."""
    assert played.batch().allocated_peak == 640 * M and played.memory.wanted_bytes == 640 * M
    for limit in (512 * M, 384 * M, 192 * M, 64 * M):
        assert played.memory.hold(limit, 0)
        used = played.batch()
        assert played.cuda.device() <= limit and device_memory.device_peak(used) <= limit
        assert device_memory.spilled(used) >= 640 * M - limit and played.cuda.ooms == 0
    played.memory.lift()
    assert device_memory.spilled(played.batch()) == 0 and played.cuda.device() == 640 * M
    assert played.cuda.allowed is None and played.runtime.bytes == 0


def test_the_order_is_pool_then_cache_then_fraction(played: Played) -> None:
    played.batch()
    played.cuda.calls.clear()
    assert played.memory.hold(256 * M, 0)
    assert [call for call, _ in itertools.groupby(played.cuda.calls)] == [
        "fraction",
        "pool",
        "fraction",
        "empty_cache",
        "fraction",
    ]
    assert played.cuda.allowed == 256 * M + played.spill.used()[0]


def test_a_limit_below_what_is_held_is_not_acknowledged_until_it_is_let_go(played: Played) -> None:
    held = [played.cuda.malloc(100 * M) for _ in range(3)]
    played.memory.ended()
    assert not played.memory.hold(200 * M, 0)
    assert played.cuda.allowed == 200 * M + played.spill.used()[0], "nor is more taken meanwhile"
    played.cuda.free(held.pop())
    assert played.memory.hold(200 * M, 0)
    for address in held:
        played.cuda.free(address)


def test_what_is_moved_by_ourselves_needs_no_pool(played: Played) -> None:
    played.batch()
    assert played.memory.hold(256 * M, 384 * M)
    small = played.spill.used()[0]
    played.memory.lift()
    assert played.memory.hold(256 * M, 0)
    assert small <= 128 * M + 8 * SEGMENT < 384 * M <= played.spill.used()[0]


def test_small_tensors_have_their_place_too(played: Played) -> None:
    played.batch()
    assert played.memory.hold(64 * M, 0)
    large = [played.cuda.malloc(32 * M) for _ in range(2)]
    small = [played.cuda.malloc(4096) for _ in range(64)]
    assert played.cuda.ooms == 0 and played.cuda.device() <= 64 * M
    for address in large + small:
        played.cuda.free(address)


def test_a_pool_that_hardly_suffices_is_larger_in_the_next_mini_batch(played: Played) -> None:
    played.batch(4)
    assert played.memory.hold(96 * M, 0)
    before = played.spill.used()[0]
    for count in (5, 6, 7, 8):
        played.batch(count)
    assert played.spill.used()[0] > before and played.cuda.ooms == 0 and played.cuda.device() <= 96 * M


def test_tensors_in_the_pool_outlive_it_and_it_goes_with_them(played: Played) -> None:
    played.batch()
    assert played.memory.hold(64 * M, 0)
    kept = [played.cuda.malloc(32 * M) for _ in range(4)]
    assert played.cuda.host() == 64 * M
    played.memory.lift()
    assert played.cuda.host() == 64 * M and played.spill.used()[0] > 0
    for address in kept:
        played.cuda.free(address)
    played.cuda.synchronize()
    played.cuda.empty_cache()
    played.spill.trim()
    assert played.runtime.bytes == 0


@pytest.mark.parametrize("change", ["graphs", "settings", "backend", "native"])
def test_a_rank_that_cannot_shrink_says_why_and_acknowledges_nothing(played: Played, change: str) -> None:
    played.batch()
    if change == "graphs":
        played.graphs = True
    elif change == "settings":
        played.settings = "expandable_segments:True"
    elif change == "backend":
        played.cuda.backend = "cudaMallocAsync"
    else:
        played.memory._spill = None
    assert not played.memory.ready(256 * M) and played.memory.ready(0)
    words = {"graphs": "graphs", "settings": "expand", "backend": "cudaMallocAsync", "native": "not built"}
    assert words[change] in played.told[0] and played.cuda.allowed is None


def test_while_a_graph_is_recorded_nothing_is_touched(played: Played) -> None:
    played.batch()
    played.cuda.recording = True
    assert not played.memory.ready(256 * M) and not played.memory.ready(0) and played.told == []
    played.cuda.recording = False
    assert played.memory.ready(256 * M)


def test_a_host_without_memory_keeps_the_limit_that_was(played: Played) -> None:
    played.batch()
    assert played.memory.hold(512 * M, 0)
    allowed = played.cuda.allowed
    played.runtime.most = played.runtime.bytes
    assert not played.memory.hold(128 * M, 0)
    assert played.cuda.allowed == allowed and "no memory" in played.told[0] and played.runtime.errors == 0


def test_blocks_that_are_not_split_have_pools_of_smaller_ones() -> None:
    if cuda_stand_in.native() is None:
        pytest.skip("there is no C++ compiler")
    played = Played(split_max=128 * M)
    played.batch()
    assert played.memory.hold(256 * M, 0)
    assert device_memory.spilled(played.batch()) > 0 and played.cuda.ooms == 0
    played.close()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_limits_and_tensors_the_device_has_no_more(played: Played, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([4096, MIB, 3 * MIB, 12 * MIB, 300 * MIB]) for _ in range(30)]
    played.batch(0)
    for address in [played.cuda.malloc(size) for size in sizes]:
        played.cuda.free(address)
    played.memory.ended()
    for _ in range(12):
        limit = rng.randrange(32, 512) * MIB
        assert played.memory.hold(limit, 0)
        taken = [played.cuda.malloc(size) for size in rng.sample(sizes, len(sizes))]
        assert played.cuda.device() <= limit and played.cuda.ooms == 0
        for address in rng.sample(taken, len(taken)):
            played.cuda.free(address)
        played.memory.ended()


def test_a_script_that_asks_for_its_peaks_gets_its_own(played: Played) -> None:
    peaks = ScriptPeaks(played.cuda, lambda device: 0)
    memory = CudaMemory(Peaked(played.cuda, peaks), played.spill, played._tell)
    for count in (10, 4):
        for address in [played.cuda.malloc(32 * M) for _ in range(count)]:
            played.cuda.free(address)
        assert memory.ended().allocated_peak == count * 32 * M, "of this mini-batch"
    assert peaks.seen()["allocated_bytes"]["all"]["peak"] == 320 * M
    peaks.reset()
    assert peaks.seen()["allocated_bytes"]["all"]["peak"] == 0


class Peaked:
    def __init__(self, cuda: PlayedCuda, peaks: ScriptPeaks) -> None:
        self._cuda = cuda
        self.memory_stats_as_nested_dict = peaks.memory_stats_as_nested_dict
        self.reset_peak_memory_stats = peaks.reset_peak_memory_stats

    def __getattr__(self, name: str) -> object:
        return getattr(self._cuda, name)

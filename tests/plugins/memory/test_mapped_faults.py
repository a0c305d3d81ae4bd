"""Faults of real processes whose slabs are mapped (`make rdma` has the same over a device)."""

import random
import signal
from pathlib import Path

import pytest

from plugins.memory.datapath.wire.control import CountPages, FreeSlabFrame, PageCounts, Yes
from tests.covey.live_volume import until
from tests.covey.one_sided_rig import (
    SLAB,
    SLABS,
    OneSidedVolume,
    kill_lender,
    kill_volume,
    rig_works,
    stands_still,
    take_back,
    take_back_and_kill,
)


def shared_bytes(pid: int) -> int:
    """The bytes of memory shared with others that a process has in RAM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem:")) * 1024


def test_pages_are_served_while_the_lenders_process_stands_still() -> None:
    with OneSidedVolume(maps=True) as volume:
        stands_still(volume)


@pytest.mark.long
@pytest.mark.cpu_seconds(0)
def test_kills_of_either_process_and_slabs_taken_back_lose_nothing() -> None:
    rng = random.Random(7)
    harms = [
        kill_volume,
        lambda volume: take_back(volume, rng.randrange(SLABS)),
        kill_lender,
        take_back_and_kill,
        kill_volume,
    ]
    with OneSidedVolume(maps=True) as volume:
        volume.one_sided()
        said = rig_works(volume, lambda volume: harms.pop(0)(volume), len(harms), 0.5)
        volume.one_sided()
    assert said.startswith("well"), said


def test_the_memory_of_a_slab_taken_back_is_free_while_its_borrower_sleeps() -> None:
    with OneSidedVolume(maps=True) as volume:
        volume.one_sided()
        text = f"b'x' * {SLAB}"
        fill = f"m = RemoteMemory.at(PATH)\nm.write(0, {text})\nm.flush()\nprint(m.read(0, {SLAB}) == {text})"
        assert volume.run(fill).strip() == "True"
        vold = volume.processes["vold"]
        before = shared_bytes(vold.pid)
        vold.send_signal(signal.SIGSTOP)
        try:
            assert isinstance(volume.ask("slabd", FreeSlabFrame(1, "h1", "data", 0, 1)), Yes)
            until(lambda: shared_bytes(vold.pid) <= before - SLAB)
        finally:
            vold.send_signal(signal.SIGCONT)
        said = volume.run("m = RemoteMemory.at(PATH)\nm.write(0, b'x' * 4096)\nprint(m.read(0, 4096) == b'x' * 4096)")
        assert said.strip() == "True"
        counts = volume.ask("vold-data", CountPages(1))
        assert isinstance(counts, PageCounts) and counts.mapped_slabs == SLABS - 1

"""Faults of real processes whose pages go over RDMA, in the guest (`make rdma`). Not in the gate, by its name."""

import random
import subprocess
import time

import pytest

from tests.covey.live_volume import until
from tests.covey.one_sided_rig import (
    SLABS,
    OneSidedVolume,
    kill_lender,
    kill_volume,
    rig_works,
    stands_still,
    take_back,
    take_back_and_kill,
)


def test_pages_are_served_while_the_lenders_process_stands_still() -> None:
    with OneSidedVolume() as volume:
        stands_still(volume)


@pytest.mark.cpu_seconds(0)
def test_kills_of_the_volumes_process_lose_nothing() -> None:
    with OneSidedVolume() as volume:
        volume.one_sided()
        said = rig_works(volume, kill_volume, 3)
        volume.one_sided()
    assert said.startswith("well"), said
    print(said)


@pytest.mark.cpu_seconds(0)
def test_kills_of_the_lenders_process_lose_nothing() -> None:
    with OneSidedVolume() as volume:
        said = rig_works(volume, kill_lender, 3)
        volume.one_sided()
    assert said.startswith("well"), said
    print(said)


@pytest.mark.cpu_seconds(0)
def test_slabs_taken_back_in_the_middle_lose_nothing() -> None:
    rng = random.Random(7)
    with OneSidedVolume() as volume:
        said = rig_works(volume, lambda volume: take_back(volume, rng.randrange(SLABS)), 8, 1.0)
        volume.one_sided()
        failed = volume.counts().rdma_failed
    assert said.startswith("well"), said
    print(said, "queue pairs failed:", failed)


@pytest.mark.cpu_seconds(0)
def test_a_volumes_process_killed_while_a_slab_is_taken_back_loses_nothing() -> None:
    with OneSidedVolume() as volume:
        said = rig_works(volume, take_back_and_kill, 3)
        volume.one_sided()
    assert said.startswith("well"), said
    print(said)


@pytest.mark.cpu_seconds(0)
def test_a_network_of_the_device_that_fails_leaves_pages_to_tcp_until_it_is_back() -> None:
    def harm(volume: OneSidedVolume) -> None:
        volume.one_sided()
        subprocess.run(("ip", "link", "set", "va", "down"), check=True)
        until(lambda: volume.counted(lambda counts: counts.rdma_failed >= 1 and counts.rdma_slabs == 0))
        time.sleep(5.0)
        assert volume.counts().rdma_why
        subprocess.run(("ip", "link", "set", "va", "up"), check=True)

    with OneSidedVolume() as volume:
        said = rig_works(volume, harm, 1)
        volume.one_sided(within_s=20.0)
        assert volume.counts().rdma_failed == 1
    assert said.startswith("well"), said
    print(said)

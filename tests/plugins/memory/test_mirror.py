"""Volumes without a disk on a simulated rack: real service, machines and byte programs on virtual time."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from chaos.faults import SIGCONT, SIGSTOP
from chaos.world.world import World
from covey.core.errors import Refused
from covey.ports.env import Env
from plugins.base import Program
from plugins.memory.policy.settings import MemorySettings
from plugins.views import SlabView, VolumeView

from .rack import SETTINGS, MemoryRack, SimClient, kill, pattern
from .test_service import read_all, until_done, write_all

VOLUME = "data"
KINDS = pytest.mark.parametrize("kind", [{"mirror": 2}, {"parity": "2+1"}], ids=["a mirror", "parity"])


@contextmanager
def a_rack(
    hosts: int, seed: int = 1, settings: MemorySettings = SETTINGS, racks: Mapping[str, str] | None = None
) -> Iterator[MemoryRack]:
    with World(seed) as world:
        rack = MemoryRack(world, hosts, settings, racks)
        rack.run(3)
        yield rack


def members(rack: MemoryRack, slab: int = 0) -> list[SlabView]:
    return [view for view in rack.slabs("h1") if view.index == slab]


def lenders(rack: MemoryRack, slab: int = 0) -> list[str]:
    return [str(view.lender) for view in members(rack, slab) if view.lender is not None]


def until_whole(rack: MemoryRack, without: str = "") -> None:
    """Wait until every slab has all of its members, which hold everything, and this host has none."""
    volume = rack.agents["h1"].borrowing.volumes[VOLUME]

    def is_whole() -> bool:
        mapped = all(view.state == "mapped" and view.lender != without for view in rack.slabs("h1"))
        return mapped and volume.formed() == volume.known.slabs

    rack.until(is_whole)


@KINDS
def test_members_lie_on_other_hosts_in_different_racks_and_on_no_disk(kind: dict[str, Any]) -> None:
    racks = {"h1": "a", "h2": "a", "h3": "b", "h4": "c", "h5": "c"}
    with a_rack(5, racks=racks) as rack:
        view = rack.attach("h1", VOLUME, "256 KiB", **kind)
        slabs = len({view.index for view in rack.slabs("h1")})
        assert (view.slabs, view.slabs_mapped, view.slabs_whole, view.parity) == (slabs, slabs, slabs, "parity" in kind)
        assert view.members == (3 if view.parity else 2)
        for slab in range(slabs):
            assert len({racks[lender] for lender in lenders(rack, slab)}) == len(lenders(rack, slab)) == view.members
            assert "h1" not in lenders(rack, slab)
        until_done(rack, rack.client("h1", write_all, VOLUME))
        until_done(rack, rack.client("h1", read_all, VOLUME))
        rack.run(2)
        assert [view.pages_remote for view in rack.slabs("h1")] == [16] * slabs * view.members
        names = list(rack.host("h1").disk.files)
        assert not [name for name in names if "/log" in name]
        assert sum(len(rack.host("h1").disk.files[name].data) for name in names if VOLUME in name) < 4096
        rack.command("h1", "remove", volume=VOLUME)
        rack.run(2)
        assert not any(rack.agents[name].lending.machine.lent for name in rack.agents)


@KINDS
def test_a_dead_lender_costs_no_page_and_its_member_is_rebuilt_elsewhere(kind: dict[str, Any]) -> None:
    with a_rack(5) as rack:
        rack.attach("h1", VOLUME, "128 KiB", **kind)
        until_done(rack, rack.client("h1", write_all, VOLUME))
        lost = lenders(rack)[0]
        rack.host(lost).power_off()
        until_done(rack, rack.client("h1", read_all, VOLUME))
        until_done(rack, rack.client("h1", lambda client: write_all(client, 2), VOLUME))
        rack.declare(lost, "gone")
        until_whole(rack, without=lost)
        rack.host(lenders(rack)[1]).power_off()  # what was rebuilt has everything
        until_done(rack, rack.client("h1", lambda client: read_all(client, 2), VOLUME))


@KINDS
def test_a_killed_volume_process_finds_everything_at_its_members(kind: dict[str, Any]) -> None:
    with a_rack(4) as rack:
        rack.attach("h1", VOLUME, "128 KiB", **kind)
        until_done(rack, rack.client("h1", write_all, VOLUME))
        rack.run(2)
        assert {(view.pages_written, view.pages_remote) for view in rack.slabs("h1")} == {(16, 16)}
        kill([rack.vold("h1", VOLUME)])
        until_done(rack, rack.client("h1", read_all, VOLUME))
        until_whole(rack)
        (volume,) = rack.command("h1", "volumes")
        assert volume.slabs_whole == volume.slabs


@KINDS
def test_a_member_that_its_lender_wants_back_is_brought_elsewhere_first(kind: dict[str, Any]) -> None:
    with a_rack(5) as rack:
        rack.attach("h1", VOLUME, "128 KiB", **kind)
        until_done(rack, rack.client("h1", write_all, VOLUME))
        short = lenders(rack)[0]
        probes = rack.host(short).probes
        probes.filled_bytes = probes.total_bytes - probes.used_bytes
        memory = rack.agents[short].lending.machine
        rack.until(lambda: not memory.lent, 30.0)
        story = [event for event, _ in rack.story("slab/data/0")]
        assert story.index("moving") < story.index("done")
        until_whole(rack)
        until_done(rack, rack.client("h1", read_all, VOLUME))
        assert short not in lenders(rack)


@pytest.mark.parametrize(
    ("kind", "other", "why"),
    [
        ({"mirror": 2}, {"mirror": 1}, "2 lenders for each slab, not 1"),
        ({"parity": "2+1"}, {"parity": "3+1"}, "3 lenders for each slab, not 4"),
        ({"parity": "2+1"}, {"mirror": 2}, "3 lenders for each slab, not 2"),
    ],
)
def test_a_volume_keeps_its_kind(kind: dict[str, Any], other: dict[str, Any], why: str) -> None:
    with a_rack(5) as rack:
        made = rack.attach("h1", VOLUME, "128 KiB", **kind)
        again = rack.attach("h1", VOLUME, "128 KiB")
        assert (again.members, again.parity) == (made.members, made.parity) == (3 if again.parity else 2, again.parity)
        with pytest.raises(Refused, match=why):
            rack.attach("h1", VOLUME, "128 KiB", **other)


def test_a_silent_member_costs_reads_little_and_a_write_no_more_than_its_deadline() -> None:
    with a_rack(4) as rack:
        rack.attach("h1", VOLUME, "64 KiB", mirror=2)
        until_done(rack, rack.client("h1", write_all, VOLUME))
        took: list[float] = []

        async def timed(client: SimClient) -> None:
            for page in range(8):
                began_s = client.env.clock.now_s()
                assert await client.read(page, 1) == pattern(page, 1)
                took.append(client.env.clock.now_s() - began_s)
            began_s = client.env.clock.now_s()
            await client.write(0, pattern(0, 2))
            took.append(client.env.clock.now_s() - began_s)

        for lender in lenders(rack)[:1]:
            rack.slabd(lender).signal(SIGSTOP)
        until_done(rack, rack.client("h1", timed, VOLUME))
        assert max(took[:-1]) < 0.6
        assert took[-1] < 2.5


def assert_lost(rack: MemoryRack, ask: Callable[[SimClient], Coroutine[Any, Any, object]]) -> None:
    """Check that a request fails, and says so; a client that repeats it for ever is ended."""

    async def work(client: SimClient) -> None:
        await ask(client)

    client = rack.client("h1", work, VOLUME)
    rack.until(lambda: client.failed > 0 or client.done)
    assert "both members of slab 0 were lost" in client.why
    kill([client.process])


def test_both_members_lost_at_once_read_as_an_error_and_never_as_zeros() -> None:
    with a_rack(5) as rack:
        rack.attach("h1", VOLUME, "64 KiB", mirror=2)
        until_done(rack, rack.client("h1", write_all, VOLUME))
        for lender in lenders(rack):
            rack.lose_memory(lender)
        assert_lost(rack, lambda client: client.read(3, 1))
        assert_lost(rack, lambda client: client.flush())
        until_whole(rack)
        kill([rack.vold("h1", VOLUME)])  # what is lost stays lost
        rack.run(5)
        assert_lost(rack, lambda client: client.read(3, 1))
        assert_lost(rack, lambda client: client.flush())
        assert "both members" in rack.command("h1", "volumes")[0].trouble
        until_done(rack, rack.client("h1", lambda client: write_all(client, 2), VOLUME))
        until_done(rack, rack.client("h1", lambda client: read_all(client, 2), VOLUME))

        async def flush(client: SimClient) -> None:
            await client.flush()

        until_done(rack, rack.client("h1", flush, VOLUME))


def test_without_a_second_lender_attaching_is_refused_and_nothing_stays_lent() -> None:
    with a_rack(2) as rack:
        with pytest.raises(Refused, match=r"volume data: it needs 4 slabs at lenders.*, and only 2 were") as refused:
            rack.attach("h1", VOLUME, "128 KiB", mirror=2)
        assert refused.value.code == 4
        assert rack.command("h1", "volumes") == []
        rack.run(2)
        assert not rack.agents["h2"].lending.machine.lent
    with a_rack(1) as rack, pytest.raises(Refused, match=r"--mirror 3"):
        rack.attach("h1", VOLUME, "128 KiB", mirror=3)


def slow(program: Program, start_s: float) -> Program:
    async def run(env: Env, config: Any) -> None:
        await asyncio.sleep(start_s)
        await program.run(env, config)

    return replace(program, run=run)


def test_lenders_that_are_silent_have_not_said_that_they_have_no_room() -> None:
    """Hosts are asked again and again, longer and longer apart: between two times nobody has declined."""
    with a_rack(3) as rack:
        rack.attach("h1", "first", "64 KiB", mirror=2)
        for lender in ("h2", "h3"):
            rack.slabd(lender).signal(SIGSTOP)
        assert_not_yet(rack)
        assert_not_yet(rack)
        for lender in ("h2", "h3"):
            rack.slabd(lender).signal(SIGCONT)
        assert until_attached(rack).slabs_whole == 4


def until_attached(rack: MemoryRack) -> VolumeView:
    for _ in range(3):
        with suppress(NotYet):
            return try_attach(rack)
    raise AssertionError("it is not attached")


class NotYet(Exception):
    """A read that failed for now and is to be asked for again."""


def try_attach(rack: MemoryRack) -> VolumeView:
    began_s = rack.world.now
    try:
        return rack.attach("h1", VOLUME, "256 KiB", mirror=2)
    except Refused as refused:
        assert refused.code == 1, f"not 'no room' but 'not yet': {refused}"
        assert "not ready" in str(refused)
        assert rack.world.now - began_s < 18, "a command has an answer in 20 s"
        raise NotYet from None


def assert_not_yet(rack: MemoryRack) -> None:
    with pytest.raises(NotYet):
        try_attach(rack)

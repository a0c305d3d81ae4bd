"""Whole stories of remote memory on a simulated rack: agents, byte programs, networks and disks, on virtual time."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from chaos.world.world import World
from covey.core.errors import Refused
from covey.wire import headers
from plugins.facts import MemoryPromised
from plugins.gossiped import Spare
from plugins.memory.datapath.links.remote_slab import RemoteSlab
from plugins.memory.datapath.volumes.lenders import Lenders
from plugins.memory.datapath.volumes.slab import SlabMemory
from plugins.memory.policy.settings import SEAL_BYTES, MemorySettings
from plugins.memory.service import metrics
from plugins.memory.service.views import byte_path_told
from tests.plugins.memory.rack import PAGE, SETTINGS, SLAB_PAGES, MemoryRack, SimClient, pattern


@contextmanager
def a_rack(hosts: int, seed: int = 1, settings: MemorySettings = SETTINGS) -> Iterator[MemoryRack]:
    with World(seed) as world:
        rack = MemoryRack(world, hosts, settings)
        rack.run(3)
        yield rack


async def write_all(client: SimClient, version: int = 1) -> None:
    for page in range(client.size_bytes // PAGE):
        await client.write(page, pattern(page, version))


async def read_all(client: SimClient, version: int = 1) -> None:
    for page in range(client.size_bytes // PAGE):
        assert await client.read(page, 1) == pattern(page, version), f"page {page}"


def until_done(rack: MemoryRack, client: SimClient, within_s: float = 120.0) -> None:
    rack.until(lambda: client.done or not client.process.alive, within_s)
    assert client.done, client.error


def keep_hot(rack: MemoryRack, host: str, volume: str, slabs: int) -> None:
    """Write until every slab has a place."""

    async def work(client: SimClient) -> None:
        while len(rack.mapped(host, volume)) < slabs:
            await write_all(client)
            await client.env.bytes.connect(f"unix:{client.path}")

    until_done(rack, rack.client(host, work, volume))


def test_a_hot_volume_is_placed_on_other_hosts_and_read_back_byte_equal() -> None:
    with a_rack(4) as rack:
        rack.attach("h1", "data", "256 KiB")
        keep_hot(rack, "h1", "data", slabs=4)
        until_done(rack, rack.client("h1", write_all, "data"))
        until_done(rack, rack.client("h1", read_all, "data"))
        rack.run(3)
        lenders = {rack.lender("h1", "data", index) for index in range(4)}
        assert lenders == {"h2", "h3", "h4"}
        assert all(slab.pages_remote == slab.pages_written == SLAB_PAGES for slab in rack.slabs("h1"))
        volume = rack.command("h1", "volumes")[0]
        assert volume.remote_read_bytes > 0
        assert volume.slabs_mapped == 4


def test_a_restarted_agent_finds_its_volume_process_and_its_slabs_again() -> None:
    with a_rack(3) as rack:
        rack.attach("h1", "data", "128 KiB")
        keep_hot(rack, "h1", "data", slabs=2)
        before = rack.vold("h1", "data").id, [rack.lender("h1", "data", index) for index in range(2)]
        for host in ("h1", "h2"):
            rack.processes[host].signal(9)
        until_done(rack, rack.client("h1", write_all, "data"))  # nobody needs an agent for that
        for host in ("h1", "h2"):
            rack.host(host).start_agent()
        rack.until(
            lambda: rack.mapped("h1", "data") == [0, 1] if "data" in rack.agents["h1"].borrowing.volumes else False
        )
        assert (rack.vold("h1", "data").id, [rack.lender("h1", "data", index) for index in range(2)]) == before
        rack.run(30)  # longer than a lease: they are renewed
        assert rack.mapped("h1", "data") == [0, 1]
        assert sum(len(rack.agents[host].lending.machine.lent) for host in ("h2", "h3")) == 2
        until_done(rack, rack.client("h1", read_all, "data"))


def test_detaching_forgets_the_volume_here_and_at_its_lenders() -> None:
    with a_rack(3) as rack:
        rack.attach("h1", "data", "128 KiB")
        keep_hot(rack, "h1", "data", slabs=2)
        rack.command("h1", "remove", volume="data")
        rack.run(5)
        assert rack.host("h1").find("vold-data") == []
        assert [name for name in rack.host("h1").disk.files if "volumes" in name] == []
        assert sum(len(rack.agents[host].lending.machine.lent) for host in ("h2", "h3")) == 0
        rack.attach("h1", "data", "128 KiB")

        async def empty(client: SimClient) -> None:
            assert await client.read(0, 32) == bytes(32 * PAGE)

        until_done(rack, rack.client("h1", empty, "data"))


def test_a_killed_slab_process_is_started_again_and_lends_again() -> None:
    with a_rack(2) as rack:
        rack.attach("h1", "data", "64 KiB")
        keep_hot(rack, "h1", "data", slabs=1)
        until_done(rack, rack.client("h1", write_all, "data"))
        rack.slabd("h2").signal(9)
        until_done(rack, rack.client("h1", read_all, "data"))
        keep_hot(rack, "h1", "data", slabs=1)
        rack.until(lambda: len(rack.agents["h2"].lending.machine.lent) == 1, 10.0)


def test_what_jobs_may_take_of_a_host_is_not_lent_and_its_offer_says_so() -> None:
    with a_rack(3) as rack:

        def slabs_free(host: str) -> int:
            spare = rack.view(host).value("spare", Spare)
            assert isinstance(spare, Spare)
            return spare.slabs_free

        rack.run(3.0)
        assert slabs_free("h2") > 0
        total = rack.agents["h2"].env.probes.memory().total_bytes
        rack.agents["h2"].on_fact(MemoryPromised(total))
        rack.run(3.0)
        assert slabs_free("h2") == 0
        rack.attach("h1", "data", "128 KiB")
        keep_hot(rack, "h1", "data", slabs=2)
        until_done(rack, rack.client("h1", write_all, "data"))
        rack.until(lambda: len(rack.agents["h3"].lending.machine.lent) == 2)
        assert not rack.agents["h2"].lending.machine.lent
        rack.agents["h2"].on_fact(MemoryPromised(0))
        rack.run(3.0)
        assert slabs_free("h2") > 0


def test_nothing_is_lent_with_lend_0_and_no_slab_process_runs() -> None:
    with a_rack(2, settings=MemorySettings(lend="0 B", slab="64 KiB")) as rack:
        assert rack.host("h1").find("slabd") == []
        spare = rack.view("h1").value("spare", Spare)
        assert spare == Spare(slab_bytes=16 * (4096 + SEAL_BYTES), slabs_free=0, slabs_lent=0)
        rack.attach("h1", "data", "64 KiB")
        until_done(rack, rack.client("h1", write_all, "data"))
        until_done(rack, rack.client("h1", read_all, "data"))
        assert rack.mapped("h1", "data") == []


def test_a_volumes_why_says_once_a_minute_that_another_version_was_refused() -> None:
    with a_rack(2) as rack:
        rack.attach("h1", "data", "64 KiB")

        async def older(client: SimClient) -> None:
            for _ in range(4):
                stream = await client.env.bytes.connect(f"unix:{client.path}")
                await stream.write(b"coveyvl0" + client.token)
                await stream.read_into(memoryview(bytearray(headers.WELCOME_BYTES)))
                await asyncio.sleep(25.0)  # at 0, 25, 50 and 75 s

        until_done(rack, rack.client("h1", older, "data"))
        told = [reason for event, reason in rack.story("volume/data") if event == "client refused"]
        assert len(told) == 2
        assert told[0].endswith("install the covey-job of this agent where it runs")


def test_volumes_are_refused_with_a_reason_and_a_next_step() -> None:
    with a_rack(2) as rack:
        rack.attach("h1", "data", "64 KiB")
        for arguments, code in (
            ({"volume": "Bad/Name", "size": 4096}, 2),
            ({"volume": "data", "size": "64 parsecs"}, 2),
            ({"volume": "other", "size": 0}, 2),
            ({"volume": "other", "size": 1 << 60}, 2),
            ({"volume": "data", "size": "128 KiB"}, 4),
        ):
            with pytest.raises(Refused) as refused:
                rack.command("h1", "create", **arguments)
            assert refused.value.code == code
            assert refused.value.next


def test_slabs_of_all_hosts_are_listed_by_any_of_them() -> None:
    with a_rack(3) as rack:
        rack.attach("h1", "one", "64 KiB")
        rack.attach("h2", "two", "64 KiB")
        assert [slab.volume for slab in rack.command("h1", "slabs")] == ["one"]
        listed = rack.command("h1", "slabs", all=True)
        assert [(slab.borrower, slab.volume) for slab in listed] == [("h1", "one"), ("h2", "two")]


# ---- lenders that do not answer --------------------------------------------------------------------------------------


def killed_with_stopped_lenders(rack: MemoryRack) -> None:
    """Version 2 of every page is at the lenders alone; the volume's process is killed, the lenders are stopped."""
    rack.attach("h1", "data", "128 KiB")
    keep_hot(rack, "h1", "data", slabs=2)
    until_done(rack, rack.client("h1", write_all, "data"))
    rack.run(3)
    rack.host("h1").disk.slow = 5000.0

    async def write(client: SimClient) -> None:
        await write_all(client, 2)
        rack.vold("h1", "data").signal(9)
        for writer in rack.host("h1").find("spill-data"):
            writer.signal(9)
        for host in ("h2", "h3"):
            rack.slabd(host).signal(19)

    until_done(rack, rack.client("h1", write, "data"))
    rack.host("h1").disk.slow = 1.0


async def read_new(client: SimClient) -> None:
    await read_all(client, 2)


def test_acknowledged_pages_are_waited_for_while_their_lenders_are_stopped() -> None:
    with a_rack(3) as rack:
        killed_with_stopped_lenders(rack)
        reader = rack.client("h1", read_new, "data")
        rack.run(18)
        assert not reader.done
        assert {slab.state for slab in rack.slabs("h1")} == {"recovering"}
        (volume,) = rack.command("h1", "volumes")
        assert {wait.lender for wait in volume.waits_for} == {"h2", "h3"}
        assert volume.slabs_mapped == 0
        rack.run(20)
        assert reader.failed > 0, "30 s after the start of its process"
        assert "may hold newer pages" in reader.why
        for host in ("h2", "h3"):
            rack.slabd(host).signal(18)
        until_done(rack, reader)
        rack.run(2)
        assert rack.command("h1", "volumes")[0].waits_for == ()
        assert rack.agents["h1"].metrics()[metrics.SLABS_UNRECOVERED.of()] == 0


def test_a_lender_that_is_only_gossiped_gone_is_waited_for() -> None:
    """A lender that is cut off from us still has the pages."""
    with a_rack(3) as rack:
        killed_with_stopped_lenders(rack)
        reader = rack.client("h1", read_new, "data")
        for host in ("h2", "h3"):
            rack.declare(host, "gone")
        rack.run(25)
        assert not reader.done and reader.process.alive
        for host in ("h2", "h3"):
            rack.slabd(host).signal(18)
            rack.states[host] = "alive"
        until_done(rack, reader)


def test_a_lender_whose_slab_process_began_anew_has_lost_it_for_certain() -> None:
    with a_rack(3) as rack:
        killed_with_stopped_lenders(rack)
        for host in ("h2", "h3"):
            rack.lose_memory(host)
        rack.until(lambda: {slab.state for slab in rack.slabs("h1")} == {"cold"}, 25.0)
        rack.run(2)
        assert rack.agents["h1"].metrics()[metrics.SLABS_UNRECOVERED.of()] == 2
        lost = [reason for event, reason in rack.story("slab/data/0") if event == "lost"]
        assert any("may read older" in reason for reason in lost)


def test_a_person_gives_up_lenders_that_will_not_come_back() -> None:
    with a_rack(3) as rack:
        killed_with_stopped_lenders(rack)
        rack.until(lambda: {slab.state for slab in rack.slabs("h1")} == {"recovering"}, 20.0)
        assert rack.command("h1", "give_up", volume="data") == {
            "volume": "data",
            "slabs": [0, 1],
            "lenders": sorted({rack.lender("h1", "data", index) for index in (0, 1)}),
            "members": 1,
        }
        older: list[bool] = []

        async def read(client: SimClient) -> None:
            for page in range(32):
                older.append(await client.read(page, 1) == pattern(page, 1))

        until_done(rack, rack.client("h1", read, "data"), 5.0)
        assert any(older), "the disk's word"
        assert "given up" in [event for event, _ in rack.story("volume/data")]
        assert rack.command("h1", "give_up", volume="data")["slabs"] == []
        with pytest.raises(Refused, match="no volume other"):
            rack.command("h1", "give_up", volume="other")


# ---- links that end --------------------------------------------------------------------------------------------------


# ---- a disk that takes nothing ---------------------------------------------------------------------------------------


def refuse_writes(rack: MemoryRack, host: str, how: str) -> None:
    disk = rack.host(host).disk
    disk.filled_bytes = disk.capacity_bytes if how == "full" else 0
    disk.read_only = how == "read-only"


def test_a_volume_outlives_the_loss_of_its_lenders_on_a_disk_that_takes_nothing() -> None:
    with a_rack(3) as rack:
        rack.attach("h1", "data", "128 KiB")
        keep_hot(rack, "h1", "data", slabs=2)
        until_done(rack, rack.client("h1", write_all, "data"))
        rack.run(5)
        process = rack.vold("h1", "data").id
        refuse_writes(rack, "h1", "read-only")

        async def rewrite(client: SimClient) -> None:
            await write_all(client, 2)  # acknowledged by the lenders: the queue holds what the disk does not take

        until_done(rack, rack.client("h1", rewrite, "data"))
        for host in ("h2", "h3"):
            rack.slabd(host).signal(9)
        rack.run(20)
        assert rack.vold("h1", "data").id == process
        until_done(rack, rack.client("h1", read_new, "data"))
        (volume,) = rack.command("h1", "volumes")
        assert "pages wait for the disk" in volume.trouble
        assert "disk refuses" in [event for event, _ in rack.story("volume/data")]
        refuse_writes(rack, "h1", "no more")
        rack.run(10)
        assert rack.command("h1", "volumes")[0].trouble == ""
        assert {slab.state for slab in rack.slabs("h1")} <= {"cold", "asking", "mapped"}, "and they are closed then"
        until_done(rack, rack.client("h1", read_new, "data"))


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_volume_starts_on_a_disk_that_takes_nothing_and_serves_what_it_can(how: str) -> None:
    with a_rack(3) as rack:
        rack.attach("h1", "data", "128 KiB")
        keep_hot(rack, "h1", "data", slabs=2)
        until_done(rack, rack.client("h1", write_all, "data"))
        refuse_writes(rack, "h1", how)

        async def rewrite(client: SimClient) -> None:
            for page in range(16):
                await client.write(page, pattern(page, 2))

        until_done(rack, rack.client("h1", rewrite, "data"))
        rack.vold("h1", "data").signal(9)

        async def read(client: SimClient) -> None:
            for page in range(32):
                assert await client.read(page, 1) == pattern(page, 2 if page < 16 else 1), f"page {page}"

        until_done(rack, rack.client("h1", read, "data"))
        writer = rack.client("h1", rewrite, "data")
        rack.run(5)
        assert not writer.done and writer.process.alive
        assert "volume data is read-only: its files cannot be written" in writer.why
        (volume,) = rack.command("h1", "volumes")
        assert volume.process_alive and volume.trouble.startswith("read-only")
        assert rack.agents["h1"].borrowing.metrics()[metrics.VOLUMES_IN_TROUBLE.of()] == 1
        rack.slabd("h2").signal(9)
        rack.slabd("h3").signal(9)
        rack.run(10)
        until_done(rack, rack.client("h1", read, "data"))
        refuse_writes(rack, "h1", "no more")
        until_done(rack, writer)
        until_done(rack, rack.client("h1", read, "data"))


def test_the_trouble_of_one_slab_is_no_other_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever error a task of the slab raises, the process goes on, and the slab is tried again."""
    with a_rack(3) as rack:
        rack.attach("h1", "data", "128 KiB")
        keep_hot(rack, "h1", "data", slabs=2)
        until_done(rack, rack.client("h1", write_all, "data"))
        rack.run(5)
        bring_home, failed = Lenders._copy_back, list[int]()

        async def falls_over(lenders: Lenders, slab: SlabMemory, link: RemoteSlab) -> None:
            if slab.index == 0 and len(failed) < 3:
                failed.append(slab.index)
                link.fail("a bug")
                raise KeyError("a bug in one slab's task")
            await bring_home(lenders, slab, link)

        monkeypatch.setattr(Lenders, "_copy_back", falls_over)
        rack.vold("h1", "data").signal(9)
        until_done(rack, rack.client("h1", read_all, "data"))
        assert failed == [0, 0, 0]
        assert rack.agents["h1"].borrowing.volumes["data"].process.starts == 2, "started again once, after the kill"


@pytest.mark.parametrize(
    ("rdma", "said"),
    [
        ("auto", "over TCP; no RDMA: this process was given no RDMA"),
        ("off", "over TCP; RDMA is switched off ([memory] rdma)"),
    ],
)
def test_the_agent_says_which_way_pages_go(rdma: str, said: str) -> None:
    with a_rack(1, settings=msgspec.structs.replace(SETTINGS, rdma=rdma)) as rack:
        assert rack.agents["h1"].status()["pages"] == said


SLOW = "interpreted: it was never compiled for this installation; next: python -m agent.compiled"


@pytest.mark.parametrize(
    ("expected", "running", "said"),
    [
        ("", [("vold", "")], ""),
        ("compiled", [], "compiled"),
        ("compiled", [("slabd", "compiled"), ("vold", "compiled"), ("vold", "")], "compiled"),
        (SLOW, [("slabd", SLOW)], SLOW),
        ("compiled", [("slabd", "compiled"), ("vold", SLOW), ("vold", SLOW)], f"vold: {SLOW}"),
        ("compiled", [("vold", SLOW), ("slabd", SLOW)], f"slabd, vold: {SLOW}"),
    ],
)
def test_a_program_that_runs_otherwise_than_the_next_ones_will_is_named(
    expected: str, running: list[tuple[str, str]], said: str
) -> None:
    assert byte_path_told(expected, running) == said


def test_the_agent_hears_from_its_programs_how_they_run_the_byte_path() -> None:
    with a_rack(2) as rack:
        borrower, lender = rack.agents["h1"], rack.agents["h2"]
        assert "byte path" not in borrower.status(), "nothing is known of it here"
        for host in rack.world.hosts.values():
            host.byte_path = SLOW
        rack.attach("h1", "data", "64 KiB")
        keep_hot(rack, "h1", "data", slabs=1)
        rack.until(lambda: lender.status().get("byte path") == f"slabd: {SLOW}")
        assert borrower.status()["byte path"] == f"vold: {SLOW}"

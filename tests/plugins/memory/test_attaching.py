"""What a process is told that attaches a volume: about an earlier volume that its host forgot, about a volume's process
that dies, how long it takes, and how many volumes there may be. Services and byte programs are the real ones, on
virtual time."""

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec
import pytest

from chaos.world.world import World
from covey.core.errors import Refused
from covey.core.ids import JobId
from covey.wire.job import Refusal, VolumeAt, VolumeComing, VolumeWanted
from plugins.base import JobPeer
from plugins.memory.policy.settings import MemorySettings
from plugins.memory.service.record import COPY, FILE, owner_file
from tests.plugins.memory.rack import SETTINGS, MemoryRack, SimClient
from tests.plugins.memory.test_service import read_all, until_done, write_all


@contextmanager
def a_rack(hosts: int, settings: MemorySettings = SETTINGS) -> Iterator[MemoryRack]:
    with World(1) as world:
        rack = MemoryRack(world, hosts, settings)
        rack.run(3)
        yield rack


def with_pages(rack: MemoryRack) -> None:
    """Attach a volume of h1 whose two slabs lie at h2 and h3, written and flushed."""
    rack.attach("h1", "data", "128 KiB")
    kept_hot(rack, 2)
    rack.run(3)


def kept_hot(rack: MemoryRack, slabs: int) -> None:
    """Write to the volume now and then until every slab has a place, and flush it."""

    async def work(client: SimClient) -> None:
        while len(rack.mapped("h1", "data")) < slabs:
            await write_all(client)
            await asyncio.sleep(0.4)
        await write_all(client)
        await client.flush()

    until_done(rack, rack.client("h1", work, "data"))


def loses_its_disk(rack: MemoryRack, host: str) -> None:
    """Kill this host; it comes back with an empty disk, under a later boot."""
    rack.host(host).power_off()
    rack.host(host).disk.files.clear()
    rack.run(1)
    rack.host(host).power_on()
    rack.run(2)


@dataclass
class Process:
    """The process of a script, with its connection to jobs.sock."""

    of_job: JobId | None = None
    uid: int = 1000
    gone: bool = False
    said: list[Any] = field(default_factory=list)

    def send(self, frame: Any) -> None:
        self.said.append(frame)


def asks(rack: MemoryRack, host: str, process: Process, frame: VolumeWanted) -> None:
    """Send a request without waiting for the answer."""
    service = rack.agents[host]
    rack.processes[host].spawn("frame", service.frame(cast(JobPeer, process), frame))


# ---- a volume that its host has forgotten ----------------------------------------------------------------------------


def test_a_volume_whose_host_lost_its_disk_is_not_made_anew_until_a_person_says_so() -> None:
    with a_rack(3) as rack:
        with_pages(rack)
        loses_its_disk(rack, "h1")
        with pytest.raises(Refused, match="volume data is not created again, empty") as refused:
            rack.attach("h1", "data", "128 KiB")
        assert refused.value.code == 4
        assert "h1 had a volume of this name and has lost its record; 2 slabs of it are at h2, h3" in refused.value.why
        assert "agentctl volume give-up data, or create=True" in refused.value.next
        assert rack.command("h1", "volumes") == []
        rack.attach("h1", "other", "128 KiB")  # which nobody knows of
        assert rack.command("h1", "give_up", volume="data")["lenders"] == ["h2", "h3"]
        assert rack.attach("h1", "data", "128 KiB").written_bytes == 0
        assert "given up" in [event for event, _ in rack.story("volume/data")]
        rack.run(3)
        assert sum(len(rack.agents[host].lending.machine.lent) for host in ("h2", "h3")) == 0


def without_its_record(rack: MemoryRack, *also: str) -> None:
    """Attach the volume `data` of user 1000 on h1, and let its agent forget it; put these files beside it."""
    rack.command("h1", "create", volume="data", size="128 KiB", uid=1000)
    kept_hot(rack, 2)
    rack.run(3)
    host = rack.host("h1")
    host.power_off()
    for file in (FILE, COPY, *also):
        host.disk.damage(file, "lost")
    host.power_on()
    rack.run(2)
    assert rack.command("h1", "volumes") == []


def said_to(rack: MemoryRack, uid: int) -> Any:
    process = Process(uid=uid)
    rack.do("h1", partial(rack.agents["h1"].frame, cast(JobPeer, process), VolumeWanted("data", 128 << 10)))
    return process.said[-1]


def test_a_volume_whose_own_files_are_there_goes_on_without_its_record() -> None:
    with a_rack(3) as rack:
        without_its_record(rack)
        refusal = said_to(rack, 1001)
        assert isinstance(refusal, Refusal) and "it belongs to another user (uid 1000)" in refusal.why
        assert isinstance(said_to(rack, 1000), VolumeAt)
        until_done(rack, rack.client("h1", read_all, "data"))
        assert isinstance(said_to(rack, 1001), Refusal)


def test_nobody_but_root_says_whose_a_volume_is_whose_files_do_not_say_it() -> None:
    with a_rack(3) as rack:
        without_its_record(rack, owner_file("data"))
        refusal = said_to(rack, 1000)
        assert isinstance(refusal, Refusal) and "its owner is not known" in refusal.why
        with pytest.raises(Refused, match="its owner is not known"):
            rack.attach("h1", "data", "128 KiB")
        rack.command("h1", "create", volume="data", size="128 KiB", uid=1000)
        until_done(rack, rack.client("h1", read_all, "data"))
        assert isinstance(said_to(rack, 1001), Refusal) and isinstance(said_to(rack, 1000), VolumeAt)


@pytest.mark.parametrize("how", ["its lease is over", "its lender began anew", "the slab process died"])
def test_its_lenders_remember_it_when_its_slabs_are_gone(how: str) -> None:
    with a_rack(3) as rack:
        with_pages(rack)
        loses_its_disk(rack, "h1")
        if how == "the slab process died":
            for host in ("h2", "h3"):
                rack.lose_memory(host)
            rack.run(5)
        rack.run(25)
        if how == "its lender began anew":
            for host in ("h2", "h3"):
                rack.host(host).power_off()
                rack.host(host).power_on()
            rack.run(3)
        assert not any(rack.agents[host].lending.machine.lent for host in ("h2", "h3"))
        with pytest.raises(Refused, match="2 slabs of it were, until their lease ran out, at h2, h3") as refused:
            rack.attach("h1", "data", "128 KiB")
        assert refused.value.code == 4
        process = Process()
        rack.do(
            "h1", partial(rack.agents["h1"].frame, cast(JobPeer, process), VolumeWanted("data", 128 << 10, make="anew"))
        )
        assert [type(frame) for frame in process.said] == [VolumeAt]
        rack.command("h1", "remove", volume="data")
        rack.attach("h1", "data", "128 KiB")  # the word was said once and for all


def test_a_volume_that_was_detached_is_made_again_before_its_lenders_heard() -> None:
    with a_rack(3) as rack:
        with_pages(rack)
        rack.world.network.cut([("h1", "h2"), ("h1", "h3")])
        rack.command("h1", "remove", volume="data")
        rack.processes["h1"].signal(9)
        rack.world.network.heal()
        rack.host("h1").start_agent()
        rack.run(3)
        assert any(rack.agents[host].lending.machine.lent for host in ("h2", "h3")), "which nobody told"
        rack.attach("h1", "data", "128 KiB")


def test_a_host_that_is_alive_and_does_not_say_what_it_holds_is_named() -> None:
    with a_rack(3) as rack:
        with_pages(rack)
        loses_its_disk(rack, "h1")
        rack.world.network.cut([("h1", "h2"), ("h1", "h3")])
        process = Process()
        asks(rack, "h1", process, VolumeWanted("data", 128 << 10))
        rack.until(lambda: bool(process.said) and isinstance(process.said[-1], Refusal), 30.0)
        assert process.said[0] == VolumeComing(
            "data", "h2, h3 has not said yet whether it holds pages of an earlier volume of this name"
        )
        refusal = process.said[-1]
        assert "h2, h3, which may hold pages, did not say within 10 s" in refusal.why
        assert "create=True" in refusal.next
        for host in ("h2", "h3"):
            rack.declare(host, "gone")
        rack.attach("h1", "data", "128 KiB")  # a host that is gone is not waited for


def test_one_that_must_exist_is_not_made() -> None:
    with a_rack(1) as rack:
        process = Process()
        frame = VolumeWanted("data", 128 << 10, make="never")
        rack.do("h1", partial(rack.agents["h1"].frame, cast(JobPeer, process), frame))
        (refusal,) = process.said
        assert (refusal.what, refusal.why) == (
            "no volume data", "h1 has none of that name: it was removed, or is on another host",
        )  # fmt: skip
        rack.attach("h1", "data", "128 KiB")
        rack.do("h1", partial(rack.agents["h1"].frame, cast(JobPeer, process), frame))
        assert isinstance(process.said[-1], VolumeAt)


# ---- its process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["vold", "spill"])
def test_what_its_process_died_of_is_told_to_whoever_opens_it(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_rack(1) as rack:
        rack.attach("h1", "data", "128 KiB")
        until_done(rack, rack.client("h1", write_all, "data"))

        async def dies(*_: object) -> None:
            raise OSError("the list of segments is damaged: 300 bytes behind its end")

        programs = rack.programs()
        programs = {**programs, program: dataclasses.replace(programs[program], run=dies)}
        monkeypatch.setattr(rack.world, "programs", lambda: programs)
        for each in (*rack.host("h1").find("spill-data"), rack.vold("h1", "data")):
            each.signal(9)
        process = Process()
        rack.run(0.5)
        asks(rack, "h1", process, VolumeWanted("data", 128 << 10))
        rack.until(lambda: bool(process.said) and isinstance(process.said[-1], Refusal), 40.0)
        refusal = process.said[-1]
        assert refusal.what == "volume data is not ready"
        assert "the list of segments is damaged: 300 bytes behind its end" in refusal.why
        assert "agentctl volume rm data" in refusal.next
        with pytest.raises(Refused, match="the list of segments is damaged"):
            rack.attach("h1", "data", "128 KiB")
        (view,) = rack.command("h1", "volumes")
        assert "the list of segments is damaged" in view.trouble
        rack.run(60)
        told = [why for event, why in rack.story("volume/data") if event == "process gone"]
        assert len([why for why in told if "damaged" in why]) <= 3, "and not for each start"
        monkeypatch.undo()
        rack.world.programs = rack.programs
        rack.until(lambda: rack.agents["h1"].borrowing.volume_views()[0].process_alive, 60.0)
        assert rack.command("h1", "volumes")[0].trouble == ""
        until_done(rack, rack.client("h1", read_all, "data"))


def test_a_slab_process_that_dies_tells_its_borrowers_why() -> None:
    with a_rack(2) as rack:
        rack.attach("h1", "data", "64 KiB")
        kept_hot(rack, 1)
        rack.host("h2").last_words["slabd"] = "its memory was taken"
        rack.lose_memory("h2")
        rack.until(lambda: "its memory was taken" in rack.agents["h2"].lending.machine._away, 5.0)


# ---- the time it takes -----------------------------------------------------------------------------------------------


def test_who_opens_a_volume_waits_for_as_long_as_its_process_starts_and_hears_so() -> None:
    with a_rack(1) as rack:
        rack.host("h1").load_s = 45.0
        process = Process()
        asks(rack, "h1", process, VolumeWanted("data", 128 << 10))
        rack.run(40)
        assert {type(frame) for frame in process.said} == {VolumeComing}
        assert process.said[-1] == VolumeComing("data", "its process is still starting")
        assert len(process.said) > 20
        rack.until(lambda: isinstance(process.said[-1], VolumeAt), 90.0)


def test_a_person_is_answered_within_the_time_of_a_command() -> None:
    with a_rack(1) as rack:
        rack.host("h1").load_s = 45.0
        began_s = rack.world.now
        with pytest.raises(Refused, match="its process is still starting, after 10 s"):
            rack.attach("h1", "data", "128 KiB")
        assert rack.world.now < began_s + 20.0


def test_nobody_is_waited_for_who_hung_up() -> None:
    with a_rack(1) as rack:
        rack.host("h1").load_s = 45.0
        process = Process()
        asks(rack, "h1", process, VolumeWanted("data", 128 << 10))
        rack.run(5)
        process.gone, heard = True, len(process.said)
        rack.run(5)
        assert len(process.said) <= heard + 1
        assert isinstance(process.said[-1], Refusal)


def test_a_volume_without_a_disk_is_waited_for_while_its_places_are_found() -> None:
    with a_rack(3) as rack:
        for host in ("h2", "h3"):
            rack.host(host).load_s = 30.0
        process = Process()
        asks(rack, "h1", process, VolumeWanted("data", 256 << 10, mirror=2))
        rack.run(25)
        assert process.said[-1] == VolumeComing("data", "0 of 4 slabs have two hosts so far")
        rack.until(lambda: isinstance(process.said[-1], VolumeAt), 60.0)


# ---- how many --------------------------------------------------------------------------------------------------------


def test_a_job_that_names_a_volume_by_its_step_is_refused_in_words() -> None:
    settings = msgspec.structs.replace(SETTINGS, volumes_per_job_max=3, volumes_max=5)
    with a_rack(1, settings) as rack:
        process = Process(JobId("j1"))
        for step in range(5):
            frame = VolumeWanted(f"step-{step}", 64 << 10)
            rack.do("h1", partial(rack.agents["h1"].frame, cast(JobPeer, process), frame))
        assert [type(frame) for frame in process.said] == [VolumeAt] * 3 + [Refusal] * 2
        assert process.said[-1].why == (
            "job j1 has 3 volumes on this host, and may have 3 (volumes_per_job_max in [memory])"
        )
        assert "one volume for many steps" in process.said[-1].next
        rack.do("h1", partial(rack.agents["h1"].frame, cast(JobPeer, process), VolumeWanted("step-0", 64 << 10)))
        assert isinstance(process.said[-1], VolumeAt), "one that is there is opened"
        other = Process(JobId("j2"))
        rack.do("h1", partial(rack.agents["h1"].frame, cast(JobPeer, other), VolumeWanted("of-another", 64 << 10)))
        assert isinstance(other.said[-1], VolumeAt)
        rack.attach("h1", "persons", "64 KiB")
        with pytest.raises(Refused, match="cannot open volume sixth") as refused:
            rack.attach("h1", "sixth", "64 KiB")
        assert refused.value.why == "this host has 5 volumes, and may have 5 (volumes_max in [memory])"
        rack.command("h1", "remove", volume="step-1")
        rack.attach("h1", "sixth", "64 KiB")


@pytest.mark.parametrize("key", ["volumes_max", "volumes_per_job_max"])
def test_a_limit_of_volumes_is_a_number_that_makes_sense(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} = 0: expected 1 to 4096"):
        msgspec.convert({key: 0}, MemorySettings)


# ---- volumes that go with a process ----------------------------------------------------------------------------------


def test_a_scratch_volume_goes_with_its_process_and_frees_the_room_of_the_next() -> None:
    """A process that is killed removes nothing itself; nor does the agent forget over a restart."""
    settings = msgspec.structs.replace(SETTINGS, volumes_per_job_max=1)

    async def sleeps(env: Any, command: Any) -> int:
        await asyncio.sleep(1000)
        return 0

    with a_rack(2, settings) as rack:
        process, lives = Process(JobId("j1")), rack.host("h1").run("script", sleeps)

        def open_as(scratch: Any, name: str) -> object:
            frame = VolumeWanted(name, 64 << 10, scratch=scratch)
            rack.do("h1", partial(rack.agents["h1"].frame, cast(JobPeer, process), frame))
            return process.said[-1]

        assert isinstance(open_as(lives.id, "first"), VolumeAt)
        rack.run(5)
        assert [view.volume for view in rack.command("h1", "volumes")] == ["first"], "its process lives"
        rack.processes["h1"].signal(9)
        rack.host("h1").start_agent()
        rack.run(5)
        assert [view.volume for view in rack.command("h1", "volumes")] == ["first"]
        lives.signal(9)
        rack.run(5)
        assert not rack.command("h1", "volumes") and not rack.host("h1").find("vold-first")
        refused = open_as(lives.id, "second")
        assert isinstance(refused, Refusal) and "does not run on this host" in refused.why
        assert isinstance(open_as(None, "second"), VolumeAt)
        rack.run(5)
        assert [view.volume for view in rack.command("h1", "volumes")] == ["second"]


def test_a_scratch_volume_that_a_later_process_opens_by_its_name_goes_with_that_one() -> None:
    """The next attempt of a job gives its volumes the names that those of the attempt before had."""

    async def sleeps(env: Any, command: Any) -> int:
        await asyncio.sleep(1000)
        return 0

    with a_rack(2) as rack:
        process = Process(JobId("j1"))
        first, later = (rack.host("h1").run("script", sleeps) for _ in range(2))
        rack.attach("h1", "kept", "64 KiB")
        for name, lives in (("scratch", first), ("scratch", later), ("kept", first)):
            frame = VolumeWanted(name, 64 << 10, scratch=lives.id)
            rack.do("h1", partial(rack.agents["h1"].frame, cast(JobPeer, process), frame))
            assert isinstance(process.said[-1], VolumeAt)
        first.signal(9)
        rack.run(5)
        assert {view.volume for view in rack.command("h1", "volumes")} == {"kept", "scratch"}, (
            "and kept was not scratch"
        )
        rack.processes["h1"].signal(9)
        rack.host("h1").start_agent()
        later.signal(9)
        rack.run(5)
        assert {view.volume for view in rack.command("h1", "volumes")} == {"kept"}

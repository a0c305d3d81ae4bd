"""How a volume without a disk finds its places, on a simulated rack: who decides it, and what several who wait see."""

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from chaos.askers import as_root
from covey.core.errors import Refused
from covey.core.events import Message
from covey.core.ids import HostId
from plugins.memory.datapath.lending.slab_store import SlabStore
from plugins.memory.machine.borrowing import members
from plugins.memory.machine.borrowing.events import SlabFailed, VolumeFound
from plugins.memory.machine.borrowing.place import SlabPlace
from plugins.memory.machine.borrowing.slab import BorrowedVolume
from plugins.memory.messages import QueryMem
from plugins.memory.service.record import KnownVolume
from plugins.views import VolumeView

from .rack import SETTINGS, MemoryRack, RackHost, kill
from .test_mirror import VOLUME, a_rack, slow
from .test_service import read_all, until_done, write_all

TOO_LARGE = "32 MiB"
"""A size of 512 slabs; two lenders have room for some 60 each."""


class Attaching:
    """A user on the first host who attaches a volume, and the answer that he gets."""

    def __init__(self, rack: MemoryRack, size: str, **kind: Any) -> None:
        self.said: VolumeView | Refused | None = None
        self.took_s = 0.0
        self._rack, self._asked = rack, {"volume": VOLUME, "size": size, **kind}
        self.task = rack.processes["h1"].spawn("attach", self._attach())

    async def _attach(self) -> None:
        began_s = self._rack.world.now
        try:
            self.said = await self._rack.agents["h1"].commands()["create"](as_root(self._asked))
        except Refused as refused:
            self.said = refused
        self.took_s = self._rack.world.now - began_s

    def until_told(self) -> VolumeView | Refused:
        self._rack.until(lambda: self.said is not None)
        assert self.said is not None
        return self.said

    def is_refused(self, code: int) -> str:
        said = self.until_told()
        assert isinstance(said, Refused), said
        assert said.code == code, said
        return str(said)


def lent(rack: MemoryRack) -> int:
    return sum(len(agent.lending.machine.lent) for agent in rack.agents.values())


@pytest.mark.parametrize("after_s", [5.0, 8.0])
@pytest.mark.parametrize("mirror", [0, 2])
def test_who_is_refused_does_not_detach_what_another_attached_since(after_s: float, mirror: int) -> None:
    """Two users wait for a volume for which there is no room; as soon as one is told so, another user has one of its
    name."""
    with a_rack(3) as rack:
        first = Attaching(rack, TOO_LARGE, mirror=2)
        rack.run(after_s)
        second = Attaching(rack, TOO_LARGE, mirror=2)
        first.is_refused(4)
        third = Attaching(rack, "128 KiB", mirror=mirror)
        assert isinstance(third.until_told(), VolumeView)
        until_done(rack, rack.client("h1", write_all, VOLUME))
        second.is_refused(4)
        rack.run(20)
        assert [(view.volume, view.size_bytes) for view in rack.command("h1", "volumes")] == [(VOLUME, 128 << 10)]


def test_what_was_detached_and_attached_anew_is_another_volume() -> None:
    """The search for places of the first volume leaves the second one alone."""
    with a_rack(3) as rack:
        first = Attaching(rack, TOO_LARGE, mirror=2)
        rack.until(lambda: lent(rack) > 0)
        rack.command("h1", "remove", volume=VOLUME)
        assert isinstance(Attaching(rack, "128 KiB", mirror=2).until_told(), VolumeView)
        assert "it was removed meanwhile" in first.is_refused(1)
        rack.run(30)
        assert [view.slabs_whole for view in rack.command("h1", "volumes")] == [2]


def test_room_for_which_nobody_waits_any_more_is_given_back() -> None:
    """The user who asked is gone after a second, and nobody asks again."""
    with a_rack(3) as rack:
        waiting = Attaching(rack, TOO_LARGE, mirror=2)
        rack.until(lambda: lent(rack) > 0)
        task = waiting.task
        assert isinstance(task, asyncio.Task)
        task.cancel()
        rack.until(lambda: not lent(rack))
        assert ("no room" in dict(rack.story(f"volume/{VOLUME}"))) and not rack.command("h1", "volumes")


def test_a_later_agent_gives_back_what_was_taken_for_a_volume_without_room() -> None:
    with a_rack(3) as rack:
        Attaching(rack, TOO_LARGE, mirror=2)
        rack.run(4)
        kill([rack.processes["h1"]])
        rack.run(1)
        rack.host("h1").start_agent()
        rack.until(lambda: not lent(rack))
        assert rack.attach("h2", "other", "64 KiB", mirror=2).slabs_whole == 1


def test_a_later_agent_goes_on_with_a_volume_for_which_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_rack(3) as rack:
        with monkeypatch.context() as patch:
            patch.setattr(SlabStore, "register", refuses)
            Attaching(rack, "128 KiB", mirror=2)
            rack.run(4)
            kill([rack.processes["h1"]])
            rack.run(1)
        rack.host("h1").start_agent()
        rack.until(lambda: any(view.slabs_whole == 2 for view in rack.agents["h1"].borrowing.volume_views()))
        assert rack.attach("h1", VOLUME, "128 KiB", mirror=2).slabs_whole == 2


@pytest.mark.parametrize("late_s", [2.5, 4.0])
def test_lenders_whose_agents_answer_late_have_not_said_that_they_have_no_room(late_s: float) -> None:
    with a_rack(3) as rack:
        post, is_late = rack.post, [True]

        async def slowly(sender: RackHost, to: str, call: Callable[..., Any], message: Message) -> Any:
            if isinstance(message, QueryMem) and is_late[0]:
                await asyncio.sleep(late_s)
            return await post(sender, to, call, message)

        rack.post = slowly  # type: ignore[method-assign]
        assert "it is still being formed" in Attaching(rack, "128 KiB", mirror=2).is_refused(1)
        is_late[0] = False
        assert isinstance(Attaching(rack, "128 KiB", mirror=2).until_told(), VolumeView)


def refuses(self: SlabStore, asked: object) -> None:
    raise ValueError("no memory")


def test_lenders_that_offer_room_and_refuse_every_slab_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlabStore, "register", refuses)
    with a_rack(3) as rack:
        for _ in range(3):  # the first slab of a lender waits for its process
            waiting = Attaching(rack, "128 KiB", mirror=2)
            if isinstance(said := waiting.until_told(), Refused) and said.code == 4:
                break
        assert "0 were found" in waiting.is_refused(4)
        assert any("no memory" in why for _, why in rack.story(f"slab/{VOLUME}/0"))


TWELVE_SLABS = msgspec.structs.replace(SETTINGS, lend="780 KiB")
"""Settings of a host that lends 12 slabs of 64 KiB and their seals."""


def pairs(rack: MemoryRack) -> Counter[tuple[str, ...]]:
    """The lenders of each slab."""
    found: dict[int, list[str]] = {}
    for view in rack.slabs("h1"):
        if view.lender is not None:
            found.setdefault(view.index, []).append(view.lender)
    return Counter(tuple(sorted(lenders)) for lenders in found.values())


@pytest.mark.parametrize("seed", [1, 2])
def test_a_member_makes_way_where_room_is_on_the_host_of_its_sibling_alone(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third lender is heard of when the others are full. Of the last slab one member may lie there, and the other
    one nowhere, though there is room for three."""
    monkeypatch.setattr(members, "SEARCHES_MAX", 16)
    slabs = 17
    with a_rack(4, seed, TWELVE_SLABS) as rack:
        rack.declare("h4", "suspect")
        waiting = Attaching(rack, f"{64 * slabs} KiB", mirror=2)
        rack.until(lambda: lent(rack) == 24)
        rack.declare("h4", "alive")
        said = waiting.until_told()
        assert isinstance(said, VolumeView), said
        assert said.slabs_whole == slabs
        assert lent(rack) == 2 * slabs
        found = pairs(rack)
        assert sum(found.values()) == slabs and all(len(set(pair)) == 2 for pair in found)
        assert any(event == "moves away" for index in range(slabs) for event, _ in rack.story(f"slab/data/{index}"))


def test_the_pages_of_a_member_that_makes_way_go_with_it() -> None:
    with a_rack(4) as rack:
        rack.declare("h4", "suspect")
        rack.attach("h1", VOLUME, "256 KiB", mirror=2)
        until_done(rack, rack.client("h1", write_all, VOLUME))
        assert pairs(rack) == {("h2", "h3"): 4}
        lose(rack, 0, leaves=("h2", "h3"), to=("h4",))
        rack.until(lambda: any("h4" in pair for pair in pairs(rack)))
        lose(rack, 1, leaves=(), to=())
        stories = [f"slab/{VOLUME}/{index}" for index in (1, 2, 3)]
        rack.until(lambda: any(event == "moves away" for each in stories for event, _ in rack.story(each)))
        rack.until(lambda: sum("h4" in pair for pair in pairs(rack).elements()) == 2)
        assert rack.slab("h1", VOLUME, 1).place is None, "the hosts that have room now are not heard of"
        for host in ("h2", "h3"):
            rack.declare(host, "alive")
        rack.until(lambda: rack.agents["h1"].borrowing.volumes[VOLUME].formed() == 4)
        until_done(rack, rack.client("h1", read_all, VOLUME))


def lose(rack: MemoryRack, number: int, leaves: Sequence[str], to: Sequence[str]) -> None:
    """Lose a member's place; from now on the hosts of `leaves` are not heard of, and those of `to` are."""
    for host, state in [*((host, "suspect") for host in leaves), *((host, "alive") for host in to)]:
        rack.declare(host, state)  # type: ignore[arg-type]
    rack.until(lambda: all(slab.state == "mapped" for slab in rack.slabs("h1")))
    place = rack.slab("h1", VOLUME, number).place
    assert place is not None
    rack.agents["h1"].borrowing.dispatch(SlabFailed(VOLUME, number, place.epoch, "of a test"))


def a_volume(*pairs: tuple[str, str]) -> BorrowedVolume:
    """Make a volume with its members given by the names of their lenders; `-`: none."""
    found = members.new_volume(VolumeFound("v", len(pairs), 64, 4, (), 2), None, 0.0)
    for slab, lender in zip(found.slabs, [name for pair in pairs for name in pair], strict=True):
        if lender != "-":
            slab.found([SlabPlace(slab.index + 1, HostId(lender), "", b"")])
            slab.linked("open")
    return found


@pytest.mark.parametrize(
    ("pairs", "room", "way"),
    [
        ([("c", "-"), ("a", "b")], "c", 2),
        ([("a", "b"), ("a", "b"), ("c", "-")], "c", 0),
        ([("c", "-"), ("c", "a"), ("c", "b")], "c", None),  # all have it already
        ([("c", "-"), ("c", "a"), ("b", "a")], "c", 4),
        ([("c", "-"), ("a", "b")], "", None),
        ([("c", "-")], "c", None),
    ],
)
def test_who_may_make_way(pairs: list[tuple[str, str]], room: str, way: int | None) -> None:
    volume = a_volume(*pairs)
    homeless = next(slab for slab in volume.slabs if slab.place is None)
    found = members.may_make_way(volume, homeless, [HostId(host) for host in room])
    assert (None if found is None else found.index) == way


def test_one_makes_way_at_a_time_and_none_that_is_not_whole() -> None:
    volume, room = a_volume(("c", "-"), ("a", "b"), ("a", "b")), [HostId("c")]
    lost = volume.slabs[1]
    volume.slabs[2].linked("filling")
    found = members.may_make_way(volume, lost, room)
    assert found is volume.slabs[3]
    found.evict()
    found = members.may_make_way(volume, lost, room)
    assert found is volume.slabs[4]
    found.close()
    assert members.may_make_way(volume, lost, room) is None


def test_room_for_the_last_slab_of_a_lender_is_heard_of() -> None:
    """A slab takes more memory there than it holds, by the seals of its pages: counted without them, one too few is
    seen."""
    with a_rack(3, settings=msgspec.structs.replace(SETTINGS, lend="65 KiB")) as rack:
        rack.attach("h1", VOLUME, "64 KiB", mirror=2)
        assert pairs(rack) == {("h2", "h3"): 1}


def test_a_disk_that_refuses_once_is_no_reason_to_be_refused_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_rack(3) as rack:
        record = rack.agents["h1"].borrowing._record
        write, refuses_now = record.set_volume, [True]

        async def full(known: KnownVolume) -> None:
            if known.formed and refuses_now[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            await write(known)

        monkeypatch.setattr(record, "set_volume", full)
        assert "No space left" in Attaching(rack, "128 KiB", mirror=2).is_refused(1)
        refuses_now[0] = False
        said = Attaching(rack, "128 KiB", mirror=2).until_told()
        assert isinstance(said, VolumeView), said
        assert record.now.volumes[0].formed


@pytest.mark.parametrize(("seed", "start_s"), [(1, 0.0), (3, 0.0), (3, 9.0), (8, 9.0)])
def test_a_volume_that_takes_nearly_all_room_is_attached(seed: int, start_s: float) -> None:
    """The volume takes 20 of 21 places, at three lenders, whose slab processes may start slowly."""
    with a_rack(4, seed, msgspec.structs.replace(SETTINGS, lend="456 KiB")) as rack:
        programs = dict(rack.programs())
        rack.world.programs = lambda: programs | {"slabd": slow(programs["slabd"], start_s)}
        for _ in range(3):
            said = Attaching(rack, "640 KiB", mirror=2).until_told()
            if isinstance(said, VolumeView):
                break
            assert said.code == 1, said
        assert isinstance(said, VolumeView), said
        assert (said.slabs_whole, lent(rack)) == (10, 20)


@pytest.mark.parametrize("door", ["export", "swap"])
def test_nobody_writes_to_what_may_still_be_given_up(door: str) -> None:
    with a_rack(3) as rack:
        waiting = Attaching(rack, TOO_LARGE, mirror=2)
        rack.until(lambda: lent(rack) > 0)
        with pytest.raises(Refused, match="slabs have all their lenders so far") as refused:
            rack.command("h1", door, volume=VOLUME, socket="/run/covey/h1/nbd.sock")
        assert refused.value.code == 1
        waiting.is_refused(4)


def test_a_volume_that_may_hold_pages_is_kept_though_there_is_no_room_for_all_of_it() -> None:
    """An earlier version of the agent let programs read and write a volume that was not ready."""
    with a_rack(3) as rack:
        waiting = Attaching(rack, TOO_LARGE, mirror=2)
        rack.until(lambda: lent(rack) > 0)
        found = rack.agents["h1"].borrowing.volumes[VOLUME]
        found.known = msgspec.structs.replace(found.known, exports=("/run/covey/h1/nbd.sock",))
        assert "it may hold pages" in waiting.is_refused(1)
        rack.run(20)
        assert lent(rack) and [view.volume for view in rack.command("h1", "volumes")] == [VOLUME]
        rack.command("h1", "remove", volume=VOLUME)
        rack.until(lambda: not lent(rack))

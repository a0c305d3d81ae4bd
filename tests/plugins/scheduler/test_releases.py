"""Hosts of two releases and one log: nobody applies something else than the others, or nothing."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import msgspec
import pytest
from msgspec import Meta

from covey.core import version
from covey.core.errors import Refused
from covey.core.ids import HostId
from covey.core.version import RELEASE, newest, release_of, text_of
from covey.wire.checked import OtherFormat, StateRefused
from plugins.facts import HostView
from plugins.gossiped import Endpoints
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages import releases
from plugins.scheduler.messages.commands import (
    Attained,
    MalformedCommand,
    NewerCommand,
    NotApplied,
    QuotaSet,
    open_command,
    open_result,
    pack,
)
from plugins.scheduler.messages.releases import Needs, needed, not_yet
from tests.plugins.scheduler.rack import Rack
from tests.virtual_time import play

NEXT = text_of((RELEASE[0], RELEASE[1] + 1))
AFTER = text_of((RELEASE[0], RELEASE[1] + 2))


class Part(msgspec.Struct, frozen=True):
    size: int = 0
    kept: Annotated[tuple[int, ...], Meta(max_length=4, extra={"came_with": AFTER})] = ()


class Said(msgspec.Struct, frozen=True):
    name: str
    note: Annotated[str, Meta(max_length=9, extra={"came_with": NEXT})] = "none"
    parts: tuple[Part, ...] = ()
    limit: Annotated[int, Meta(ge=0, extra={"came_with": NEXT})] | None = None
    by_name: dict[str, Part] = {}


class Paused(msgspec.Struct, frozen=True):
    came_with: ClassVar[str] = NEXT
    name: str = ""


@pytest.fixture
def quota_is_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that the command which sets a quota came with the next release."""
    monkeypatch.setattr(QuotaSet, "came_with", NEXT, raising=False)
    releases._may_need.cache_clear()
    yield
    monkeypatch.undo()
    releases._may_need.cache_clear()


def runs(rack: Rack, host: str, version: str) -> None:
    rack.values[HostId(host)]["endpoints"] = msgspec.msgpack.encode(Endpoints("h:1", b"", 1, version=version))


def test_a_release_is_read_or_is_none() -> None:
    assert release_of("0.1.0") == release_of("0.1") == (0, 1) and release_of("10.2.3rc1") == (10, 2)
    assert [release_of(text) for text in ("", "1", "a.b", "1.x", "-1.2", "١.٢")] == [None] * 6
    assert newest("", "0.1") == newest("0.1", "") == "0.1" and newest("0.10", "0.9") == "0.10"


def test_a_command_needs_the_newest_of_what_it_says() -> None:
    assert needed(Said("x")) is None and needed(Said("x", "none", (Part(7),))) is None
    assert needed(Said("x", "late")) == Needs(release_of(NEXT) or (0, 0), "Said.note")
    assert needed(Said("x", "late", (Part(), Part(0, (1,))))) == Needs(release_of(AFTER) or (0, 0), "Said.parts.kept")
    assert needed(Said("x", by_name={"a": Part(0, (1,))})) == Needs(release_of(AFTER) or (0, 0), "Said.by_name.kept")
    assert needed(Said("x", limit=0)) == Needs(release_of(NEXT) or (0, 0), "Said.limit")
    assert needed(Paused()) == Needs(release_of(NEXT) or (0, 0), "Paused")

    class Bare(msgspec.Struct):
        note: Annotated[str, Meta(extra={"came_with": NEXT})]

    with pytest.raises(TypeError, match=r"Bare\.note came with .* and has no default"):
        needed(Bare(""))

    class Vague(msgspec.Struct):
        note: Annotated[str, Meta(extra={"came_with": "soon"})] = ""

    class Later(msgspec.Struct):
        came_with: ClassVar[str] = "next"

    for kind in (Vague, Later):
        with pytest.raises(TypeError, match=r"which is no release such as 0\.2"):
            needed(kind())


def test_hosts_that_do_not_say_what_they_run_are_older() -> None:
    said = {"endpoints": msgspec.msgpack.encode(Endpoints("h:1", b"", 1, version="0.2.9"))}
    silent = {"endpoints": msgspec.msgpack.encode(Endpoints("h:1", b"", 1))}
    views = [
        HostView(host=HostId("c"), state="alive"),
        HostView(host=HostId("a"), state="away", values=silent),
        HostView(host=HostId("b"), state="suspect", values=said),
        HostView(host=HostId("d"), state="gone"),
        HostView(host=HostId("e"), state="left", values=silent),
    ]
    assert not_yet((0, 2), views) == ["a", "c"] and not_yet((0, 3), views) == ["a", "b", "c"]


def test_what_came_later_waits_until_every_host_is_upgraded(quota_is_new: None, monkeypatch: Any) -> None:
    async def main() -> None:
        rack = Rack({"gpu1": 1, "gpu2": 1, "gpu3": 1})
        await rack.start()
        for host in ("gpu1", "gpu2"):
            runs(rack, host, f"{NEXT}.0")
        before = len(rack.entries)
        with pytest.raises(Refused) as refused:
            await rack["gpu1"].call("quota_set", tenant="red", gpus=3)
        assert (refused.value.code, refused.value.what) == (4, "the rack cannot do that yet")
        assert f"QuotaSet came with Covey {NEXT}; gpu3 runs an older version" in refused.value.why
        assert "agentctl version" in refused.value.next
        assert b"QuotaSet" not in b"".join(rack.entries[before:]), "nothing was written"
        runs(rack, "gpu3", f"{NEXT}.0")
        monkeypatch.setattr(version, "RELEASE", release_of(NEXT))
        await rack["gpu1"].call("quota_set", tenant="red", gpus=3)
        (entry,) = [each for each in rack.entries[before:] if b"QuotaSet" in each]
        assert open_command(entry).needs == NEXT
        queue = rack["gpu2"].service.queue
        assert queue.quotas["red"] == 3 and queue.needs == NEXT
        kept = queue.snapshot()
        assert JobTable().needs == ""
        JobTable().restore(kept)
        monkeypatch.undo()

        # one that is older meets the command, or the snapshot: it ends, and says what to do
        gpu3 = rack["gpu3"]
        with pytest.raises(OtherFormat) as ended:
            gpu3.log.apply(len(rack.entries) + 1, entry)
        assert (
            f"QuotaSet is a command of Covey {NEXT}" in ended.value.why and "install that version" in ended.value.next
        )
        with pytest.raises(StateRefused, match=f"this log has commands of Covey {NEXT}"):
            gpu3.log.restore(kept)

    play(main())


def test_a_command_without_a_known_name_is_never_passed_over() -> None:
    newer = {"type": "Paused", "wall_s": 1.0, "needs": NEXT}
    with pytest.raises(NewerCommand, match=f"Paused is a command of Covey {NEXT}"):
        open_command(msgspec.msgpack.encode(newer))
    with pytest.raises(NewerCommand, match="Paused is a command of a newer version"):
        open_command(msgspec.msgpack.encode({"type": "Paused"}))
    with pytest.raises(NewerCommand):
        open_command(pack(QuotaSet(wall_s=1.0, tenant="red", gpus=1, needs="soon")))
    assert open_command(pack(QuotaSet(wall_s=1.0, tenant="red", gpus=1, needs=text_of(RELEASE)))).needs
    for wrong in (b"", b"\x81", msgspec.msgpack.encode({"type": "QuotaSet"}), msgspec.msgpack.encode([1])):
        with pytest.raises(MalformedCommand) as error:
            open_command(wrong)
        assert not isinstance(error.value, NewerCommand)


def test_a_command_that_nobody_can_read_changes_nothing_and_ends_nobody() -> None:
    async def main() -> None:
        rack = Rack({"gpu1": 1})
        await rack.start()
        answer = open_result(rack["gpu1"].log.apply(9, b"\xc1nonsense"))
        assert isinstance(answer, NotApplied) and answer.what == "a command was not understood"

    play(main())


def test_commands_of_today_need_nothing() -> None:
    """Every part that comes after this release has to say so: until then an agent looks through no command."""
    assert not releases._may_need(Attained)
    queue = JobTable()
    apply(queue, 1, QuotaSet(wall_s=1.0, tenant="red", gpus=1))
    assert queue.needs == ""

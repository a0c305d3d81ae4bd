import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from agent.api.gathering import Gathered, Unanswered
from agent.api.links import ASKED, ClockRow, PathRow
from agent.api.rack_view import AskView, PluginsFailed, RackView, ViewAnswer
from covey.core.errors import Refused
from covey.core.events import Message
from covey.core.ids import HostId
from plugins.facts import HostView
from plugins.gossiped import GpusNow
from plugins.history_views import HistoryView
from plugins.views import EventLine, GpuRow, HostRow, PluginHealth, Trouble

GPU1, GPU2 = HostId("gpu1"), HostId("gpu2")


def gpu(host: str, age_s: float = 0.0) -> GpuRow:
    return GpuRow(HostId(host), 0, f"GPU-{host}", "H200", 1 << 30, 0, 0.5, None, False, age_s)


class Clock:
    at_s = 100.0

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return self.at_s

    def boot_s(self) -> float:
        return self.now_s()

    def cpu_s(self) -> float:
        return 0.0


class FakeAgent:
    """An agent of two hosts; gpu2 answers while `answering`."""

    id = GPU1
    leader_since_s = 40.0
    voters: Sequence[HostId] = (GPU1,)

    def __init__(self) -> None:
        self.answering = True
        self.refusal: Exception = TimeoutError()
        self.state = "alive"
        self.waited: list[float] = []
        self.troubles = {GPU2: (Trouble("it belongs to another rack", "do this"),)}
        self.health: dict[str, PluginHealth] = {
            "memory": PluginHealth("off", "switched off in agent.toml"),
            "sharing": PluginHealth("failed", "the disk is full"),
        }

        class Env:
            clock = Clock()

            @staticmethod
            def spawn(name: str, work: Coroutine[Any, Any, None]) -> object:
                return asyncio.create_task(work, name=name)

            class probes:
                @staticmethod
                def gpus() -> list[Any]:
                    return []

        class Log:
            leader, term, applied_index, age_s, is_leader = GPU1, 3, 7, 0.0, True

        class Journal:
            @staticmethod
            def lines_of(names: Sequence[str], prefix: str = "") -> list[EventLine]:
                return [EventLine(2.0, GPU1, "j1", "granted", "why", "log/2")] if "j1" in names else []

        self.env, self.log, self.event_log = Env(), Log(), Journal()

    def hosts(self) -> list[HostView]:
        values = {
            "gpus": msgspec.msgpack.encode(GpusNow(8, 3, "H200", False)),
            "health": msgspec.msgpack.encode(PluginsFailed(("memory",))),
            "spare": b"\xc1 not a Spare",
        }
        return [
            HostView(host=GPU1, state="alive", address="127.0.0.1:1", since_s=90.0, values=values),
            HostView(host=GPU2, state=self.state, address="127.0.0.1:2", since_s=95.0, age_s=1.5),  # type: ignore[arg-type]
        ]

    def plugin_commands(self) -> Mapping[str, Any]:
        return {}

    async def ask(self, plugin: str, to: HostId, question: Message, deadline_s: float) -> msgspec.Struct:
        assert isinstance(question, AskView)
        self.waited.append(deadline_s)
        if not self.answering:
            raise self.refusal
        rows: list[Any] = [gpu("gpu2")] if question.read == "agent.local_gpus" else []
        if question.read == "agent.local_clock":
            await asyncio.sleep(0)
            rows = [ClockRow(GPU2, self.env.clock.wall_s(), len(question.arguments["pad"]))]
        if question.read == "agent.story":
            rows = [EventLine(1.0, GPU2, "j1", "granted", "why", "log/2"), EventLine(3.0, GPU2, "j1", "started", "")]
        return ViewAnswer(msgspec.json.encode(rows))


def view(agent: FakeAgent) -> RackView:
    return RackView(agent)  # type: ignore[arg-type]


async def test_hosts_are_shown_from_gossip_with_age_and_failed_rooms() -> None:
    rows: list[HostRow] = await view(FakeAgent()).commands()["agent.hosts"]({})
    one, two = rows
    assert (one.leads, one.gpus_total, one.gpus_free, one.plugins_failed) == (True, 8, 3, ("memory",))
    assert one.slabs_free is None, "a value of another version is shown as unknown"
    assert (two.leads, two.age_s, two.since_s) == (False, 1.5, 5.0)
    assert (one.troubles, two.troubles) == ((), (Trouble("it belongs to another rack", "do this"),))


async def test_a_host_that_stops_answering_is_shown_from_its_last_answer_with_its_age() -> None:
    agent = FakeAgent()
    commands = view(agent).commands()
    whole: Gathered = await commands["agent.gpus"]({})
    assert ([row.age_s for row in whole.data], whole.unanswered) == ([0.0], ())
    agent.answering = False
    agent.env.clock.at_s += 9.0
    old: Gathered = await commands["agent.gpus"]({})
    assert [(row.host, row.age_s) for row in old.data] == [(GPU2, 9.0)]
    assert old.unanswered == (Unanswered(GPU2, "no answer within 3.0 s", 9.0),)


async def test_a_host_that_was_forgotten_is_in_no_list_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = FakeAgent()
    commands, whole = view(agent).commands(), agent.hosts()
    assert [row.host for row in (await commands["agent.gpus"]({})).data] == [GPU2]
    monkeypatch.setattr(agent, "hosts", lambda: whole[:1])
    assert (await commands["agent.gpus"]({})).data == []


LISTS = ("agent.gpus", "agent.rack_tensors", "agent.rack_slabs", "agent.rack_volumes")


@pytest.mark.parametrize("command", LISTS)
async def test_a_host_that_was_never_heard_is_named_by_every_list(command: str) -> None:
    agent = FakeAgent()
    agent.answering = False
    found: Gathered = await view(agent).commands()[command]({})
    silent = [each for each in found.unanswered if each.host == GPU2]
    assert silent == [Unanswered(GPU2, "no answer within 3.0 s", None)]


async def test_why_a_host_gave_no_rows_is_told() -> None:
    agent = FakeAgent()
    agent.answering, agent.refusal = False, Refused(1, "the answer of gpu2 is too long", "it has 40 MB", "ask gpu2")
    found: Gathered = await view(agent).commands()["agent.rack_slabs"]({})
    assert found.unanswered == (Unanswered(GPU2, "the answer of gpu2 is too long: it has 40 MB", None),)


async def test_rows_that_cannot_be_decoded_are_missing_rows() -> None:
    agent = FakeAgent()

    async def garbage(*_: object) -> ViewAnswer:
        return ViewAnswer(b'[{"host": 5}]')

    agent.ask = garbage  # type: ignore[method-assign, assignment]
    found: Gathered = await view(agent).commands()["agent.gpus"]({})
    (silent,) = found.unanswered
    assert silent.host == GPU2 and "another version" in silent.why


async def test_a_host_that_restarts_is_missing_from_a_list_and_one_that_is_gone_is_not() -> None:
    agent = FakeAgent()
    agent.state = "away"
    found: Gathered = await view(agent).commands()["agent.gpus"]({})
    assert [each.host for each in found.unanswered] == [GPU2] and "restarts" in found.unanswered[0].why
    agent.state = "gone"
    assert (await view(agent).commands()["agent.gpus"]({})).unanswered == ()


async def test_a_plugin_that_is_off_has_no_rows_and_of_one_that_failed_they_are_missing() -> None:
    commands = view(FakeAgent()).commands()
    off, failed = await commands["agent.rack_volumes"]({}), await commands["agent.rack_interference"]({})
    assert off.unanswered == ()
    (silent,) = failed.unanswered
    assert (silent.host, "the disk is full" in silent.why) == (GPU1, True)


@pytest.mark.parametrize(("asked", "waited"), [({}, 3.0), ({"timeout_s": 42.5}, 42.5), ({"timeout_s": "600"}, 600.0)])
async def test_a_list_waits_as_long_as_its_reader_said(asked: dict[str, Any], waited: float) -> None:
    agent = FakeAgent()
    await view(agent).commands()["agent.gpus"](asked)
    assert agent.waited == [waited]


@pytest.mark.parametrize("asked", [0, -1, "soon", float("nan"), float("inf"), 601, None, [3]])
async def test_a_wait_that_is_no_time_is_refused(asked: Any) -> None:
    with pytest.raises(Refused) as refused:
        await view(FakeAgent()).commands()["agent.gpus"]({"timeout_s": asked})
    assert refused.value.code == 2


async def test_a_gpu_says_that_its_host_is_gone() -> None:
    agent = FakeAgent()
    commands = view(agent).commands()
    assert [row.host_state for row in (await commands["agent.gpus"]({})).data] == ["alive"]
    agent.state = "gone"
    assert [row.host_state for row in (await commands["agent.gpus"]({})).data] == ["gone"]


async def test_a_story_is_gathered_from_every_host_and_told_once() -> None:
    story: Gathered = await view(FakeAgent()).commands()["agent.why"]({"id": "j1"})
    assert [(line.event, line.host) for line in story.data] == [("granted", GPU2), ("started", GPU2)]


async def test_a_story_of_nothing_is_refused_with_the_next_step() -> None:
    agent = FakeAgent()
    agent.state = "left"
    with pytest.raises(Refused) as refused:
        await view(agent).commands()["agent.why"]({"id": "j9"})
    assert refused.value.code == 3
    assert "agentctl jobs" in refused.value.next
    agent.state = "gone"
    with pytest.raises(Refused) as refused:
        await view(agent).commands()["agent.why"]({"id": "j9"})
    assert (refused.value.code, "gpu2 (it is gone)" in refused.value.why) == (8, True), "it may have known"


async def test_a_story_that_a_silent_host_may_have_is_not_called_unknown() -> None:
    agent = FakeAgent()
    agent.answering = False
    with pytest.raises(Refused) as refused:
        await view(agent).commands()["agent.why"]({"id": "j9"})
    assert (refused.value.code, "gpu2" in refused.value.why) == (8, True)
    assert "agentctl why j9 --timeout" in refused.value.next
    story: Gathered = await view(agent).commands()["agent.why"]({"id": "j1"})
    assert ([line.event for line in story.data], [each.host for each in story.unanswered]) == (["granted"], [GPU2])


async def test_only_listed_reads_are_answered_to_other_hosts() -> None:
    with pytest.raises(Refused):
        await view(FakeAgent()).answer(AskView("scheduler.cancel", {"id": "j1"}))
    answer = await view(FakeAgent()).answer(AskView("agent.story", {"id": "j1"}))
    assert msgspec.json.decode(answer.rows, type=list[EventLine])[0].event == "granted"


async def test_the_leader_is_shown_with_the_age_of_this_copy() -> None:
    leader: Any = await view(FakeAgent()).commands()["agent.leader"]({})
    assert (leader.leader, leader.term, leader.since_s, leader.applied_index) == (GPU1, 3, 60.0, 7)


async def test_whoever_asks_of_links_while_they_are_found_out_shares_the_answer() -> None:
    """One question of a viewer costs each host four, of which one is long; a crowd of viewers costs no more."""
    agent = FakeAgent()
    command = view(agent).commands()["agent.links"]
    crowd = [asyncio.ensure_future(command({})) for _ in range(20)]
    await asyncio.sleep(0)
    crowd[0].cancel()
    found = await asyncio.gather(*crowd[1:])
    assert len(agent.waited) == ASKED + 1 and all(rows == found[0] for rows in found)
    assert [(row.host, row.whole) for row in found[0]] == [(GPU2, True)]
    await command({})
    assert len(agent.waited) == 2 * (ASKED + 1), "the next one is asked anew"
    agent.refusal = ValueError("a defect")
    agent.answering = False
    for told in await asyncio.gather(command({}), command({}), return_exceptions=True):
        assert told is agent.refusal, "each is told, and the agent goes on"


async def test_a_ping_says_what_the_other_host_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = FakeAgent()
    agent.path_row = lambda: PathRow(GPU1, "over TCP")
    found = RackView(agent)

    async def rows(host: HostId, read: str, given: dict[str, str], _wait_s: float) -> list[Any]:
        if read == "agent.local_clock":
            return [ClockRow(host, 0.0, len(given["pad"]))]
        raise Refused(3, f"{read!r} cannot be read here", "unknown kind of question", "agentctl version")

    monkeypatch.setattr(found, "_rows", rows)
    ping: Any = await found.commands()["agent.ping"]({"id": "gpu2"})
    assert ping.link.whole and ping.here.pages == "over TCP" and ping.there is None
    assert "unknown kind of question" in ping.there_why, "an older agent"
    with pytest.raises(Refused, match="no host"):
        await found.commands()["agent.ping"]({"id": "gpu99"})


async def test_hosts_that_may_have_records_are_named_beside_a_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent: Any = FakeAgent()
    off = RackView(agent).commands()["agent.history"]
    with pytest.raises(Refused, match="no plugin scheduler now"):
        await off({})
    view = HistoryView(jobs=[], unanswered={HostId("gpu9"): "it is gone"}, missing=2, trimmed=0, damaged="")

    async def history(_given: Mapping[str, Any]) -> HistoryView:
        return view

    monkeypatch.setattr(agent, "plugin_commands", lambda: {"scheduler.history": history})
    found = await RackView(agent).commands()["agent.history"]({})
    assert found == Gathered(view, (Unanswered(HostId("gpu9"), "it is gone"),))

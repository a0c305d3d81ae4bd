import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agent.rpc.answers
import agent.rpc.rpc
from agent import log as logs
from agent.rpc.envelope import ENVELOPE_BYTES_MAX, PAGE_BYTES
from agent.rpc.rpc import Envelope, Messenger
from covey.core.errors import Refused
from covey.core.ids import HostId
from tests.quiet import quiet

GPU1, GPU2 = HostId("gpu1"), HostId("gpu2")


class Wire:
    """Two couriers and a link that loses, repeats and reverses as told."""

    def __init__(self) -> None:
        self.messengers: dict[HostId, Messenger] = {}
        self.lose = 0
        self.repeat = 1
        self.off = self.fails = False
        """Whether the plugin there is off, or fails at what it hears."""
        self.not_yet: set[bytes] = set()
        """Messages that the plugin there cannot handle now."""
        self.slow: asyncio.Event | None = None
        """What the plugin there waits for before it handles a message."""
        self.silent: set[HostId] = set()
        """The hosts that hear nothing."""
        self.answers: dict[str, bytes] = {}
        """What each plugin answers; `wrong` raises, `never` never returns, others repeat the question."""
        self.boots = {GPU1: 1, GPU2: 1}
        self.who = {GPU1: 101, GPU2: 102}
        self.holds: dict[HostId, int] = {}
        """The identity that has a name by gossip, where that is another installation's."""
        self.heard: list[bytes] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.log: list[tuple[HostId, bytes]] = []

    def add(self, host: HostId) -> None:
        wire = self

        class Links:
            def send(self, to: HostId, data: bytes) -> bool:
                wire.log.append((to, data))
                if wire.lose or to in wire.silent:
                    wire.lose = max(0, wire.lose - 1)
                    return True
                for _ in range(wire.repeat):
                    asyncio.get_running_loop().call_soon(lambda: wire.messengers[to].received(host, data))
                return True

        class Env:
            host = GPU2
            links = Links()

            class clock:
                @staticmethod
                def now_s() -> float:
                    return asyncio.get_running_loop().time()

            log = logs.for_host("test")

            @staticmethod
            def spawn(_name: str, work: Any) -> None:
                wire.tasks.append(asyncio.get_running_loop().create_task(work))

        async def hear(_sender: HostId, _plugin: str, body: bytes) -> bool:
            if self.fails:
                raise Refused(1, "room memory failed", "no space left", "")
            if self.slow is not None:
                await self.slow.wait()
            takes_it = not self.off and body not in self.not_yet
            if takes_it:
                self.heard.append(body)
            return takes_it

        async def answer(_sender: HostId, plugin: str, body: bytes) -> bytes:
            if plugin == "wrong":
                raise KeyError("our mistake")
            if plugin == "never":
                await asyncio.Event().wait()
            if plugin in self.answers:
                return self.answers[plugin]
            if body == b"no":
                raise Refused(4, "what", "why", "next")
            return body + b"!"

        def raw(_sender: HostId, _plugin: str, body: bytes) -> None:
            self.heard.append(b"raw " + body)

        self.messengers[host] = Messenger(
            Env(),  # type: ignore[arg-type]
            self.who[host],
            self.boots[host],
            lambda to: self.boots[to],
            lambda sender: self.holds.get(sender, self.who[sender]),
            hear,
            answer,
            raw,
        )


@pytest.fixture
async def wire(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Wire]:
    monkeypatch.setattr(agent.rpc.rpc, "RETRY_S", (0.005,))
    wire = Wire()
    wire.add(GPU1)
    wire.add(GPU2)
    yield wire
    await asyncio.gather(*wire.tasks)


async def test_a_lost_letter_is_sent_again_and_handled_once(wire: Wire) -> None:
    wire.lose, wire.repeat = 3, 2
    assert await wire.messengers[GPU1].send("memory", GPU2, b"map", 1.0)
    assert wire.heard == [b"map"]


async def test_a_lost_acknowledgement_does_not_make_it_handled_twice(wire: Wire) -> None:
    wire.messengers[GPU2].received  # noqa: B018 - the receiver exists
    sending = asyncio.create_task(wire.messengers[GPU1].send("memory", GPU2, b"map", 1.0))
    await asyncio.sleep(0)
    wire.lose = 2
    assert await sending
    assert wire.heard == [b"map"]


async def test_no_acknowledgement_by_the_deadline_is_said_so(wire: Wire) -> None:
    wire.lose = 10_000
    assert not await wire.messengers[GPU1].send("memory", GPU2, b"map", 0.03)
    assert wire.heard == []


async def test_a_message_for_the_former_self_of_a_restarted_host_is_refused(wire: Wire) -> None:
    wire.boots[GPU2] = 2
    wire.add(GPU2)
    wire.boots[GPU2] = 1  # what gossip still says
    assert not await wire.messengers[GPU1].send("memory", GPU2, b"map", 1.0)
    assert wire.heard == []


async def test_a_question_for_the_former_self_of_a_restarted_host_is_asked_again(wire: Wire) -> None:
    wire.boots[GPU2] = 2
    wire.add(GPU2)
    wire.boots[GPU2] = 1  # what gossip still says
    asking = asyncio.create_task(wire.messengers[GPU1].ask("memory", GPU2, b"room", 1.0))
    while len(wire.log) < 6:
        await asyncio.sleep(0)
        assert not asking.done(), "an empty answer is none"
    wire.boots[GPU2] = 2
    assert await asking == b"room!"


async def test_a_restarted_sender_starts_a_new_table(wire: Wire) -> None:
    assert await wire.messengers[GPU1].send("memory", GPU2, b"one", 1.0)
    wire.boots[GPU1] = 2
    wire.add(GPU1)
    assert await wire.messengers[GPU1].send("memory", GPU2, b"two", 1.0)
    assert wire.heard == [b"one", b"two"]
    old = msgspec.msgpack.encode(Envelope("send", 9, 1, 1, 0, "memory", b"ghost", who=101))
    wire.messengers[GPU2].received(GPU1, old)
    await quiet()
    assert b"ghost" not in wire.heard, "the former boot's messages are stale"


async def test_a_host_installed_anew_is_heard_under_a_lower_boot_and_its_former_self_not(
    wire: Wire,
) -> None:
    """The host's clock was ahead when it was installed first."""
    wire.boots[GPU1] = 30_000
    wire.add(GPU1)
    assert await wire.messengers[GPU1].send("memory", GPU2, b"before", 1.0)
    before = [data for to, data in wire.log if to == GPU2]
    wire.boots[GPU1], wire.who[GPU1], wire.holds[GPU1] = 7, 201, 101
    wire.add(GPU1)
    assert not await wire.messengers[GPU1].send("memory", GPU2, b"early", 0.03), "gossip holds the other one for gpu1"
    wire.holds[GPU1] = 201
    assert await wire.messengers[GPU1].send("memory", GPU2, b"after", 1.0)
    late = msgspec.msgpack.encode(Envelope("send", 99, 30_000, 1, 0, "memory", b"ghost", who=101))
    after = [data for to, data in wire.log if to == GPU2]
    for data in (late, *before, *after):
        wire.messengers[GPU2].received(GPU1, data)
    await quiet()
    assert wire.heard == [b"before", b"after"], "once each, and nothing of who had the name before"
    wire.boots[GPU1] = 8
    wire.add(GPU1)
    assert await wire.messengers[GPU1].send("memory", GPU2, b"its next life", 1.0)


async def test_an_answer_to_a_former_life_is_none_to_a_message_of_the_same_number(wire: Wire) -> None:
    wire.boots[GPU1] = 2
    wire.add(GPU1)
    wire.silent.add(GPU2)
    sending = asyncio.create_task(wire.messengers[GPU1].send("memory", GPU2, b"map", 0.05))
    await asyncio.sleep(0.01)
    wire.messengers[GPU1].received(GPU2, msgspec.msgpack.encode(Envelope("ack", 1, 1, 0, 0, "memory", b"")))
    assert not await sending, "GPU2 acknowledged what GPU1 had sent before it began anew"
    assert wire.messengers[GPU1].counters["late_replies"] == 1


async def test_a_sender_that_gossip_does_not_know_keeps_the_name_it_was_heard_under(wire: Wire) -> None:
    wire.holds[GPU1] = 0
    assert await wire.messengers[GPU1].send("memory", GPU2, b"one", 1.0)
    stranger = msgspec.msgpack.encode(Envelope("send", 1, 9, 1, 0, "memory", b"stranger", who=666))
    wire.messengers[GPU2].received(GPU1, stranger)
    await quiet()
    assert wire.heard == [b"one"]


async def test_a_replayed_letter_is_not_handled_again(wire: Wire) -> None:
    for number in range(20):
        assert await wire.messengers[GPU1].send("memory", GPU2, b"%d" % number, 1.0)
    recorded = [data for to, data in wire.log if to == GPU2]
    for data in recorded:
        wire.messengers[GPU2].received(GPU1, data)
    await quiet()
    assert wire.heard == [b"%d" % number for number in range(20)]


async def test_a_message_for_a_plugin_that_is_off_waits_unacknowledged_until_it_is_on(wire: Wire) -> None:
    wire.off = True
    assert not await wire.messengers[GPU1].send("memory", GPU2, b"map", 0.03)
    sending = asyncio.create_task(wire.messengers[GPU1].send("memory", GPU2, b"evict", 1.0))
    await quiet()
    assert wire.heard == [] and not sending.done()
    wire.off = False
    assert await sending
    assert wire.heard == [b"evict"], "the one whose sender gave up is not handled late"


async def test_a_message_a_plugin_failed_at_is_neither_acknowledged_nor_handled_again(wire: Wire) -> None:
    wire.fails = True
    sending = asyncio.create_task(wire.messengers[GPU1].send("memory", GPU2, b"map", 0.1))
    await asyncio.sleep(0.02)
    wire.fails = False
    assert not await sending
    assert wire.heard == [], "it may have been handled half way"
    assert await wire.messengers[GPU1].send("memory", GPU2, b"next", 1.0)


async def test_a_question_is_answered_or_refused_with_its_reason(wire: Wire) -> None:
    wire.lose = 2
    assert await wire.messengers[GPU1].ask("memory", GPU2, b"how", 1.0) == b"how!"
    with pytest.raises(Refused) as refused:
        await wire.messengers[GPU1].ask("memory", GPU2, b"no", 1.0)
    assert (refused.value.code, refused.value.next) == (4, "next")
    wire.lose = 10_000
    with pytest.raises(TimeoutError):
        await wire.messengers[GPU1].ask("memory", GPU2, b"how", 0.03)


async def test_a_raw_letter_goes_once(wire: Wire) -> None:
    assert wire.messengers[GPU1].raw("log", GPU2, b"append")
    await quiet()
    assert wire.heard == [b"raw append"]


async def test_an_answer_from_somebody_else_is_ignored(wire: Wire) -> None:
    wire.lose = 10_000
    asking = asyncio.create_task(wire.messengers[GPU1].ask("memory", GPU2, b"how", 0.05))
    await asyncio.sleep(0.01)
    forged = msgspec.msgpack.encode(Envelope("answer", 1, 1, 0, 0, "memory", b"lies"))
    wire.messengers[GPU1].received(HostId("gpu9"), forged)
    with pytest.raises(TimeoutError):
        await asking


def test_what_one_sender_makes_us_remember_is_bounded() -> None:
    table = agent.rpc.rpc.Duplicates(1, 1, 100)
    for number in itertools.count():
        if number > 10_000:
            break
        table.handled.add(number)
        table.settle(number - 10)
    assert len(table.handled) <= 12


@given(st.binary(max_size=200))
def test_random_bytes_are_dropped_and_counted(data: bytes) -> None:
    wire = Wire()
    wire.add(GPU1)
    before = sum(wire.messengers[GPU1].counters.values())

    async def receive() -> None:
        wire.messengers[GPU1].received(GPU2, data)

    asyncio.run(receive())
    assert sum(wire.messengers[GPU1].counters.values()) == before + 1
    assert wire.heard == []


@given(st.integers(0, 40), st.integers(0, 255))
def test_a_mutated_letter_never_raises(place: int, value: int) -> None:
    data = bytearray(msgspec.msgpack.encode(Envelope("ask", 7, 1, 1, 3, "memory", b"body")))
    data[place % len(data)] = value

    async def receive() -> None:
        wire = Wire()
        wire.add(GPU1)
        wire.add(GPU2)
        wire.messengers[GPU1].received(GPU2, bytes(data))
        await asyncio.gather(*wire.tasks)
        assert len(wire.heard) <= 1

    asyncio.run(receive())


# ---- tables that fill up ---------------------------------------------------------------------------------------------

GPU3 = HostId("gpu3")


async def test_a_message_that_waits_for_a_dead_host_holds_up_nobody_else(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is settled is said to each receiver of its own messages: the table of a healthy one does not fill up."""
    wire.messengers[GPU2].remembered_max = 8
    wire.boots[GPU3] = 1
    waiting = asyncio.create_task(wire.messengers[GPU1].send("memory", GPU3, b"to the dead", 0.5))
    wire.silent.add(GPU3)
    await asyncio.sleep(0)
    for number in range(40):
        assert await wire.messengers[GPU1].send("memory", GPU2, b"%d" % number, 0.2), number
    assert len(wire.heard) == 40
    assert not waiting.done() and not await waiting
    assert wire.messengers[GPU2].counters["refused_table_full"] == 0


async def test_a_full_table_refuses_a_message_counts_it_and_takes_it_once_there_is_room(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire.messengers[GPU2].remembered_max = 3
    wire.off = True
    oldest = asyncio.create_task(wire.messengers[GPU1].send("memory", GPU2, b"waits", 0.4))
    await asyncio.sleep(0.01)
    wire.off, wire.slow = False, asyncio.Event()
    others = [asyncio.create_task(wire.messengers[GPU1].send("memory", GPU2, b"%d" % n, 2.0)) for n in range(5)]
    await quiet()
    assert wire.messengers[GPU2].counters["refused_table_full"] > 0, "it is said aloud"
    assert wire.messengers[GPU1].counters["receiver_table_full"] > 0
    wire.slow.set()
    assert await oldest
    assert all(await asyncio.gather(*others))
    assert sorted(wire.heard) == [b"0", b"1", b"2", b"3", b"4", b"waits"], "each of them once"


async def test_a_full_table_takes_the_oldest_message_which_all_others_wait_for(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire.messengers[GPU2].remembered_max = 3
    wire.not_yet = {b"oldest"}
    oldest = asyncio.create_task(wire.messengers[GPU1].send("memory", GPU2, b"oldest", 5.0))
    await asyncio.sleep(0)
    assert all([await wire.messengers[GPU1].send("memory", GPU2, b"%d" % n, 5.0) for n in range(3)])
    next_one = asyncio.create_task(wire.messengers[GPU1].send("memory", GPU2, b"3", 5.0))
    for _ in range(20):  # turns of the loop: its first try goes out and is refused
        await asyncio.sleep(0)
    assert wire.messengers[GPU1].counters["receiver_table_full"] > 0
    assert not oldest.done(), "three handled messages above it fill the table"
    wire.not_yet.clear()
    assert await oldest
    assert await next_one, "and the table is emptied when the oldest is settled"
    assert wire.heard == [b"0", b"1", b"2", b"oldest", b"3"]
    assert len(wire.messengers[GPU2]._senders[GPU1].handled) <= 3


# ---- answers that are long, late, wrong, or never come ---------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, ENVELOPE_BYTES_MAX, ENVELOPE_BYTES_MAX + 1, 3 * PAGE_BYTES],
)
async def test_an_answer_of_any_size_comes_whole(wire: Wire, size: int) -> None:
    wire.lose, wire.repeat = 2, 2
    wire.answers["big"] = random.Random(size).randbytes(size)
    assert await wire.messengers[GPU1].ask("big", GPU2, b"how", 2.0) == wire.answers["big"]


async def test_an_answer_longer_than_all_pages_is_refused_in_words_and_the_longest_is_not(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.rpc.answers, "ANSWER_BYTES_MAX", 2 * PAGE_BYTES)
    wire.answers["big"] = bytes(2 * PAGE_BYTES)
    assert len(await wire.messengers[GPU1].ask("big", GPU2, b"how", 2.0)) == 2 * PAGE_BYTES
    wire.answers["big"] += b"x"
    with pytest.raises(Refused, match="too long"):
        await wire.messengers[GPU1].ask("big", GPU2, b"how", 2.0)


async def test_pages_that_nobody_fetched_in_time_are_gone_and_said_to_be(wire: Wire) -> None:
    wire.answers["big"] = bytes(3 * PAGE_BYTES)
    asked = Envelope("ask", 7, 1, 1, 0, "big", b"how")
    answers = wire.messengers[GPU2]._answers
    answers.asked(GPU1, asked)
    await quiet()
    assert answers._kept_bytes == 3 * PAGE_BYTES
    for page, said in ((2, "answer"), (3, "refused"), (63, "refused")):
        answers.asked(GPU1, msgspec.structs.replace(asked, page=page))
        assert msgspec.msgpack.decode(wire.log[-1][1], type=Envelope).kind == said
    answers._kept[(GPU1, 1, 7)] = (float("-inf"), answers._kept[(GPU1, 1, 7)][1])
    answers._drop_old()
    assert (answers._kept_bytes, len(answers._kept)) == (0, 0)
    answers.asked(GPU1, msgspec.structs.replace(asked, page=1))
    assert msgspec.msgpack.decode(wire.log[-1][1], type=Envelope).kind == "refused"


async def test_kept_answers_are_bounded_together(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.rpc.answers, "KEPT_BYTES_MAX", 4 * PAGE_BYTES)
    wire.answers["big"] = bytes(3 * PAGE_BYTES)
    for number in range(5):
        wire.messengers[GPU2]._answers.asked(GPU1, Envelope("ask", number, 1, 1, 0, "big", b""))
        await quiet()
    assert list(wire.messengers[GPU2]._answers._kept) == [(GPU1, 1, 4)]


async def test_a_question_that_fails_is_refused_and_ends_nobody(wire: Wire) -> None:
    with pytest.raises(Refused, match="our mistake"):
        await wire.messengers[GPU1].ask("wrong", GPU2, b"how", 1.0)
    assert wire.messengers[GPU2].counters["answers_failed"] == 1
    assert await wire.messengers[GPU1].ask("memory", GPU2, b"how", 1.0) == b"how!"
    await asyncio.gather(*wire.tasks)


async def test_plugins_that_never_return_cost_a_bounded_number_of_tasks(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.rpc.answers, "AT_ONCE_MAX", 4)
    monkeypatch.setattr(agent.rpc.answers, "ANSWER_S_MAX", 0.2)
    asking = [asyncio.create_task(wire.messengers[GPU1].ask("never", GPU2, b"how", 0.1)) for _ in range(10)]
    ended = await asyncio.gather(*asking, return_exceptions=True)
    assert sum(isinstance(end, TimeoutError) for end in ended) == 4
    assert sum(isinstance(end, Refused) and end.code == 75 for end in ended) == 6
    assert len(wire.tasks) == 4, "asked again and again, and answered once"
    await asyncio.gather(*wire.tasks)
    with pytest.raises(Refused, match="longer than"):
        await wire.messengers[GPU1].ask("never", GPU2, b"how", 1.0)
    assert await wire.messengers[GPU1].ask("memory", GPU2, b"how", 1.0) == b"how!"


@given(st.sampled_from(["send", "ask", "ack", "stale", "full", "answer", "refused", "raw"]), st.data())
def test_no_letter_of_a_member_ends_an_agent_whatever_it_holds(kind: str, data: st.DataObject) -> None:
    """Each kind, with every number at and beyond its bounds and bodies up to and beyond theirs."""
    number = st.sampled_from([0, 1, 2, 63, 64, 2**32, 2**63, 2**64 - 1, -1])
    size = st.sampled_from([0, 1, PAGE_BYTES + 1, ENVELOPE_BYTES_MAX - 100, ENVELOPE_BYTES_MAX + 1])
    plugin = st.sampled_from(["memory", "wrong", "agent", "log", "", "x" * 33])
    fields = [kind, *(data.draw(number) for _ in range(4)), data.draw(plugin), bytes(data.draw(size))]
    fields += [data.draw(number) for _ in range(data.draw(st.integers(0, 2)))]

    async def receive() -> None:
        wire = Wire()
        wire.add(GPU1)
        wire.add(GPU2)
        waiting = asyncio.create_task(wire.messengers[GPU2].ask("memory", GPU1, b"how", 0.02))
        await asyncio.sleep(0)
        wire.messengers[GPU2].received(GPU1, msgspec.msgpack.encode(fields))
        with contextlib.suppress(Refused, TimeoutError):
            await waiting
        await asyncio.gather(*wire.tasks)
        assert await wire.messengers[GPU1].ask("memory", GPU2, b"how", 1.0) == b"how!"

    asyncio.run(receive())

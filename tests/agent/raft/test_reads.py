"""Reads that decide: answered once a majority has confirmed, after they came, who leads; never by a clock."""

import asyncio

import pytest

from agent.raft.machine.types import ReadAsked, ReadFrom, Tick
from agent.raft.messages import Append, AppendReply
from covey.core.errors import NoLeader
from covey.core.events import Heard
from tests.agent.raft.rack import Rack, virtual
from tests.agent.raft.stage import A, B, C, Stage


def _led() -> Stage:
    stage = Stage(A, B, C)
    stage.elect(A)
    return stage


def _read(stage: Stage, number: int) -> list[ReadFrom]:
    return [each for each in stage.tell(A, ReadAsked(number)) if isinstance(each, ReadFrom)]


def _answers(stage: Stage) -> list[ReadFrom]:
    """Deliver everything, and return what A answers to reads."""
    found = []
    while stage.messages:
        sender, to, message = stage.messages.popleft()
        actions = stage.tell(to, Heard(sender, message))
        found += [each for each in actions if isinstance(each, ReadFrom)]
    return found


def test_a_read_waits_for_a_round_that_began_after_it_also_under_a_lease() -> None:
    """Reference: Raft thesis, section 6.4."""
    stage = _led()
    assert stage.rafts[A].holds_lease(stage.now_s)
    assert _read(stage, 7) == []
    assert _answers(stage) == [ReadFrom(7, stage.rafts[A].commit)]


def test_answers_to_an_earlier_round_confirm_nothing() -> None:
    stage = _led()
    stage.now_s += 1.0
    stage.tell(A, Tick())
    before = list(stage.messages)
    stage.messages.clear()
    assert _read(stage, 7) == []
    stage.messages.clear()
    stage.messages.extend(before)
    sent = len(stage.told)
    assert _answers(stage) == []
    assert any(isinstance(message, AppendReply) for _, _, message in stage.told[sent:]), "they were answered"


def test_reads_that_come_during_a_round_share_the_next_one() -> None:
    stage = _led()
    sent = len(stage.told)
    assert [_read(stage, number) for number in range(1, 6)] == [[]] * 5
    assert _answers(stage) == [ReadFrom(number, stage.rafts[A].commit) for number in range(1, 6)]
    rounds = {message.round for _, _, message in stage.told[sent:] if isinstance(message, Append)}
    assert len(rounds) == 2


def test_a_new_leader_names_its_first_entry_and_a_lone_voter_needs_nobody() -> None:
    alone = Stage(A)
    assert _read(alone, 1) == [ReadFrom(1, 1)]
    stage = Stage(A, B, C, logs={A: (1,), B: (1,), C: (1,)}, term=1)
    stage.elect(A)
    leading = stage.rafts[A].leading
    assert leading is not None
    stage.slow |= {A, B, C}
    _read(stage, 2)
    assert _answers(stage) == [ReadFrom(2, leading.first_index)]


def test_who_was_deposed_or_never_led_says_so() -> None:
    stage = _led()
    assert [each for each in stage.tell(B, ReadAsked(1)) if isinstance(each, ReadFrom)] == [ReadFrom(1, None)]
    _read(stage, 2)
    stage.messages.clear()
    later = AppendReply(stage.rafts[A].term + 1, 1, False, 0)
    assert [each for each in stage.tell(A, Heard(B, later)) if isinstance(each, ReadFrom)] == [ReadFrom(2, None)]


@virtual
async def test_every_host_reads_what_was_decided_with_one_question_for_its_reads() -> None:
    async with Rack("a", "b", "c", "d") as rack:
        leader = await rack.led()
        late, soon = rack.members["d"].log, asyncio.get_running_loop().call_later
        receive = late.receive
        late.receive = lambda *heard: soon(0.05, receive, *heard)  # type: ignore[method-assign,assignment]
        for number in range(5):
            await leader.log.propose(str(number).encode())
            for member in rack.members.values():
                await asyncio.gather(*(member.log.be_current() for _ in range(20)))
                assert len(member.commands) == number + 1
        asked = [member.log.counted.get("reads_forwarded", 0) for member in rack.members.values()]
        assert sorted(asked)[0] == 0 and sorted(asked)[3] <= 10


@virtual
async def test_without_a_majority_nobody_is_current() -> None:
    async with Rack("a", "b", "c", "d") as rack:
        leader = await rack.led()
        rack.apart = {name for name in "abc" if name != leader.name}
        for member in (leader, rack.members["d"]):
            with pytest.raises(NoLeader):
                await member.log.be_current(0.5)

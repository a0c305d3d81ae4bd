"""The log as its users see it: propose anywhere, be told once, survive what happens."""

import asyncio
import errno
import random
from typing import Any

import msgspec
import pytest

from agent.raft.messages import (
    COMMAND_BYTES_MAX,
    ProposeEntry,
    ProposeReply,
    VoteReply,
    decode_asked,
    encode,
    encode_asked,
)
from agent.raft.service import LeaderSettings
from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.ids import HostId
from plugins.base import ReplicatedLog
from tests.agent.raft.rack import Rack, virtual
from tests.families import in_gate
from tests.virtual_time import play


def test_it_is_the_log_that_plugins_are_promised() -> None:
    def takes(log: ReplicatedLog) -> ReplicatedLog:
        return log

    async def story() -> None:
        async with Rack("a", voters=0) as rack:
            assert takes(rack.members["a"].log).leader == "a"

    play(story())


@virtual
async def test_three_hosts_elect_one_leader_and_a_fourth_learns_of_it() -> None:
    async with Rack("a", "b", "c", "d") as rack:
        leader = await rack.led()
        await asyncio.sleep(0.5)
        assert {member.log.leader for member in rack.members.values()} == {leader.name}
        assert {member.log.term for member in rack.members.values()} == {leader.log.term}
        assert all(member.changes[-1] == (leader.log.term, leader.name) for member in rack.members.values())


@virtual
async def test_a_rack_of_one_leads_when_start_returns() -> None:
    async with Rack("a", voters=0) as rack:
        log = rack.members["a"].log
        assert (log.is_leader, log.leader, log.voters, log.age_s) == (True, "a", ("a",), 0.0)
        assert await log.propose(b"x") == b"1"


@virtual
async def test_a_proposal_of_any_host_is_applied_everywhere_and_seen_at_once_by_its_maker() -> None:
    async with Rack("a", "b", "c", "d") as rack:
        await rack.led()
        for number, (name, member) in enumerate(rack.members.items(), 1):
            assert await member.log.propose(name.encode()) == str(number).encode()
            assert member.commands[-1] == name
        await asyncio.sleep(0.5)
        assert [member.commands for member in rack.members.values()] == [["a", "b", "c", "d"]] * 4


@virtual
async def test_a_proposal_made_while_the_leader_dies_is_applied_once_by_the_next_one() -> None:
    async with Rack("a", "b", "c", "d") as rack:
        leader = await rack.led()
        await asyncio.sleep(0.3)
        observer = rack.members["d"]
        loop = asyncio.get_running_loop()
        asking = loop.create_task(observer.log.propose(b"x"))
        await asyncio.sleep(0.002)
        leader.kill()
        began_s = loop.time()
        assert await asking == b"1"
        assert loop.time() - began_s < 2.2
        assert (await rack.led()).commands == ["x"]


@virtual
async def test_an_isolated_leader_stops_acting_as_one_and_tells_nobody_lies() -> None:
    async with Rack("a", "b", "c") as rack:
        leader = await rack.led()
        rack.apart = {leader.name}
        asking = asyncio.get_running_loop().create_task(leader.log.propose(b"lost?", timeout_s=4))
        await asyncio.sleep(1.2)
        assert not leader.log.is_leader
        await asyncio.sleep(0.6)
        assert leader.log.leader is None
        other = await rack.led()
        assert other is not leader
        with pytest.raises(OutcomeUnknown):
            await asking
        await other.log.propose(b"y")
        rack.apart = set()
        await asyncio.sleep(2.0)
        assert leader.commands == other.commands == ["y"]
        assert leader.log.leader == other.name


@virtual
async def test_what_is_in_a_copy_and_may_be_decided_is_told_apart() -> None:
    async with Rack("a", "b", "c") as rack:
        leader = await rack.led()
        await leader.log.propose(b"x")
        await asyncio.sleep(2)
        assert [list(member.log.undecided()) for member in rack.members.values()] == [[], [], []]
        rack.apart = {leader.name}
        asking = asyncio.get_running_loop().create_task(leader.log.propose(b"perhaps", timeout_s=1))
        await asyncio.sleep(0.5)
        assert list(leader.log.undecided()) == [b"perhaps"], "and not what leaders write for themselves"
        with pytest.raises(OutcomeUnknown):
            await asking
        rack.apart = set()
        await asyncio.sleep(5)
        assert [list(member.log.undecided()) for member in rack.members.values()] == [[], [], []]


@virtual
async def test_without_a_majority_nothing_is_proposed_and_everybody_is_told_so() -> None:
    async with Rack("a", "b", "c", "d") as rack:
        await rack.led()
        rack.members["a"].kill()
        rack.members["b"].kill()
        await asyncio.sleep(6)
        for name in ("c", "d"):
            with pytest.raises(NoLeader):
                await rack.members[name].log.propose(b"x", timeout_s=1)
            assert rack.members[name].log.leader is None
            assert rack.members[name].log.age_s > 4


@virtual
async def test_reads_know_how_old_they_are() -> None:
    async with Rack("a", "b", "c", "d") as rack:
        leader = await rack.led()
        await asyncio.sleep(2)
        assert leader.log.age_s == 0
        assert all(member.log.age_s < 0.4 for member in rack.members.values() if member.name != "d")
        assert rack.members["d"].log.age_s < 1.5
        rack.apart = {"d"}
        await asyncio.sleep(10)
        assert 9 < rack.members["d"].log.age_s < 12


@virtual
async def test_what_gathers_while_the_disk_writes_is_one_write() -> None:
    async with Rack("a", "b", "c") as rack:
        leader = await rack.led()
        before = leader.disk.appends
        results = await asyncio.gather(*(leader.log.propose(f"{n}".encode()) for n in range(2000)))
        assert sorted(map(int, results)) == list(range(1, 2001))
        assert leader.disk.appends - before < 40
        assert leader.commands == [str(n) for n in range(2000)], "in the order they were proposed"


@virtual
async def test_a_restarted_host_has_applied_what_it_knew_before_it_hears_anybody() -> None:
    async with Rack("a", "b", "c", "d") as rack:
        leader = await rack.led()
        for number in range(5):
            await leader.log.propose(f"{number}".encode())
        await asyncio.sleep(3)
        for name in ("d", leader.name):
            member = rack.members[name]
            member.kill()
            rack.apart = {name}
            await member.start()
            assert member.commands == ["0", "1", "2", "3", "4"]
            rack.apart = set()
            await rack.led()
            await asyncio.sleep(1)


@virtual
async def test_snapshots_keep_logs_short_and_bring_a_late_host_up_to_date() -> None:
    rack = Rack("a", "b", "c", "d", snapshot_entries=50, keep_entries=10)
    for name in ("a", "b", "c"):
        await rack.members[name].start()
    leader = await rack.led()
    for number in range(230):
        await leader.log.propose(f"{number}".encode())
    late = rack.members["d"]
    await late.start()
    await asyncio.sleep(3)
    assert late.commands == leader.commands == [str(n) for n in range(230)]
    assert late.restored == 1
    assert len(leader.disk.files) == 3, "the log, its snapshot, and what was acknowledged"
    late.kill()
    await late.start()
    assert late.commands[:200] == leader.commands[:200]
    assert late.restored == 1
    await rack.__aexit__()


@virtual
async def test_a_long_snapshot_is_not_written_again_for_a_few_short_commands() -> None:
    """What snapshots write stays in proportion to what commands write."""
    async with Rack("a", snapshot_entries=16, keep_entries=4) as rack:
        leader = await rack.led()
        for _ in range(20):
            await leader.log.propose(b"x" * 50_000)
        before = leader.log.counters["snapshots_saved"]
        for number in range(200):
            await leader.log.propose(f"{number}".encode())
        assert 1 <= before <= leader.log.counters["snapshots_saved"] <= before + 1, "200 commands are 13 times 16"


@virtual
async def test_a_repeated_question_is_one_proposal() -> None:
    """The messenger asks until it is answered; the leader's disk is slower than that."""
    async with Rack("a", "b", "c", "d") as rack:
        leader = await rack.led()
        question = encode_asked(ProposeEntry(leader.log.rack, b"i" * 16, 1, 0, b"once"))
        answers = await asyncio.gather(*(leader.log.answer(HostId("d"), question) for _ in range(5)))
        answers.append(await leader.log.answer(HostId("d"), question))
        assert {decode_asked(answer).outcome for answer in answers} == {"applied"}  # type: ignore[union-attr]
        assert leader.commands == ["once"]


@virtual
async def test_a_host_that_does_not_lead_says_so_and_a_refused_attempt_stays_refused() -> None:
    """A late copy of the message must not be appended after its proposer was told that it was not."""
    async with Rack("a", "b", "c") as rack:
        leader = await rack.led()
        for member in rack.members.values():
            question = ProposeEntry(leader.log.rack, member.name.encode() * 16, 1, 0, member.name.encode())
            first = decode_asked(await member.log.answer(HostId("d"), encode_asked(question)))
            assert first.outcome == ("applied" if member is leader else "not leader")  # type: ignore[union-attr]
        leader.kill()
        heir = await rack.led()
        for attempt, outcome in ((1, "busy"), (2, "applied")):
            question = ProposeEntry(leader.log.rack, heir.name.encode() * 16, attempt, 0, heir.name.encode())
            answer = decode_asked(await heir.log.answer(HostId("d"), encode_asked(question)))
            assert answer.outcome == outcome  # type: ignore[union-attr]


@virtual
async def test_what_cannot_be_understood_is_counted_and_refused() -> None:
    async with Rack("a", "b", "c") as rack:
        await rack.led()
        log = rack.members["a"].log
        rng = random.Random(4)
        for _ in range(200):
            log.receive(HostId("b"), rng.randbytes(rng.randrange(60)))
        log.receive(HostId("b"), encode(b"rack two", VoteReply(99, False, True)))
        assert log.counters["malformed"] == 200
        assert log.counters["of_another_rack"] == 1
        assert list(log.changes.strangers) == ["b"]
        for bad in (b"\xc1", encode_asked(ProposeEntry(b"rack two", b"i" * 16, 1, 0, b"x"))):
            with pytest.raises(Refused):
                await log.answer(HostId("b"), bad)
        await rack.led()
        assert log.term < 99


@virtual
async def test_a_command_that_is_too_long_is_refused_before_it_goes_anywhere() -> None:
    async with Rack("a", voters=0) as rack:
        with pytest.raises(ValueError, match="over the limit"):
            await rack.members["a"].log.propose(bytes(COMMAND_BYTES_MAX + 1))


@virtual
async def test_a_host_whose_disk_fails_takes_no_further_part_and_the_others_go_on() -> None:
    async with Rack("a", "b", "c") as rack:
        leader = await rack.led()
        leader.disk.refuses = errno.EIO
        others = [member for member in rack.members.values() if member is not leader]
        asking = asyncio.get_running_loop().create_task(others[0].log.propose(b"x"))
        assert await asking == b"1"
        assert (await rack.led()) in others
        assert (leader.log.leader, leader.log.is_leader, leader.changes[-1][1]) == (None, False, None)
        assert any("Input/output" in error for error in leader.quiet.errors)
        with pytest.raises(NoLeader):
            await leader.log.propose(b"y", timeout_s=0.5)


def test_a_state_that_cannot_apply_a_command_ends_this_hosts_part_loudly() -> None:
    def broken(index: int, command: bytes) -> bytes:
        raise KeyError("a defect")

    async def story() -> Any:
        async with Rack("a", "b", "c") as rack:
            leader = await rack.led()
            follower = next(member for member in rack.members.values() if member is not leader)
            follower.log.bind(broken, bytes, lambda _: None)
            await leader.log.propose(b"x")
            await asyncio.sleep(0.5)
            assert follower.log.leader is None
            assert follower.quiet.errors[0] == "the log stopped on this host"
            assert leader.log.is_leader

    with pytest.raises(AssertionError, match="a defect"):
        play(story())


@virtual
async def test_stopping_lets_every_waiting_proposal_go() -> None:
    async with Rack("a", "b", "c") as rack:
        member = rack.members["a"]
        rack.apart = {"a", "b", "c"}
        asking = asyncio.get_running_loop().create_task(member.log.propose(b"x", timeout_s=60))
        await asyncio.sleep(3)
        await member.stop()
        with pytest.raises((NoLeader, OutcomeUnknown)):
            await asyncio.wait_for(asking, 1)


@pytest.mark.parametrize("seed", in_gate(4, range(12)))
@virtual
async def test_through_kills_and_partitions_answers_are_true_and_commands_applied_once(seed: int) -> None:
    """Clients on all hosts; what they are told is compared with what the rack holds in the end."""
    rng = random.Random(seed)
    async with Rack("a", "b", "c", "d", seed=seed, snapshot_entries=40, keep_entries=8) as rack:
        told: dict[str, int] = {}
        unknown: set[str] = set()
        refused: set[str] = set()

        async def client(name: str) -> None:
            for number in range(60):
                await asyncio.sleep(rng.expovariate(4))
                member = rack.members[rng.choice("abcd")]
                if not member.up:
                    continue
                command = f"{name}{number}"
                try:
                    told[command] = int(await member.log.propose(command.encode(), timeout_s=4))
                except OutcomeUnknown:
                    unknown.add(command)
                except NoLeader:
                    refused.add(command)

        async def trouble() -> None:
            for _ in range(14):
                await asyncio.sleep(rng.uniform(0.3, 2))
                rack.loss = rng.choice((0.0, 0.0, 0.1))
                member = rack.members[rng.choice("abcd")]
                kind = rng.choice(("kill", "apart", "heal"))
                if kind == "kill" and member.up:
                    member.kill()
                    await asyncio.sleep(rng.uniform(0.01, 1))
                    await member.start()
                elif kind == "apart":
                    rack.apart = {member.name}
                else:
                    rack.apart = set()
            rack.apart, rack.loss = set(), 0.0

        await asyncio.gather(trouble(), *(client(name) for name in "wxyz"))
        await (await rack.led()).log.propose(b"last")
        await asyncio.sleep(3)
        commands = rack.members["a"].commands
        assert all(member.commands == commands for member in rack.members.values())
        assert len(set(commands)) == len(commands), "applied twice"
        for command, place in told.items():
            assert commands[place - 1] == command, "the answer was another command's"
        assert not refused & set(commands), "applied although nothing was proposed"
        assert len(told) > 100


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"voters": ["a", "b"]}, "one, three or five different hosts"),
        ({"voters": ["a", "b", "b"]}, "different"),
        ({"voters": ["A!"]}, "not a host name"),
        ({"heartbeat_s": 0.5}, "heartbeat_s"),
        ({"election_max_s": 0.5}, "election_max_s"),
        ({"step_down_s": 0.5}, "step_down_s"),
        ({"observer_s": 0.01}, "observer_s"),
        ({"snapshot_entries": 1}, "snapshot_entries"),
        ({"voter": ["a"]}, "voter"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=why):
        msgspec.convert(given, LeaderSettings)


def test_settings_of_a_rack_are_accepted() -> None:
    assert msgspec.convert({"voters": ["a", "b", "c"]}, LeaderSettings).timing().lease_s < 1.2


@virtual
async def test_commands_of_one_turn_go_as_one_message_and_a_refused_one_costs_one_question() -> None:
    async with Rack("a", "b", "c", "d") as rack:
        leader, d = await rack.led(), rack.members["d"]
        await asyncio.sleep(0.5)
        asked: list[str] = []
        answer = leader.log.answer

        async def heard(sender: HostId, data: bytes) -> bytes:
            asked.append(type(decode_asked(data)).__name__)
            if len(asked) == 2:
                raise Refused(2, "not now", "", "")
            return await answer(sender, data)

        leader.log.answer = heard  # type: ignore[method-assign]
        for count in (1, 2):
            await asyncio.gather(*(d.log.propose(f"{count} {n}".encode()) for n in range(20)))
            assert sorted(set(leader.commands)) == sorted(leader.commands) and len(leader.commands) == 20 * count
        assert set(asked) == {"ProposeEntries"} and len(asked) == 3, "the second is refused, and asked again whole"


@virtual
async def test_who_led_before_it_restarted_does_not_say_that_nothing_was_proposed() -> None:
    async with Rack("a", "b", "c", "d") as rack:
        leader = await rack.led()
        await asyncio.sleep(0.5)
        question = encode_asked(ProposeEntry(rack.members["a"].log.rack, b"i" * 16, 1, 0, b"x"))
        leader.kill()
        await leader.start()
        await asyncio.sleep(0.1)
        assert decode_asked(await leader.log.answer(HostId("d"), question)) == ProposeReply("perhaps")
        await asyncio.sleep(5)
        other = next(member for member in rack.members.values() if member.log.leader != member.name)
        assert decode_asked(await other.log.answer(HostId("d"), question)) == ProposeReply("not leader")

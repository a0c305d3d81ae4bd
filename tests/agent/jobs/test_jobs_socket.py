"""jobs.sock: who may join, what becomes of each frame, and what hostile or slow processes can do to it: nothing."""

import asyncio
import math
import os
import random
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.jobs.socket import jobs_socket as jobs_module
from agent.jobs.socket.jobs_socket import STEP_MAX, JobSocket
from agent.jobs.successors import NEVER
from agent.metrics import JOB_FRAMES, JOB_PROCESSES
from agent.ports.clock import RealClock
from agent.ports.network.protocol_error_limit import FORGIVE_S, OFFENCES_MAX
from covey.core.errors import Refused
from covey.core.events import Fact
from covey.core.ids import HostId, JobId
from covey.core.version import VERSION
from covey.ports.processes import ProcessId
from covey.ports.streams import UNKNOWN_USER, ByteStream
from covey.wire.frames import FRAME_BYTES_MAX, pack, read_frame
from covey.wire.job import (
    GRACE_KEPT,
    MEMORY_S,
    PROTOCOL,
    AggregatorAt,
    AggregatorLost,
    AskSave,
    Carries,
    ExtendGrace,
    Frame,
    Heals,
    Hooked,
    InVain,
    Join,
    Joined,
    ProcessLeaves,
    Refusal,
    SaveIs,
    Stepped,
    Stopping,
    SumsNow,
    SumsOrder,
    TableWanted,
    VolumeWanted,
    decoder,
    heartbeat_s,
)
from covey.wire.sums import GetStatus, Now
from plugins.base import JobPeer, RankSpec
from plugins.facts import JobHooked, JobJoined, RankDisconnected, RankLeavesHere, RankWaitsInVain, StepTimed, TableUsed
from tests.agent.here import Here, here, ranks, until
from tests.agent.jobs.one_epoch import OneEpoch
from tests.families import examples

J1 = JobId("j1")
FOUR = msgspec.structs.replace(ranks("j1", "x", count=2, epoch=3), world_size=4)
"""The ranks 0 and 1 of 4, which are here under epoch 3."""
GOOD = Join(pid=1, job=J1, rank=1, epoch=3, token="secret")


@pytest.fixture
def short() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="covey-") as directory:
        yield directory


class Door:
    """A job socket, and what came through it."""

    def __init__(self, host: Here) -> None:
        self.host = host
        self.facts: list[Fact] = []
        self.heard: list[tuple[JobPeer, Frame]] = []
        self.answer: Callable[[JobPeer, Frame], None] = lambda peer, frame: None
        self.runner = OneEpoch(FOUR)
        self.socket = JobSocket(host.env, self.runner, self.facts.append, self._deliver)
        self.address = f"unix:{host.env.run_dir}/jobs.sock"

    async def _deliver(self, peer: JobPeer, frame: Frame) -> None:
        self.heard.append((peer, frame))
        self.answer(peer, frame)

    async def connect(self) -> ByteStream:
        return await self.host.env.bytes.connect(self.address)

    async def say(self, *frames: Frame) -> tuple[ByteStream, Frame]:
        """Connect and say these frames; returns the stream and the first answer."""
        stream = await self.connect()
        await stream.write(b"".join(map(pack, frames)))
        return stream, await read_frame(stream, decoder)


@asynccontextmanager
async def door(short: str) -> AsyncIterator[Door]:
    async with here(short) as host:
        found = Door(host)
        await found.socket.start()
        try:
            yield found
        finally:
            await found.socket.stop()


async def test_a_rank_joins_with_its_token_and_learns_its_place(short: str) -> None:
    async with door(short) as found:
        stream, answer = await found.say(GOOD)
        two_are_here = Joined(HostId("h1"), J1, 1, 4, 3, PROTOCOL, VERSION, tensor_memory=True, heals=True, leaves=True)
        two_are_here = msgspec.structs.replace(two_are_here, memory_s=MEMORY_S, heartbeat_s=heartbeat_s(None))
        assert answer == two_are_here
        await until(lambda: found.facts)
        assert found.facts == [JobJoined(J1, 3, 1)]
        (peer,) = found.socket.peers(J1)
        assert (peer.job, peer.rank, peer.epoch, peer.uid) == (J1, 1, 3, os.getuid())
        stream.close()


async def test_a_rank_says_from_when_on_it_may_be_lost_and_when_it_is_through(short: str) -> None:
    async with door(short) as found:
        stream, _ = await found.say(GOOD)
        await stream.write(pack(Heals(7)))
        await until(lambda: found.runner.healing == {1: 7})
        await stream.write(pack(Heals(9, over=True)))
        await until(lambda: found.runner.healing == {1: NEVER})
        await stream.write(pack(Heals(-1)))
        await until(lambda: found.socket.counters["malformed"])
        assert found.runner.healing == {1: NEVER}


async def test_a_wheel_that_speaks_otherwise_is_refused_with_both_versions(short: str) -> None:
    async with door(short) as found:
        other = msgspec.structs.replace(GOOD, protocol=PROTOCOL + 1, version="9.8.7\x1b" + "0" * 100)
        _, answer = await found.say(other)
        assert isinstance(answer, Refusal)
        assert answer.what == "rank 1 cannot join job j1"
        assert "covey-job 9.8.700" in answer.why and f"version {PROTOCOL + 1}" in answer.why
        assert f"covey-agent {VERSION} here speaks {PROTOCOL}" in answer.why
        assert len(answer.why) < 150
        assert answer.next.startswith("install the covey-job")
        assert found.socket.counters["refused"] == 1
        assert found.facts == []


async def test_a_wheel_of_another_version_that_speaks_the_same_is_welcome(short: str) -> None:
    async with door(short) as found:
        stream, answer = await found.say(msgspec.structs.replace(GOOD, protocol=PROTOCOL, version="9.8.7"))
        assert isinstance(answer, Joined)
        stream.close()
        await until(lambda: not found.socket.peers(J1))


async def test_what_a_rank_computes_with_is_told_as_far_as_it_can_be_shown(short: str) -> None:
    async with door(short) as found:
        stream, _ = await found.say(msgspec.structs.replace(GOOD, kernel="numpy\x1b[2J" + "x" * 100))
        await until(lambda: found.facts)
        assert found.facts == [JobJoined(J1, 3, 1, "numpy[2J" + "x" * 55)]
        stream.close()
        await until(lambda: not found.socket.peers(J1))


async def test_a_tool_joins_without_a_job_and_is_known_by_its_uid(short: str) -> None:
    async with door(short) as found:
        stream, answer = await found.say(Join(pid=5), VolumeWanted("scratch", 1 << 20))
        assert answer == Joined(HostId("h1"), protocol=PROTOCOL, version=VERSION, heals=True, leaves=True)
        await until(lambda: found.heard)
        assert (found.heard[0][0].uid, found.heard[0][0].job) == (os.getuid(), None)
        assert found.facts == []
        stream.close()


async def test_a_process_whose_user_the_kernel_does_not_tell_joins_as_nobody(short: str) -> None:
    async with door(short) as found:
        for join in (Join(pid=5), GOOD):
            with pytest.raises(Refused, match="the kernel of this host does not tell the user of this process"):
                found.socket._admit(join, cast(ByteStream, SimpleNamespace(uid=UNKNOWN_USER, peer="unix:pid 0")))


@pytest.mark.parametrize(
    ("join", "why"),
    [
        (msgspec.structs.replace(GOOD, token="guess"), "COVEY_TOKEN is wrong"),
        (msgspec.structs.replace(GOOD, token=""), "COVEY_TOKEN is wrong"),
        (msgspec.structs.replace(GOOD, token="sécret\udcff".encode("utf-8", "replace").decode()), "COVEY_TOKEN"),
        (msgspec.structs.replace(GOOD, epoch=2), "epoch 2 of j1 does not run on h1"),
        (msgspec.structs.replace(GOOD, job=JobId("j9")), "epoch 3 of j9 does not run on h1"),
        (msgspec.structs.replace(GOOD, rank=2), "does not run on"),
    ],
)
async def test_who_is_no_rank_of_this_epoch_here_is_refused_with_the_next_step(
    short: str, join: Join, why: str
) -> None:
    async with door(short) as found:
        stream, answer = await found.say(join)
        assert isinstance(answer, Refusal)
        assert why in answer.why
        assert answer.next
        with pytest.raises(ConnectionError):
            await read_frame(stream, decoder)
        assert (found.facts, found.socket.peers(J1)) == ([], [])
        assert found.socket.counters["refused"] == 1


@pytest.mark.parametrize(
    ("job", "epoch", "token", "whose", "why"),
    [
        (J1, 3, "secret", J1, ""),
        (None, 0, "", None, ""),
        (J1, 3, "guess", None, "COVEY_TOKEN is wrong"),
        (J1, 2, "secret", None, "epoch 2 of j1 does not run on h1"),
        (JobId("j9"), 3, "secret", None, "epoch 3 of j9 does not run on h1"),
    ],
)
async def test_a_volume_counts_against_a_job_by_its_token_alone(
    short: str, job: JobId | None, epoch: int, token: str, whose: JobId | None, why: str
) -> None:
    async with door(short) as found:
        stream, _ = await found.say(Join(pid=1), VolumeWanted("data", 1 << 20, job=job, epoch=epoch, token=token))
        if why:
            answer = await read_frame(stream, decoder)
            assert isinstance(answer, Refusal) and why in answer.why and "open volume data" in answer.what
            assert found.heard == []
        else:
            await until(lambda: found.heard)
            assert [peer.of_job for peer, _ in found.heard] == [whose]
        assert (found.facts, found.socket.peers(J1)) == ([], []), "it is no rank of it"


async def test_a_rank_that_joins_late_hears_too_that_it_is_to_end_and_may_ask_for_time(short: str) -> None:
    async with door(short) as found:
        early, _ = await found.say(GOOD)
        await early.write(pack(ExtendGrace(5.0)))
        refusal = await read_frame(early, decoder)
        assert isinstance(refusal, Refusal) and refusal.what == GRACE_KEPT
        asked = found.runner.asked = Stopping(60.0, "preempted")
        found.socket.say_stopping(J1, 2)
        found.socket.say_stopping(J1, 3)
        assert await read_frame(early, decoder) == asked
        late, _ = await found.say(GOOD, ExtendGrace(5.0))
        assert await read_frame(late, decoder) == asked
        await until(lambda: found.runner.asked == Stopping(65.0, "preempted", may_extend=False))
        assert found.heard == []


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0])
async def test_a_time_that_cannot_be_is_not_asked_for(short: str, seconds: float) -> None:
    async with door(short) as found:
        found.runner.asked = Stopping(60.0, "preempted")
        stream, _ = await found.say(GOOD, ExtendGrace(seconds))
        with pytest.raises(ConnectionError):
            while True:
                await read_frame(stream, decoder)
        assert found.socket.counters["malformed"] == 1 and found.runner.asked.left_s == 60.0


async def test_a_step_becomes_a_fact_with_finite_and_few_metrics(short: str) -> None:
    metrics = {"loss": math.nan, "accuracy": 0.5, "x" * 65: 1.0, **{f"m{number}": 1.0 for number in range(50)}}
    async with door(short) as found:
        stream, _ = await found.say(GOOD, Stepped(7, 0.5, 0.25, 0.125, metrics))
        await until(lambda: len(found.facts) == 2)
        told = found.facts[1]
        assert isinstance(told, StepTimed)
        assert (told.job, told.epoch, told.rank, told.step) == (J1, 3, 1, 7)
        assert (told.step_s, told.compute_s, told.communicate_s) == (0.5, 0.25, 0.125)
        assert told.metrics["accuracy"] == 0.5
        assert len(told.metrics) == 14
        assert found.socket.counters["metrics_dropped"] == len(metrics) - 14
        stream.close()


@pytest.mark.parametrize(
    "frame",
    [
        Stepped(-1, 1.0),
        Stepped(STEP_MAX + 1, 1.0),
        Stepped(1, math.nan),
        Stepped(1, math.inf),
        Stepped(1, -0.1),
        Stepped(1, 1.0, compute_s=math.nan),
        Stepped(1, 1.0, input_s=math.nan),
        Stepped(1, 1.0, memory_bytes=-1),
        GOOD,
        Joined(HostId("h1")),
        Carries(1, {1: (1,)}),
        AskSave(1),
        SaveIs(1, "saved", 7),  # this one has not said that it saves
    ],
)
async def test_a_joined_process_that_says_what_cannot_be_is_cut_off_and_counted(short: str, frame: Frame) -> None:
    async with door(short) as found:
        stream, _ = await found.say(GOOD, frame)
        with pytest.raises(ConnectionError):
            await read_frame(stream, decoder)
        assert found.socket.counters["malformed"] == 1
        assert [fact for fact in found.facts if isinstance(fact, StepTimed)] == []


async def test_what_sees_a_script_is_a_fact_and_told_again_to_a_plugin_that_starts_later(short: str) -> None:
    async with door(short) as found:
        stream, _ = await found.say(GOOD, Hooked("torch 2.13.0\x1b" + "x" * 290, "line\n" + "y" * 900))
        await until(lambda: len(found.facts) == 2)
        told = found.facts[1]
        assert isinstance(told, JobHooked)
        assert (told.job, told.rank, told.to[:12], len(told.to)) == (J1, 1, "torch 2.13.0", 159)
        assert "\n" not in told.problem and len(told.problem) < 400
        assert told in found.socket.facts()
        await stream.write(pack(Stepped(7, 0.5, input_s=0.25, memory_bytes=5, boundary="optimizer\x00" + "z" * 99)))
        await until(lambda: len(found.facts) == 3)
        step = found.facts[2]
        assert isinstance(step, StepTimed) and (step.input_s, step.memory_bytes) == (0.25, 5)
        assert step.boundary[:9] == "optimizer" and len(step.boundary) == 31
        stream.close()


async def test_a_tool_outside_any_job_is_attached_to_nothing(short: str) -> None:
    async with door(short) as found:
        stream, _ = await found.say(Join(1), Hooked("torch"))
        with pytest.raises(ConnectionError):
            await read_frame(stream, decoder)
        assert found.socket.counters["malformed"] == 1


async def test_a_rank_that_may_own_tables_is_known_by_what_it_says(short: str) -> None:
    async with door(short) as found:
        stream, _ = await found.say(GOOD)
        await until(lambda: found.socket.peers(J1))
        (peer,) = found.socket.peers(J1)
        assert peer.may_own is None, "it has no tensors yet"
        await stream.write(pack(TableWanted(0, may_own=True)) + pack(TableWanted(2, may_own=True)))
        await until(lambda: len(found.facts) == 3)
        assert found.facts[1:] == [TableUsed(J1, 3, 0), TableUsed(J1, 3, 2)] and peer.may_own is True
        assert set(found.facts[1:]) <= set(found.socket.facts())
        now = Now("127.0.0.1:9", [], 0.0, 0, 0, 0)
        await stream.write(pack(SumsNow(now)))
        await until(lambda: found.heard)
        assert [frame for _, frame in found.heard] == [SumsNow(now)]
        assert not peer.gone
        stream.close()
        await until(lambda: len(found.facts) == 4)
        assert found.facts[3] == RankDisconnected(J1, 3, 1) and peer.gone


async def test_a_process_that_left_well_is_told_of_unless_another_takes_its_place(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher of the rank that is connected, too, pushes nothing in its place; what was started since may."""
    monkeypatch.setattr("agent.jobs.socket.jobs_socket.LEFT_S", 0.05)
    async with door(short) as found:

        def left() -> int:
            return found.facts.count(RankLeavesHere(J1, 3, 1))

        launcher, _ = await found.say(GOOD)
        stream, _ = await found.say(GOOD)
        stream.close()
        await until(lambda: RankDisconnected(J1, 3, 1) in found.facts)
        stream, _ = await found.say(GOOD, ProcessLeaves())
        await until(lambda: any(peer.leaves for peer in found.socket.peers(J1)))
        assert not left(), "it says so, and is still there"
        stream.close()
        await until(lambda: left() == 1)
        stream, _ = await found.say(GOOD, ProcessLeaves())
        await until(lambda: any(peer.leaves for peer in found.socket.peers(J1)))
        found.runner.started = frozenset()
        stream.close()
        await until(lambda: len(found.socket.peers(J1)) == 1)
        found.runner.started = frozenset({ProcessId(7, 7)})
        looked = found.runner.looked
        await until(lambda: found.runner.looked > looked + 2)
        assert left() == 1, "what runs now was started since"
        other, _ = await found.say(GOOD)
        await until(lambda: len(found.socket.peers(J1)) == 2)
        found.runner.started = frozenset()
        await asyncio.gather(*(task for task in asyncio.all_tasks() if "left" in task.get_name()))
        assert left() == 1, "it has joined"
        for each in (other, launcher):
            each.close()


async def test_a_rank_that_waits_in_vain_has_no_successor(short: str) -> None:
    async with door(short) as found:
        stream, _ = await found.say(GOOD, InVain("rank 0 ended"))
        await until(lambda: RankWaitsInVain(J1, 3, 1, "rank 0 ended") in found.facts)
        assert found.runner.healing == {1: NEVER}
        stream.close()


async def test_no_rank_counts_as_gone_because_its_agent_stops(short: str) -> None:
    async with door(short) as found:
        stream, _ = await found.say(GOOD)
        await until(lambda: found.facts)
        await found.socket.stop()
        await until(lambda: not found.socket.peers(J1))
        assert found.facts == [JobJoined(J1, 3, 1)]
        stream.close()


@pytest.mark.parametrize(
    "frame",
    [TableWanted(-1), TableWanted(16), SumsOrder(GetStatus(), "127.0.0.1"), SumsNow(Now("", [], -1.0, 0, 0, 0))],
)
async def test_what_no_rank_says_of_tables_ends_its_connection(short: str, frame: Frame) -> None:
    async with door(short) as found:
        stream, _ = await found.say(GOOD, frame)
        await until(lambda: found.socket.counters["malformed"])
        assert not found.heard and found.facts == [JobJoined(J1, 3, 1), RankDisconnected(J1, 3, 1)]
        stream.close()


async def test_other_frames_go_to_the_plugins_in_order_and_a_refusal_comes_back(short: str) -> None:
    def refuse(peer: JobPeer, frame: Frame) -> None:
        if isinstance(frame, VolumeWanted):
            raise Refused(4, "cannot open", "no room", "agentctl slabs")
        peer.send(AggregatorAt(J1, 5, HostId("h2"), "127.0.0.1:9", b"s"))

    async with door(short) as found:
        found.answer = refuse
        stream, _ = await found.say(GOOD, AggregatorLost(4, "reset"), VolumeWanted("v", 1))
        assert await read_frame(stream, decoder) == AggregatorAt(J1, 5, HostId("h2"), "127.0.0.1:9", b"s")
        assert await read_frame(stream, decoder) == Refusal("cannot open", "no room", "agentctl slabs")
        assert [frame for _, frame in found.heard] == [AggregatorLost(4, "reset"), VolumeWanted("v", 1)]
        stream.close()


async def test_a_process_that_does_not_read_is_cut_off_and_the_others_are_served(short: str) -> None:
    async with door(short) as found:
        slow, _ = await found.say(GOOD)
        await until(lambda: found.socket.peers(J1))
        (peer,) = found.socket.peers(J1)
        moved = AggregatorAt(J1, 1, HostId("h2"), "a" * 10_000, b"")
        for _ in range(400):
            peer.send(moved)
            await asyncio.sleep(0)
        await until(lambda: not found.socket.peers(J1))
        other, answer = await found.say(msgspec.structs.replace(GOOD, rank=0))
        assert isinstance(answer, Joined)
        slow.close()
        other.close()


async def test_a_flood_of_steps_leaves_the_loop_its_turns(short: str) -> None:
    async with door(short) as found:
        stream, _ = await found.say(GOOD)
        flood = asyncio.ensure_future(stream.write(pack(Stepped(1, 0.1)) * 20_000))
        turns = 0
        while found.socket.counters["steps"] < 20_000:
            await asyncio.sleep(0)
            turns += 1
        await flood
        assert turns > 20_000 // (2 * jobs_module.FRAMES_AT_ONCE)
        stream.close()


async def test_a_silent_connection_is_closed(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "JOIN_S", 0.01)
    async with door(short) as found:
        stream = await found.connect()
        with pytest.raises(ConnectionError):
            await read_frame(stream, decoder)


async def test_no_more_processes_than_the_limit_are_served(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "PEERS_MAX", 2)
    async with door(short) as found:
        streams = [await found.say(Join(pid=number)) for number in range(3)]
        assert [type(answer) for _, answer in streams] == [Joined, Joined, Refusal]
        for stream, _ in streams:
            stream.close()


async def test_a_frame_that_announces_too_much_is_refused_before_anything_is_allocated(short: str) -> None:
    async with door(short) as found:
        stream = await found.connect()
        await stream.write(struct.pack("<I", FRAME_BYTES_MAX + 1))
        with pytest.raises(ConnectionError):
            await read_frame(stream, decoder)
        assert found.socket.counters["malformed"] == 1


async def test_a_process_that_keeps_sending_garbage_is_shut_out_and_does_not_fill_the_log(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with door(short) as found:
        for _ in range(OFFENCES_MAX):
            stream = await found.connect()
            await stream.write(struct.pack("<I", FRAME_BYTES_MAX + 1))
            with pytest.raises(ConnectionError):
                await read_frame(stream, decoder)
        for _ in range(20):
            stream = await found.connect()
            with pytest.raises(ConnectionError):
                await stream.write(pack(GOOD))
                await read_frame(stream, decoder)
        counters = found.socket.counters
        assert (counters["malformed"], counters["shut_out"], counters["joined"]) == (OFFENCES_MAX, 20, 0)
        assert found.host.lines.text.count("malformed frame") == OFFENCES_MAX
        clock, real = found.host.env.clock, RealClock()
        monkeypatch.setattr(clock, "now_s", lambda: real.now_s() + FORGIVE_S + 1)
        _, answer = await found.say(GOOD)
        assert isinstance(answer, Joined), "it kept quiet for a while"


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with a few bytes changed, cut or doubled."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[at:at] = rng.randbytes(rng.randint(1, 4))
            case 1:
                del changed[at : at + rng.randint(1, 8)]
            case 2 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case _:
                changed += changed[at:]
    return bytes(changed)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=200), st.integers(0, 1 << 30)))
def test_nothing_that_is_sent_to_it_harms_the_socket(short: str, attack: bytes | int) -> None:
    """Random bytes, and mutations of good conversations: afterwards an honest rank joins and is heard."""
    if isinstance(attack, int):
        rng = random.Random(attack)
        talk = [GOOD, Stepped(1, 0.5, metrics={"loss": 1.0}), AggregatorLost(1, "why"), VolumeWanted("v", 1)]
        attack = mutated(b"".join(map(pack, talk)), rng)

    async def story() -> None:
        async with door(short) as found:
            with socket.socket(socket.AF_UNIX) as hostile:
                hostile.connect(found.address.removeprefix("unix:"))
                hostile.sendall(attack)
                hostile.shutdown(socket.SHUT_WR)
                stream, answer = await found.say(msgspec.structs.replace(GOOD, rank=0), Stepped(99, 0.5))
                assert isinstance(answer, Joined)
                await until(lambda: any(isinstance(f, StepTimed) and f.step == 99 for f in found.facts))
                stream.close()
            await until(lambda: not found.socket.peers(J1))
            assert "connection failed" not in found.host.lines.text

    asyncio.run(story())


async def test_counters_are_metrics(short: str) -> None:
    async with door(short) as found:
        stream, _ = await found.say(GOOD)
        await until(lambda: found.socket.peers(J1))
        assert found.socket.metrics()[JOB_PROCESSES.of()] == 1.0
        assert found.socket.metrics()[JOB_FRAMES.of("joined")] == 1.0
        stream.close()


ELASTIC = msgspec.structs.replace(
    FOUR, config=5, ranks=(RankSpec(0, 0, ()), RankSpec(1, 1, ())), carried={0: (0, 2), 1: (1, 3)}
)
"""The processes 0 and 1 of an elastic job of 4 ranks, in its fifth configuration."""


async def test_a_process_of_an_elastic_job_hears_what_it_carries_and_whenever_that_changes(short: str) -> None:
    async with door(short) as found:
        found.runner.known = ELASTIC
        stream, answer = await found.say(GOOD)
        assert isinstance(answer, Joined) and answer.world_size == 4
        assert not answer.tensor_memory, "the processes here change, and those of before have their memory"
        assert await read_frame(stream, decoder) == Carries(5, {0: (0, 2), 1: (1, 3)})
        assert found.runner.joined == [1]
        await until(lambda: found.socket.peers(J1))
        found.runner.known = msgspec.structs.replace(
            ELASTIC, config=6, ranks=(RankSpec(1, 0, ()),), carried={1: (1, 3, 0)}
        )
        found.socket.say_carries(J1, 2)
        found.socket.say_carries(J1, 3)
        assert await read_frame(stream, decoder) == Carries(6, {1: (1, 3, 0)})
        stream.close()
        await until(lambda: not found.runner.joined)


async def test_a_process_hears_what_it_carries_from_the_next_agent_too(short: str) -> None:
    """It may have changed while there was none."""
    async with here(short) as host:
        each: dict[int, tuple[int, ...]] = {5: (1, 3), 9: (1,)}
        for config, carries in each.items():
            found = Door(host)
            only = {"ranks": (RankSpec(1, 0, ()),), "carried": {1: carries}}
            found.runner.known = msgspec.structs.replace(ELASTIC, config=config, **only)
            await found.socket.start()
            stream, _ = await found.say(GOOD)
            assert await read_frame(stream, decoder) == Carries(config, {1: carries})
            stream.close()
            await found.socket.stop()


async def test_a_process_that_left_hears_nothing_more_and_is_refused_when_it_joins_again(short: str) -> None:
    async with door(short) as found:
        found.runner.known = ELASTIC
        stream, _ = await found.say(GOOD)
        assert await read_frame(stream, decoder) == Carries(5, {0: (0, 2), 1: (1, 3)})
        found.runner.known = msgspec.structs.replace(
            ELASTIC, config=6, ranks=(RankSpec(0, 0, ()),), carried={0: (0, 1, 2, 3)}
        )
        found.socket.say_carries(J1, 3)
        asked = Stopping(60.0, "preempted")
        for peer in found.socket.peers(J1):
            peer.send(asked)
        assert await read_frame(stream, decoder) == asked
        _, answer = await found.say(GOOD)
        assert isinstance(answer, Refusal) and "that rank does not run on h1" in answer.why


async def test_a_job_without_a_range_hears_of_nothing_that_it_carries(short: str) -> None:
    async with door(short) as found:
        stream, _ = await found.say(GOOD)
        await until(lambda: found.socket.peers(J1))
        found.socket.say_carries(J1, 3)
        asked = Stopping(60.0, "preempted")
        for peer in found.socket.peers(J1):
            peer.send(asked)
        assert await read_frame(stream, decoder) == asked

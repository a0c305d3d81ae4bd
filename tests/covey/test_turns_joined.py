"""A process gets its page of turns over the real jobs.sock, and its script takes turns around sums."""

import asyncio
import random
import time

import numpy as np
import pytest
from msgspec.structs import replace

from agent.ports.memory.pages import MemfdPage, MemfdPages
from covey.core.ids import JobId
from covey.job.client import JobClient
from covey.job.heartbeats import Heartbeats
from covey.job.page_link import PageLink
from covey.job.step_clock import StepClock, ToldStep
from covey.job.tensors import TensorClient
from covey.kernel.pages import PAGE_BYTES
from covey.tensors.numbers.arrays import Array
from covey.tensors.turns.holder import ProcessTurns
from covey.tensors.turns.page import TurnsPage
from covey.tensors.turns.rules import HOLDS
from covey.tensors.turns.spent import TurnsSpent
from covey.wire.frames import FrameError, pack
from covey.wire.job import Join, TurnsHere, decoder
from plugins.base import JobPeer
from tests.agent.here import until
from tests.covey.agents import J1, Agent

STEP = ToldStep(None, 2.0, None, 0.5, 0.25, 0, {}, "script")


def peer_of(agent: Agent, rank: int) -> JobPeer:
    (found,) = [peer for peer in agent.socket.peers(J1) if peer.rank == rank]
    return found


async def joined(agent: Agent, rank: int = 1) -> JobClient:
    client = await agent.client(COVEY_RANK=str(rank))
    await until(lambda: any(peer.rank == rank for peer in agent.socket.peers(J1)))
    return client


async def test_a_process_takes_turns_on_the_page_that_its_agent_hands_it(agent: Agent) -> None:
    client, page = await joined(agent), MemfdPages().make_handed(PAGE_BYTES)
    turns = TurnsPage(page.view)
    turns.prepare()
    turns.assign(0, 1, 0)
    assert not client.turns.on
    peer_of(agent, 1).hand(TurnsHere(0, 1), page)
    await until(lambda: client.turns.on)
    client.turns.computes()
    assert turns.claims("comp", 0) == [] and len(turns.claims("comp", client.turns._now_ns())) == 1
    await asyncio.to_thread(client.close)
    assert turns.claims("comp", client.turns._now_ns()) == [], "a process that leaves gives its turns"
    page.close()


async def test_a_process_goes_on_with_its_page_while_no_agent_is_there(agent: Agent) -> None:
    client, page = await joined(agent), MemfdPages().make_handed(PAGE_BYTES)
    turns = TurnsPage(page.view)
    turns.prepare()
    for slot in range(2):
        turns.assign(slot, slot + 1, slot)
    peer_of(agent, 1).hand(TurnsHere(0, 1), page)
    await until(lambda: client.turns.on)
    other = ProcessTurns()
    other.page_came(page.view, 1, 1)
    await agent.socket.stop()
    other.computes()
    waiting = asyncio.create_task(asyncio.to_thread(client.turns.computes))
    await until(lambda: client.turns.waits)
    other.computed()
    await waiting
    assert [claim.slot for claim in turns.claims("comp", time.monotonic_ns()) if claim.state == HOLDS] == [0]
    assert other.lost == 0, "the turn was given, and not lost"
    other.close()
    await asyncio.to_thread(client.close)
    page.close()


@pytest.mark.parametrize("slot", [0, 7, -1, 1 << 70 - 8])
async def test_a_page_that_cannot_be_used_ends_that_connection_only(agent: Agent, slot: int) -> None:
    client, page = await joined(agent), MemfdPage("report", True)
    first = peer_of(agent, 1)
    first.hand(TurnsHere(slot, 1), page)
    await until(lambda: first.gone)
    await until(lambda: any(peer is not first for peer in agent.socket.peers(J1)))
    assert not client.turns.on
    await asyncio.to_thread(client.close)
    page.close()


def test_a_page_without_a_descriptor_is_an_error_of_the_agent() -> None:
    with pytest.raises(FrameError, match="no descriptor"):
        PageLink().writable()


async def test_a_process_does_not_say_what_only_an_agent_says(agent: Agent) -> None:
    client = await joined(agent, 0)
    reader, writer = await asyncio.open_unix_connection(agent.environ()["COVEY_SOCKET"])
    writer.write(pack(Join(1, J1, 1, 1, "secret")) + pack(TurnsHere(0, 1)))
    async with asyncio.timeout(5):
        while await reader.read(1 << 16):
            pass
    writer.close()
    assert client.connected
    await asyncio.to_thread(client.close)


def test_damaged_frames_of_turns_are_refused_and_no_other_error_comes() -> None:
    whole, refused = pack(TurnsHere(3, 1)), 0
    for seed in range(500):
        rng = random.Random(seed)
        damaged = bytearray(whole[4:])
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            decoder.decode(bytes(damaged[: rng.randint(1, len(damaged))]))
        except ValueError:  # msgspec's errors are some
            refused += 1
    assert refused > 250


def test_a_step_says_what_of_it_was_sending_and_waiting_for_turns() -> None:
    clock = StepClock()
    clock.stepped(STEP, 0.0, TurnsSpent(1.0, 3.0, 0.5))
    told = clock.stepped(STEP, 0.0, TurnsSpent(1.25, 3.75, 0.625))
    assert (told.sending_s, told.turns_s, told.communicate_s, told.input_s) == (0.25, 0.75, 0.5, 0.25)
    assert told.compute_s == 2.0 - 0.5 - 0.25 - 0.75, "waiting for a turn is no computing"
    assert told.added_s == 0.125


def test_turns_of_mini_batches_that_were_not_told_are_no_part_of_the_next_one() -> None:
    """Hooks tell of a mini-batch some times a second, and not of those in between."""
    clock, seen = StepClock(), replace(STEP, communicate_s=None, boundary="optimizer")
    clock.stepped(replace(seen, step=9), 8.0, TurnsSpent(1.0, 3.0))
    told = clock.stepped(replace(seen, step=13), 10.0, TurnsSpent(2.0, 4.0))
    assert (told.communicate_s, told.sending_s, told.turns_s) == (0.5, 0.25, 0.25)


def test_of_a_step_that_a_script_tells_hooks_say_what_it_does_not() -> None:
    """Hooks see a step of 4 s of which 1 s is input and 2 s are other ranks; the script's steps are half as long."""
    clock = StepClock()
    bare = replace(STEP, communicate_s=None, input_s=0.0)
    clock.sees(replace(STEP, step=7, step_s=4.0, input_s=1.0, communicate_s=2.0, memory_bytes=99, boundary="optimizer"))
    told = clock.stepped(bare, 0.0)
    assert (told.step, told.input_s, told.communicate_s, told.memory_bytes) == (0, 0.5, 1.0, 99)
    told = clock.stepped(replace(bare, input_s=0.25, memory_bytes=50), 0.75)
    assert (told.input_s, told.communicate_s, told.memory_bytes) == (0.25, 0.75, 50), "sums of tensors are known better"
    told = clock.stepped(replace(bare, communicate_s=0.5, boundary="optimizer"), 0.75)
    assert (told.input_s, told.communicate_s, told.memory_bytes) == (0.0, 0.5, 0), "that is what hooks say themselves"


def test_shares_of_a_step_are_no_more_than_the_step() -> None:
    """What was between two steps, such as an evaluation, is no part of the next one."""
    clock, seen = StepClock(), replace(STEP, communicate_s=None, boundary="jitted call")
    clock.stepped(replace(seen, step=0), 0.0, TurnsSpent(0.0, 0.0))
    told = clock.stepped(replace(seen, step=1), 60.0, TurnsSpent(0.0, 0.0))
    assert (told.step_s, told.input_s, told.communicate_s, told.compute_s) == (2.0, 0.25, 1.75, 0.0)
    told = clock.stepped(replace(seen, step=2, input_s=9.0), 61.0, TurnsSpent(0.0, 0.0))
    assert (told.input_s, told.communicate_s) == (2.0, 0.0)


def test_a_rank_that_waits_for_its_turn_does_not_hang() -> None:
    now_s, waits = [0.0], [True]
    beats = Heartbeats(lambda: now_s[0])
    beats.waits_for_turn = lambda: waits[0]
    now_s[0] = 500.0
    assert beats.now().quiet_s == 0.0
    waits[0] = False
    now_s[0] = 600.0
    assert beats.now().quiet_s == 100.0


class Noted(ProcessTurns):
    """Turns that note what the script does."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.did = True, list[str]()

    def computed(self) -> None:
        self.did.append("waits")

    def computes(self) -> None:
        self.did.append("computes")


def test_a_job_that_shares_no_host_asks_once_whether_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    client = TensorClient(JobId("j1"), 0, 1, lambda epoch, why, table: None)
    assert not client.turns.on
    for name in ("computed", "computes", "_take"):
        monkeypatch.setattr(client.turns, name, lambda *_: pytest.fail("a turn was taken"))
    monkeypatch.setattr(client, "_wait", lambda *_, **__: "sum")
    assert client.finish("g", None) == "sum"
    monkeypatch.undo()
    client.close()


def test_a_script_computes_from_a_result_to_the_next_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Noted()
    client = TensorClient(JobId("j1"), 0, 1, lambda epoch, why, table: None, turns=turns)

    def wait(*_: object, **__: object) -> Array:
        turns.did.append("sum")
        return np.zeros(3, np.float32)

    monkeypatch.setattr(client, "_wait", wait)
    monkeypatch.setattr(client, "_begin", lambda *_, **__: turns.did.append("push"))
    handle = client.push("g", np.zeros(3, np.float32))
    handle.wait()
    client.push_pull("g", np.zeros(3, np.float32))
    assert turns.did == [
        *("push", "waits", "sum", "computes"),
        *("waits", "push", "waits", "sum", "computes"),
    ], "a push alone does not end a COMP: the script computes on; one that waits at once gives the processors first"
    monkeypatch.undo()
    client.close()

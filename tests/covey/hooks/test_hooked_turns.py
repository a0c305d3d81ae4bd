"""PyTorch scripts without a line about Covey take turns to compute: real processes, on a page of this test."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agent.ports.memory.pages import MemfdPages
from covey.kernel.pages import PAGE_BYTES
from covey.tensors.turns.holder import ProcessTurns
from covey.tensors.turns.page import LOST, USE, TurnsPage
from covey.tensors.turns.rules import HOLDS, WAITS
from covey.wire.job import TurnsHere
from tests.agent.here import until
from tests.covey.agents import J1, Agent
from tests.covey.hooks.torch_jobs import NEEDS_TORCH, TorchRank, gate_folder, running

pytestmark = NEEDS_TORCH
TELLS = """
def tell(word):
    with open(os.environ["TOLD"], "a") as lines: lines.write(f"{word} {time.monotonic()}\\n")
def batch(seconds=0.02):
    x + 0
    tell("begins"); work(seconds); tell("ends")
    o.zero_grad(); o.step()
def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end: model(x).square().mean().backward()
"""
TRAINS = TELLS + "while True: batch()"
SLEEPS = (
    TELLS
    + """
while True:
    batch(); x + 0
    tell("sleeps"); time.sleep(0.7); tell("woke")
"""
)


class Host:
    """A page of turns, and scripts that are on it, each of a job of its own."""

    def __init__(self, agent: Agent, folder: Path) -> None:
        self._agent, self._folder = agent, folder
        self.page = MemfdPages().make_handed(PAGE_BYTES)
        self.turns = TurnsPage(self.page.view)
        self.turns.prepare()
        self._scripts = AsyncExitStack()

    async def run(self, slot: int, script: str, **environ: str) -> TorchRank:
        """Run the script as a job of its own in this slot."""
        self.turns.assign(slot, slot + 1, slot)
        more = {"COVEY_GATE": str(gate_folder()), "TOLD": str(self._folder / str(slot)), **environ}
        rank = await self._scripts.enter_async_context(running(self._agent, script, rank=slot, **more))
        (peer,) = [peer for peer in self._agent.socket.peers(J1) if peer.rank == slot]
        peer.hand(TurnsHere(slot, self.turns.get(slot, USE)), self.page)
        return rank

    def beside(self, slot: int) -> ProcessTurns:
        """This test, as a process of another job."""
        self.turns.assign(slot, slot + 1, slot)
        made = ProcessTurns(worked_s=time.monotonic)  # as if it computed all the time
        made.page_came(self.page.view, slot, self.turns.get(slot, USE))
        return made

    def doing(self, state: int) -> list[int]:
        """Slots that hold COMP, or wait for it."""
        return [claim.slot for claim in self.turns.claims("comp", time.monotonic_ns()) if claim.state == state]

    def told(self, slot: int) -> list[tuple[str, float]]:
        """What the script in this slot told, and when (CLOCK_MONOTONIC)."""
        path = self._folder / str(slot)
        lines = path.read_text().splitlines() if path.exists() else []
        return [(line.split()[0], float(line.split()[1])) for line in lines if line.count(" ") == 1]

    def spans(self, slot: int, begins: str = "begins", ends: str = "ends") -> list[tuple[float, float]]:
        """From each of these words to the next of those."""
        found, began_s = list[tuple[float, float]](), 0.0
        for word, at_s in self.told(slot):
            if word == begins:
                began_s = at_s
            elif word == ends and began_s:
                found.append((began_s, at_s))
        return found

    async def close(self) -> None:
        await self._scripts.aclose()
        self.page.close()


@pytest.fixture
async def host(agent: Agent, tmp_path: Path) -> AsyncIterator[Host]:
    made = Host(agent, tmp_path)
    yield made
    await made.close()


def overlaps(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> int:
    """How many of these spans overlap with one of those."""
    return sum(any(a < d and c < b for c, d in others) for a, b in some)


async def test_two_scripts_that_only_have_hooks_compute_in_turns(host: Host) -> None:
    for slot in range(2):
        await host.run(slot, TRAINS)
    await until(lambda: len(host.turns.claims("comp", time.monotonic_ns())) == 2, 20)
    since_s = time.monotonic() + 1.0
    await until(lambda: all(len([s for s in host.spans(slot) if s[0] > since_s]) > 30 for slot in range(2)), 60)
    first, second = ([s for s in host.spans(slot) if s[0] > since_s] for slot in range(2))
    assert overlaps(first, second) <= len(first) // 20, (len(first), len(second))


async def test_while_one_script_waits_another_computes(host: Host) -> None:
    """It sleeps for less than a second, after which a turn that is not used would be lost anyhow."""
    for slot, script in enumerate([SLEEPS, TRAINS]):
        await host.run(slot, script)
    await until(lambda: len(host.spans(0, "sleeps", "woke")) > 6, 60)
    (sleeping,) = host.spans(0, "sleeps", "woke")[5:6]
    within = [span for span in host.spans(1) if sleeping[0] + 0.3 < span[0] < sleeping[1]]
    assert within and host.turns.get(0, LOST) == 0, (sleeping, host.spans(1)[-40:])


async def test_a_script_that_is_killed_while_it_computes_frees_its_turn(host: Host) -> None:
    rank = await host.run(0, TRAINS)
    mine = host.beside(1)
    await until(lambda: host.doing(HOLDS) == [0], 20)
    rank.process.send_signal(signal.SIGKILL)
    assert host.doing(HOLDS) == [0], "it had no time to give it"
    began_s = time.monotonic()
    await asyncio.to_thread(mine.begins)
    assert time.monotonic() - began_s < 4.0, "two seconds, and two for a machine that is busy"
    assert host.doing(HOLDS) == [1]
    mine.close()


INTERRUPTED = (
    TELLS
    + """
waits = False
try:
    while True:
        tell("begins"); work(0.01); o.step()
except KeyboardInterrupt:
    tell("interrupted")
time.sleep(60)
"""
)


async def test_a_signal_reaches_a_script_that_waits_for_its_turn_and_no_wish_is_left(host: Host) -> None:
    rank = await host.run(0, INTERRUPTED)
    mine = host.beside(1)
    await until(lambda: host.doing(HOLDS) == [0], 20)
    await asyncio.to_thread(mine.begins)
    await until(lambda: host.doing(WAITS) == [0])
    assert host.doing(HOLDS) == [1]
    rank.process.send_signal(signal.SIGINT)
    await until(lambda: host.told(0)[-1][0] == "interrupted")
    await until(lambda: not host.doing(WAITS), 2.0)
    assert host.doing(HOLDS) == [1] and rank.process.returncode is None
    mine.close()


ALONE = (
    TELLS
    + """
def callbacks():
    from covey.hooks.turns import hooked
    return int(hooked.of_process().on)
while True:
    batch(); tell(f"on{callbacks()}")
"""
)


async def test_a_script_that_is_alone_is_asked_nothing(host: Host) -> None:
    await host.run(0, ALONE)
    await until(lambda: len(host.told(0)) > 30, 20)
    assert not host.doing(HOLDS) and {word for word, _ in host.told(0)} == {"begins", "ends", "on0"}
    mine = host.beside(1)
    await until(lambda: host.told(0)[-1][0] == "on1", 20)
    await asyncio.to_thread(mine.begins)
    mine.close()
    host.turns.free(1)
    await until(lambda: host.told(0)[-1][0] == "on0", 20)
    assert not host.doing(HOLDS)

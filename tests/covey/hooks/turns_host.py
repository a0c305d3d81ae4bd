"""Scripts that only have hooks on a page of turns, each of a job of its own, and what they say of their times."""

import itertools
import time
from contextlib import AsyncExitStack
from pathlib import Path

from agent.ports.memory.pages import MemfdPages
from covey.kernel.pages import PAGE_BYTES
from covey.tensors.turns.holder import ProcessTurns
from covey.tensors.turns.page import USE, TurnsPage
from covey.wire.job import TurnsHere
from tests.agent.here import until
from tests.covey.agents import J1, Agent
from tests.covey.hooks.torch_jobs import HEAD, TorchRank, gate_folder, running

TELL = """
import os, time
def tell(word):
    with open(os.environ["TOLD"], "a") as lines: lines.write(f"{word} {time.monotonic()}\\n")
"""


class Host:
    """A page of turns, and scripts that are on it, each of a job of its own."""

    def __init__(self, agent: Agent, folder: Path) -> None:
        self._agent, self._folder = agent, folder
        folder.mkdir(exist_ok=True)
        self.page = MemfdPages().make_handed(PAGE_BYTES)
        self.turns = TurnsPage(self.page.view)
        self.turns.prepare()
        self._scripts = AsyncExitStack()

    async def run(self, slot: int, script: str, head: str = HEAD, **environ: str) -> TorchRank:
        """Run the script as a job of its own in this slot, with PyTorch's gate where the environment names no other."""
        gate = environ.get("COVEY_GATE") or str(gate_folder())
        more = {**environ, "COVEY_GATE": gate, "TOLD": str(self._folder / str(slot))}
        rank = await self._scripts.enter_async_context(running(self._agent, script, slot, head, **more))
        self.hand(slot, slot, self._agent, slot)
        return rank

    def hand(self, slot: int, place: int, agent: Agent, rank: int) -> None:
        """Give a rank of this agent the slot, and its job this place in the order."""
        self.turns.assign(slot, slot + 1, place)
        (peer,) = [peer for peer in agent.socket.peers(J1) if peer.rank == rank]
        peer.hand(TurnsHere(slot, self.turns.get(slot, USE)), self.page)

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


def one_at_a_time(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> bool:
    """Whether three of four of these spans, at least, overlap with none of those: on a busy machine a turn is lost now
    and then. Without turns nearly all overlap."""
    return sum(any(a < d and c < b for c, d in others) for a, b in some) <= len(some) // 4


def changes(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> int:
    """How often one of these spans comes next to one of those."""
    whose = [slot for _, slot in sorted([*((at, 0) for at, _ in some), *((at, 1) for at, _ in others)])]
    return sum(a != b for a, b in itertools.pairwise(whose))


async def both_computed(host: Host) -> list[list[tuple[float, float]]]:
    """From when to when each of the two scripts of this host computed, 30 times at least."""
    await until(lambda: len(host.turns.claims("comp", time.monotonic_ns())) == 2, 60)
    since_s = time.monotonic() + 1.0

    def spans(slot: int) -> list[tuple[float, float]]:
        return [span for span in host.spans(slot) if span[0] > since_s]

    await until(lambda: all(len(spans(slot)) > 30 for slot in range(2)), 120)
    return [spans(slot) for slot in range(2)]

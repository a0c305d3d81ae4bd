"""Every acknowledged write is what is read, whatever dies: one fault after another against a shadow copy, by seed.
Each fault strikes right after a write was acknowledged, with the disk far behind. They come one at a time, with
a pause in which the plugin recovers: promised is that no *single* failure loses a byte. The volume's process is
killed, the lender's slab process killed, a lender without power, any agent killed, a lender short of memory, a lender
cut off the network.
"""

import asyncio
import random
from collections.abc import Callable

import pytest

from chaos.world.host import SimProcess
from chaos.world.world import World
from covey.core.ids import HostId
from tests.families import in_gate
from tests.plugins.memory.rack import PAGE, MemoryRack, SimClient, pattern

PAGES = 64
PAUSE_S = 6.0
FAULTS = ("kill vold", "kill slabd", "power off", "kill agent", "kill lender's agent", "short of memory", "cut")


class Shadow:
    """A client that knows what every page must hold."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.content = [bytes(PAGE)] * PAGES
        self.version = 0
        self.checked = 0
        self.stop = False
        self.trap: Callable[[], None] | None = None
        """A fault that is sprung right after the next write is acknowledged."""

    async def work(self, client: SimClient) -> None:
        while not self.stop:
            await self.once(client)
            await asyncio.sleep(self.rng.choice((0.0, 0.01, 0.05)))
        for page in range(PAGES):
            assert await client.read(page, 1) == self.content[page], f"page {page} at the end"

    async def once(self, client: SimClient) -> None:
        first = self.rng.randrange(PAGES)
        count = self.rng.randint(1, min(20, PAGES - first))
        kind = self.rng.random()
        if kind < 0.55:
            self.version += 1
            new = [pattern(first + at, self.version) for at in range(count)]
            await client.write(first, b"".join(new))
            self.content[first : first + count] = new
            self._spring()
        elif kind < 0.93:
            read = await client.read(first, count)
            assert read == b"".join(self.content[first : first + count]), f"pages {first}..{first + count - 1}"
            self.checked += count
        elif kind < 0.97:
            await client.discard(first, count)
            self.content[first : first + count] = [bytes(PAGE)] * count
        else:
            await client.flush()

    def _spring(self) -> None:
        trap, self.trap = self.trap, None
        if trap is not None:
            trap()


def strike(rack: MemoryRack, fault: str, rng: random.Random) -> None:
    lenders = sorted({slab.lender for slab in rack.slabs("h1") if slab.lender is not None}) or [HostId("h2")]
    lender = rng.choice(lenders)
    match fault:
        case "kill vold":
            kill(rack.host("h1").find("vold-data"))
        case "kill slabd":
            kill(rack.host(lender).find("slabd"))
        case "power off":
            rack.host(lender).power_off()
            rack.declare(lender, "gone")
        case "kill agent":
            rack.processes["h1"].signal(9)
        case "kill lender's agent":
            rack.processes[lender].signal(9)
        case "short of memory":
            probes = rack.host(lender).probes
            probes.filled_bytes = probes.total_bytes - probes.used_bytes
        case _:
            rack.world.network.cut([("h1", lender), (lender, "h1")])


def kill(processes: list[SimProcess]) -> None:
    for process in processes:
        process.signal(9)


def heal(rack: MemoryRack) -> None:
    rack.world.network.heal()
    for name in sorted(rack.world.hosts):
        host = rack.host(name)
        host.probes.filled_bytes = 0
        if not host.up:
            host.power_on()
        elif not rack.processes[name].alive:
            host.start_agent()
        rack.states[name] = "alive"


@pytest.mark.parametrize("seed", in_gate(1, range(6)))
def test_every_read_finds_what_was_acknowledged_through_every_single_failure(seed: int) -> None:
    rng = random.Random(seed)
    with World(seed) as world:
        rack = MemoryRack(world, 4)
        rack.run(2)
        rack.attach("h1", "data", f"{PAGES * 4} KiB")
        shadow = Shadow(rng)
        client = rack.client("h1", shadow.work, "data")
        rack.run(4)
        faults = list(FAULTS)
        rng.shuffle(faults)
        for fault in faults:
            rack.host("h1").disk.slow = rng.choice((1.0, 50.0, 500.0))
            rack.run(0.5)
            shadow.trap = lambda fault=fault: strike(rack, fault, rng)
            rack.until(lambda: shadow.trap is None)
            rack.run(rng.uniform(0.1, 4.0))
            rack.host("h1").disk.slow = 1.0
            heal(rack)
            rack.run(PAUSE_S)
            assert client.process.alive, f"seed {seed}, after {fault}: {client.error}"
        shadow.stop = True
        rack.until(lambda: client.done or not client.process.alive)
        assert client.done, f"seed {seed}: {client.error}"
        assert shadow.checked > 1000
        assert sum(slab.pages_remote for slab in rack.slabs("h1")) > 0
        placed = [event for host, subject, event, _ in rack.notes if event == "mapped"]
        assert len(placed) >= 4

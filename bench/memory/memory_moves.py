"""What a program notices of slabs that move: a volume's slabs move from one lender to another while it reads and
writes.

    python bench/memory/memory_moves.py                                    # two slabs of 64 MiB at once, three rounds
    python bench/memory/memory_moves.py --slabs 1 --programs 4 --rounds 5

Programs, each over a connection of its own and one page after the other, nine tenths of them in a popular tenth, one
in five written. After `--seconds`, `--slabs` slabs are opened at the other lender at the same moment, as an eviction
has it; once all that they hold is there, the first place is closed and freed. All processes are real ones of this
machine (a volume's process and its log, two slab processes over TCP); agents are not part of it, nor is their search.

Printed for each round: pages a second before; in parts of that the `--seconds` after the first order, and the time of
the moves alone; how long they took; how long requests took before and meanwhile; processor time while it moved.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.memory.memory_path import cpu_s
from covey.core.units import MIB
from covey.wire import frames
from plugins.memory.datapath.wire.control import (
    CloseSlabFrame,
    ControlHello,
    FreeSlabFrame,
    ListSlabs,
    OpenSlabFrame,
    RegisterSlabFrame,
    SlabCopiedFrame,
    SlabList,
    Yes,
    answer_decoder,
)
from tests.covey.live_volume import PAGE, LiveVolume, heard, scripted, tell, until
from tests.covey.live_volume import SECRET as LENDERS

SLAB, SIZE = 64 * MIB, 256 * MIB
SECRET = b"s" * 16
PROGRAM = """
import json, random
memory = RemoteMemory.at(PATH)
pages, rng = memory.size // 4096, random.Random(int(os.environ.get("SEED", "1")))
order = list(range(pages))
random.Random(1).shuffle(order)
few, data = pages // 10, os.urandom(4096)
print("ready", flush=True)
sys.stdin.readline()
while True:
    took = []
    until = time.monotonic() + 0.1
    while (began := time.monotonic()) < until:
        page = order[rng.randrange(few if rng.random() < 0.9 else pages)]
        if rng.random() < 0.2:
            memory.write(page * 4096, data)
        else:
            memory.read(page * 4096, 4096)
        took.append(time.monotonic() - began)
    print(json.dumps([time.monotonic(), took]), flush=True)
"""


class Slice(NamedTuple):
    at_s: float
    """Time at which the slice ended; it is a tenth of a second long."""
    took_s: list[float]
    """Seconds that each request took."""


class Listener(threading.Thread):
    """A thread that listens to one program."""

    def __init__(self, process: Any) -> None:
        super().__init__(daemon=True)
        self.found: list[Slice] = []
        self._process = process

    def run(self) -> None:
        for line in self._process.stdout:
            self.found.append(Slice(*json.loads(line)))


class Moved(NamedTuple):
    rate: float
    """Pages a second before the move."""
    after: float
    """Rate after the first order, in parts of `rate`."""
    meanwhile: float
    moved_s: float
    before_p99_s: float
    p99_s: float
    """99th percentile while the slab moved, in seconds."""
    longest_s: float
    cpu_s: tuple[float, float, float]
    """CPU seconds of the volume's process, and of the first and the second slab process, while the slab moved."""


class SecondLender(LiveVolume):
    """Another slab process, for the same volume, under epoch 2."""

    def lend(self) -> None:
        until(lambda: os.path.exists(f"{self.run_dir}/slabd.sock"))
        listed = self.ask("slabd", ListSlabs(1))
        assert isinstance(listed, SlabList)
        self.address = listed.address

    def start_vold(self) -> None:
        pass

    def lend_slab(self, index: int, page_bytes: int) -> OpenSlabFrame:
        size = SLAB // PAGE * page_bytes
        asked = RegisterSlabFrame(1, "h1", "data", index, 2, size, page_bytes, SECRET)
        assert isinstance(self.ask("slabd", asked), Yes)
        return OpenSlabFrame(1, index, 2, "h3", self.address, SECRET)


@contextmanager
def programs(volume: LiveVolume, count: int) -> Iterator[list[Listener]]:
    with ExitStack() as stack:
        texts = [f"os.environ['SEED'] = '{n}'\n{PROGRAM}" for n in range(count)]
        processes = [stack.enter_context(scripted(volume, text)) for text in texts]
        for process in processes:
            heard(process)
        listeners = [Listener(process) for process in processes]
        for process, listener in zip(processes, listeners, strict=True):
            tell(process)
            listener.start()
        yield listeners


def copied(volume: LiveVolume, orders: list[OpenSlabFrame]) -> None:
    """Open these places, and return when all that their slabs hold is there."""
    missing = {order.index for order in orders}
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(60.0)
        stream.connect(f"{volume.run_dir}/vold-data.sock")
        stream.sendall(b"".join(map(frames.pack, (ControlHello(LENDERS), *orders))))
        while missing:
            size = frames.body_size(stream.recv(4, socket.MSG_WAITALL))
            said = frames.unpack(stream.recv(size, socket.MSG_WAITALL), answer_decoder)
            if isinstance(said, SlabCopiedFrame):
                missing.discard(said.index)
            else:
                assert isinstance(said, Yes), said


def fill(volume: LiveVolume) -> None:
    volume.run("""
with RemoteMemory.at(PATH) as memory:
    for at in range(0, memory.size, 1 << 20):
        memory.write(at, os.urandom(1 << 20))
    memory.flush()
""")


def moved(slabs: int, seconds: float, count: int) -> Moved:
    second = SecondLender(SIZE, slab=SLAB)
    with LiveVolume(SIZE, slab=SLAB) as volume, second:
        fill(volume)
        pids = [volume.processes["vold"].pid, volume.processes["slabd"].pid, second.processes["slabd"].pid]
        orders = [second.lend_slab(index, PAGE) for index in range(slabs)]
        with programs(volume, count) as listeners:
            time.sleep(1.0 + seconds)
            cpu, began_s = [cpu_s(pid) for pid in pids], time.monotonic()
            copied(volume, orders)
            for order in orders:
                assert isinstance(volume.ask("vold-data", CloseSlabFrame(1, order.index, 1)), Yes)
                assert isinstance(volume.ask("slabd", FreeSlabFrame(1, "h1", "data", order.index, 1)), Yes)
            ended_s, used = time.monotonic(), [cpu_s(pid) for pid in pids]
            time.sleep(max(0.0, seconds - (ended_s - began_s)))
        found = [each for listener in listeners for each in listener.found]
    before = took_in(found, began_s - seconds, began_s)
    while_it = took_in(found, began_s, ended_s)
    after = took_in(found, began_s, began_s + seconds)
    rate = len(before) / seconds
    return Moved(
        rate,
        len(after) / seconds / rate,
        len(while_it) / max(1e-9, ended_s - began_s) / rate,
        ended_s - began_s,
        statistics.quantiles(before, n=100)[98],
        statistics.quantiles(while_it, n=100)[98],
        max(while_it),
        (used[0] - cpu[0], used[1] - cpu[1], used[2] - cpu[2]),
    )


def took_in(found: list[Slice], from_s: float, to_s: float) -> list[float]:
    """Seconds that each request took that was asked in that time, as far as slices tell."""
    times: list[float] = []
    for each in found:
        at_s = each.at_s - sum(each.took_s)
        for took_s in each.took_s:
            at_s += took_s
            if from_s <= at_s < to_s:
                times.append(took_s)
    return times


def told(each: Moved) -> str:
    cpu = " + ".join(f"{s:.2f}" for s in each.cpu_s)
    moving = f"{each.meanwhile:.2f} while it moved ({each.moved_s:.2f} s)"
    late = f"99 % within {1e3 * each.before_p99_s:.2f} ms before, {1e3 * each.p99_s:.2f} meanwhile"
    return (
        f"{each.rate:7,.0f}/s before; {each.after:.3f} of it after, {moving}; {late}, "
        f"longest {1e3 * each.longest_s:.0f}; CPU {cpu} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--slabs", type=int, default=2, help="that move at once")
    parser.add_argument("--programs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="before, and after")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    rounds = []
    for _ in range(asked.rounds):
        rounds.append(moved(asked.slabs, asked.seconds, asked.programs))
        print(told(rounds[-1]), flush=True)
    middle = statistics.median(each.after for each in rounds)
    lost = f"{100 * (1 - middle) / asked.slabs:.1f} % lost for each slab of {SLAB // MIB} MiB"
    print(f"median: {middle:.3f} of the rate in {asked.seconds:g} s, {lost}")


if __name__ == "__main__":
    main()

"""Arrays in remote memory: how fast passes over one are, what a random touch costs, how much is foreseen.

    script -> fault -> pager -> unix socket -> volume's process -> TCP -> slab process      `lender`
    script -> fault -> pager -> unix socket -> a process that keeps the pages itself        `memory`: the pager alone

    python bench/memory/remote_array.py                   # both, chunks of 64 and 256 KiB, three rounds in turns
    python bench/memory/remote_array.py --only memory --rounds 5 --json PATH

128 MiB, of which 32 are local. Medians of the rounds; CPU is of each process, per 64 KiB. Needs a kernel that gives
userfaultfd.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agent.ports.devices.nvidia.nvml import NvmlDevices
from agent.ports.disk import DirectoryDisk
from agent.ports.probes import RealProbes
from agent.ports.processes.processes import ProgramBase
from agent.program import JsonLog, real_env
from agent.tasks import Tasks
from covey.core.units import MIB
from plugins.memory.datapath.links.write_buffers import WriteBuffers
from plugins.memory.datapath.vold import Front, VoldConfig
from plugins.memory.datapath.volumes.paged_volume import Done
from plugins.memory.datapath.wire.shape import Shape
from tests.covey.live_volume import PAGE, SECRET, TOKEN, LiveVolume, until

SIZE, BUDGET = 128 * MIB, 32 * MIB
CHUNKS = ("64 KiB", "256 KiB")
SCRIPT = """
import json, random, statistics
PIDS = json.loads(os.environ["PIDS"])
PIDS["script"] = os.getpid()
SIZE, BUDGET, CHUNK = int(os.environ["SIZE"]), int(os.environ["BUDGET"]), os.environ["CHUNK"]

def cpu(pid):
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

def passed(what):
    before, began = {name: cpu(pid) for name, pid in PIDS.items()}, time.perf_counter()
    what()
    took = time.perf_counter() - began
    used = {name: (cpu(pid) - before[name]) / (SIZE / 65536) * 1e6 for name, pid in PIDS.items()}
    return {"gb_s": SIZE / took / 1e9, "cpu_us": used}

found = {}
with RemoteArray(PATH, SIZE, "uint8", local_budget=BUDGET, chunk=CHUNK, way="faults") as array:
    view, rng = array.array, random.Random(1)
    PIDS["pager"] = max(int(name) for name in os.listdir("/proc") if name.isdigit()
                        and b"pager-data" in open(f"/proc/{name}/cmdline", "rb").read())
    found["first write"] = passed(lambda: view.fill(1))
    found["write"] = passed(lambda: view.fill(2))
    found["read"] = passed(lambda: view.max())
    size = array._chunk
    touches = []
    for _ in range(600):
        at = rng.randrange(SIZE)
        began = time.perf_counter()
        view[at]
        touches.append((time.perf_counter() - began) * 1e6)
    missed = [took for took in touches if took > 10]
    found["random touch us"] = statistics.median(missed)

    def rate(accesses):
        before = array.counts()
        for chunk in accesses:
            view[chunk * size]
        counts = {name: count - before[name] for name, count in array.counts().items()}
        foreseen = counts["hits"] + counts["placed"]
        return foreseen / (counts["touched"] + counts["placed"]), foreseen / max(1, counts["ahead"])

    chunks = SIZE // size
    found["foreseen, in order"] = rate(range(chunks))
    found["foreseen, every third"] = rate([at * 3 % chunks for at in range(chunks)])
    mixed, at = [], 0
    for _ in range(2 * chunks):
        random_one = rng.random() < 0.3
        mixed.append(rng.randrange(chunks) if random_one else at)
        at = at if random_one else (at + 1) % chunks
    found["foreseen, 30 % random"] = rate(mixed)
del PIDS["pager"]
with RemoteMemory.at(PATH) as memory:
    data = bytearray(SIZE)
    found["explicit read"] = passed(lambda: memory.read_into(0, data))
    found["explicit write"] = passed(lambda: memory.write_from(0, data))
print(json.dumps(found))
"""


# ---- the other side: pages in the memory of the process that serves them ---------------------------------------------


class PagesHere:
    """The part of a volume that `Front` and `VolumeSession` ask for."""

    def __init__(self, size: int) -> None:
        self.shape = Shape("data", size, PAGE, size)
        self.buffers = WriteBuffers()
        self._data, self._written = memoryview(bytearray(size)), bytearray(size // PAGE)

    def submit_read(self, first: int, into: memoryview, done: Done) -> None:
        into[:] = self._data[first * PAGE : first * PAGE + len(into)]
        done(None)

    def submit_write(self, first: int, count: int, pages: memoryview | None, done: Done) -> None:
        self._data[first * PAGE : (first + count) * PAGE] = bytes(count * PAGE) if pages is None else pages
        self._written[first : first + count] = b"\1" * count
        done(None)

    def submit_flush(self, done: Done) -> None:
        done(None)

    def never_written(self, first: int, count: int) -> bool:
        return self._written.find(1, first, first + count) < 0


async def serve(state: str, run_dir: str, size: int) -> None:
    log = JsonLog(sys.stderr)
    tasks = Tasks(log, lambda name, error: os._exit(1))
    env = real_env(
        ProgramBase("h1", state, run_dir, "127.0.0.1"), log, tasks, RealProbes(NvmlDevices(log)), DirectoryDisk(state)
    )
    config = VoldConfig(
        volume="data", size_bytes=size, page_bytes=PAGE, slab_bytes=size, token=TOKEN, secret=SECRET, queue_pages=1,
        deadline_s=1.0, uid=os.geteuid(),
    )  # fmt: skip
    front = Front(env, config, PagesHere(size), lambda told: None)  # type: ignore[arg-type]
    await env.bytes.listen(f"unix:{front.path}", front.serve, bulk=True)
    await asyncio.Event().wait()


class MemoryAlone(LiveVolume):
    """One process that keeps the pages, in the place of a volume's process and its lender."""

    def __init__(self) -> None:
        super().__init__(SIZE, lent=False)

    def start_vold(self) -> None:
        argv = (sys.executable, __file__, "--serve", self.state, self.run_dir, str(self.size))
        self.processes["vold"] = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        until(lambda: os.path.exists(self.path))


# ---- rounds ----------------------------------------------------------------------------------------------------------

SIDES: dict[str, Callable[[], LiveVolume]] = {
    "lender": lambda: LiveVolume(SIZE, slab=64 * MIB),
    "memory": MemoryAlone,
}


def measured(side: str, chunk: str) -> dict[str, Any]:
    with SIDES[side]() as volume:
        pids = {name: process.pid for name, process in volume.processes.items()}
        said = volume.run(SCRIPT, within_s=300, PIDS=json.dumps(pids), SIZE=str(SIZE), BUDGET=str(BUDGET), CHUNK=chunk)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def median_of(rounds: list[Any]) -> Any:
    """The median of numbers, and of dicts and lists of them item by item."""
    if isinstance(rounds[0], dict):
        return {key: median_of([each[key] for each in rounds]) for key in rounds[0]}
    if isinstance(rounds[0], list):
        return [median_of(list(each)) for each in zip(*rounds, strict=True)]
    return statistics.median(rounds)


def lines(side: str, chunk: str, found: dict[str, Any]) -> list[str]:
    told = [f"{side}, chunks of {chunk}"]
    for what, value in found.items():
        if isinstance(value, dict):
            cpu = ", ".join(f"{name} {us:.0f}" for name, us in value["cpu_us"].items())
            told.append(f"  {what:24} {value['gb_s']:.2f} GB/s    CPU us per 64 KiB: {cpu}")
        elif isinstance(value, list):
            told.append(
                f"  {what:24} {100 * value[0]:.0f} % of accesses; {100 * value[1]:.0f} % of what was fetched ahead"
            )
        else:
            told.append(f"  {what:24} {value:.0f}")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", choices=sorted(SIDES), help="one side alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--serve", nargs=3, metavar=("STATE", "RUN_DIR", "BYTES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        import uvloop

        uvloop.run(serve(args.serve[0], args.serve[1], int(args.serve[2])))
        return
    began = time.monotonic()
    cases = [(side, chunk) for side in SIDES if args.only in (None, side) for chunk in CHUNKS]
    rounds: dict[tuple[str, str], list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for case in cases:
            rounds[case].append(measured(*case))
    found = {case: median_of(results) for case, results in rounds.items()}
    for (side, chunk), result in found.items():
        print("\n".join(lines(side, chunk, result)))
    print(f"{args.rounds} rounds, {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps({f"{side}, {chunk}": result for (side, chunk), result in found.items()}))


if __name__ == "__main__":
    main()

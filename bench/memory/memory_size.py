"""What large volumes cost: to open an empty one and one that was written, in memory, and once a second to count.

    python bench/memory/memory_size.py                  # every case, each in a process of its own
    python bench/memory/memory_size.py --only counts

Real files in a temporary directory, a real lender in the same process; only the CPU and the clock of this machine are
measured. A volume that was written is one whose log says so: its pages are holes (64 GiB would be long to write).
"""

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from agent.ports.clock import RealClock
from agent.ports.disk import DirectoryDisk
from agent.ports.loop_stalls import RunDelay
from agent.ports.memory.pages import MemfdPages
from agent.ports.network.bytes import SocketBytes
from agent.ports.processes.processes import ProgramBase, RealProcesses
from agent.tasks import Tasks
from covey.core.ids import HostId
from covey.core.units import GIB, MIB
from covey.ports.env import Env
from covey.wire import checked
from plugins.memory.datapath.lending.slab_store import SlabStore
from plugins.memory.datapath.lending.slabd import SlabServer
from plugins.memory.datapath.spill.spill_load import SegmentList, SegmentRecord
from plugins.memory.datapath.volumes.volume import Volume
from plugins.memory.datapath.wire.control import OpenPlace, RegisterSlabFrame
from plugins.memory.datapath.wire.shape import Shape
from plugins.memory.policy import log_records, spilling
from plugins.memory.policy.log_records import BATCH_BITS, ROW, RecordTable, TableKind

PAGE, SLAB = 4096, 64 * MIB
CASES = ("empty 128 GiB", "empty 1 TiB", "written 4 GiB", "written 64 GiB", "counts 4 GiB")


class Silent:
    def debug(self, event: str, **fields: Any) -> None: ...
    def info(self, event: str, **fields: Any) -> None: ...
    def warning(self, event: str, **fields: Any) -> None: ...
    def error(self, event: str, **fields: Any) -> None: ...


def an_env(directory: str) -> Env:
    tasks = Tasks(Silent(), lambda name, error: None)
    nothing = cast(Any, None)
    return Env(
        host=HostId("h1"), clock=RealClock(), rng=random.Random(1), entropy=random.Random(2).randbytes,
        spawn=tasks.spawn, log=Silent(), datagrams=nothing, links=nothing, bytes=SocketBytes(Silent()),
        disk=DirectoryDisk(directory), processes=RealProcesses(ProgramBase("h1", directory, directory, "127.0.0.1")),
        probes=nothing, pages=MemfdPages(), run_dir=directory,
    )  # fmt: skip


def rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def write_log(directory: str, size_bytes: int) -> None:
    """Write a log as a process that ended in good order left it: every page once, in an order by chance within each
    segment; their content is holes. Checksums of pages are right for those that are read below."""
    pages = size_bytes // PAGE
    length = spilling.segment_blocks(size_bytes, PAGE)
    folder = Path(directory) / "memory/volumes/data/log"
    folder.mkdir(parents=True)
    salt, segments = 7, []
    rng = np.random.default_rng(1)
    zeros = bytes(PAGE)
    for number, first in enumerate(range(0, pages, length)):
        count = min(length, pages - first)
        rows = np.zeros(count, ROW)
        rows["version"] = (1 << 40) + 1 + np.arange(first, first + count)
        rows["page"] = first + rng.permutation(count)
        rows["block"] = np.arange(count)
        for at in np.flatnonzero(rows["page"] % (1 << 14) == 0).tolist():
            rows["crc"][at] = log_records.checksum(int(rows["version"][at]), int(rows["page"][at]), zeros)
        blocks = log_records.table_blocks(count, PAGE)
        batch = (1 << BATCH_BITS) + 1 + number
        data = bytearray(blocks * PAGE)
        table = RecordTable(TableKind.ALL, number + 1, batch, batch, count, blocks, rows)
        log_records.pack_table(table, salt, memoryview(data))
        with open(folder / f"{number:08x}", "wb") as file:
            file.seek(count * PAGE)
            file.write(data)
        segments.append(SegmentRecord(number + 1, number, batch, batch, count + blocks, count, len(data)))
    listed = SegmentList(salt, PAGE, length, (1 << BATCH_BITS) + len(segments) + 1, len(segments), tuple(segments))
    (folder / "segments").write_bytes(checked.seal(listed))


async def opened(directory: str, size_bytes: int) -> dict[str, float]:
    begun_mib = rss_mib()
    env = an_env(directory)
    volume = Volume(env, Shape("data", size_bytes, PAGE, SLAB), "memory/volumes/data", 4096, 2.0, lambda told: None)
    begun_s = time.perf_counter()
    await volume.open()
    page = memoryview(bytearray(PAGE))
    await volume.read(volume.shape.pages - (1 << 14), page)
    open_s = time.perf_counter() - begun_s
    longest_s, waits_s = await longest_stall(1.0)
    await volume.close()
    return {
        "open_and_read_s": open_s,
        "rss_more_mib": rss_mib() - begun_mib,
        "longest_stall_ms": 1000 * longest_s,
        "longest_wait_for_a_processor_ms": 1000 * waits_s,
    }


async def longest_stall(seconds: float) -> tuple[float, float]:
    """Longest time in seconds that the loop was late beyond the millisecond that was asked for: by its own work, and
    for want of a processor."""
    longest_s, waits_s, end_s, delay = 0.0, 0.0, time.perf_counter() + seconds, RunDelay()
    while (now_s := time.perf_counter()) < end_s:
        waited_s = delay.now_s()
        await asyncio.sleep(0.001)
        late_s = time.perf_counter() - now_s - 0.001
        machines_s = min(late_s, delay.now_s() - waited_s)
        longest_s, waits_s = max(longest_s, late_s - machines_s), max(waits_s, machines_s)
    return longest_s, waits_s


async def counted(directory: str, size_bytes: int) -> dict[str, float]:
    """Cost of the count once a second, when one page of every slab was written since, and when nothing was."""
    env = an_env(directory)
    store = SlabStore(2 * size_bytes, env.pages)
    listener = await env.bytes.listen("127.0.0.1:0", SlabServer(env, store).serve)
    shape = Shape("data", size_bytes, PAGE, SLAB)
    volume = Volume(env, shape, "memory/volumes/data", 4096, 5.0, lambda told: None)
    await volume.open()
    for index in range(shape.slabs):
        store.register(RegisterSlabFrame(1, "h1", "data", index, 1, SLAB, PAGE, b"s" * 16))
        await volume.open_place(OpenPlace(index, 1, "h2", listener.address, b"s" * 16))
    page = memoryview(bytes(PAGE))
    answer = volume.counts(1)
    asks = hasattr(answer, "upto")
    all_s: list[float] = []
    none_s: list[float] = []
    for _ in range(5):
        for index in range(shape.slabs):
            await volume.write(index * shape.slab_pages, 1, page)
        for times in (all_s, none_s):
            begun_s = time.perf_counter()
            answer = volume.counts(1, answer.life, answer.upto) if asks else volume.counts(1)
            times.append(time.perf_counter() - begun_s)
    volume.lenders.shut()
    await volume.close()
    await listener.close()
    return {"all_changed_ms": 1000 * sorted(all_s)[2], "none_changed_ms": 1000 * sorted(none_s)[2]}


def run(case: str) -> dict[str, float]:
    kind, number, unit = case.split()
    size_bytes = int(number) * (GIB if unit == "GiB" else 1024 * GIB)
    with tempfile.TemporaryDirectory(prefix="cv") as directory:
        if kind == "written":
            write_log(directory, size_bytes)
        measured = counted if kind == "counts" else opened
        return asyncio.run(measured(directory, size_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="cases that begin so")
    parser.add_argument("--case", default="", help="this one, in this process; prints JSON")
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(run(chosen.case)))
        return
    for case in CASES:
        if case.startswith(chosen.only):
            done = subprocess.run(
                [sys.executable, __file__, "--case", case], capture_output=True, text=True, check=False
            )
            if done.returncode:
                print(f"{case:<16} failed: {done.stderr.strip().splitlines()[-1]}")
                continue
            found = json.loads(done.stdout)
            print(f"{case:<16} " + "  ".join(f"{name} {value:.3g}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()

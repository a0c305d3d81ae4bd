"""A page's way from a local NBD client to another host's memory, beside nbdkit's relay: both in one run, in turns.

    fio -> unix socket -> volume's process -> TCP -> slab process         each a process of its own; pages spill to disk
    `sealed`: pages are encrypted and authenticated in the volume's process
    `compiled`: both processes run the byte path as machine code, where a wheel or `python -m agent.compiled` brought it
    `sealed+compiled`: both, as a volume is by default where a wheel of `make dist` is installed
    fio -> unix socket -> nbdkit nbd plugin -> TCP -> nbdkit memory       no disk behind it

With `--local` the lender is on the client's own host, and nothing lies between a client and the process with the
pages:

    fio -> unix socket -> volume's process, which maps the slabs          pages spill to disk
    fio -> unix socket -> nbdkit memory                                   no disk behind it

    python bench/memory/memory_path.py                        # every case, three rounds of two seconds
    python bench/memory/memory_path.py --only randread --rounds 5 --seconds 3 --json PATH

Ratios are of medians. CPU is of the processes that serve, per request. Needs nbdkit and fio.
"""

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agent.compiled.files import install, look

if "--compiled" in sys.argv and (used := install(look())).why:  # before anything of it is imported
    raise SystemExit(used.why)

from agent.ports.memory.lock import keep_heap
from agent.program import collect_seldom
from bench.memory.memory_size import PAGE, SLAB, an_env
from covey.core.units import MIB
from plugins.memory.datapath.doors.exports import Exports
from plugins.memory.datapath.lending.slab_store import SlabStore
from plugins.memory.datapath.lending.slabd import SlabServer
from plugins.memory.datapath.volumes.volume import Volume
from plugins.memory.datapath.wire.control import OpenPlace, RegisterSlabFrame
from plugins.memory.datapath.wire.shape import Shape
from plugins.memory.policy.settings import SEAL_BYTES

SIZE = 512 * MIB
SECRET = b"s" * 16
INSTALL = "apt-get install nbdkit fio"


class Case(NamedTuple):
    kind: str
    block: str
    depth: int

    def __str__(self) -> str:
        return f"{self.kind} {self.block} depth {self.depth}"


CASES = (
    *(Case(kind, "4k", depth) for kind in ("randread", "randwrite") for depth in (1, 16, 64)),
    *(Case(kind, block, 8) for block in ("128k", "1m") for kind in ("read", "write")),
)


class Result(NamedTuple):
    iops: float
    mib_s: float
    p99_us: float
    max_ms: float
    cpu_us: tuple[float, ...]
    """CPU time of each serving process per request, in microseconds."""


# ---- what serves -----------------------------------------------------------------------------------------------------


async def serve_slabs(directory: str, sealed: bool) -> None:
    env = an_env(directory)
    keep_heap(0)  # as `slabd` does
    collect_seldom(True)
    store, page = SlabStore(2 * SIZE, env.pages), PAGE + SEAL_BYTES * sealed
    for index in range(SIZE // SLAB):
        store.register(RegisterSlabFrame(1, "h1", "data", index, 1, SLAB // PAGE * page, page, SECRET))
    listener = await env.bytes.listen("127.0.0.1:0", SlabServer(env, store).serve)
    Path(directory, "address").write_text(listener.address)  # noqa: ASYNC240
    await asyncio.Event().wait()


async def serve_volume(directory: str, sealed: bool, local: bool) -> None:
    env = an_env(directory)
    keep_heap(0)  # as `vold` does
    collect_seldom(True)
    volume = Volume(env, Shape("data", SIZE, PAGE, SLAB), "memory/volumes/data", 4096, 5.0, lambda told: None, sealed)
    volume.may_map(local)
    await volume.open()
    address = Path(directory, "address").read_text()  # noqa: ASYNC240
    for index in range(SIZE // SLAB):
        await volume.open_place(OpenPlace(index, 1, "h2", address, SECRET))
    if local:
        await all_mapped(volume)
    await Exports(env, volume).open(f"{directory}/covey.sock")
    await asyncio.Event().wait()


async def all_mapped(volume: Volume) -> None:
    for _ in range(200):
        counts = volume.counts(1)
        if counts.mapped_slabs == SIZE // SLAB:
            return
        await asyncio.sleep(0.05)
    raise SystemExit(f"{counts.mapped_slabs} of {SIZE // SLAB} slabs are mapped after 10 s: {counts.map_why}")


class Side(NamedTuple):
    name: str
    uri: str
    pids: tuple[int, ...]


@contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for(path: str) -> None:
    for _ in range(200):
        if os.path.exists(path):
            return
        time.sleep(0.05)
    raise SystemExit(f"{path} did not appear within 10 s")


def ours(stack: ExitStack, directory: str, name: str, local: bool) -> Side:
    directory = f"{directory}/{name}"
    os.mkdir(directory)
    how = [*(f"--{part}" for part in name.split("+") if part != "plain"), *(["--local"] if local else [])]
    slabd = stack.enter_context(started(sys.executable, __file__, "--serve", "slabs", directory, *how))
    wait_for(f"{directory}/address")
    time.sleep(0.2)
    vold = stack.enter_context(started(sys.executable, __file__, "--serve", "volume", directory, *how))
    wait_for(f"{directory}/covey.sock")
    children = Path(f"/proc/{vold.pid}/task/{vold.pid}/children").read_text().split()
    return Side(name, f"nbd+unix:///?socket={directory}/covey.sock", (vold.pid, slabd.pid, *map(int, children)))


def theirs(stack: ExitStack, directory: str) -> Side:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    memory = stack.enter_context(started("nbdkit", "-f", "-i", "127.0.0.1", "-p", str(port), "memory", str(SIZE)))
    time.sleep(0.5)
    path = f"{directory}/nbdkit.sock"
    relay = stack.enter_context(started("nbdkit", "-f", "-U", path, "nbd", f"uri=nbd://127.0.0.1:{port}"))
    wait_for(path)
    return Side("nbdkit", f"nbd+unix:///?socket={path}", (relay.pid, memory.pid))


def their_memory(stack: ExitStack, directory: str) -> Side:
    path = f"{directory}/nbdkit.sock"
    memory = stack.enter_context(started("nbdkit", "-f", "-U", path, "memory", str(SIZE)))
    wait_for(path)
    return Side("nbdkit", f"nbd+unix:///?socket={path}", (memory.pid,))


# ---- what asks -------------------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fio(side: Side, case: Case, seconds: float) -> Result:
    before = [cpu_s(pid) for pid in side.pids]
    found = subprocess.run(
        [
            "fio", "--name=x", "--ioengine=nbd", f"--uri={side.uri}", f"--rw={case.kind}", f"--bs={case.block}",
            f"--iodepth={case.depth}", f"--size={SIZE}", f"--runtime={seconds}", "--time_based", "--output-format=json",
        ],
        capture_output=True, check=True, text=True,
    )  # fmt: skip
    used = [cpu_s(pid) - was for pid, was in zip(side.pids, before, strict=True)]
    job = json.loads(found.stdout[found.stdout.index("{") :])["jobs"][0]["read" if "read" in case.kind else "write"]
    times = job["clat_ns"]
    per_request = tuple(1e6 * each / max(1, job["total_ios"]) for each in used)
    p99_us = times.get("percentile", {}).get("99.000000", 0) / 1e3
    return Result(job["iops"], job["bw"] / 1024, p99_us, times["max"] / 1e6, per_request)


def median(results: list[Result]) -> Result:
    plain = [statistics.median(each[at] for each in results) for at in range(4)]  # type: ignore[misc]
    cpu = tuple(statistics.median(each.cpu_us[at] for each in results) for at in range(len(results[0].cpu_us)))
    return Result(*plain, cpu)


def told(side: str, result: Result) -> str:
    cpu = " + ".join(f"{each:.1f}" for each in result.cpu_us)
    return (
        f"  {side:<15} {result.iops:9,.0f}/s {result.mib_s:7.1f} MiB/s  p99 {result.p99_us:8,.0f} us  "
        f"longest {result.max_ms:7.1f} ms  CPU {cpu} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="cases that begin so")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--local", action="store_true", help="a lender on the same host, beside nbdkit memory alone")
    parser.add_argument("--sides", default="sealed+compiled,compiled,sealed,plain", help="of ours, in this order")
    parser.add_argument("--json", default="", help="write medians there")
    parser.add_argument("--serve", nargs=2, metavar=("WHAT", "DIRECTORY"), help=argparse.SUPPRESS)
    parser.add_argument("--sealed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        import uvloop

        what, directory = chosen.serve
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if what == "slabs":
                runner.run(serve_slabs(directory, chosen.sealed))
            else:
                runner.run(serve_volume(directory, chosen.sealed, chosen.local))
    missing = [tool for tool in ("fio", "nbdkit") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"{' and '.join(missing)} not installed\nwhy: both sides are measured by fio\nnext: {INSTALL}")
    with tempfile.TemporaryDirectory(prefix="cv") as directory, ExitStack() as stack:
        names = chosen.sides.split(",") if look().files else ["plain", "sealed"]
        other = their_memory if chosen.local else theirs
        sides = (*(ours(stack, directory, name, chosen.local) for name in names), other(stack, directory))
        for side in sides:
            subprocess.run(
                ["fio", "--name=fill", "--ioengine=nbd", f"--uri={side.uri}", "--rw=write", "--bs=1m", "--iodepth=4",
                 f"--size={SIZE}"], capture_output=True, check=True,
            )  # fmt: skip
        report: dict[str, dict[str, Result]] = {}
        for case in CASES:
            if not str(case).startswith(chosen.only):
                continue
            results: dict[str, list[Result]] = {side.name: [] for side in sides}
            for _ in range(chosen.rounds):
                for side in sides:
                    time.sleep(0.3)
                    results[side.name].append(fio(side, case, chosen.seconds))
            medians = {name: median(each) for name, each in results.items()}
            report[str(case)] = medians
            ratios = [f"{name} {medians[name].iops / medians['nbdkit'].iops:.2f}x" for name in names]
            print(f"{case}: {', '.join(ratios)}", flush=True)
            for name, result in medians.items():
                print(told(name, result), flush=True)
        if chosen.json:
            Path(chosen.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

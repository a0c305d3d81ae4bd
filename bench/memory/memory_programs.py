"""Programs whose memory does not fit: swapped to a volume of remote memory, and to this host's disk, side by side.

    python bench/memory/memory_programs.py                       # as root; some six minutes
    python bench/memory/memory_programs.py --only pagerank --seconds 5

The form of Infiniswap §2.7.2 (figures 2.1 and 2.13) and of figure 2.16, with programs that run here:

    redis      4 KiB values, 95 % GET and 5 % SET over its unix socket; nine tenths of them of a popular tenth of keys
    sqlite     a table in memory, transactions of one look-up each, one in ten an update; rows are drawn in the same way
    pagerank   a graph's edges in numpy arrays, passed over from begin to end in each iteration

A limit is 100, 75 and 50 % of what the program takes without one. *disk*: a swap file here. *covey*: block device of a
volume, through nbdfuse and a loop device, on a rack of four real agents of this machine, whose log is on the same
disk. Rates are in parts of what the program does without a limit. Then, with redis at 75 %, the rate of the seconds
after in parts of that before: all slabs of the lender that has most taken back (`agentctl hosts drain`), and the slab
process of one killed.

All of it shares the processors of one machine: fio's figures of the path alone are in `memory_path.py`. Needs root,
nbdfuse, nbdkit, loop devices and redis-server; what is missing is said.
"""

import argparse
import itertools
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.memory.memory_clients import (
    HOST,
    SIZE,
    VALUE_BYTES,
    Device,
    LeftOut,
    ended,
    exported,
    kill_lender,
    limited,
    mapped,
    need,
    quietly,
    run,
    started_redis,
    swap_on,
)
from covey.core.units import MIB
from tests.rack.living_rack import living_rack, wait

SHARES = (100, 75, 50)
WARM_S, SLICE_S = 3.0, 0.5
DATA = 160 * MIB
POPULAR, OFTEN = 0.1, 0.9
"""A tenth of the keys gets nine tenths of the requests; the others share the rest."""


class Popular:
    """Random numbers below `count`, some much more often than others."""

    def __init__(self, count: int, seed: int) -> None:
        self._rng, self._count = random.Random(seed), count
        self._order = list(range(count))
        self._rng.shuffle(self._order)
        self._few = int(count * POPULAR)

    def draw(self) -> int:
        few = self._rng.random() < OFTEN
        return self._order[self._rng.randrange(self._few) if few else self._rng.randrange(self._count)]


# ---- programs: each prints a line of JSON for each slice, how much it did in how long -------------------------------


def slices(seconds: float, once: Callable[[], int]) -> None:
    """Call `once` until the time is over; it returns how much was done."""
    until_s = time.monotonic() + seconds
    done, began_s = 0, time.monotonic()
    while (now_s := time.monotonic()) < until_s:
        done += once()
        if time.monotonic() - began_s >= SLICE_S:
            print(json.dumps({"done": done, "took_s": time.monotonic() - began_s, "at_s": now_s}), flush=True)
            done, began_s = 0, time.monotonic()


def redis_client(seconds: float, path: str) -> None:
    import socket

    keys = Popular(DATA // VALUE_BYTES, 1)
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    answers = link.makefile("rb")
    value, few = os.urandom(VALUE_BYTES), 16

    def order(*words: bytes) -> bytes:
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)

    def ask(orders: list[tuple[bytes, ...]]) -> None:
        link.sendall(b"".join(order(*words) for words in orders))
        for words in orders:
            head = answers.readline()
            if words[0] == b"GET":
                assert head == b"$%d\r\n" % VALUE_BYTES, head
                answers.read(VALUE_BYTES + 2)
            else:
                assert head == b"+OK\r\n", head

    for at in range(0, DATA // VALUE_BYTES, 32):
        ask([(b"SET", b"%d" % key, os.urandom(VALUE_BYTES)) for key in range(at, at + 32)])
    print("ready", flush=True)
    sets = itertools.cycle([False] * 19 + [True])

    def once() -> int:
        drawn = [b"%d" % keys.draw() for _ in range(few)]
        ask([(b"SET", key, value) if next(sets) else (b"GET", key) for key in drawn])
        return few

    slices(seconds, once)


def sqlite(seconds: float) -> None:
    rows, blob = DATA // 1024, 900
    table = sqlite3.connect(":memory:", isolation_level=None)
    table.execute("CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER, note BLOB)")
    table.execute("BEGIN")
    table.executemany("INSERT INTO accounts VALUES (?, ?, ?)", ((id, 0, os.urandom(blob)) for id in range(rows)))
    table.execute("COMMIT")
    print("ready", flush=True)
    ids, updates = Popular(rows, 2), itertools.cycle([False] * 9 + [True])

    def once() -> int:
        id = ids.draw()
        if next(updates):
            table.execute("UPDATE accounts SET balance = balance + 1 WHERE id = ?", (id,))
        else:
            found = table.execute("SELECT length(note) FROM accounts WHERE id = ?", (id,)).fetchone()
            assert found == (blob,), found
        return 1

    slices(seconds, once)


def pagerank(seconds: float) -> None:
    import numpy as np

    edges, nodes, piece = DATA // 8, 1 << 20, 1 << 18
    rng = np.random.default_rng(3)
    sources, targets = np.empty(edges, np.int32), np.empty(edges, np.int32)
    for at in range(0, edges, piece):
        size = min(piece, edges - at)
        sources[at : at + size] = rng.integers(0, nodes, size)
        targets[at : at + size] = (rng.pareto(1.2, size) * 1000).astype(np.int64) % nodes
    degrees = np.bincount(sources[:piece], minlength=nodes) + 1.0
    ranks, sums = np.full(nodes, 1.0 / nodes), np.zeros(nodes)
    print("ready", flush=True)
    at = 0

    def once() -> int:
        """Add some more edges."""
        nonlocal at, ranks, sums
        some = slice(at, at + piece)
        sums += np.bincount(targets[some], (ranks / degrees)[sources[some]], minlength=nodes)
        at += piece
        if at >= edges:
            ranks, sums, at = 0.15 / nodes + 0.85 * sums, np.zeros(nodes), 0
        return piece

    slices(seconds, once)


# ---- one run --------------------------------------------------------------------------------------------------------


class Ran(NamedTuple):
    rate: float
    """Operations per second, the median of slices."""
    peak_bytes: int
    swapped_bytes: int


Slice = dict[str, float]
Swap = Callable[[ExitStack, Device], None]


def swap_file(stack: ExitStack, device: Device) -> None:
    path = device.directory / "swapfile"
    run("dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={SIZE // MIB}", "status=none")
    path.chmod(0o600)
    stack.callback(path.unlink)
    run("mkswap", str(path))
    run("swapon", "-p", "100", str(path))
    stack.callback(quietly, "swapoff", str(path))


SWAPS: dict[str, Swap] = {"disk": swap_file, "covey": swap_on}
PROGRAMS = ("redis", "sqlite", "pagerank")


def child(stack: ExitStack, program: str, seconds: float, group: Callable[[], None] | None, path: str = "") -> Any:
    words = [sys.executable, __file__, "--child", program, "--seconds", str(seconds), "--path", path]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=group)
    stack.callback(ended, process, signal.SIGKILL)
    return process


@contextmanager
def running(device: Device, program: str, limit: int | None, seconds: float) -> Iterator[tuple[Any, Callable[[], Ran]]]:
    """The process whose lines are slices, and a function that tells the program's memory now."""
    with ExitStack() as stack:
        group = limited(stack, limit or 1 << 40)
        if program == "redis":
            server = started_redis(stack, device, group)
            stack.callback(Path(f"{device.directory}/redis.sock").unlink)
            process, pid = child(stack, program, seconds, None, f"{device.directory}/redis.sock"), server.pid
        else:
            process = child(stack, program, seconds, group)
            pid = process.pid
        said = process.stdout.readline()
        assert said == "ready\n", said
        yield process, lambda: Ran(0.0, *memory_of(pid))


def memory_of(pid: int) -> tuple[int, int]:
    """Most bytes of a process that were ever resident, and bytes swapped now."""
    found = {"VmHWM": 0, "VmSwap": 0}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) << 10
    return found["VmHWM"], found["VmSwap"]


def ran(device: Device, program: str, limit: int | None, seconds: float) -> Ran:
    with running(device, program, limit, WARM_S + seconds) as (process, memory):
        rates: list[float] = []
        known = memory()
        began_s = time.monotonic()
        for line in process.stdout:
            each: Slice = json.loads(line)
            known = memory()
            if time.monotonic() - began_s > WARM_S:
                rates.append(each["done"] / each["took_s"])
    if not rates:
        return Ran(0.0, known.peak_bytes, known.swapped_bytes)
    return Ran(statistics.median(rates), known.peak_bytes, known.swapped_bytes)


# ---- a lender is drained, a lender dies ------------------------------------------------------------------------------


def drained(device: Device) -> str:
    found: list[str] = wait("somebody lends", lambda: mapped(device))
    name = max(sorted(set(found)), key=found.count)
    count = found.count(name)
    code, said = device.rack.agentctl("hosts", "drain", name)
    assert code == 0, said
    return f"{count} slabs taken back by {name}"


def killed(device: Device) -> str:
    return "kill -9 of " + kill_lender(device)


def harmed(device: Device, limit: int, seconds: float, harm: Callable[[Device], str]) -> tuple[str, float, float]:
    """What was done, the rate before, and the rate in the `seconds` after in parts of that before."""
    with running(device, "redis", limit, WARM_S + 2 * seconds + 20) as (process, _):
        before: list[float] = []
        after: list[float] = []
        began_s, harmed_s, what = time.monotonic(), 0.0, ""
        for line in process.stdout:
            each: Slice = json.loads(line)
            rate, now_s = each["done"] / each["took_s"], time.monotonic()
            if now_s - began_s < WARM_S:
                continue
            if not harmed_s:
                before.append(rate)
                if now_s - began_s > WARM_S + seconds:
                    what, harmed_s = harm(device), time.monotonic()
            elif each["at_s"] > harmed_s:
                after.append(rate)
                if now_s - harmed_s > seconds:
                    break
    return what, statistics.median(before), statistics.fmean(after) / statistics.fmean(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=PROGRAMS, help="this program alone")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run, after three to warm up")
    parser.add_argument("--no-faults", action="store_true", help="no lender is drained or killed")
    parser.add_argument("--child", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--path", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child == "redis":
        redis_client(chosen.seconds, chosen.path)
        return
    if chosen.child:
        {"sqlite": sqlite, "pagerank": pagerank}[chosen.child](chosen.seconds)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was set up is taken away then too
    programs = (chosen.only,) if chosen.only else PROGRAMS
    try:
        need("nbdfuse", "nbdkit", "fusermount3", "losetup", "mkswap", "swapon", "swapoff", "redis-server")
        with living_rack() as rack, exported(rack) as device:
            table(device, programs, chosen.seconds, faults=not chosen.no_faults)
    except LeftOut as why:
        sys.exit(f"nothing was measured: {why}")


def table(device: Device, programs: tuple[str, ...], seconds: float, faults: bool) -> None:
    whole = {program: ran(device, program, None, seconds) for program in programs}
    for program, result in whole.items():
        print(f"{program}: {result.rate:,.0f}/s without a limit, {result.peak_bytes >> 20} MiB", flush=True)
    print("| program | limit | " + " | ".join(f"{swap}, in parts (swapped)" for swap in SWAPS) + " | covey / disk |")
    print("|---|---|" + "---:|" * (len(SWAPS) + 1))
    for program, share in itertools.product(programs, SHARES):
        rates: dict[str, Ran] = {}
        for name, swap in SWAPS.items():
            with ExitStack() as stack:
                swap(stack, device)
                rates[name] = ran(device, program, whole[program].peak_bytes * share // 100, seconds)
        cells = [f"{each.rate / whole[program].rate:.3f} ({each.swapped_bytes >> 20} MiB)" for each in rates.values()]
        ratio = rates["covey"].rate / max(1e-9, rates["disk"].rate)
        print(f"| {program} | {share} % | " + " | ".join(cells) + f" | {ratio:.2f} |", flush=True)
    if faults and "redis" in programs:
        for harm in (drained, killed):
            with ExitStack() as stack:
                swap_on(stack, device)
                limit = whole["redis"].peak_bytes * 3 // 4
                what, before, parts = harmed(device, limit, seconds, harm)
                print(f"redis at 75 %: {what}: {before:,.0f}/s before, {parts:.3f} of it in {seconds:g} s", flush=True)
            for name in sorted({host.name for host in device.rack.hosts} - {HOST}):
                device.rack.agentctl("hosts", "resume", name)


if __name__ == "__main__":
    main()

"""`make bench-groups`: what `covey-sim groups` assumes of jobs that share hosts, measured on this machine.

    python bench/elastic/shared_hosts.py [--seconds 3] [--rate 200mbit] [--block-mb 4] [--blocks 64]

COMPUTING: passes of a linear model over 16 MB of data, of one process and of two and three on the same core: what they
do together, against one alone. SENDING: the same for connections through a card of that rate (tbf). The simulator
assumes that each other job costs 10 % when there are no turns. RELOAD: data Blocks that lie in a file
(`job.data(..., spill="disk")`), read from the disk and from the kernel's memory: processor seconds for each GB, of
which it assumes 0.4. (Needs root and iproute2; only on a machine that does nothing else.)
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402

from bench.live_command import json_option, keep, options, print_head  # noqa: E402
from chaos.rack.hosts import Laboratory  # noqa: E402
from covey.job.blocks.block_wire import DeclaredBlocks  # noqa: E402
from covey.job.blocks.spilled import DiskSpill, SpilledAt  # noqa: E402

TOGETHER = 1, 2, 3
SENDER = """
import socket, sys, time
end_s = time.monotonic() + float(sys.argv[1])
data, link = bytes(65536), socket.create_connection((sys.argv[2], int(sys.argv[3])))
while time.monotonic() < end_s:
    link.sendall(data)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement; each is made three times")
    parser.add_argument("--rate", default="200mbit", help="of the card, as tc says it")
    parser.add_argument("--block-mb", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=64)
    json_option(parser)
    args = parser.parse_args(argv)
    computing = best_of_three(lambda count: computed(count, args.seconds))
    sending = best_of_three(lambda count: sent(count, args.seconds, args.rate))
    disk_s, memory_s = reloaded(args.blocks, args.block_mb << 20)
    print_head("lost for each other job | " + " | ".join(f"of {count} together" for count in TOGETHER[1:]))
    losses = {"computing": lost(computing), "sending": lost(sending)}
    for name, each in losses.items():
        print(f"| {name} | {' | '.join(f'{share:.1%}' for share in each)} |")
    print_head("reload of spilled Blocks | processor seconds a GB")
    print(f"| from the disk | {disk_s:.2f} |\n| from the kernel's memory | {memory_s:.2f} |")
    keep({**losses, "reload_s_per_gb": disk_s, "reload_cached_s_per_gb": memory_s}, args.json)
    return 0


def best_of_three(measured: Callable[[int], float]) -> list[float]:
    """The most that so many do together, in turns: what takes from one, takes from all."""
    found = [[measured(count) for count in TOGETHER] for _ in range(3)]
    return [max(column) for column in zip(*found, strict=True)]


def lost(done: Sequence[float]) -> list[float]:
    """The share of speed that each other job costs, as the simulator takes it: n jobs have 1 / (1 + share * (n - 1))
    of what one alone has."""
    return [(done[0] / each - 1) / (count - 1) for count, each in zip(TOGETHER[1:], done[1:], strict=True)]


# ---- computing -------------------------------------------------------------------------------------------------------


def computed(count: int, seconds: float) -> float:
    """Passes a second of so many processes on one core."""
    fork = multiprocessing.get_context("fork")
    begins, done = fork.Barrier(count), fork.Array("q", count)
    workers = [fork.Process(target=_compute, args=(begins, done, at, seconds)) for at in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / seconds


def _compute(begins: Any, done: Any, at: int, seconds: float) -> None:
    os.sched_setaffinity(0, {1 % (os.cpu_count() or 1)})
    rows, model = np.ones((4000, 1000), np.float32), np.ones((1000, 8), np.float32)
    begins.wait()
    passes, end_s = 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        model = model * np.float32(0.5) + rows.T @ (rows @ model) * np.float32(1e-9)
        passes += 1
    done[at] = passes


# ---- sending ---------------------------------------------------------------------------------------------------------


def sent(count: int, seconds: float, rate: str) -> float:
    """Bytes a second that so many senders on one host bring through its card."""
    with Laboratory(2) as lab:
        sender, receiver = lab.hosts.values()
        words = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
        sender.run(words).check_returncode()
        port = 7171
        script = f"""
import socket, threading, time
server = socket.create_server(("", {port}))
count = [0]
def take(link):
    while data := link.recv(1 << 18):
        count[0] += len(data)
def serve():
    while True:
        threading.Thread(target=take, args=(server.accept()[0],), daemon=True).start()
threading.Thread(target=serve, daemon=True).start()
while not count[0]:
    time.sleep(0.01)
time.sleep(0.5)
before, began_s = count[0], time.monotonic()
time.sleep({seconds})
print((count[0] - before) / (time.monotonic() - began_s))
"""
        said = receiver.folder / "bytes"
        taking = receiver.popen([sys.executable, "-c", script], said)
        time.sleep(0.5)
        words = [sys.executable, "-c", SENDER, str(seconds + 1.0), receiver.address, str(port)]
        senders = [sender.popen(words, sender.folder / f"sender-{at}") for at in range(count)]
        for each in (taking, *senders):
            each.wait()
        return float(said.read_text())


# ---- Blocks that come back -------------------------------------------------------------------------------------------


def reloaded(blocks: int, block_bytes: int) -> tuple[float, float]:
    """Processor seconds of this process for each GB of Blocks read: from the disk, and once more."""
    draws = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        spill = DiskSpill(DeclaredBlocks("x", blocks, block_bytes), folder)
        at = [spill.write(n, {"x": draws.random(block_bytes // 8)}) for n in range(blocks)]
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
        gb = blocks * block_bytes / 1e9
        found = _read(spill, at) / gb, _read(spill, at) / gb
        spill.close()
    return found


def _read(spill: DiskSpill, at: Sequence[SpilledAt]) -> float:
    began_s = time.process_time()
    total = sum(float(spill.read(one)["x"].sum()) for one in at)
    assert total > 0
    return time.process_time() - began_s


if __name__ == "__main__":
    sys.exit(main())

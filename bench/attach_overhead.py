"""What `covey.attach` costs a PyTorch script that shares a device and has no limit (wanted: under 1 % of a 5 ms step).

    python bench/attach_overhead.py [--seconds 60] [--compiled]

Three processes train the same network: one is attached to an agent of this program (hooks, client, pages, the watching
thread with its flag as a guaranteed rank, reports), two are not. They run by turns, in blocks ABCCBA, never at once.
Told is processor time per step (all threads of the process) and wall time: the median of the ratios of neighbouring
blocks to the first plain one. The second plain one says how far two that are alike lie apart on this machine.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from covey import memfd
from covey.attach import SITE
from covey.core import HostId
from covey.frames import body_size, pack, unpack
from covey.pages import LimitsWriter, RankLimits, ReportReader
from covey.wire import AskPages, Join, Joined, PagesHere, decoder

STEPS = 10
"""Of a block: a twentieth of a second, so that what else the machine does falls on all of them."""
TRAINS = """
import sys, time, torch
torch.set_num_threads(1)
torch.manual_seed(1)
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
net = torch.nn.Sequential(*layers)
forward = torch.compile(net) if sys.argv[1] == "compiled" else net
o, x = torch.optim.AdamW(net.parameters(), foreach=True), torch.randn(64, 256)
def step():
    o.zero_grad(); forward(x).square().mean().backward(); o.step()
for _ in range(200): step()
print("ready", flush=True)
for line in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(int(line)): step()
    print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)
"""


class Playing:
    """An agent of one rank: joins it, gives it pages, and listens."""

    def __init__(self, path: Path) -> None:
        self.descriptors = [memfd.make(kind) for kind in ("limits", "report", "flag")]
        self.limits = LimitsWriter(memfd.writable(self.descriptors[0]))
        memfd.close_for_writers(self.descriptors[0])
        self.report = ReportReader(memfd.readable(self.descriptors[1], sealed=False))
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        rank, _ = self._listening.accept()
        with rank, rank.makefile("rb") as frames:
            while head := frames.read(4):
                frame = unpack(frames.read(body_size(head)), decoder)
                if isinstance(frame, Join):
                    rank.sendall(pack(Joined(HostId("here"), frame.job, protocol=frame.protocol)))
                elif isinstance(frame, AskPages):
                    socket.send_fds(rank, [pack(PagesHere())], self.descriptors)


class Trains:
    """One of the two processes."""

    def __init__(self, how: str, environ: dict[str, str]) -> None:
        known = {
            name: os.environ[name] for name in ("PATH", "HOME", "XDG_CACHE_HOME", "COVEY_GATE") if name in os.environ
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", TRAINS, how],
            env=known | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def block(self) -> None:
        assert self._process.stdin is not None
        print(STEPS, file=self._process.stdin, flush=True)
        wall_s, cpu_s = self._answer().split()
        self.wall_s.append(float(wall_s) / STEPS)
        self.cpu_s.append(float(cpu_s) / STEPS)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measured(how: str, seconds: float) -> dict[str, float]:
    """Milliseconds of processor time per step, and how much more it is."""
    with tempfile.TemporaryDirectory(prefix="covey-") as folder:
        agent = Playing(Path(folder, "jobs.sock"))
        agent.limits.write(RankLimits(1, guaranteed=True))
        ours = {"COVEY_SOCKET": f"{folder}/jobs.sock", "COVEY_TOKEN": "t", "COVEY_JOB_ID": "j1", "COVEY_EPOCH": "1"}
        plain, again = Trains(how, {}), Trains(how, {})
        attached = Trains(how, {**ours, "COVEY_RANK": "0", "COVEY_WORLD_SIZE": "1", "PYTHONPATH": SITE})
        while sum(attached.wall_s) * STEPS < seconds:
            for one in (plain, attached, again, again, attached, plain):
                one.block()
        for one in (plain, attached, again):
            one.end()
        report = agent.report.fresh()
        assert report is not None and report.gate == 1 and report.says_idle, (
            "it is attached, with its gate and its flag"
        )
    return {
        "plain ms": statistics.median(plain.cpu_s) * 1e3,
        "attached cpu %": more(attached.cpu_s, plain.cpu_s),
        "plain again cpu %": more(again.cpu_s, plain.cpu_s),
        "attached wall %": more(attached.wall_s, plain.wall_s),
        "plain again wall %": more(again.wall_s, plain.wall_s),
    }


def more(of: list[float], than: list[float]) -> float:
    """Median over blocks, in %."""
    return (statistics.median(a / b for a, b in zip(of, than, strict=True)) - 1) * 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="of each of the three, by turns")
    parser.add_argument("--compiled", action="store_true", help="torch.compile as well")
    asked = parser.parse_args()
    for how in ("eager", "compiled") if asked.compiled else ("eager",):
        print(
            how, json.dumps({name: round(value, 3) for name, value in measured(how, asked.seconds).items()}), flush=True
        )


if __name__ == "__main__":
    main()

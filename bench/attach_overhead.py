"""What `covey.attach` costs a PyTorch script that shares a device and has no limit (wanted: under 1 % of a 5 ms step).

    python bench/attach_overhead.py [--groups 8] [--seconds 6] [--compiled] [--beside]

Three processes train the same network: one is attached to an agent of this program (hooks, client, pages, the watching
thread, reports), two are not. They run by turns, in blocks ABCCBA, never at once. With --beside the rank is told that
another one reads its flag, else that it is alone on its device. Told is processor time per step (all threads) and wall
time: of each group the median of the ratios of neighbouring blocks to the first plain process, and of these the median
and the range over groups of fresh processes, since two processes that are alike differ by 1 to 2 % for their whole
lives (where their memory lies). `again` is the second plain one. `threads` is what other threads than the script's ran
while steps were made, in % of the script's, less what they ran in the plain process, and `hooks` the time that a step
of the script spends in ours, in % of it: these two have no such noise, and are what attaching costs but for what it
makes of caches.
"""

import argparse
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
import torch.optim.optimizer as of
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
    wall, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(int(line)): step()
    print(time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - own, flush=True)
spent = []
def timed(hook):
    def called(*args, **kwargs):
        began = time.perf_counter()
        try: return hook(*args, **kwargs)
        finally: spent.append(time.perf_counter() - began)
    return called
for hooks in (of._global_optimizer_pre_hooks, of._global_optimizer_post_hooks):
    for key in list(hooks): hooks[key] = timed(hooks[key])
for _ in range(400): step()
print(sum(spent) / 400, flush=True)
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
        self.own_s: list[float] = []
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def block(self) -> None:
        assert self._process.stdin is not None
        print(STEPS, file=self._process.stdin, flush=True)
        for times, took_s in zip((self.wall_s, self.cpu_s, self.own_s), self._answer().split(), strict=True):
            times.append(float(took_s) / STEPS)

    def others(self) -> float:
        """What its other threads ran, in % of the script's."""
        return 100 * (sum(self.cpu_s) / sum(self.own_s) - 1)

    def end(self) -> float:
        """Seconds that a step spends in hooks of ours, on average of 400 more."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        spent_s = float(self._answer())
        self._process.wait()
        return spent_s


def measured(how: str, seconds: float, beside: bool) -> dict[str, float]:
    """Milliseconds of processor time per step, and how much more it is, of one group of processes."""
    with tempfile.TemporaryDirectory(prefix="covey-") as folder:
        agent = Playing(Path(folder, "jobs.sock"))
        agent.limits.write(RankLimits(1, memory_bytes=1 << 36, guaranteed=True, alone=not beside))
        ours = {"COVEY_SOCKET": f"{folder}/jobs.sock", "COVEY_TOKEN": "t", "COVEY_JOB_ID": "j1", "COVEY_EPOCH": "1"}
        plain, again = Trains(how, {}), Trains(how, {})
        attached = Trains(how, {**ours, "COVEY_RANK": "0", "COVEY_WORLD_SIZE": "1", "PYTHONPATH": SITE})
        while sum(attached.wall_s) * STEPS < seconds:
            for one in (plain, attached, again, again, attached, plain):
                one.block()
        for one in (plain, again):
            one.end()
        hooks_s = attached.end()
        report = agent.report.fresh()
        assert report is not None and report.gate == 1 and report.says_idle, "it is attached, with its gate"
    return {
        "plain ms": statistics.median(plain.cpu_s) * 1e3,
        "attached cpu %": more(attached.cpu_s, plain.cpu_s),
        "again cpu %": more(again.cpu_s, plain.cpu_s),
        "attached wall %": more(attached.wall_s, plain.wall_s),
        "again wall %": more(again.wall_s, plain.wall_s),
        "threads %": attached.others() - plain.others(),
        "hooks %": 100 * hooks_s / statistics.median(plain.cpu_s),
    }


def more(of: list[float], than: list[float]) -> float:
    """Median over blocks, in %."""
    return (statistics.median(a / b for a, b in zip(of, than, strict=True)) - 1) * 100


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):+.2f} ({min(values):+.2f} .. {max(values):+.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=8, help="of fresh processes")
    parser.add_argument("--seconds", type=float, default=6, help="of each process of a group, by turns")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile")
    parser.add_argument("--beside", action="store_true", help="a rank that is not alone on its device")
    asked = parser.parse_args()
    how = "compiled" if asked.compiled else "eager"
    groups = [measured(how, asked.seconds, asked.beside) for _ in range(asked.groups)]
    print(how, "beside another" if asked.beside else "alone")
    for name in groups[0]:
        print(f"  {name:16} {spread([group[name] for group in groups])}", flush=True)


if __name__ == "__main__":
    main()

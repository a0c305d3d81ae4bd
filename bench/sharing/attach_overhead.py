"""What `covey.hooks` costs a PyTorch script that shares a device and has no limit (wanted: under 1 % of a 5 ms step).

    python bench/sharing/attach_overhead.py [--groups 8] [--seconds 6] [--compiled] [--beside]

Three processes train the same network: one is attached to an agent of this program (hooks, client, pages, the watching
thread, reports), two are not. They run by turns, in blocks ABCCBA, never at once. With --beside the rank is told that
another one reads its flag, else that it is alone on its device. Printed is processor time per step (all threads) and
wall time: for each group the median of the ratios of neighbouring blocks to the first plain process, and over groups
of fresh processes the median and the range of these, since two processes that are alike differ by 1 to 2 % for their
whole lives (where their memory lies). `again` is the second plain one.

Two parts have no such noise, for they are taken within the attached process. `hooks`: what its script's thread needs
for a step more with Covey's hooks than without, which are put in and taken out by turns of the number of steps between
two reports; their effect on caches is included. `threads`: what other threads ran while steps were made, in % of the
script's, less what they ran in the plain process. Memory has a limit, of 64 GiB: a device of its own.
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

from covey.core.ids import HostId
from covey.hooks import SITE
from covey.kernel import memfd
from covey.kernel.pages import LimitsWriter, RankLimits, ReportReader
from covey.wire.frames import body_size, pack, unpack
from covey.wire.job import AskPages, Join, Joined, PagesHere, decoder

STEPS = 10
"""Steps of a block: a twentieth of a second, so that what else the machine does falls on all of them."""
TURN = 40
"""Steps with hooks, and without: some 200 ms, the time from one report to the next."""
TRAINS = """
import sys, time, torch
import torch.optim.optimizer as of
torch.set_flush_denormal(True)  # what is trained to nothing computes as fast as before
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
known = [(hooks, dict(hooks)) for hooks in (of._global_optimizer_pre_hooks, of._global_optimizer_post_hooks)]
for line in sys.stdin:
    steps, hooked = line.split()
    for hooks, ours in known:
        hooks.clear()
        hooks.update(ours if hooked == "hooked" else {})
    step()
    wall, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(int(steps)): step()
    print(time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - own, flush=True)
"""


class Playing:
    """An agent of one rank, which joins it, gets pages from it, and is heard."""

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
    """One of the training processes."""

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
        for times, took_s in zip((self.wall_s, self.cpu_s, self.own_s), self._steps(STEPS, "hooked"), strict=True):
            times.append(took_s)

    def turn(self, hooked: bool) -> float:
        """Seconds that the script's thread ran for a step with Covey's hooks, or without."""
        return self._steps(TURN, "hooked" if hooked else "bare")[2]

    def _steps(self, count: int, how: str) -> list[float]:
        """Seconds per step: wall time, processor time of the process and of the script's thread."""
        assert self._process.stdin is not None
        print(count, how, file=self._process.stdin, flush=True)
        return [float(took_s) / count for took_s in self._answer().split()]

    def others(self) -> float:
        """Time that the process's other threads ran, in % of the script's."""
        return 100 * (sum(self.cpu_s) / sum(self.own_s) - 1)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measured(how: str, seconds: float, beside: bool) -> dict[str, float]:
    """Milliseconds of processor time per step of one group of processes, and how much more it is."""
    with tempfile.TemporaryDirectory(prefix="covey-") as folder:
        agent = Playing(Path(folder, "jobs.sock"))
        agent.limits.write(RankLimits(1, memory_bytes=1 << 36, guaranteed=True, alone=not beside))
        ours = {"COVEY_SOCKET": f"{folder}/jobs.sock", "COVEY_TOKEN": "t", "COVEY_JOB_ID": "j1", "COVEY_EPOCH": "1"}
        ours |= {"COVEY_TABLES": "1"}
        plain, again = Trains(how, {}), Trains(how, {})
        attached = Trains(how, {**ours, "COVEY_RANK": "0", "COVEY_WORLD_SIZE": "1", "PYTHONPATH": SITE})
        while sum(attached.wall_s) * STEPS < seconds:
            for one in (plain, attached, again, again, attached, plain):
                one.block()
        turns = [[attached.turn(hooked) for hooked in (True, False, False, True)] for _ in range(int(seconds))]
        for one in (plain, again, attached):
            one.end()
        report = agent.report.fresh()
        assert report is not None and report.gate == 1 and report.says_idle, "it is attached, with its gate"
    return {
        "plain ms": statistics.median(plain.cpu_s) * 1e3,
        "attached cpu %": more(attached.cpu_s, plain.cpu_s),
        "again cpu %": more(again.cpu_s, plain.cpu_s),
        "attached wall %": more(attached.wall_s, plain.wall_s),
        "again wall %": more(again.wall_s, plain.wall_s),
        "threads %": attached.others() - plain.others(),
        "hooks %": more([a + d for a, _, _, d in turns], [b + c for _, b, c, _ in turns]),
    }


def more(of: list[float], than: list[float]) -> float:
    """Median over blocks of how much more the first is than the second, in %."""
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

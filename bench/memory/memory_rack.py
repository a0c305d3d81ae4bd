"""What a user gets of remote memory: fio, from outside, on a volume of a real rack, beside nbdkit's relay, in turns.

    fio -> unix socket -> `vold` of host gpu1 -> TCP -> `slabd` of host gpu2     pages sealed, and spilled to disk
    fio -> unix socket -> nbdkit nbd plugin -> TCP -> nbdkit memory              no disk behind it

A rack is two agents of one machine, started by the `covey-rack` of an installation with its defaults but for the size
of slabs and what a host may lend. Several installations are compared by name, each with a rack of its own:

    python bench/memory/memory_rack.py wheel=/opt/covey/bin pure=/opt/other/bin
    python bench/memory/memory_rack.py here=.venv/bin --rounds 5 --seconds 2 --json PATH

`agentctl status` of each is asked first how it runs the byte path. Ratios are medians of the ratios of one round, in
which all sides follow one another; the load stands beside them. Where other work is beside, `chrt -r 1` before
the command gives all sides the same real-time priority, which the rack's programs inherit. Needs nbdkit and fio.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.memory.memory_path import CASES, INSTALL, SIZE, Result, Side, fio, median, theirs, told

OF_INTEREST = ("randread 4k depth 16", "randwrite 4k depth 16", "read 128k depth 8", "write 128k depth 8")
SETTINGS = (('lend = "128 MiB"', 'lend = "1 GiB"'), ('slab = "16 MiB"', 'slab = "64 MiB"'))
VOLUME = "bench"


class Installed:
    """A rack of one installation's programs, in a folder of its own."""

    def __init__(self, name: str, programs: Path, directory: Path) -> None:
        self.name, self._programs, self._directory = name, programs, directory
        self.socket = f"{directory}/nbd.sock"

    def run(self, program: str, *words: str) -> str:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COVEY_"))}
        command = [str(self._programs / program), *words]
        done = subprocess.run(command, cwd=self._directory, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def rack(self, verb: str) -> None:
        self.run("covey-rack", "--hosts", "2", "--dir", f"{self._directory}/rack", verb)

    def ask(self, *words: str) -> str:
        (address,) = {each["address"] for each in self._agents() if each["name"] == "gpu1"}
        return self.run("agentctl", "--agent", address, *words)

    def _agents(self) -> list[dict[str, str]]:
        configs = sorted(Path(self._directory, "rack").glob("*/agent.toml"))
        found = [(each.parent.name, re.search(r'^run_dir = "([^"]*)"', each.read_text(), re.M)) for each in configs]
        return [{"name": name, "address": f"unix:{at[1]}/agent.sock"} for name, at in found if at is not None]

    def serve(self) -> Side:
        """Start the rack and a volume on it, written once, and wait until a lender has all of it."""
        self.rack("start")
        self.rack("stop")
        for config in Path(self._directory, "rack").glob("*/agent.toml"):
            text = config.read_text()
            for was, now in SETTINGS:
                assert was in text
                text = text.replace(was, now)
            config.write_text(text)
        self.rack("start")
        self.ask("volume", "create", VOLUME, str(SIZE), "--host", "gpu1")
        self.ask("volume", "export", VOLUME, "--socket", self.socket, "--host", "gpu1")
        uri = f"nbd+unix:///?socket={self.socket}"
        for _ in range(30):
            fill(uri)
            slabs = json.loads(self.ask("slabs", "--json"))["data"]
            if sum(slab["state"] == "mapped" for slab in slabs) == SIZE // (64 << 20):
                return Side(self.name, uri, tuple(self._pids()))
        raise SystemExit(f"{self.name}: not every slab found a lender\nnext: agentctl slabs")

    def _pids(self) -> Iterator[int]:
        """The processes of this rack that serve the volume: its own, its lender's, its log's."""
        for program in ("vold", "slabd", "spill"):
            for entry in Path("/proc").iterdir():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                    is_here = bool(words) and os.readlink(entry / "cwd").startswith(f"{self._directory}/rack/")
                except OSError:
                    continue
                if is_here and program.encode() in words:
                    yield int(entry.name)

    def byte_path(self) -> str:
        lines = json.loads(self.ask("status", "--json"))["data"]["lines"]
        return str(lines.get("byte path", "it does not say how it runs the byte path"))


@contextmanager
def installed(name: str, programs: Path, directory: Path) -> Iterator[Installed]:
    directory.mkdir()
    rack = Installed(name, programs.absolute(), directory)
    try:
        yield rack
    finally:
        rack.rack("stop")


def fill(uri: str) -> None:
    subprocess.run(
        ["fio", "--name=fill", "--ioengine=nbd", f"--uri={uri}", "--rw=write", "--bs=1m", "--iodepth=4",
         f"--size={SIZE}"], capture_output=True, check=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("installation", nargs="+", help="NAME=FOLDER of its programs")
    parser.add_argument("--only", default=",".join(OF_INTEREST), help="cases, by comma")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--json", default="", help="write medians there")
    chosen = parser.parse_args()
    missing = [tool for tool in ("fio", "nbdkit") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"{' and '.join(missing)} not installed\nwhy: both sides are measured by fio\nnext: {INSTALL}")
    with tempfile.TemporaryDirectory(prefix="cvr") as directory, ExitStack() as stack:
        sides: list[Side] = []
        for each in chosen.installation:
            name, _, programs = each.partition("=")
            rack = stack.enter_context(installed(name, Path(programs), Path(directory, name)))
            sides.append(rack.serve())
            print(f"{name}: {rack.byte_path()}", flush=True)
        sides.append(theirs(stack, directory))
        fill(sides[-1].uri)
        report: dict[str, dict[str, Result]] = {}
        for case in CASES:
            if str(case) not in chosen.only.split(","):
                continue
            results: dict[str, list[Result]] = {side.name: [] for side in sides}
            for _ in range(chosen.rounds):
                for side in sides:
                    time.sleep(0.3)
                    results[side.name].append(fio(side, case, chosen.seconds))
            rivals = results["nbdkit"]
            ratios = [
                f"{name} {statistics.median(own.iops / its.iops for own, its in zip(each, rivals, strict=True)):.2f}x"
                for name, each in results.items()
                if name != "nbdkit"
            ]
            print(f"{case}: {', '.join(ratios)}; load {os.getloadavg()[0]:.1f}", flush=True)
            report[str(case)] = {name: median(each) for name, each in results.items()}
            for name, result in report[str(case)].items():
                print(told(name, result), flush=True)
        if chosen.json:
            Path(chosen.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

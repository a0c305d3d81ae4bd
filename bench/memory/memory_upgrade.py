"""Every agent of a rack is upgraded, one after another, under load: a script writes a volume, reads every page back and
compares it, while each agent gets SIGTERM and is started again; with `--slabd` each slab process too; with `--kill`
slab processes alone, by SIGKILL.

    covey-rack --hosts 3 --dir DIR start
    python bench/memory/memory_upgrade.py DIR [--slabd] [--kill]        # a minute or so

Prints how many slabs moved (another lender or epoch after than before), the longest read and write, and what was wrong.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from covey.remote import RemoteMemory

PAGE, RUN, SIZE = 4096, 256, 256 << 20
BIN = Path(sys.executable).parent


class Load(threading.Thread):
    """A load that uses one page after the other, at random; each holds what was written last."""

    def __init__(self, memory: RemoteMemory) -> None:
        super().__init__(daemon=True)
        self.reads: list[tuple[float, float]] = []
        """(when it began, seconds that it took) for each read."""
        self.writes: list[tuple[float, float]] = []
        self.wrong = 0
        self.filled, self.over = threading.Event(), threading.Event()
        self._memory, self._known = memory, [0] * (SIZE // PAGE)

    def run(self) -> None:
        rng, version = random.Random(1), 0
        for first in range(0, len(self._known), RUN):
            self._memory.write(first * PAGE, b"".join(_content(page, 0) for page in range(first, first + RUN)))
        self.filled.set()
        while not self.over.is_set():
            page = rng.randrange(len(self._known))
            began_s = time.monotonic()
            data = self._memory.read(page * PAGE, PAGE)
            self.reads.append((began_s, time.monotonic() - began_s))
            self.wrong += bytes(data) != _content(page, self._known[page])
            page, version = rng.randrange(len(self._known)), version + 1
            began_s = time.monotonic()
            self._memory.write(page * PAGE, _content(page, version))
            self.writes.append((began_s, time.monotonic() - began_s))
            self._known[page] = version
            time.sleep(0.001)
        for first in range(0, len(self._known), RUN):
            known = [_content(page, self._known[page]) for page in range(first, first + RUN)]
            self.wrong += bytes(self._memory.read(first * PAGE, RUN * PAGE)) != b"".join(known)


def _content(page: int, version: int) -> bytes:
    return (page << 32 | version).to_bytes(8, "little") * (PAGE // 8)


def agentctl(directory: Path, *words: str) -> object:
    """The answer of the first host's agent to a command."""
    address = _rows(directory)[0]["address"]
    said = subprocess.run((BIN / "agentctl", "--agent", address, "--json", *words), capture_output=True, text=True)
    return json.loads(said.stdout)["data"]


def _rows(directory: Path) -> list[dict[str, str]]:
    """Host, pid and address of each agent."""
    said = subprocess.run((BIN / "covey-rack", "--dir", directory, "status"), capture_output=True, text=True).stdout
    lines = [line.split() for line in said.splitlines()[1:] if "running" in line and line[0] != " "]
    return [{"host": words[0], "pid": words[2], "address": words[3]} for words in lines if words[1] == "running"]


def slabs(directory: Path) -> dict[int, tuple[str, int]]:
    """Slab -> lender and epoch."""
    found = agentctl(directory, "slabs")
    assert isinstance(found, list)
    return {each["index"]: (each["lender"], each["epoch"]) for each in found if each["state"] == "mapped"}


def processes(directory: Path, name: str) -> list[int]:
    """Pids of this rack's programs of that name."""
    found: list[int] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            where = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            continue
        if name.encode() in words and where.startswith(str(directory.resolve())):
            found.append(int(pid))
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--slabd", action="store_true", help="slab processes too")
    parser.add_argument("--kill", action="store_true", help="slab processes alone, and by SIGKILL")
    asked = parser.parse_args()
    first = _rows(asked.directory)[0]
    sockets = Path(first["address"].removeprefix("unix:")).parent
    number = signal.SIGKILL if asked.kill else signal.SIGTERM
    with RemoteMemory.open("upgrade", SIZE, str(sockets / "jobs.sock")) as memory:
        load = Load(memory)
        load.start()
        load.filled.wait()
        deadline = time.monotonic() + 60
        while len(before := slabs(asked.directory)) < 4 and time.monotonic() < deadline:
            time.sleep(0.5)
        time.sleep(5)
        before, began_s = slabs(asked.directory), time.monotonic()
        steady = [s for _, s in load.reads[-2000:]]
        for row in () if asked.kill else _rows(asked.directory):
            os.kill(int(row["pid"]), signal.SIGTERM)
            time.sleep(1.0)
            subprocess.run((BIN / "covey-rack", "--dir", asked.directory, "start"), capture_output=True, check=True)
            time.sleep(3.0)
        for pid in processes(asked.directory, "slabd") if asked.slabd or asked.kill else ():
            os.kill(pid, number)
            time.sleep(6.0)
        time.sleep(3.0)
        after = slabs(asked.directory)
        load.over.set()
        load.join()
    reads, writes = ([s for at, s in each if at >= began_s] for each in (load.reads, load.writes))
    print(f"slabs {len(before)}, of which {sum(before[slab] != after.get(slab) for slab in before)} moved")
    print(f"before: reads' longest of {len(steady)}: {1e3 * max(steady, default=0):.1f} ms")
    for name, times in (("reads", reads), ("writes", writes)):
        over = sum(s > 0.05 for s in times)
        print(f"{name}: {len(times)}, longest {1e3 * max(times):.1f} ms, over 50 ms: {over}")
    print(f"wrong pages: {load.wrong}")


if __name__ == "__main__":
    main()

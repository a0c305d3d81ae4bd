"""In the User-Mode Linux of `make swap`: a real kernel swaps to a volume, while its processes and lenders are killed.

    python tests/guest/kernel_swap.py pages|mirror|parity|redis|redis-mirror|lost|discards

`mirror` and `parity` are `pages` with a volume that has no disk; in `lost` all of its lenders lose what they hold;
`discards` is the last part of `pages` alone.

The job has 160 MiB under a limit of 64 MiB, and looks at every byte. One line is printed for each thing that holds;
what does not hold is named, and the exit status is 1.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.memory.memory_clients import VALUES, Redis
from tests.rack.living_rack import LivingRack, living_rack, wait

MIB = 1 << 20
SIZE, LIMIT, HELD = 512 * MIB, 64 * MIB, 160 * MIB
HOST, VOLUME = "gpu1", "swap"
GROUP = Path("/sys/fs/cgroup/job")
HELPER = "/run/covey-swap/swapd.sock"
LENDERS, LENDERS_WITHOUT_DISK = 2, 3
SMALLER = "160M"
"""Size of a volume without a disk, which takes all its places at once, slabs of 16 MiB: 20 or 15, of the 8 that each
lender has here."""
MIRROR = ("--mirror", "2")
WORDS = {"mirror": MIRROR, "redis-mirror": MIRROR, "lost": MIRROR, "parity": ("--parity", "2+1")}
"""Options of `agentctl` for volumes without a disk."""
SILENT_S = 45.0
DEAD_S = 10.0
ENDED_S = 180.0
LENT_MIN = 6
"""Slabs at lenders before discards are checked. Half of them at most may stay: the kernel discards whole runs of 256
pages, and keeps some slots at hand, and the first slab has the header of the swap area."""
GROWTH_MAX = 4 * MIB
"""Bytes that the volume's process may grow by while the host swaps to it."""


def say(line: str) -> None:
    print(f"swap: {time.monotonic() - BEGAN_S:6.1f} s  {line}", flush=True)


BEGAN_S = time.monotonic()


def must(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


# ---- the job ---------------------------------------------------------------------------------------------------------

JOB = """
import sys
pages = {held} // 4096
def page(number, version):
    return b"%08d/%06d." % (number, version) * 256
memory = bytearray({held})
version = [0] * pages
for line in sys.stdin:
    what, first, end = line.split()
    first, end = int(first), int(end)
    wrong = []
    for number in range(first, end):
        at = number * 4096
        if what == "write":
            version[number] += 1
            memory[at:at + 4096] = page(number, version[number])
        elif memory[at:at + 4096] != page(number, version[number]):
            wrong.append(number)
    print("ok" if not wrong else "wrong %d pages, the first is %d" % (len(wrong), wrong[0]), flush=True)
"""
PAGES = HELD // 4096


class PageJob:
    """A job with 160 MiB of its own, every page of which it can write anew and verify."""

    def __init__(self, held: int = HELD, is_limited: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB.format(held=held)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=join_group if is_limited else None,
        )  # fmt: skip

    def start(self, what: str, first: int, end: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {first} {end}\n")
        self.process.stdin.flush()

    def done(self) -> None:
        assert self.process.stdout is not None
        said = self.process.stdout.readline().strip()
        must(said == "ok", f"the job says {said!r}, exit {self.process.poll()}")

    def do(self, what: str, first: int = 0, end: int = PAGES) -> None:
        self.start(what, first, end)
        self.done()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


class RedisJob:
    """A job that swaps with Redis: 160 MiB of values."""

    def __init__(self) -> None:
        path = "/run/covey-redis.sock"
        self.process = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", "/run"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=join_group,
        )  # fmt: skip
        wait("redis listens", lambda: os.path.exists(path))
        self.client = Redis(path)
        self._next: tuple[str, list[int]] = ("", [])

    def start(self, what: str, first: int, end: int) -> None:
        keys = list(range(first * VALUES // PAGES, end * VALUES // PAGES))
        self._next = what, keys

    def done(self) -> None:
        what, keys = self._next
        (self.client.set_all if what == "write" else self.client.verify)(keys)

    def do(self, what: str, first: int = 0, end: int = PAGES) -> None:
        self.start(what, first, end)
        self.done()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def join_group() -> None:
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))


def limited(limit: int) -> None:
    GROUP.mkdir(exist_ok=True)
    (GROUP / "memory.max").write_text(str(limit))


# ---- what the host says ----------------------------------------------------------------------------------------------


def status(pid: int) -> dict[str, int]:
    rows = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if row[0].startswith("Vm")}


def swapped() -> int:
    return sum(int(line.split()[3]) << 10 for line in Path("/proc/swaps").read_text().splitlines()[1:])


def row(rack: LivingRack) -> dict[str, Any]:
    rows = rack.agent().get("volumes").data
    return next((each for each in rows if (each["volume"], each["host"]) == (VOLUME, HOST)), {})


def mapped(rack: LivingRack) -> list[str]:
    slabs = rack.agent().get("slabs").data
    return [str(slab["lender"]) for slab in slabs if slab["volume"] == VOLUME and slab["state"] == "mapped"]


def indices(rack: LivingRack) -> list[int]:
    """Numbers of slabs that are at lenders."""
    slabs = rack.agent().get("slabs").data
    return sorted(slab["index"] for slab in slabs if slab["volume"] == VOLUME and slab["lender"])


def content(rack: LivingRack) -> dict[int, int]:
    """KiB of each slab that are not zeros, as a client of its block device is told; empty where there is no nbdinfo."""
    if shutil.which("nbdinfo") is None:
        return {}
    path, found = str(rack.directory / "map.sock"), dict[int, int]()
    must(ctl(rack, "volume", "export", VOLUME, "--socket", path)[0] == 0, "the volume is not exported")
    said = subprocess.run(
        ["nbdinfo", "--map", "--json", f"nbd+unix:///?socket={path}"], capture_output=True, text=True, check=True
    ).stdout
    ctl(rack, "volume", "unexport", VOLUME, "--socket", path)
    size = int(row(rack)["slab_bytes"])
    for extent in json.loads(said):
        at, end = extent["offset"], extent["offset"] + extent["length"]
        while extent["type"] == 0 and at < end:
            upto = min(end, (at // size + 1) * size)
            found[at // size] = found.get(at // size, 0) + (upto - at >> 10)
            at = upto
    return found


def ctl(rack: LivingRack, *words: str) -> tuple[int, str]:
    code, said = rack.agentctl(*words, "--host", HOST)
    return code, said.strip()


def while_killed(job: Any, what: str, first: int, end: int, kill: Callable[[], None]) -> float:
    """Do a part of the work, in the middle of which a process is killed; returns how long it took, in seconds."""
    began_s = time.monotonic()
    job.start(what, first, end)
    later = threading.Timer(0.4, kill)
    later.start()
    job.done()
    later.join()
    return time.monotonic() - began_s


# ---- the story -------------------------------------------------------------------------------------------------------


class Helper:
    """The helper `covey-swapd`, as a process."""

    def __init__(self) -> None:
        self.program = self.started()

    def started(self) -> "subprocess.Popen[bytes]":
        self.program = subprocess.Popen([sys.executable, "-m", "agent.swap.main", "--user", "0", "--socket", HELPER])
        wait("the helper listens", lambda: os.path.exists(HELPER))
        return self.program

    def killed(self) -> None:
        self.program.kill()
        self.program.wait()


def play(rack: LivingRack, kind: str, helper: Helper) -> None:
    size = SMALLER if kind in WORDS else "512M"
    words = ("volume", "swap", VOLUME, size, *WORDS.get(kind, ()))
    code, said = ctl(rack, *words)
    while "is not ready" in said:  # a busy machine: Python starts slowly in there
        code, said = ctl(rack, *words)
    must(code == 0, said)
    say(said)
    must(len(Path("/proc/swaps").read_text().splitlines()) == 2, "there is no swap area")
    limited(LIMIT)
    job: Any = RedisJob() if kind.startswith("redis") else PageJob()
    try:
        if kind == "discards":
            job.do("write")
            frees(rack, job)
        elif kind == "lost":
            loses(rack, job)
        else:
            with_job(rack, job, helper)
    finally:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()


def watch() -> None:
    """Print what the host swaps from time to time: a busy machine takes long."""
    while True:
        time.sleep(20)
        say(f"... {swapped() >> 20} MiB swapped, load {os.getloadavg()[0]:.1f}")


def with_job(rack: LivingRack, job: Any, helper: Helper) -> None:
    vold = rack.program(HOST, "vold")
    before = status(vold)
    job.do("write")
    job.do("verify")
    must(swapped() > 60 * MIB, f"only {swapped() >> 20} MiB are swapped: nothing was tried")
    after = status(vold)
    say(f"160 MiB written and verified under 64 MiB, {swapped() >> 20} MiB swapped")
    grown, locked = after["VmRSS"] - before["VmRSS"], after["VmLck"]
    say(f"vold: {before['VmRSS'] >> 10} KiB before, {after['VmRSS'] >> 10} after, at most {after['VmHWM'] >> 10};"
        f" locked {locked >> 10}, swapped {after['VmSwap'] >> 10}")  # fmt: skip
    must(after["VmSwap"] == 0 and locked > 0, "the volume's process is not locked in memory")
    must(grown <= GROWTH_MAX, f"the volume's process grew by {grown >> 10} KiB under load")
    half, quarter = PAGES // 2, PAGES // 4
    took = while_killed(job, "verify", 0, quarter, lambda: os.kill(vold, signal.SIGKILL))
    must(rack.program(HOST, "vold") != vold, "the volume's process was not started again")
    say(f"kill -9 of vold while it reads: {took:.1f} s, every page verified")
    lenders: list[str] = wait("somebody lends", lambda: mapped(rack))
    lender = max(sorted(set(lenders)), key=lenders.count)
    took = while_killed(job, "verify", quarter, half, lambda: os.kill(rack.program(lender, "slabd"), signal.SIGKILL))
    say(f"kill -9 of the slab process of {lender}: {took:.1f} s, every page verified")

    def kill_both() -> None:
        helper.killed()
        os.kill(rack.program(HOST, "vold"), signal.SIGKILL)
        time.sleep(2)
        helper.started()

    took = while_killed(job, "write", half, PAGES, kill_both)
    job.do("verify")
    say(f"kill -9 of the helper and of vold while it writes: {took:.1f} s, then all of 160 MiB verified")
    if has_no_disk(rack):
        while_silent(rack, job)
    said = rack.agentctl("memory")[1].strip()
    say(f"agentctl memory: {next((line for line in said.splitlines() if 'swap on' in line), said)}")
    no_room(rack, job)
    frees(rack, job)


def while_silent(rack: LivingRack, job: Any) -> None:
    """Stop every process that has a page, for longer than a request of a job's own volume would wait."""
    lenders = [rack.program(host.name, "slabd") for host in rack.hosts if host.name != HOST]

    def silent() -> None:
        for pid in lenders:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(SILENT_S)
        for pid in lenders:
            os.kill(pid, signal.SIGCONT)

    took = while_killed(job, "verify", 0, PAGES, silent)
    say(f"no lender answered for {SILENT_S:g} s: {took:.1f} s, every page verified")
    job.do("write", 0, PAGES // 4)
    wait("every slab has its members", lambda: row(rack)["slabs_whole"] == row(rack)["slabs"], 150)
    job.do("verify")


def no_room(rack: LivingRack, job: Any) -> None:
    code, said = ctl(rack, "volume", "unswap", VOLUME)
    must(code == 4 and "has room for" in said, f"unswap without room: {code}, {said}")
    must(swapped() > 60 * MIB, "the swap is off")
    job.do("verify", 0, PAGES // 4)
    say(f"unswap without room: exit {code}, {' / '.join(said.splitlines())}; swap stays on, pages verified")
    code, said = rack.agentctl("volume", "rm", VOLUME, "--host", HOST)
    must(code == 4, f"agentctl volume rm of swap: {code}, {said}")


def has_no_disk(rack: LivingRack) -> bool:
    """Whether the volume has no disk: then its places stay, whatever is in them."""
    return int(row(rack)["members"]) > 1


def freed(rack: LivingRack, held: int) -> None:
    began_s = time.monotonic()
    try:
        wait("discards freed the slabs", lambda: len(mapped(rack)) <= held // 2, 150)
    finally:
        say(f"{swapped() >> 10} KiB in swap; at lenders: {indices(rack)}; with content, in KiB: {content(rack)}")
    took_s = time.monotonic() - began_s
    say(f"the job ended: {held} slabs were at lenders, now {len(mapped(rack))}, after {took_s:.0f} s")


def frees(rack: LivingRack, job: Any) -> None:
    """End the job, and its pages with it; then run another one whose pages come back."""
    held = len(mapped(rack))
    kind = type(job)
    job.end()
    wait("the swap area is empty", lambda: swapped() < MIB)
    say(f"the job ended, {held} slabs are at lenders: {indices(rack)}; with content, in KiB: {content(rack)}")
    if not has_no_disk(rack):
        freed(rack, held)
    must(held >= LENT_MIN, f"only {held} slabs were at lenders: nothing was tried")
    job = kind()
    job.do("write", 0, PAGES)
    must(swapped() > 60 * MIB, "nothing is swapped")
    limited(512 * MIB)
    began_s = time.monotonic()
    code, said = ctl(rack, "volume", "unswap", VOLUME)
    must(code == 0, f"unswap with room: {code}, {said}")
    must(len(Path("/proc/swaps").read_text().splitlines()) == 1, "the swap is still on")
    must(row(rack) == {}, "the volume is still there")
    say(f"unswap: {said} in {time.monotonic() - began_s:.1f} s")
    job.do("verify")
    say("every page verified after the swap was taken away")
    job.end()


def loses(rack: LivingRack, job: PageJob) -> None:
    """Kill all lenders at once, with what they hold: a process that needs such a page is ended by SIGBUS, and no
    other."""
    other = PageJob(16 * MIB, is_limited=False)
    other.do("write", 0, 16 * MIB // 4096)
    job.do("write")
    must(swapped() > 60 * MIB, "nothing is swapped")
    vold = rack.program(HOST, "vold")
    for host in rack.hosts:
        if host.name != HOST:
            rack.lose(host.name)
    job.start("verify", 0, PAGES)
    time.sleep(DEAD_S)
    must(job.process.poll() is None, f"while no lender answers the job is ended: {job.process.poll()}")
    began_s = time.monotonic()
    rack.start()
    ended = job.process.wait(ENDED_S)
    must(ended == -signal.SIGBUS, f"the job needs pages that nobody has, and ends with {ended}")
    say(f"all lenders died for {DEAD_S:g} s: the job waited, and had SIGBUS {time.monotonic() - began_s:.0f} s later")
    must(rack.program(HOST, "vold") == vold, "the volume's process was started again")
    wait("the swap area is empty", lambda: swapped() < MIB)
    say(" / ".join(rack.agentctl("volume", "ls")[1].strip().splitlines()))
    other.do("verify", 0, 16 * MIB // 4096)
    wait("every slab has its members", lambda: row(rack)["slabs_whole"] == row(rack)["slabs"], 150)
    job = PageJob()
    job.do("write")
    must(swapped() > 60 * MIB, "nothing is swapped")
    job.do("verify")
    say("the next job swaps to the same area, every page verified")
    frees(rack, job)
    other.do("verify", 0, 16 * MIB // 4096)
    other.end()


def main() -> None:
    kind = sys.argv[1]
    if kind.startswith("redis") and shutil.which("redis-server") is None:
        say("redis: left out, redis-server is not installed; next: apt-get install redis-server")
        return
    threading.Thread(target=watch, daemon=True).start()
    try:
        helper = Helper()
        with living_rack(1 + (LENDERS_WITHOUT_DISK if kind in WORDS else LENDERS), 1) as rack:
            say(f"a rack of {len(rack.hosts)} agents is up")
            try:
                play(rack, kind, helper)
            except AssertionError:
                for path in sorted(rack.directory.glob("*/logs/*.log")):
                    print(f"---- {path}\n{path.read_text(errors='replace')[-1000:]}", flush=True)
                subprocess.run(["dmesg"], check=False)
                raise
    except AssertionError as error:
        say(f"FAILED: {error}")
        sys.exit(1)
    say(f"{kind}: all of it holds")


if __name__ == "__main__":
    main()

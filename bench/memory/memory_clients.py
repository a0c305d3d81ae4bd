"""Clients of a volume's block device that were written elsewhere, at length, on a rack of four real agents.

    make clients                                        # all of them: some three minutes
    python bench/memory/memory_clients.py --only redis

    fio        random writes and reads, every block verified, while a lender's slab process is killed
    nbdcopy    a file with holes in and out, and how many bytes were asked for
    nbdinfo    the map of what is allocated
    qemu-io    patterns, zeroes, discards, flushes at odd offsets
    qemu-img   convert, compare, map
    redis      160 MiB of values under a limit of 64 MiB, swapped to the volume through nbdfuse and a loop device; every
               value is verified, with kill -9 of the volume's process (twice) and of a lender's in the middle

A client that cannot run here is named, with the reason, and counts as left out. Exit status 1 when a client that ran
found anything wrong. Swap, loop device, mount, group and rack are always removed at the end. Redis needs root.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from covey.core.units import MIB
from tests.rack.living_rack import LivingRack, living_rack, wait

SIZE = 512 * MIB
SLABS = SIZE // (64 * MIB)
HOST, VOLUME = "gpu1", "clients"
VALUE_BYTES, VALUES, LIMIT = 4096, 160 * MIB // 4096, 64 * MIB
PIPELINE = 32
INSTALL = "apt-get install fio libnbd-bin nbdkit qemu-utils fuse3 redis-server"


class LeftOut(Exception):
    """Raised with the reason why a client cannot run here."""


class Wrong(Exception):
    """Raised with the error that a client found."""


class Device(NamedTuple):
    """The volume as a client sees it, and the rack behind it."""

    rack: LivingRack
    path: str
    directory: Path

    @property
    def uri(self) -> str:
        return f"nbd+unix:///?socket={self.path}"


def need(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise LeftOut(f"{' and '.join(missing)} not installed; next: {INSTALL}")


def run(*argv: str, within_s: float = 300.0) -> str:
    """Run a program; returns what it printed. Raises Wrong when it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise Wrong(f"{argv[0]} did not end within {within_s:g} s") from error
    if done.returncode:
        raise Wrong(f"{' '.join(argv)} ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
    return done.stdout + done.stderr


def must(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


# ---- the rack --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def exported(rack: LivingRack) -> Iterator[Device]:
    for words in (
        ("volume", "create", VOLUME, str(SIZE), "--host", HOST),
        ("volume", "export", VOLUME, "--socket", f"{rack.directory}/nbd.sock", "--host", HOST),
    ):
        code, said = rack.agentctl(*words)
        must(code == 0, f"agentctl {' '.join(words)}: {said}")
    yield Device(rack, f"{rack.directory}/nbd.sock", rack.directory)


def mapped(device: Device) -> list[str]:
    """The lender of each slab that has one."""
    slabs = device.rack.agent().get("slabs").data
    return [str(slab["lender"]) for slab in slabs if slab["volume"] == VOLUME and slab["state"] == "mapped"]


def kill_lender(device: Device) -> str:
    """Kill the slab process of the host that lends most, with which all of its slabs die."""
    found: list[str] = wait("somebody lends", lambda: mapped(device))
    name = max(sorted(set(found)), key=found.count)
    os.kill(device.rack.program(name, "slabd"), signal.SIGKILL)
    return f"the slab process of {name}"


def kill_volume(device: Device) -> str:
    os.kill(device.rack.program(HOST, "vold"), signal.SIGKILL)
    return "the volume's process"


def read_bytes(device: Device) -> int:
    rows = device.rack.agent().get("volumes").data
    return sum(int(row["read_bytes"]) for row in rows if row["volume"] == VOLUME)


# ---- clients ---------------------------------------------------------------------------------------------------------


def fio(device: Device) -> str:
    need("fio")
    common = ["fio", "--ioengine=nbd", f"--uri={device.uri}", "--verify=crc32c", "--verify_fatal=1",
              "--verify_state_save=0", f"--size={SIZE}", "--output-format=json"]  # fmt: skip
    run(*common, "--name=fill", "--rw=write", "--bs=1m", "--iodepth=4", "--do_verify=0")
    process = subprocess.Popen(
        [*common, "--name=v", "--rw=randwrite", "--bsrange=4k-64k", "--iodepth=16", "--norandommap", "--io_size=1g",
         "--verify_backlog=512"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait("half of the slabs have a lender", lambda: len(mapped(device)) >= SLABS // 2, 60)
        killed = kill_lender(device)
        said, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        raise Wrong("fio did not end within 300 s") from None
    finally:
        ended(process)
    must(process.returncode == 0, f"fio ended with {process.returncode}: {said[-600:]}")
    job = json.loads(said[said.index("{") :])["jobs"][0]
    longest_ms = max(job[kind]["clat_ns"]["max"] for kind in ("read", "write")) / 1e6
    return f"{job['write']['io_bytes'] >> 20} MiB verified, {killed} killed; longest wait {longest_ms:.0f} ms"


def nbdcopy(device: Device) -> str:
    need("nbdcopy", "qemu-io")
    rng = random.Random(3)
    whole, out = device.directory / "in", device.directory / "out"
    with whole.open("wb") as file:
        file.truncate(SIZE)
        for at in rng.sample(range(SIZE // MIB), 100):
            file.seek(at * MIB)
            file.write(rng.randbytes(MIB))
    run("qemu-io", "-f", "raw", "-c", f"discard 0 {SIZE // 2}", "-c", f"discard {SIZE // 2} {SIZE // 2}", device.uri)
    run("nbdcopy", "--destination-is-zero", str(whole), device.uri)
    time.sleep(2.5)  # the volume's process is asked once a second
    before = read_bytes(device)
    run("nbdcopy", device.uri, str(out))
    time.sleep(2.5)
    asked = read_bytes(device) - before
    run("cmp", str(whole), str(out))
    must(asked <= 120 * MIB, f"{asked >> 20} MiB were read of a volume with 100 MiB in it: holes are not skipped")
    return f"identical both ways; {asked >> 20} of {SIZE >> 20} MiB were read"


def nbdinfo(device: Device) -> str:
    need("nbdinfo", "qemu-io")
    run("qemu-io", "-f", "raw", "-c", "discard 0 1M", "-c", "write -P 5 256k 64k", device.uri)
    found = json.loads(run("nbdinfo", "--map", "--json", device.uri))
    first = [(each["offset"], each["length"], each["type"]) for each in found[:2]]
    must(first == [(0, 256 << 10, 3), (256 << 10, 64 << 10, 0)], f"the map begins with {first}")
    must(sum(each["length"] for each in found) == SIZE, "the map does not cover the export")
    return f"{len(found)} extents"


def qemu_io(device: Device) -> str:
    need("qemu-io")
    rng = random.Random(9)
    model = bytearray(b"\0" * (4 * MIB))
    orders = ["write -z 0 4M"]
    for number in range(400):
        offset, length = rng.randrange(4 * MIB - 70_000), rng.randrange(1, 70_000)
        if rng.randrange(4):
            orders.append(f"write -P {number % 255 + 1} {offset} {length}")
            model[offset : offset + length] = bytes([number % 255 + 1]) * length
        else:
            orders.append(f"write -z {'-u ' if rng.randrange(2) else ''}{offset} {length}")
            model[offset : offset + length] = bytes(length)
        at = rng.randrange(4 * MIB - 1)
        end = next((n for n in range(at, min(at + 5000, 4 * MIB)) if model[n] != model[at]), at + 1)
        orders.append(f"read -P {model[at]} {at} {end - at}")
    said = run(
        "qemu-io", "-t", "writeback", "-f", "raw", *(word for each in orders for word in ("-c", each)), device.uri
    )
    must("verification failed" not in said and said.count("bytes at offset") == len(orders), said[-400:])
    return f"{len(orders)} orders"


def qemu_img(device: Device) -> str:
    need("qemu-img")
    image, out = str(device.directory / "in.raw"), str(device.directory / "out.qcow2")
    with open(image, "wb") as file:
        file.truncate(SIZE)
        for at in range(0, SIZE, 32 * MIB):
            file.seek(at)
            file.write(random.Random(at).randbytes(MIB))
    run("qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", image, device.uri)
    run("qemu-img", "compare", "-f", "raw", "-F", "raw", image, device.uri)
    run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", device.uri, out)
    run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", out, image)
    taken = os.stat(out).st_blocks * 512
    must(taken < 2 * (SIZE // 32), f"the copy takes {taken >> 20} MiB: holes were not skipped")
    return f"identical both ways; the copy takes {taken >> 20} MiB"


# ---- redis, swapped to the volume ------------------------------------------------------------------------------------


class Redis:
    """A connection to Redis, and what every value must be."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(120)
        self._socket.connect(path)
        self._file = self._socket.makefile("rb")
        self.rounds = [0] * VALUES

    def value(self, key: int) -> bytes:
        return hashlib.shake_128(b"%d/%d" % (key, self.rounds[key])).digest(VALUE_BYTES)

    def set_all(self, keys: list[int]) -> None:
        for at in range(0, len(keys), PIPELINE):
            some = keys[at : at + PIPELINE]
            for key in some:
                self.rounds[key] += 1
            self._send([(b"SET", b"%d" % key, self.value(key)) for key in some])
            for _ in some:
                said = self._file.readline()
                must(said == b"+OK\r\n", f"redis answered {said!r} to SET")

    def verify(self, keys: list[int]) -> None:
        for at in range(0, len(keys), PIPELINE):
            some = keys[at : at + PIPELINE]
            self._send([(b"GET", b"%d" % key) for key in some])
            for key in some:
                head = self._file.readline()
                must(head == b"$%d\r\n" % VALUE_BYTES, f"redis answered {head!r} to GET {key}")
                must(self._file.read(VALUE_BYTES + 2)[:-2] == self.value(key), f"value {key} is not what was set")

    def _send(self, orders: list[tuple[bytes, ...]]) -> None:
        parts = [
            b"*%d\r\n" % len(order) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in order)
            for order in orders
        ]
        self._socket.sendall(b"".join(parts))


def redis(device: Device) -> str:
    need("redis-server", "nbdfuse", "nbdkit", "fusermount3", "losetup", "mkswap", "swapon", "swapoff")
    if os.geteuid() != 0:
        raise LeftOut("swap, loop devices and limits need root")
    for node in ("/dev/fuse", "/dev/loop-control"):
        if not os.path.exists(node):
            raise LeftOut(f"this machine has no {node}")
    rng = random.Random(1)
    keys = list(range(VALUES))
    with ExitStack() as stack:
        group = limited(stack)
        swap_on(stack, device)
        server = started_redis(stack, device, group)
        client = Redis(f"{device.directory}/redis.sock")
        began_s = time.monotonic()
        client.set_all(keys)
        swapped = swapped_bytes(server.pid)
        must(swapped > 60 * MIB, f"only {swapped >> 20} MiB of redis are swapped: nothing was tried")
        rng.shuffle(keys)
        killed = []
        half, quarter = VALUES // 2, VALUES // 4
        client.verify(keys[:quarter])
        killed.append(kill_volume(device))
        client.verify(keys[quarter:half])
        killed.append(kill_lender(device))
        client.verify(keys[half:])
        rng.shuffle(keys)
        client.set_all(keys[:quarter])
        killed.append(kill_volume(device))
        client.set_all(keys[quarter:half])
        client.verify(keys)
        took_s = time.monotonic() - began_s
    return f"{VALUES} values verified twice in {took_s:.0f} s, {swapped >> 20} MiB swapped; killed: {', '.join(killed)}"


def limited(stack: ExitStack, limit: int = LIMIT) -> Callable[[], None]:
    """A control group whose memory is limited; the returned function, called in a child, puts it there."""
    one, two = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    name = f"covey-clients-{os.getpid()}"
    try:
        if one.is_dir():
            group, file = one / name, "memory.limit_in_bytes"
        else:
            with contextlib.suppress(OSError):
                (two / "cgroup.subtree_control").write_text("+memory")
            group, file = two / name, "memory.max"
        group.mkdir()
        stack.callback(remove_group, group)
        (group / file).write_text(str(limit))
    except OSError as error:
        raise LeftOut(f"memory cannot be limited here: {error}") from error

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    return join


def remove_group(group: Path) -> None:
    for _ in range(50):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)
    print(f"  left behind: {group}", flush=True)


def swap_on(stack: ExitStack, device: Device) -> None:
    """Swap to the volume; nbdkit between nbdfuse and the volume asks again when the volume's process begins anew."""
    mount = device.directory / "swap"
    mount.touch()
    process = subprocess.Popen(
        ["nbdfuse", str(mount), "--command", "nbdkit", "-s", "--exit-with-parent", "--filter=retry", "nbd",
         f"socket={device.path}", "retries=60", "retry-delay=1", "retry-exponential=no"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    stack.callback(ended, process)
    stack.callback(quietly, "fusermount3", "-u", str(mount))
    for _ in range(100):
        if os.path.getsize(mount) == SIZE:
            break
        if process.poll() is not None:
            raise LeftOut(f"nbdfuse ended with {process.returncode}: FUSE is not permitted here")
        time.sleep(0.1)
    else:
        raise LeftOut("nbdfuse does not mount within 10 s")
    try:
        loop = run("losetup", "-f", "--show", str(mount)).strip()
    except Wrong as error:
        raise LeftOut(f"no loop device: {error}") from error
    stack.callback(quietly, "losetup", "-d", loop)
    run("mkswap", loop)
    try:
        run("swapon", "-p", "100", loop)
    except Wrong as error:
        raise LeftOut(f"swap is not permitted here: {error}") from error
    stack.callback(quietly, "swapoff", loop)


def started_redis(stack: ExitStack, device: Device, group: Callable[[], None]) -> subprocess.Popen[bytes]:
    path = f"{device.directory}/redis.sock"
    server = subprocess.Popen(
        ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir",
         str(device.directory)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=group, start_new_session=True,
    )  # fmt: skip
    stack.callback(ended, server, signal.SIGKILL)
    for _ in range(100):
        if os.path.exists(path):
            return server
        time.sleep(0.1)
    raise Wrong("redis does not listen within 10 s")


def swapped_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmSwap:"):
            return int(line.split()[1]) << 10
    return 0


def ended(process: subprocess.Popen[Any], how: int = signal.SIGTERM) -> None:
    if process.poll() is None:
        process.send_signal(how)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def quietly(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"  {' '.join(argv)}: {done.stderr.strip()}", flush=True)


# ---- all of them -----------------------------------------------------------------------------------------------------

CLIENTS: dict[str, Callable[[Device], str]] = {
    "fio": fio, "nbdcopy": nbdcopy, "nbdinfo": nbdinfo, "qemu-io": qemu_io, "qemu-img": qemu_img, "redis": redis,
}  # fmt: skip


def play(device: Device, name: str) -> str:
    """Run one client; returns `ok`, `left out` or `FAILED`, and prints a line that says so."""
    began_s = time.monotonic()
    try:
        word, said = "ok", CLIENTS[name](device)
    except LeftOut as why:
        word, said = "left out", str(why)
    except (Wrong, OSError, AssertionError) as why:
        word, said = "FAILED", str(why)
    print(f"{name:<9} {word:<8} {time.monotonic() - began_s:5.0f} s  {said}", flush=True)
    return word


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=CLIENTS, help="this client alone")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was set up is taken away then too
    names = [chosen.only] if chosen.only else list(CLIENTS)
    with living_rack() as rack, exported(rack) as device:
        words = [play(device, name) for name in names]
    left = words.count("left out")
    print(f"{words.count('ok')} of {len(words)} clients found nothing wrong" + (f", {left} left out" if left else ""))
    sys.exit(1 if "FAILED" in words or "ok" not in words else 0)


if __name__ == "__main__":
    main()

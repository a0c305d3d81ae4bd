"""Run commands in the guest: the working tree goes in on a second disk, what they print comes out line by line."""

import contextlib
import io
import os
import re
import signal
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

from chaos.guest.image import NoGuest, root

MEMORY_MB = 1536
PARTS = ("covey", "gossip", "plugins", "agent", "cli", "sim", "chaos", "tests", "tools", "pyproject.toml", "systemd")
"""Parts of the working tree that the guest gets."""
_EXIT = re.compile(rb"covey-guest: exit (\d+)")


def run(image: Path, script: str, within_s: float) -> int:
    """Run a script in the guest; returns its exit status. Raises NoGuest when the guest ended, or was ended, without
    one."""
    with tempfile.TemporaryDirectory(prefix="covey-guest") as directory:
        disk = Path(directory) / "payload.tar"
        _pack(disk, script)
        return _boot(image, disk, within_s)


def _pack(disk: Path, script: str) -> None:
    with tarfile.open(disk, "w") as tar:
        for part in PARTS:
            tar.add(root() / part, part, filter=_wanted)
        data = script.encode()
        info = tarfile.TarInfo("run.sh")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    size = -(-disk.stat().st_size // (1 << 20)) << 20
    os.truncate(disk, size)


def _wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if info.name.rpartition("/")[2] in ("__pycache__", "build", ".guest") else info


def _boot(image: Path, disk: Path, within_s: float) -> int:
    command = [
        "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(MEMORY_MB),
        "-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio",
        "-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd"),
        "-append", "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off random.trust_cpu=on",
        "-drive", f"file={image / 'disk.ext4'},if=virtio,format=raw,snapshot=on",
        "-drive", f"file={disk},if=virtio,format=raw,readonly=on",
    ]  # fmt: skip
    return follow(["nice", "-n", "15", *command], within_s)


def follow(command: list[str], within_s: float) -> int:
    """Run a guest and print what it says, up to the status with which its work ended. Raises NoGuest when there is
    none."""
    began = time.monotonic()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as guest:
        assert guest.stdout is not None
        os.set_blocking(guest.stdout.fileno(), False)
        try:
            return _follow(guest, began + within_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(guest.pid, signal.SIGKILL)  # each process of a User-Mode Linux is one here


def _follow(guest: "subprocess.Popen[bytes]", until: float) -> int:
    assert guest.stdout is not None
    code, tail = None, b""
    while time.monotonic() < until:
        data = guest.stdout.read()
        if data is None:
            time.sleep(0.1)
            continue
        if not data:
            break
        print(data.decode(errors="replace").replace("\r", ""), end="", flush=True)
        tail = (tail + data)[-4096:]
        found = _EXIT.search(tail)
        if found is not None:
            code = int(found[1])
            break
    if code is None:
        late = time.monotonic() >= until
        raise NoGuest("the guest did not end in time" if late else "the guest ended without an exit status")
    return code

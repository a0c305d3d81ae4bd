"""The guest's kernel, its first file system and its disk, of Debian packages; made once, kept in `.guest/`.

    packages -> mmdebstrap -> rootfs, with Python's packages of the project in /opt/site -> mke2fs -> disk.ext4
    linux-image -> vmlinuz, modules -> a small initramfs (busybox, what mounts the disk)

The name of the directory is a digest of all that goes in, so that a change makes another one.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from chaos.guest.initrd import cpio

SUITE = "bookworm"
"""Release of the guest, Debian 12: its python3-pyverbs is for Python 3.11, its kernel has rdma_rxe."""
SITE_PYTHON = "3.11"
"""Python version of that release."""
PACKAGES = (
    "python3", "python3-pyverbs", "rdma-core", "ibverbs-providers", "ibverbs-utils", "iproute2", "kmod", "procps",
    "busybox-static",
)  # fmt: skip
KERNEL = "linux-image-amd64"
TESTING = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
"""Packages of the extra `dev` that a test needs which runs in the guest."""
NEEDED = {
    "qemu-system-x86_64": "qemu-system-x86",
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "dpkg-deb": "dpkg",
}
"""Program -> the Debian package that has it."""
SPARE_BYTES = 256 << 20
"""Free bytes on the guest's disk."""


class NoGuest(Exception):
    """The guest cannot be made here; the text says why and what to do."""


def root() -> Path:
    return Path(__file__).resolve().parents[2]


def missing() -> list[str]:
    """What prevents a guest on this machine, a line each."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return [f"the guest is an amd64 machine made of Debian packages; this one is {os.uname().machine}"]
    lines = []
    packages = sorted({package for program, package in NEEDED.items() if shutil.which(program) is None})
    if packages:
        lines.append(f"programs are missing; next: apt install --no-install-recommends {' '.join(packages)}")
    if os.geteuid() != 0:
        lines.append("its file system is made by root (owners, device nodes); next: sudo make rdma")
    return lines


def requirements() -> list[str]:
    """Packages that the project's code needs in the guest, from pyproject.toml."""
    project = tomllib.loads((root() / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    dependencies = [each for each in named if not each.startswith("covey-job")]
    testing = {each for each in project["optional-dependencies"]["dev"] if _name(each) not in TESTING}
    job = tomllib.loads((root() / "covey" / "pyproject.toml").read_text())["project"]["dependencies"]
    return sorted({*dependencies, *job} - testing)


def _name(requirement: str) -> str:
    return requirement.split(">")[0].split("=")[0].split("[")[0].strip()


def digest() -> str:
    here = [(Path(__file__).parent / name).read_text() for name in ("init.sh", "initrd.py", "image.py")]
    said = [*requirements(), *here]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:12]


def made() -> Path:
    """The directory with `vmlinuz`, `initrd` and `disk.ext4`; made if it does not exist. NoGuest says why it cannot be
    made."""
    kept = root() / ".guest" / digest()
    if (kept / "disk.ext4").exists():
        return kept
    why = missing()
    if why:
        raise NoGuest("\n".join(why))
    work = kept.with_suffix(".part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        _make(work)
        work.rename(kept)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return kept


def _make(work: Path) -> None:
    rootfs, kernel = work / "rootfs", work / "kernel"
    print("guest: Debian packages ...", flush=True)
    _run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}",
         "--customize-hook=rm -rf $1/usr/share/doc $1/usr/share/man $1/usr/share/locale",
         f"--customize-hook={_fetch_kernel(work)}", SUITE, str(rootfs))  # fmt: skip
    print("guest: Python packages ...", flush=True)
    _run(sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile",
         "--only-binary=:all:", f"--python-version={SITE_PYTHON}", "--target", str(rootfs / "opt" / "site"),
         *requirements())  # fmt: skip
    (rootfs / "usr/lib/python3/dist-packages/site.pth").write_text("/opt/site\n")
    _run("chroot", str(rootfs), "python3", "-m", "compileall", "-q", "/opt/site", "/usr/lib/python3")
    deb = next(work.glob("linux-image-*.deb"))
    _run("dpkg-deb", "-x", str(deb), str(kernel))
    shutil.copy(next((kernel / "boot").glob("vmlinuz-*")), work / "vmlinuz")
    _keep_modules(kernel, rootfs)
    init = rootfs / "covey-init"
    shutil.copy(Path(__file__).parent / "init.sh", init)
    init.chmod(0o755)
    (work / "initrd").write_bytes(gzip.compress(cpio(rootfs), 1))
    print("guest: its disk ...", flush=True)
    used = sum(path.lstat().st_blocks * 512 for path in rootfs.rglob("*"))
    megabytes = (used * 5 // 4 + SPARE_BYTES) >> 20
    disk = work / "disk.part"
    _run("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", str(rootfs), str(disk), f"{megabytes}M")
    shutil.rmtree(rootfs)
    shutil.rmtree(kernel)
    deb.unlink()
    disk.rename(work / "disk.ext4")


def _fetch_kernel(work: Path) -> str:
    """Shell command that fetches the kernel with the guest's own apt: this machine may be of another release."""
    newest = f"apt-cache depends {KERNEL} | sed -n 's/.*Depends: //p' | head -1"
    inside = f"cd /tmp && apt-get update -qq && apt-get download -qq $({newest})"
    return f'chroot "$1" sh -c "{inside.replace("$", chr(92) + "$")}" && mv "$1"/tmp/linux-image-*.deb {work}/'


def _keep_modules(kernel: Path, rootfs: Path) -> None:
    """Copy the kernel modules that the guest needs: networks, RDMA and what the disk needs."""
    source = next((kernel / "lib" / "modules").iterdir())
    target = rootfs / "lib" / "modules" / source.name
    for part in ("kernel/drivers/infiniband", "kernel/drivers/net/veth.ko", "kernel/drivers/net/dummy.ko",
                 "kernel/drivers/virtio", "kernel/drivers/block/virtio_blk.ko", "kernel/drivers/block/nbd.ko",
                 "kernel/fs/ext4", "kernel/fs/jbd2", "kernel/fs/mbcache.ko", "kernel/lib", "kernel/crypto",
                 "kernel/net/ipv4", "kernel/net/ipv6", "kernel/net/sched", "kernel/arch/x86/crypto"):  # fmt: skip
        for path in source.glob(part + "*"):
            where = target / path.relative_to(source)
            where.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, where, dirs_exist_ok=True)
            else:
                shutil.copy(path, where)
    for path in source.glob("modules.*"):
        shutil.copy(path, target / path.name)
    _run("chroot", str(rootfs), "depmod", source.name)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, text=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        raise NoGuest(f"{command[0]} failed: {(error.stderr or error.stdout).strip()[-1500:]}") from error

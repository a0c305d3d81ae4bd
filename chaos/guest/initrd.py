"""The first file system of the guest: busybox, and the modules that its disk needs, in the order in which they load."""

from pathlib import Path

BOOT_MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4")
INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /new
/bin/busybox mount -t devtmpfs none /dev
{load}
/bin/busybox mount -t ext4 /dev/vda /new || /bin/busybox poweroff -f
/bin/busybox mount --move /dev /new/dev
exec /bin/busybox switch_root /new /covey-init
"""


def cpio(rootfs: Path) -> bytes:
    """The initial file system in the kernel's format (`newc`)."""
    files = {path.name: path.read_bytes() for path in _in_order(next((rootfs / "lib" / "modules").iterdir()))}
    load = "\n".join(f"/bin/busybox insmod /{name}" for name in files)
    busybox = (rootfs / "bin" / "busybox").read_bytes()
    entries = [("bin", 0o040755, b""), ("bin/busybox", 0o100755, busybox)]
    entries += [(name, 0o100644, data) for name, data in files.items()]
    entries.append(("init", 0o100755, INIT.format(load=load).encode()))
    return b"".join(_entry(number, *entry) for number, entry in enumerate(entries, 1)) + _entry(0, "TRAILER!!!", 0, b"")


def _in_order(modules: Path) -> list[Path]:
    """The modules that the disk needs, each after those that it needs itself (`modules.dep`)."""
    needs: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        name, _, needed = line.partition(":")
        needs[name] = needed.split()
    by_name = {Path(name).name.split(".")[0].replace("-", "_"): name for name in needs}
    order: list[str] = []
    for wanted in BOOT_MODULES:
        if wanted in by_name:  # otherwise it is a part of the kernel
            order += [*reversed(needs[by_name[wanted]]), by_name[wanted]]
    return [modules / name for name in dict.fromkeys(order)]


def _entry(number: int, name: str, mode: int, data: bytes) -> bytes:
    encoded = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08x" % field for field in fields)
    return _padded(header + encoded) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)

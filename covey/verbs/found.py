"""Whether there is RDMA on this host, and if not, why. Only files are looked at: nothing is loaded and nothing is
opened.

What is found may still refuse when a byte process or a rank opens it; that process says so itself.
"""

import importlib.machinery
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "/usr/lib/python3/dist-packages"
"""The folder where Debian puts python3-pyverbs; a virtual environment does not look there."""
ACTIVE = "4:"
"""The beginning of the state of a port that works, as the kernel writes it."""
ROCE_V2 = "RoCE v2"


@dataclass(frozen=True)
class RdmaPort:
    """A port of a device that can be used."""

    device: str
    port: int
    ethernet: bool
    gid_index: int
    gid: bytes
    lid: int
    mtu: int
    """The MTU's number in verbs, not its bytes."""


@dataclass(frozen=True)
class RdmaFound:
    """The port that was found. `port` None: there is none, `why` says why, and what to do where something can be
    done."""

    port: RdmaPort | None
    why: str = ""


def look(
    sysfs: Path = Path("/sys/class/infiniband"),
    devices: Path = Path("/dev/infiniband"),
    distribution: str = DISTRIBUTION,
    needs_bytes: int = 0,
    known: RdmaPort | None = None,
) -> RdmaFound:
    """Look for a port. `needs_bytes`: memory that must be lockable at least. `known`: the port that was found before,
    which is taken again where it still works: to look for one is to read up to a thousand addresses."""
    if not sysfs.is_dir() or not any(sysfs.iterdir()):
        return RdmaFound(None, "this host has no RDMA device")
    if pyverbs_spec(distribution) is None:
        return RdmaFound(None, f"this host has a device, but no pyverbs for Python {_python()}{_other(distribution)}")
    if known is not None and _still_works(sysfs, known):
        ports = [known]
    else:
        ports = [found for each in sorted(sysfs.iterdir()) for found in _ports(each)]
    if not ports:
        return RdmaFound(None, f"no port of {_names(sysfs)} is active and has an address; next: rdma link")
    port = ports[0]
    nodes = [devices / name.name for name in sorted((sysfs / port.device / "device" / "infiniband_verbs").glob("*"))]
    nodes = nodes or sorted(devices.glob("uverbs*"))
    if not nodes:
        return RdmaFound(None, f"{devices} has no device for {port.device}; next: modprobe ib_uverbs")
    if not os.access(nodes[0], os.R_OK | os.W_OK):
        return RdmaFound(None, f"{nodes[0]} may not be opened by this user; next: install rdma-core (its udev rules)")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and limit < needs_bytes and os.geteuid() != 0:
        return RdmaFound(
            None, f"{limit} bytes may be locked, {needs_bytes} are needed; next: LimitMEMLOCK=infinity in the unit"
        )
    return RdmaFound(port)


def pyverbs_spec(distribution: str = DISTRIBUTION) -> importlib.machinery.ModuleSpec | None:
    """The import spec of a pyverbs that this Python can load: its own, or the distribution's."""
    for path in (None, [distribution]):
        spec = importlib.machinery.PathFinder.find_spec("pyverbs", path)
        if spec is not None and spec.submodule_search_locations is not None:
            inside = importlib.machinery.PathFinder.find_spec("pyverbs.device", list(spec.submodule_search_locations))
            if inside is not None:
                return spec
    return None


def _other(distribution: str) -> str:
    """What there is instead of a pyverbs for this Python."""
    built = sorted(Path(distribution).glob("pyverbs/device.*.so"))
    if not built:
        return "; next: apt install python3-pyverbs"
    return f" ({built[0].name} is for another); next: run Covey with the distribution's Python"


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _names(sysfs: Path) -> str:
    return ", ".join(each.name for each in sorted(sysfs.iterdir()))


def _ports(device: Path) -> list[RdmaPort]:
    found = []
    for port in sorted((device / "ports").glob("*"), key=lambda each: each.name):
        if not _text(port / "state").startswith(ACTIVE):
            continue
        ethernet = _text(port / "link_layer") == "Ethernet"
        gid = _gid(port, ethernet)
        if gid is not None:
            lid = int(_text(port / "lid") or "0", 0)
            found.append(RdmaPort(device.name, int(port.name), ethernet, *gid, 0 if ethernet else lid, _mtu(port)))
    return found


def _still_works(sysfs: Path, known: RdmaPort) -> bool:
    port = sysfs / known.device / "ports" / str(known.port)
    gid = _text(port / "gids" / str(known.gid_index)).replace(":", "")
    return _text(port / "state").startswith(ACTIVE) and gid == known.gid.hex()


def _gid(port: Path, ethernet: bool) -> tuple[int, bytes] | None:
    """The GID's index and value: over Ethernet an IPv4 address of RoCE v2, since that is routed and needs no scope;
    else any that is not link-local, else any."""
    named = []
    for path in sorted((port / "gids").glob("*"), key=lambda each: int(each.name)):
        gid = bytes.fromhex(_text(path).replace(":", ""))
        if len(gid) == 16 and any(gid[8:]):
            kind = _text(port / "gid_attrs" / "types" / path.name)
            v4, local = gid[:12] == bytes(10) + b"\xff\xff", gid[:2] == b"\xfe\x80"
            if not ethernet or kind in (ROCE_V2, ""):
                named.append((not v4 if ethernet else False, local if ethernet else False, int(path.name), gid))
    return (named and min(named)[2:]) or None


def _mtu(port: Path) -> int:
    """The assumed MTU's number, since sysfs does not tell it: over Ethernet that of 1024 bytes, which every RoCE port
    has, else that of 2048. pyverbs tells it when the device is opened."""
    return 3 if _text(port / "link_layer") == "Ethernet" else 4


def _text(path: Path) -> str:
    """The text of a file of the kernel; empty where it cannot be read, as for entries that are not in use."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""

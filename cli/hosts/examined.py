"""What `agentctl doctor` measures against other hosts, and reads of the agent's process and devices on this one.

What cannot be read is a finding, too: nothing is called good that nobody looked at.
"""

import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, Literal, NamedTuple

from agent.ports.memory.pages import FILES, FILES_A_HOST

State = Literal["good", "lacking", "wrong"]
CLOCK_S = 2.0
"""Seconds by which a clock may be off before it is wrong (chosen): events of several hosts are read side by side by
their times, and a boot number is the clock's second."""
PID_S = 2.0
"""Seconds that an agent, which may be stopped, has to accept a connection before its process is not known (chosen)."""
LIMITS = ("Max locked memory", "Max open files")
LOCKED_BYTES_MIN = 64 << 20
"""The least memory that an agent should be able to lock: page-locked buffers, and what a network card writes to."""


class Finding(NamedTuple):
    what: str
    state: State
    why: str
    next: str = ""


# ---- against other hosts ---------------------------------------------------------------------------------------------


def of_links(me: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """`rows`: as `GET /v1/links` has them."""
    for row in rows:
        host, rtt_s = row["host"], row["rtt_s"]
        if rtt_s is None:
            next = f"on {host}: systemctl status covey; a firewall must let TCP port 7947 through, both ways"
            yield Finding(f"ports to {host}", "wrong", row["why"], next)
        elif row["whole"] is False:
            why = f"short messages come through, and one of 64 KiB does not: packets of full size are lost to {host}"
            next = f"ping -M do -s 1472 {host}; ip link: the MTU must be the same on every host and switch"
            yield Finding(f"MTU to {host}", "wrong", why, next)
        elif row["whole"] is None:
            yield Finding(f"MTU to {host}", "lacking", f"not known: {row['why']}", "agentctl version")
    yield from _of_clocks(me, rows)
    answered = [row for row in rows if row["whole"]]
    if answered:
        slowest = max(answered, key=lambda row: float(row["rtt_s"]))
        why = f"{len(answered)} of {len(rows)} other hosts answer short and long messages; the slowest is "
        yield Finding("links", "good", f"{why}{slowest['host']}, {slowest['rtt_s'] * 1000:.1f} ms")


def _of_clocks(me: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Clocks that are off from the middle one of all; `me` is off by 0 from itself. Which clock is right is known only
    where more than half of them agree."""
    offsets = {me: (0.0, 0.0)}
    offsets |= {row["host"]: (row["offset_s"], row["rtt_s"] / 2) for row in rows if row["offset_s"] is not None}
    middle_s = median_low(offset_s for offset_s, _ in offsets.values())
    off = {host: offset_s - middle_s for host, (offset_s, _) in offsets.items()}
    agree = sum(abs(by_s) <= CLOCK_S for by_s in off.values())
    wrong = [host for host, by_s in off.items() if abs(by_s) > CLOCK_S + offsets[host][1] and 2 * agree > len(off)]
    for host in wrong:
        ahead = f"{abs(off[host]):.1f} s {'ahead of' if off[host] > 0 else 'behind'}"
        next = f"on {host}: timedatectl set-ntp true"
        yield Finding(f"clock of {host}", "wrong", f"it is {ahead} the clocks of most hosts", next)
    spread_s = max(off.values()) - min(off.values())
    least_s = max(at_s - by_s for at_s, by_s in offsets.values()) - min(at_s + by_s for at_s, by_s in offsets.values())
    if len(off) > 1 and spread_s <= CLOCK_S:
        yield Finding("clocks", "good", f"{len(off)} hosts are within {1000 * spread_s:.0f} ms")
    elif least_s > CLOCK_S and not wrong:
        why = f"{len(off)} hosts are {spread_s:.1f} s apart, and it is not known which is right"
        yield Finding("clocks", "wrong", why, "timedatectl on each")


# ---- on this host ----------------------------------------------------------------------------------------------------


def pid_behind(path: str) -> int | None:
    """The process that listens on a Unix socket; None when it cannot be asked."""
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(PID_S)
            link.connect(path)
            pid = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            return int(pid) or None
    except OSError:
        return None


def of_process_limits(root: Path, pid: int | None, hosts: int) -> Iterator[Finding]:
    """How much memory the agent may lock, and how many files it may open. `hosts`: the number of the rack's."""
    try:
        text = (root / f"proc/{pid}/limits").read_text() if pid is not None else ""
    except OSError as error:
        text, why = "", f"the agent's limits cannot be read: {error.strerror}"
    else:
        why = "the agent's limits cannot be read"
    said = {name: line for line in text.splitlines() for name in LIMITS if line.startswith(name)}
    soft, files = (said[name].split()[3] if name in said else "" for name in LIMITS)
    if not soft or not files:
        yield Finding("limits of the agent", "lacking", why, "run agentctl doctor as root")
        return
    if files != "unlimited" and int(files) < (needs := FILES + FILES_A_HOST * hosts):
        why = f"the agent may open {files} files, and needs some {needs} in a rack of {hosts}"
        raise_it = "LimitNOFILE=65536 in its unit, or ulimit -n 65536 before agentd starts; then restart it"
        yield Finding("files", "wrong", why, raise_it)
    if soft != "unlimited" and int(soft) < LOCKED_BYTES_MIN:
        why = f"the agent may lock {int(soft) >> 10} KiB of memory: no RDMA, and slower copies from GPUs"
        raise_it = "LimitMEMLOCK=infinity in its unit, or ulimit -l unlimited before agentd starts; then restart it"
        yield Finding("memlock", "lacking", why, raise_it)


def of_names(root: Path, hosts: Sequence[str], me: str) -> Iterator[Finding]:
    """Names of hosts that `etc/hosts` leads to this machine itself. Servers of names are not asked: one that is silent
    would be waited for, for each host in turn."""
    try:
        lines = [line.partition("#")[0].split() for line in (root / "etc/hosts").read_text().splitlines()]
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        yield Finding("names", "lacking", f"/etc/hosts cannot be read: {error}", "ls -l /etc/hosts")
        return
    for host in hosts:  # one that is not in it is well: hosts know one another by address
        found = [words[0] for words in lines if host in words[1:]]
        loops = [each for each in found if each.startswith("127.") or each == "::1"]
        if loops and (host != me or len(loops) == len(found)):
            why = f"{host} is {loops[0]} in /etc/hosts: a script that listens under that name hears no other host"
            yield Finding(f"name {host}", "lacking", why, f"write its own address for {host} into /etc/hosts")


def of_driver(root: Path, me: str, gpus: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """GPUs that NVIDIA's driver has on this host, and the agent, which answered, does not list. `gpus`: as
    `GET /v1/gpus` has them. An agent whose settings give it other devices is not meant to list them."""
    folder = root / "proc/driver/nvidia/gpus"
    try:
        found = sorted(folder.iterdir()) if folder.exists() else []
    except OSError as error:
        yield Finding("driver", "lacking", f"{folder} cannot be read: {error.strerror}", "run agentctl doctor as root")
        return
    here = [gpu for gpu in gpus if gpu["host"] == me]
    listed = {str(gpu["uuid"]) for gpu in here}
    if any(gpu.get("simulated") for gpu in here) or any(each.startswith("CPU-") for each in listed):
        return
    for device in found:
        uuid, minor = _said(device / "information")
        what = f"GPU at {device.name}"
        if not uuid:
            yield Finding(what, "lacking", "what the driver says of it cannot be read", "run agentctl doctor as root")
        elif uuid not in listed and not any(each.startswith("MIG-") for each in listed):
            node = f"/dev/nvidia{minor}"
            why = f"the driver has {uuid}, and the agent does not list it: it cannot open {node}"
            yield Finding(what, "wrong", why, f"runuser -u covey -- nvidia-smi -L; ls -l {node}")


def _said(path: Path) -> tuple[str, str]:
    """UUID and minor number of a GPU, as the driver says; empty: not known."""
    try:
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    except (OSError, UnicodeDecodeError):
        return "", ""
    return lines.get("GPU UUID", "").strip(), lines.get("Device Minor", "").strip()


def of_limits(hosts: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Hosts where users' jobs are not limited. `hosts`: as `GET /v1/hosts` has them."""
    for host in hosts:
        if host.get("other_users") == "unlimited":
            why = "memory, processes and devices of users' jobs are not limited: systemd does not run its starter"
            yield Finding(
                f"limits on {host['host']}", "lacking", why, "stat -fc %T /sys/fs/cgroup: cgroup2fs is needed"
            )

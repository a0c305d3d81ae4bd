"""The process, user and groups at the other end of a unix socket, as the kernel tells them: the one place that asks.

The kernel notes pid and uid when a process connects, so the answer stays the same when the peer closes or ends. Three
things make it no answer, and each is `UNKNOWN_USER` here, which no rule lets in: the socket was never connected (the
kernel says uid -1), it is closed already, or the peer's user has no number in this process's user namespace (the kernel
says 65534, which another process may truly be).
"""

import socket
import struct
from pathlib import Path
from typing import Any

from covey.ports.streams import UNKNOWN_USER

_PEERCRED = struct.Struct("iII")
_PEERGROUPS = 59
"""SO_PEERGROUPS of Linux, which Python does not name."""
_GROUPS_MAX = 256
"""The most supplementary groups that Python has room for in one answer of the kernel."""
_ALL_USERS = 0xFFFFFFFF
"""The number of user ids; the last, 2**32 - 1, means none."""
OVERFLOW_UID = 65534
"""The kernel's default of the overflow user id."""
OVERFLOW, UID_MAP = Path("/proc/sys/kernel/overflowuid"), Path("/proc/self/uid_map")


def peer_of(connection: Any) -> tuple[int, int]:
    """Pid and uid of the process that connected; the pid is 0 where the kernel does not tell. `connection`: a unix
    socket, or what a transport calls one."""
    try:
        told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        pid, uid, _ = _PEERCRED.unpack(told)
    except (OSError, struct.error):
        return 0, UNKNOWN_USER
    return pid, UNKNOWN_USER if uid == _ALL_USERS or stands_for_others(uid) else uid


def is_in_group(connection: Any, gid: int) -> bool:
    """Whether the process that connected was in this group then, as the kernel tells; False where it does not, and of a
    process with more than `_GROUPS_MAX` groups unless this is its first."""
    try:
        told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        if _PEERCRED.unpack(told)[2] == gid:
            return True
        groups = connection.getsockopt(socket.SOL_SOCKET, _PEERGROUPS, 4 * _GROUPS_MAX)
        return any(each == gid for (each,) in struct.iter_unpack("I", groups))
    except (OSError, struct.error):
        return False


def stands_for_others(uid: int, overflow: Path = OVERFLOW, uid_map: Path = UID_MAP) -> bool:
    """Whether the kernel gives this number to users that have none here. It does in a user namespace that does not hold
    all of them, as containers are; one whose map cannot be read is taken for such."""
    try:
        others = int(overflow.read_text())
    except (OSError, ValueError):
        others = OVERFLOW_UID
    if uid != others:
        return False
    try:
        return sum(int(line.split()[2]) for line in uid_map.read_text().splitlines()) < _ALL_USERS
    except (OSError, ValueError, IndexError):
        return True

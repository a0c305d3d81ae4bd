"""Unix sockets of this host: made, replaced when their process is dead, and handed to the user that they are for."""

import contextlib
import fcntl
import os
import socket
import stat
import struct

from covey.ports.streams import ANYBODY

UNIX_PATH_MAX = 107
_ACL = "system.posix_acl_access"
_ACL_ENTRY = struct.Struct("<HHI")
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_READ_WRITE = 6
_NOBODY = 0xFFFFFFFF


def hand_over(path: str, uid: int) -> None:
    """Let that user, and no other but him and this process's own, connect there: the file becomes his where this
    process may give files away, else it gets an entry for him (an ACL, which needs no privilege). Where the file system
    has no ACLs everybody may connect, and the process behind the socket asks the kernel who does, as it always has to.
    In a folder that gives files its group (`agent.starter.folders`), which is that user's, the group may connect, and
    the folder stays as it is. -1: this user's alone; `ANYBODY`: everybody's. The folder can be passed through from now
    on, not listed."""
    folder = os.path.dirname(path) or "."
    if uid in (-1, os.geteuid()):
        return
    if (found := os.stat(folder)).st_mode & stat.S_ISGID and uid != ANYBODY:
        os.chmod(path, 0o660)
        return
    try:
        if uid == ANYBODY:
            os.chmod(path, 0o666)
        else:
            os.chown(path, uid, -1)
    except PermissionError:
        try:
            os.setxattr(path, _ACL, _entries(uid))
        except OSError:
            os.chmod(path, 0o666)
    mode = stat.S_IMODE(found.st_mode)
    if not mode & 0o001:
        os.chmod(folder, mode | 0o011)


def _entries(uid: int) -> bytes:
    """An ACL in the form of the kernel's extended attribute, version 2: this process's user and that user read and
    write."""
    listed = ((_OWNER, _READ_WRITE, _NOBODY), (_USER, _READ_WRITE, uid), (_GROUP, 0, _NOBODY),
              (_MASK, _READ_WRITE, _NOBODY), (_OTHER, 0, _NOBODY))  # fmt: skip
    return struct.pack("<I", 2) + b"".join(_ACL_ENTRY.pack(*entry) for entry in listed)


def unix_path(path: str) -> str:
    if len(os.fsencode(path)) > UNIX_PATH_MAX:
        raise OSError(f"the socket path {path} is longer than {UNIX_PATH_MAX} bytes; choose a shorter run_dir")
    return path


def bind_unix(path: str, kind: int = socket.SOCK_STREAM, uid: int = -1) -> socket.socket:
    """A bound and listening unix socket, mode 0600, of this process's user or handed to another. OSError when somebody
    else listens there, or could put a socket of his own in its place."""
    directory = os.path.dirname(unix_path(path)) or "."
    os.makedirs(directory, mode=0o700, exist_ok=True)
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    bound = socket.socket(socket.AF_UNIX, kind)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _check_folder(directory, os.fstat(lock))
        _remove_stale(path)
        os.fchmod(bound.fileno(), 0o600)  # before binding: the file never exists with another mode
        bound.bind(path)
        bound.setblocking(False)
        hand_over(path, uid)
        bound.listen(512)
    except OSError:
        bound.close()
        raise
    finally:
        os.close(lock)
    return bound


def _check_folder(directory: str, found: os.stat_result) -> None:
    """OSError when another user could put a socket there: a client, root perhaps, would talk to whomever that user
    likes."""
    if found.st_uid not in (os.geteuid(), 0):
        raise OSError(f"{directory} belongs to another user (uid {found.st_uid}), who could replace a socket there")
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise OSError(
            f"everybody may write to {directory} (mode {found.st_mode & 0o7777:o}) and replace a socket there"
        )


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(f"{path} exists and is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except BlockingIOError:
            pass  # a full backlog: a process listens there
    raise OSError(f"another process already listens on {path}")

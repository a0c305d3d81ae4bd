"""Unix sockets of this host: made, replaced when their process is dead, and handed to the user that they are for."""

import contextlib
import fcntl
import os
import socket
import stat

from agent.ports import access_lists
from covey.ports.streams import ANYBODY

UNIX_PATH_MAX = 107
READ_WRITE = access_lists.READ | access_lists.WRITE


def hand_over(path: str, uid: int) -> None:
    """Let that user, and no other but him and this process's own, connect there: the file becomes his where this
    process may give files away, else it gets an entry for him (an ACL, which needs no privilege). Where the file system
    has no ACLs everybody may connect, and the process behind the socket asks the kernel who does, as it always has to.
    -1: this user's alone; `ANYBODY`: everybody's. The folder can be passed through from now on, not listed; one with an
    access list of its own says itself who may (`agent.starter.folders`)."""
    if uid in (-1, os.geteuid()):
        return
    try:
        if uid == ANYBODY:
            os.chmod(path, 0o666)
        else:
            os.chown(path, uid, -1)
    except PermissionError:
        try:
            os.setxattr(path, access_lists.ACCESS, access_lists.for_two(uid, READ_WRITE, READ_WRITE))
        except OSError:
            os.chmod(path, 0o666)
    folder = os.path.dirname(path) or "."
    mode = stat.S_IMODE(os.stat(folder).st_mode)
    if not mode & 0o001 and not access_lists.has_list(folder):
        os.chmod(folder, mode | 0o011)


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

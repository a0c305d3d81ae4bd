"""The sockets of the agent's HTTP. `agent.api.admission` says who may ask what of them."""

import contextlib
import grp
import os
import socket


def gid_of(group: str) -> int | None:
    """The number of this group; None: this host has none of that name."""
    try:
        return grp.getgrnam(group).gr_gid if group else None
    except KeyError:
        return None


def unix_socket(path: str, gid: int | None = None) -> tuple[socket.socket, int | None]:
    """A bound unix socket, and the group that may use it: mode 0660 for this group, or 0600 where there is none, or
    where this process may not give files to it. A socket left by a dead agent is replaced; a live one is an OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(path)
        except TimeoutError:
            raise OSError(f"{path} belongs to another process") from None
        except (FileNotFoundError, ConnectionRefusedError):
            pass
        else:
            raise OSError(f"{path} belongs to another agent that is running")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    listener.bind(path)
    os.chmod(path, 0o600)  # nobody can connect before it listens
    if gid is not None:
        try:
            os.chown(path, -1, gid)
            folder = os.path.dirname(path) or "."
            os.chmod(folder, os.stat(folder).st_mode & 0o7777 | 0o011)  # they may go through, and list nothing
            os.chmod(path, 0o660)
        except PermissionError:
            gid = None
    return listener, gid


def tcp_socket(bind: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((host, int(port)))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {bind}: {error.strerror}") from error
    return listener

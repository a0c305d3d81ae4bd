"""The sockets of the agent's HTTP, and who may use them.

The mode of a unix socket admits one user. A TCP port on loopback is open to every user and every web page of this
machine; `is_our_name` and `peer_uid` tell them apart.
"""

import contextlib
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any


def unix_socket(path: str) -> socket.socket:
    """Bound, mode 0600 before it listens. A socket left by a dead agent is replaced; a live one is an OSError."""
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
    os.chmod(path, 0o600)
    return listener


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


def is_our_name(host: str, own: str) -> bool:
    """Whether a Host header is an IP address, localhost or this host's own name, whatever the port."""
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit() or host.endswith("]"):
        name = host
    if name.lower() in ("localhost", own):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def peer_uid(sock: Any) -> int | None:
    """The user who owns the other end of a loopback TCP connection, or None when this kernel does not tell."""
    here, there = sock.getsockname(), sock.getpeername()
    table = "/proc/net/tcp6" if sock.family == socket.AF_INET6 else "/proc/net/tcp"
    try:
        lines = Path(table).read_text().splitlines()[1:]
    except OSError:
        return None
    wanted = [_kernel_address(sock.family, there), _kernel_address(sock.family, here)]
    for line in lines:
        fields = line.split()
        if fields[1:3] == wanted:
            return int(fields[7])
    return None


def _kernel_address(family: int, address: tuple[Any, ...]) -> str:
    """`127.0.0.1:80` as /proc/net/tcp writes it: each 32-bit word in the machine's byte order."""
    packed = socket.inet_pton(family, address[0])
    words = [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"

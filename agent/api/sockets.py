"""The sockets of the agent's HTTP. `agent.api.admission` says who may ask what of them."""

import contextlib
import os
import socket


def unix_socket(path: str) -> socket.socket:
    """A bound unix socket, with mode 0600 before it listens. A socket left by a dead agent is replaced; a live one is
    an OSError."""
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

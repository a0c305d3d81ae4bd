"""Unix sockets that carry bulk bytes: pages of a volume, tensors."""

import socket

BULK_BYTES = 1 << 20
"""Send buffer of a unix socket that carries bulk bytes. With the kernel's default of 208 KB both ends sleep and wake
all the time. The kernel allows what net.core.wmem_max says, and counts twice that."""


def widen(sock: socket.socket) -> None:
    """Enlarge the buffer for what this end sends."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BULK_BYTES)

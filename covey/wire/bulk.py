"""Unix sockets that carry bulk bytes: pages of a volume, tensors."""

import socket

BULK_BYTES = 1 << 20
"""What the kernel keeps on its way of a unix socket for bulk bytes: with its 208 KB both ends sleep and wake all the
time. It allows what net.core.wmem_max says, and counts twice that."""


def widen(sock: socket.socket) -> None:
    """For what this end sends."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BULK_BYTES)

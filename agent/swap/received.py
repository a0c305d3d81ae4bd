"""Messages with descriptors, as the helper takes them from a unix socket."""

import os
import socket
from typing import TypeVar

import msgspec

from covey.wire import frames
from covey.wire import swap_wire as swapwire
from covey.wire.frames import FrameError

T = TypeVar("T")


def receive(connection: socket.socket, decoder: "msgspec.msgpack.Decoder[T]") -> tuple[T, list[int]] | None:
    """The next message and its descriptors, which are the caller's to close; None at the end. FrameError when it is
    malformed, longer than a message is, or when there are several at once: then no descriptor is left open."""
    data = bytearray()
    descriptors: list[int] = []
    try:
        while True:
            some, more, flags, _ = socket.recv_fds(connection, swapwire.MESSAGE_BYTES_MAX + 1 - len(data), 4)
            descriptors += more
            if not some:
                if data:
                    raise FrameError("it ended in the middle of a message")
                return None
            data += some
            if flags & socket.MSG_CTRUNC or len(descriptors) > 1:
                raise FrameError("more descriptors than one")
            found = list(frames.whole(data, decoder))
            if found and (len(found) > 1 or data):
                raise FrameError("more messages than one at once")
            if found:
                kept, descriptors = descriptors, []
                return found[0], kept
            if len(data) > swapwire.MESSAGE_BYTES_MAX:
                raise FrameError(f"a message of more than {swapwire.MESSAGE_BYTES_MAX} bytes")
    finally:
        for descriptor in descriptors:
            os.close(descriptor)

"""The handshake between a process and the process of a volume (`vold`), on a unix socket, and the operations there.

Requests and replies are those of `covey.wire.headers`. The hello carries the token that the agent gave to both ends.
"""

import struct
from typing import NamedTuple

from covey.wire import headers
from covey.wire.headers import Op, WireError

MAGIC = b"coveyvl1"
"""Magic of a hello; its last byte is the version of the protocol."""
PAGES, ARRAYS = MAGIC, b"coveyar1"
"""What a hello asks for: `PAGES` over this connection; `ARRAYS`: that the volume's pager listens for arrays
(`arr-NAME.sock` beside this socket), after which the connection ends."""
TOKEN_BYTES = 32
NO_TOKEN = bytes(TOKEN_BYTES)
"""The token in a hello of a process whose user owns the volume: the kernel tells the volume who it is."""
_HELLO = struct.Struct(f"<8s{TOKEN_BYTES}s")
HELLO_BYTES = _HELLO.size
REQUEST_PAGES_MAX = 256
"""Most pages in one request."""
OPERATIONS = {
    Op.READ: REQUEST_PAGES_MAX,
    Op.FETCH: REQUEST_PAGES_MAX,
    Op.WRITE: REQUEST_PAGES_MAX,
    Op.DISCARD: REQUEST_PAGES_MAX,
    Op.FLUSH: 0,
}
"""The operations of a volume, with the most pages of one request. The pages follow a WRITE, and the reply to a READ."""
SPOKEN = f"this process uses version {MAGIC[-1:].decode()} of the protocol"


class OtherVersion(WireError):
    """The hello has this protocol in another version. The text says what to do, for `agentctl why`."""


class Hello(NamedTuple):
    door: bytes
    """What is asked for: `PAGES` or `ARRAYS`."""
    token: bytes


def pack_hello(token: bytes, door: bytes = PAGES) -> bytes:
    return _HELLO.pack(door, token)


def hello(data: bytes | bytearray) -> Hello:
    """The parsed hello. OtherVersion when it has another version, WireError when it is no hello."""
    headers.expect("hello", data, HELLO_BYTES)
    magic, token = _HELLO.unpack(data)
    if magic in (PAGES, ARRAYS):
        return Hello(PAGES if magic == PAGES else ARRAYS, bytes(token))
    if magic[:-1] != MAGIC[:-1]:
        raise WireError("not a volume connection")
    theirs, ours = magic[-1:].decode("ascii", "replace"), MAGIC[-1:].decode()
    step = (
        "install the covey-job of this agent where it runs"
        if magic < MAGIC
        else "end this process (SIGTERM): the agent starts its own"
    )
    raise OtherVersion(f"it speaks version {theirs} of the volume protocol, this process {ours}; {step}")

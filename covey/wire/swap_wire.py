"""Messages between a volume's process and the host's swap helper: frames (`covey.wire.frames`) on a unix socket.

    volume -> helper   ConnectSwap, with one descriptor: the end of a socket pair that the kernel gets
    helper -> volume   SwapConnected
    volume -> helper   BeginSwap | EndSwap | AskSwap
    helper -> volume   SwapNow; or SwapRefused to any of them

A connection has one question at a time; volumes may open as many connections as they like. The helper keeps no state:
each question names the device by its *backend*, a text that the kernel keeps with it.
"""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

SIZE_MAX = 1 << 46
MESSAGE_BYTES_MAX = 4096
HELPER_SOCKET = "/run/covey-swap/swapd.sock"
"""Path where the helper of a host listens, unless it is told otherwise."""
BACKEND = re.compile(r"covey:[a-z0-9._:-]{1,120}")
Size = Annotated[int, Meta(ge=0, le=SIZE_MAX)]
Backend = Annotated[str, Meta(pattern=rf"^{BACKEND.pattern}\Z")]
"""Name of a device, which the kernel keeps as long as the device exists; it tells Covey's devices from others."""
Text = Annotated[str, Meta(max_length=400)]


class SwapFrame(msgspec.Struct, frozen=True, tag=True):
    """One message; the tag is the class name."""


class ConnectSwap(SwapFrame, frozen=True):
    """Make a block device on the socket that comes along; an existing device of this backend gets the socket in the
    place of its dead one. Answer: `SwapConnected`."""

    backend: Backend
    size_bytes: Size
    block_bytes: Annotated[int, Meta(ge=512, le=1 << 16)]
    timeout_s: Annotated[int, Meta(ge=1, le=3600)] = 5
    """Seconds until the kernel takes a silent socket for dead, and sends the request over another one."""
    resume: bool = False
    """The device must exist already: a new one would be an empty disk in the place of a swap area."""


class BeginSwap(SwapFrame, frozen=True):
    """Make the device a swap area and use it, unless it is in use already. Answer: `SwapNow`."""

    backend: Backend
    priority: Annotated[int, Meta(ge=0, le=32767)] = 100


class EndSwap(SwapFrame, frozen=True):
    """Take the swap area's pages back into memory and remove the device. Answer: `SwapNow`, when that is done;
    `SwapRefused` leaves the swap on."""

    backend: Backend


class AskSwap(SwapFrame, frozen=True):
    """Ask how the device is. Answer: `SwapNow`."""

    backend: Backend


class SwapConnected(SwapFrame, frozen=True):
    device: Text
    """Path of the device, such as `/dev/nbd0`."""
    resumed: bool
    """Whether the device existed already."""


class SwapNow(SwapFrame, frozen=True):
    device: Text = ""
    """Path of the device; empty: there is none."""
    is_on: bool = False
    """Whether the device is a swap area in use."""
    used_bytes: Size = 0
    """Bytes of the swap area that hold pages."""


class SwapRefused(SwapFrame, frozen=True):
    why: Text
    next: Text


class SwapCounts(msgspec.Struct, frozen=True, array_like=True):
    """The use of a volume as swap of its host."""

    word: Literal["off", "on", "waits", "ending", "lost"] = "off"
    """State of the swap. `waits`: the kernel has no socket of the volume, and keeps requests; `ending`: pages go back
    to memory; `lost`: the kernel has no such device any more."""
    device: Text = ""
    used_bytes: Size = 0
    why: Text = ""
    """Why it waits, or did not end; empty: nothing is wrong."""
    sockets: Size = 0
    """Number of sockets that the kernel was given since this process began."""


to_helper: msgspec.msgpack.Decoder[ConnectSwap | BeginSwap | EndSwap | AskSwap] = msgspec.msgpack.Decoder(
    ConnectSwap | BeginSwap | EndSwap | AskSwap
)
to_volume: msgspec.msgpack.Decoder[SwapConnected | SwapNow | SwapRefused] = msgspec.msgpack.Decoder(
    SwapConnected | SwapNow | SwapRefused
)

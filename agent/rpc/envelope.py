"""The frame of messages between agents: each message on a control link is one `Envelope`."""

from typing import Annotated, Literal

import msgspec

ENVELOPE_BYTES_MAX = 1 << 20
"""The longest envelope, bytes; bulk goes over `Bytes`."""
PAGE_BYTES = 512 << 10
"""Bytes of a page: a longer answer comes in pages of this size, asked for one after the other."""
ANSWER_BYTES_MAX = 32 << 20
"""The longest answer in bytes, all pages together: rows of some 100,000 slabs."""
PAGES_MAX = ANSWER_BYTES_MAX // PAGE_BYTES

Kind = Literal["send", "ack", "stale", "full", "ask", "answer", "refused", "raw"]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    kind: Kind
    id: Count
    boot: Count
    """The sender's boot; in an ack, stale, full, answer or refusal: the boot that asked."""
    to_boot: Count
    """The receiver's boot as the sender knows it; 0: any."""
    settled: Count
    """The lowest id that the sender may still repeat to this receiver."""
    plugin: Annotated[str, msgspec.Meta(max_length=32)]
    body: bytes
    page: Annotated[int, msgspec.Meta(ge=0, lt=PAGES_MAX)] = 0
    """The page's number, in an answer and in the question that asks for it."""
    pages: Annotated[int, msgspec.Meta(ge=1, le=PAGES_MAX)] = 1
    """The number of pages of an answer."""
    who: Count = 0
    """The identity of a `send`'s sender (`gossip.types.identity`): another installation under the same name has
    another, and its boots say nothing of this one's."""


class RefusedBody(msgspec.Struct, frozen=True):
    code: int
    what: str
    why: str
    next: str


encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Envelope)


def decode(data: bytes) -> Envelope | None:
    """Decode an envelope; None when it is malformed."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None

"""Messages about the facts of all hosts: digests and deltas (Scuttlebutt).

A host's facts are a map of its own, key -> bytes, each entry with the version of the map at which it was written. So
one number says how much of a host's map another one has: everything up to that version.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from covey.core.events import Message
from gossip.types import U32, Boot, Identity

KEYS_MAX = 32
"""The most keys of one host."""
KEY_BYTES_MAX = 64
VALUE_BYTES_MAX = 256
"""The most bytes of one value."""
TOMBSTONES_MAX = 8
"""The most removed keys that are still sent; older ones are forgotten, see `Delta.floor`."""


class KnownVersion(msgspec.Struct, frozen=True, array_like=True):
    """The sender has this host's facts up to this version."""

    identity: Identity
    boot: Boot
    version: U32


class Syn(Message, frozen=True, array_like=True, tag=33):
    """What the sender has of the hosts with `low <= identity <= high`; of one that is not listed it has nothing."""

    low: Identity
    high: Identity
    known: tuple[KnownVersion, ...]


class Want(Message, frozen=True, array_like=True, tag=34):
    """The receiver has newer facts of these hosts than the sender, who asks for them."""

    known: tuple[KnownVersion, ...]


class FactEntry(msgspec.Struct, frozen=True, array_like=True):
    key: Annotated[str, Meta(min_length=1, max_length=KEY_BYTES_MAX)]
    version: U32
    value: Annotated[bytes, Meta(max_length=VALUE_BYTES_MAX)] | None
    """The value; None: the key was removed."""


class Delta(Message, frozen=True, array_like=True, tag=35):
    """Everything of one host's map that was written after version `since`, up to `version`."""

    identity: Identity
    boot: Boot
    since: U32
    """The version after which the delta begins; 0: it is the whole map, and replaces the receiver's."""
    version: U32
    floor: U32
    """The version up to which removals are forgotten: a host with an older version needs the whole map."""
    age_ms: U32
    """Milliseconds since the host itself wrote `version`, as far as the sender knows."""
    entries: Annotated[tuple[FactEntry, ...], Meta(max_length=KEYS_MAX + TOMBSTONES_MAX)]


AnyMessage: TypeAlias = Syn | Want | Delta

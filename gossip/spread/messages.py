"""Messages about the facts of all hosts: digests and deltas (Scuttlebutt).

A host's facts are a map of its own, key -> bytes, each entry with the version of the map at which it was written. So
one number says how much of a host's map another one has: everything up to that version.

A row of a digest has 8 bytes: which version of a host's facts the sender has, and how old that knowledge is.

    0       4         6      8
    | host  | version | age  |        host: the low half of the identity; age: in steps of `AGE_STEP_S`

Two of 512 hosts share a low half with a chance of 3e-5: such hosts get no rows, but exact words (`Syn`). The version is
counted round: 0 is "nothing", and after 65535 comes 1 again. So which of two versions is newer holds as long as they
are fewer than 32768 apart. Where they are further apart, one side asks exactly (`Want`) for what it already has, or is
sent what it cannot use, and the exact numbers in these messages settle it (`machine.py`); where they are a multiple of
65535 apart, the next change does.
"""

import math
import struct
from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from covey.core.events import Message
from gossip.settings import DATAGRAM_BYTES_MAX
from gossip.types import U32, Boot, Identity

KEYS_MAX = 32
"""The most keys of one host."""
KEY_BYTES_MAX = 64
VALUE_BYTES_MAX = 256
"""The most bytes of one value."""
TOMBSTONES_MAX = 8
"""The most removed keys that are still sent; older ones are forgotten, see `Delta.floor`."""


# ---- rows of digests ----

_ROW = struct.Struct(">IHH")
ROW_BYTES = _ROW.size
VERSIONS = 65535
"""The number of versions that a row tells apart, beside 0."""
AGE_STEP_S = 0.01
AGE_UNKNOWN = 65535
"""Steps that say nothing about the age: it is not known, or over 655 s."""

Row = tuple[int, int, int]
"""The low half of an identity, a version counted round, an age in steps."""


def short(identity: int) -> int:
    """How a row names a host."""
    return identity & 0xFFFFFFFF


def wrapped(version: int) -> int:
    """The version as rows have it."""
    return 0 if version == 0 else 1 + (version - 1) % VERSIONS


def behind(theirs: int, version: int) -> int:
    """How many versions `theirs`, counted round, is behind `version`; negative when it is ahead."""
    if theirs == 0:
        return version
    if version == 0:
        return -1
    apart = (wrapped(version) - theirs) % VERSIONS
    return apart if apart <= VERSIONS // 2 else apart - VERSIONS


def steps(age_s: float) -> int:
    """An age as rows have it, rounded up: what is passed on never gets younger on the way."""
    return min(AGE_UNKNOWN, math.ceil(max(0.0, age_s) / AGE_STEP_S - 1e-6))


def packed(rows: Iterable[Row]) -> bytes:
    return b"".join(_ROW.pack(*row) for row in rows)


def unpacked(data: bytes) -> Iterable[Row]:
    """The rows of a `Digest`; an incomplete one at the end is none."""
    return _ROW.iter_unpack(data[: len(data) // ROW_BYTES * ROW_BYTES])


# ---- messages ----


class KnownVersion(msgspec.Struct, frozen=True, array_like=True):
    """The sender has this host's facts up to this version."""

    identity: Identity
    boot: Boot
    version: U32


class Syn(Message, frozen=True, array_like=True, tag=33):
    """What the sender has of the hosts with `low <= identity <= high`, exactly; of one that is not listed it has
    nothing. It is said of hosts that have no row of their own."""

    low: Identity
    high: Identity
    known: tuple[KnownVersion, ...]


class Want(Message, frozen=True, array_like=True, tag=34):
    """What the sender has of these hosts, exactly: it asks for what is newer, and whoever has less asks back."""

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


class Digest(Message, frozen=True, array_like=True, tag=36):
    """What the sender has of some hosts, in rows of 8 bytes; it says nothing of hosts that are not
    listed."""

    is_answer: bool
    """Whether it answers one: then it is not answered by another, and what is newer at the receiver is asked for."""
    rows: Annotated[bytes, Meta(min_length=ROW_BYTES, max_length=DATAGRAM_BYTES_MAX)]


AnyMessage: TypeAlias = Syn | Want | Delta | Digest

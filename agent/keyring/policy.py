"""Decisions about keys of gossip: what a host does to its ring, and which step of a rotation comes next.

    [old]  --install-->  [old, new]  --use-->  [new, old]  --remove-->  [new]          (the first key seals)

A step begins only when every host has taken the one before, as each of them says at that moment. So whoever seals with
a key is read by everybody, a host that was away at a step is caught up with first, and a rotation that stopped half way
continues from any host. Keys are called by a hash; numbers say which one is the newest.

The steps can also be asked for one by one, by the hash of a key. `use` and `remove` are refused where a host would not
be heard afterwards, or where that is not known.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.keyring.views import KeyRow
from covey.core.errors import Refused
from covey.core.events import Message
from covey.core.ids import HostId
from gossip.packet import KEYS_MAX, key_id
from gossip.types import KEY_BYTES

REFUSED = 4
NUMBER_MAX = 1 << 31


class KeyStep(Message, frozen=True):
    """One host asks another to change its ring, and is answered with its row; it goes over an encrypted link."""

    step: Literal["tell", "install", "use", "remove", "drop"]
    id: Annotated[str, Meta(max_length=8)] = ""
    """The key that is installed, used or dropped, or, of `remove`, that stays when all others are removed."""
    key: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""
    number: Annotated[int, Meta(ge=0, le=NUMBER_MAX)] = 0

    def __repr__(self) -> str:
        return f"KeyStep({self.step}, {self.id})"


class KeyRing(msgspec.Struct, frozen=True):
    """The keys of a host, as they are on its disk; the first one seals."""

    keys: tuple[bytes, ...]
    numbers: tuple[int, ...]
    """For each key, how many were made before it while this rack ran; 0: it came from a file."""
    instead_of: bytes = b""
    """The fingerprint of the file of keys in whose place this one is; another file counts more than this."""

    def row(self, host: HostId) -> KeyRow:
        return KeyRow(host, tuple(name(key) for key in self.keys), self.numbers)


class Planned(msgspec.Struct, frozen=True):
    """The next step of a rotation. `new`: none is under way, and a key is to be made."""

    step: Literal["new", "install", "use", "remove"]
    id: str
    """The key that all hosts will have at the end; of a `new` one, the newest so far."""
    hosts: tuple[HostId, ...]
    """The hosts that have not taken the step."""


def name(key: bytes) -> str:
    """What a key is called, which does not reveal it."""
    return key_id(key).hex()


# ---- the rack ----


def newest(rows: Sequence[KeyRow], me: HostId) -> str:
    """The key that all hosts will have at the end: the one made last; where all came from files, the one that seals
    here."""
    numbered = [pair for row in rows for pair in zip(row.numbers, row.ids, strict=True)]
    number, found = max(numbered)
    return found if number else next(row.ids[0] for row in rows if row.host == me)


def planned(rows: Sequence[KeyRow], me: HostId) -> Planned:
    """The next step. `rows`: what every host says now, this one (`me`) included."""
    wanted = newest(rows, me)
    lack = tuple(row.host for row in rows if wanted not in row.ids)
    if lack:
        return Planned("install", wanted, lack)
    seal_otherwise = tuple(row.host for row in rows if row.ids[0] != wanted)
    if seal_otherwise:
        return Planned("use", wanted, seal_otherwise)
    have_more = tuple(row.host for row in rows if len(row.ids) > 1)
    if have_more:
        return Planned("remove", wanted, have_more)
    return Planned("new", wanted, tuple(row.host for row in rows))


def lacking(rows: Sequence[KeyRow], id: str) -> tuple[HostId, ...]:
    """The hosts without this key."""
    return tuple(row.host for row in rows if id not in row.ids)


def needed(rows: Sequence[KeyRow], id: str, gone: Sequence[HostId]) -> str:
    """Why this key cannot be removed everywhere; empty: nobody needs it. `gone`: hosts that may come back, and whose
    keys are not known."""
    seal = [row.host for row in rows if row.ids[0] == id]
    if seal:
        return f"{', '.join(seal)} {'seals' if len(seal) == 1 else 'seal'} with it"
    return f"{', '.join(gone)}: gone, and its keys are not known" if gone else ""


# ---- one host ----


def stepped(ring: KeyRing, asked: KeyStep) -> KeyRing:
    """The ring after a step; the same when it was taken before. Refused when it cannot be taken."""
    match asked.step:
        case "tell":
            return ring
        case "install":
            return _installed(ring, asked.key, asked.number)
        case "use":
            return _in_order(ring, [_place(ring, asked.id), *range(len(ring.keys))])
        case "remove":
            if _place(ring, asked.id):
                why = f"it seals with {name(ring.keys[0])}, not with {asked.id}"
                raise Refused(REFUSED, "no key can be removed", why, NEXT)
            return _in_order(ring, [0])
        case "drop":
            return _dropped(ring, asked.id)


def _dropped(ring: KeyRing, id: str) -> KeyRing:
    if name(ring.keys[0]) == id:
        raise Refused(REFUSED, f"key {id} cannot be removed", "the host seals with it", NEXT)
    return _in_order(ring, [place for place, key in enumerate(ring.keys) if name(key) != id])


NEXT = "agentctl keys"


def _installed(ring: KeyRing, key: bytes, number: int) -> KeyRing:
    if len(key) != KEY_BYTES:
        raise Refused(2, "invalid key", f"it has {len(key)} bytes instead of {KEY_BYTES}", NEXT)
    if key in ring.keys:
        return ring
    if len(ring.keys) == KEYS_MAX:
        raise Refused(REFUSED, "no key can be installed", f"a host has {KEYS_MAX} keys already", NEXT)
    return msgspec.structs.replace(ring, keys=(*ring.keys, key), numbers=(*ring.numbers, number))


def _place(ring: KeyRing, wanted: str) -> int:
    places = [place for place, key in enumerate(ring.keys) if name(key) == wanted]
    if not places:
        raise Refused(REFUSED, f"key {wanted} is not here", "it was not installed on this host", NEXT)
    return places[0]


def _in_order(ring: KeyRing, places: Sequence[int]) -> KeyRing:
    """The ring with the keys of these places, each once."""
    order = list(dict.fromkeys(places))
    keys, numbers = tuple(ring.keys[place] for place in order), tuple(ring.numbers[place] for place in order)
    return msgspec.structs.replace(ring, keys=keys, numbers=numbers)

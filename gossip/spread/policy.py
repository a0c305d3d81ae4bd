"""Which facts are newer, what another host lacks, and what fits, as pure functions."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec

from gossip.spread.messages import (
    KEY_BYTES_MAX,
    KEYS_MAX,
    TOMBSTONES_MAX,
    VALUE_BYTES_MAX,
    Delta,
    FactEntry,
    KnownVersion,
)
from gossip.types import U32_MAX, U63_MAX

ENTRY_BYTES = 11
"""The most bytes that an entry costs beside key and value: array 1, key header 2, version 5, value header 3."""
MAP_BYTES_MAX = 960
"""The most bytes of one host's map, so that it fits whole into one datagram: then a delta never needs to be cut, and a
reset is one datagram or nothing."""


class Facts(msgspec.Struct, frozen=True, dict=True):
    """One host's map, in the newest version known here."""

    boot: int = 0
    version: int = 0
    floor: int = 0
    fresh_s: float = 0.0
    """When `version` was written, by this host's clock, as far as it is known here."""
    entries: Mapping[str, FactEntry] = {}

    @cached_property
    def values(self) -> Mapping[str, bytes]:
        """The values by key, in order of the keys."""
        return {key: entry.value for key, entry in sorted(self.entries.items()) if entry.value is not None}


def is_newer(boot: int, version: int, than: Facts) -> bool:
    """Whether these facts are newer: the newest wins, first by boot, then by version."""
    return (boot, version) > (than.boot, than.version)


def since(facts: Facts, boot: int, version: int) -> int | None:
    """The version from which to send `facts` to a host that has `version` of `boot`; None when it has the newest. 0 is
    the whole map: for another boot, and for a host that missed removals which are forgotten here."""
    if not is_newer(facts.boot, facts.version, Facts(boot, version)):
        return None
    if boot != facts.boot or version < facts.floor:
        return 0
    return version


def delta(identity: int, facts: Facts, after: int, now_s: float) -> Delta:
    """Everything written after version `after`, oldest first, as a delta."""
    news = sorted((entry for entry in facts.entries.values() if entry.version > after), key=lambda e: e.version)
    age_ms = min(U32_MAX, max(0, int((now_s - facts.fresh_s) * 1000)))
    return Delta(identity, facts.boot, after, facts.version, facts.floor, age_ms, tuple(news))


def merged(facts: Facts, told: Delta, now_s: float) -> Facts | None:
    """The facts after a delta; None when it changes nothing: old, with a gap before it,
    or more than a host may publish."""
    if not is_newer(told.boot, told.version, facts):
        return None
    if told.since > 0 and (told.boot != facts.boot or not max(told.floor, told.since) <= facts.version):
        return None
    kept = {} if told.since == 0 else dict(facts.entries)
    for entry in told.entries:
        kept[entry.key] = entry
    entries = {key: entry for key, entry in kept.items() if entry.value is not None or entry.version > told.floor}
    if len(entries) > KEYS_MAX + TOMBSTONES_MAX:
        return None
    return Facts(told.boot, told.version, told.floor, now_s - told.age_ms / 1000, entries)


def written(facts: Facts, key: str, value: bytes | None, now_s: float) -> Facts:
    """This host's map after one key was set, or removed (None). Returned as it is when nothing changes. ValueError when
    it would not fit: nothing is changed then."""
    old = facts.entries.get(key)
    if (old.value if old is not None else None) == value:
        return facts
    if not key or len(key.encode()) > KEY_BYTES_MAX:
        raise ValueError(f"gossip key {key!r}: expected 1 to {KEY_BYTES_MAX} bytes")
    if value is not None and len(value) > VALUE_BYTES_MAX:
        raise ValueError(f"gossip value of {key!r} has {len(value)} bytes: at most {VALUE_BYTES_MAX} are told on")
    version = facts.version + 1
    entries = dict(facts.entries)
    entries[key] = FactEntry(key, version, value)
    floor = facts.floor
    dead = sorted((entry for entry in entries.values() if entry.value is None), key=lambda entry: entry.version)
    while dead and (len(dead) > TOMBSTONES_MAX or map_bytes(entries) > MAP_BYTES_MAX):
        oldest = dead.pop(0)
        floor = max(floor, oldest.version)
        del entries[oldest.key]
    if len(entries) - len(dead) > KEYS_MAX:
        raise ValueError(f"gossip key {key!r}: this host publishes {KEYS_MAX} keys already")
    if map_bytes(entries) > MAP_BYTES_MAX:
        raise ValueError(f"gossip value of {key!r} does not fit: all of a host's have at most {MAP_BYTES_MAX} bytes")
    return Facts(facts.boot, version, floor, now_s, entries)


def map_bytes(entries: Mapping[str, FactEntry]) -> int:
    """The most bytes that a map costs in a datagram."""
    return sum(ENTRY_BYTES + len(key.encode()) + len(entry.value or b"") for key, entry in entries.items())


def renumbered(facts: Facts, above: int, now_s: float) -> Facts:
    """This host's map under versions over `above`, after another host had version `above` of the present boot: the boot
    counter was set back, and the present facts must supersede the earlier ones."""
    ordered = sorted(facts.entries.values(), key=lambda entry: entry.version)
    start = min(above, U32_MAX - len(ordered) - 1) + 1
    entries = {entry.key: FactEntry(entry.key, start + index, entry.value) for index, entry in enumerate(ordered)}
    version = start + len(ordered)
    return Facts(facts.boot, version, version, now_s, entries)


def ranges(rows: Sequence[list[KnownVersion]]) -> list[tuple[int, int, tuple[KnownVersion, ...]]]:
    """`(low, high, rows)` of each batch of sorted rows; together they cover every identity once."""
    lows = [0] + [batch[0].identity for batch in rows[1:]]
    highs = [low - 1 for low in lows[1:]] + [U63_MAX]
    return [(low, high, tuple(batch)) for low, high, batch in zip(lows, highs, rows, strict=True)]

"""What people are shown of the gossip keys of a rack."""

import msgspec

from covey.core.ids import HostId


class KeyRow(msgspec.Struct, frozen=True):
    """The keys of gossip that one host has; one line of `agentctl keys`."""

    host: HostId
    ids: tuple[str, ...]
    """The hash of each key; the first one seals."""
    numbers: tuple[int, ...]
    """For each key, how many were made before it while this rack ran."""


class KeysTurned(msgspec.Struct, frozen=True):
    """A step of `agentctl keys` that every host has acknowledged."""

    step: str
    """`install`, `use` or `remove`."""
    id: str
    """The hash of the key that was installed, used or removed; of a rotation, that all hosts will have at the end."""
    hosts: tuple[HostId, ...]
    """The hosts that took the step now."""
    gone: tuple[HostId, ...]
    """Hosts that are gone, and do not have the new key."""
    done: bool
    """Whether that was the last step of the rotation, or the one that was asked for."""

"""Remembers slabs that a lender freed without their borrower's word: a borrower whose host lost its disk knows nothing
of its volumes, and would make one of the same name anew, empty. The lender is asked first.

A slab's epoch begins with the boot of the agent that mapped it. A borrower knows which boots its record covers; a slab
of any other boot belongs to a volume that it has no record of.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from covey.core.ids import HostId
from plugins.memory.machine.loan import Lent
from plugins.memory.messages import EarlierSlabs

BOOT_BITS = 32
"""Bits of an epoch below the boot of the agent that mapped the slab (`machine.borrower`)."""
KEPT_MAX = 1024
"""Most volumes remembered; the oldest are forgotten first."""


class EarlierVolume(msgspec.Struct, frozen=True):
    """Slabs of one volume, and of one boot of its borrower, that were freed here."""

    borrower: HostId
    volume: str
    boot: int
    slabs: int


class EarlierVolumes:
    """The earlier volumes that one lender remembers. `changed`: since they were last written to disk."""

    def __init__(self, known: Iterable[EarlierVolume] = ()) -> None:
        self.changed = False
        self._freed = {(each.borrower, each.volume, each.boot): each.slabs for each in known}

    def all(self) -> tuple[EarlierVolume, ...]:
        """All earlier volumes, the oldest first."""
        return tuple(EarlierVolume(*key, slabs) for key, slabs in self._freed.items())

    def freed(self, *slabs: Lent) -> None:
        """Remember slabs that are freed without their borrower's word."""
        for lent in slabs:
            key = (lent.borrower, lent.slab.volume, lent.slab.epoch >> BOOT_BITS)
            self._freed[key] = self._freed.pop(key, 0) + 1
            self.changed = True
        while len(self._freed) > KEPT_MAX:
            del self._freed[next(iter(self._freed))]

    def given_up(self, borrower: HostId, volume: str, boots: range, lent: Iterable[Lent]) -> list[Lent]:
        """A person said that the volume is made anew: forget what is remembered of it, and return its slabs of boots
        other than `boots`, which are of no use."""
        for key in [key for key in self._freed if key[:2] == (borrower, volume)]:
            del self._freed[key]
            self.changed = True
        return [
            each
            for each in lent
            if (each.borrower, each.slab.volume) == (borrower, volume)
            and each.state != "freeing"
            and each.slab.epoch >> BOOT_BITS not in boots
        ]

    def of(self, borrower: HostId, volume: str, lent: Iterable[Lent]) -> tuple[EarlierSlabs, ...]:
        """Slabs of the volume by boot: how many are held, and how many were freed. Slabs that the borrower gave back
        are neither."""
        held = Counter(
            each.slab.epoch >> BOOT_BITS
            for each in lent
            if (each.borrower, each.slab.volume) == (borrower, volume) and each.state != "freeing"
        )
        freed = {boot: slabs for (who, which, boot), slabs in self._freed.items() if (who, which) == (borrower, volume)}
        return tuple(EarlierSlabs(boot, held[boot], freed.get(boot, 0)) for boot in sorted({*held, *freed})[-8:])

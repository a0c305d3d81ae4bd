"""The members of one slab that has no disk, as the volume's process knows them: which may serve, which must be called
not whole before a write is acknowledged without them.

       the slab is opened there         every page is there, and this host's disk says so
     --------------------------> Filling -----------------------------------------------> Whole
                                  ^   |                                                   |  ^
             its link works again |   | its link ends                       its link ends |  | works again
                                  |   v                                                   v  |
                                 Behind <----------------------------------------------- Unlinked
                                          a write is acknowledged without it

A slab *serves* while enough whole members have a link: one of a mirrored slab, all but one of a slab with parity.
With fewer it *asks*: those that this host's disk calls whole say which versions they hold; what each page is follows
from that, and is brought to all that answered before anything is read. This happens after a crash of the process, and
when all links end at once. A member that does not answer meanwhile is out, unless it takes that one too.

Members are counted by their column: while one moves, two of them hold the same.

Nothing here touches a link or a disk: methods say what follows, and are told when it is done.
"""

from collections.abc import Collection

import msgspec

from covey.core.transitions import StateTable
from plugins.memory.policy import mirroring
from plugins.memory.policy.mirroring import MEMBERS


class Filling(msgspec.Struct, frozen=True):
    """It has a link, takes every write, and lacks pages; or (`filled`) nothing, and waits for another to begin with."""

    filled: bool = False


class Whole(msgspec.Struct, frozen=True):
    """It has a link, and every acknowledged write."""


class Unlinked(msgspec.Struct, frozen=True):
    """Its link ended, and nothing was acknowledged without it."""


class Behind(msgspec.Struct, frozen=True):
    """Its link ended, and something may have been acknowledged without it."""


class Awaited(msgspec.Struct, frozen=True):
    """This host's disk calls it whole, no member serves, and it has not said what it holds."""


class Out(msgspec.Struct, frozen=True):
    """Nothing depends on it any more."""


Member = Filling | Whole | Unlinked | Behind | Awaited | Out
TRANSITIONS: StateTable[Member] = StateTable(
    "member of a slab without a disk",
    {
        Filling: {
            Filling: "it lacks nothing, and there is no other one to begin with",
            Whole: "it lacks nothing, and this host's disk says so",
            Behind: "its link ended",
            Out: "it is closed, or too few whole members have a link",
        },
        Whole: {
            Unlinked: "its link ended",
            Awaited: "too few whole members have a link any more",
            Out: "it is closed",
        },
        Unlinked: {
            Whole: "its link works again",
            Behind: "a write is acknowledged without it",
            Awaited: "too few whole members have a link any more",
            Out: "its link does not work again, or it is closed",
        },
        Behind: {
            Filling: "its link works again",
            Out: "its link does not work again, it is closed, or too few whole members have a link",
        },
        Awaited: {
            Whole: "it said what it holds, and all who did hold the same",
            Out: "it does not answer and another one did, or its lender has lost it",
        },
        Out: {},
    },
    begins=(Filling, Awaited),
)


class Mirror:
    """The members of a slab, by epoch. Of `members` members with different columns, `needed` whole ones are enough to
    serve, and to know what was acknowledged. `lost`: fewer were left at once; pages that are not written again may not
    be readable."""

    def __init__(self, needed: int = 1, members: int = MEMBERS) -> None:
        self._needed, self._begins_with = needed, members
        self._members: dict[int, Member] = {}
        self._column: dict[int, int] = {}
        self.lost = False
        self.whole: list[int] = []
        """Members that may be read from, and must have a write before it is acknowledged. Looked at for every
        request."""
        self.takes: list[int] = []
        """Members to which a write is sent."""
        self.on_record: list[int] = []
        """Members that this host's disk must call whole; it must call no others whole."""
        self._serves = False

    def _count(self) -> None:
        """Count again after every change."""
        self.whole, self.takes = self._those(Whole), self._those(Filling, Whole)
        self.on_record = self._those(Whole, Unlinked, Awaited)
        self._serves = self.enough(self.whole)

    def of(self, epoch: int) -> Member:
        """The member of this epoch; `Out` if there is none."""
        return self._members.get(epoch, Out())

    def _those(self, *kinds: type) -> list[int]:
        return [epoch for epoch, member in sorted(self._members.items()) if isinstance(member, kinds)]

    @property
    def asked(self) -> list[int]:
        return self._those(Awaited)

    def enough(self, epochs: Collection[int]) -> bool:
        """Are these members enough to serve, and to know what was acknowledged?"""
        return len({self._column[epoch] for epoch in epochs}) >= self._needed

    @property
    def serves(self) -> bool:
        return self._serves

    @property
    def asks(self) -> bool:
        """Some members may hold what was acknowledged, and none may be read."""
        return bool(self.asked)

    def _become(self, epoch: int, member: Member) -> None:
        after = TRANSITIONS.next(self._members[epoch], member)
        if isinstance(after, Out):
            del self._members[epoch], self._column[epoch]
        else:
            self._members[epoch] = after
        self._count()

    # ---- coming ----

    def found(self, epoch: int, column: int | None = None) -> None:
        """An earlier process left this member whole. `column`: the column that it holds; None: it holds all."""
        self._begin(epoch, Awaited(), column)

    def opened(self, epoch: int, column: int | None = None) -> None:
        self._begin(epoch, Filling(), column)

    def _begin(self, epoch: int, member: Member, column: int | None) -> None:
        self._members[epoch] = TRANSITIONS.first(member)
        self._column[epoch] = epoch if column is None else column
        self._count()

    def filled(self, epoch: int) -> list[int]:
        """A member lacks nothing now. Returns the members that this host's disk must call whole; `whole_now` follows. A
        slab begins with all columns, so that its first write is at each."""
        if not isinstance(self.of(epoch), Filling):
            return []
        self._become(epoch, Filling(filled=True))
        if self.on_record:
            return [epoch]
        ready = [each for each in self._those(Filling) if self._members[each] == Filling(filled=True)]
        return ready if len({self._column[each] for each in ready}) >= self._begins_with else []

    def whole_now(self, epochs: Collection[int]) -> list[int]:
        """The disk calls these members whole. Returns those of them that are still here."""
        found = [epoch for epoch in epochs if isinstance(self.of(epoch), Filling)]
        for epoch in found:
            self._become(epoch, Whole())
        return found

    def answered(self, epochs: Collection[int]) -> list[int]:
        """All of these members hold the same now, and serve; the others that were asked are out, and are returned."""
        others = [epoch for epoch in self.asked if epoch not in epochs]
        for epoch in epochs:
            self._become(epoch, Whole())
        for epoch in others:
            self._become(epoch, Out())
        return others

    def falls_behind(self, epoch: int) -> None:
        """The member lacks pages that were written while its link was being opened again."""
        if isinstance(self.of(epoch), Unlinked):
            self._become(epoch, Behind())

    def works_again(self, epoch: int) -> None:
        """The member's link works again."""
        self._become(epoch, Whole() if isinstance(self.of(epoch), Unlinked) else Filling())

    # ---- going ----

    def link_ended(self, epoch: int) -> list[int]:
        """A member's link ended. Returns the members that are out because of that: when too few are left to serve, all
        but those on record."""
        member = self.of(epoch)
        if isinstance(member, Filling):
            self._become(epoch, Behind())
        elif isinstance(member, Whole):
            self._become(epoch, Unlinked())
        if self._serves or not self.on_record or not isinstance(member, Whole):
            return []
        out = self._those(Filling, Behind)
        for each in out:
            self._become(each, Out())
        for each in self._those(Whole, Unlinked):
            self._become(each, Awaited())
        return out

    def written(self, has: Collection[int]) -> list[int] | None:
        """A write is at these members. Returns the members that are called not whole because of it, which the disk must
        say before the write is acknowledged; None: it cannot be acknowledged."""
        if len(self.whole) == len(self.on_record) and set(has).issuperset(self.on_record):
            return [] if self._serves else None  # as nearly always
        if not self.enough([epoch for epoch in has if epoch in self.whole]):
            return None
        behind = mirroring.acknowledged(self.on_record, has)
        for epoch in behind or ():
            if isinstance(self.of(epoch), Whole):
                self._become(epoch, Unlinked())
            self._become(epoch, Behind())
        return behind

    def may_leave(self, epoch: int, empty: bool) -> bool:
        """May this member leave? `empty`: nothing was ever written to the slab."""
        if isinstance(self.of(epoch), Filling | Behind | Out):
            return True
        others = [each for each in self.whole if each != epoch]
        return not self.asks and (empty or epoch not in self.whole or self.enough(others))

    def leave(self, epoch: int) -> None:
        """The member is closed, its link does not work again, or its lender has lost it."""
        if epoch in self._members:
            self._become(epoch, Out())

    def given_up(self, epoch: int) -> bool:
        """The lender has lost the member, or a person does not want to wait for it. True: too few are left because of
        that."""
        if not isinstance(self.of(epoch), Awaited):
            return False
        self._become(epoch, Out())
        too_few = not self.enough(self.on_record)
        self.lost = self.lost or too_few
        return too_few

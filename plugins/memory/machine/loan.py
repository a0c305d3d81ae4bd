"""One slab lent, as its lender knows it, and one eviction under way."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from covey.core.ids import HostId
from plugins.memory.messages import Renew, SlabRef
from plugins.memory.policy import budgets, mirroring

Key = tuple[HostId, str, int]
"""Key of a loan: borrower, volume, index."""


class LoanedSlab(msgspec.Struct, frozen=True):
    """One slab that the slab process holds."""

    borrower: HostId
    slab: SlabRef
    size_bytes: int
    secret: bytes


@dataclass(slots=True)
class Lent:
    """A slab that is lent."""

    borrower: HostId
    slab: SlabRef
    size_bytes: int
    secret: bytes
    expires_s: float
    """Time after which the slab is an orphan if it was not renewed."""
    state: Literal["registering", "lent", "evicting", "freeing"] = "registering"
    deadline_s: float = 0.0
    """End of the grace, while `evicting`."""
    members: int = 1
    """Members of the slab: with several its borrower has no disk, and this is one of them."""
    tenant: str = ""
    """Tenant whose volume it is; empty: none."""
    job: str = ""
    page_bytes: int = 0
    """Bytes of a page with its seal; 0: not known."""
    payer_known: bool = True
    """False: this host began anew, and its borrower has not said yet whose volume it is."""
    since_s: float = float("-inf")
    """When it was asked for."""
    asked_s: float = float("-inf")
    """When its borrower was asked whether it still uses the slab, since it had not been renewed."""

    def renewed(self, message: Renew) -> None:
        """Take in what its borrower says of it. The tenant and job are taken once."""
        self.members = message.members
        if not self.payer_known or not (self.tenant or self.job):
            self.tenant, self.job = message.tenant, message.job
            self.page_bytes, self.payer_known = self.page_bytes or message.page_bytes, True

    @property
    def counted_bytes(self) -> int:
        """Bytes that count against budgets."""
        return budgets.plain_bytes(self.size_bytes, self.page_bytes)

    @property
    def subject(self) -> str:
        return f"slab/{self.slab.volume}/{mirroring.slab_of(self.slab.index, self.members)}"


class Loans(dict[Key, Lent]):
    """All loans, and their total size, counted as slabs come and go, since each question for room asks for it. Change
    it only by assigning and deleting items."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def __setitem__(self, key: Key, lent: Lent) -> None:
        known = self.get(key)
        self.size_bytes += lent.size_bytes - (0 if known is None else known.size_bytes)
        super().__setitem__(key, lent)

    def __delitem__(self, key: Key) -> None:
        self.size_bytes -= self[key].size_bytes
        super().__delitem__(key)

    def check(self) -> None:
        assert self.size_bytes == sum(lent.size_bytes for lent in self.values()), "other bytes than those of the slabs"


@dataclass
class Batch:
    """One eviction under way: the least active of these slabs are to go, until `needed_bytes` are free."""

    round: int
    needed_bytes: int
    asked: list[Key]
    over: str = ""
    """Account that is over its budget, in words; empty: this host needs memory back."""
    activities: dict[Key, float] = field(default_factory=dict)
    waiting: Counter[HostId] = field(default_factory=Counter)
    """Answers that each borrower still owes: one for each message in which it was asked."""

"""The borrower as published in the paper, to compare with ours: an evicted slab never moves."""

from plugins.memory.machine.borrowing.borrower import Borrower
from plugins.memory.machine.borrowing.slab import BorrowedSlab


class PublishedBorrower(Borrower):
    """A borrower that gives a slab back at once when its lender wants it, and maps it anew and empty while it is hot
    (Infiniswap §2.4.4)."""

    def _moves(self, slab: BorrowedSlab) -> bool:
        return False

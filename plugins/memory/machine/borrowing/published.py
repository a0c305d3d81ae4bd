"""The borrower of the paper where it differs from ours, to compare with: an evicted slab never moves."""

from plugins.memory.machine.borrowing.borrower import Borrower
from plugins.memory.machine.borrowing.slab import BorrowedSlab


class PublishedBorrower(Borrower):
    """A slab that its lender wants back is given back at once, and mapped anew and empty as long as it is hot
    (Infiniswap §2.4.4)."""

    def _moves(self, slab: BorrowedSlab) -> bool:
        return False

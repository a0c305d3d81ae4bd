"""The state of remote memory: `borrower` (where the slabs of our volumes are) and `lender` (what we lend, to whom)."""

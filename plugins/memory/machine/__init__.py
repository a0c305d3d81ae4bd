"""What remote memory remembers: `borrower` (where the slabs of our volumes lie), `lender` (what we lend, to whom)."""

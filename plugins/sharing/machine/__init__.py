"""What the local coordinator remembers: `ladder` (the controller of one guaranteed job), `ledger` (who holds how much
memory), `trial` (the search among opportunistic jobs), `gpu` (the states of one GPU), `reclaim` (who does not free
memory in time), `control` (how the guaranteed job is watched), `upgrade` (a gang becomes
guaranteed whole or not at all)."""

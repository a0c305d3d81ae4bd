"""How one GPU is shared, as functions: `interference` (is the guaranteed job slowed, and how sure are we), `ladder`
(what the others may do), `memory` (who may hold how much), `lease` (what happens when the agent is gone), `rivals` (the
laws of other systems, for comparison)."""

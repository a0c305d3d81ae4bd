"""How one GPU is shared, as functions: `interference` (whether the guaranteed job is slowed, and how certain that is),
`ladder` (what the others may do), `memory` (how much each may hold), `lease` (what happens when the agent is gone),
`rivals` (the laws of other systems, for comparison)."""

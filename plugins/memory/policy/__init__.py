"""What remote memory decides, as functions: `placement` (which slab, whose memory), `lending` (how much, which slabs
back), `eviction` (slabs of any size, how many to ask for, where an evicted one goes), `headroom` (kept by measurement),
`settings` (what a person may change). Arguments in, answer out; chance is an argument."""

"""The decisions of remote memory as pure functions: `placement` (which slab, whose memory), `lending` (how much),
`eviction` (which slabs to take back, how many to ask about, where one goes), `headroom` (kept by measurement),
`settings` (what a person may change). Arguments in, answer out; chance is an argument."""

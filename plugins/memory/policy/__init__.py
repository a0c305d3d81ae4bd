"""What remote memory decides, as functions: `placement` (which slab, whose memory), `lending` (how much), `eviction`
(which slabs back, how many to ask about, where one goes), `headroom` (kept by measurement), `settings` (what a person
may change). Arguments in, answer out; chance is an argument."""

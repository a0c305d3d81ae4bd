"""What remote memory decides, as functions: `placement` (which slab, whose memory), `lending` (how much, which slabs
back), `settings` (what a person may change). Arguments in, answer out; chance is an argument."""

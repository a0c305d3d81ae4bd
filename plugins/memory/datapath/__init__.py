"""The byte path of remote memory: three programs beside the agent, which decide nothing.

slabd   one per lending host: slabs in memory, served over TCP
vold    one per volume: what is where, page by page; local processes on a unix socket in front, lenders behind
spill   one per volume: writes its log on disk

`slabwire`  what vold and slabd say to one another       `control`  what the agent tells both
`spill`  a volume's pages on this host                   `log_keeper`, `spill_writer`  its log: orders, and the writer
`spill_ring`  memory of both                             `page_table`, `spill_load`  what is where; how that is found
`lender_link`, `lender_lane`  vold's connections         `slab_session`, `slab_store`  slabd's end, and its memory
`remote_slab`  vold's end of one slab                    `nbd_front`, `nbdwire`, `nbd_pages`, `exports`  a block device
`volume`  the rules: who holds the newest content of a page
"""

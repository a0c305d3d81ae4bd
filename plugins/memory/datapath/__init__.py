"""Where the pages go: two programs beside the agent, which decide nothing.

slabd   one per lending host: slabs in memory, served over TCP
vold    one per volume: what is where, page by page; local processes on a unix socket in front, lenders behind

`slabwire`  what vold and slabd say to one another       `control`  what the agent tells both
`driven`  how bytes drive a machine                      `backing`, `spill`  the file, and the queue in front of it
`lender_link`, `lender_lane`  vold's connections         `slab_session`, `slab_store`  slabd's end, and its memory
`remote_slab`  vold's end of one slab                    `nbd_front`, `nbdwire`, `nbd_pages`, `exports`  a block device
`volume`  the rules: who holds the newest content of a page
"""

"""Remote memory: the memory that other hosts have to spare, as a volume that a job reads and writes here.

Paper: Infiniswap, in Juncheng Gu, "Efficient Resource Management for Deep Learning Clusters", chapter 2, University of
Michigan 2021. Preparing data needs more memory than one host has, while others have memory to spare; swapping to disk
is slow and its slowness is steep. So a volume is cut into slabs, and a slab that is busy is placed in the memory of
another host. No machine coordinates this: a borrower asks two hosts that it picks at random and takes the freer one
(power of two choices); a lender that needs memory back asks a few more borrowers than it must and evicts the least
active slabs (power of many choices). Remote memory is a cache of the local disk: pages go to the lender synchronously
and to a log on disk behind the writer's back, so losing a lender loses nothing.

    a job            vold (one per volume)                      slabd (one per lending host)
    read, write ---> ring | log | RemoteSlab ---- TCP --------> slab in memory
                        ^  told what to open                        ^  told what to register
                        |                                           |
                     agent: Borrower  <--- eight messages --->   agent: Lender

Words. *volume*: memory that a job attaches. *slab*: a fixed part of it (64 MiB here, 1 GB in the paper), the unit of
placement. *page*: 4 KiB, the unit of reading and writing, with a *version* that grows with every write. *hot*: more
page requests per second than the threshold. *place*: where a slab lies, under one *epoch*. *headroom*: memory a host
keeps for itself; what lies above is *spare*, and *lent* in slabs, each under a *lease*.

Where we leave the paper: pages are versioned (the paper has a bitmap); a slab just mapped is filled in the background;
an evicted slab that is hot moves instead of falling back to disk; leases free what a dead borrower left; `flush`
exists. Each is explained where it is done.

    messages   the paper's eight control messages, and ours        policy    which slab, whose memory, what to give back
    machine    borrower and lender: which host holds what          datapath  the two programs, and the rules for pages
    service    feeds the machines, keeps the programs alive
"""

"""Aggregator: tensors of many jobs summed on few hosts (AutoPS: J. Gu, thesis 2021, chapter IV).
Not live: `machine/pool.py`, which assigns single tensors; `covey-sim aggregators` and `covey-vectors` run it.

Words. *Aggregator*: a host whose process `aggd` sums tensors. *Table*: all Blocks of a job that are summed in one
place, by its *owner*: a rank of the job itself (*direct*, `machine/direct_tables.py`), or an aggregator; a job has one
table for each of its hosts (`covey.tensors.numbers.blocks`, `service/tables.py`). The
machines here treat each table as a job of its own, with an id of its own and one owner.
*Coordinator* of a job: the agent of its lowest live rank's host; it finds the owner, and another one when that is gone.
*Round*: every rank's push of a tensor, summed once, in a fixed order. *Epoch*: orders a job's owners; the higher wins.

    rank (covey.job.tensors) ==== tensors ==== aggd (datapath), or another rank    a job's bytes touch no agent
      | jobs.sock                            | unix socket       | jobs.sock
    agent of the rank (Directory)          agent of the owner (Owner, DirectTables)
      +-------- Coordinator of the job -------+                                    decisions, by control messages

No parameter is lost with an aggregator: every rank keeps the last result, and an owner without state asks for it. The
paper copies tensors from the old owner to the new one and assumes that both live; this path needs neither, and is the
one that also starts a job.

A job's first iterations are its trial. Then its coordinator knows D and e (`machine/profiler.py`), and its owner
promises it a part of its cycle or declines (`machine/cycle_ledger.py`). The check is exact, since the owner knows all
that it has promised itself. A job that is measured to hurt another leaves; the least loaded aggregator empties itself
into others (`machine/consolidator.py`). The states of a job at its coordinator are in `machine/tracked_job.py`.
`machine/pool.py` decides the same for single tensors of many jobs at once, in simulation
(docs/design/papers/aggregator.md).
"""

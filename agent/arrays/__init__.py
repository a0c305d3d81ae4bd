"""The pager of a volume: a process beside it that answers faults of arrays (`covey.remote.RemoteArray`) of jobs.

`keeper` is the program: it listens, keeps the descriptors of every array and starts for each a process of its own
(`pager`), again when that one dies. The decisions are `plugins.memory.machine.arrays.paging`.
"""

"""Interleaving: many jobs on one set of hosts, one computing while another uses the network.

Paper: Harmony, in Woo-Yeon Lee, chapter 4, Seoul National University 2020. A job that is trained over the network
leaves its processors idle while it communicates and its network idle while it computes. Two jobs put together at
random help little, since they also want the same thing at the same time. So every job is cut into *subtasks* that need
one thing, a host runs one COMP at a time and one COMM (and a second one in its gaps), and jobs are put into groups in
which the COMP of one job fills the COMM of another.

    job A   |==COMP==|--COMM--|==COMP==|--COMM--|
    job B   |--COMM--|==COMP==|--COMM--|==COMP==|      one group: CPU and network busy all the time

More hosts shorten a job's computing but not its communicating, so with the size of a group one can balance it: which
jobs, in how many groups, on how many hosts each is one question. The paper's algorithms, as printed, answer it badly
when there are many hosts: they stop at the first step that does not help, and return the last grouping instead of the
best. `policy/schedule.py` says what is repaired.

Words. *group*: jobs that share a set of hosts, and the hosts. *iteration* of a group: every job of it once.
*job-bound*: one job takes longer than all the others' work, so both resources wait for it. *block*: a part of a job's
input data; *spilled* blocks are on disk and are reloaded while others are processed.

    messages   profiles of jobs, among the hosts of a pool        policy   model, grouping, regrouping, who decides
    machine    pools: what a host knows of them, and remembers    service  groups: asks the log; turns: pages for ranks

On a live host, jobs that share it on purpose (`agentctl submit --share-host`) take turns by the rules of
`covey/tensors/turns`; `service/turns.py` gives their processes the page for that, and writes the order.
"""

"""GPU sharing: one guaranteed job and opportunistic ones on one GPU, and the guaranteed one does not notice.
`covey-sim sharing` runs its ladder on a modelled device.

Paper: AntMan (Xiao et al., OSDI 2020), the local coordinator of §3.2-3.3. Training jobs leave much of their GPU unused:
its memory between peaks, its time while they wait for input or gradients (§2.2). AntMan lets opportunistic jobs have
that, with two primitives in the job: a memory limit that can change between two mini-batches, and a gate before each
operation (§3.1). Its controller is not published; this plugin's is Covey's own.

    scheduler --- RanksComing, KindChanged --->  HostSharing (one per host): which rank is on which GPU
              <-- RanksMayStart, RanksUnfit ---    |
    guaranteed rank --- Report: duration, idle time, memory, spill --->  SharedGpu (one per GPU)
    opportunistic   --- Report, which limits it has applied ---------->    |- Ladder        how much time for the others
                    <-- Limits: rates, memory, lease, failsafe --------    |- ShareLedger   who holds how much memory
                                                                           '- MemorySearch  memory among equals

Reports and limits lie in pages of memory that both map (`covey.kernel.pages`); what the rank does with them is
`covey.hooks.limits.sharing`. A rank that has no pages goes by no limits, and is not left beside a guaranteed one.

Words. *guaranteed*: has quota; at most one per GPU. *opportunistic*: whatever is left. *rung*: one number for what the
opportunistic jobs may do, `policy.ladder`. *limit*: memory a job may hold on the device; what exceeds it goes to host
memory. *acknowledged*: the job has applied it. *lease*: limits are good for seconds; a job that hears no more goes by
its *failsafe*, so a dead agent never leaves a job stopped.

The states of a GPU, each left with a reason in words:

    empty -> alone -> together                    opportunistic jobs only: no limits, or memory by trial
       '---> arrival -> baseline -> run <-> verify     a guaranteed job: init, measured alone, others up the ladder
                          ^          |-> idle          it does nothing for long: the others have all
                          '--------- '-> surge         it needs memory: the others give it, stopped meanwhile
    together <-> init          upgrade and downgrade in place: the log changes all ranks of a gang at one index
    any -> drain               the device is to be emptied: opportunistic jobs go, none comes, a guaranteed one ends
    any -> lost                the device is sick: all jobs go, none comes

Covey departs from the paper: phases without device use are given away whole instead of a throttled share of all time; a
slowdown counts only when statistics say so, and only after the others were stopped; limits are leased; memory is handed
on only after the old holder acknowledged.

    messages   what a job and its agent tell one another
    policy     interference, ladder, memory, lease; rivals: the laws of other systems
    machine    host, gpu, ladder, share_ledger; rivals: those laws as controllers
    service    main: performs what the machines ask for; watch: devices and processes
"""

"""The replicated log under the leader: Covey's own Raft core (Ongaro and Ousterhout, 2014) and what runs around it.

    messages   the messages between voters and observers, decoded with bounds
    policy     who may win a vote, what is committed, how long to wait: pure functions
    machine    the Raft core: events in, actions out; it opens nothing and reads no clock
    disk       the durable log: one generation file of checksummed frames, one snapshot, and how far it last went
    service    the coroutine around it: timers, group commit, proposals and their results

Three or five hosts vote. Every other living host is an *observer*: it receives what is committed and applies it, so
that each host answers reads from its own copy, but it never counts towards a majority and never votes. A host with no
voters configured is a rack of one: it alone votes, and leads at once.
"""

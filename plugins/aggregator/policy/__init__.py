"""Decisions of the aggregator plugin: which host sums a job (`owners`), and where its tensors are summed (the rest).


    owners   which host is asked to sum a job, which decides it, and under which epochs
    profile  what a job needs of its aggregator: D and e from its trial iterations (§4.3.3.1)
    cycle    the arithmetic of cyclic execution on one aggregator (§4.3.3.2)
    assign   tensors to aggregators, exactly, under every job's loss limit; the aggregator's own check
    scale    emptying and freeing aggregators
    lanes    how many additions one aggregator does at a time
    pools    clusters of aggregators: a job belongs to one of them (§4.3.3.4)
    measured what iterations really take, and which assignment is reverted for it

Time is in whole microseconds and every comparison is of integers, so two hosts never round differently.
"""

from plugins.aggregator.policy.owners import (
    AGE_S,
    Candidate,
    era_of,
    is_old,
    load_now,
    next_epoch,
    of_run,
    ranked,
    ranked_for,
    ranks_ranked,
    refusal,
)

__all__ = [
    "AGE_S",
    "Candidate",
    "era_of",
    "is_old",
    "load_now",
    "next_epoch",
    "of_run",
    "ranked",
    "ranked_for",
    "ranks_ranked",
    "refusal",
]

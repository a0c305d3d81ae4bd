"""Where a gang goes: packed onto few hosts when its model is skewed, into the gaps otherwise (NSDI'19 §3.4).

A model with one huge tensor loses most to the network, so its workers stay together; the others are used to fill what
is left over, which keeps whole hosts free for those that need them. Functions work in slots: a slot is what one worker
takes, so with one GPU per worker a slot is a GPU.
"""

from collections.abc import Mapping

from covey.core import HostId


def place(
    free: Mapping[HostId, int], workers: int, gpus_per_worker: int, skew: float, packlimit: float
) -> dict[HostId, int] | None:
    """Workers per host, or None when the gang does not fit whole. `free`: free GPUs per host."""
    slots = {host: gpus // gpus_per_worker for host, gpus in sorted(free.items())}
    if sum(slots.values()) < workers:
        return None
    if workers == 1 or skew > packlimit:
        return consolidate(slots, workers)
    return defragment(slots, workers)


def consolidate(slots: Mapping[HostId, int], workers: int) -> dict[HostId, int]:
    """As few hosts as possible: whole freest hosts first, then the tightest one that takes the rest. Slots suffice."""
    left = {host: count for host, count in slots.items() if count > 0}
    chosen: dict[HostId, int] = {}
    while workers > 0:
        fits = sorted((count, host) for host, count in left.items() if count >= workers)
        if fits:
            chosen[fits[0][1]] = workers
            return chosen
        count, host = min((-count, host) for host, count in left.items())
        chosen[host] = -count
        workers += count
        del left[host]
    return chosen


def defragment(slots: Mapping[HostId, int], workers: int) -> dict[HostId, int]:
    """The fullest hosts first, so that their gaps are used up. Slots suffice."""
    chosen: dict[HostId, int] = {}
    for count, host in sorted((count, host) for host, count in slots.items() if count > 0):
        take = min(count, workers)
        if take:
            chosen[host] = take
            workers -= take
    return chosen


def spread(ranks_now: Mapping[HostId, int], workers: int) -> dict[HostId, int]:
    """For a job without GPUs: each worker to the host that then has the fewest ranks. Empty when there is no host."""
    load = dict(sorted(ranks_now.items()))
    chosen: dict[HostId, int] = {}
    for _ in range(workers if load else 0):
        _, host = min((ranks, host) for host, ranks in load.items())
        load[host] += 1
        chosen[host] = chosen.get(host, 0) + 1
    return chosen

"""The placement of a gang: onto few hosts, unless its steps took no longer on several (NSDI'19 §3.4).

Workers on several hosts communicate through the network. Tiresias packs the models that have one huge tensor and
spreads all others into gaps. Most jobs do not describe their tensors, so a gang is packed here until its model is
known: `skew` is None until its tensors were seen to be small and its steps were seen to take no longer when spread
(`packing.shown`). A gang that fits into a gap whole goes there (best fit), which keeps whole hosts free for gangs that
need them.

Functions work in slots: a slot is what one worker takes, so with one GPU per worker a slot is a GPU. `pack` is what the
submitter asked for:

    few     the fewest hosts that have room now; it never waits for better ones
    host    one host, and it waits for one that has room for the whole gang
    any     into gaps, whatever is known of the model
    apart   one worker on each host (torchrun and other launchers: `--nodes`)
"""

from collections.abc import Container, Mapping, Sequence

from covey.core.ids import HostId
from plugins.scheduler.messages.options import AUTO
from plugins.scheduler.messages.spec import Pack


def slots(gpus: int, workers: int, each: int, pack: Pack = "few") -> int:
    """How many workers of a gang of `workers` times `each` GPUs a host with so many free GPUs takes."""
    most = gpus // each
    if pack == "apart":
        return min(1, most)
    if pack == "host":
        return workers if most >= workers else 0
    return most


def fits(free: Mapping[HostId, int], workers: int, each: int, pack: Pack = "few") -> bool:
    """Whether the gang fits whole. `free`: free GPUs per host."""
    return sum(slots(gpus, workers, each, pack) for gpus in free.values()) >= workers


def has_room(most: Mapping[HostId, int], workers: int, pack: Pack) -> bool:
    """Whether a gang without GPUs fits on these hosts. `most`: how many workers each takes."""
    if pack == "host":
        return max(most.values(), default=0) >= workers
    return sum(min(1, count) if pack == "apart" else count for count in most.values()) >= workers


def place(
    free: Mapping[HostId, int],
    workers: int,
    gpus_per_worker: int,
    skew: float | None,
    packlimit: float,
    pack: Pack = "few",
) -> dict[HostId, int] | None:
    """Workers per host, or None when the gang does not fit whole. `free`: free GPUs per host; `skew` None: it has not
    shown that it may be spread."""
    if not fits(free, workers, gpus_per_worker, pack):
        return None
    room = {host: gpus // gpus_per_worker for host, gpus in sorted(free.items())}
    if pack == "apart":
        tightest = sorted((free[host], host) for host, count in room.items() if count)
        return {host: 1 for _, host in tightest[:workers]}
    scattered = pack == "any" or (pack == "few" and skew is not None and skew <= packlimit)
    return defragment(room, workers) if scattered and workers > 1 else consolidate(room, workers)


def consolidate(slots: Mapping[HostId, int], workers: int) -> dict[HostId, int]:
    """Choose as few hosts as possible: whole freest hosts first, then the tightest one that takes the rest. There must
    be slots enough."""
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
    """Choose the fullest hosts first, so that their gaps are used up. There must be slots enough."""
    chosen: dict[HostId, int] = {}
    for count, host in sorted((count, host) for host, count in slots.items() if count > 0):
        take = min(count, workers)
        if take:
            chosen[host] = take
            workers -= take
    return chosen


def grow(room: Mapping[HostId, int], more: int, has: Container[HostId]) -> dict[HostId, int]:
    """New workers by host, as many of `more` as there is room for: first on hosts that have some of the job (`has`),
    then on the freest. `room`: slots of each host that may be taken."""
    chosen: dict[HostId, int] = {}
    for count, host in sorted((-count, host) for host, count in room.items() if count > 0 and host in has):
        chosen[host] = min(-count, more - sum(chosen.values()))
    for count, host in sorted((-count, host) for host, count in room.items() if count > 0 and host not in has):
        chosen[host] = min(-count, more - sum(chosen.values()))
    return {host: count for host, count in chosen.items() if count > 0}


def stand_in(room: Mapping[HostId, int], needs: Sequence[tuple[int, HostId | None]]) -> list[HostId] | None:
    """A host of its own for each place of a gang that is to continue elsewhere; None: not all of them find one. `room`:
    slots of each host that may be taken, or minus its ranks for a job without GPUs, which needs 0; `needs`: slots, and
    the host that somebody wants. The widest place chooses first, the tightest host that has room."""
    left, chosen = dict(sorted(room.items())), dict[int, HostId]()
    for at in sorted(range(len(needs)), key=lambda at: (needs[at][1] is None, -needs[at][0])):
        slots, wanted = needs[at]
        able = [host for host, count in left.items() if (count >= slots or not slots) and wanted in (None, host)]
        if not able:
            return None
        tightest = min if slots else max
        chosen[at] = tightest(able, key=lambda host: left[host])
        del left[chosen[at]]
    return [chosen[at] for at in range(len(needs))]


def in_company(
    ranks_now: Mapping[HostId, int], group: str, company: Container[HostId], workers: int, pack: Pack
) -> Mapping[HostId, int]:
    """The hosts that a job without GPUs may have which takes turns with the jobs of a group, with the ranks of each:
    those where jobs of its group are (`company`). Jobs that say `auto` also have hosts without ranks. Where these are
    fewer than its workers, those with the fewest ranks besides, so that each worker has a host; ranks on the hosts of
    the group do not count then, as they take turns. All hosts when none is of the group."""
    ours = {host: ranks for host, ranks in ranks_now.items() if host in company or (group == AUTO and not ranks)}
    if not group or not ours:
        return ranks_now
    others = sorted((ranks, host) for host, ranks in ranks_now.items() if host not in ours)
    more = {host: ranks for ranks, host in others[: max(0, workers - len(ours))]}
    return {**dict.fromkeys(ours, 0), **more} if more and pack != "host" else ours


def spread(
    ranks_now: Mapping[HostId, int], workers: int, pack: Pack = "few", most: Mapping[HostId, int] | None = None
) -> dict[HostId, int]:
    """Place a job without GPUs: each worker goes to the host that then has the fewest ranks. Empty when there is no
    host, or too few of them for a gang whose workers lie apart. `most`: how many workers each host has processors for;
    None: any number."""
    load = dict(sorted(ranks_now.items()))
    if not load or (pack == "apart" and len(load) < workers):
        return {}
    room = dict.fromkeys(load, workers) if most is None else {host: most.get(host, 0) for host in load}
    if not has_room(room, workers, pack):
        return {}
    if pack == "host":
        return {min((host for host in load if room[host] >= workers), key=lambda host: (load[host], host)): workers}
    chosen: dict[HostId, int] = {}
    for _ in range(workers):
        open_hosts = (host for host in load if chosen.get(host, 0) < min(room[host], 1 if pack == "apart" else workers))
        host = min(open_hosts, key=lambda host: (load[host], host))
        load[host] += 1
        chosen[host] = chosen.get(host, 0) + 1
    return chosen

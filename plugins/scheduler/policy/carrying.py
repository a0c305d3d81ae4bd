"""Which process of an elastic job carries which of its ranks.

A job of `--workers 4..16` has 16 ranks for ever, and 4 to 16 processes at a time. A process is named by its first rank,
which it carries for as long as it lives. All processes carry equally many ranks, give or take one, and a change moves
as few ranks as that allows.

    4 processes   0: 0 4 8 12   1: 1 5 9 13   2: 2 6 10 14   3: 3 7 11 15
    3 ended       0: 0 4 8 12 3 7   1: 1 5 9 13 11   2: 2 6 10 14 15

Where somebody says how many ranks the processes of each host carry together (its *share*), those of one host carry
equally many of them:

    2 on a, 1 on b; a 5, b 3      0: 0 2 4   1: 1 3   on a      5: 5 6 7   on b
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from covey.core.ids import HostId
from plugins.facts import Place

Carried = Mapping[int, tuple[int, ...]]
"""Process -> the ranks that it carries, its own first."""


def carriers_of(carried: Carried) -> dict[int, int]:
    """The process that carries each rank, by rank."""
    return {rank: process for process, ranks in carried.items() for rank in ranks}


def first_carried(ranks: int, processes: int) -> dict[int, tuple[int, ...]]:
    """What each of the processes that start the job carries. `ranks`, `processes`: how many there are."""
    return {process: tuple(range(process, ranks, processes)) for process in range(processes)}


def carried_after(before: Carried, ends: Collection[int], begins: int) -> dict[int, tuple[int, ...]]:
    """What each process carries once those in `ends` have ended and `begins` new ones have begun, where all carry
    equally many ranks.

    ValueError when no process would be left, or there would be more processes than ranks.
    """
    stay = [process for process in before if process not in ends]
    ranks, processes = sum(map(len, before.values())), len(stay) + begins
    if not 1 <= processes <= ranks:
        raise ValueError(f"{processes} processes cannot carry {ranks} ranks")
    return _dealt(before, ends, *_sizes(before, stay, begins, ranks))[0]


def carried_by_shares(
    before: Carried,
    ends: Collection[int],
    begins: Sequence[HostId],
    where: Mapping[int, HostId],
    shares: Mapping[HostId, int],
) -> tuple[dict[int, tuple[int, ...]], list[int]]:
    """What each process carries once those in `ends` have ended and one new one has begun on each host in `begins`, and
    the names of the new ones, in that order. `where`: the host of each process before; `shares`: how many ranks the
    processes of a host carry together, which are divided equally over them; empty: all processes carry equally many.

    ValueError, in words, when the shares are not those of the hosts with processes, have fewer ranks than processes, or
    are not all ranks together.
    """
    stay = [process for process in before if process not in ends]
    ranks = sum(map(len, before.values()))
    if not shares:
        after = carried_after(before, ends, len(begins))
        return after, sorted(after.keys() - set(stay))
    hosts = [*(where[process] for process in stay), *begins]
    if wrong := wrong_shares(ranks, {host: hosts.count(host) for host in sorted(set(hosts))}, shares):
        raise ValueError(wrong)
    kept, new = dict[int, int](), [0] * len(begins)
    for host, share in sorted(shares.items()):
        here = [at for at, other in enumerate(begins) if other == host]
        sizes, more = _sizes(before, [process for process in stay if where[process] == host], len(here), share)
        kept |= sizes
        for at, size in zip(here, more, strict=True):
            new[at] = size
    return _dealt(before, ends, kept, new)


def wrong_shares(ranks: int, processes: Mapping[HostId, int], shares: Mapping[HostId, int]) -> str:
    """Why hosts with so many processes cannot carry these shares of a job's ranks, in words; empty: they can."""
    for host, share in sorted(shares.items()):
        if not processes.get(host):
            return f"{host} is to carry {_ranks(share)} and has no process of the job"
        if share < processes[host]:
            return f"{host} is to carry {_ranks(share)} with {processes[host]} processes, and each carries at least one"
    if without_share := sorted(processes.keys() - shares.keys()):
        return f"{', '.join(without_share)} has processes of the job and no share of its ranks"
    if sum(shares.values()) != ranks:
        return f"the shares of the hosts are {_ranks(sum(shares.values()))} together, and the job has {ranks}"
    return ""


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def shares_of(carried: Carried, places: Sequence[Place]) -> dict[HostId, int]:
    """How many of the job's ranks the processes of each host carry together."""
    return {place.host: sum(len(carried.get(process, ())) for process in place.ranks) for place in places}


def is_equal(carried: Carried) -> bool:
    """Whether all processes carry equally many ranks, give or take one."""
    sizes = [len(ranks) for ranks in carried.values()]
    return not sizes or max(sizes) - min(sizes) <= 1


def _sizes(before: Carried, stay: Sequence[int], begins: int, ranks: int) -> tuple[dict[int, int], list[int]]:
    """How many of so many ranks each process carries, those that stay and the new ones, when all carry equally many.
    Those that carry most keep most."""
    least, more = divmod(ranks, len(stay) + begins)
    order = sorted(stay, key=lambda process: (-len(before[process]), process))
    sizes = [least + (at < more) for at in range(len(order) + begins)]
    return dict(zip(order, sizes, strict=False)), sizes[len(order) :]


def _dealt(
    before: Carried, ends: Collection[int], sizes: Mapping[int, int], new: Sequence[int]
) -> tuple[dict[int, tuple[int, ...]], list[int]]:
    """What each process carries when those that stay have these sizes, and new ones `new`; and the names of the new
    ones, in that order. A new process is named by the first of the ranks that it takes over, and never after one that
    just ended. ValueError when there is no other name."""
    kept = {process: list(before[process][:size]) for process, size in sizes.items()}
    stays = {rank for ranks in kept.values() for rank in ranks}
    left = sorted(rank for ranks in before.values() for rank in ranks if rank not in stays)
    for process, size in sizes.items():
        missing = size - len(kept[process])
        kept[process] += left[:missing]
        del left[:missing]
    names = []
    for size in new:
        taken, left = left[:size], left[size:]
        if all(rank in ends for rank in taken):
            _exchange(taken, left, kept.values(), ends)
        name = next(rank for rank in taken if rank not in ends)
        kept[name] = [name, *(rank for rank in taken if rank != name)]
        names.append(name)
    return {process: tuple(each) for process, each in sorted(kept.items())}, names


def _exchange(taken: list[int], left: list[int], carried: Iterable[list[int]], ends: Collection[int]) -> None:
    """Give `taken`, of which each rank names a process that ended, one that names none. It is one of those that are
    left, else the last of a process that carries several. ValueError where there is none."""
    for ranks, first in [(left, 0), *((each, 1) for each in carried)]:
        for at in reversed(range(first, len(ranks))):
            if ranks[at] not in ends:
                taken[-1], ranks[at] = ranks[at], taken[-1]
                return
    raise ValueError(
        "a process has the number of a rank that it carries, and one that begins cannot have that of one that ends at "
        f"once: for rank {taken[0]} there is no other; next: ask for fewer processes first, and then for these"
    )


def ending(places: Sequence[Place], stay: Collection[int], count: int) -> list[int]:
    """The `count` processes that end when a job gives some back: whole hosts before parts of hosts, and of each those
    that came last. `stay`: processes that do not end."""
    found: list[int] = []
    newest = sorted(places, key=lambda place: place.since)[::-1]
    for place in newest:
        if len(place.ranks) <= count - len(found) and not set(place.ranks) & set(stay):
            found += place.ranks
    for place in newest:
        parts = [process for process in reversed(place.ranks) if process not in (*found, *stay)]
        found += parts[: max(0, count - len(found))]
    return sorted(found)


def without(places: Sequence[Place], ends: Collection[int], gpus_per_worker: int) -> tuple[Place, ...]:
    """The places once these processes have ended."""
    left = []
    for place in places:
        stays = [at for at, process in enumerate(place.ranks) if process not in ends]
        gpus = [gpu for at in stays for gpu in place.gpus[at * gpus_per_worker : (at + 1) * gpus_per_worker]]
        if stays:
            left.append(Place(place.host, tuple(place.ranks[at] for at in stays), tuple(gpus), place.since))
    return tuple(left)

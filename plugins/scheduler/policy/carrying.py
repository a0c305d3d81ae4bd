"""Which process of an elastic job carries which of its ranks.

A job of `--workers 4..16` has 16 ranks for ever, and 4 to 16 processes at a time. A process is named by its first rank,
which it carries for as long as it lives. All processes carry equally many ranks, give or take one, and a change moves
as few ranks as that allows.

    4 processes   0: 0 4 8 12   1: 1 5 9 13   2: 2 6 10 14   3: 3 7 11 15
    3 ended       0: 0 4 8 12 3 7   1: 1 5 9 13 11   2: 2 6 10 14 15
"""

from collections.abc import Collection, Mapping, Sequence

from plugins.facts import Place

Carried = Mapping[int, tuple[int, ...]]
"""Process -> the ranks that it carries, its own first."""


def first_carried(ranks: int, processes: int) -> dict[int, tuple[int, ...]]:
    """What each of the processes that start the job carries. `ranks`, `processes`: how many there are."""
    return {process: tuple(range(process, ranks, processes)) for process in range(processes)}


def carried_after(before: Carried, ends: Collection[int], begins: int) -> dict[int, tuple[int, ...]]:
    """What each process carries once those in `ends` have ended and `begins` new ones have begun. A new process is
    named by the first of the ranks that it takes over, and not after one that just ended, where that can be.

    ValueError when no process would be left, or there would be more processes than ranks.
    """
    kept = {process: list(ranks) for process, ranks in before.items() if process not in ends}
    ranks, processes = sum(map(len, before.values())), len(kept) + begins
    if not 1 <= processes <= ranks:
        raise ValueError(f"{processes} processes cannot carry {ranks} ranks")
    least, more = divmod(ranks, processes)
    order = sorted(kept, key=lambda process: (-len(kept[process]), process))
    sizes = {process: least + (at < more) for at, process in enumerate(order)}
    loose = {rank for process in ends for rank in before.get(process, ())}
    for process, size in sizes.items():
        loose.update(kept[process][size:])
        del kept[process][size:]
    left = sorted(loose)
    for process, size in sizes.items():
        missing = size - len(kept[process])
        kept[process] += left[:missing]
        del left[:missing]
    for at in range(begins):
        size = least + (len(order) + at < more)
        taken, left = left[:size], left[size:]
        name = next((rank for rank in taken if rank not in ends), taken[0])
        kept[name] = [name, *(rank for rank in taken if rank != name)]
    return {process: tuple(each) for process, each in sorted(kept.items())}


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

"""The best of all groupings, for sets so small that they can all be looked at: what `schedule` is measured against
(§4.4.7)."""

from collections.abc import Callable, Iterator, Sequence

from plugins.interleave.policy.model import Group, Profile, Weights, use


def exhaustive(jobs: Sequence[Profile], hosts: int, weights: Weights) -> tuple[float, tuple[Group, ...]]:
    """(score, groups) over all subsets of jobs, all their partitions and all ways to give them all hosts."""
    known: dict[tuple[tuple[int, ...], int], float] = {}

    def worth(members: tuple[int, ...], given: int) -> float:
        key = (members, given)
        if key not in known:
            known[key] = given * use([jobs[at] for at in members], given).score(weights)
        return known[key]

    top = -1.0
    found: tuple[tuple[tuple[int, ...], int], ...] = ()
    for cells in _partitions(len(jobs)):
        if not cells or len(cells) > hosts:
            continue
        best = _given(cells, hosts, worth)
        if best[0] > top:
            top, found = best[0], tuple(zip(cells, best[1], strict=True))
    return max(0.0, top) / hosts, tuple(Group(tuple(jobs[at] for at in cell), given) for cell, given in found)


def _given(
    cells: Sequence[tuple[int, ...]], hosts: int, worth: Callable[[tuple[int, ...], int], float]
) -> tuple[float, tuple[int, ...]]:
    """The best way to give all hosts to these groups, one at least to each: one group after another."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for at, cell in enumerate(cells):
        left = len(cells) - at - 1
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (value, given) in best.items():
            for more in range(1, hosts - used - left + 1):
                total = value + worth(cell, more)
                if used + more not in after or total > after[used + more][0]:
                    after[used + more] = (total, (*given, more))
        best = after
    return best[hosts]


def _partitions(count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every partition of every subset of 0..count-1."""

    def from_(at: int, cells: list[list[int]]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if at == count:
            yield tuple(tuple(cell) for cell in cells)
            return
        yield from from_(at + 1, cells)
        for cell in cells:
            cell.append(at)
            yield from from_(at + 1, cells)
            cell.pop()
        cells.append([at])
        yield from from_(at + 1, cells)
        cells.pop()

    yield from from_(0, [])

"""The chunks of an array that stay in local memory: the oldest go, before there is no room left."""

from collections.abc import Collection, Iterable

CHUNKS_MIN = 8
"""Fewest chunks of a local budget: one instruction may touch four chunks at once (two operands that cross a border),
and four more may be on their way in or out."""
OTHERS_MIN = 6
"""Chunks that must be left when others are pinned: four, and those fetched ahead of them."""
AHEAD_SHARE = 3
FREE_SHARE = 4
FREE_MAX = 24
"""Most chunks that are kept free: the longest window ahead, and half of that again."""
BATCH_SHARE = 3
"""Chunks leave once a third of those that are kept free is taken again: together, in few long requests."""


def kept_free(budget: int) -> int:
    """Chunks of the budget that are emptied ahead of need, so that a fault does not wait for a write-back."""
    return max(2, min(budget // FREE_SHARE, FREE_MAX))


def to_go(held: int, leaving: int, budget: int) -> int:
    """How many more chunks have to leave now. `held` chunks have room; `leaving` of them are on their way out."""
    free = kept_free(budget)
    missing = held - leaving - (budget - free)
    return missing if missing >= max(1, free // BATCH_SHARE) else 0


def victims(oldest_first: Iterable[int], spared: Collection[int], count: int) -> list[int]:
    """The oldest `count` chunks that no thread waits for. Arrival and the first write are all that is known of use:
    reads of a chunk that is here cause no fault."""
    found: list[int] = []
    for chunk in oldest_first:
        if len(found) >= count:
            break
        if chunk not in spared:
            found.append(chunk)
    return found


def pinnable(pinned: int, budget: int) -> bool:
    """May this many chunks be pinned? The rest must do for everything else."""
    return pinned <= budget - kept_free(budget) - OTHERS_MIN


def ahead_most(pinned: int, budget: int) -> int:
    """How many untouched chunks may take room: a third, so that chunks in use are not evicted for them."""
    return max(1, (budget - kept_free(budget) - pinned) // AHEAD_SHARE)

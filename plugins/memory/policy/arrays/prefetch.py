"""The chunks of an array fetched before they are touched: the majority of the last strides (Leap, ATC'20, section
3.2, algorithms 1 to 3).

    accesses   10 12 14 93 16 18 20 22        strides   2 2 79 -77 2 2 2      most of them: 2

A stride that most of the newest ones have is the trend; few newest ones are asked first, so that a new trend is found
soon, then twice as many, up to all 32, so that accesses which follow no trend do not hide one. How far ahead is fetched
grows with hits and shrinks by half at a time.

Two things differ from the paper. Nothing is fetched around an access that does not follow the trend: it would be of no
use, and a lender, a disk and the volume's process would pay for it. And a trend that has lost its majority is kept
while a quarter of the strides still has it: with 30 % random accesses only 0.7 x 0.7 = 49 % of the strides are those of
the stream.
"""

from collections.abc import Sequence

STRIDES_MAX = 32
"""Strides that are considered (Leap: H_size)."""
SPLIT = 4
"""Part of the strides that is asked first: the newest 32 / 4 (Leap: N_split)."""
WINDOW_MAX = 16
"""Most chunks that are fetched ahead. The paper has 8 pages of 4 KiB; ours cross a second process."""
PLACED_SHARE = 2
"""One in so many chunks of a full window is put in place before it is touched."""
FETCHED_MIN = 4
"""Fewest chunks that a stream with a full window fetches at once."""
KEEP_SHARE = 4
"""A trend is kept while one stride in this many has it."""


def majority(strides: Sequence[int]) -> int | None:
    """The stride that more than half of these have, or None (Boyer and Moore's vote, and the count that proves it)."""
    candidate, votes = 0, 0
    for stride in strides:
        if votes == 0:
            candidate, votes = stride, 1
        else:
            votes += 1 if stride == candidate else -1
    return candidate if votes and 2 * strides.count(candidate) > len(strides) else None


def trend(strides: Sequence[int], before: int | None = None) -> int | None:
    """The stride of the stream among `strides`, oldest first, of which the newest 32 count; None: there is no stream.
    `before`: the trend at the access before."""
    newest = strides[-STRIDES_MAX:]
    asked = max(1, STRIDES_MAX // SPLIT)
    while newest:
        found = majority(newest[-asked:])
        if found:
            return found
        if asked >= len(newest):
            break
        asked *= 2
    if before and KEEP_SHARE * newest.count(before) >= len(newest):
        return before
    return None


def follows(chunk: int, stride: int, touched: Sequence[int]) -> bool:
    """Does this access come a few strides after an earlier one? `touched`: accesses before it."""
    return any(chunk - step * stride in touched for step in range(1, 5))


def window(before: int, hit: bool) -> int:
    """How many chunks ahead after an access of the stream: `before` at the access before; `hit`: this one had been
    fetched ahead. It doubles with hits and halves without (Leap, algorithm 2, which counts hits between misses; here
    each access fetches on, so that a stream does not stop at the end of each window)."""
    return min(WINDOW_MAX, 2 * max(before, 1)) if hit else max(1, before // 2)


def placed(window: int) -> int:
    """How many of the next chunks are not only fetched but put in place, where their touch causes no fault. 0 before
    the window is full: by then the stream has been right as often as the window doubled."""
    return window // PLACED_SHARE if window == WINDOW_MAX else 0


def fetches_on(absent: int, wanted: int, window: int) -> bool:
    """Are chunks fetched ahead now? `absent` of the `wanted` next ones are not here. A full window is fetched four
    chunks at a time, since a request for them costs the volume and its lender little more than one for a single chunk;
    by eight at a time reads were slower. At the end of the array, where there may be no four more, the rest is
    fetched."""
    return window < WINDOW_MAX or wanted < window or absent >= FETCHED_MIN


def ahead(chunk: int, stride: int, count: int, chunks: int) -> list[int]:
    """The next chunks of the stream inside an array of `chunks`."""
    return [at for step in range(1, count + 1) if 0 <= (at := chunk + step * stride) < chunks]

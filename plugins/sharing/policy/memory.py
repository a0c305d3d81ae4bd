"""How much device memory each job may hold.

Beside a guaranteed job it is simple: it gets what it asked for, the others what is left. Among opportunistic jobs the
aim is the largest sum of normalized performance (AntMan §3.3), and jobs differ: one keeps its speed with half its
memory, another loses most of it with a tenth less (figure 10). How a job reacts is found by trial only. Moving small
amounts between jobs stops at the first cliff: a job over its cliff gains nothing from a little more. So each job is
first tried once with all it asks for, and the climb starts from the best of these.
"""

from collections.abc import Sequence

import msgspec

from covey.core.units import GIB, MIB

QUANTUM = 16 * MIB
"""The unit of limits in bytes: they are multiples of it."""
SMALL = 4 * QUANTUM
"""Bytes of a small demand, of which a part might be nothing at all."""
CHUNK_MAX = 4 * GIB
CHUNK_MIN = GIB // 2
"""Bytes that one trial moves from one job to another, from the largest chunk to this smallest one."""
TRIALS_MAX = 200


def down(amount: float) -> int:
    """The largest multiple of `QUANTUM` in `amount`, bytes; 0 for what is negative."""
    return max(0, int(amount // QUANTUM) * QUANTUM)


def divided(room: int, wanted: Sequence[int]) -> tuple[int, ...]:
    """`room` bytes divided by demand: all of each when that suffices, else in proportion. Equal demands get equal
    parts. Demands up to `SMALL` are met first as long as they take no more than half."""
    if sum(wanted) <= room:
        return tuple(wanted)
    small = sum(want for want in wanted if want <= SMALL)
    first = small if small <= room / 2 else 0
    total = sum(wanted) - first
    return tuple(want if first and want <= SMALL else down((room - first) * want / total) for want in wanted)


def beside(room: int, stable: Sequence[int], peak: Sequence[int]) -> tuple[int, ...]:
    """Limits of opportunistic jobs in what a guaranteed one leaves: what each cannot give back (`stable`) first, then
    the rest by what it lacks to its peak. With too little room even for that all get less in proportion, and the jobs
    place the rest in host memory (AntMan §3.1.1)."""
    least = [min(low, high) for low, high in zip(stable, peak, strict=True)]
    if sum(least) >= room:
        return divided(room, least)
    more = divided(room - sum(least), [high - low for low, high in zip(least, peak, strict=True)])
    return tuple(low + plus for low, plus in zip(least, more, strict=True))


def shrunk(room: int, held: Sequence[int], stable: Sequence[int]) -> tuple[int, ...]:
    """Limits after a surge of the guaranteed job left `room` bytes for jobs that may hold `held`: the largest give
    first, down to the next largest, then both, so that as few as possible are disturbed; none goes below what it cannot
    give back (`stable`), unless there is no other way (AntMan §3.3, figure 7a; who gives first is ours)."""
    if sum(held) <= room:
        return tuple(held)
    least = [min(low, has) for low, has in zip(stable, held, strict=True)]
    if sum(least) >= room:
        return divided(max(0, room), least)
    level = _level(room, held, least)
    return tuple(max(low, min(has, level)) for has, low in zip(held, least, strict=True))


def _level(room: int, held: Sequence[int], least: Sequence[int]) -> int:
    """The largest limit, a multiple of `QUANTUM`, at which all jobs fit when none has more than it, except for
    `least`."""
    low, high = 0, max(held) // QUANTUM + 1
    while high - low > 1:
        middle = (low + high) // 2
        total = sum(max(floor, min(has, middle * QUANTUM)) for has, floor in zip(held, least, strict=True))
        low, high = (middle, high) if total <= room else (low, middle)
    return low * QUANTUM


class LimitSearch(msgspec.Struct, frozen=True):
    """The search for a split among opportunistic jobs: what is tried now, what was best."""

    room: int
    wanted: tuple[int, ...]
    trial: tuple[int, ...]
    """The limits to try now, bytes."""
    full: tuple[float, ...]
    """The speed of each job, in mini-batches/s, with all it asked for; 0: not measured yet."""
    probed: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()
    """The limits and speeds of the first trials: the proportional split, then each job once with all."""
    best: tuple[int, ...] = ()
    best_score: float = 0.0
    chunk: int = CHUNK_MAX
    move: int = 0
    """The pair of jobs that is tried next; it counts through all ordered pairs."""
    since: int = 0
    """The number of trials since the best changed."""
    trials: int = 0
    over: bool = False
    """Whether nothing better was found with the smallest chunk: `trial` is the best."""

    @property
    def score(self) -> float:
        """The sum of normalized performance of the best split; at most the number of jobs."""
        return self.best_score


def begin(room: int, wanted: Sequence[int]) -> LimitSearch:
    """A new search. The first trial is the split by demand."""
    wants = tuple(min(want, room) for want in wanted)
    trial = divided(room, wants)
    return LimitSearch(room, wants, trial, tuple(0.0 for _ in wants), over=sum(wants) <= room)


def normalized(speeds: Sequence[float], full: Sequence[float]) -> float:
    """The sum over the jobs of speed relative to the speed with all its memory (AntMan §3.3)."""
    return sum(min(1.0, speed / most) if most > 0 else 0.0 for speed, most in zip(speeds, full, strict=True))


def measured(search: LimitSearch, speeds: Sequence[float]) -> LimitSearch:
    """The search after its trial brought these mini-batches/s."""
    if search.over:
        return search
    search = msgspec.structs.replace(search, trials=search.trials + 1)
    if len(search.probed) <= len(search.wanted):
        return _probed(search, tuple(speeds))
    score = normalized(speeds, search.full)
    if score > search.best_score * 1.001:
        search = msgspec.structs.replace(search, best=search.trial, best_score=score, since=0)
    else:
        search = msgspec.structs.replace(search, since=search.since + 1, move=search.move + 1)
    return _next_move(search)


def _probed(search: LimitSearch, speeds: tuple[float, ...]) -> LimitSearch:
    """The search after one of its first trials: try the next job with all it asks for, or choose where to climb
    from."""
    who = len(search.probed) - 1
    probed = (*search.probed, (search.trial, speeds))
    full = list(search.full)
    if who >= 0:
        full[who] = max(full[who], speeds[who])
    search = msgspec.structs.replace(search, probed=probed, full=tuple(full))
    if len(probed) <= len(search.wanted):
        return msgspec.structs.replace(search, trial=_all_for(len(probed) - 1, search))
    full = [max(speed[i] for _, speed in probed) for i in range(len(full))]
    scores = [normalized(speed, full) for _, speed in probed]
    best = max(range(len(scores)), key=lambda i: scores[i])
    search = msgspec.structs.replace(search, full=tuple(full), best=probed[best][0], best_score=scores[best])
    return _next_move(search)


def _all_for(who: int, search: LimitSearch) -> tuple[int, ...]:
    others = [0 if i == who else want for i, want in enumerate(search.wanted)]
    rest = divided(search.room - search.wanted[who], others)
    return tuple(search.wanted[who] if i == who else part for i, part in enumerate(rest))


def _next_move(search: LimitSearch) -> LimitSearch:
    """The next trial: one chunk from one job to another; smaller chunks when no pair helped; at last the best."""
    jobs = len(search.wanted)
    pairs = [(giver, taker) for giver in range(jobs) for taker in range(jobs) if giver != taker]
    chunk, since, move = search.chunk, search.since, search.move
    while search.trials < TRIALS_MAX:
        if since >= len(pairs):
            chunk, since = chunk // 2, 0
        if chunk < CHUNK_MIN:
            break
        giver, taker = pairs[move % len(pairs)]
        amount = min(chunk, search.best[giver], search.wanted[taker] - search.best[taker])
        if amount >= CHUNK_MIN:
            trial = list(search.best)
            trial[giver] -= amount
            trial[taker] += amount
            return msgspec.structs.replace(search, trial=tuple(trial), chunk=chunk, since=since, move=move)
        since, move = since + 1, move + 1
    return msgspec.structs.replace(search, trial=search.best, over=True)

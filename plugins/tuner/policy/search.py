"""The hosts that should work and those that should serve (Cruise §3.2.3, without its solver).

Equal hosts: try every number of workers. Hosts of few kinds: try every number of workers of each kind; hosts of a kind
are interchangeable, so this is exact. Hosts that all differ: descent. Its starts are, for every number of workers, the
orders in which a sensible person would hand out the role (fast processors work, slow cards work, and what lies
between), and its steps flip the role of one host or exchange the roles of two, always the best of them all.

Nothing here depends on the order in which the hosts are given, except which of several equal hosts gets a role: then
those that have it already keep it, hosts that have none come next, and each by the order of their names.
"""

import math
from collections.abc import Collection, Sequence
from itertools import product

import msgspec
import numpy as np
import numpy.typing as npt

from covey.core.ids import HostId
from plugins.tuner.policy.cost import Floats, HostCosts, Load, epoch_equal, epochs, rates

COUNTS_MAX = 1 << 19
"""Most assignments that are tried one by one; above it, descent. About 0.2 s."""
CHUNK = 1 << 15
STARTS = 12
"""Number of descents, from the best starts."""
BETTER = 1e-12
"""Relative gain; a smaller one is rounding."""

Roles = npt.NDArray[np.bool_]


class Split(msgspec.Struct, frozen=True):
    """The hosts that work and those that serve, and the share of data and model that each should hold."""

    epoch_s: float
    workers: tuple[HostId, ...]
    servers: tuple[HostId, ...]
    data: tuple[float, ...]
    """Share of the samples of each worker, together 1."""
    model: tuple[float, ...]
    """Share of the model of each server, together 1."""
    exact: bool
    """Is it the optimum of the model, or the best that descent found?"""


def equal_split(load: Load, sample_s: float, nic_bytes_per_s: float, n: int) -> tuple[int, float]:
    """(workers, epoch in seconds) for `n` >= 2 equal hosts (Cruise, equation 3.5). Of equals the one with fewer
    workers."""
    best = min(range(1, n), key=lambda w: (epoch_equal(load, sample_s, nic_bytes_per_s, n, w), w))
    return best, epoch_equal(load, sample_s, nic_bytes_per_s, n, best)


def equal_split_continuous(load: Load, sample_s: float, nic_bytes_per_s: float, n: float) -> float:
    """Workers out of `n` equal hosts if hosts could be cut: n r / (1 + r) with r = sqrt(c / k), k = M / (b B); half of
    them when r < 1, since then the workers' own cards decide and more servers do not help."""
    k = load.model_bytes / (nic_bytes_per_s * load.batch)
    r = math.sqrt(sample_s / k) if k > 0 else math.inf
    if math.isinf(r):
        return float(n)
    return n * r / (1 + r) if r >= 1 else n / 2


def equal_both(load: Load, sample_s: float, nic_bytes_per_s: float, n: int) -> float:
    """Seconds of an epoch of `n` equal hosts that all work and serve, by the costs of equation 3.5: the n-th of the
    model that a host serves to itself crosses no network. The paper, whose hosts do one or the other, does not have
    this."""
    wait = load.model_bytes / nic_bytes_per_s * (n - 1) / n / load.batch
    return load.samples / n * (sample_s + wait)


def equal_split_of_fixed_batch(n: float, ranks: float, pass_s: float, network_s: float) -> float:
    """Workers out of `n` equal hosts that work or serve, if hosts could be cut and a step has `ranks` passes however
    many workers there are: n / (1 + sqrt(n/ranks k/c)), where that is more than half of them. `pass_s`: c, seconds of
    one pass; `network_s`: k, seconds in which a card carries the model. Equation 3.5 counts ceil(d/B) rounds of an
    epoch instead, which get fewer with more workers: its global batch grows with them."""
    return n / (1 + math.sqrt(n / ranks * network_s / pass_s))


def best(
    load: Load,
    hosts: Sequence[HostCosts],
    working: Collection[HostId] = (),
    counts_max: int = COUNTS_MAX,
    serving: Collection[HostId] = (),
) -> Split:
    """The split with the shortest epoch. `working`: hosts that work already, which are taken first among equals;
    `serving`: hosts that serve already, which are taken last. ValueError for less than two hosts."""
    if len(hosts) < 2:
        raise ValueError("a split needs at least two hosts")
    of_equals = {h.host: (h.host not in working, h.host in serving, h.host) for h in hosts}
    ordered = sorted(hosts, key=lambda h: (h.sample_s, h.nic_bytes_per_s, of_equals[h.host]))
    kinds = _kinds(ordered)
    possible = math.prod(count + 1 for _, count in kinds)
    if possible <= counts_max:
        return split_of(load, ordered, by_kinds(load, kinds), exact=True)
    return split_of(load, ordered, _tidied(ordered, descend(load, *_arrays(ordered))), exact=False)


def split_of(load: Load, ordered: Sequence[HostCosts], workers: Roles, exact: bool) -> Split:
    """The best shares for these roles (see `cost`)."""
    sample_s, nic = _arrays(ordered)
    rate = rates(load, sample_s, nic, workers[None, :])[0]
    total, served = float(rate.sum()), float(nic[~workers].sum())
    at = [n for n in range(len(ordered)) if workers[n]]
    others = [n for n in range(len(ordered)) if not workers[n]]
    return Split(
        epoch_s=load.samples / total,
        workers=tuple(ordered[n].host for n in at),
        servers=tuple(ordered[n].host for n in others),
        data=tuple(float(rate[n]) / total for n in at),
        model=tuple(float(nic[n]) / served for n in others),
        exact=exact,
    )


# ---- exact -----------------------------------------------------------------------------------------------------------


def by_kinds(load: Load, kinds: Sequence[tuple[HostCosts, int]]) -> Roles:
    """Roles of all hosts, kind after kind, workers first within each: the optimum over all numbers of workers per kind.
    Of equals the one with fewer workers."""
    sizes = np.array([count for _, count in kinds])
    sample_s = np.array([host.sample_s for host, _ in kinds])
    nic = np.array([host.nic_bytes_per_s for host, _ in kinds])
    total = math.prod(int(size) + 1 for size in sizes)
    found, found_s = np.zeros(len(kinds), dtype=int), math.inf
    for first in range(0, total, CHUNK):
        counts = _counts(np.arange(first, min(total, first + CHUNK)), sizes)
        w = counts.sum(axis=1)
        served = (sizes - counts) @ nic
        usable = (w > 0) & (w < sizes.sum())
        serving = load.model_bytes * w / np.where(usable, served, 1.0)
        waiting = np.maximum(load.model_bytes / nic, serving[:, None]) / load.batch
        rate = (counts / (sample_s + waiting)).sum(axis=1)
        epoch = np.where(usable, load.samples / np.where(usable, rate, 1.0), np.inf)
        at = int(np.argmin(epoch))
        if epoch[at] < found_s * (1 - BETTER):
            found, found_s = counts[at], float(epoch[at])
    roles: list[bool] = []
    for size, working in zip(sizes, found, strict=True):
        roles += [True] * int(working) + [False] * int(size - working)
    return np.array(roles)


def exhaustive(load: Load, hosts: Sequence[HostCosts]) -> float:
    """The shortest epoch over all 2^N - 2 assignments of roles, seconds: what the searches are measured against."""
    sample_s, nic = _arrays(hosts)
    shortest = math.inf
    for part in _parts(len(hosts)):
        shortest = min(shortest, float(epochs(load, sample_s, nic, part).min()))
    return shortest


def _parts(n: int) -> list[Roles]:
    low = np.array(list(product((False, True), repeat=min(n, 12))), dtype=bool)
    if n <= 12:
        return [low]
    return [
        np.hstack([np.tile(np.array(high, dtype=bool), (len(low), 1)), low])
        for high in product((False, True), repeat=n - 12)
    ]


def _counts(numbers: npt.NDArray[np.int_], sizes: npt.NDArray[np.int_]) -> npt.NDArray[np.int_]:
    """Numbers 0, 1, ... as workers per kind: digits in the mixed base sizes + 1. Shape (numbers, kinds)."""
    counts = np.empty((len(numbers), len(sizes)), dtype=int)
    rest = numbers
    for at in range(len(sizes) - 1, -1, -1):
        rest, counts[:, at] = np.divmod(rest, sizes[at] + 1)
    return counts


# ---- descent ---------------------------------------------------------------------------------------------------------


def descend(load: Load, sample_s: Floats, nic: Floats) -> Roles:
    """Roles of hosts that all differ: the best of several descents. Shape (hosts,)."""
    starts = _starts(load, sample_s, nic)
    costs = epochs(load, sample_s, nic, starts)
    found: Roles = starts[int(np.argmin(costs))]
    found_s = math.inf
    seen: set[bytes] = set()
    for at in np.argsort(costs, kind="stable"):
        if len(seen) >= STARTS:
            break
        if (key := starts[at].tobytes()) in seen:
            continue
        seen.add(key)
        roles, cost = _descent(load, sample_s, nic, starts[at])
        if cost < found_s * (1 - BETTER):
            found, found_s = roles, cost
    return found


def _starts(load: Load, sample_s: Floats, nic: Floats) -> Roles:
    """Starts of descents: for every number of workers, several orders of which host works first. Shape (starts, hosts).

    With w workers a host that works gives 1/T samples per second and takes its card from the servers. So hosts are
    ordered by what they give minus a price for their card, for several prices, the time T taken at several levels of
    waiting; a price of nothing is "fast processors work", a high price "slow cards work".
    """
    n = len(nic)
    mean = load.model_bytes / nic.mean() / load.batch
    orders = [np.arange(n)]
    for waiting in (0.0, 0.5 * mean, mean, 2 * mean, 5 * mean):
        gives = 1.0 / (sample_s + np.maximum(load.model_bytes / nic / load.batch, waiting))
        unit = gives.mean() / nic.mean()
        for price in (0.0, 0.05, 0.15, 0.35, 0.7, 1.2, 2.5, 6.0, 1e6):
            orders.append(np.argsort(price * unit * nic - gives, kind="stable"))
    ranks = np.unique(np.array([np.argsort(order, kind="stable") for order in orders]), axis=0)
    starts: Roles = np.concatenate([ranks < w for w in range(1, n)])
    return starts


def _descent(load: Load, sample_s: Floats, nic: Floats, start: Roles) -> tuple[Roles, float]:
    """Make the best of all flips and exchanges again and again, until none helps."""
    roles = start.copy()
    cost = float(epochs(load, sample_s, nic, roles[None, :])[0])
    while True:
        flips = np.logical_xor(roles, np.eye(len(roles), dtype=bool))
        flipped = epochs(load, sample_s, nic, flips)
        at, to = int(np.argmin(flipped)), float(flipped.min())
        better, better_s = flips[at], to
        pair, exchanged_s = _exchange(load, sample_s, nic, roles)
        if exchanged_s < better_s:
            better = roles.copy()
            better[list(pair)] = ~better[list(pair)]
            better_s = exchanged_s
        if not better_s < cost * (1 - BETTER):
            return roles, cost
        roles, cost = better, better_s


def _exchange(load: Load, sample_s: Floats, nic: Floats, roles: Roles) -> tuple[tuple[int, int], float]:
    """((worker, server), epoch in seconds) of the best exchange of two roles. All pairs at once: the number of workers
    stays, so a pair changes the waiting of all in one way, by the difference of the two cards."""
    working, serving = np.flatnonzero(roles), np.flatnonzero(~roles)
    if not len(working) or not len(serving):
        return (0, 0), math.inf
    w = len(working)
    served = nic[serving].sum() + nic[working][:, None] - nic[serving][None, :]
    wait = load.model_bytes * w / served
    own = load.model_bytes / nic
    total = np.zeros_like(wait)
    for i in working:
        total += 1.0 / (sample_s[i] + np.maximum(own[i], wait) / load.batch)
    leaves = 1.0 / (sample_s[working][:, None] + np.maximum(own[working][:, None], wait) / load.batch)
    joins = 1.0 / (sample_s[serving][None, :] + np.maximum(own[serving][None, :], wait) / load.batch)
    epoch = load.samples / (total - leaves + joins)
    at = int(np.argmin(epoch))
    row, column = divmod(at, len(serving))
    return (int(working[row]), int(serving[column])), float(epoch[row, column])


# ---- hosts -----------------------------------------------------------------------------------------------------------


def _arrays(hosts: Sequence[HostCosts]) -> tuple[Floats, Floats]:
    return np.array([h.sample_s for h in hosts]), np.array([h.nic_bytes_per_s for h in hosts])


def _kinds(ordered: Sequence[HostCosts]) -> list[tuple[HostCosts, int]]:
    """(one of them, how many) of hosts with the same figures; hosts of a kind are next to one another."""
    kinds: list[tuple[HostCosts, int]] = []
    for host in ordered:
        last = kinds[-1][0] if kinds else None
        if last and (last.sample_s, last.nic_bytes_per_s) == (host.sample_s, host.nic_bytes_per_s):
            kinds[-1] = (last, kinds[-1][1] + 1)
        else:
            kinds.append((host, 1))
    return kinds


def _tidied(ordered: Sequence[HostCosts], roles: Roles) -> Roles:
    """Roles with the same number of workers of each kind, the first hosts of each kind working."""
    tidy, at = roles.copy(), 0
    for _, count in _kinds(ordered):
        working = int(roles[at : at + count].sum())
        tidy[at : at + count] = [True] * working + [False] * (count - working)
        at += count
    return tidy

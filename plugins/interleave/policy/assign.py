"""Puts jobs into a given number of groups, and gives hosts to the groups (Harmony, Algorithm 2, and its text).

As printed, line 6 fills a group with one job more than the text says (`<=` for `<`). Here: `<`. Every group is then
begun with the longest job left, so none of those left over at the end is longer than all of a group: lines 15 to 21,
which keep such a job out of it, have nothing to do and are left out.

All by arrays: `work` is T_cpu times hosts, `net` is T_net, shape (jobs,). On `per` hosts a job's balance is
work / per - net: above 0 it wants processors, below 0 the network.
"""

import heapq

import numpy as np
import numpy.typing as npt

from plugins.interleave.policy.model import Weights

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]
SWAPS_PER_GROUP = 4
"""Exchanges tried while refining, per group. The paper continues until none is left (§4.3.2); the first few do the
work."""
SWAP_LISTS = 64
"""Jobs of a group looked at in one exchange."""


def groups_best(work: Floats, net: Floats, hosts: int) -> int:
    """n_G: the number of groups of equal size in which computing and communicating differ least, summed over jobs:
    argmin over 1..min(jobs, hosts) of sum |work n_G / hosts - net| (Algorithm 1, line 6). The sum is convex in n_G
    with its least at the median of hosts net / work, weighted by work; of the two whole numbers around it the better,
    the smaller between equals."""
    most = min(len(work), hosts)
    if most < 1:
        raise ValueError("groups need at least one job and one host")
    busy = work > 0
    if not busy.any():
        return 1
    turns = hosts * net[busy] / work[busy]
    order = np.argsort(turns, kind="stable")
    weight = np.cumsum(work[busy][order])
    middle = float(turns[order[int(np.searchsorted(weight, weight[-1] / 2))]])
    low = int(min(max(1, np.floor(middle)), most))
    around = sorted({max(1, low - 1), low, min(low + 1, most)})
    return min(around, key=lambda n: (imbalance(work, net, hosts, n), n))


def imbalance(work: Floats, net: Floats, hosts: int, count: int) -> float:
    """Seconds by which computing and communicating differ in this many groups, summed over jobs, to nine digits, so
    that equal ones compare as equal (Algorithm 1, line 6)."""
    return round(float(np.abs(work * count / hosts - net).sum()), 9)


def assign(work: Floats, net: Floats, count: int, hosts: int, refine: bool = True) -> Ints:
    """The group, 0..count-1, of every job (Algorithm 2). Shape (jobs,). Every group has a job when there are enough.

    Jobs of like length come together, the longest first, so that no group waits for one long job; in a group each next
    job is the longest that leans the other way than the group so far."""
    per = hosts / count
    balance = work / per - net
    length = work / per + net
    each = len(work) // count
    order = np.lexsort((np.arange(len(work)), -length))
    wants_cpu = [int(j) for j in order if balance[j] > 0]
    wants_net = [int(j) for j in order if balance[j] <= 0]
    rank = np.empty(len(work), dtype=int)
    rank[order] = np.arange(len(work))
    group = np.full(len(work), -1, dtype=int)
    sums = [0.0] * count
    first, second = 0, 0
    leans, ranks = balance.tolist(), rank.tolist()
    for at in range(count):
        total = 0.0
        for _ in range(each):
            left, right = first < len(wants_cpu), second < len(wants_net)
            if left and right:
                longer_left = ranks[wants_cpu[first]] < ranks[wants_net[second]]
                left = total < 0 or (total == 0 and longer_left)
            if left:
                job, first = wants_cpu[first], first + 1
            else:
                job, second = wants_net[second], second + 1
            group[job] = at
            total += leans[job]
        sums[at] = total
    rest = sorted([*wants_cpu[first:], *wants_net[second:]], key=lambda j: (-abs(leans[j]), j))
    totals = np.array(sums)
    for job in rest:  # lines 12 to 22: where it balances best
        at = int(np.argmin(np.abs(totals + leans[job])))
        group[job] = at
        totals[at] += leans[job]
    if refine and count > 1:
        _swap(group, balance, count)
    return group


def allocate(work: Floats, net: Floats, group: Ints, count: int, hosts: int) -> Ints:
    """Hosts of each group: one each, then one at a time to the group whose computing exceeds its communication by most
    (§4.3.2), until all are given. Shape (count,). ValueError with fewer hosts than groups.

    The greedy rule ends where all excesses are nearly equal, so that level is found by bisection and only the last few
    hosts are given one by one."""
    if hosts < count:
        raise ValueError(f"{count} groups need at least {count} hosts, {hosts} are there")
    total = np.bincount(group, weights=work, minlength=count)
    talk = np.bincount(group, weights=net, minlength=count)
    # A host goes to the largest work/m - net. At level x each group has the least m with work/m - net <= x.
    low, high = -float(talk.max(initial=0.0)) - 1.0, float((total - talk).max(initial=0.0)) + 1.0
    found = np.ones(count, dtype=int)
    for _ in range(40):
        level = (low + high) / 2
        room = talk + level
        wanted = np.where(room > 0, np.ceil(total / np.where(room > 0, room, 1.0) - 1e-9), np.inf)
        wanted = np.maximum(1.0, np.where(total > 0, wanted, 1.0))
        if wanted.sum() <= hosts:
            high, found = level, wanted.astype(int)
        else:
            low = level
    heap = [(-(total[g] / found[g] - talk[g]), g) for g in range(count)]
    heapq.heapify(heap)
    for _ in range(hosts - int(found.sum())):
        _, g = heap[0]
        found[g] += 1
        heapq.heapreplace(heap, (-(total[g] / found[g] - talk[g]), g))
    return found


def uses(work: Floats, net: Floats, group: Ints, given: Ints) -> tuple[Floats, Floats]:
    """(CPU, network): share of time in which each group's resources are busy (equations 4.1, 4.3). Shape (groups,)
    each."""
    count = len(given)
    cpu = np.bincount(group, weights=work, minlength=count) / given
    talk = np.bincount(group, weights=net, minlength=count)
    longest = np.zeros(count)
    np.maximum.at(longest, group, work / given[group] + net)
    took = np.maximum(np.maximum(cpu, talk), longest)
    took = np.where(took > 0, took, 1.0)
    return cpu / took, talk / took


def score_of(work: Floats, net: Floats, group: Ints, given: Ints, weights: Weights) -> float:
    """Score of a whole grouping, 0..1 (equation 4.4)."""
    cpu, talk = uses(work, net, group, given)
    return float(((weights.cpu * cpu + weights.net * talk) * given).sum() / given.sum())


def _swap(group: Ints, balance: Floats, count: int) -> None:
    """Exchange jobs between the most unbalanced group and the one that leans the other way most, while that helps both
    together (§4.3.2)."""
    members: list[list[int]] = [[] for _ in range(count)]
    for job, at in enumerate(group.tolist()):
        members[at].append(job)
    sums = np.bincount(group, weights=balance, minlength=count)
    for _ in range(min(SWAPS_PER_GROUP * count, 400)):
        one = int(np.argmax(np.abs(sums)))
        other = int(np.argmax(np.abs(sums[one] - sums)))
        mine, theirs = members[one][:SWAP_LISTS], members[other][:SWAP_LISTS]
        if not mine or not theirs or one == other:
            return
        shift = balance[theirs][None, :] - balance[mine][:, None]
        after = np.abs(sums[one] + shift) + np.abs(sums[other] - shift)
        at = int(np.argmin(after))
        row, column = divmod(at, len(theirs))
        if not after[row, column] < (abs(sums[one]) + abs(sums[other])) * (1 - 1e-9):
            return
        a, b = mine[row], theirs[column]
        members[one][row], members[other][column] = b, a
        group[a], group[b] = other, one
        sums[one] += shift[row, column]
        sums[other] -= shift[row, column]

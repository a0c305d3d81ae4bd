"""The pages of a modelled rack: which slabs each host's one volume has, how busy they are, and where their pages lie.

What is modelled: containers that grow and page (`memory_workload`), requests to slabs, pages that reach a lender by
page-outs or by filling in the background, a move that takes the time of its copy, and the memory that slabs take of a
lender. What is not: the time of a single page request.

How busy the slabs of one volume are differs much and drifts slowly: log-normal weights (sigma 1.5) that forget
themselves over ten minutes. Requests go to slabs in proportion to weight and to the part of the slab in use.
"""

import random
from dataclasses import dataclass

import numpy as np

SIGMA, DRIFT_S, DRIFT_EVERY_S = 1.5, 600.0, 10
WRITES = 0.5
"""Share of page requests that are page-outs: without filling in the background only these bring a page to a lender."""
FILL_BYTES_PER_S = 200e6
"""Bytes per second of the background filling of a slab just mapped, and of a host that copies its moving slabs one by
one."""
PAGE = 4096
Load = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Local bytes, bytes in swap, pages requested per second; each of shape (seconds, hosts)."""


@dataclass(frozen=True)
class Moving:
    """The place that a slab is moving to, while it is filled."""

    epoch: int
    lender: int
    from_s: float
    to_s: float

    def copied(self, now_s: float) -> float:
        """Share of the slab's content that has been copied by now."""
        if now_s >= self.to_s:
            return 1.0
        return max(0.0, (now_s - self.from_s) / (self.to_s - self.from_s))


class Pages:
    """State of all slabs, numbered through the rack: `first[h]` and the following are those of host h. `fills` False:
    a mapped slab takes all of its memory at once and is not filled, as in the paper."""

    def __init__(self, slab_bytes: int, fills: bool, load: Load, rng: random.Random) -> None:
        self.slab_bytes, self.fills = slab_bytes, fills
        self.local, self.swapped, self.requests = load
        self.seconds, self.hosts = self.local.shape
        self.chance = np.random.default_rng(rng.getrandbits(63))
        self.slabs = -(-self.swapped.max(axis=0).astype(np.int64) // slab_bytes)
        self.owner = np.repeat(np.arange(self.hosts), self.slabs)
        self.first = np.concatenate(([0], np.cumsum(self.slabs)))[:-1]
        self.index = np.arange(len(self.owner)) - self.first[self.owner]
        self.lender = np.full(len(self.owner), -1)
        """Number of the host that serves each slab; -1: the disk."""
        self.epoch = np.zeros(len(self.owner), dtype=np.int64)
        self.valid = np.zeros(len(self.owner))
        """Share of the pages in use that the lender has, for each slab."""
        self.touched = np.zeros(len(self.owner))
        """Share in use of each slab."""
        self.moving: dict[int, Moving] = {}
        self.weights = self.chance.normal(0.0, SIGMA, len(self.owner))
        self._busy = np.exp(self.weights)
        self._asked = np.zeros(len(self.owner))
        self._copies_until_s = [0.0] * self.hosts

    # ---- a second ----

    def second(self, second: int) -> np.ndarray:
        """Mean number of pages requested of each slab in this second. What was paged out reaches its lender."""
        if second % DRIFT_EVERY_S == 0 and second:
            self._drift()
        inside = self.swapped[second][self.owner] / self.slab_bytes - self.index
        self.touched = np.clip(inside, 0.0, 1.0)
        parts = self._busy * self.touched
        whole = np.bincount(self.owner, parts, self.hosts)
        each = np.divide(self.requests[second], whole, out=np.zeros(self.hosts), where=whole > 0)
        measured = parts * each[self.owner]
        self._bring(measured)
        return np.asarray(measured)

    def counted(self, measured: np.ndarray) -> list[list[int]]:
        """Measured requests in whole pages, for each host, as a volume's process counts them; what is left over counts
        later."""
        before = np.floor(self._asked)
        self._asked += measured
        counts = (np.floor(self._asked) - before).astype(np.int64).tolist()
        return [counts[at : at + count] for at, count in zip(self.first.tolist(), self.slabs.tolist(), strict=True)]

    def _drift(self) -> None:
        keep = np.exp(-DRIFT_EVERY_S / DRIFT_S)
        fresh = self.chance.normal(0.0, SIGMA, len(self.weights))
        self.weights = keep * self.weights + np.sqrt(1 - keep**2) * fresh
        self._busy = np.exp(self.weights)

    def _bring(self, measured: np.ndarray) -> None:
        pages = np.maximum(1.0, self.touched * self.slab_bytes / PAGE)
        brought = WRITES * measured / pages
        if self.fills:
            brought = brought + FILL_BYTES_PER_S / np.maximum(PAGE, self.touched * self.slab_bytes)
        self.valid = np.where(self.lender >= 0, 1 - (1 - self.valid) * np.exp(-brought), 0.0)

    # ---- what volumes do ----

    def open(self, host: int, index: int, epoch: int, lender: int, now_s: float) -> float | None:
        """Open a place of the slab. Returns when it will be filled, if another one serves the slab until then."""
        slab = int(self.first[host]) + index
        if self.lender[slab] < 0:
            self.lender[slab], self.epoch[slab], self.valid[slab] = lender, epoch, 0.0
            return None
        held_bytes = float(self.valid[slab] * self.touched[slab]) * self.slab_bytes
        from_s = max(now_s, self._copies_until_s[host])
        self._copies_until_s[host] = from_s + held_bytes / FILL_BYTES_PER_S
        self.moving[slab] = Moving(epoch, lender, from_s, self._copies_until_s[host])
        return self._copies_until_s[host]

    def close(self, host: int, index: int, epoch: int, now_s: float) -> bool:
        """Close a place of the slab. Returns whether the place that it was moving to serves it from now on."""
        slab = int(self.first[host]) + index
        moving = self.moving.get(slab)
        if moving is not None and moving.epoch == epoch:
            del self.moving[slab]
        if self.lender[slab] < 0 or self.epoch[slab] != epoch:
            return False
        self.moving.pop(slab, None)
        if moving is None:
            self.lender[slab], self.valid[slab] = -1, 0.0
            return False
        self.lender[slab], self.epoch[slab] = moving.lender, moving.epoch
        self.valid[slab] *= moving.copied(now_s)
        return True

    # ---- memory ----

    def taken_bytes(self) -> np.ndarray:
        """Memory that slabs take on each host, in bytes: the paper registers whole slabs, ours grow as pages come."""
        return self._bytes(self.touched if self.fills else np.ones(len(self.touched)))

    def whole_bytes(self) -> np.ndarray:
        """Memory that slabs take on each host, in bytes, with every slab counted whole."""
        return self._bytes(np.ones(len(self.touched)))

    def useful_bytes(self) -> np.ndarray:
        """Memory that slabs take on each host, in bytes, with only those pages counted that their lender has."""
        return self._bytes(self.touched * self.valid)

    def _bytes(self, share: np.ndarray) -> np.ndarray:
        mapped = self.lender >= 0
        slabs = np.bincount(self.lender[mapped], share[mapped], self.hosts)
        for slab, moving in self.moving.items():
            slabs[moving.lender] += share[slab]
        return np.asarray(slabs * self.slab_bytes)

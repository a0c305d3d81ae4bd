"""How long a volume's requests take, by what answered them. On the request path it costs two looks at the clock and one
number appended; the numbers are counted many at a time."""

from array import array
from typing import Final, Literal, get_args

import numpy as np

from plugins.memory.datapath.wire.control import LatencyCounts
from plugins.memory.policy import latencies
from plugins.memory.policy.latencies import BUCKETS

Answerer = Literal["zeros", "ring", "lender", "disk"]
"""The place that answered a request. zeros: nothing was ever written there; ring: memory on the way to the disk;
lender: another host; disk: this host's disk."""
GATHERED_MAX: Final = 8192
"""Durations that are kept before they are counted."""


class RequestTimes:
    """Durations of requests of one kind with one answerer."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = np.zeros(BUCKETS, np.int64)
        self._gathered = array("d")

    def add(self, took_s: float) -> None:
        gathered = self._gathered
        gathered.append(took_s)
        if len(gathered) >= GATHERED_MAX:
            self._count()

    def _count(self) -> None:
        times_s = np.frombuffer(self._gathered)
        self._counts += latencies.counted(times_s)
        self.sum_s += float(times_s.sum())
        self._gathered = array("d")

    def counts(self) -> tuple[int, ...]:
        """Requests in each bucket, without the empty buckets at the end."""
        if self._gathered:
            self._count()
        return tuple(np.trim_zeros(self._counts, "b").tolist())


class Latencies:
    """Latencies of one volume since its process began."""

    def __init__(self) -> None:
        self.reads: dict[Answerer, RequestTimes] = {each: RequestTimes() for each in get_args(Answerer)}
        self.writes: dict[Answerer, RequestTimes] = {"lender": RequestTimes(), "disk": RequestTimes()}
        self.from_lenders, self.to_lenders = self.reads["lender"], self.writes["lender"]

    def told(self) -> tuple[LatencyCounts, ...]:
        """Counts by kind of request and answerer, where there were any requests."""
        found = [("read", name, times) for name, times in self.reads.items()]
        found += [("write", name, times) for name, times in self.writes.items()]
        every = [LatencyCounts(op, name, times.counts(), times.sum_s) for op, name, times in found]
        return tuple(each for each in every if each.counts)

"""Pages that a rank and its agent share: limits for the rank, reports for the agent, and a flag for neighbours.

    page      writer   read by                            what
    limits    agent    this rank                          epoch, rates, memory, lease   (AntMan §3.1: changes at once)
    report    rank     agent                              acknowledged epoch, the newest mini-batches, memory
    flag      rank     ranks that share a GPU with it     busy now, since when          (no system call on either side)

Each page is a sealed memfd of `PAGE_BYTES` (`covey.kernel.memfd`): no file is left behind, none is stale, and only its
writer can write it. A reader never waits: limits and reports have two copies, each with a checksum, written in turn; a
copy with a wrong checksum is ignored and counted. All times are CLOCK_MONOTONIC in ns.

In AntMan a job reads a JSON file every second and accepts any number in it, and a limit of 0 never ends when the
coordinator dies. Here every number has bounds and every limit has a lease.
"""

import math
import struct
import zlib
from typing import Any, Generic, TypeVar

import msgspec

PAGE_BYTES = 8192
FAILSAFE_MIN = 0.01
HISTORY = 64
"""Most mini-batches in a report: at 5 ms each they cover a third of a second, and agents look more often."""


class RankLimits(msgspec.Struct, frozen=True):
    """What a rank may do from now on. The default allows everything."""

    epoch: int = 0
    """Number of these limits, higher with each change; acknowledged once memory is limited accordingly."""
    idle: float = 1.0
    """Share of the neighbour's idle time on the device that this rank may use, 0..1."""
    head_ns: int = -1
    """How much of the beginning of each idle phase the rank may use, in ns; -1: the whole phase."""
    busy: float = 1.0
    """Share of the time that the rank may use while its neighbour is busy, or not known to be idle, 0..1."""
    memory_bytes: int = 0
    """Most device memory in bytes, from the next mini-batch on; 0: no limit."""
    failsafe: float = 1.0
    """Share of all time that the rank may use once the lease is over; never 0."""
    lease_ns: int = 0
    """CLOCK_MONOTONIC in ns at which the rates end; 0: never. The memory limit does not end."""
    guaranteed: bool = False
    """Whether the rank is guaranteed now: then it has no limits but that of memory."""
    alone: bool = False
    """Whether no rank reads its flag, which then need not be exact: watching threads costs processor time."""

    @property
    def free(self) -> bool:
        """Whether there is nothing to gate."""
        return self.idle >= 1 and self.busy >= 1 and self.head_ns < 0


class MiniBatch(msgspec.Struct, frozen=True):
    """The times of one mini-batch, in ns."""

    number: int
    step_ns: int
    idle_ns: int
    """Time in which the rank itself put no work on the device (input, communication), without what the gate took."""
    gated_ns: int = 0
    """Time in which the gate stopped the rank."""
    ended_ns: int = 0
    """CLOCK_MONOTONIC at the end; 0: not known."""


class RankReport(msgspec.Struct, frozen=True):
    """The state of a rank at the end of a mini-batch; memory is in bytes."""

    acked: int = 0
    """Epoch of the newest limits that the rank has applied, memory included."""
    memory_limit_bytes: int = 0
    """Memory limit that the rank obeys now; 0: none."""
    peak_bytes: int = 0
    """Most device memory in the newest mini-batch."""
    stable_bytes: int = 0
    """Least device memory: what the rank cannot give back between mini-batches."""
    spill_bytes: int = 0
    """Bytes placed in host memory for want of device memory, in the newest mini-batch (AntMan §3.1.1)."""
    retries: int = 0
    """Number of allocations since the start that failed at first."""
    gate: int = 0
    """Index in `GATES` of the gate that the rank has."""
    says_idle: bool = False
    """Whether its flag is meaningful: the rank knows when it has no work on the device."""
    fixed: bool = False
    """Whether the rank took its memory when it started, `stable_bytes` of it, and obeys no smaller limit (JAX)."""
    batches: tuple[MiniBatch, ...] = ()
    """The newest mini-batches, oldest first, at most `HISTORY`."""


GATES = ("none", "operator", "module", "step", "graph", "jitted call")
"""Points at which a rank can be stopped: before each operator, each module, each mini-batch, each replay of a graph;
after each jitted call."""

_HEAD = struct.Struct("<8sIIQ")
"""Head of a copy: magic, version, checksum of what follows, sequence number (which also tells the newer copy)."""
_LIMITS = struct.Struct("<qdqdqdq??")
_REPORT = struct.Struct("<qqqqqqq??Q")
"""Fields of a report; the last counts mini-batches: number n is in place n of the ring behind them."""
_BATCH = struct.Struct("<qqqqq")
_FLAG = struct.Struct("<8sIIqq")
"""Fields of a flag: magic, version, busy, since when, when last sure. Each is written as one machine word."""
_COPY_BYTES = PAGE_BYTES // 2
_AFTER = 16
"""Offset of the sequence number in a copy: the checksum covers the copy from there on."""
_NAMES = {"limits": b"COVEYlim", "report": b"COVEYrep", "flag": b"COVEYflg"}
_VERSIONS = {"limits": 1, "report": 1, "flag": 1}
"""Version in which each page is written; those of limits and flags are in `covey/hooks/gate/gate.cpp` too."""
_BODY_BYTES = {"limits": _LIMITS.size, "report": _REPORT.size + HISTORY * _BATCH.size}

R = TypeVar("R")
Page = Any
"""Something to be read and written like a `bytearray` of `PAGE_BYTES`: an mmap, or plain memory in tests."""


class _Copies:
    """The writer's side of a page of two copies: it overwrites the older copy, whose number makes it the newer one."""

    def __init__(self, page: Page, kind: str) -> None:
        self._page, self._magic, self._version, self._sequence = page, _NAMES[kind], _VERSIONS[kind], 0

    def _write(self, body: "bytes | bytearray") -> None:
        self._sequence += 1
        covered = self._sequence.to_bytes(8, "little") + body
        head = _HEAD.pack(self._magic, self._version, zlib.crc32(covered), self._sequence)
        at = self._sequence % 2 * _COPY_BYTES
        self._page[at : at + len(head) + len(body)] = head + bytes(body)


def _newest(page: Page, kind: str) -> tuple[int, bytes] | None:
    """Sequence number and body of the newer copy with a right checksum; None when no copy has that and this version."""
    best: tuple[int, bytes] | None = None
    for at in (0, _COPY_BYTES):
        magic, version, checksum, sequence = _HEAD.unpack_from(page, at)
        if magic != _NAMES[kind] or version != _VERSIONS[kind] or (best is not None and sequence <= best[0]):
            continue
        copy = bytes(page[at : at + _HEAD.size + _BODY_BYTES[kind]])
        if zlib.crc32(copy[_AFTER:]) == checksum and _HEAD.unpack_from(copy)[3] == sequence:
            best = sequence, copy[_HEAD.size :]
    return best


class LimitsWriter(_Copies):
    """The agent's side of a rank's limits."""

    def __init__(self, page: Page) -> None:
        super().__init__(page, "limits")

    def write(self, limits: RankLimits) -> None:
        self._write(_LIMITS.pack(*msgspec.structs.astuple(limits)))


class ReportWriter(_Copies):
    """The rank's side of its reports. Called by one thread at a time; a call takes a few microseconds."""

    def __init__(self, page: Page) -> None:
        super().__init__(page, "report")
        self._body = bytearray(_REPORT.size + HISTORY * _BATCH.size)
        self._count = 0

    def add(self, ended: MiniBatch) -> None:
        """Add a mini-batch to the next `write`."""
        at = _REPORT.size + self._count % HISTORY * _BATCH.size
        _BATCH.pack_into(self._body, at, *msgspec.structs.astuple(ended))
        self._count += 1

    def write(self, report: RankReport, ended: MiniBatch | None = None) -> None:
        """Write a report. `report.batches` is ignored: `ended` is added as one more mini-batch."""
        if ended is not None:
            self.add(ended)
        r = report
        fields = (r.acked, r.memory_limit_bytes, r.peak_bytes, r.stable_bytes, r.spill_bytes, r.retries, r.gate)
        _REPORT.pack_into(self._body, 0, *fields, r.says_idle, r.fixed, self._count)
        self._write(self._body)


class _Reader(Generic[R]):
    """The reader's side of a page of two copies. `garbage` counts looks without a valid copy or possible values."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self.garbage = 0
        self._seen = 0
        self.newest: R | None = None

    def _look(self, kind: str) -> bytes | None:
        """The body of the newest copy, if it was written since the last look."""
        found = _newest(self._page, kind)
        if found is None:
            written = any(any(self._page[at : at + _HEAD.size]) for at in (0, _COPY_BYTES))
            self.garbage += written
            return None
        if found[0] == self._seen:
            return None
        self._seen = found[0]
        return found[1]


class LimitsReader(_Reader[RankLimits]):
    """The rank's side of its limits."""

    def __init__(self, page: Page) -> None:
        super().__init__(page)
        self._heads = b""

    def changed(self) -> bool:
        """Whether `newest` has changed. Called after each mini-batch, so a page with the numbers and checksums of the
        last look is not read."""
        heads = b"".join(self._page[at : at + _HEAD.size] for at in (0, _COPY_BYTES))
        if heads == self._heads:
            return False
        garbage, found = self.garbage, self._look("limits")
        if self.garbage == garbage:
            self._heads = heads
        if found is None:
            return False
        limits = RankLimits(*_LIMITS.unpack(found))
        if not _is_possible(limits):
            self.garbage += 1
            return False
        self.newest = limits
        return True


class ReportReader(_Reader[RankReport]):
    """The agent's side of a rank's reports."""

    def __init__(self, page: Page) -> None:
        super().__init__(page)
        self._count = 0
        self.missed = 0
        """Number of mini-batches that were overwritten before they were read."""

    def fresh(self) -> RankReport | None:
        """The newest report, with the mini-batches since the last look; None when nothing is new."""
        body = self._look("report")
        if body is None:
            return None
        acked, limit, peak, stable, spill, retries, gate, says_idle, fixed, count = _REPORT.unpack_from(body)
        numbers = (acked, limit, peak, stable, spill, retries, gate)
        if any(not 0 <= number < 1 << 60 for number in numbers) or gate >= len(GATES) or count < self._count:
            self.garbage += 1
            return None
        first = max(self._count, count - HISTORY)
        self.missed += first - self._count
        batches = tuple(
            MiniBatch(*_BATCH.unpack_from(body, _REPORT.size + n % HISTORY * _BATCH.size)) for n in range(first, count)
        )
        self._count = count
        good = tuple(batch for batch in batches if _is_batch(batch))
        self.garbage += len(batches) - len(good)
        self.newest = RankReport(acked, limit, peak, stable, spill, retries, gate, says_idle, fixed, good)
        return self.newest


class FlagWriter:
    """The rank's side of its flag for neighbours. Native code writes the same words, and wakes sleepers (`BUSY_AT`)."""

    def __init__(self, page: Page) -> None:
        self._page = page
        _FLAG.pack_into(page, 0, _NAMES["flag"], _VERSIONS["flag"], 0, 0, 0)

    def write(self, busy: bool, now_ns: int) -> None:
        struct.pack_into("<qq", self._page, SINCE_AT, now_ns, now_ns)
        struct.pack_into("<I", self._page, BUSY_AT, busy)


BUSY_AT, SINCE_AT, SURE_AT = 12, 16, 24


class FlagReader:
    """A neighbour's flag, for a reader."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def busy(self) -> bool | None:
        """Whether the neighbour has work on the device; None where the page does not say."""
        magic, version, busy, _, _ = _FLAG.unpack_from(self._page)
        return bool(busy) if magic == _NAMES["flag"] and version == _VERSIONS["flag"] and busy in (0, 1) else None

    def since_ns(self) -> int:
        """CLOCK_MONOTONIC in ns since when the neighbour is busy or idle."""
        return int(struct.unpack_from("<q", self._page, SINCE_AT)[0])


def _is_possible(limits: RankLimits) -> bool:
    shares = (limits.idle, limits.busy, limits.failsafe)
    if not all(math.isfinite(share) and 0 <= share <= 1 for share in shares) or limits.failsafe < FAILSAFE_MIN:
        return False
    stopped = limits.idle < 1 or limits.busy < 1
    if stopped and limits.lease_ns <= 0:
        return False  # a rank is never held back without a time limit
    return limits.epoch >= 0 and limits.head_ns >= -1 and 0 <= limits.memory_bytes < 1 << 60 and limits.lease_ns >= 0


def _is_batch(batch: MiniBatch) -> bool:
    most = 1 << 60
    whole = batch.step_ns
    return (
        0 < whole < most
        and all(0 <= each <= whole for each in (batch.idle_ns, batch.gated_ns))
        and (0 <= batch.ended_ns < most)
    )


def rates_at(limits: RankLimits, now_ns: int) -> RankLimits:
    """The limits that hold now: once the lease is over, the failsafe replaces the rates. The memory limit stays."""
    if not limits.lease_ns or now_ns < limits.lease_ns:
        return limits
    share = 1.0 if limits.guaranteed else max(FAILSAFE_MIN, limits.failsafe)
    return msgspec.structs.replace(limits, idle=share, busy=share, head_ns=-1)

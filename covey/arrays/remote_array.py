"""A numpy array in remote memory (`RemoteArray`), of which as many bytes are local as its budget allows.

    with RemoteArray("features", (1_000_000, 256), "float32", local_budget="256 MiB") as features:
        features.array[17] += 1                 # any numpy call: rows that it touches are fetched, changed rows go back
        features.prefetch(slice(1000, 2000))    # rows, ahead of need
        features.flush()                        # on this host's disk

There are two ways. The constructor takes the first that this host permits, and names it in `way`:

- **faults**: `array` is memory whose missing pages are fetched when they are touched, by the volume's pager, another
  process (userfaultfd; Linux 5.19). Without the right to answer faults of system calls (`user_mode_only`) a `read(2)`
  into rows that are not here fails with EFAULT; numpy's own work does not notice.
- **explicit**: there is no `array`; `read_into`, `write_from` and rows by index move bytes, several requests at once.

A script that ends or is killed loses nothing that it wrote, and nothing is lost when a lender, the volume's process or
the pager dies. When the pager and its keeper are killed at once, what they held since the last `flush` is lost, and the
script ends by SIGBUS, as with a mapped file whose disk is gone: it never reads zeros in the place of content. A thread
waits for a row for 90 s at most; then it gets SIGBUS, and the reason is on standard error.
"""

import logging
import math
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from covey.arrays.faulted_memory import FaultedMemory
from covey.arrays.remote_memory import RemoteMemory
from covey.arrays.volume_link import RemoteMemoryError
from covey.core.units import parse_size
from covey.kernel import userfault
from covey.kernel.this_process import not_pickled, this_process
from covey.wire import array_wire as arraywire
from covey.wire.array_wire import AskArray

if TYPE_CHECKING:
    import numpy

Mode = Literal["r+", "r"]
Advice = Literal["normal", "sequential", "random", "willneed", "dontneed"]
BUDGET = "256 MiB"
CHUNK = "64 KiB"
_log = logging.getLogger("covey.remote")


class RemoteArray:
    """A numpy array in a volume. `of`: the volume's name, which the agent at $COVEY_SOCKET finds, or makes as large as
    this array; the path of its socket; or a `RemoteMemory`, which the caller closes: `RemoteMemory.open` opens a volume
    that is larger than this array, or another agent's. The array begins at byte `offset` of it, a multiple of its page.
    `local_budget`: most bytes that are local at once, as a number or text such as "256 MiB", at least 8 chunks.
    `chunk`: bytes that are fetched and written at once, a power of two from the page to 1 MiB. `mode` "r": read-only.
    `way`: "explicit" takes that way although faults are permitted.

    Only one array at a time may write the same bytes of a volume; another array that reads them sees what was flushed
    before it fetched them. ValueError for an impossible shape or size; RemoteMemoryError when the volume cannot be
    used.
    """

    def __init__(
        self,
        of: "str | RemoteMemory",
        shape: "int | tuple[int, ...]",
        dtype: Any = "float64",
        *,
        local_budget: "int | str" = BUDGET,
        offset: int = 0,
        chunk: "int | str" = CHUNK,
        mode: Mode = "r+",
        way: Literal["faults", "explicit"] | None = None,
    ) -> None:
        import numpy

        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = numpy.dtype(dtype)
        if self.dtype.hasobject or any(side < 0 for side in self.shape):
            raise ValueError(f"no array of {self.dtype} in the shape {self.shape} can be kept elsewhere")
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        if not self.nbytes or offset < 0 or mode not in ("r", "r+"):
            raise ValueError(
                f"an array of {self.nbytes} bytes at {offset}, mode {mode!r}: expected 1 B or more, r or r+"
            )
        self.offset, self.mode = offset, mode
        self._chunk, self._budget = _bytes(chunk), _bytes(local_budget)
        self._process = this_process()
        self._mine = not isinstance(of, RemoteMemory)
        self.memory = _opened(of, offset + self.nbytes)
        self._faults: FaultedMemory | None = None
        self.way = "explicit: asked for"
        try:
            if offset % self.memory.page or offset + self.nbytes > self.memory.size:
                why = f"offset {offset} and {self.nbytes} bytes in a volume of {self.memory.size}"
                raise ValueError(f"{why}: expected a multiple of its page ({self.memory.page}) and room for the array")
            if way != "explicit":
                self._take_faults(way == "faults")
            self._closed = False
        finally:
            if self._mine and self._closed:
                self.memory.close()

    def _take_faults(self, insist: bool) -> None:
        step = max(self.memory.page, userfault.PAGE_BYTES)
        length = -(-self.nbytes // step) * step
        try:
            if self.offset + length > self.memory.size:
                raise OSError(f"the volume ends within the last {step} bytes of the array")
            opened = userfault.opened()
        except OSError as error:
            if insist:
                raise RemoteMemoryError(
                    "page faults are not available for this array", str(error), "leave out way='faults'"
                ) from error
            self.way = f"explicit: {error.strerror or error}"
            _log.warning("array in volume %s is %s; use read_into and write_from", self.memory.volume, self.way)
            return
        self._faults = FaultedMemory(self.memory, opened.descriptor, self.offset, length, self._chunk, self._budget,
                                     self.mode == "r+")  # fmt: skip
        only = " of the script only: a system call on rows that are not local fails (EFAULT)"
        self.way = "faults" + (only if opened.user_mode_only else "")
        _log.info("array in volume %s: %s", self.memory.volume, self.way)

    # ---- numpy ----

    @property
    def array(self) -> "numpy.ndarray[Any, Any]":
        """The array itself. It may outlive this object, unless that is closed: touching a view after `close` ends the
        process (SIGSEGV)."""
        import numpy

        view = self._served("there is no memory to read").view
        whole: numpy.ndarray[Any, Any] = numpy.frombuffer(view, numpy.uint8, self.nbytes).view(self.dtype)
        return whole.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "numpy.ndarray[Any, Any]":
        import numpy

        found = self.array if self._faults is not None else self[:]
        return numpy.array(found, dtype=dtype) if copy or dtype not in (None, self.dtype) else numpy.asarray(found)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Items as in numpy. On the explicit way only rows (a number, or a slice without a step), which are copies."""
        import numpy

        if self._faults is not None:
            return self.array[index]
        first, count, one = self._rows(index)
        found = numpy.empty((count, *self.shape[1:]), self.dtype)
        self.read_into(found, first)
        return found[0] if one else found

    def __setitem__(self, index: Any, values: Any) -> None:
        import numpy

        if self._faults is not None:
            self.array[index] = values
            return
        first, count, _ = self._rows(index)
        rows = numpy.empty((count, *self.shape[1:]), self.dtype)
        rows[:] = values
        self.write_from(rows, first)

    # ---- bytes ----

    def read_into(self, rows: "numpy.ndarray[Any, Any]", first: int = 0) -> None:
        """Fill `rows`, whose shape is (n, *shape[1:]), with the rows from `first` on; a contiguous `rows` receives them
        without a copy."""
        import numpy

        at, size = self._range_of(rows, first)
        if self._faults is not None:
            rows[...] = self.array[first : first + len(rows)]
            return
        into = rows if rows.flags.c_contiguous else numpy.empty(rows.shape, self.dtype)
        self._checked_memory().read_into(at, into.reshape(-1).view(numpy.uint8).data)
        if into is not rows:
            rows[...] = into
        assert size == into.nbytes

    def write_from(self, rows: "numpy.ndarray[Any, Any]", first: int = 0) -> None:
        """Write `rows` to the rows from `first` on; contiguous rows are sent without a copy."""
        import numpy

        at, _ = self._range_of(rows, first)
        if self.mode == "r":
            raise ValueError("the array was opened with mode='r'")
        if self._faults is not None:
            self.array[first : first + len(rows)] = rows
            return
        whole = numpy.ascontiguousarray(rows)
        self._checked_memory().write_from(at, whole.reshape(-1).view(numpy.uint8).data)

    def _range_of(self, rows: "numpy.ndarray[Any, Any]", first: int) -> tuple[int, int]:
        if rows.dtype != self.dtype or rows.shape[1:] != self.shape[1:] or not 0 <= first <= len(self) - len(rows):
            raise ValueError(
                f"rows of {rows.dtype} in the shape {rows.shape} from {first} on; expected {self.dtype} in"
                f" (n, {', '.join(map(str, self.shape[1:]))}) inside {len(self)} rows"
            )
        row = self.nbytes // len(self)
        return self.offset + first * row, len(rows) * row

    def _rows(self, index: Any) -> tuple[int, int, bool]:
        """First row, number of rows, and whether a single row was asked for."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise IndexError("with way='explicit' a slice of rows must have step 1")
            return start, max(0, stop - start), False
        if not hasattr(index, "__index__"):
            raise IndexError("with way='explicit' the index must be a row or a slice of rows")
        row = index.__index__()
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return row % len(self), 1, True

    # ---- what is local ----

    def prefetch(self, rows: "slice | range | int | None" = None) -> None:
        """Begin to fetch these rows (None: all), as many as the budget has room for. Returns at once."""
        self._ask("prefetch", rows)

    def pin(self, rows: "slice | range | int | None" = None) -> None:
        """Fetch these rows and keep them local until `unpin`. Returns when they are here; RemoteMemoryError when the
        budget has no room for them. On the explicit way nothing is local, and this does nothing."""
        self._ask("pin", rows)

    def unpin(self, rows: "slice | range | int | None" = None) -> None:
        self._ask("unpin", rows)

    def advise(self, advice: Advice, rows: "slice | range | int | None" = None) -> None:
        """Advise the pager. `sequential`: fetch ahead in order whatever was touched so far; `random`: fetch nothing
        ahead; `normal`: by the majority of strides; `willneed`: `prefetch`; `dontneed`: these rows need not be local
        any more."""
        known = {"normal": "normal", "sequential": "sequential", "random": "random",
                 "willneed": "prefetch", "dontneed": "drop"}  # fmt: skip
        if advice not in known:
            raise ValueError(f"advice {advice!r}: expected one of {', '.join(known)}")
        self._ask(known[advice], rows)  # type: ignore[arg-type]

    def flush(self) -> None:
        """Return when everything written before is on this host's disk."""
        if self._faults is None:
            self._checked_memory().flush()
        else:
            self._ask("flush", None)

    def counts(self) -> dict[str, int]:
        """Counts since the array was opened: `touched` (accesses that waited for a fault), `hits` (touched chunks that
        had been fetched ahead), `ahead` (chunks fetched ahead), `wasted` (chunks fetched ahead and not used), `saved`
        (chunks written back), `local` (chunks here now). Empty on the explicit way."""
        return {} if self._faults is None else dict(self._served("").ask(AskArray(0, "counts")).counts)

    def _ask(self, what: arraywire.Asked, rows: "slice | range | int | None") -> None:
        if self._faults is None:
            self._checked_memory()
            return
        first, end = self._chunks(rows)
        answer = self._served("").ask(AskArray(0, what, first, end))
        if answer.why:
            what_failed = f"{what} of rows of the array in volume {self.memory.volume} failed"
            raise RemoteMemoryError(what_failed, answer.why, "see agentctl volume ls, or ask for fewer rows")

    def _chunks(self, rows: "slice | range | int | None") -> tuple[int, int]:
        if isinstance(rows, range):
            rows = slice(rows.start, rows.stop, rows.step)
        first, count, _ = (0, len(self), False) if rows is None else self._rows(rows)
        row = self.nbytes // len(self)
        return first * row // self._chunk, -(-(first + count) * row // self._chunk) if count else 0

    # ---- life ----

    def close(self) -> None:
        """Save all that was written to the volume; views must not be used any more. RemoteMemoryError when that took
        more than 150 s: the pager then tries for another minute. Idempotent."""
        faults, self._faults = self._faults, None
        try:
            if faults is not None and this_process() == self._process:
                self.way = "closed"
                faults.close()
        finally:
            if self._mine and this_process() == self._process:
                self.memory.close()
            self._closed = True

    _closed = True
    """Whether the array is closed; True also for one that could not be opened."""

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """TypeError: the local part of the array belongs to the process that opened it."""
        step = "open it again in that process, with mode='r' where both are open, or pickle a RemoteMemory"
        not_pickled(f"an array in volume {self.memory.volume}", step)

    def __enter__(self) -> "RemoteArray":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RemoteArray({self.memory.volume!r}, {self.shape}, {self.dtype.str!r}, way={self.way!r})"

    def _checked_memory(self) -> RemoteMemory:
        self._check_process()
        return self.memory

    def _check_process(self) -> None:
        if this_process() != self._process:
            what, opened = f"array in volume {self.memory.volume}", self._process[0]
            why = f"process {opened} opened it, and this is {os.getpid()}: a forked process does not get its memory"
            raise RemoteMemoryError(what, why, "open it again in this process, with mode='r' where both are open")

    def _served(self, why: str) -> "FaultedMemory":
        self._check_process()
        if self._closed:
            raise ValueError("the array was closed here")
        if self._faults is None:
            raise RemoteMemoryError(why, self.way, "use read_into, write_from and rows by index")
        return self._faults


def _opened(of: "str | RemoteMemory", size: int) -> RemoteMemory:
    if isinstance(of, RemoteMemory):
        return of
    return RemoteMemory.at(of) if "/" in of else RemoteMemory.open(of, size)


def _bytes(size: "int | str") -> int:
    return parse_size(size) if isinstance(size, str) else size

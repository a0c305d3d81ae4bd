"""Commands are applied once, even when they are proposed several times.

A proposer that loses its leader cannot know whether its command was appended, so it proposes it again under the same
id, and the log may then hold it twice. Every copy of the state remembers the ids of the last `window` entries with
their results: the second copy is not applied and gets the first one's result.

A bounded memory alone would forget too early. Therefore each proposal carries `base`, an index that was committed
before its first try. Any earlier copy that was committed is above `base`: so at index i, if `base >= i - window`, the
memory is certain to hold it; otherwise the command is not applied (`expired`), since it might be a second time. All of
this depends on the log alone, hence is the same on every host, and it is part of the snapshot. (Raft §8 solves this
with client sessions; this needs none.)
"""

from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

from agent.raft.messages import Entry

WINDOW = 8192
"""The number of entries whose ids are remembered: minutes at 100 commands a second."""
RESULT_BYTES_MAX = 4 * 1024 * 1024
"""The most bytes of remembered results, all together; the oldest are dropped first, their ids stay."""


class Outcome(msgspec.Struct, frozen=True):
    """How one copy of a command ended. `kind`: `applied`, `repeated` (its first copy was applied; `result` is that
    one's, or None when no longer kept), `expired` (not applied)."""

    kind: str
    index: int
    result: bytes | None


class AppliedRequest(msgspec.Struct, array_like=True):
    index: int
    id: bytes
    result: bytes | None


class SessionTable:
    def __init__(self, window: int = WINDOW, result_bytes_max: int = RESULT_BYTES_MAX) -> None:
        self._window, self._bytes_max = window, result_bytes_max
        self._kept: OrderedDict[bytes, AppliedRequest] = OrderedDict()
        self._with_result: deque[AppliedRequest] = deque()
        self._bytes = 0

    def apply(self, index: int, entry: Entry, run: Callable[[int, bytes], bytes]) -> Outcome:
        """Run the command unless it ran before."""
        self._forget(index - self._window)
        if known := self._kept.get(entry.id):
            return Outcome("repeated", known.index, known.result)
        if entry.base < index - self._window:
            return Outcome("expired", index, None)
        result = run(index, entry.command)
        self._keep(AppliedRequest(index, entry.id, result))
        return Outcome("applied", index, result)

    def find(self, proposal: bytes) -> Outcome | None:
        """The outcome of an id that was applied not long ago."""
        known = self._kept.get(proposal)
        return Outcome("repeated", known.index, known.result) if known else None

    def _keep(self, kept: AppliedRequest) -> None:
        self._kept[kept.id] = kept
        if kept.result is None:
            return
        self._with_result.append(kept)
        self._bytes += len(kept.result)
        while self._bytes > self._bytes_max:
            self._drop_result()

    def _drop_result(self) -> None:
        oldest = self._with_result.popleft()
        self._bytes -= len(oldest.result or b"")
        oldest.result = None

    def _forget(self, up_to: int) -> None:
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if oldest.index > up_to:
                return
            del self._kept[oldest.id]
            if self._with_result and self._with_result[0] is oldest:
                self._drop_result()

    def dump(self) -> list[AppliedRequest]:
        """The applied requests for the snapshot, oldest first."""
        return list(self._kept.values())

    def load(self, kept: list[AppliedRequest]) -> None:
        self._kept.clear()
        self._with_result.clear()
        self._bytes = 0
        for one in kept:
            self._keep(one)

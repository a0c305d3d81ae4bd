"""Find out which of a script's jitted functions is its training step. Pure: identities and sizes are arguments.

A training step takes what it returned the time before: parameters, and the state of an optimizer. An evaluation does
not, or only a few sums. So the function counts that is handed most bytes of its own earlier result; in a script without
such a function (only gradients are jitted) the function with the largest result counts. Only the first calls of a
function are examined; after that a call costs one look into a table.

    the one that counts is silent for three of its periods, and another has at least half of its bytes
    -> the other counts; so does one with equal bytes that is called half as often (an update after accumulations)
"""

from dataclasses import dataclass

CALLS_LOOKED_AT = 6
"""Number of first calls of a function whose arrays are examined."""
FUNCTIONS_MAX = 1000
"""Most functions that are told apart; a script with more of them makes new ones all the time."""
SILENT_AFTER = 3
"""Number of a function's periods after which another one replaces it."""
RETURNED_ENOUGH = 8
"""Number of calls after which a function that takes nothing of its own result counts by the size of that result."""


@dataclass
class _Function:
    calls: int = 0
    since: int = 0
    """Number of calls since the function that counts was called."""
    taken: int = 0
    """Most bytes of its own result that a call was handed."""
    returned: int = 0
    """Most bytes of a result."""

    def weight(self) -> tuple[int, int]:
        if self.taken:
            return 1, self.taken
        return 0, self.returned if self.calls >= RETURNED_ENOUGH else 0


class JittedCalls:
    def __init__(self) -> None:
        self._functions: dict[int, _Function] = {}
        self._counts: int | None = None
        """Identity of the function that counts."""

    def looks_at(self, function: int) -> bool:
        """Whether `called` needs the sizes of this function's arrays at its next call."""
        known = self._functions.get(function)
        return known.calls < CALLS_LOOKED_AT if known is not None else len(self._functions) < FUNCTIONS_MAX

    def called(self, function: int, taken: int = 0, returned: int = 0) -> int:
        """How often the function that counts was called by now, if this is a call of it; else 0. `taken`: bytes of its
        own earlier result among the arguments; `returned`: bytes of the result."""
        known = self._functions.get(function)
        if known is None:
            if len(self._functions) >= FUNCTIONS_MAX:
                return 0
            known = self._functions[function] = _Function()
        known.calls += 1
        known.since += 1
        known.taken, known.returned = max(known.taken, taken), max(known.returned, returned)
        if function != self._counts and not self._replaces(known):
            return 0
        self._counts = function
        for other in self._functions.values():
            other.since = 0
        return known.calls

    def gone(self, function: int) -> None:
        """The function was collected: its identity may be used again."""
        self._functions.pop(function, None)
        if self._counts == function:
            self._counts = None

    def _replaces(self, other: _Function) -> bool:
        (takes, size), counts = other.weight(), self._functions.get(self._counts or 0)
        if size == 0:
            return False
        if counts is None:
            return True
        takes_now, size_now = counts.weight()
        if takes != takes_now:
            return takes > takes_now
        if size > size_now or (size == size_now and 1 < other.calls <= counts.calls // 2):
            return True
        in_a_period = max(1, other.calls // counts.calls)
        return other.since >= SILENT_AFTER * in_a_period and 2 * size >= size_now

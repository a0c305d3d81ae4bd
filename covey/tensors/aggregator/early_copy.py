"""Copy a result to where the script wants it part by part, as the parts arrive, while each is still in a cache.

That is done only where it cannot be noticed: the script waits, and its contribution is in other memory, since it may be
needed again until the result is whole. Parts that arrived while the script still pushed are copied when it begins to
wait, and those that were not copied at the end.
"""

from collections.abc import Sequence

import numpy as np

from covey.tensors.numbers.arrays import bytes_in
from covey.tensors.numbers.tensor_wire import Declared, Payload


class EarlyCopy:
    """The copying of one round of one Block."""

    def __init__(self, declared: Declared, out: memoryview, given: Sequence[Payload]) -> None:
        """`out`: memory for the result; `given`: what was pushed."""
        self._declared = declared
        self._out = bytes_in(out)
        self._may = not any(np.may_share_memory(self._out, bytes_in(each)) for each in given)
        self._copied: set[int] = set()

    def came(self, part: int, data: Payload) -> None:
        """Copy a part of the result, which has arrived whole and checked."""
        if self._may and part < self._declared.parts and part not in self._copied:
            start, end = self._declared.span(part)
            np.copyto(self._out[start:end], bytes_in(data))
            self._copied.add(part)

    def forget(self) -> None:
        """All parts will arrive again."""
        self._copied.clear()

    def finish(self, state: Payload) -> None:
        """The whole result is here: copy what is missing."""
        whole = bytes_in(state)
        if not self._copied:
            np.copyto(self._out, whole)
            return
        for part in range(self._declared.parts):
            if part not in self._copied:
                start, end = self._declared.span(part)
                np.copyto(self._out[start:end], whole[start:end])

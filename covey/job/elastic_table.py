"""An elastic table in the words of Cruise (Lee 2020, §3.3): `put`, `get` and `update` over rounds of tensors.

    table = job.table()
    table.put("w", np.zeros(1000))                       # the same in every process
    state = job.state(table.arrays, table.load, enter=lambda rank, own: None)
    for step in state.steps(1000):
        for rank in job.carried(step):
            with rank:
                w = table.get("w")                       # as it was when the step began
                table.update("w", lambda w, delta: w - 0.1 * delta, gradient(w, ...))

What holds: a step is one round (bulk synchronous). Each rank updates the same keys once in a step, with one `f`; a
value becomes f(value, sum of all ranks' deltas), the sum in the fixed order of additions of `covey.job.tensors`, in
every process, once the loop over the ranks is over. So a value has the same bits everywhere, however many processes
there are. Ranks push a digest of the code of their `f`, too, so unlike code in two processes is refused before it
computes anything. What Cruise has beside this is not here: updates without waiting for others, functions that run at
servers, and an owner for each key.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from covey.core.errors import CoveyError
from covey.job.blocks.block_arrays import code_digest
from covey.job.carrying import CarriedRanks
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.handle import TensorHandle

Applies = Callable[[Array, Array], Array]
"""What makes the new value of the old one and of the sum of deltas; the same in every process."""
LOOP = "for rank in job.carried(step): with rank: table.update(key, f, delta)"
CODE = "covey/f"
"""Begin of the names of tensors in which each rank has a row with a digest of the functions that it gave."""
HALVES = 4
"""Numbers in a row, each a 16-bit part of the digest: sums of such numbers and zeros are exact."""


class ElasticTable:
    """Values by key, the same in each process at the beginning of a step. Made by `job.table`."""

    def __init__(self, carried: Callable[[], CarriedRanks | None]) -> None:
        """`carried` returns the ranks that this process carries; None: the job's state was not begun."""
        self._carried = carried
        self._values: dict[str, Array] = {}
        self._updates: dict[str, tuple[Applies, TensorHandle]] = {}
        """Updates of this step that are not applied yet."""
        self._given: dict[int, dict[str, str]] = {}
        """By rank that is entered: digests of the functions that it gave, by key."""
        self._codes: dict[str, TensorHandle] = {}
        """Rows with those of all ranks in this step, by name of the tensor."""

    def put(self, key: str, value: Array) -> None:
        """Give a key its first value, before `job.state`, the same in every process. CoveyError later, or twice."""
        if key in self._values or self._carried() is not None:
            why = "it has one already" if key in self._values else "the job's state was begun, so others would not know"
            raise CoveyError(f"key {key!r} was not put", why, "put each key once, before job.state; then update it")
        self._values[key] = np.array(value)

    def get(self, key: str) -> Array:
        """The value: in the loop over the ranks as it was when the step began, after it with this step's updates. It
        must not be changed. KeyError for an unknown key."""
        self._apply()
        return self._values[key]

    def update(self, key: str, f: Applies, delta: Array) -> None:
        """This rank's part of the key's next value, f(value, sum of the deltas of all ranks). CoveyError outside
        `with rank:` and when the code of `f` is not that of a rank before, where both are Python functions; errors of
        `CarriedRank.push`. Where another process has other code, whatever uses the new values raises CoveyError."""
        carried = self._carried()
        rank = None if carried is None else carried.entered
        if carried is None or rank is None:
            raise CoveyError(f"key {key!r} was not updated", "no rank was entered", LOOP)
        before = self._updates.get(key)
        if before is not None and (was := code_digest(before[0])) and (now := code_digest(f)) and was != now:
            why = f"rank {rank} gives another function than a rank before it"
            raise CoveyError(f"key {key!r} was not updated", why, "give every rank the same f")
        if np.shape(delta) != self._values[key].shape:
            why = f"the delta has the shape {np.shape(delta)}, and the value {self._values[key].shape}"
            raise CoveyError(f"key {key!r} was not updated", why, "give deltas the shape of the value")
        handle = carried.push(rank, key, delta, out=None, mean=False, type=None)
        self._updates[key] = f, handle
        self._given.setdefault(rank, {})[key] = code_digest(f)
        if self._push_code not in carried.leaving:
            carried.leaving.append(self._push_code)

    def arrays(self) -> Mapping[str, Array]:
        """All values, for `job.state`: at the end of a step with its updates."""
        self._apply()
        return dict(self._values)

    def load(self, arrays: Mapping[str, Array], own: Any = None) -> None:
        """Take the values of the others over, for `job.state`."""
        self._values, self._updates = dict(arrays), {}

    def _apply(self) -> None:
        carried = self._carried()
        if carried is None or carried.is_looping:
            return
        self._compare()
        updates, self._updates = self._updates, {}
        for key, (f, handle) in updates.items():
            self._values[key] = np.asarray(f(self._values[key], handle.wait()))

    def _push_code(self, rank: int) -> None:
        """A rank has given all its updates of this step: push which functions they have."""
        carried, given = self._carried(), self._given.pop(rank, None)
        if carried is None or given is None:
            return
        rows = np.zeros((carried.world_size, HALVES), np.float32)
        rows[rank] = code_row(given)
        name = f"{CODE} {hashlib.blake2b(repr(sorted(given)).encode(), digest_size=4).hexdigest()}"
        self._codes[name] = carried.push(rank, name, rows, out=None, mean=False, type=None)

    def _compare(self) -> None:
        """CoveyError when ranks gave functions of unlike code in this step: before one is applied, and again."""
        for handle in self._codes.values():
            if (found := unlike_ranks(handle.wait())) is not None:
                one, other = found
                what = f"keys {', '.join(map(repr, sorted(self._updates)))} were not updated"
                why = f"ranks {one} and {other} give functions of other code"
                raise CoveyError(what, why, "run one script in all processes of a job, and give every rank the same f")
        self._codes = {}


def code_row(given: Mapping[str, str]) -> Array:
    """The row of a rank that gave functions with these digests, by key; zeros where one of them is not known."""
    if not all(given.values()):
        return np.zeros(HALVES, np.float32)
    found = hashlib.blake2b(repr(sorted(given.items())).encode(), digest_size=2 * HALVES).digest()
    return np.frombuffer(found, "<u2").astype(np.float32)


def unlike_ranks(rows: Array) -> tuple[int, int] | None:
    """Two ranks whose rows differ; None: all are the same that are known."""
    known = [rank for rank, row in enumerate(rows) if row.any()]
    return next(((known[0], rank) for rank in known if (rows[rank] != rows[known[0]]).any()), None)

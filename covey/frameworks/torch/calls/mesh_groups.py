"""Process groups of a device mesh, whose collectives are rounds of all ranks.

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    dimension 0    ranks 0 and 2 | ranks 1 and 3         one round: two rows, of which each group adds its own
    dimension 1    ranks 0 and 1 | ranks 2 and 3

The groups of a dimension divide the job's ranks, and all of them call the same collectives. So a collective of one is
a round of all ranks, with a row for each group: a rank pushes its group's row, and zeros in the others. That heals like
any other round, for as many times the bytes as there are groups.

PyTorch makes the groups one after the other, and only the last one tells whether they have all ranks. Where they do
not, as in a mesh of some ranks, gloo adds, and the job does not heal (`covey.frameworks.torch.calls.connections`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from covey.frameworks.torch.calls.script_calls import MadeGroup, ScriptCalls
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import Type

OF_MESH = "mesh_"
"""How PyTorch begins the description of a group of a device mesh."""


class MeshRow(NamedTuple):
    """The place of one group among those of its dimension."""

    first: int
    """Number of the first of these groups."""
    at: int
    of: int
    """How many they are."""


def row_of(made: Sequence[MadeGroup], number: int, ranks: int) -> MeshRow | None:
    """The place of group `number` among those that were made with it, one after the other; None where they are not all
    ranks of the job, each once, in groups of one size."""
    beside: list[MadeGroup] = []
    for group in made:
        last = beside[-1] if beside else None
        of_all = [rank for each in beside for rank in each.ranks]
        follows = last is not None and last.about == group.about and len(last.ranks) == len(group.ranks)
        if not follows or len(of_all) == ranks or set(of_all) & set(group.ranks):
            if any(each.number == number for each in beside):
                break
            beside = []
        beside.append(group)
    if sorted(rank for each in beside for rank in each.ranks) != list(range(ranks)):
        return None
    at = next((at for at, each in enumerate(beside) if each.number == number), None)
    return None if at is None else MeshRow(beside[0].number, at, len(beside))


class MeshGroup:
    """The rounds of one group of a device mesh."""

    def __init__(self, calls: ScriptCalls, made: MadeGroup) -> None:
        self._calls, self._made = calls, made
        self._row: MeshRow | None = None
        self._gloo: Any = None

    def begun(self, kind: str, of: str, mine: Array, bits: Type | None) -> Callable[[], Array]:
        """Begin to add what the ranks of this group give; `of` names the collective with type and size. Returns what
        waits for the sum."""
        if self._row is None and self._gloo is None:
            self._row = row_of(self._calls.made, self._made.number, self._calls.ranks)
        if self._row is None:
            return self._added_by_gloo(mine, bits)
        first, at, count = self._row
        rows = np.zeros((count, *mine.shape), mine.dtype)
        rows[at] = mine
        wait = self._calls.begun(kind, f"mesh {first} {count} {of}", rows, False, bits)
        return lambda: wait()[at]

    def _added_by_gloo(self, mine: Array, bits: Type | None) -> Callable[[], Array]:
        if self._gloo is None:
            self._calls.check_heals()
            number, about, ranks = self._made
            call = f"a collective of ranks {list(ranks)}, a group of a mesh of some ranks"[:100]
            self._gloo = self._calls.connections.of(ranks, f"{number} {about}", call)
        found = mine.copy()
        whole = torch.from_numpy(found)
        work = self._gloo.allreduce([whole.view(torch.bfloat16) if bits == "bfloat16" else whole])

        def wait() -> Array:
            work.wait()
            return found

        return wait

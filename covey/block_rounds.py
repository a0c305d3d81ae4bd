"""One rank's tensors at aggregators: cut into Blocks, each at the owner of its table (`covey.blocks`).

    push "g" --+-- Block 0 --> table 2: covey.aggregator_rounds --> aggd on h3
               +-- Block 1 --> table 0: covey.aggregator_rounds --> aggd on h1
               +-- Block 2 --> table 1: covey.aggregator_rounds --> aggd on h2

A table has a connection, a thread and an epoch of its own, from its first Block on. Table 0's owner is there without
being asked for; that of another one is asked for by its first Block.

Blocks go out one after the other, each rank beginning with the table after its own number, so that not all ranks push
to one owner first: TCP would divide its network card unfairly, and each sum waits for the slowest.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from covey.aggregator_rounds import AggregatorRounds, Waits
from covey.blocks import Block, blocks_of, table_id
from covey.core import JobId
from covey.rounds import Rounds
from covey.sum_order import Order
from covey.tensor_arrays import Array
from covey.tensor_link import Poster
from covey.tensor_types import NUMBERS
from covey.tensorwire import PART_BYTES, Declared, block_label, key_of
from covey.wire import AggregatorAt


class CutTensor(NamedTuple):
    """A tensor, and where it is summed."""

    declared: Declared
    blocks: tuple[Block, ...]


class BlockRounds:
    """Methods may be called from any thread; of one tensor, by one at a time."""

    def __init__(
        self,
        job: JobId,
        rank: int,
        world_size: int,
        lost: Callable[[int, str, int], None],
        *,
        tables: int = 1,
        wanted: Callable[[int], None] = lambda table: None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """`lost(epoch, why, table)` is called from a link thread each time the address of that epoch cannot be used;
        `wanted(table)` when the owner of a table other than 0 is needed for the first time."""
        self.tables, self.part_bytes = tables, part_bytes
        self._order: Order = "tree"
        self.known: dict[str, CutTensor] = {}
        """By name: what was declared."""
        self.fatal: Exception | None = None
        """Why nothing will be added any more."""
        self._job, self._rank, self._world_size = job, rank, world_size
        self._lost, self._wanted = lost, wanted
        self._poster = Poster() if tables > 1 else None
        self._lock = threading.Lock()
        """Guards what follows."""
        self._at: dict[int, AggregatorRounds] = {}
        self._told: dict[int, AggregatorAt] = {}
        """The newest owner of each table that the agent named."""
        self._closed = False
        self._table(0)

    # ---- from the script ----

    @property
    def order(self) -> Order:
        """Of the additions of tensors that are declared from now on."""
        return self._order

    @order.setter
    def order(self, order: Order) -> None:
        with self._lock:
            self._order = order
            for rounds in self._at.values():
                rounds.rounds.order = order

    def declare(self, declared: Declared, data: Array) -> None:
        """A new tensor; a model's initial value is `data`. ValueError when there is one of that name."""
        blocks = blocks_of(key_of(declared.name), data.size, data.itemsize, self.tables)
        flat, whole = data.reshape(-1), len(blocks) == 1
        for at, block in enumerate(blocks):
            cut = declared if whole else msgspec.structs.replace(declared, block=at, elements=block[:2])
            self._table(block.table).declare(cut, flat[block.first : block.end])
        self.known[declared.name] = CutTensor(declared, blocks)

    def push(self, name: str, data: Array, blocks: bool) -> None:
        """Begin a round. `blocks`: this thread waits for it at once. ValueError when one is under way."""
        flat, each = data.reshape(-1), enumerate(self.known[name].blocks)
        for at, block in sorted(each, key=lambda one: (one[1].table - self._rank - 1) % self.tables):
            self._at[block.table].push(block_label(name, at), flat[block.first : block.end], blocks)

    def has_result(self, name: str) -> bool:
        """Whether no round of this tensor is under way, and nothing of it is being sent."""
        return all(
            self._at[block.table].has_result(block_label(name, at)) for at, block in enumerate(self.known[name].blocks)
        )

    def wait(self, name: str, waits: Waits, out: Array | None) -> Array:
        """The tensor's result. ValueError when an aggregator does not add it."""
        cut = self.known[name]
        result = np.empty(cut.declared.shape, NUMBERS[cut.declared.type].stored) if out is None else out
        flat = result.reshape(-1)
        for at, block in enumerate(cut.blocks):
            self._at[block.table].wait(block_label(name, at), waits, flat[block.first : block.end])
        return result

    def why(self, name: str) -> str:
        """Nothing comes, for people."""
        cut = self.known.get(name)
        blocks: Sequence[Block] = () if cut is None else cut.blocks
        late = [
            self._at[block.table]
            for at, block in enumerate(blocks)
            if not self._at[block.table].has_result(block_label(name, at))
        ]
        return "; ".join(dict.fromkeys(rounds.why() for rounds in late)) or self._at[0].why()

    def close(self) -> None:
        """Drops the connections and ends the threads; who waits looks at once. Again is harmless."""
        with self._lock:
            self._closed = True
            each = list(self._at.values())
        for rounds in each:
            rounds.close()
        if self._poster is not None:
            self._poster.close()

    # ---- from the agent ----

    def moved(self, at: AggregatorAt) -> None:
        """Push and pull the Blocks of that table there from now on, unless an owner of a higher epoch is known."""
        with self._lock:
            told = self._told.get(at.table)
            if told is None or told.epoch < at.epoch:
                self._told[at.table] = at
            rounds = self._at.get(at.table)
        if rounds is not None:
            rounds.moved(at)

    # ---- inside ----

    def _table(self, table: int) -> AggregatorRounds:
        with self._lock:
            rounds = self._at.get(table)
            if rounds is not None:
                return rounds
            of = Rounds(table_id(self._job, table), self._rank, self._world_size, self.part_bytes)
            lost = partial(self._table_lost, table)
            rounds = self._at[table] = AggregatorRounds(of, lost, self._failed, self._poster)
            rounds.rounds.order = self._order
            told = self._told.get(table)
        if self._closed:
            rounds.close()
        if self.fatal is not None:
            rounds.fail(self.fatal)
        if told is not None:
            rounds.moved(told)
        if table:
            self._wanted(table)
        return rounds

    def _table_lost(self, table: int, epoch: int, why: str) -> None:
        self._lost(epoch, why, table)

    def _failed(self, error: Exception) -> None:
        """One table's owners say that this run of the job is over: so is that of the others."""
        with self._lock:
            self.fatal = self.fatal or error
            each = list(self._at.values())
        for rounds in each:
            rounds.fail(error)

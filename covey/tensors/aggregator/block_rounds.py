"""One rank's tensors at aggregators: cut into Blocks, each at the owner of its table (`covey.tensors.numbers.blocks`).

    push "g" --+-- Block 0 --> table 2: covey.tensors.aggregator.aggregator_rounds --> aggd on h3
               +-- Block 1 --> table 0: covey.tensors.aggregator.aggregator_rounds --> aggd on h1
               +-- Block 2 --> table 1: covey.tensors.aggregator.aggregator_rounds --> aggd on h2

A table has a connection, a thread and an epoch of its own, from its first Block on. Table 0 has an owner from the
start; the owner of another table is asked for with its first Block.

Blocks are sent one after the other. Each rank begins with the table after its own number, so that not all ranks push to
one owner first: TCP would divide its network card unfairly, and each sum waits for the slowest.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from covey.core.ids import JobId
from covey.tensors.aggregator.aggregator_rounds import SMALL_BYTES, AggregatorRounds, Waits
from covey.tensors.aggregator.link import Poster, RankSideLink
from covey.tensors.aggregator.packed_rounds import pack_rounds, unpack_rounds
from covey.tensors.aggregator.rounds import Rounds, Tell, ToldByRank
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.blocks import Block, blocks_of, keeper, table_id
from covey.tensors.numbers.sum_order import Order
from covey.tensors.numbers.tensor_wire import PART_BYTES, Declared, block_label, key_of
from covey.tensors.numbers.types import NUMBERS
from covey.tensors.rdma.rdma_here import RdmaHere
from covey.tensors.turns.holder import ProcessTurns
from covey.wire.job import AggregatorAt


class CutTensor(NamedTuple):
    """A tensor, and the Blocks in which it is summed."""

    declared: Declared
    blocks: tuple[Block, ...]
    keepers: tuple[int, ...]
    """For each Block, the rank that has its moments too; 0 where there are none."""

    def block(self, at: int) -> Declared:
        """The declaration of one Block."""
        whole = msgspec.structs.replace(self.declared, keeper=self.keepers[at])
        if len(self.blocks) == 1:
            return whole
        return msgspec.structs.replace(whole, block=at, elements=self.blocks[at][:2])


class BlockRounds:
    """One rank's rounds at all aggregators. Any thread may call; for one tensor, one thread at a time."""

    def __init__(
        self,
        job: JobId,
        rank: int,
        world_size: int,
        lost: Callable[[int, str, int], None],
        *,
        tables: int = 1,
        incarnation: int = 0,
        wanted: Callable[[int], None] = lambda table: None,
        heard: Callable[[], None] = lambda: None,
        part_bytes: int = PART_BYTES,
        local: Callable[[AggregatorAt], RankSideLink | None] = lambda at: None,
        rdma: RdmaHere | None = None,
        turns: ProcessTurns | None = None,
    ) -> None:
        """`lost(epoch, why, table)` is called from a link thread each time the address of that epoch cannot be used,
        `heard` when a result may be there, and `wanted(table)` when the owner of a table is needed for the first time.
        `local` connects to an owner in this process; `rdma` is used for those on other hosts, where the agent lets it.
        `turns`: those of this process."""
        self._local, self._rdma, self._turns = local, rdma, turns
        self.tables, self.part_bytes, self.incarnation = tables, part_bytes, incarnation
        self._order: Order = "tree"
        self.known: dict[str, CutTensor] = {}
        """Declared tensors by name."""
        self.fatal: Exception | None = None
        """Why nothing will be added any more; None: it will."""
        self._job, self._rank, self._world_size = job, rank, world_size
        self._lost, self._wanted, self._heard = lost, wanted, heard
        self._poster = Poster() if tables > 1 else None
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._at: dict[int, AggregatorRounds] = {}
        self._told: dict[int, AggregatorAt] = {}
        """The newest owner of each table that the agent named."""
        self._closed = False
        self._heals, self._leaves = False, b""
        self._has_wanted: set[int] = set()
        self._told_by_ranks: Callable[[ToldByRank], None] = lambda told: None
        self._over: Callable[[], None] = lambda: None
        self._make(0)

    # ---- from the script ----

    @property
    def order(self) -> Order:
        """Order of additions for tensors that are declared from now on."""
        return self._order

    @order.setter
    def order(self, order: Order) -> None:
        with self._lock:
            self._order = order
            for rounds in self._at.values():
                rounds.rounds.order = order

    def declare(self, declared: Declared, data: Array, moments: Sequence[Array] = ()) -> None:
        """Declare a new tensor. `data`: the initial value of a model, with the `moments` from which its optimizer
        continues. ValueError when the name is taken."""
        cut = self.cut(declared)
        flat, *first_moments = (each.reshape(-1) for each in (data, *(moments if self._rank == 0 else ())))
        for at, block in enumerate(cut.blocks):
            here = slice(block.first, block.end)
            self.table(block.table).declare(cut.block(at), flat[here], [each[here] for each in first_moments])
        self.known[declared.name] = cut

    def is_declared(self, name: str) -> bool:
        """Whether this process has declared the tensor."""
        return name in self.known

    def push(self, name: str, data: Array, blocks: bool, rate: float = 0.0) -> None:
        """Begin a round. `blocks`: this thread waits for the result at once. `rate`: learning rate. ValueError when a
        round is under way."""
        flat, cut = data.reshape(-1), self.known[name]
        sends = blocks and data.nbytes > SMALL_BYTES and any(self._at[block.table].is_far for block in cut.blocks)
        with self._turns.sending() if sends and self._turns is not None else contextlib.nullcontext():
            for at in self.in_turn(cut, range(len(cut.blocks))):
                block = cut.blocks[at]
                here = flat[block.first : block.end]
                self._at[block.table].push(block_label(name, at), here, blocks=blocks, rate=rate)
        self.say_held()

    def push_soon(self, name: str, data: Array) -> None:
        """Push as `push` does, for a tensor that is pushed just before another one: the frames of a small tensor are
        sent together with that one's."""
        cut = self.known[name]
        if len(cut.blocks) > 1:
            self.push(name, data, False)
        else:
            self._at[0].push_soon(name, data.reshape(-1))

    def say_held(self) -> None:
        """Send what `push_soon` has kept back."""
        self._at[0].say_held()

    def wake(self) -> None:
        """Let threads that wait look again whether they are to wait."""
        with self._lock:
            each = list(self._at.values())
        for rounds in each:
            rounds.wake()

    def steps(self, name: str) -> int:
        """Number of steps that this tensor's optimizer has made."""
        cut = self.known[name]
        return cut.declared.steps + (self._at[cut.blocks[0].table].round(name) or 0)

    def kept(self, name: str) -> Iterator[tuple[int, list[Array]]]:
        """The moments of this tensor that this rank keeps: for each Block, its first element and the arrays."""
        cut = self.known[name]
        for at, block in enumerate(cut.blocks):
            if moments := self._at[block.table].moments(block_label(name, at)):
                yield block.first, moments

    def own_state(self, name: str) -> Iterator[tuple[int, list[Array]]]:
        """The parts of this tensor's last result that this rank keeps with their moments: for each Block, its first
        element and the arrays, as of `AggregatorRounds.own_state`."""
        for at, block in enumerate(self.known[name].blocks):
            if arrays := self._at[block.table].own_state(block_label(name, at)):
                yield block.first, arrays

    def has_result(self, name: str) -> bool:
        """Whether no round of this tensor is under way, and nothing of it is being sent."""
        return all(
            self._at[block.table].has_result(block_label(name, at)) for at, block in enumerate(self.known[name].blocks)
        )

    def until(self, name: str, waits: Waits) -> None:
        """Wait until the tensor's result is here. ValueError when an aggregator does not add it."""
        for at, block in enumerate(self.known[name].blocks):
            self._at[block.table].until(block_label(name, at), waits)

    def wait(self, name: str, waits: Waits, out: Array | None) -> Array:
        """The tensor's result, once it is here. ValueError when an aggregator does not add it."""
        cut = self.known[name]
        result = np.empty(cut.declared.shape, NUMBERS[cut.declared.type].stored) if out is None else out
        flat = result.reshape(-1)
        for at, block in enumerate(cut.blocks):
            self._at[block.table].wait(block_label(name, at), waits, flat[block.first : block.end])
        return result

    def why(self, name: str) -> str:
        """Why no result comes, for people."""
        cut = self.known.get(name)
        blocks: Sequence[Block] = () if cut is None else cut.blocks
        late = [
            self._at[block.table]
            for at, block in enumerate(blocks)
            if not self._at[block.table].has_result(block_label(name, at))
        ]
        return "; ".join(dict.fromkeys(rounds.why() for rounds in late)) or self._at[0].why()

    def leave(self, words: bytes) -> None:
        """This rank pushes no tensor any more but the last one: ranks that wait for it are told, in these words."""
        with self._lock:
            self._leaves, each = words, list(self._at.values())
        for rounds in each:
            rounds.leave(words)

    def close(self) -> None:
        """Drop the connections and end the threads; waiting threads check at once. A second call is harmless."""
        with self._lock:
            self._closed = True
            each = list(self._at.values())
        for rounds in each:
            rounds.close()
        if self._poster is not None:
            self._poster.close()

    # ---- for a rank that may be lost, and its successor ----

    def heal(self, told: Callable[[ToldByRank], None], over: Callable[[], None] = lambda: None) -> None:
        """From now on `told` is called, by link threads, with the messages of other ranks, and `over` once nothing will
        be added any more."""
        with self._lock:
            self._told_by_ranks, self._heals, self._over = told, True, over
            for rounds in self._at.values():
                rounds.told = told
        self.table(0)  # it passes on what ranks tell one another
        if self.fatal is not None:
            over()

    def begin_with(self, packed: bytes) -> None:
        """Take over the Blocks and rounds of another rank's `versions`. TensorWireError, ValueError."""
        for table, declared, version in unpack_rounds(packed, self.tables):
            self.table(table).adopt(declared, version)

    def versions(self) -> bytes | None:
        """Each Block and the round whose result is here, packed; equal on all ranks that are in the same step. None
        while a round is under way."""
        with self._lock:
            each = {table: rounds.versions() for table, rounds in sorted(self._at.items())}
        return pack_rounds(each)

    def owner(self, table: int) -> AggregatorAt | None:
        """The newest owner of this table that the agent named; None: none yet."""
        with self._lock:
            return self._told.get(table)

    def tell(self, said: Tell) -> None:
        """Send a message to another rank, if both are connected."""
        self._at[0].tell(said)

    # ---- for who speaks for a host ----

    def cut(self, declared: Declared) -> CutTensor:
        """The tensor divided into Blocks."""
        count, key = declared.size_bytes // declared.element_bytes, key_of(declared.name)
        blocks = blocks_of(key, count, declared.element_bytes, self.tables)
        if not declared.moments:
            return CutTensor(declared, blocks, (0,) * len(blocks))
        each = enumerate(blocks)
        keepers = tuple(keeper(key, at, block.table, self.tables, self._world_size) for at, block in each)
        return CutTensor(declared, blocks, keepers)

    def in_turn(self, cut: CutTensor, blocks: Iterable[int]) -> list[int]:
        """These Blocks in the order in which this rank pushes them."""
        return sorted(blocks, key=lambda at: (cut.blocks[at].table - self._rank - 1) % self.tables)

    def table(self, table: int) -> AggregatorRounds:
        """The rounds at the owner of this table, which is asked for if need be."""
        rounds = self._make(table)
        with self._lock:
            is_known = table in self._has_wanted
            self._has_wanted.add(table)
        if not is_known:
            self._wanted(table)
        return rounds

    def _make(self, table: int) -> AggregatorRounds:
        with self._lock:
            rounds = self._at.get(table)
            if rounds is not None:
                return rounds
            of = Rounds(table_id(self._job, table), self._rank, self._world_size, self.part_bytes)
            of.incarnation = self.incarnation
            lost = partial(self._table_lost, table)
            ways = self._poster, self._heard, self._local, self._rdma, self._turns
            rounds = self._at[table] = AggregatorRounds(of, lost, self._failed, *ways)
            rounds.rounds.order = self._order
            rounds.told = self._told_by_ranks
            rounds.leave(self._leaves)
            told = self._told.get(table)
        if self._closed:
            rounds.close()
        if self.fatal is not None:
            rounds.fail(self.fatal)
        if told is not None:
            rounds.moved(told)
        return rounds

    @property
    def connected(self) -> bool:
        """Whether the owner of each table is connected."""
        return all(rounds.connected for rounds in list(self._at.values()))

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

    def begin_as(self, other: "BlockRounds") -> None:
        """Begin at the owners at which these rounds of another rank of this process are."""
        with other._lock:
            each = dict(other._at)
        for table, rounds in each.items():
            self._make(table).begin_as(rounds)

    # ---- inside ----

    def _table_lost(self, table: int, epoch: int, why: str) -> None:
        self._lost(epoch, why, table)

    def _failed(self, error: Exception) -> None:
        """One table's owners say that this run of the job is over, so the rounds of all tables end."""
        with self._lock:
            self.fatal = self.fatal or error
            each = list(self._at.values())
        for rounds in each:
            rounds.fail(error)
        self._over()

"""A worker's Blocks at several owners, on asyncio and `covey.ports`; does what `covey.tensors.aggregator.block_rounds`
does.

It is for programs that run on the ports, such as a job's ranks in the simulator. Arrays are float32 bytes here.
"""

import array
import asyncio
import operator
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from covey.core.ids import JobId
from covey.ports.env import Env
from covey.simulated.tensor_streams import TensorStream
from covey.tensors.aggregator.packed_rounds import pack_rounds, unpack_rounds
from covey.tensors.aggregator.rounds import Tell, ToldByRank
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.blocks import Block, Sizes, blocks_of, keeper, speaker, table_id
from covey.tensors.numbers.sum_order import Node, Order, last_addition
from covey.tensors.numbers.tensor_wire import PART_BYTES, Declared, block_label, key_of
from covey.tensors.numbers.updates import Update
from covey.wire.job import AggregatorAt

ELEMENT_BYTES = 4


class TensorRank(NamedTuple):
    """The rank of a job whose tensors are summed."""

    job: JobId
    rank: int
    world_size: int
    tables: int = 1
    """Tables of the job's tensors, each summed by one owner."""
    incarnation: int = 0
    """How many processes of this rank were lost before."""


class BlockStreams:
    """One rank's tensors. `lost` and `wanted` are as in `covey.tensors.aggregator.block_rounds`."""

    def __init__(
        self,
        env: Env,
        me: TensorRank,
        lost: Callable[[int, str, int], None],
        *,
        wanted: Callable[[int], None] = lambda table: None,
        part_bytes: int = PART_BYTES,
        sizes: Sizes = Sizes(),
        together: "HostStreams | None" = None,
    ) -> None:
        """`together`: the object that the job's ranks on this host share."""
        self._rank, self._tables, self._together, self.part_bytes = me.rank, me.tables, together, part_bytes
        self._sizes, self._lost, self._wanted = sizes, lost, wanted

        def made(table: int) -> TensorStream:
            of, lost = (table_id(me.job, table), me.rank, me.world_size), partial(self._table_lost, table)
            stream = TensorStream(env.bytes, env.spawn, *of, lost, env.entropy, part_bytes)
            stream.rounds.incarnation, stream.told = me.incarnation, self._told_by_ranks
            stream.changed = lambda: self.changed()
            return stream

        self.changed: Callable[[], None] = lambda: None
        """Called whenever a wait may be over."""
        self._made = made
        self._heals, self._has_wanted = False, set[int]()
        self._told_by_ranks: Callable[[ToldByRank], None] = lambda told: None
        self._at: dict[int, TensorStream] = {0: self._made(0)}
        self._told: dict[int, AggregatorAt] = {}
        self._blocks: dict[str, tuple[Block, ...]] = {}

    async def model(self, name: str, initial: bytes, shape: tuple[int, ...], update: Update | None = None) -> bytes:
        """Rank 0's initial parameters, on every rank. `update`: their optimizer, which gets the pushed gradients."""
        given = await self._given(name, initial)
        self._declare(Declared(name, "model", shape, update=update), given[min(given)])
        return await self._whole(name, lambda at, block: self._at[block.table].agreed(block_label(name, at)))

    async def push_pull(self, name: str, data: bytes, rate: float = 0.0) -> bytes:
        """The result of the next round: the sum, and for a model the parameters updated with it. `rate`: learning rate,
        where parameters are updated."""
        given = await self._given(name, data)
        if name not in self._blocks:
            self._declare(Declared(name, "grad", (len(data) // ELEMENT_BYTES,)), data)

        def one(at: int, block: Block) -> Coroutine[Any, Any, bytes]:
            stream = self._at[block.table]
            nodes = stream.rounds.tensors[block_label(name, at)].spoken.nodes
            order = stream.rounds.order
            parts = {rank: _part(each, block) for rank, each in given.items()}
            return stream.push_pull(block_label(name, at), *(_added(node, order, parts) for node in nodes), rate=rate)

        return await self._whole(name, one)

    # ---- as `covey.tensors.aggregator.block_rounds`, for a rank that shares nothing with others ----

    @property
    def order(self) -> Order:
        return self._at[0].rounds.order

    def is_declared(self, name: str) -> bool:
        return name in self._blocks

    def declare(self, declared: Declared, data: Array) -> None:
        self._declare(declared, data.tobytes())

    def push_soon(self, name: str, data: Array) -> None:
        """Begin the next round."""
        flat = data.tobytes()
        for at, block in enumerate(self._blocks[name]):
            self._at[block.table].push(block_label(name, at), _part(flat, block))

    async def result(self, name: str) -> bytes:
        """The result of the round that was begun last."""
        return await self._whole(name, lambda at, block: self._at[block.table].result(block_label(name, at)))

    def is_here(self, name: str) -> bool:
        """Whether that result is here. Raises what `result` raises."""
        here = [self._at[block.table].is_here(block_label(name, at)) for at, block in enumerate(self._blocks[name])]
        return all(here)

    def newest(self, name: str) -> bytes:
        """The newest result of this tensor that is here."""
        blocks = enumerate(self._blocks[name])
        return b"".join(
            bytes(self._at[block.table].rounds.tensors[block_label(name, at)].state) for at, block in blocks
        )

    @property
    def is_superseded(self) -> bool:
        """Whether another process runs as this rank by now."""
        return any(stream.is_superseded for stream in self._at.values())

    @property
    def owners(self) -> Sequence[AggregatorAt]:
        """The owners that are connected."""
        return [stream.at for stream in self._at.values() if stream.at is not None]

    def heal(self, told: Callable[[ToldByRank], None]) -> None:
        self._heals, self._told_by_ranks = True, told
        for stream in self._at.values():
            stream.told = told
        self._stream(0)  # it passes on what ranks tell one another

    def begin_with(self, packed: bytes) -> None:
        for table, declared, version in unpack_rounds(packed, self._tables):
            self._stream(table).adopt(declared, version)

    def versions(self) -> bytes | None:
        return pack_rounds({table: stream.rounds.versions() for table, stream in self._at.items()})

    def leave(self, words: bytes) -> None:
        """This rank leaves, as in `covey.tensors.aggregator.block_rounds`; no further tensor is declared."""
        for stream in self._at.values():
            stream.leave(words)

    def tell(self, said: Tell) -> None:
        self._at[0].tell(said)

    # ---- from the agent ----

    def moved(self, at: AggregatorAt) -> None:
        told = self._told.get(at.table)
        if told is None or told.epoch < at.epoch:
            self._told[at.table] = at
        if at.table in self._at:
            self._at[at.table].moved(at)

    def begin_as(self, other: "BlockStreams") -> None:
        """Begin at the owners at which these streams of another rank of this process are."""
        for table, stream in other._at.items():
            self._stream(table).begin_as(stream)

    def check(self) -> None:
        for stream in self._at.values():
            stream.rounds.check()

    def close(self) -> None:
        for stream in self._at.values():
            stream.close()

    async def _given(self, name: str, data: bytes) -> dict[int, bytes]:
        """Data that the ranks that share gave for this round, by rank."""
        if self._together is None:
            return {self._rank: data}
        return await self._together.give(self._rank, name, data)

    async def _whole(self, name: str, get: Callable[[int, Block], Coroutine[Any, Any, bytes]]) -> bytes:
        """The results of all Blocks, one after the other; `get` returns that of one for which this rank speaks."""
        blocks = self._blocks[name]
        mine = [at for at in range(len(blocks)) if self._speaks(name, at)]
        found = dict(zip(mine, await asyncio.gather(*(get(at, blocks[at]) for at in mine)), strict=True))
        if self._together is not None:
            found = await self._together.results(self._rank, name, found, len(blocks))
        return b"".join(found[at] for at in range(len(blocks)))

    def _speaks(self, name: str, block: int) -> bool:
        together = self._together
        if together is None:
            return True
        at = speaker(key_of(name), block, self._tables, together.ranks[1] - together.ranks[0])
        return together.ranks[0] + at == self._rank

    def _declare(self, declared: Declared, data: bytes) -> None:
        name, elements = declared.name, len(data) // ELEMENT_BYTES
        blocks = blocks_of(key_of(name), elements, ELEMENT_BYTES, self._tables, self._sizes)
        self._blocks[name] = blocks
        for at, block in enumerate(blocks):
            if not self._speaks(name, at):
                continue
            initial = _part(data, block) if declared.kind == "model" else None
            cut = None if len(blocks) == 1 else block[:2]
            stream = self._stream(block.table)
            rounds = stream.rounds
            of_block = msgspec.structs.replace(
                declared,
                part_bytes=rounds.part_bytes,
                order=rounds.order,
                block=at,
                elements=cut,
                keeper=keeper(key_of(name), at, block.table, self._tables, rounds.world_size),
            )
            stream.declare_as(of_block, initial, None if self._together is None else self._together.ranks)

    def _stream(self, table: int) -> TensorStream:
        if table not in self._at:
            stream = self._at[table] = self._made(table)
            if table in self._told:
                stream.moved(self._told[table])
        if table not in self._has_wanted:
            self._has_wanted.add(table)
            self._wanted(table)
        return self._at[table]

    def _table_lost(self, table: int, epoch: int, why: str) -> None:
        self._lost(epoch, why, table)


class HostStreams:
    """Data that a job's ranks on one host share, like the memory of `covey.tensors.aggregator.host_rounds`: the
    contributions to a round, and its results."""

    def __init__(self, ranks: Node) -> None:
        self.ranks = ranks
        self._rounds: dict[tuple[int, str], int] = {}
        """By rank and name: the round that it has begun."""
        self._given: dict[tuple[str, int], dict[int, bytes]] = {}
        self._results: dict[tuple[str, int], dict[int, bytes]] = {}
        self._taken: dict[tuple[str, int], int] = {}
        self._changed = asyncio.Event()

    async def give(self, rank: int, name: str, data: bytes) -> dict[int, bytes]:
        """The contributions by rank, once all ranks have given theirs."""
        round = self._rounds[rank, name] = self._rounds.get((rank, name), 0) + 1
        given = self._given.setdefault((name, round), {})
        given[rank] = data
        self._tell()
        while len(given) < self.ranks[1] - self.ranks[0]:
            await self._changed.wait()
        return given

    async def results(self, rank: int, name: str, found: dict[int, bytes], blocks: int) -> dict[int, bytes]:
        """The results by Block, once all are there. `found`: those for which this rank speaks."""
        of = name, self._rounds[rank, name]
        results = self._results.setdefault(of, {})
        results.update(found)
        self._tell()
        while len(results) < blocks:
            await self._changed.wait()
        self._taken[of] = self._taken.get(of, 0) + 1
        if self._taken[of] == self.ranks[1] - self.ranks[0]:
            del self._given[of], self._results[of], self._taken[of]
        return results

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _added(node: Node, order: Order, parts: Mapping[int, bytes]) -> bytes:
    """The sum of these ranks' float32 numbers."""
    last = last_addition(node, order)
    if last is None:
        return parts[node[0]]
    sides = (memoryview(_added(side, order, parts)).cast("f") for side in (last.left, last.right))
    return array.array("f", map(operator.add, *sides)).tobytes()


def _part(data: bytes, block: Block) -> bytes:
    return data[ELEMENT_BYTES * block.first : ELEMENT_BYTES * block.end]

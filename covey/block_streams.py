"""`covey.block_rounds` for a worker on asyncio and `covey.ports`: Blocks of its tensors at several owners.

For programs that run on the ports, such as a job's ranks in the simulator. Arrays are their float32 bytes here.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from covey.blocks import Block, Sizes, blocks_of, table_id
from covey.core import JobId
from covey.ports import Bytes
from covey.tensorstream import TensorStream
from covey.tensorwire import PART_BYTES, Declared, Kind, block_label, key_of
from covey.wire import AggregatorAt

ELEMENT_BYTES = 4


class BlockStreams:
    """One rank's tensors. `lost`, `wanted` and `tables` are as of `covey.block_rounds`, the rest as of
    `TensorStream`."""

    def __init__(
        self,
        port: Bytes,
        spawn: Callable[[str, Coroutine[Any, Any, Any]], object],
        job: JobId,
        rank: int,
        world_size: int,
        lost: Callable[[int, str, int], None],
        entropy: Callable[[int], bytes],
        *,
        tables: int = 1,
        wanted: Callable[[int], None] = lambda table: None,
        part_bytes: int = PART_BYTES,
        sizes: Sizes = Sizes(),
    ) -> None:
        self._job, self._tables, self._sizes, self._lost, self._wanted = job, tables, sizes, lost, wanted

        def made(table: int) -> TensorStream:
            told = partial(self._table_lost, table)
            return TensorStream(port, spawn, table_id(job, table), rank, world_size, told, entropy, part_bytes)

        self._made = made
        self._at: dict[int, TensorStream] = {0: self._made(0)}
        self._told: dict[int, AggregatorAt] = {}
        self._blocks: dict[str, tuple[Block, ...]] = {}

    async def model(self, name: str, initial: bytes, shape: tuple[int, ...]) -> bytes:
        """Rank 0's initial parameters, on every rank."""
        self._declare(name, "model", shape, initial)
        return await self._whole(
            *(self._at[block.table].agreed(block_label(name, at)) for at, block in enumerate(self._blocks[name]))
        )

    async def push_pull(self, name: str, data: bytes) -> bytes:
        """The result of the next round: parameters plus sum for a model, else the sum."""
        if name not in self._blocks:
            self._declare(name, "grad", (len(data) // ELEMENT_BYTES,), data)
        return await self._whole(
            *(
                self._at[block.table].push_pull(block_label(name, at), _part(data, block))
                for at, block in enumerate(self._blocks[name])
            )
        )

    def moved(self, at: AggregatorAt) -> None:
        told = self._told.get(at.table)
        if told is None or told.epoch < at.epoch:
            self._told[at.table] = at
        if at.table in self._at:
            self._at[at.table].moved(at)

    def check(self) -> None:
        for stream in self._at.values():
            stream.rounds.check()

    def close(self) -> None:
        for stream in self._at.values():
            stream.close()

    async def _whole(self, *blocks: Coroutine[Any, Any, bytes]) -> bytes:
        """Their results, one after the other."""
        return b"".join(await asyncio.gather(*blocks))

    def _declare(self, name: str, kind: Kind, shape: tuple[int, ...], data: bytes) -> None:
        elements = len(data) // ELEMENT_BYTES
        blocks = blocks_of(key_of(name), elements, ELEMENT_BYTES, self._tables, self._sizes)
        self._blocks[name] = blocks
        for at, block in enumerate(blocks):
            initial = _part(data, block) if kind == "model" else None
            cut = None if len(blocks) == 1 else block[:2]
            stream = self._stream(block.table)
            rounds = stream.rounds
            stream.declare_as(Declared(name, kind, shape, rounds.part_bytes, rounds.order, at, cut), initial)

    def _stream(self, table: int) -> TensorStream:
        if table not in self._at:
            stream = self._at[table] = self._made(table)
            if table in self._told:
                stream.moved(self._told[table])
            self._wanted(table)
        return self._at[table]

    def _table_lost(self, table: int, epoch: int, why: str) -> None:
        self._lost(epoch, why, table)


def _part(data: bytes, block: Block) -> bytes:
    return data[ELEMENT_BYTES * block.first : ELEMENT_BYTES * block.end]

"""The input data of a job in Blocks (`job.data`): Cruise's data Blocks (Lee 2020, ch. 3), for ranks that change hands.

    data = job.data(blocks=64, load=lambda k: {"x": features(k), "y": labels(k)}, bytes="4 MiB")
    state = job.state(lambda: {"w": w}, load_state, enter=lambda rank, own: None)
    for step in state.steps(1000):
        for rank in job.carried(step):
            with rank:
                for k, block in data.of(rank):
                    g += gradient(w, block["x"], block["y"])
                sums = rank.push("g", g)
        w -= 0.1 * sums.wait()

Block k belongs to rank k mod V for ever, so it is in the process that carries that rank. `load(k)` makes it there,
once; a process that takes the rank over while the one before lives gets it from there. Data does not change: what is
computed of it goes into sums, so nothing can be lost or counted twice, whoever holds a Block.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from covey.core.errors import CoveyError
from covey.core.units import format_size, parse_size
from covey.job.blocks.block_arrays import code_digest, for_script
from covey.job.blocks.block_store import BlockStore
from covey.job.blocks.block_wire import BLOCK_BYTES_MAX, BLOCKS_MAX, SETS_MAX, DeclaredBlocks
from covey.job.blocks.exchange import BlockSet, Exchange, ExchangingProcess
from covey.job.blocks.memory_use import MemoryUse
from covey.job.blocks.spilled import DiskSpill, RemoteSpill, SpillPlace, spill_folder
from covey.job.blocks.spilling_store import SpillingStore
from covey.kernel.this_process import OfOneProcess
from covey.wire.job import Carries, HostMemory

BYTES = "64 MiB"
"""Most bytes of a Block unless the script says more: larger ones come late, and one rank may have several."""
UNBOUNDED = 1 << 62
"""Bytes in memory of a set for which only the memory of the host is a limit."""
NO_ROOM_NEXT = 'give spill="disk" or spill="remote", bytes= as the largest Block needs, or more --mem'
Load = Callable[[int], Any]


def declared_blocks(name: str, blocks: int, load: Load | None, bytes_max: int | str) -> DeclaredBlocks:
    """The set that a script declares. CoveyError when it cannot be one."""
    what = f"data {name!r} was not declared"
    if load is None or not callable(load):
        why = "load= is missing, and a Block whose process is lost can only be loaded again"
        raise CoveyError(what, why, "give load=, a function that returns the arrays of Block k from its number")
    if not 1 <= blocks <= BLOCKS_MAX or not 1 <= len(name) <= 64:
        why = f"it has {blocks} Blocks and a name of {len(name)} characters"
        raise CoveyError(what, why, f"give from 1 to {BLOCKS_MAX} Blocks, and a name of at most 64 characters")
    size = parse_size(bytes_max) if isinstance(bytes_max, str) else bytes_max
    if not 1 <= size <= BLOCK_BYTES_MAX:
        raise CoveyError(what, f"bytes={size} is no size of a Block", "give the bytes of the largest, as '64 MiB'")
    return DeclaredBlocks(name, blocks, size, code_digest(load))


class DataBlocks(OfOneProcess):
    """The Blocks of one set in this process. Made by `job.data`. In a forked child it raises OtherProcess."""

    _kind = "the data Blocks of a job"
    _instead = "read them in the process that called job.data, and give workers arrays"

    def __init__(self, of: BlockSet, exchange: Exchange, world_size: int, entered: Callable[[], int | None]) -> None:
        """`entered` returns the rank that the script computes as now (`with rank:`); None: no rank."""
        self._of, self._exchange, self._world_size, self._entered = of, exchange, world_size, entered

    @property
    def blocks(self) -> int:
        """The number of Blocks of all ranks."""
        return self._of.declared.blocks

    @property
    def loaded(self) -> int:
        """How many Blocks `load` has made in this process."""
        return self._of.loaded

    @property
    def moved(self) -> int:
        """How many Blocks came to this process from others."""
        return self._of.moved

    @property
    def resident_bytes(self) -> int:
        """Bytes of Blocks that are in this process's memory."""
        return self._of.store.resident_bytes

    @property
    def spilled(self) -> str:
        """How many Blocks are in memory and where the others are, for people; empty without `spill=`."""
        return self._of.store.words

    def of(self, rank: int) -> Iterator[tuple[int, Any]]:
        """Each Block of this rank, in order, as its number and what `load` returned: an array, or a dict of arrays, all
        read-only. Waits while a Block is on its way here. CoveyError outside `with rank:`."""
        for block in range(int(rank), self.blocks, self._world_size):
            yield block, self._block(block)

    def __getitem__(self, block: int) -> Any:
        """One Block of the rank that was entered. CoveyError for another rank's, and outside `with rank:`."""
        if not 0 <= block < self.blocks:
            raise IndexError(f"Block {block} of {self._of.declared.name!r}, which has {self.blocks}")
        return self._block(block)

    def _block(self, block: int) -> Any:
        self._check_process(f"Block {block} is not here")
        entered, rank, name = self._entered(), block % self._world_size, self._of.declared.name
        if entered != rank:
            now = "no rank was entered" if entered is None else f"this process computes as rank {entered}"
            what, why = f"Block {block} of {name!r} was not given", f"it belongs to rank {rank}, and {now}"
            raise CoveyError(what, why, "for rank in job.carried(step): with rank: for k, block in data.of(rank): ..")
        return for_script(self._exchange.block(self._of, block))


class KeptHere(NamedTuple):
    """How the Blocks of a set are to be kept in one process."""

    spill: str | None
    """What `job.data` was given; None: all are in memory."""
    resident: int | str | None
    """Most bytes of Blocks in memory, as `job.data` was given them; None: by the memory of the host."""
    memory: MemoryUse
    """The memory of the process."""
    carries: Carries | None = None
    """The ranks that each process of an elastic job carries, by its first; None: this one carries its first rank."""


def store_of(declared: DeclaredBlocks, kept: KeptHere, me: ExchangingProcess) -> BlockStore:
    """Where the Blocks of a set are kept, as `job.data` says. CoveyError when that cannot be."""
    what, memory = f"data {declared.name!r} was not declared", kept.memory
    if kept.spill is None and kept.resident is None:
        ranks = {} if kept.carries is None else kept.carries.carried
        here = [range(rank, declared.blocks, me.world_size) for rank in ranks.get(me.first, (me.first,))]
        needed = declared.bytes_max * sum(map(len, here))
        if memory.on_host.limit_bytes and needed > (room := memory.room_bytes()):
            raise CoveyError(what, _no_room(declared, needed, room, memory.on_host), NO_ROOM_NEXT)
        store = BlockStore()
        memory.keeps(store, needed)
        return store
    if kept.spill not in ("disk", "remote"):
        why = f"spill={kept.spill!r} is no place for Blocks that have no room in memory"
        raise CoveyError(what, why, 'give spill="disk" or spill="remote", or leave out resident=')
    given = kept.resident
    size = UNBOUNDED if given is None else parse_size(given) if isinstance(given, str) else given
    if size < 0:
        raise CoveyError(what, f"resident={size} is no size", "give the bytes of Blocks that memory takes, as '1 GiB'")
    if kept.spill == "disk":
        place: SpillPlace = DiskSpill(declared, spill_folder(os.environ))
    else:
        place = RemoteSpill(declared, f"{me.job}-blocks-{declared.key:08x}-{me.first}-{me.incarnation}")
    goes_by_share = given is None or memory.on_host.limit_bytes
    spilling = SpillingStore(declared.name, place, size, me.people, share=memory.share_bytes if goes_by_share else None)
    memory.keeps(spilling)
    return spilling


def _no_room(declared: DeclaredBlocks, needed: int, room: int, on_host: HostMemory) -> str:
    """Why all Blocks of a set cannot be in memory."""
    each, limit = format_size(declared.bytes_max), format_size(on_host.limit_bytes)
    of_one = f" for this one of {on_host.processes} processes" if on_host.processes > 1 else ""
    return (
        f"its Blocks here, of {each} each, are {format_size(needed)}, and --mem {limit} leaves"
        f" {format_size(room)}{of_one}"
    )


def added(
    exchange: Exchange,
    declared: DeclaredBlocks,
    load: Load,
    world_size: int,
    entered: Callable[[], int | None],
    store: Callable[[], BlockStore] = BlockStore,
) -> DataBlocks:
    """Another set of Blocks; `store` makes where they are kept. CoveyError when there is a set of that name, or there
    are too many sets or Blocks."""
    known, what = exchange.sets.get(declared.name), f"data {declared.name!r} was not declared"
    if known is not None or len(exchange.sets) >= SETS_MAX:
        why = f"it has {known.declared.blocks} Blocks already" if known else f"a job has at most {SETS_MAX} sets"
        raise CoveyError(what, why, "declare each set once, with another name=, and keep what job.data returned")
    blocks = declared.blocks + sum(each.declared.blocks for each in exchange.sets.values())
    if blocks > BLOCKS_MAX:
        why = f"the sets of this job would have {blocks} Blocks, and {BLOCKS_MAX} can be at most"
        raise CoveyError(what, why, "give blocks= a smaller number: larger Blocks do as well")
    of = BlockSet(declared, load, store())
    exchange.add(of)
    return DataBlocks(of, exchange, world_size, entered)

"""How data Blocks come to the processes of a job that carry their ranks, and go from them.

    agent --Carries--> SeekingBlocks --QUESTION--> other processes --ANSWER--> SeekingBlocks
                             | From(process, address)
    one thread a process that gives: Taking --> BlockStore <-- load(k), in the script's thread
                                                    |
    one thread a connection of another process: GivingBlocks

Threads seek and take as soon as the agent says that a rank comes here, before the script gets to it. The script waits
for a Block that is on its way, and calls `load` for one that is not.
"""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

import msgspec

from covey.core.errors import CoveyError
from covey.job.blocks.block_arrays import given_block
from covey.job.blocks.block_store import BlockStore
from covey.job.blocks.block_wire import (
    AboutBlocks,
    BlockArrays,
    BlocksHeld,
    DeclaredBlocks,
    encode_blocks,
    held_decoder,
    wanted_decoder,
)
from covey.job.blocks.giving import GivingBlocks
from covey.job.blocks.seeking import KEEP_S, BlockLoads, From, SeekingBlocks
from covey.job.blocks.taking import AsRank, Taking
from covey.ports.addresses import ip_port
from covey.tensors.numbers.telling import Tell, ToldByRank
from covey.wire.job import AggregatorAt, Carries

SECRETS_MAX = 8
"""Epochs of which the secret is remembered: the two processes may know another newest one."""
LOOK_S = 0.25
"""Most seconds until a wait for a Block looks again."""
JOIN_S = 5.0
"""Most seconds until a thread that takes has ended when its process does."""
SAY_S = 30.0
"""Seconds after which people are told what Block a process waits for."""


class Ranks(Protocol):
    """The way from one process to the ranks of its job; any message may be lost."""

    def tell(self, said: Tell) -> None: ...


class ExchangingProcess(NamedTuple):
    """The process that exchanges Blocks."""

    job: str
    first: int
    """The rank by which it is named."""
    incarnation: int
    world_size: int
    owner: Callable[[], AggregatorAt | None]
    """Returns the owner of the job's first table, whose secret is the job's."""
    people: Callable[[str], None]
    """Called with lines for people."""


class BlockSet:
    """The Blocks of one set that are here, and how they are made."""

    def __init__(self, declared: DeclaredBlocks, load: Callable[[int], object], store: BlockStore) -> None:
        self.declared, self.load, self.store = declared, load, store
        self.loaded = self.moved = 0
        """How many Blocks `load` has made here, and how many came from other processes."""
        self.given: set[int] = set()
        """Blocks that another process has taken while their rank was still carried here."""


class Exchange:
    """The data Blocks of one process. Any thread may call."""

    def __init__(self, me: ExchangingProcess, ranks: Callable[[], Ranks]) -> None:
        """`ranks` returns the way to other ranks, once there is one."""
        self._me, self._ranks = me, ranks
        self._changed = threading.Condition()
        """Guards all below; notified when a Block has come, or will not."""
        self._seeking = SeekingBlocks(me.first, me.incarnation)
        self.sets: dict[str, BlockSet] = {}
        self._left: dict[int, float] = {}
        """Ranks that another process carries by now, and when they went: what is theirs may be asked for."""
        self._goes: set[int] = set()
        """Ranks that another process is to carry, and that may still be carried here."""
        self._giving = GivingBlocks(me.job, self._secret, self._find, self._taken)
        self._secrets: dict[int, bytes] = {}
        self._takes: dict[int, threading.Thread] = {}
        """Threads that take, by process."""
        self._takings: set[Taking] = set()
        """The connections of these threads."""
        self._emptied: set[int] = set()
        """Processes that have nothing any more which is not here."""
        self._seeks: threading.Thread | None = None
        self._awaited: tuple[BlockSet, int] | None = None
        """The Block that the script waits for, which comes before others."""
        self._unlike: CoveyError | None = None
        self._closed = False

    # ---- from the script ----

    def add(self, added: BlockSet) -> None:
        """Another set."""
        with self._changed:
            self.sets[added.declared.name] = added
            self._emptied.clear()
            self._seek_on()

    def block(self, of: BlockSet, block: int) -> BlockArrays:
        """A Block of a rank that is carried here: waits until it has come, or loads it. CoveyError when another process
        has declared other Blocks, or `load` gives something else; errors of `load`."""
        rank, said_s = block % self._me.world_size, time.monotonic() + SAY_S
        with self._changed:
            while True:
                if self._unlike is not None:
                    raise self._unlike
                if block in of.store:
                    break
                now_s = time.monotonic()
                where = self._seeking.where(rank, of.declared.name, block, now_s)
                if isinstance(where, BlockLoads) or self._closed:
                    break
                self._awaited = of, block
                if isinstance(where, From):
                    self._emptied.discard(where.process)
                self._seek_on()
                if now_s > said_s:
                    said_s += SAY_S
                    self._me.people(f"waits for Block {block} of {of.declared.name!r} from another process")
                self._changed.wait(LOOK_S)
            self._awaited = None
        found = of.store.used(block)
        if found is None:
            found = given_block(of.declared, block, of.load(block))
            of.loaded += 1
            of.store.put(block, found)
        return found

    def stepped(self, carried: Collection[int]) -> None:
        """A step has ended, in which these ranks were carried here: forget what nobody has asked for."""
        for each in list(self.sets.values()):
            each.store.stepped()
        now_s = time.monotonic()
        with self._changed:
            self._went(self._goes.difference(carried))
            for rank in [rank for rank, since_s in self._left.items() if now_s > since_s + KEEP_S]:
                del self._left[rank]
                self._forget(rank, lambda each, block: True)

    def close(self) -> None:
        """End all threads and connections. A second call is harmless."""
        with self._changed:
            self._closed = True
            takes = list(self._takes.values())
            for taking in self._takings:
                taking.end()
            self._changed.notify_all()
        self._giving.close()
        end_s = time.monotonic() + JOIN_S
        for thread in takes:
            thread.join(max(0.0, end_s - time.monotonic()))
        for each in self.sets.values():
            each.store.close()

    def abandon(self) -> None:
        """Close this process's ends in a forked child."""
        self._closed = True
        self._giving.abandon()
        for taking in self._takings:
            taking.close()
        for each in self.sets.values():
            each.store.abandon()

    # ---- from what carries ranks ----

    def carries(self, now: Carries) -> None:
        """The agent says what each process carries."""
        with self._changed:
            before = self._seeking.ours
            self._seeking.carries(now, time.monotonic())
            ours = frozenset(self._seeking.ours)
            self._emptied.clear()
            self._goes = self._goes.union(before) - ours
            for rank in ours:
                self._left.pop(rank, None)
            for each in self.sets.values():
                each.given = {block for block in each.given if block % self._me.world_size not in ours}
            self._seek_on()
            self._changed.notify_all()

    def let_go(self, ranks: Iterable[int]) -> None:
        """Other processes push for these ranks by now. Their Blocks stay until these processes have them."""
        with self._changed:
            self._went(rank for rank in ranks if rank not in self._seeking.ours)  # else it comes back at once

    def _went(self, ranks: Iterable[int]) -> None:
        """These ranks are carried here no longer. The caller holds the lock."""
        for rank in ranks:
            self._goes.discard(rank)
            self._left[rank] = time.monotonic()
            self._forget(rank, lambda each, block: block in each.given)

    def _forget(self, rank: int, which: Callable[[BlockSet, int], bool]) -> None:
        for each in self.sets.values():
            for block in range(rank, each.declared.blocks, self._me.world_size):
                if block in each.store and which(each, block):
                    each.given.discard(block)
                    each.store.drop(block)

    # ---- from other ranks ----

    def told(self, told: ToldByRank) -> bool:
        """Whether this is a message about Blocks, which is handled. A malformed one is ignored."""
        if told.about not in (AboutBlocks.QUESTION, AboutBlocks.ANSWER):
            return False
        with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            if told.about == AboutBlocks.ANSWER:
                self._answered(told.rank, held_decoder.decode(told.data))
            else:
                wanted = wanted_decoder.decode(told.data)
                answer = encode_blocks(self._held(wanted.ask, wanted.ranks))
                self._ranks().tell(Tell(told.rank, AboutBlocks.ANSWER, told.step, answer))
        return True

    def _held(self, ask: int, ranks: tuple[int, ...]) -> BlocksHeld:
        """What is here of these ranks."""
        size = self._me.world_size
        known = [rank for rank in set(ranks) if 0 <= rank < size]
        with self._changed:
            sets = tuple(each.declared for each in self.sets.values())
            held = {
                name: tuple(
                    block for rank in known for block in range(rank, each.declared.blocks, size) if block in each.store
                )
                for name, each in self.sets.items()
            }
        if not any(held.values()):
            return BlocksHeld(ask, "", sets)
        return BlocksHeld(ask, self._address(), sets, held)

    def _address(self) -> str:
        """Where this process gives Blocks: on the address from which it reaches the owner of the job's tensors."""
        owner = self._me.owner()
        if owner is None:
            return ""
        self._remember(owner)
        with contextlib.suppress(OSError):
            ip, port = ip_port(owner.address)
            with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((ip, port))  # sends nothing
                return self._giving.address(probe.getsockname()[0])
        return ""

    def _remember(self, owner: AggregatorAt) -> None:
        with self._changed:
            self._secrets[owner.epoch] = owner.secret
            for old in sorted(self._secrets)[:-SECRETS_MAX]:
                del self._secrets[old]

    def _secret(self, epoch: int) -> bytes:
        owner = self._me.owner()
        if owner is not None:
            self._remember(owner)
        with self._changed:
            return self._secrets.get(epoch, b"")

    def _answered(self, rank: int, answer: BlocksHeld) -> None:
        with self._changed:
            if not self._seeking.answered(rank, answer):
                return
            self._emptied.discard(rank)
            self._unlike = self._unlike or self._why_unlike(rank, answer)
            self._seek_on()
            self._changed.notify_all()

    def _why_unlike(self, rank: int, answer: BlocksHeld) -> CoveyError | None:
        """Why the Blocks of another process are not those of this one."""
        for theirs in answer.sets:
            mine = self.sets.get(theirs.name)
            if mine is None or mine.declared == theirs:
                continue
            found = [
                f"{word} {here} here and {there} there"
                for word, here, there in (
                    ("blocks", mine.declared.blocks, theirs.blocks),
                    ("bytes", mine.declared.bytes_max, theirs.bytes_max),
                )
                if here != there
            ]
            why = f"process {rank} has declared it otherwise: {' and '.join(found) or 'load is other code'}"
            next = "run the same script everywhere; the data of a job that runs does not change: submit another job"
            return CoveyError(f"data {theirs.name!r} is not that of this job", why, next)
        return None

    # ---- to other processes ----

    def _find(self, key: int, block: int) -> BlockArrays | None:
        with self._changed:
            found = next((each for each in self.sets.values() if each.declared.key == key), None)
        return None if found is None else found.store.get(block)

    def _taken(self, key: int, block: int) -> None:
        """Another process has this Block. It goes, unless its rank is still carried here."""
        with self._changed:
            for each in self.sets.values():
                if each.declared.key == key and block in each.store:
                    if block % self._me.world_size in self._left:
                        each.store.drop(block)
                    else:
                        each.given.add(block)

    # ---- threads ----

    def _seek_on(self) -> None:
        """Let a thread send the questions that are due, and start those that take. The caller holds the lock."""
        if self._closed or not self.sets or (self._seeking.left_s(time.monotonic()) is None and not self._sources()):
            return
        if self._seeks is None or not self._seeks.is_alive():
            self._seeks = threading.Thread(target=self._seek, name="covey-seeks", daemon=True)
            self._seeks.start()

    def _sources(self) -> dict[int, str]:
        """The processes from which Blocks are to be taken and are not being taken, with their addresses."""
        found = self._seeking.sources().items()
        return {each: address for each, address in found if each not in self._takes and each not in self._emptied}

    def _wanted(self, process: int) -> Iterable[tuple[BlockSet, int]]:
        """The Blocks that this process gives and that are not here, in the order in which they are used."""
        for rank in self._seeking.ours:
            for each in self.sets.values():
                for block in range(rank, each.declared.blocks, self._me.world_size):
                    if self._gives(process, each, block):
                        yield each, block

    def _gives(self, process: int, of: BlockSet, block: int) -> bool:
        """Whether this Block is to come from that process."""
        if block in of.store:
            return False
        where = self._seeking.where(block % self._me.world_size, of.declared.name, block, time.monotonic())
        return isinstance(where, From) and where.process == process

    def _seek(self) -> None:
        while True:
            with self._changed:
                now_s = time.monotonic()
                for process, address in self._sources().items():
                    self._takes[process] = threading.Thread(
                        target=self._take, args=(process, address), name="covey-takes", daemon=True
                    )
                    self._takes[process].start()
                left_s = self._seeking.left_s(now_s)
                if self._closed or left_s is None:
                    self._seeks = None
                    self._changed.notify_all()
                    return
                questions = self._seeking.questions(now_s)
            for process, wanted in questions:
                self._ranks().tell(Tell(process, AboutBlocks.QUESTION, 0, encode_blocks(wanted)))
            with self._changed:
                left_s = self._seeking.left_s(time.monotonic())
                if left_s:
                    self._changed.wait(left_s)

    def _take(self, process: int, address: str) -> None:
        """Take all Blocks that this process gives."""
        taking: Taking | None = None
        wanted = deque[tuple[BlockSet, int]]()
        try:
            owner = self._me.owner()
            if owner is None:
                raise ConnectionError("nobody sums for this job now")
            taking = Taking(address, AsRank(self._me.job, self._me.first, owner.epoch, owner.secret))
            with self._changed:
                self._takings.add(taking)
            while (next := self._next_from(process, wanted)) is not None:
                of, block = next
                found = taking.take(of.declared, block)
                if found is None:
                    raise ConnectionError("it has forgotten a Block")
                if self._came(of, block, found):
                    taking.done(of.declared, block)
        except OSError as error:
            with self._changed:
                self._seeking.failed(process)
                closed = self._closed
            if not closed:
                self._me.people(f"loads Blocks that process {process} has: {error!s}")
        finally:
            if taking is not None:
                taking.close()
            with self._changed:
                if taking is not None:
                    self._takings.discard(taking)
                self._takes.pop(process, None)
                self._seek_on()
                self._changed.notify_all()

    def _came(self, of: BlockSet, block: int, found: BlockArrays) -> bool:
        """A Block is here; whether it has a place. Writing it may take long, so nobody waits for that."""
        rank = block % self._me.world_size
        with self._changed:
            if self._closed or rank not in self._seeking.ours:
                return False
            if block in of.store:
                return True
            of.moved += 1  # whoever finds it in the store finds it counted
        of.store.put(block, found)
        with self._changed:
            stays = rank in self._seeking.ours or rank in self._goes or rank in self._left
            if not stays:
                of.moved -= 1
                of.store.drop(block)
            self._changed.notify_all()
        return stays

    def _next_from(self, process: int, wanted: deque[tuple[BlockSet, int]]) -> tuple[BlockSet, int] | None:
        """The next Block to take from this process. `wanted` is what it was to give, and is filled again when empty:
        who looked at all Blocks for each one would hold the lock for long."""
        with self._changed:
            if self._closed:
                return None
            if self._awaited is not None and self._gives(process, *self._awaited):
                return self._awaited
            while True:
                if not wanted:
                    wanted.extend(self._wanted(process))
                if not wanted:
                    self._emptied.add(process)
                    return None
                next = wanted.popleft()
                if self._gives(process, *next):
                    return next

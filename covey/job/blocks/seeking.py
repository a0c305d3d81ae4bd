"""The machine that decides where the data Blocks come from that a process needs: from another process, or from `load`.

A Block belongs to a rank (Block k to rank k mod V), so its owner is whichever process carries that rank: there is no
second table of owners. What changes hands is the *content*. It is asked of the process that carried the rank before;
a process that begins asks all, since nobody has told it who that was.

    configuration says: this process carries the rank from now on
      the process before is one of those that are left      ask it
      it has ended                                          load(k)
      this process begins, as the first of its job          load(k)
      this process begins later, or anew                    ask all others
    asked: answers with an address                          take it from there
      nobody has it, nobody answers in ASK_S, the connection ends, is slow or brings something else     load(k)

It neither waits nor sends, and time is given to it. Threads drive it in `covey.job.blocks.exchange`.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from covey.job.blocks.block_wire import BlocksHeld, BlocksWanted
from covey.wire.job import Carries

ASK_S = 2.0
"""Seconds after which a process that does not answer counts as gone."""
AGAIN_S = (0.02, 0.25)
"""Shortest and longest pause between two questions to a process that has not answered, in seconds."""
KEEP_S = 60.0
"""Seconds for which Blocks of a rank are kept that another process carries, unless it has taken them before."""


class From(NamedTuple):
    """A process that gives Blocks."""

    process: int
    address: str


class BlockWaits:
    """It is not known yet where the Block comes from."""


class BlockLoads:
    """`load(k)` makes the Block."""


WAITS, LOADS = BlockWaits(), BlockLoads()
Where = From | BlockWaits | BlockLoads


class _Held(NamedTuple):
    """What a process has answered."""

    address: str
    blocks: Mapping[str, frozenset[int]]
    """Numbers of the Blocks that it has, by set."""


class _Sought:
    """The search for the Blocks of one rank."""

    def __init__(self, asked: Collection[int], now_s: float) -> None:
        self.silent = set(asked)
        """Processes that may have them and have not answered."""
        self.until_s = now_s + ASK_S
        self.held: dict[int, _Held] = {}
        """Answers of processes that have some, by process."""


class SeekingBlocks:
    """What one process seeks. Only one thread may use it while one of its methods runs."""

    def __init__(self, first: int, incarnation: int) -> None:
        """`first`: the rank by which the process is named; `incarnation`: its own. 0: it began with the job."""
        self.first, self._is_later = first, incarnation > 0
        self.newest: Carries | None = None
        self._sought: dict[int, _Sought] = {}
        """By rank; ranks that are not here are loaded."""
        self._ask = 0
        self._next_s, self._pause_s = 0.0, AGAIN_S[0]

    @property
    def ours(self) -> tuple[int, ...]:
        """The ranks that this process is to carry by what the agent said last."""
        return () if self.newest is None else self.newest.carried.get(self.first, ())

    def carries(self, now: Carries, now_s: float) -> None:
        """The agent says what each process carries. An older configuration than the newest is ignored."""
        before, was = self.newest, self.ours
        if before is not None and now.config <= before.config:
            return
        self.newest = now
        self._ask += 1
        self._next_s, self._pause_s = now_s, AGAIN_S[0]
        for rank in list(self._sought):
            if rank not in self.ours:
                del self._sought[rank]
        for sought in self._sought.values():
            self._forget_gone(sought, now.carried)
        for rank in self.ours:
            if rank not in was and (asked := self._askable(rank, before, now.carried)):
                self._sought[rank] = _Sought(asked, now_s)

    def _askable(self, rank: int, before: Carries | None, now: Mapping[int, Collection[int]]) -> set[int]:
        """The processes that may have the Blocks of a rank that comes here."""
        if before is not None:
            return {process for process, ranks in before.carried.items() if rank in ranks and process in now} - {
                self.first
            }
        return set(now) - {self.first} if self._is_later else set()

    @staticmethod
    def _forget_gone(sought: _Sought, now: Mapping[int, Collection[int]]) -> None:
        sought.silent &= set(now)
        for process in [each for each in sought.held if each not in now]:
            del sought.held[process]

    # ---- questions ----

    def questions(self, now_s: float) -> list[tuple[int, BlocksWanted]]:
        """The questions that are due, each with the process that it is for."""
        if now_s < self._next_s:
            return []
        found: dict[int, list[int]] = {}
        for rank, sought in self._sought.items():
            for process in sought.silent if now_s < sought.until_s else ():
                found.setdefault(process, []).append(rank)
        self._next_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, AGAIN_S[1])
        return [(process, BlocksWanted(self._ask, tuple(ranks))) for process, ranks in sorted(found.items())]

    def answered(self, process: int, answer: BlocksHeld) -> bool:
        """Take an answer in; whether it was asked for."""
        if answer.ask != self._ask:
            return False
        waited = [sought for sought in self._sought.values() if process in sought.silent]
        held = _Held(answer.address, {name: frozenset(blocks) for name, blocks in answer.held.items()})
        for sought in waited:
            sought.silent.remove(process)
            if held.address and held.blocks:
                sought.held[process] = held
        return bool(waited)

    def failed(self, process: int) -> None:
        """What this process gave cannot be used, or it is slow or gone: it is asked for nothing more."""
        for sought in self._sought.values():
            sought.held.pop(process, None)
            sought.silent.discard(process)

    def sources(self) -> dict[int, str]:
        """The processes that have said that they have Blocks which are sought, with their addresses."""
        found = (each.held.items() for each in self._sought.values())
        return {process: held.address for every in found for process, held in every}

    def where(self, rank: int, name: str, block: int, now_s: float) -> Where:
        """Where a Block of this rank comes from that is not here."""
        sought = self._sought.get(rank)
        if sought is None:
            return LOADS
        for process, held in sought.held.items():
            if block in held.blocks.get(name, ()):
                return From(process, held.address)
        return WAITS if sought.silent and now_s < sought.until_s else LOADS

    def left_s(self, now_s: float) -> float | None:
        """Seconds until something is due; None: nothing is sought."""
        due = [each.until_s for each in self._sought.values() if each.silent and each.until_s > now_s]
        return max(0.0, min(self._next_s, *due) - now_s) if due else None

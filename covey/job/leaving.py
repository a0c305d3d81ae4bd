"""A rank that waits for one that has left, and what it is told.

A round needs all ranks. One that is through pushes nothing more: its script called `job.tensors.leave()` (the end of
`with covey.join()`), or its process ended with 0. Whoever waits for a round that it has not pushed would wait for ever:

    in leave()       it says so to whoever adds, on each connection (`TensorOp.LEAVES`), and in memory that ranks share
    ended with 0     its host says so in the log; the agents tell the other ranks, and the processes that add

Who adds knows whose part of a round is missing, so nobody is told of a rank that has pushed, and whose result is still
on its way: ranks end a moment apart, and most have all results then.
"""

from collections.abc import Iterable
from typing import Protocol

from covey.core.ids import HostId, JobId
from covey.tensors.numbers.tensor_wire import Declared
from covey.wire.job import GoneRank

LEAVE = "covey/leave"
"""The last tensor of a script that ended well: its round is over when all have."""
WORDS_BYTES_MAX = 700
"""Of who has left, in UTF-8: it goes into a FAULT with the name of the job."""


def who(rank: int, host: HostId | str, step: int | None, ended: bool) -> str:
    """The rank that has left, for people. `step`: its newest one; None: it never said one."""
    where = f" on {host}" if host else ""
    after = "and never told of a step" if step is None else f"after its step {step}"
    what = "ended with 0" if ended else "is done, in job.tensors.leave(),"
    return f"rank {rank}{where} {what} {after}"


def in_vain(who_left: str, job: JobId) -> str:
    """What is wrong, for people, and what to do."""
    cause = f"{who_left}, so it pushes nothing more, and every round needs all ranks"
    return f"{cause}; next: have every rank make the same number of steps; agentctl why {job} says when it left"


class SharedRound(Protocol):
    """A round of a tensor that goes by memory that ranks of one host share."""

    @property
    def declared(self) -> Declared: ...
    def missing(self) -> list[int]: ...
    def late(self) -> list[int]: ...


class SaysWhoLeft(Protocol):
    """That memory."""

    def has_left(self, rank: int) -> tuple[bool, int | None]: ...
    def leave(self, step: int | None) -> None: ...


class HasMemory(Protocol):
    """The rounds that go by it."""

    @property
    def memory(self) -> SaysWhoLeft: ...


class SaysFar(Protocol):
    """Rounds that go to aggregators."""

    def leave(self, words: bytes) -> None: ...


class GoneRanks:
    """Those that have left, as one rank knows it."""

    def __init__(self, host: str) -> None:
        """`host`: this rank's; empty: it does not know."""
        self.host = host
        self.ended: dict[int, GoneRank] = {}
        """Processes that ended with 0, as the agent says."""

    def leave(self, rank: int, step: int | None, far: SaysFar, shared: HasMemory | None) -> None:
        """This rank does: whoever waits for it is told. `step`: its newest one."""
        far.leave(who(rank, self.host, step, False).encode()[:WORDS_BYTES_MAX])
        if shared is not None:
            shared.memory.leave(step)

    def of(self, missing: Iterable[int], here: bool = False) -> str:
        """Which of these has left, in words; empty: none, for all that is known. `here`: of those of this host."""
        for rank in missing:
            gone = self.ended.get(rank)
            if gone is not None and (not here or gone.host == self.host):
                return who(rank, gone.host, gone.step, True)
        return ""

    def words(self, job: JobId) -> dict[int, str]:
        """Of each that has ended, what is wrong, and what to do."""
        return {rank: in_vain(self.of([rank]), job) for rank in self.ended}

    def awaited(self, round: SharedRound, memory: SaysWhoLeft) -> str:
        """Which rank has left for which a round waits, in memory that shows who has pushed, and who is in `leave()`:
        that one still adds what it has pushed."""
        missing = round.missing()
        if left := self.of((*missing, *round.late())):
            return left
        for rank in missing if round.declared.name != LEAVE else ():
            has_left, step = memory.has_left(rank)
            if has_left:
                return who(rank, self.host, step, False)
        return ""

"""What a rank is told that waits for a rank that has left.

A round needs all ranks. A rank that has left pushes nothing more: its script called `job.tensors.leave()` (the end of
`with covey.join()`), or its process ended with 0. Others would wait for ever for a round that it has not pushed, so
they are told:

    in leave()       it says so to all that add, on each connection (`TensorOp.LEAVES`), and in memory that ranks share
    ended with 0     its host says so in the log; the agents tell the other ranks, and the processes that add

The process that adds knows whose part of a round is missing, so a rank that has pushed is not named while its result is
still on its way: ranks end a moment apart, and most have all results by then.
"""

from collections.abc import Iterable
from typing import Protocol

from covey.core.ids import HostId, JobId
from covey.tensors.numbers.tensor_wire import Declared
from covey.wire.job import GoneRank

LEAVE = "covey/leave"
"""Name of the last tensor of a script that ended well: its round is over when all ranks have pushed it."""
WORDS_BYTES_MAX = 700
"""Most bytes of UTF-8 of the text on who has left: it goes into a FAULT with the name of the job."""


def who(rank: int, host: HostId | str, step: int | None, ended: bool) -> str:
    """A sentence for people about the rank that has left. `step`: its newest step; None: it never reported one."""
    where = f" on {host}" if host else ""
    after = "and never told of a step" if step is None else f"after its step {step}"
    what = "ended with 0" if ended else "is done, in job.tensors.leave(),"
    return f"rank {rank}{where} {what} {after}"


def in_vain(who_left: str, job: JobId) -> str:
    """Text for people: one line what is wrong, one why, and one what to do."""
    next = f"have every rank make the same number of steps; agentctl why {job} says when it left"
    return f"{who_left}\nit pushes nothing more, and every round needs all ranks\nnext: {next}"


class SharedRound(Protocol):
    """A round of a tensor in memory that ranks of one host share."""

    @property
    def declared(self) -> Declared: ...
    def missing(self) -> list[int]: ...
    def late(self) -> list[int]: ...


class SaysWhoLeft(Protocol):
    """The part of that shared memory that says which ranks have left."""

    def has_left(self, rank: int) -> tuple[bool, int | None]: ...
    def leave(self, step: int | None) -> None: ...


class HasMemory(Protocol):
    """The rounds in that shared memory."""

    @property
    def memory(self) -> SaysWhoLeft: ...


class SaysFar(Protocol):
    """Rounds that go to aggregators."""

    def leave(self, words: bytes) -> None: ...


class GoneRanks:
    """The ranks that have left, as one rank knows them."""

    def __init__(self, host: str) -> None:
        """`host`: the host of this rank; empty: not known."""
        self.host = host
        self.ended: dict[int, GoneRank] = {}
        """Ranks whose processes ended with 0, as the agent says."""

    def leave(self, rank: int, step: int | None, far: SaysFar, shared: HasMemory | None) -> None:
        """Tell everyone who waits for this rank that it leaves. `step`: its newest step."""
        far.leave(who(rank, self.host, step, False).encode()[:WORDS_BYTES_MAX])
        if shared is not None:
            shared.memory.leave(step)

    def of(self, missing: Iterable[int], here: bool = False) -> str:
        """A sentence about the first of these ranks that has ended; empty when none is known to have. `here`: only
        ranks of this host count."""
        for rank in missing:
            gone = self.ended.get(rank)
            if gone is not None and (not here or gone.host == self.host):
                return who(rank, gone.host, gone.step, True)
        return ""

    def words(self, job: JobId) -> dict[int, str]:
        """For each rank that has ended: a line that says so."""
        return {rank: f"{self.of([rank])}; agentctl why {job} says when" for rank in self.ended}

    def awaited(self, round: SharedRound, memory: SaysWhoLeft) -> str:
        """A sentence about the rank that has left and that a round waits for, in memory that shows who has pushed, and
        who is in `leave()` (such a rank still adds what it has pushed); empty: none."""
        missing = round.missing()
        if left := self.of((*missing, *round.late())):
            return left
        for rank in missing if round.declared.name != LEAVE else ():
            has_left, step = memory.has_left(rank)
            if has_left:
                return who(rank, self.host, step, False)
        return ""

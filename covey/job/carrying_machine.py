"""The machine that decides which ranks a process of an elastic job carries (`covey.job.carrying` explains them).

It neither waits nor sends. Threads drive it in `covey.job.carrying`, the simulator's processes in
`covey.simulated.carried_streams`: both keep one member for each rank that they carry, with its connections.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from covey.core.errors import CoveyError
from covey.healing.machine import json_of, parsed
from covey.wire.job import Carries

INCARNATION_BITS = 16
"""The low bits of an incarnation count the processes of a rank that were lost on one host; above them is the number of
the configuration (`agent.jobs.rank_env`)."""
Own = Callable[[], object] | None
"""Returns what only the rank has that was entered last; None: no rank has anything of its own."""


class WaitingRank(Protocol):
    """A rank whose process waits for others, as `covey.healing.healing` has it."""

    def waits(self) -> None: ...
    def is_free(self, within_s: float) -> bool: ...


class CarryingMachine:
    """What one process carries. `told` may be called from any thread, the rest from the script's."""

    def __init__(self, first: int, incarnation: int, own: Own) -> None:
        """`first`: the rank by which the process is named; `incarnation`: its own."""
        self.first, self._incarnation, self._own = first, incarnation, own
        self.newest: Carries | None = None
        """What the agent said last; None: nothing yet."""
        self.config = -1
        """The configuration that is in force here."""
        self.owns: dict[int, Any] = {}
        """What is each rank's own, as `own` returned it when the rank was left."""
        self.entered: int | None = None
        """The rank that the script computes as."""

    # ---- which ranks ----

    def told(self, carries: Carries) -> Mapping[int, int] | None:
        """The agent says what this process carries; None: it said something newer before, which holds. Returns the
        ranks that came to other processes since, or in some configuration of which this process has not heard, and the
        least incarnation in which each is carried there."""
        before = -1 if self.newest is None else self.newest.config
        if carries.config <= before:
            return None
        self.newest = carries
        return {rank: came << INCARNATION_BITS for rank, came in carries.came.items() if came > before}

    def came(self, rank: int) -> int:
        """The incarnation that stands for the configuration in which this rank came here; 0: it started here."""
        return 0 if self.newest is None else self.newest.came.get(rank, 0) << INCARNATION_BITS

    @property
    def others_now(self) -> bool:
        """Whether a newer configuration is known than the one in force: then nothing is waited for any longer."""
        return self.newest is not None and self.newest.config > self.config

    @property
    def ours(self) -> Sequence[int]:
        """The ranks that this process is to carry by what the agent said last."""
        return () if self.newest is None else self.newest.carried.get(self.first, ())

    def to_adopt(self, here: Collection[int]) -> list[int]:
        """Ranks to be adopted beside those that are carried `here`: none while the newest configuration is in force,
        and it is in force once this returns. Ranks that others are to carry stay until `lets_go`."""
        if not self.others_now or self.newest is None:
            return []
        self.config = self.newest.config
        return [rank for rank in self.ours if rank not in here]

    def to_join(self, here: Collection[int], joined: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """What becomes of a process that takes its state over, and carries `here` only its first rank: the ranks as
        which it no longer joins, and those as which it does from now on. `joined`: by rank as which it has joined, the
        configuration in which it did. A rank that has come here in a later one was another process's in between, and
        owners hear that one."""
        newest = self.newest
        if newest is None:
            return [], []
        ends = [rank for rank, config in joined.items() if rank not in self.ours or config < newest.came.get(rank, 0)]
        return ends, [rank for rank in self.ours if rank not in here and (rank not in joined or rank in ends)]

    def lets_go(self, gone: Mapping[int, int]) -> bool:
        """Other processes push for these ranks by now, so they are carried here no longer. `gone`: the configuration in
        which each came here. Whether one has come back meanwhile, and is to be adopted anew."""
        newest = self.newest
        again = newest is not None and any(
            rank in self.ours and config < newest.config for rank, config in gone.items()
        )
        if again:
            self.config = -1
        return again

    def incarnation(self, config: int) -> int:
        """The incarnation in which this process carries a rank that comes to it in this configuration."""
        return config << INCARNATION_BITS | self._incarnation & ((1 << INCARNATION_BITS) - 1)

    # ---- what is each rank's own ----

    def enter(self, rank: int) -> Any:
        """The script computes as this rank from now on; returns what is its own, None: nothing yet. CoveyError when it
        is in another one."""
        if self.entered is not None:
            what, why = f"rank {rank} was not entered", f"`with rank:` of rank {self.entered} is not over"
            raise CoveyError(what, why, "leave each rank before the next one is entered")
        self.entered = rank
        return self.owns.get(rank)

    def exit(self, rank: int, well: bool) -> None:
        """The script is done with this rank in this step; `well`: without an exception."""
        self.entered = None
        if well and self._own is not None:
            self.owns[rank] = parsed(json_of(self._own))

    def own_is(self, rank: int, own: bytes) -> None:
        """The rank comes here with this own state, as JSON; empty: it has none."""
        self.owns.pop(rank, None)
        if own:
            self.owns[rank] = parsed(own)

    def own_of(self, rank: int) -> Any:
        """What is this rank's own now; None: nothing."""
        return self._own() if self._own is not None and self.entered == rank else self.owns.get(rank)


def still_needed(waits: Sequence[WaitingRank], within_s: float = 0.0) -> bool:
    """Whether a successor needs what one of these ranks holds, each looked at for at most `within_s` seconds: then all
    of them wait on, since a successor asks every rank. Otherwise none waits any more."""
    busy = [each for each in waits if not each.is_free(within_s)]
    for each in waits if busy else ():
        if each not in busy:
            each.waits()
    return bool(busy)

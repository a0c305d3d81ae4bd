"""Many gangs and their upgrades by seed: one home (`plugins.sharing.machine.upgrade.Upgrades`) and the hosts of the
ranks, which answer late, twice, out of order, not at all, or break their word.

Hosts are stand-ins that keep to `plugins.sharing.messages`: they ignore what is older than what they know, and are
guaranteed only under an epoch in which they said yes. What must hold (AntMan 3.3, Job upgrade): no rank is guaranteed
before all hosts said yes to that very epoch; and in the end all ranks of a gang are of one kind, the kind that the home
says they are.
"""

import heapq
import itertools
import random
from collections.abc import Callable

from covey.core import HostId, JobId, Send
from plugins.sharing.machine.upgrade import (
    ASK_S,
    UNDO_S,
    UpgradeAnswered,
    UpgradeDone,
    UpgradeEvent,
    Upgrades,
    UpgradeTick,
    UpgradeWanted,
)
from plugins.sharing.messages import AskUpgrade, CanUpgrade, Kind, Retag

JOB = JobId("j1")
WISHES = 6
SLOW_S = 1.5 * ASK_S
"""Longest delay of a message: an answer may come after its question was given up."""


class Rank:
    """What one host knows of its part of the gang."""

    def __init__(self) -> None:
        self.epoch = 0
        self.kind: Kind = "opportunistic"
        self.promised = False
        self.silent = False


class Gang:
    """One gang on some hosts, and its home."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"{seed}/upgrades")
        self.now_s = 0.0
        self.steps = self.faults = 0
        self.home = Upgrades()
        self.ranks = {HostId(f"h{number}"): Rank() for number in range(1, self.rng.randint(2, 5) + 1)}
        self.yes: dict[int, set[HostId]] = {}
        """Epoch -> hosts that said yes in it."""
        self.done: list[UpgradeDone] = []
        self.refuses = self.rng.choice((0.0, 0.1, 0.4))
        self.breaks = self.rng.choice((0.0, 0.2))
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    @property
    def ended(self) -> object:
        return self.now_s, self.done

    def _in(self, after_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + after_s, next(self._number), what))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._queue and self._queue[0][0] <= end_s:
            self.now_s, _, what = heapq.heappop(self._queue)
            self.steps += 1
            what()
        self.now_s = end_s

    def tell(self, event: UpgradeEvent) -> None:
        for action in self.home.handle(event, self.now_s):
            if isinstance(action, Send):
                self._carry(action)
            elif isinstance(action, UpgradeDone):
                self.done.append(action)
        self.home.check()

    def _delay_s(self) -> float:
        return self.rng.uniform(0.0, SLOW_S) if self.rng.random() < 0.2 else self.rng.uniform(0.001, 0.1)

    def _carry(self, send: Send) -> None:
        message = send.message
        assert isinstance(message, AskUpgrade | Retag)
        self._in(self._delay_s(), lambda: self._heard(send.to, message))

    def _heard(self, host: HostId, message: AskUpgrade | Retag) -> None:
        rank = self.ranks[host]
        if message.epoch < rank.epoch:
            return
        rank.promised = rank.promised and message.epoch == rank.epoch
        rank.epoch = message.epoch
        if isinstance(message, AskUpgrade):
            self._asked(host, rank)
        elif message.kind == "opportunistic":
            rank.kind, rank.promised = "opportunistic", False
        elif rank.promised and self.rng.random() >= self.breaks:
            early = set(self.ranks) - self.yes.get(rank.epoch, set())
            assert not early, f"{host} is guaranteed in epoch {rank.epoch} before {', '.join(sorted(early))} said yes"
            rank.kind = "guaranteed"
        else:
            self._answer(host, rank, "the device is gone")

    def _asked(self, host: HostId, rank: Rank) -> None:
        if rank.silent:
            return
        rank.promised = self.rng.random() >= self.refuses
        if rank.promised:
            self.yes.setdefault(rank.epoch, set()).add(host)
        self._answer(host, rank, "" if rank.promised else "no room")

    def _answer(self, host: HostId, rank: Rank, refused: str) -> None:
        said = UpgradeAnswered(host, CanUpgrade(JOB, rank.epoch, refused))
        for _ in range(2 if self.rng.random() < 0.1 else 1):
            self._in(self._delay_s(), lambda: self.tell(said))

    def second(self) -> None:
        self.tell(UpgradeTick())
        self._in(1.0, self.second)

    def wish(self, epoch: int) -> None:
        for rank in self.ranks.values():
            rank.silent = self.rng.random() < 0.1
        kind: Kind = "guaranteed" if self.rng.random() < 0.8 else "opportunistic"
        self.tell(UpgradeWanted(JOB, epoch, kind, dict.fromkeys(self.ranks, ("GPU-1",))))


def play(seed: int) -> Gang:
    """AssertionError when a gang is upgraded in part."""
    gang = Gang(seed)
    gang.second()
    for epoch in range(1, WISHES + 1):
        gang.wish(epoch)
        gang.run(gang.rng.choice((0.05, ASK_S / 2, ASK_S + 2.0, 2 * ASK_S)))
    gang.run(ASK_S + UNDO_S + 2 * SLOW_S + 2.0)
    kinds = {host: rank.kind for host, rank in gang.ranks.items()}
    assert len(set(kinds.values())) == 1, f"seed {seed}: a gang is of two kinds: {kinds}"
    last = gang.done[-1]
    assert last.epoch == WISHES and not gang.home.asked, f"seed {seed}: nobody was told what became of it"
    assert not last.refused or "guaranteed" not in kinds.values(), f"seed {seed}: refused, and {kinds}"
    return gang

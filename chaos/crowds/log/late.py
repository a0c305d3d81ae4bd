"""Three voters whose processors or disks are late: the leader stays while no host is lost, and changes when it must.

While a host is stopped, what arrives there waits, and its timers fire late. A seed's story: some minutes in which
every host is late again and again by less than a second (the leader may not change); a quiet time; a disk of the
leader that hangs (it hands over, and is no candidate again before its disk is well); and at last a leader that is
lost.
"""

import heapq
import itertools
import random
from collections import defaultdict

from agent.raft.machine import Raft, Role
from agent.raft.machine.types import (
    Event,
    HardState,
    Persist,
    Persisted,
    Proposal,
    Proposed,
    RaftStarted,
    Saved,
    SaveSnapshot,
    SendRaft,
    Tick,
)
from agent.raft.policy import Timing
from covey.core.events import Heard
from covey.core.ids import HostId

HOP_S = 0.002
WRITE_S = 0.005
AWAKE_S = 0.02
"""Seconds between two stops of a host."""
STOPS = 120
LATE_S = (0.1, 0.95)
"""Least and most seconds that a host is late."""
QUIET_S = 70.0
"""Seconds after which lateness is forgotten (`agent.raft.machine.patience`)."""
HANGS_S, HANDED_OVER_S = 9.0, 4.0
"""Seconds that a leader's disk hangs, and seconds within which another host leads."""
LOST_S = 2.0
"""Seconds within which a lost leader has a successor."""


class Late:
    """Three voters; `stop` makes one of them late, `hang` its disk."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.steps = self.faults = 0
        self.names = tuple(HostId(name) for name in "abc")
        self.rafts = {
            name: Raft(
                name, self.names, Saved(HardState(), None, 0, 0, ()), Timing(), random.Random(f"{seed}{name}"), 0.0
            )
            for name in self.names
        }
        self.leaders: list[tuple[int, HostId]] = []
        self._queue: list[tuple[float, int, HostId, Event]] = []
        self._number = itertools.count()
        self._busy_until_s: dict[HostId, float] = defaultdict(float)
        self._disk_until_s: dict[HostId, float] = defaultdict(float)
        for name in self.names:
            self._at(0.0, name, RaftStarted())

    def _at(self, at_s: float, name: HostId, event: Event) -> None:
        heapq.heappush(self._queue, (at_s, next(self._number), name, event))

    def stop(self, name: HostId, seconds: float) -> None:
        """Stop a host, unless it was stopped just before: then it would be late by the sum of both."""
        if self.now_s > self._busy_until_s[name] + AWAKE_S:
            self._busy_until_s[name] = self.now_s + seconds

    def hang(self, name: HostId, seconds: float) -> None:
        """Hang the host's disk: its next writes are done after `seconds`."""
        self._disk_until_s[name] = self.now_s + seconds

    def propose(self, name: HostId) -> None:
        self._at(self.now_s, name, Proposed([Proposal(self.rng.randbytes(16), self.rafts[name].commit, b"x")]))

    def run(self, seconds: float, gone: HostId | None = None) -> None:
        end_s = self.now_s + seconds
        while self._queue and self._queue[0][0] <= end_s:
            at_s, _, name, event = heapq.heappop(self._queue)
            self.now_s = max(self.now_s, at_s)
            if name == gone:
                continue
            if self._busy_until_s[name] > self.now_s:
                self._at(self._busy_until_s[name], name, event)
            else:
                self._handle(name, event)
        self.now_s = end_s

    def _handle(self, name: HostId, event: Event) -> None:
        raft = self.rafts[name]
        if isinstance(event, Tick) and raft.wake_s > self.now_s:
            return
        self.steps += 1
        for action in raft.handle(event, self.now_s):
            if isinstance(action, SendRaft) and action.to in self.rafts:
                self._at(self.now_s + HOP_S, action.to, Heard(name, action.message))
            elif isinstance(action, Persist | SaveSnapshot):
                self._at(max(self.now_s, self._disk_until_s[name]) + WRITE_S, name, Persisted(action.number))
        self._at(max(raft.wake_s, self.now_s + 0.001), name, Tick())
        if raft.role is Role.LEADER and (raft.term, name) not in self.leaders:
            self.leaders.append((raft.term, name))

    @property
    def ended(self) -> object:
        return self.leaders

    @property
    def leader(self) -> HostId:
        """The leader of the newest term."""
        return self.leaders[-1][1]


def play(seed: int) -> Late:
    """Play one seed. Raises AssertionError when a host leads that should not."""
    late = Late(seed)
    late.run(5.0)
    assert len(late.leaders) == 1, f"seed {seed}: {late.leaders} led in the first five seconds"
    for _ in range(STOPS):
        late.stop(late.rng.choice(late.names), late.rng.uniform(*LATE_S))
        late.run(late.rng.uniform(0.0, 0.8))
    assert len(late.leaders) == 1, f"seed {seed}: no host was late by a second, and {late.leaders} led"
    late.run(QUIET_S)
    _hangs(late, seed)
    lost, terms = late.leader, len(late.leaders)
    late.run(LOST_S, gone=lost)
    assert len(late.leaders) > terms, f"seed {seed}: no host leads two seconds after {lost} was lost"
    return late


def _hangs(late: Late, seed: int) -> None:
    slow, terms = late.leader, len(late.leaders)
    late.hang(slow, HANGS_S)
    late.propose(slow)
    late.run(HANDED_OVER_S)
    assert late.leader != slow, f"seed {seed}: {slow} leads although its disk hangs for {HANDED_OVER_S:g} s"
    late.run(HANGS_S)
    assert slow not in [name for _, name in late.leaders[terms:]], f"seed {seed}: {slow} stood while its disk hung"

"""What an agent knows about one job's ranks on this host under one epoch, and what it tells of them."""

import asyncio

from agent.records import Key, Record
from agent.supervision import UNKNOWN, State, Stop
from covey.ports import ByteStream
from plugins.base import RankLease
from plugins.facts import RanksEnded, RanksStarted


class Epoch:
    """What this agent knows about one job's ranks under one epoch."""

    def __init__(self, record: Record, found: bool) -> None:
        self.record = record
        self.state = State()
        self.found = found
        """Known from disk, and nobody has asked this agent to start it."""
        self.launched = False
        """This agent started its supervisor."""
        self.stop: Stop | None = None
        self.lease: RankLease | None = None
        """The newest that this agent was told to give."""
        self.stream: ByteStream | None = None
        self.started = self.ended = self.forgotten = False
        """What was told."""
        self.over = asyncio.Event()
        self.launches = 0
        """Supervisors started in vain since one was last heard."""


def started_of(key: Key, state: State) -> RanksStarted:
    return RanksStarted(key[0], key[1], {rank: pid.pid for rank, pid in state.pids.items()})


def ended_of(key: Key, epoch: Epoch) -> RanksEnded:
    codes = dict(epoch.state.codes)
    for rank in epoch.record.spec.ranks:
        codes.setdefault(rank.rank, UNKNOWN)
    return RanksEnded(key[0], key[1], codes, epoch.state.reason, epoch.state.lost)

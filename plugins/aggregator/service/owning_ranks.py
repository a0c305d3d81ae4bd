"""Ranks of this host that can own tables of their jobs: what they say, and orders to them over jobs.sock.

A rank obeys the orders of an `aggd`, but belongs to a user: what it says is believed of its own run of its own job
alone, and its address is taken only on this host. Each process has a number, so that a rank's successor is not taken
for it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from covey.core.ids import JobId
from covey.ports.addresses import ip_port
from covey.tensors.numbers.blocks import TABLES_MAX, table_id
from covey.tensors.numbers.tensor_wire import grant_of
from covey.wire.job import SumsOrder
from covey.wire.sums import DropJob, GetStatus, JobCounters, Now, Order, Serve
from plugins.aggregator.machine.direct_tables import (
    DirectTables,
    RankDone,
    RankFailed,
    RankSaid,
    RankServes,
    RanksMayOwn,
    ServeByRank,
)
from plugins.aggregator.machine.process_words import ForgetJob
from plugins.aggregator.messages import AggregatorSettings
from plugins.aggregator.service.away import RanksAwayNow
from plugins.aggregator.service.view import awaited
from plugins.base import Host, JobPeer

RANK_ORDER_S = 5.0
"""Seconds that a rank may take to answer an order."""


class OwningRank:
    """One process of a rank, as it last said what it sums."""

    def __init__(self, number: int, peer: JobPeer, job: JobId) -> None:
        self.number, self.peer, self.job = number, peer, job
        self.now: Now | None = None
        self.heard_s = 0.0
        self.asked = False
        """It was asked what it sums, and has not answered."""
        self._turn = asyncio.Lock()
        self._awaited: tuple[Callable[[Now], bool], asyncio.Future[Now] | None] = (lambda now: True), None

    @property
    def run(self) -> tuple[JobId, int]:
        return self.job, self.peer.epoch

    @property
    def jobs(self) -> Sequence[JobCounters]:
        """What it sums."""
        return self.now.jobs if self.now is not None else ()

    def heard(self, now: Now, now_s: float) -> None:
        unasked = self.now is None and bool(now.jobs)
        self.now, self.heard_s = now, now_s
        obeyed, answer = self._awaited
        if answer is not None and not answer.done() and (obeyed(now) or not unasked):
            answer.set_result(now)

    async def obey(self, frame: SumsOrder, obeyed: Callable[[Now], bool] = lambda now: False) -> Now:
        """Give the order; returns what the rank then says. TimeoutError. A process that owned tables before it joined
        says that by itself, once, which is an answer only if it is `obeyed`."""
        async with self._turn:
            answer: asyncio.Future[Now] = asyncio.get_running_loop().create_future()
            self._awaited = obeyed, answer
            self.peer.send(frame)
            async with asyncio.timeout(RANK_ORDER_S):
                return await answer


class OwningRanks:
    """The processes of all ranks here that can own tables. `tell` hands an event to the machine."""

    def __init__(
        self, host: Host, settings: AggregatorSettings, away: RanksAwayNow, tell: Callable[[Any], None]
    ) -> None:
        self._host, self._settings, self._away, self._tell = host, settings, away, tell
        self._processes: dict[int, OwningRank] = {}
        self._last = 0

    @property
    def all(self) -> Sequence[OwningRank]:
        return list(self._processes.values())

    def of(self, number: int | None) -> OwningRank | None:
        """The process of this number; None: it has ended."""
        return self._processes.get(number) if number is not None else None

    # ---- what ranks say ----

    def may_own(self, job: JobId, grant: int) -> None:
        """Ranks of this run have said whether they can own tables, or one has ended."""
        here = [peer for peer in self._host.peers(job) if peer.epoch == grant and not peer.gone]
        able = {peer.rank: self._known(peer, job).number for peer in here if peer.may_own}
        self._tell(RanksMayOwn(job, grant, able, any(peer.may_own is False for peer in here)))

    def said(self, peer: JobPeer, said: Now) -> None:
        """A rank says what it sums."""
        if peer.job is None or peer.gone:
            return
        rank, now = self._known(peer, peer.job), self._believed(peer, said)
        first = rank.now is None
        rank.heard(now, self._host.env.clock.now_s())
        serves = {job.job: job.epoch for job in now.jobs}
        self._tell(RankSaid(peer.job, peer.epoch, peer.rank, rank.number, now.address, serves, first))

    def done(self, peer: JobPeer) -> None:
        """A rank says that all ranks of its job are done."""
        for rank in self.all:
            if rank.peer is peer:
                self._tell(RankDone(rank.number))

    def disconnected(self) -> None:
        """A process is no longer connected."""
        gone = [rank for rank in self.all if rank.peer.gone]
        for rank in gone:
            del self._processes[rank.number]
            self._tell(
                RankFailed(rank.number, f"rank {rank.peer.rank} on {self._host.id} has ended, or lost its agent")
            )
        for job, grant in dict.fromkeys(rank.run for rank in gone):
            self.may_own(job, grant)

    def _known(self, peer: JobPeer, job: JobId) -> OwningRank:
        for rank in self._processes.values():
            if rank.peer is peer:
                return rank
        self._last += 1
        made = self._processes[self._last] = OwningRank(self._last, peer, job)
        return made

    def _believed(self, peer: JobPeer, said: Now) -> Now:
        """What a rank may say: tables of its own run, and an address of this host."""
        tables = {table_id(peer.job, table) for table in range(TABLES_MAX)} if peer.job is not None else set()
        own = [job for job in said.jobs if job.job in tables and grant_of(job.epoch) == peer.epoch]
        address, near = (said.address, said.near) if _is_at(said.address, self._host.advertise) else ("", "")
        return msgspec.structs.replace(said, jobs=own, address=address, near=near)

    # ---- orders ----

    async def serve(self, action: ServeByRank) -> RankServes | RankFailed:
        """Have the process serve a table that is on disk."""
        table, rank = action.table, self.of(action.process)
        if rank is None:
            return RankFailed(action.process, f"rank {table.rank} has ended")

        def served(now: Now) -> bool:
            return bool(now.address) and any((job.job, job.epoch) == (table.job, table.epoch) for job in now.jobs)

        order = Serve(table.job, table.epoch, table.workers, table.secret, table.size_bytes)
        who = f"rank {table.rank} on {self._host.id}"
        try:
            now = await rank.obey(self._frame(order), served)
        except TimeoutError:
            return RankFailed(action.process, f"{who} did not answer within {RANK_ORDER_S:g} s")
        if not served(now):
            return RankFailed(action.process, f"{who} cannot listen at {self._host.advertise}, or sums no table", True)
        return RankServes(table.job, table.epoch, action.process, now.address)

    def forget(self, process: int, order: ForgetJob, within_s: float) -> None:
        """Let the process stop serving a table."""
        self._give(process, DropJob(order.job, order.epoch, order.instead, within_s, order.to))

    def _give(self, process: int, order: Order) -> None:
        """Give an order whose answer changes nothing. A process that does not answer is found silent when it is asked
        next."""
        rank = self.of(process)
        if rank is not None:
            self._host.env.spawn("aggregator orders a rank", self._given(rank, order))

    async def _given(self, rank: OwningRank, order: Order) -> None:
        with contextlib.suppress(TimeoutError):
            await rank.obey(self._frame(order))

    async def ask(self, rank: OwningRank) -> Now | None:
        """Ask a process what it sums; None, and it has failed, when it does not answer."""
        try:
            return await rank.obey(self._frame(GetStatus()))
        except TimeoutError:
            if rank.number in self._processes:
                why = f"rank {rank.peer.rank} on {self._host.id} did not answer within {RANK_ORDER_S:g} s"
                self._tell(RankFailed(rank.number, why))
            return None

    def poll(self, owner: DirectTables) -> None:
        """Once a second, ask each process that serves tables, or has to say whether it does."""
        missing, serving = owner.missing, owner.processes
        for rank in self.all:
            wanted = rank.number in serving or (*rank.run, rank.peer.rank) in missing
            if wanted and not rank.asked:
                rank.asked = True
                self._host.env.spawn("aggregator asks a rank", self._look(rank, owner))

    async def _look(self, rank: OwningRank, owner: DirectTables) -> None:
        try:
            now = await self.ask(rank)
        finally:
            rank.asked = False
        if now is None:
            return
        for order in self._away.orders(now):
            self._give(rank.number, order)
        for job in now.jobs:
            held = owner.tables.get(job.job)
            if job.iterations and held is not None and held.epoch == job.epoch:
                missing = [each for each in job.missing if each < held.workers]
                self._host.publish(awaited(msgspec.structs.replace(job, missing=missing)))

    def _frame(self, order: Order) -> SumsOrder:
        settings = self._settings
        return SumsOrder(order, self._host.advertise, settings.memory_bytes_max, settings.rdma == "auto")


def _is_at(address: str, ip: str) -> bool:
    """Whether this is an address with a port, of this IP."""
    try:
        host, port = ip_port(address)
    except OSError:
        return False
    return host == ip and port > 0

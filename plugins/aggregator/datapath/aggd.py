"""`aggd`: the process that sums. Its agent tells it on a unix socket which jobs to serve; workers connect over TCP.

It knows no other host and decides nothing. While its agent is away it keeps serving the jobs it has; without an agent
and without workers for `orphan_s` it ends by itself.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from covey.core.ids import JobId
from covey.ports.env import Env
from covey.ports.streams import ANYBODY, ByteStream, Listener
from covey.tensors.numbers.tensor_wire import (
    HEADER_BYTES,
    OWNER,
    Header,
    TensorOp,
    TensorWireError,
    frame,
    parse,
    verify,
)
from covey.tensors.owner.memory import Buffers, Memory
from covey.tensors.owner.speakers import Violation
from covey.wire import handshake
from covey.wire.frames import FrameError, read_frame, write_frame
from covey.wire.handshake import HANDSHAKE_S, NONCE_BYTES, PROOF_BYTES, Strangers
from covey.wire.sums import (
    MISSING_MAX,
    DropJob,
    GetStatus,
    JobCounters,
    Now,
    Order,
    Quit,
    RanksAway,
    Serve,
    SetPace,
    orders,
)
from plugins.aggregator.datapath.blocks.state_carrier import READY_BYTES_S, StateCarrier
from plugins.aggregator.datapath.job_sums import GIVE_BACK_S, Counters, JobSums, SharedByJobs
from plugins.aggregator.datapath.lanes.addition_queue import AdditionQueue
from plugins.aggregator.datapath.lanes.lane import LANE
from plugins.aggregator.datapath.lanes.lanes import Lanes
from plugins.aggregator.datapath.links import WorkerLink
from plugins.aggregator.datapath.owner_links import OwnerLink
from plugins.base import Program

CONNECTIONS_MAX = 4096
PUSHES_SHARE = 4
"""Fraction of `memory_bytes_max` that may be shared, besides, with ranks of this host for what they push: a quarter."""
TOLD_S = 0.2
"""Seconds between telling ranks of the next owner and ending their connections."""


class AggdConfig(msgspec.Struct, frozen=True, kw_only=True):
    bind: str
    """Address at which workers connect, `ip:port`; port 0 takes a free one."""
    control: str
    """Name of the unix socket in the run directory."""
    memory_bytes_max: int
    near: str = ""
    """Name of a unix socket in the run directory for ranks of this host, of whatever user; empty: there is none."""
    orphan_s: float = 300.0
    lanes: int = 1
    """Additions at a time: with 1 this process adds; with more this many lanes do (`lanes`)."""


class Aggd:
    """The jobs of one aggregating host."""

    def __init__(self, env: Env, config: AggdConfig) -> None:
        self.env, self.config = env, config
        self.counters = Counters()
        self.jobs: dict[JobId, JobSums] = {}
        self.strangers: Strangers[ByteStream] = Strangers()
        self.address = self.near = ""
        self.listening, self.over = asyncio.Event(), asyncio.Event()
        self._by_hash: dict[int, JobSums] = {}
        self.lanes = Lanes(env, config.lanes) if config.lanes > 1 else None
        source = self.lanes.memory.mapped if self.lanes is not None else None
        additions = AdditionQueue(env, self.lanes)
        if self.lanes is not None:
            self.lanes.freed = additions.deal
        most = config.memory_bytes_max
        for_pushes = Memory(most // PUSHES_SHARE)
        self._shared = SharedByJobs(Memory(most), self.counters, Buffers(source), additions, source, for_pushes)
        self._leaving: list[JobSums] = []
        """Jobs that another host is to sum."""
        self._controls = self._connections = 0
        self._cpu_s = self._accounted_s = 0.0
        """CPU seconds of this process at its last accounting, and how many of them were work of its jobs."""
        self._moved = 0

    async def run(self) -> None:
        control = await self.env.bytes.listen(f"unix:{self.env.run_dir}/{self.config.control}", self.obey)
        workers, near = await self.listen()
        lanes = await self.lanes.start() if self.lanes is not None else None
        self.listening.set()
        try:
            await self._until_over()
        finally:
            for listener in (control, workers, near, lanes):
                if listener is not None:
                    await listener.close()

    async def listen(self) -> tuple[Listener, Listener | None]:
        """Listen for ranks: over TCP, and at a unix socket."""
        workers = await self.env.bytes.listen(self.config.bind, self.accept)
        self.address = workers.address
        near = await self._listen_near()
        self.env.log.info("aggd listens", address=self.address, near=self.near)
        self._cpu_s = self.env.clock.cpu_s()
        return workers, near

    async def _listen_near(self) -> Listener | None:
        """Listen at a unix socket for ranks of this host. They connect over TCP where that is not possible."""
        if not self.config.near:
            return None
        path = f"{self.env.run_dir}/{self.config.near}"
        try:
            found = await self.env.bytes.listen(f"unix:{path}", self.accept, ANYBODY, bulk=True)
        except OSError as error:
            self.env.log.warning("cannot listen on a unix socket for ranks of this host", path=path, why=str(error))
            return None
        self.near = path
        return found

    async def _until_over(self) -> None:
        alone_s, step_s = 0.0, min(5.0, self.config.orphan_s)
        while not self.over.is_set() and alone_s < self.config.orphan_s:
            try:
                async with asyncio.timeout(step_s):
                    await self.over.wait()
            except TimeoutError:
                alone_s = 0.0 if self._controls or self._connections else alone_s + step_s

    # ---- the agent ----

    async def obey(self, stream: ByteStream) -> None:
        self._controls += 1
        try:
            while not self.over.is_set():
                await write_frame(stream, self.perform(await read_frame(stream, orders)))
        except FrameError as error:
            self.counters.bad_frames += 1
            self.env.log.warning("control connection dropped", why=str(error))
        except ConnectionError:
            pass  # the agent restarts; it finds us again
        finally:
            self._controls -= 1

    def perform(self, order: Order) -> Now:
        match order:
            case Serve():
                self.serve(order)
            case DropJob():
                self.drop(order)
            case SetPace():
                known = self.jobs.get(order.job)
                if known is not None and known.epoch == order.epoch:
                    known.may_take_us = order.may_take_us
            case RanksAway():
                known = self.jobs.get(order.job)
                if known is not None and known.epoch == order.epoch:
                    known.away.ended.update(order.ranks)
                    known.look_from_now_on()
            case Quit():
                self.over.set()
            case GetStatus():
                pass
        return self.now()

    def serve(self, order: Serve) -> None:
        known = self.jobs.get(order.job)
        if known is not None and known.epoch >= order.epoch:
            return
        self.forget(order.job, order.epoch, order.epoch)
        job = JobSums(self.env, order, self._shared)
        self.jobs[order.job] = self._by_hash[job.hash] = job

    def forget(self, name: JobId, epoch: int, instead: int, carrier: StateCarrier | None = None) -> None:
        known = self.jobs.get(name)
        if known is None or known.epoch > epoch:
            return
        del self.jobs[name], self._by_hash[known.hash]
        known.end(instead, carrier)
        if not self.jobs:
            self.env.spawn("aggd gives buffers back", self._give_back())

    async def _give_back(self) -> None:
        """Give buffers back after `GIVE_BACK_S`, as `JobSums` does, unless a job came meanwhile."""
        await asyncio.sleep(GIVE_BACK_S)
        if not self.jobs:
            self._shared.buffers.clear()

    def drop(self, order: DropJob) -> None:
        known = self.jobs.get(order.job)
        if known is None or known.epoch > order.epoch or not order.within_s or not known.links:
            self.forget(order.job, order.epoch, order.instead)
        elif known not in self._leaving:
            self._leaving.append(known)
            self.env.spawn(f"aggd hands {order.job} over", self._hand_over(known, order))

    async def _hand_over(self, job: JobSums, order: DropJob) -> None:
        began_s, size, within_s, carrier = self.env.clock.now_s(), job.state_bytes, order.within_s, None
        ready_s = TOLD_S + size / READY_BYTES_S
        if order.to is not None:
            ready, ready_s = job.rounds_here.next_is_ready, within_s  # it is called then
            carrier = StateCarrier(self.env, job.hash, order.instead, order.to, size, ready)
            self.env.spawn(f"aggd brings {order.job} to its next owner", carrier.run())
        why = await job.rounds_here.until_between(min(ready_s, within_s / 2), within_s, TOLD_S)
        self._leaving.remove(job)
        if self.jobs.get(job.job) is job:
            self.env.log.info("job handed over", job=job.job, why=why, after_s=self.env.clock.now_s() - began_s)
            self.forget(job.job, job.epoch, order.instead, carrier)
        elif carrier is not None:
            carrier.begin({})

    def account(self) -> None:
        """Divide the work since the last accounting that no job counted as its own, reading and writing, among the jobs
        by the weight of their frames. For small tensors that is most of the work."""
        cpu_s, counters = self.env.clock.cpu_s(), self.counters
        rest_s = max(0.0, cpu_s - self._cpu_s - (counters.busy_s - self._accounted_s))
        moved = counters.moved - self._moved
        for job in self.jobs.values():
            if moved:
                job.carried_s += rest_s * (job.moved - job.accounted) / moved
            job.accounted = job.moved
        self._cpu_s, self._accounted_s, self._moved = cpu_s, counters.busy_s, counters.moved

    def now(self) -> Now:
        self.account()
        counters = self.counters
        return Now(
            address=self.address,
            jobs=[_job_now(job) for _, job in sorted(self.jobs.items()) if job not in self._leaving],
            busy_s=self._cpu_s,
            bad_frames=counters.bad_frames,
            refused=counters.refused,
            memory_bytes=self._shared.memory.used,
            near=self.near,
            lanes=self.config.lanes,
            lanes_s=self.lanes.cpu_s if self.lanes is not None else 0.0,
            copied=counters.copied,
            copies_failed=counters.copies_failed,
        )

    # ---- workers ----

    async def accept(self, stream: ByteStream) -> None:
        if self._connections >= CONNECTIONS_MAX:
            self.counters.refused += 1
            return
        self._connections += 1
        crowded_out = self.strangers.come(stream, stream.peer.rpartition(":")[0])
        if crowded_out is not None:
            self.counters.refused += 1
            crowded_out.close()
        link: WorkerLink | OwnerLink | None = None
        try:
            link = await self.hello(stream)
            self.strangers.go(stream)
            if link is not None:
                await link.read_in()
        except TensorWireError as error:
            self._drop(stream, error)
        except Violation as error:
            self._drop(stream, error)
            if link is not None:
                await link.blame(str(error))
        except (ConnectionError, TimeoutError):
            pass  # it connects again, or its host is gone
        finally:
            self._connections -= 1
            self.strangers.go(stream)
            if link is not None:
                link.leave()
                link.close()

    def _drop(self, stream: ByteStream, error: Exception) -> None:
        self.counters.bad_frames += 1
        self.env.log.warning("worker dropped", peer=stream.peer, why=str(error))

    async def hello(self, stream: ByteStream) -> WorkerLink | OwnerLink | None:
        """The connection of a worker, or of the earlier owner, whose hello was accepted; None when it was refused."""
        async with asyncio.timeout(HANDSHAKE_S):
            head, hello = await self._hear(stream, TensorOp.HELLO, NONCE_BYTES)
            job = self._by_hash.get(head.job)
            if job is None or job.epoch != head.epoch:
                await self._refuse(stream, head.job, job.epoch if job else 0)
                return None
            proven = await self._proves(stream, job, hello)
        unknown = job.before is not None if head.rank == OWNER else head.rank >= job.workers
        if unknown or not proven or self.jobs.get(job.job) is not job:
            await self._refuse(stream, head.job, 0)
            return None
        if head.rank == OWNER:
            return OwnerLink(job, stream)
        newest = job.newest[head.rank] = max(head.round, job.newest.get(head.rank, 0))
        if head.round < newest:  # it was lost to its host, and does not know it
            await self._refuse(stream, head.job, job.epoch, newest)
            return None
        link = WorkerLink(job, head.rank, stream)
        job.join(link)
        link.send(TensorOp.WELCOME)
        self.env.spawn(f"aggd worker {job.job} {head.rank}", link.write_out())
        return link

    async def _hear(self, stream: ByteStream, op: TensorOp, size: int) -> tuple[Header, bytes]:
        """Read a frame, which must have this operation and size; returns its header and all its bytes."""
        head, payload = bytearray(HEADER_BYTES), bytearray(size)
        await stream.read_into(memoryview(head))
        header = parse(head)
        if header.op is not op or header.length != size:
            raise TensorWireError(f"{op.name} expected here, not {header.op.name}")
        await stream.read_into(memoryview(payload))
        verify(head, payload)
        return header, bytes(head + payload)

    async def _proves(self, stream: ByteStream, job: JobSums, hello: bytes) -> bool:
        """Does the peer know the secret of this assignment? We prove that we do, too."""
        ours = self.env.entropy(NONCE_BYTES)
        challenge = handshake.challenge(job.secret, hello, ours)
        await stream.write(*frame(TensorOp.CHALLENGE, job.hash, job.epoch, payload=challenge))
        _, found = await self._hear(stream, TensorOp.PROOF, PROOF_BYTES)
        return handshake.is_proof(found[HEADER_BYTES:], handshake.proof_of_client(job.secret, hello, ours))

    async def _refuse(self, stream: ByteStream, job: int, epoch: int, newest: int = 0) -> None:
        self.counters.refused += 1
        await stream.write(*frame(TensorOp.STALE, job, epoch, round=newest))


def _job_now(job: JobSums) -> JobCounters:
    missing, waits_s = job.waits
    return JobCounters(
        job=job.job,
        epoch=job.epoch,
        workers=job.workers,
        joined=len(job.links),
        tensors=len(job.tensors),
        bytes=job.size_bytes,
        rounds=job.rounds,
        received_bytes=job.received_bytes,
        sent_bytes=job.sent_bytes,
        busy_us=round((job.busy_s + job.carried_s) * 1e6),
        iterations=job.iterations,
        largest_bytes=job.largest_bytes,
        not_finite=job.not_finite,
        may_take_us=job.may_take_us,
        missing=missing[:MISSING_MAX],
        waits_s=waits_s,
        away=sorted(job.away.ended),
    )


async def run(env: Env, config: AggdConfig) -> None:
    await Aggd(env, config).run()


AGGD = Program("aggd", AggdConfig, run)
PROGRAMS: Sequence[Program] = (AGGD, LANE)

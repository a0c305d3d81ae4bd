"""Programs that users run in a simulated rack: stand-ins that speak the real frames and keep an oracle of what must be
true.

    sleeper SECONDS [CODE]     computes, pushes nothing; ends with this exit status
    ring SECONDS               exchanges a byte with rank 0 each second, as NCCL would; 1 when that hears nothing
    trainer ROUNDS FLOATS      joins its agent, pushes integer gradients, checks every sum to the bit
        [LESS [leave]]         rank 0 makes LESS rounds fewer, and ends with 0, or waits for the others; 9: told of it
    healer UNTIL               may be lost at any step of a second, and says so to its agent; ends at this time, with 0
    (a tool) pager             attaches a volume, writes and reads pages, checks that no acknowledged write is lost

The trainer's job side is `covey.simulated.tensor_streams`: the rounds that real scripts use, on ports instead of
threads. For every third job the aggregators keep an optimizer's moments, without which the next parameters would be
others.
"""

import asyncio
import struct
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from chaos.actors.rank_owner import RankOwner
from chaos.world.host import SimProcesses
from covey.core.errors import RankLeft
from covey.core.ids import JobId
from covey.job.table_owners import TableOwners
from covey.ports.env import Env
from covey.ports.processes import Command
from covey.ports.streams import ByteStream
from covey.simulated.block_streams import BlockStreams, HostStreams, TensorRank
from covey.tensors.aggregator.rounds import Superseded
from covey.tensors.numbers.blocks import Sizes
from covey.tensors.numbers.updates import SGD
from covey.tensors.owner.leaving import LEAVE, who
from covey.wire.frames import pack, read_frame
from covey.wire.job import (
    AggregatorAt,
    AggregatorLost,
    Carries,
    GoneRank,
    Heals,
    Join,
    Joined,
    RanksHaveLeft,
    Refusal,
    Stepped,
    SumsNow,
    SumsOrder,
    TableWanted,
    decoder,
)

RANK_LEFT = 9
"""Exit status of a trainer that was told of a rank that has left."""
BACKOFF_S = (0.1, 2.0)
LINGER_S = 60.0
BEAT_S, SILENT_S, JOIN_TRIES = 1.0, 6.0, 20
"""Times of a `ring`: seconds between two exchanges, seconds until a peer counts as lost, and how often it is looked
for."""
SIZES = Sizes(elsewhere_bytes=8, least_bytes=16, most_bytes=32, aligned=1)
"""Sizes so small that the tensors of stories have several owners, and some several Blocks in one table."""
COMPUTE_S = (0.1, 0.6)
"""Least and most seconds of one mini-batch."""
Say = Callable[[str], None]
"""A function that is told what a workload saw that must never be."""


async def sleeper(env: Env, command: Command) -> int:
    await asyncio.sleep(float(command.argv[1]))
    return int(command.argv[2]) if len(command.argv) > 2 else 0


async def ring(env: Env, command: Command) -> int:
    """Exit status of a `ring`: 0 after its seconds; 1 when a peer is silent or gone, which a script cannot tell from
    an error of its own."""
    given, seconds = command.env, float(command.argv[1])
    address = f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}"
    lost = asyncio.Event()
    beating = _follow(env, address, lost) if given["COVEY_RANK"] != "0" else _lead(env, address, lost)
    env.spawn("ring", beating)
    began_s = env.clock.now_s()
    try:
        async with asyncio.timeout(seconds):
            await lost.wait()
    except TimeoutError:
        return 0
    return 0 if env.clock.now_s() - began_s > seconds - SILENT_S else 1  # who began first has ended


async def _lead(env: Env, address: str, lost: asyncio.Event) -> None:
    async def beat(stream: ByteStream) -> None:
        await _beat(stream, lost)

    await env.bytes.listen(address, beat)


async def _follow(env: Env, address: str, lost: asyncio.Event) -> None:
    for _ in range(JOIN_TRIES):
        try:
            stream = await env.bytes.connect(address)
        except ConnectionError:
            await asyncio.sleep(BEAT_S)
            continue
        await _beat(stream, lost)
        return
    lost.set()


async def _beat(stream: ByteStream, lost: asyncio.Event) -> None:
    heard = memoryview(bytearray(1))
    try:
        while True:
            async with asyncio.timeout(SILENT_S):
                await stream.write(b"b")
                await stream.read_into(heard)
            await asyncio.sleep(BEAT_S)
    except (TimeoutError, ConnectionError):
        lost.set()


def healer(now_s: Callable[[], float]) -> Callable[[Env, Command], Awaitable[int]]:
    """A program that tells its agent what `covey.job.job_state` would; its state is the time of the world, which every
    process has."""

    async def heal(env: Env, command: Command) -> int:
        agent, until_s = AgentLink(env, command), float(command.argv[1])
        env.spawn("agent link", agent.run())
        while now_s() < until_s:
            await agent.heals(Heals(int(now_s()), modules=("numpy",)))
            await agent.send(Stepped(int(now_s()), 1.0, 1.0, 0.0, {}))
            await asyncio.sleep(1.0)
        await agent.heals(Heals(int(until_s), over=True))
        await asyncio.sleep(1.0)
        return 0

    return heal


class AgentLink:
    """A rank's connection to its agent: joins, joins again for ever, and remembers which aggregators it was told of."""

    def __init__(self, env: Env, command: Command) -> None:
        self.env, given = env, command.env
        self.job, self.rank = JobId(given["COVEY_JOB_ID"]), int(given["COVEY_RANK"])
        self.epoch, self.world_size = int(given["COVEY_EPOCH"]), int(given["COVEY_WORLD_SIZE"])
        self._token, self._path = given["COVEY_TOKEN"], given["COVEY_SOCKET"]
        self._pid = env.processes.own.pid if isinstance(env.processes, SimProcesses) else 0
        self._stream: ByteStream | None = None
        self.tables = int(given["COVEY_TABLES"])
        self.owners = TableOwners()
        self._heals: tuple[Heals, ...] = ()
        """The newest `Heals` that was sent; empty before the first."""
        self.sums = RankOwner(env, f"rank-{self._pid}.sock")
        self.moved: Callable[[AggregatorAt], None] = lambda at: None
        """Function that is told of every aggregator."""
        self.carries: Callable[[Carries], None] = lambda said: None
        """Function that is told which ranks the processes of an elastic job carry."""
        self.gone: Callable[[Mapping[int, GoneRank]], None] = lambda ranks: None
        """Function that is told which ranks have ended."""

    async def run(self) -> None:
        pause_s = BACKOFF_S[0]
        while True:
            try:
                stream = await self.env.bytes.connect(f"unix:{self._path}")
                try:
                    await stream.write(pack(Join(self._pid, self.job, self.rank, self.epoch, self._token)))
                    first = await read_frame(stream, decoder)
                    if isinstance(first, Joined):
                        pause_s, self._stream = BACKOFF_S[0], stream
                        owned = self.sums.now()
                        owns = (SumsNow(owned),) if owned.jobs else ()
                        for said in (*self.owners.again(), *self._heals, *owns):
                            await stream.write(pack(said))
                        await self._listen(stream)
                    elif isinstance(first, Refusal):
                        pause_s = BACKOFF_S[1]
                finally:
                    self._stream = None
                    stream.close()
            except ConnectionError:
                pass
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACKOFF_S[1])

    async def _listen(self, stream: ByteStream) -> None:
        while True:
            frame = await read_frame(stream, decoder)
            if isinstance(frame, SumsOrder):
                await stream.write(pack(SumsNow(await self.sums.obey(frame))))
            if isinstance(frame, AggregatorAt) and self.owners.moved(frame):
                self.moved(frame)
            if isinstance(frame, Carries):
                self.carries(frame)
            if isinstance(frame, RanksHaveLeft):
                self.gone(frame.ranks)

    def lost(self, epoch: int, why: str, table: int = 0) -> None:
        """Tell the agent that the owner of that table and epoch cannot be used."""
        said = self.owners.lost(epoch, why, table)
        if said is not None:
            self.env.spawn("aggregator lost", self.send(said))

    def wanted(self, table: int) -> None:
        """Tell the agent that this rank has Blocks in the table."""
        self.env.spawn("table wanted", self.send(self.owners.wanted(table)))

    async def heals(self, said: Heals) -> None:
        """Tell the agent that the rank may be lost from this step on."""
        self._heals = (said,)
        await self.send(said)

    async def send(self, frame: AggregatorLost | TableWanted | Stepped | Heals) -> None:
        """Send a frame at once if the agent is there; it is told of owners again when it is back."""
        if self._stream is not None:
            try:
                await self._stream.write(pack(frame))
            except ConnectionError:
                return


def gradient(rank: int, number: int, floats: int) -> list[float]:
    """A rank's gradient in a round: whole numbers, so that their sum is exact in any order; each rank and round has
    its own."""
    return [float((rank * 37 + number * 101 + place * 7) % 251 + 1) for place in range(floats)]


class Oracle:
    """The parameters that must result, computed by one process."""

    def __init__(self, job: JobId, world_size: int, floats: int) -> None:
        self.update = SGD(1.0, momentum=0.5) if zlib.crc32(job.encode()) % 3 == 0 else None
        self.right = np.ones(floats, np.float32)
        self._world_size = world_size
        self._velocity = np.zeros(floats, np.float32)

    def rate(self, number: int) -> float:
        """Learning rate in that round."""
        return 1 / (1 + number % 3)

    def add(self, number: int) -> None:
        """Add round `number`, which must be the next one."""
        ranks = range(self._world_size)
        total = np.sum([gradient(rank, number, len(self.right)) for rank in ranks], axis=0).astype(np.float32)
        if self.update is None:
            self.right = self.right + total
        else:
            self._velocity = self.update.momentum * self._velocity + total
            self.right = self.right - self.rate(number) * self._velocity


def trainer(wrong: Say) -> Callable[[Env, Command], Awaitable[int]]:
    """A training script; `wrong` is called for every wrong sum. In every other job the ranks of one host add first."""
    shared: dict[tuple[JobId, int, str], HostStreams] = {}

    def together(env: Env, agent: AgentLink, given: Mapping[str, str]) -> HostStreams | None:
        """The streams that the ranks of one host share; None where each pushes by itself."""
        at, alike = int(given["LOCAL_RANK"]), int(given["LOCAL_WORLD_SIZE"])
        if alike == 1 or zlib.crc32(agent.job.encode()) % 2:
            return None
        first = agent.rank - at
        key = agent.job, agent.epoch, env.host
        return shared.setdefault(key, HostStreams((first, first + alike)))

    async def train(env: Env, command: Command) -> int:
        agent, (rounds_wanted, floats, less, leaves) = AgentLink(env, command), counted(command.argv)
        rounds_wanted -= less if agent.rank == 0 else 0
        tensors = BlockStreams(
            env,
            TensorRank(agent.job, agent.rank, agent.world_size, agent.tables),
            agent.lost,
            wanted=agent.wanted,
            part_bytes=64,
            sizes=SIZES,
            together=together(env, agent, command.env),
        )
        agent.moved = tensors.moved
        env.spawn("agent link", agent.run())
        try:
            code = await _train(env, agent, tensors, rounds_wanted, floats, wrong)
        except Superseded:
            return 3
        except RankLeft as left:
            env.log.info("rank left", why=str(left))
            return RANK_LEFT
        if code == 0 and leaves | (agent.rank > 0):
            code = await _leave(env, agent, tensors, rounds_wanted)
        return code

    def counted(argv: Sequence[str]) -> tuple[int, int, int, bool]:
        """Arguments of a trainer: rounds, floats, how many rounds fewer rank 0 makes, and whether it waits for the end
        of all."""
        less = int(argv[3]) if len(argv) > 3 else 0
        return int(argv[1]), int(argv[2]), less, not less or len(argv) > 4

    return train


async def _leave(env: Env, agent: AgentLink, tensors: BlockStreams, step: int) -> int:
    """Leave the job, as `with covey.join()` does at its end; returns the exit status."""
    tensors.leave(who(agent.rank, env.host, step, False).encode())
    try:
        async with asyncio.timeout(LINGER_S):
            await tensors.push_pull(LEAVE, bytes(4))
    except Superseded:
        return 3
    except (TimeoutError, RankLeft):
        return 0  # its last word may be lost: the log ends its job all the same
    return 0


async def _train(env: Env, agent: AgentLink, tensors: BlockStreams, rounds_wanted: int, floats: int, wrong: Say) -> int:
    """Train; returns the script's exit status. Raises Superseded when this run of the job was taken back."""
    pack_floats = struct.Struct(f"<{floats}f")
    oracle = Oracle(agent.job, agent.world_size, floats)
    await tensors.model("w", oracle.right.tobytes(), (floats,), oracle.update)
    for number in range(1, rounds_wanted + 1):
        took_s = env.rng.uniform(*COMPUTE_S)
        await asyncio.sleep(took_s)
        mine = pack_floats.pack(*gradient(agent.rank, number, floats))
        state = await tensors.push_pull("w", mine, oracle.rate(number))
        tensors.check()
        oracle.add(number)
        if state != oracle.right.tobytes():
            found, right = pack_floats.unpack(state)[:4], oracle.right[:4].tolist()
            wrong(f"{agent.job} rank {agent.rank} round {number}: parameters {found}, expected {right}")
            return 4
        await agent.send(Stepped(number, took_s, took_s, 0.0, {"round": float(number)}))
    return 0

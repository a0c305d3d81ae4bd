"""What users run in a simulated rack: stand-ins that speak the real frames and keep an oracle of what must be true.

    sleeper SECONDS            computes, pushes nothing
    trainer ROUNDS FLOATS      joins its agent, pushes integer gradients, checks every sum to the bit
    (a tool) pager             attaches a volume, writes and reads pages, checks that no acknowledged write is lost

The trainer's job side is the sans-IO core that real scripts use (`covey.rounds`), on ports instead of threads.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from covey.core import JobId
from covey.frames import pack, read_frame
from covey.ports import ByteStream, Command, Env
from covey.rounds import Rounds, Stale, Superseded
from covey.tensorwire import HEADER_BYTES, Frame, Op, WireError, parse, verify
from covey.wire import AggregatorAt, AggregatorLost, Join, Joined, Refusal, Stepped, decoder

BACKOFF_S = (0.1, 2.0)
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
SILENT_S, DEAD_S = 2.0, 6.0
"""Quiet time before a ping, and before a tensor connection is given up."""
LINGER_S = 60.0
COMPUTE_S = (0.1, 0.6)
"""Seconds of one mini-batch, least and most."""
Say = Callable[[str], None]
"""What a workload saw that must never be."""


async def sleeper(env: Env, command: Command) -> int:
    await asyncio.sleep(float(command.argv[1]))
    return 0


class AgentLink:
    """A rank's connection to its agent: joins, joins again for ever, and remembers which aggregator it was told of."""

    def __init__(self, env: Env, command: Command) -> None:
        self.env, given = env, command.env
        self.job, self.rank = JobId(given["COVEY_JOB_ID"]), int(given["COVEY_RANK"])
        self.epoch, self.world_size = int(given["COVEY_EPOCH"]), int(given["COVEY_WORLD_SIZE"])
        self._token, self._path = given["COVEY_TOKEN"], given["COVEY_SOCKET"]
        self._stream: ByteStream | None = None
        self.aggregator: AggregatorAt | None = None
        self.changed = asyncio.Event()
        self._lost: AggregatorLost | None = None

    async def run(self) -> None:
        pause_s = BACKOFF_S[0]
        while True:
            try:
                stream = await self.env.bytes.connect(f"unix:{self._path}")
                try:
                    await stream.write(pack(Join(0, self.job, self.rank, self.epoch, self._token)))
                    first = await read_frame(stream, decoder)
                    if isinstance(first, Joined):
                        pause_s, self._stream = BACKOFF_S[0], stream
                        if self._lost is not None:
                            await stream.write(pack(self._lost))
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
            if isinstance(frame, AggregatorAt) and (self.aggregator is None or frame.epoch > self.aggregator.epoch):
                self.aggregator, self._lost = frame, None
                self.changed.set()

    async def say(self, frame: AggregatorLost | Stepped) -> None:
        """At once if the agent is there; a lost aggregator is said again when it is back."""
        if isinstance(frame, AggregatorLost):
            self._lost = frame
        if self._stream is not None:
            try:
                await self._stream.write(pack(frame))
            except ConnectionError:
                return


class TensorLink:
    """A rank's connection to its job's aggregator, made again for ever; `Rounds` decides what is said."""

    def __init__(self, env: Env, agent: AgentLink, rounds: Rounds) -> None:
        self.env, self.agent, self.rounds = env, agent, rounds
        self.changed = asyncio.Event()
        self.superseded = False
        self._outbox: deque[Iterable[Frame]] | None = None
        self._ready = asyncio.Event()

    def send(self, frames: Iterable[Frame]) -> None:
        """On the present connection; without one nothing is lost, since `connected` says it all again."""
        if self._outbox is not None:
            self._outbox.append(frames)
            self._ready.set()

    async def run(self) -> None:
        attempt = 0
        while not self.superseded:
            at = self.agent.aggregator
            if at is None:
                await self._news(60.0)
                continue
            try:
                if self.rounds.moved(at.epoch):
                    attempt = 0
                await self._serve(at)
            except Superseded:
                self.superseded = True
                self.changed.set()
            except (ConnectionError, TimeoutError) as error:
                if self.agent.aggregator is at:
                    why = "stale" if isinstance(error, Stale) else str(error) or "silent"
                    await self.agent.say(AggregatorLost(at.epoch, why))
                    await self._news(RETRY_S[min(attempt, len(RETRY_S) - 1)])
                attempt += 1

    async def _news(self, within_s: float) -> None:
        self.agent.changed.clear()
        try:
            await asyncio.wait_for(self.agent.changed.wait(), within_s)
        except TimeoutError:
            return

    async def _serve(self, at: AggregatorAt) -> None:
        stream = await self.env.bytes.connect(at.address, RETRY_S[-1] * 2)
        tasks: list[asyncio.Task[None]] = []
        try:
            await stream.write(*self.rounds.hello(at.secret))
            async with asyncio.timeout(DEAD_S):
                op = await self._take(stream, at)
            if op is not Op.WELCOME:
                raise WireError(f"answered {op.name} to our hello")
            self._outbox = deque([self.rounds.connected()])
            self._ready.set()
            loop = asyncio.get_running_loop()
            tasks = [
                loop.create_task(self._write(stream)),
                loop.create_task(self._read(stream, at)),
                loop.create_task(self._moved(at)),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._outbox = None
            stream.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _moved(self, at: AggregatorAt) -> None:
        """Ends when the agent names another aggregator."""
        while self.agent.aggregator is at:
            await self._news(60.0)

    async def _write(self, stream: ByteStream) -> None:
        while True:
            while self._outbox:
                for head, payload in self._outbox.popleft():
                    await stream.write(head, payload)
            self._ready.clear()
            await self._ready.wait()

    async def _read(self, stream: ByteStream, at: AggregatorAt) -> None:
        while True:
            taking = asyncio.get_running_loop().create_task(self._take(stream, at))
            try:
                for _ in range(int(DEAD_S / SILENT_S)):
                    done, _ = await asyncio.wait([taking], timeout=SILENT_S)
                    if done:
                        break
                    self.send((self.rounds.ping(),))
                else:
                    raise TimeoutError("silent")
                taking.result()
            finally:
                taking.cancel()

    async def _take(self, stream: ByteStream, at: AggregatorAt) -> Op:
        head = bytearray(HEADER_BYTES)
        await stream.read_into(memoryview(head))
        header = parse(head)
        if self.agent.aggregator is not at:
            raise ConnectionAbortedError("is no longer the aggregator")
        into = self.rounds.destination(header)
        await stream.read_into(into)
        verify(head, into)
        if self.agent.aggregator is not at:
            raise ConnectionAbortedError("is no longer the aggregator")
        self.send(self.rounds.heard(header, into))
        self.changed.set()
        return header.op

    async def until(self, reached: Callable[[], bool], within_s: float = float("inf")) -> bool:
        """False when superseded or out of time."""
        end = self.env.clock.now_s() + within_s
        while not reached():
            left_s = end - self.env.clock.now_s()
            if self.superseded or left_s <= 0:
                return False
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), min(left_s, 3600.0))
            except TimeoutError:
                continue
        return True


def gradient(rank: int, number: int, floats: int) -> list[float]:
    """Whole numbers, so that their sum is exact in any order; each rank and round has its own."""
    return [float((rank * 37 + number * 101 + place * 7) % 251 + 1) for place in range(floats)]


def summed(before: list[float], world_size: int, number: int) -> list[float]:
    """The parameters after round `number`."""
    total = before
    for rank in range(world_size):
        total = [a + b for a, b in zip(total, gradient(rank, number, len(before)), strict=True)]
    return total


def trainer(wrong: Say) -> Callable[[Env, Command], Awaitable[int]]:
    """A training script; `wrong` hears of every sum that is not right."""

    async def train(env: Env, command: Command) -> int:
        rounds_wanted, floats = int(command.argv[1]), int(command.argv[2])
        agent = AgentLink(env, command)
        rounds = Rounds(agent.job, agent.rank, agent.world_size, part_bytes=64)
        link = TensorLink(env, agent, rounds)
        env.spawn("agent link", agent.run())
        env.spawn("tensor link", link.run())
        pack_floats = struct.Struct(f"<{floats}f")
        link.send(rounds.declare("w", "model", (floats,), pack_floats.pack(*[1.0] * floats)))
        tensor, right = rounds.tensors["w"], [1.0] * floats
        if not await link.until(lambda: tensor.agreed):
            return 3
        for number in range(1, rounds_wanted + 1):
            took_s = env.rng.uniform(*COMPUTE_S)
            await asyncio.sleep(took_s)
            link.send(rounds.push("w", pack_floats.pack(*gradient(agent.rank, number, floats))))
            if not await link.until(lambda: tensor.unacknowledged is None):
                return 3
            rounds.check()
            found = list(pack_floats.unpack(tensor.state))
            right = summed(right, agent.world_size, number)
            if found != right:
                wrong(f"{agent.job} rank {agent.rank} round {number}: parameters {found[:4]}, expected {right[:4]}")
                return 4
            await agent.say(Stepped(number, took_s, took_s, 0.0, {"round": float(number)}))
        link.send(rounds.declare("covey/leave", "grad", (1,)))
        link.send(rounds.push("covey/leave", bytes(4)))
        leave = rounds.tensors["covey/leave"]
        await link.until(lambda: leave.unacknowledged is None, LINGER_S)
        return 0

    return train

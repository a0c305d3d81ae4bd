"""Commands of the replicated log: how many a second, and how long one takes, asked at the leader and at a follower.

    python bench/control/log_rates.py [--seconds 5] [--at-once 64] [--turns 3] [--json FILE]

Three voters are processes of their own, with messengers over real links and logs on the disk of the temporary folder
(`TMPDIR`). In each turn 200 commands of 200 bytes are proposed one after the other at the leader, then `--at-once`
proposers go on for the seconds given at the leader, and the same at a follower. `hops`: how often the leader's loop
handed work to its disk's thread, for one command alone.
"""

import asyncio
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import structlog

from agent.ports.clock import RealClock
from agent.ports.disk import DirectoryDisk
from agent.ports.network.links import ZmqLinks
from agent.raft.service import Consensus, LeaderSettings
from agent.rpc.rpc import Messenger
from bench.live_command import json_option, keep, options, print_head
from covey.core.ids import HostId
from covey.ports.env import Env

NAMES = ("a", "b", "c")
ALONE = 200
"""Commands proposed one after the other."""
COMMAND = bytes(200)
TITLES = ("p50 ms", "p95 ms", "hops", "leader/s", "follower/s")


class CountedDisk(DirectoryDisk):
    """A disk that counts what its thread was given."""

    hops = 0

    async def _do(self, work: Any, *arguments: object) -> Any:
        self.hops += 1
        return await super()._do(work, *arguments)


class LogHost:
    """One voter. `shared`: host -> where it is reached."""

    def __init__(self, name: str, folder: str, shared: Any) -> None:
        self.name, self.shared = HostId(name), shared
        self._tasks: set[asyncio.Task[Any]] = set()
        self.disk = CountedDisk(os.path.join(folder, name))
        self.links = ZmqLinks(structlog.get_logger())
        ports = {"host": self.name, "clock": RealClock(), "rng": random.Random(name), "entropy": os.urandom}
        others = {"spawn": self.spawn, "log": structlog.get_logger(), "links": self.links, "disk": self.disk}
        env = cast(Env, SimpleNamespace(**ports, **others))
        self.messenger = Messenger(env, 1, 1, lambda _: 1, lambda _: 1, _no_message, self._answer, self._raw)
        settings = LeaderSettings(voters=NAMES, voters_wanted=1)
        self.log = Consensus(env, self.name, settings, self._send, self._ask, lambda *_: None)
        self.log.bind(lambda index, _: str(index).encode(), bytes, lambda _: None)

    def spawn(self, _: str, work: Coroutine[Any, Any, Any]) -> object:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, sender: HostId, _: str, body: bytes) -> bytes:
        return await self.log.answer(sender, body)

    def _raw(self, sender: HostId, _: str, body: bytes) -> None:
        self.log.receive(sender, body)

    def _send(self, to: HostId, data: bytes) -> bool:
        return self.messenger.raw("log", to, data)

    async def _ask(self, to: HostId, data: bytes, seconds: float) -> bytes:
        return await self.messenger.ask("log", to, data, seconds)

    async def start(self) -> None:
        await self.links.open("127.0.0.1:0", self.messenger.received)
        self.shared[self.name] = (self.links.address, self.links.public_key)
        while len(self.shared) < len(NAMES):  # noqa: ASYNC110  the others are processes
            await asyncio.sleep(0.05)
        for other, (address, key) in self.shared.items():
            if other != self.name:
                self.links.know(HostId(other), address, key)
        self.log.hosts([HostId(name) for name in NAMES])
        await self.log.start()
        while self.log.leader is None:  # noqa: ASYNC110  nothing else tells
            await asyncio.sleep(0.05)

    async def alone(self) -> tuple[list[float], float]:
        """Milliseconds of each command that is proposed alone, and the hops of one."""
        took, before = [], self.disk.hops
        for _ in range(ALONE):
            began_s = time.monotonic()
            await self.log.propose(COMMAND, 30.0)
            took.append(1e3 * (time.monotonic() - began_s))
        return took, (self.disk.hops - before) / ALONE

    async def many(self, at_once: int, seconds: float) -> float:
        """Commands a second of so many proposers."""
        end_s, done = time.monotonic() + seconds, 0

        async def proposer() -> None:
            nonlocal done
            while time.monotonic() < end_s:
                await self.log.propose(COMMAND, 30.0)
                done += 1

        await asyncio.gather(*(proposer() for _ in range(at_once)))
        return done / seconds


async def _no_message(_sender: HostId, _plugin: str, _body: bytes) -> bool:
    return True


async def _host(name: str, folder: str, shared: Any, said: Any, todo: Any) -> None:
    host = LogHost(name, folder, shared)
    await host.start()
    said.put((name, str(host.log.leader)))
    loop = asyncio.get_running_loop()
    while (order := await loop.run_in_executor(None, todo.get)) is not None:
        said.put(await host.alone() if order == "alone" else await host.many(*order))


def _process(*given: Any) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    asyncio.run(_host(*given))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    json_option(parser)
    args = parser.parse_args()
    print_head(" | ".join(TITLES))
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        shared, said = manager.dict(), context.Queue()
        todo = {name: context.Queue() for name in NAMES}
        hosts = [context.Process(target=_process, args=(name, folder, shared, said, todo[name])) for name in NAMES]
        for process in hosts:
            process.start()
        leader = [said.get() for _ in NAMES][-1][1]
        follower = next(name for name in NAMES if name != leader)

        def ask(name: str, order: Any) -> Any:
            todo[name].put(order)
            return said.get()

        found: dict[str, list[float]] = {title: [] for title in TITLES}
        for _ in range(args.turns):
            took, hops = ask(leader, "alone")
            cuts = statistics.quantiles(took, n=20)
            rates = [ask(name, (args.at_once, args.seconds)) for name in (leader, follower)]
            for key, value in zip(found, (cuts[9], cuts[18], hops, *rates), strict=True):
                found[key].append(round(value, 2))
            print("| " + " | ".join(f"{values[-1]:g}" for values in found.values()) + " |", flush=True)
        for name in NAMES:
            todo[name].put(None)
        for process in hosts:
            process.join()
        keep({key: statistics.median(values) for key, values in found.items()}, args.json)


if __name__ == "__main__":
    main()

"""Whole logs of several hosts on one virtual clock: a network, disks, and a messenger that asks twice when in doubt."""

import asyncio
import functools
import os
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agent.raft.service import Consensus, LeaderSettings
from chaos.crowds.memory_disk import MemoryDisk
from covey.core.errors import Refused
from covey.core.ids import HostId
from covey.ports.env import Env
from tests.virtual_time import play

R = TypeVar("R")


def virtual(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is played in virtual time."""

    @functools.wraps(story)
    def test(**fixtures: Any) -> None:
        play(story(**fixtures))

    return test


class Quiet:
    """A log that keeps what went wrong."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def debug(self, event: str, **fields: Any) -> None: ...
    def info(self, event: str, **fields: Any) -> None: ...
    def warning(self, event: str, **fields: Any) -> None:
        self.warnings.append(event)

    def error(self, event: str, **fields: Any) -> None:
        self.errors.append(event)


class TimedDisk(MemoryDisk):
    """A write takes a few milliseconds, and happens when it is over."""

    refuses = 0
    """The error number with which writes are refused; 0: none are. A refused append leaves a part of itself behind."""

    async def append(self, name: str, data: bytes) -> None:
        await asyncio.sleep(0.001 + self.rng.random() * 0.004)
        if self.refuses:
            await super().append(name, self._torn(data))
            raise OSError(self.refuses, os.strerror(self.refuses))
        await super().append(name, data)

    async def replace(self, name: str, data: bytes) -> None:
        await asyncio.sleep(0.002 + self.rng.random() * 0.006)
        if self.refuses:
            raise OSError(self.refuses, os.strerror(self.refuses))
        await super().replace(name, data)


class Clock:
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def wall_s(self) -> float:
        return 0.0

    def boot_s(self) -> float:
        return self.now_s()

    def cpu_s(self) -> float:
        return 0.0


class Member:
    """One host: its disk survives a kill, the rest does not. The state is the list of commands, a result its length."""

    def __init__(self, rack: "Rack", name: HostId) -> None:
        self.rack, self.name = rack, name
        self.disk = TimedDisk(random.Random(f"{rack.seed}{name}"))
        self.up = False

    async def start(self) -> None:
        rng = random.Random(self.rack.rng.random())
        self.tasks: list[asyncio.Task[Any]] = []
        self.quiet = Quiet()
        self.changes: list[tuple[int, HostId | None]] = []
        self.commands: list[str] = []
        self.restored = 0
        nothing: Any = None
        env = Env(
            host=self.name,
            clock=Clock(),
            rng=rng,
            entropy=rng.randbytes,
            spawn=self._spawn,
            log=self.quiet,
            datagrams=nothing,
            links=nothing,
            bytes=nothing,
            disk=self.disk,
            processes=nothing,
            probes=nothing,
            pages=nothing,
            run_dir="/run",
        )
        self.log = Consensus(env, self.name, self.rack.settings, self._send, self._ask, self._changed)
        self.log.bind(self.apply, lambda: "\n".join(self.commands).encode(), self.restore)
        self.up = True
        self.log.hosts([HostId(name) for name in self.rack.members])
        await self.log.start()

    def _spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> object:
        task = asyncio.get_running_loop().create_task(work, name=name)
        tasks, quiet = self.tasks, self.quiet
        tasks.append(task)
        task.add_done_callback(lambda done: self._ended(done, tasks, quiet))
        return task

    def _ended(self, task: "asyncio.Task[Any]", tasks: "list[asyncio.Task[Any]]", quiet: Quiet) -> None:
        tasks.remove(task)
        if not task.cancelled() and task.exception():
            quiet.errors.append(f"{task.get_name()}: {task.exception()}")

    def _changed(self, term: int, leader: HostId | None) -> None:
        self.changes.append((term, leader))

    def apply(self, index: int, command: bytes) -> bytes:
        self.commands.append(command.decode())
        return str(len(self.commands)).encode()

    def restore(self, data: bytes) -> None:
        self.restored += 1
        self.commands = data.decode().split("\n") if data else []

    def _send(self, to: HostId, data: bytes) -> bool:
        self.rack.carry(self.name, to, lambda member: member.log.receive(self.name, data))
        return True

    async def _ask(self, to: HostId, data: bytes, seconds: float) -> bytes:
        """Ask as a messenger does: again every 0.2 s, so that one question is often answered twice."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()

        async def answering(member: Member) -> None:
            try:
                body = await member.log.answer(self.name, data)
            except Refused as no:
                refused = no
                self.rack.carry(to, self.name, lambda _: None if answer.done() else answer.set_exception(refused))
                return
            self.rack.carry(to, self.name, lambda _: None if answer.done() else answer.set_result(body))

        end_s = loop.time() + seconds
        while loop.time() < end_s:
            self.rack.carry(self.name, to, lambda member: member._spawn("answer", answering(member)))
            await asyncio.wait([answer], timeout=min(0.2, end_s - loop.time()))
            if answer.done():
                return answer.result()
        raise TimeoutError

    def kill(self) -> None:
        self.up = False
        self.log._stopping = True
        if self.log._timer:
            self.log._timer.cancel()
        for task in list(self.tasks):
            task.cancel()

    async def stop(self) -> None:
        await self.log.stop()
        self.kill()


class Rack:
    def __init__(self, *names: str, voters: int = 3, seed: int = 1, **given: Any) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.settings = LeaderSettings(voters=tuple(names[:voters]), **given)
        self.members = {name: Member(self, HostId(name)) for name in names}
        self.loss = 0.0
        self.apart: set[str] = set()
        """The hosts that reach nobody."""

    async def __aenter__(self) -> "Rack":
        for member in self.members.values():
            await member.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        for member in self.members.values():
            if member.up:
                await member.stop()
        await asyncio.sleep(3)

    def carry(self, sender: str, to: str, hand_over: Callable[[Member], Any]) -> None:
        member = self.members.get(to)
        if member is None or {sender, to} & self.apart or self.rng.random() < self.loss:
            return

        def arrive() -> None:
            if member.up and not {sender, to} & self.apart:
                hand_over(member)

        asyncio.get_running_loop().call_later(0.0005 + self.rng.random() * 0.003, arrive)

    def leader(self) -> Member | None:
        found = [m for m in self.members.values() if m.up and m.log.is_leader]
        assert len(found) <= 1, "two hosts may act as leader"
        return found[0] if found else None

    async def led(self, patience_s: float = 5.0) -> Member:
        end_s = asyncio.get_running_loop().time() + patience_s
        while (found := self.leader()) is None:
            assert asyncio.get_running_loop().time() < end_s, "nobody leads"
            await asyncio.sleep(0.02)
        return found

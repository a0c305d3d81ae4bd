"""People with `agentctl`: they ask any agent anything at any time, and half of what they type is wrong.

Once in a while a person asks an agent that runs: submits a short job with an environment, cancels one, reads output,
lists what is where, makes a volume and forgets it, sets a quota, names voters that do not exist. An agent answers, or
refuses in words (`Refused`, `NoLeader`, `OutcomeUnknown`); any other exception is a bug, whatever was asked.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from chaos.actors.workload import AgentLink
from chaos.askers import as_root
from chaos.rack_seen import RackSeen
from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.ids import JobId
from covey.ports.env import Env
from covey.ports.processes import Command
from covey.simulated.tensor_streams import TensorStream
from covey.tensors.aggregator.rounds import Superseded
from plugins.scheduler.machine.log.jobs import OVER

ASKED_S = (0.05, 1.5)
"""Least and most seconds between two questions."""
JOBS_MAX = 6
"""Most jobs that one crowd of people submits."""
Question = tuple[str, dict[str, Any]]
"""Command and arguments of a question."""


class Askers(ABC):
    """A crowd that asks agents: from when it is made until the virtual second `until_s`, it asks one agent that runs,
    chosen at random, one question, then pauses between the least and the most seconds of `asked_s`. `jobs`: each of its
    jobs that was accepted -> the states in which it may end."""

    asked_s: ClassVar[tuple[float, float]] = ASKED_S

    def __init__(self, rack: RackSeen, until_s: float) -> None:
        self.rack, self.rng, self.until_s = rack, rack.rng, until_s
        self.jobs: dict[JobId, tuple[str, ...]] = {}
        self.refused = self.submitted = 0
        self._next()

    def _next(self) -> None:
        world = self.rack.world
        if world.now < self.until_s:
            world.at(world.now + self.rng.uniform(*self.asked_s), self._ask)

    def _ask(self) -> None:
        names = [name for name in self.rack.alive() if self.rack.began(name)]
        if names:
            self.ask_one(self.rng.choice(names))
        self._next()

    @abstractmethod
    def ask_one(self, name: str) -> None:
        """Ask this agent something."""


class People(Askers):
    """People who may do everything."""

    def __init__(self, rack: RackSeen, until_s: float) -> None:
        self.asked = 0
        super().__init__(rack, until_s)

    def ask_one(self, name: str) -> None:
        self.ask(name, *self.rng.choice(QUESTIONS)(self))

    def ask(self, name: str, command: str, arguments: Mapping[str, Any]) -> None:
        agent, process = self.rack.agents[name], self.rack.hosts[name].agent
        assert process is not None
        if command in agent.commands:
            self.asked += 1
            process.spawn(f"people ask {command}", self._answered(name, command, arguments))

    async def _answered(self, name: str, command: str, arguments: Mapping[str, Any]) -> None:
        try:
            answer = await self.rack.agents[name].commands[command](as_root(arguments))
        except (Refused, NoLeader, OutcomeUnknown):
            self.refused += 1
        except OSError as error:  # in a process's own task the world would take it for its disk
            self.rack.saw_wrong(f"{command} of {name} with {arguments} ended with {error!r}")
        else:
            if command == "scheduler.submit" and "key" in arguments:  # others are larger than the rack
                self.jobs[JobId(answer.id)] = OVER

    # ---- what they ask ----

    def job(self) -> str:
        """Id of a job of theirs, of another person, or of no job."""
        known = [*self.jobs, *(f"j{number}" for number in range(1, 4)), "j999", "?"]
        return str(self.rng.choice(known))

    def submit(self) -> Question:
        if self.submitted >= JOBS_MAX:
            return self.wrong_job()
        self.submitted += 1
        spec = {
            "argv": [self.rng.choice(("sleeper", "writer", "bungler")), f"{self.rng.uniform(1, 20):.1f}"],
            "tenant": self.rng.choice(("red", "blue")),
            "workers": self.rng.randint(1, 2),
            "gpus_per_worker": self.rng.choice((0, 1)),
            "cwd": "/",
            "env": {"API_KEY": "k" * self.rng.randint(1, 40)} if self.rng.random() < 0.8 else {},
            "on_lost": self.rng.choice(("heal", "keep")),
        }
        return "scheduler.submit", {"spec": spec, "key": f"people-{self.rack.world.seed}-{self.submitted}"}

    def wrong_job(self) -> Question:
        nested: list[Any] = []
        for _ in range(2000):
            nested = [nested]
        wrong: tuple[dict[str, Any], ...] = (
            {"spec": {"argv": ["sleeper", "1"], "workers": "many", "cwd": "/"}},
            {"spec": {"argv": ["sleeper", "1"], "wrokers": 2, "cwd": "/"}},
            {"spec": {"workers": 2}},
            {"spec": {"argv": nested, "cwd": "/"}},
            {"spec": {"argv": ["sleeper", "1"], "grace_s": float("nan"), "cwd": "/"}},
            {"spec": {"argv": ["sleeper", "1"], "cwd": "/"}, "key": "short"},
            {"spec": {"argv": ["sleeper", "1"], "workers": 4096, "cwd": "/"}},
            {},
        )
        return "scheduler.submit", self.rng.choice(wrong)

    def cancel(self) -> Question:
        mine = [*self.jobs, JobId("j999")]
        return "scheduler.cancel", {"id": str(self.rng.choice(mine)), "by": "people"}

    def waiting(self) -> Question:
        """Another place, another time limit, another start of a job; nobody holds one for ever."""
        value: Any = self.rng.choice((True, False, None, "up", -1, 1e300, 60.0, "3-7", "0-", [1]))
        verb, field = self.rng.choice(
            (("release", "x"), ("priority", "up"), ("update", "time_limit_s"), ("requeue", "hold"), ("cancel", "tasks"))
        )
        if field == "hold" and value is True:
            value = "yes"
        if field == "time_limit_s" and value in (60.0, True):
            value = 3600.0
        return f"scheduler.{verb}", {"id": self.job(), field: value}

    def list_of(self) -> Question:
        value: Any = self.rng.choice(("held", "runing", "*", "-time", "3", "", "a,b", "0", 7))
        field = self.rng.choice(("state", "sort", "name", "user", "tenant", "limit", "mine"))
        return "scheduler.jobs", {field: value}

    def logs(self) -> Question:
        numbers: tuple[Any, ...] = (0, 0, 0, 1, -5, "tail", None, 10**30)
        asked = {name: self.rng.choice(numbers) for name in ("rank", "offset", "limit") if self.rng.random() < 0.5}
        return "scheduler.logs", {"id": self.job(), **asked}

    def of_a_job(self) -> Question:
        return self.rng.choice(("scheduler.job", "agent.why", "agent.story")), {"id": self.job()}

    def lists(self) -> Question:
        command = self.rng.choice(
            (
                "agent.hosts",
                "agent.gpus",
                "agent.rack_slabs",
                "agent.rack_volumes",
                "agent.rack_tensors",
                "agent.voters",
                "agent.leader",
                "agent.health",
                "scheduler.quotas",
                "scheduler.rack",
                "memory.volumes",
            )
        )
        return command, {}

    def slabs(self) -> Question:
        return "memory.slabs", {"all": True}

    def jobs_of_all(self) -> Question:
        return "scheduler.jobs", {"all": self.rng.random() < 0.5}

    def tensors(self) -> Question:
        return "aggregator.tensors", {"host": self.rng.choice([*self.rack.hosts, "h99"])}

    def quota(self) -> Question:
        gpus: Any = self.rng.choice((0, 2, 8, None, -1, "all", 1 << 70))
        return "scheduler.quota_set", {"tenant": self.rng.choice(("green", "*", "", 7)), "gpus": gpus}

    def give_up(self) -> Question:
        """Give up a host that does not exist: a person who gives up a host that is only cut off has its ranks run
        twice, as the command says."""
        return "scheduler.give_up", {"id": self.rng.choice(("h99", "", 5))}

    def volume(self) -> Question:
        """A volume of their own, made, given back, asked for in another size, or forgotten."""
        command = self.rng.choice(("create", "create", "remove", "give_up"))
        name: Any = self.rng.choice(("theirs", "theirs", "theirs", "none", "", 5))
        size: Any = self.rng.choice((1 << 16, 1 << 16, "64 KiB", "much", -1, True, None, 1 << 60))
        return f"memory.{command}", {"volume": name, "size": size}

    def voters(self) -> Question:
        """Change voters in a way that has no effect: hosts that do not exist, or vote already, or words that are no
        names."""
        wrong: tuple[dict[str, Any], ...] = (
            {"add": "h99"},
            {"remove": "h99"},
            {"add": next(iter(self.rack.hosts))},
            {"add": "?!", "force": "yes"},
        )
        return "agent.change_voters", self.rng.choice(wrong)


QUESTIONS: tuple[Callable[[People], Question], ...] = (
    People.submit,
    People.submit,
    People.wrong_job,
    People.cancel,
    People.waiting,
    People.list_of,
    People.logs,
    People.logs,
    People.of_a_job,
    People.lists,
    People.lists,
    People.slabs,
    People.jobs_of_all,
    People.tensors,
    People.quota,
    People.give_up,
    People.volume,
    People.volume,
    People.voters,
)


# ---- what their jobs do ----

HEAD_BYTES, PART_BYTES, PARTS = 2000, 1000, 3
"""Sizes of what a `writer`'s log keeps: its beginning, then a ring of parts."""
LINE = b"step 1: all is well, loss 0.25\n"


async def writer(env: Env, command: Command) -> int:
    """Write for `SECONDS`, as a shim stores it: a head for good, then a ring whose oldest part is deleted. What the
    disk refuses is dropped."""
    name = command.output.partition("/jobs/")[2]
    end_s, starts, at = env.clock.now_s() + float(command.argv[1]), [0], 0
    while env.clock.now_s() < end_s:
        await asyncio.sleep(env.rng.uniform(0.01, 0.1))
        file = f"jobs/{name}.{starts[-1]:015d}" if starts[-1] else f"jobs/{name}"
        with contextlib.suppress(OSError):
            await env.disk.append(file, LINE * env.rng.randint(1, 10))
            at = starts[-1] + len(await env.disk.read(file) or b"")
            if at - starts[-1] >= (PART_BYTES if starts[-1] else HEAD_BYTES):
                starts.append(at)
                while len(starts) > PARTS + 1:
                    await env.disk.delete(f"jobs/{name}.{starts.pop(1):015d}")
    return 0


async def bungler(env: Env, command: Command) -> int:
    """A training script with mistakes: a name that cannot travel, and a tensor of another shape on every rank."""
    agent = AgentLink(env, command)
    tensors = TensorStream(env.bytes, env.spawn, agent.job, agent.rank, agent.world_size, agent.lost, env.entropy)
    agent.moved = tensors.moved
    env.spawn("agent link", agent.run())
    with contextlib.suppress(ValueError):
        await tensors.push_pull("w" * 500, bytes(4))
    try:
        async with asyncio.timeout(float(command.argv[1])):
            await tensors.push_pull("w", bytes(4 * (1 + agent.rank)))
            await tensors.push_pull("w", bytes(4 * (1 + agent.rank)))
    except (RuntimeError, TimeoutError, Superseded):
        return 1
    return 0

"""A change of an elastic job of AddVector (`chaos.actors.adder`) is struck at one of its messages: who sent it, or who
gets it, is killed, be it a process of the job, what starts it or sums for it, or an agent.

A seed has one kind of change and makes it several times, there and back: fewer processes and more, unlike shares of
ranks, other owners of tables, processes on other hosts. In each change the next message is struck, of as many as passed
in one that nothing disturbed: 300 to 1,200, so 1,200 seeds go through all of them (`of_seed`). Nobody is killed who
alone has the state. No job is started twice, each change comes true in the end, and every element is
DELTA x steps x ranks.
"""

import contextlib
from collections.abc import Sequence

from chaos import faults
from chaos.faults import Kill
from chaos.rackworld import SimRack
from chaos.stories.classes import COPY_S, known, state
from chaos.stories.rearranged import CALM_S, OWNED_S, STARTS_S, as_said, calm, check_end, with_state
from chaos.story import ended
from chaos.wisher import Wisher, counts_of
from chaos.world.host import SimProcess
from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.ids import HostId, JobId
from plugins.facts import WantedArrangement
from plugins.scheduler.machine.log.jobs import OVER, Job
from plugins.scheduler.policy.carrying import is_equal, shares_of

SETTINGS = {"scheduler": {"elastic_grow_after_s": 10_000.0}}
KINDS = ("scaled", "shares", "owners", "processes")
FEWEST, MOST = 2, 6
"""Least number of processes, and their greatest, which is that of ranks."""
CHANGES = 8
"""Changes of a seed."""
STEPS, FLOATS = 200, 40
BACK_S = 1.0
"""Seconds after which a killed agent runs again."""
ANSWER_S = 10.0
TRIES = 6
"""How often a change is asked for: who was asked may have been killed."""
HELD_S = 5.0
"""Seconds between two tries: what hosts reserved for somebody who was killed is free again after some of these."""
IN_FORCE_S = 1.0
"""Seconds after the log has a change within which the job's processes obey it, at their next step."""


def play(rack: SimRack) -> None:
    rack.settle()
    spec = {"argv": ["adder", str(STEPS), str(FLOATS)], "tenant": "red", "workers": FEWEST, "workers_max": MOST}
    job = rack.submit({**spec, "gpus_per_worker": 1, "cwd": "/"}, f"struck-{rack.world.seed}")
    rack.until(lambda: calm(rack, job), STARTS_S, "all processes have begun")
    changes, struck = Changes(rack, job), Struck(rack, job)
    kind, side, first = of_seed(rack.world.seed)
    changes.make("processes", 0)
    for number in (0, 1):
        struck.off()
        changes.make(kind, number)
        rack.run(IN_FORCE_S)
    messages = struck.passed
    for number in range(first, first + CHANGES):
        struck.at(number % messages, side)
        if not changes.make(kind, number):
            break
        rack.run(IN_FORCE_S)
        struck.off()
    ended(rack, {job: ("done",)}, 400.0)
    check_end(rack, job, STEPS, False)


def of_seed(seed: int) -> tuple[str, str, int]:
    """The kind of change, whom its messages strike, and the first message."""
    ways = [(kind, side) for side in ("sender", "receiver") for kind in KINDS]
    return (*ways[seed % len(ways)], seed // len(ways) * CHANGES)


class Struck:
    """Counts messages, and kills who sends or who gets one of them."""

    def __init__(self, rack: SimRack, job: JobId) -> None:
        self._rack, self._job = rack, job
        self._left, self._side = -1, ""
        """How many messages pass before the one that is struck; -1: none is."""
        self.passed = 0
        """Messages since `at` or `off`."""
        rack.world.on_message.append(self._passes)

    def at(self, number: int, side: str) -> None:
        """Strike the message of this number from now on, or the first one after it of which somebody may be killed."""
        self._left, self._side, self.passed = number, side, 0

    def off(self) -> None:
        """Strike nothing from now on."""
        self._left, self.passed = -1, 0

    def _passes(self, sender: SimProcess, receiver: SimProcess) -> None:
        self.passed += 1
        if self._left > 0:
            self._left -= 1
        elif self._left == 0:
            self._left = -1 if self._is_killed(sender if self._side == "sender" else receiver) else 0

    def _is_killed(self, process: SimProcess) -> bool:
        """Kill it, if some process that has the state is left."""
        host = process.host.name
        if not process.alive or host not in self._rack.hosts:
            return False
        if process is process.host.agent:
            faults.strike(self._rack.world, Kill("agent", host, BACK_S))
            return True
        dies = self._rank_of(process)
        left = [each for each in with_state(self._rack, self._job) if each[0] != host or dies not in (None, each[1])]
        if not left:
            return False
        self._rack.world.mark("fault", process.name, "killed at a message")
        process.signal(9)
        return True

    def _rank_of(self, process: SimProcess) -> int | None:
        """The first rank of a process of the job; None: it is none."""
        command = process.host.commands.get(process.id.pid)
        rank = None if command is None else command.env.get("COVEY_RANK")
        return None if rank is None else int(rank)


class Changes:
    """What somebody wants of the job."""

    def __init__(self, rack: SimRack, job: JobId) -> None:
        self._rack, self._job = rack, job
        self._wisher = Wisher(rack)

    def make(self, kind: str, number: int) -> bool:
        """Ask for the change of this number until the job is so, and all its processes have the state. Returns whether
        it is; False: the job is over."""
        for _ in range(TRIES):
            self._ask(kind, number)
            self._rack.until(lambda: calm(self._rack, self._job), CALM_S, f"all processes of {self._job} run again")
            if state(self._rack, self._job) in OVER:
                return False
            if self._is_so(kind, number):
                return True
            self._rack.run(HELD_S)
        raise AssertionError(f"{self._job} is not changed ({kind}, {number}), asked {TRIES} times")

    def _ask(self, kind: str, number: int) -> None:
        """Ask at any agent, and give the answer some time."""
        rack, job = self._rack, known(self._rack, self._job)
        rack.until(lambda: bool(self._knowing()), COPY_S, f"some agent knows {self._job}")
        name = rack.rng.choice(self._knowing())
        if kind == "scaled":
            with contextlib.suppress(TimeoutError, NoLeader, OutcomeUnknown, Refused):
                rack.ask(name, "scheduler.scale", {"id": self._job, "workers": scaled(number)}, ANSWER_S)
            return
        ask = self._wisher.ask(name, {self._job: wanted(job, kind, number, self._hosts())})
        rack.run_until(lambda: ask in self._wisher.answers, ANSWER_S)

    def _is_so(self, kind: str, number: int) -> bool:
        job = known(self._rack, self._job)
        if kind == "scaled":
            return job.processes == scaled(number)
        wants = wanted(job, kind, number, self._hosts())
        match kind:
            case "processes":
                return counts_of(job) == wants.processes
            case "owners":
                self._rack.run_until(lambda: as_said(self._rack, self._job), OWNED_S)
                return job.start.owners == wants.owners and as_said(self._rack, self._job)
            case _:
                carried = job.start.carried
                return shares_of(carried, job.start.places) == wants.shares if wants.shares else is_equal(carried)

    def _knowing(self) -> list[str]:
        """Agents whose copy of the log has the job: one that has just begun reads it first."""
        names = [name for name in self._rack.alive() if self._rack.began(name)]
        plugins = [(name, self._rack.plugin(name, "scheduler")) for name in names]
        return [name for name, plugin in plugins if plugin is not None and self._job in plugin.queue.jobs]

    def _hosts(self) -> list[HostId]:
        return sorted(map(HostId, self._rack.hosts))


def scaled(number: int) -> int:
    return FEWEST if number % 2 else MOST


def wanted(job: Job, kind: str, number: int, hosts: Sequence[HostId]) -> WantedArrangement:
    """What the change of this number makes of the job, there or back, as it is now."""
    home = next(place.host for place in job.start.places if 0 in place.ranks)  # its process 0 stays
    first, second, third, *_ = (host for host in hosts if host != home)
    processes, shares, owners = dict[HostId, int](), dict[HostId, int](), None
    if kind == "processes":
        processes = {home: 1, second: 1, third: 2} if number % 2 else {home: 2, first: 1, second: 1}
    elif kind == "owners":
        owners = tuple(hosts[(table + number) % len(hosts)] for table in range(job.start.tables))
    elif kind == "shares" and number % 2 == 0:
        shares = counts_of(job)
        shares[max(shares.keys() - {home}, default=home)] += job.spec.world_size - sum(shares.values())
    return WantedArrangement(job.grant.epoch, job.healing.healed, processes, shares, owners)

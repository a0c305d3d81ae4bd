"""The three machines of the plugin on several hosts, without bytes: messages in an order that a seed chooses, some
lost, late or twice, and jobs whose iterations and work are numbers."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from covey.core.events import Heard, LogEvent, Publish, Send, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from plugins.aggregator.machine.coordinator import JobCoordinator, JobStepped
from plugins.aggregator.machine.directory import Directory, RankLost
from plugins.aggregator.machine.events import (
    AskQuestion,
    GangPlaced,
    Keep,
    QuestionAnswered,
    RackUpdated,
    TellRanks,
    Unplaced,
)
from plugins.aggregator.machine.owner import Owner
from plugins.aggregator.machine.process_words import ForgetJob, LoadChanged, ProcessDown, ProcessUp, Served, ServeJob
from plugins.aggregator.messages import (
    AggregatorSettings,
    CycleHere,
    GetOwner,
    KnownOwner,
    Probe,
    Question,
    Serving,
    TensorsHere,
    WorkCounters,
    WorkOf,
)
from plugins.aggregator.messages import (
    Any as Word,
)
from plugins.aggregator.policy import Candidate
from plugins.facts import Place


@dataclass
class Script:
    """The true figures of a job."""

    job: JobId
    period_us: int
    work_us: int
    places: tuple[Place, ...]
    grant: int = 1
    step: int = 0
    left_us: float = 0.0
    slowed: Callable[[str], float] = lambda host: 1.0
    """The factor by which an iteration is longer when its tensors are summed on this host."""


class Agent:
    def __init__(self, name: str, settings: AggregatorSettings, entropy: Callable[[int], bytes]) -> None:
        self.name = HostId(name)
        self.coordinator = JobCoordinator(self.name, entropy, settings)
        self.owner = Owner(settings, me=self.name)
        self.directory = Directory(self.name)
        self.aggd: dict[JobId, tuple[int, int, int]] = {}
        """The epoch, the microseconds worked and the iterations of each job."""


class MiniRack:
    def __init__(self, seed: int, hosts: int, loss: float = 0.0, disorder: float = 0.0, **settings: Any) -> None:
        self.rng, self.now_s, self.loss = random.Random(seed), 0.0, loss
        self.disorder = disorder
        """The part of all messages that arrives again, and the part that is many seconds late."""
        self.settings = msgspec.structs.replace(AggregatorSettings(), **settings)
        self.agents = {f"h{n}": Agent(f"h{n}", self.settings, self.rng.randbytes) for n in range(1, hosts + 1)}
        self.gone: set[str] = set()
        self.scripts: dict[JobId, Script] = {}
        self.over: set[JobId] = set()
        self.notes: list[LogEvent] = []
        self.moves: list[tuple[JobId, HostId]] = []
        """Every assignment that ranks were told, in order."""
        self.gossip: tuple[Candidate, ...] | None = None
        """The view of aggregators to which gossip has stopped; None: how they were a second ago at most."""
        self._post: list[tuple[float, Callable[[], None]]] = []
        for name in self.agents:
            self.dispatch(name, "owner", ProcessUp(f"{name}:1", {}))

    # ---- what happens ----

    def start(self, job: str, period_us: int, work_us: int, hosts: Sequence[str] = ("h1",)) -> Script:
        places = tuple(Place(HostId(host), (rank,), ()) for rank, host in enumerate(hosts))
        script = self.scripts[JobId(job)] = Script(JobId(job), period_us, work_us, places)
        for name in self.agents:
            self.later(self.rng.uniform(0, 0.5), partial(self.tell_placed, name, script))
        return script

    def tell_placed(self, name: str, script: Script) -> None:
        for machine in ("owner", "directory", "coordinator"):
            self.dispatch(name, machine, GangPlaced(script.job, script.grant, len(script.places), script.places))

    def end(self, job: str) -> None:
        script = self.scripts.pop(JobId(job))
        self.over.add(script.job)
        for name in self.agents:
            for machine in ("owner", "directory", "coordinator"):
                self.dispatch(name, machine, Unplaced(script.job, script.grant, True))

    def kill_aggd(self, host: str) -> None:
        self.agents[host].aggd.clear()
        self.dispatch(host, "owner", ProcessDown("killed"))
        self.later(1.0, lambda: self.dispatch(host, "owner", ProcessUp(f"{host}:1", {})))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.1
            self._train(0.1)
            while due := [at for at, (when_s, _) in enumerate(self._post) if when_s <= self.now_s]:
                self._post.pop(self.rng.choice(due))[1]()
                self.check()
            if round(self.now_s * 10) % 10 == 0:
                self._second()

    def until(self, reached: Callable[[], bool], within_s: float = 120.0) -> None:
        end_s = self.now_s + within_s
        while not reached():
            assert self.now_s < end_s, self.notes[-30:]
            self.run(1.0)

    def _second(self) -> None:
        rack = RackUpdated(frozenset(HostId(host) for host in self.gone), self.gossip or self.candidates())
        for name, agent in self.agents.items():
            idle = frozenset(job for job, (_, _, iterations) in agent.aggd.items() if not iterations)
            self.dispatch(name, "owner", LoadChanged(0.0, idle))
            for machine in ("coordinator", "directory", "owner"):
                self.dispatch(name, machine, rack)
        for script in self.scripts.values():
            self._complain(script)
        self.check()

    def _complain(self, script: Script) -> None:
        """Let a rank that cannot use its aggregator say so, each second."""
        for place in script.places:
            known = self.agents[place.host].directory.current(script.job)
            if known is not None and self.agents[known.owner].aggd.get(script.job, (0, 0, 0))[0] != known.epoch:
                self.dispatch(place.host, "directory", RankLost(script.job, known.epoch, "closed the connection"))

    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(self._candidate(agent) for agent in self.agents.values())

    def _candidate(self, agent: Agent) -> Candidate:
        cycle = agent.owner.ledger.cycle
        jobs = len(agent.owner.jobs)
        return Candidate(agent.name, agent.name in self.gone, 0.0, jobs, 0.0, cycle.us, cycle.used_us, cycle.lanes)

    def _train(self, seconds: float) -> None:
        for script in list(self.scripts.values()):
            owner = self.owner_of(script.job)
            if owner is None:
                continue
            script.left_us += seconds * 1e6
            period_us = int(script.period_us * script.slowed(owner))
            while script.left_us >= period_us:
                script.left_us -= period_us
                script.step += 1
                aggd = self.agents[owner].aggd
                epoch, busy_us, iterations = aggd[script.job]
                aggd[script.job] = epoch, busy_us + script.work_us, iterations + 1
                coordinator = script.places[0].host
                self.dispatch(coordinator, "coordinator", JobStepped(script.job, script.grant, script.step, period_us))

    # ---- what is true ----

    def owner_of(self, job: JobId) -> HostId | None:
        """The host to which the ranks push, if the job is summed there."""
        told = [agent.directory.current(job) for agent in self.agents.values()]
        newest = max((one for one in told if one is not None), key=lambda one: one.epoch, default=None)
        if newest is None or self.agents[newest.owner].aggd.get(job, (0, 0, 0))[0] != newest.epoch:
            return None
        return newest.owner

    def owners(self, job: str) -> list[str]:
        return [name for name, agent in self.agents.items() if JobId(job) in agent.owner.jobs]

    def check(self) -> None:
        served: set[tuple[JobId, int]] = set()
        for agent in self.agents.values():
            for machine in (agent.coordinator, agent.owner, agent.directory):
                machine.check()
            for job, (epoch, _, _) in agent.aggd.items():
                assert (job, epoch) not in served, f"{job} is summed twice under one epoch"
                served.add((job, epoch))

    def said(self, event: str) -> list[str]:
        return [f"{note.subject}: {note.reason}" for note in self.notes if note.event == event]

    # ---- how it happens ----

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self._post.append((self.now_s + seconds, what))

    def dispatch(self, name: str, machine: str, event: Any) -> None:
        for action in getattr(self.agents[name], machine).handle(event, self.now_s):
            self._perform(name, machine, action)

    def _perform(self, name: str, machine: str, action: Any) -> None:
        delay_s = self.rng.uniform(0.001, 0.3)
        agent = self.agents[name]
        match action:
            case Send():
                if self.rng.random() < self.loss:
                    self.later(
                        action.deadline_s, lambda: self.dispatch(name, machine, Undelivered(action.to, action.message))
                    )
                else:
                    message = msgspec.msgpack.decode(msgspec.msgpack.encode(action.message), type=Word)
                    for _ in range(1 + (self.rng.random() < self.disorder)):
                        late_s = 12.0 * self.rng.random() if self.rng.random() < self.disorder else delay_s
                        self.later(late_s, lambda: self._hear(action.to, agent.name, message))
            case AskQuestion():
                self.later(delay_s, lambda: self.dispatch(name, machine, self._answered(action)))
            case SetTimer():
                self.later(action.after_s, lambda: self.dispatch(name, machine, action.event))
            case ServeJob():
                self.later(delay_s, lambda: self._serve(agent, action))
            case ForgetJob():
                if agent.aggd.get(action.job, (0, 0, 0))[0] <= action.epoch:
                    agent.aggd.pop(action.job, None)
            case TellRanks():
                self.moves.append((action.assigned.job, action.assigned.owner))
            case LogEvent():
                self.notes.append(action)
            case Keep() | Publish():
                pass
            case _:
                raise AssertionError(action)

    def _hear(self, to: HostId, sender: HostId, message: Any) -> None:
        for machine in ("owner", "directory", "coordinator"):
            if isinstance(message, getattr(self.agents[to], machine).takes):
                self.dispatch(to, machine, Heard(sender, message))

    def _serve(self, agent: Agent, action: ServeJob) -> None:
        if agent.owner.jobs.get(action.held.job) == action.held and agent.owner.address:
            agent.aggd[action.held.job] = action.held.epoch, 0, 0
            self.dispatch(agent.name, "owner", Served(action.held.job, action.held.epoch))

    def _answered(self, action: AskQuestion) -> QuestionAnswered:
        return QuestionAnswered(action.to, action.question, self._answer(self.agents[action.to], action.question))

    def _answer(self, agent: Agent, question: Question) -> msgspec.Struct:
        match question:
            case GetOwner():
                return KnownOwner(agent.directory.known.get(question.job))
            case Probe():
                return Serving(agent.owner.serves(question.job, question.epoch))
            case CycleHere():
                return agent.owner.promised()
            case WorkOf():
                epoch, busy_us, iterations = agent.aggd.get(question.job, (0, 0, 0))
                held = agent.owner.jobs.get(question.job)
                if held is None or epoch != question.epoch or held.epoch != epoch:
                    return WorkCounters(False)
                beside = len(agent.owner.jobs) - 1
                return WorkCounters(True, busy_us, iterations, 4, 8, beside, agent.owner.changes, held.demand)
            case TensorsHere():
                raise AssertionError("machines do not ask this")

"""A whole simulated rack: on every host the real `HostAgent` with all its plugins, on simulated ports.

    SimRack(seed, hosts=4) -> start() -> settle() -> submit(...), attach a volume, strike faults -> heal() -> check

What the agents start - supervisors, slab and volume processes, aggregators - are the real programs too, each a process
of its own on its host; only the users' commands are stand-ins (`chaos.actors.workload`). An agent that ends by itself
(a sick disk) is started again after a while, as systemd does; one that a fault killed comes back when the fault says
so.
"""

import asyncio
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.api.gathering import Gathered, words
from agent.config import Config, parse
from agent.host import HostAgent
from agent.jobs.spares.spares import PROGRAM as SPARES
from agent.jobs.supervisor.supervisor import PROGRAM as SUPERVISOR
from agent.keyring.service import FILE as RING
from agent.keyring.service import of_file, unsealed
from agent.raft.machine.raft import Raft
from chaos import faults
from chaos.actors.adder import Adders
from chaos.actors.administrator import Administrator
from chaos.actors.learner import Learners
from chaos.actors.pager import DISK, QUICK, USER, Oracle, Pace, Redundancy, mender, pager, reader
from chaos.actors.people import bungler, writer
from chaos.actors.workload import healer, ring, sleeper, trainer
from chaos.askers import as_root
from chaos.checks.custody import Custody
from chaos.checks.invariants import LogsAgree, OneLeaderPerTerm, invariants_for
from chaos.knobs import patience_s
from chaos.world.host import SimHost, SimProcess, UserProgram
from chaos.world.world import World
from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.events import Message
from covey.core.ids import HostId, JobId
from covey.core.units import parse_size
from covey.ports.env import Env
from plugins.base import Plugin, Program
from plugins.memory.policy.settings import MemorySettings
from plugins.registry import PLUGINS

SETTLE_S = 30.0
"""Seconds within which a rack that nothing disturbs sees all its hosts and has a leader."""
Tree = dict[str, Any]
SMALL_SLABS: Tree = {"slab": "64 KiB", "page": "4 KiB", "spill_queue": "1 MiB", "hot_requests_per_s": 5.0}
"""Sizes with which a volume of 1 MiB has 16 slabs, which turn hot within seconds."""
OWN = MemorySettings()
OWN_SLABS: Tree = {key: getattr(OWN, key) for key in SMALL_SLABS}
"""Sizes of agents that are told nothing: slabs of 64 MiB."""
SPREAD = OWN.slab_bytes // parse_size(SMALL_SLABS["slab"])
"""Factor by which a volume of a story must grow to have the same number of those slabs."""


def programs_of(plugins: Sequence[Plugin]) -> Callable[[], Mapping[str, Program]]:
    own = {program.name: program for program in (SUPERVISOR, SPARES)}
    found = own | {program.name: program for plugin in plugins for program in plugin.programs}
    return lambda: found


class SimRack:
    """A simulated rack. `settings` are further sections of every host's agent.toml."""

    def __init__(
        self,
        seed: int,
        hosts: int = 4,
        *,
        gpus: int = 2,
        log: Callable[[str], None] | None = None,
        plugins: Sequence[Plugin] = PLUGINS,
        settings: Tree | None = None,
        quotas: Mapping[str, int] | None = None,
        watched: bool = True,
    ) -> None:
        self.world = World(seed, log=log, programs=programs_of(plugins))
        self.world.replay = f"covey-chaos sim --seed {seed} --hosts {hosts}"
        self.rng = random.Random(f"{seed}/story")
        """Random generator for the story's own choices."""
        self.plugins = plugins
        self.agents: dict[str, HostAgent] = {}
        """The newest agent of every host, alive or not."""
        self.wrong: list[str] = []
        """What workloads saw that must never be seen."""
        self.learners = Learners(self.saw_wrong)
        self.adders = Adders(self.saw_wrong)
        self.accepted: dict[JobId, float] = {}
        """Jobs that were submitted and accepted -> when."""
        self.stale: list[str] = []
        """Pages that were read older than they were acknowledged: allowed after two failures at once only."""
        self.oracles: dict[str, list[Oracle]] = {}
        """Oracles of volumes, by their host."""
        self.spread, self.idles = 1, 0.0
        """For the volumes of pagers that begin from now on: how many times larger they are than their pages in use,
        and how often they are idle (`chaos.actors.pager`)."""
        self.custody: Custody | None = None
        """The custody, set by `forgive`: pages that two failures took may be read older."""
        self.variation = 0
        """Number of the variation of the plan of faults that the seed draws (`chaos.novelty.varied`); 0: as drawn."""
        self.administrator: Administrator | None = None
        """The operator, set by `administered`: files are damaged, and the operator then does what agents advise."""
        self.quotas = dict(quotas or {})
        self.trees: dict[str, Tree] = {}
        """Content of each host's agent.toml."""
        self._slab = str((SMALL_SLABS | (settings or {}).get("memory", {}))["slab"])
        self.beside = int((settings or {}).get("scheduler", {}).get("beside", 0))
        """Most opportunistic jobs on a GPU beside a guaranteed one."""
        self.patience_s = patience_s(settings or {})
        """Seconds added to every bound, for what settings make slower."""
        self.moved: Raft | None = None
        """The Raft core that handled something in the callback that ran last."""
        names = [f"h{number}" for number in range(1, hosts + 1)]
        voters = names[: 5 if hosts >= 7 else 3 if hosts >= 3 else 1]
        self.keys = [random.Random(f"{seed}/gossip key").randbytes(32)]
        for name in names:
            host = self.world.add_host(name, gpus)
            seeds = [f"{self.world.hosts[first].ip}:7946" for first in list(self.world.hosts)[:2] if first != name]
            tree: Tree = {
                "name": name,
                "state_dir": host.disk.root,
                "run_dir": host.run_dir,
                "advertise": host.ip,
                "gossip": {"bind": f"{host.ip}:7946", "seeds": seeds or [f"{host.ip}:7946"]},
                "control": {"bind": f"{host.ip}:7947"},
                "leader": {"voters": voters},
            }
            if any(plugin.name == "memory" for plugin in plugins):
                tree["memory"] = dict(SMALL_SLABS)
            for section, values in (settings or {}).items():
                tree[section] = tree.get(section, {}) | values
            if self.quotas and any(plugin.name == "scheduler" for plugin in plugins):
                tree["scheduler"] = {"quotas": self.quotas} | tree.get("scheduler", {})
            self.trees[name] = tree
            self.configure(name, {})
        self.world.user_programs |= {
            "sleeper": sleeper,
            "ring": ring,
            "writer": writer,
            "bungler": bungler,
            "trainer": trainer(self.saw_wrong),
            "healer": healer(lambda: self.world.now),
            "learner": self.learners.learn,
            "adder": self.adders.add,
        }
        self.invariants = invariants_for(self) if watched else []
        for invariant in self.invariants:
            self.world.watch(invariant)

    def configure(self, name: str, sections: Tree) -> None:
        """Change a host's agent.toml: its agent reads the changes at its next start."""
        tree = self.trees[name]
        for section, values in sections.items():
            tree[section] = tree.get(section, {}) | values
        self.hosts[name].main = self._main(self.hosts[name], parse(tree, name, {}, tuple(self.plugins)), self.keys)

    def _main(self, host: SimHost, config: Config, keys: list[bytes]) -> Callable[[Env], Any]:
        async def main(env: Env) -> int:
            stored = host.disk.files.get(RING)
            ring = of_file(keys) if stored is None else unsealed(bytes(stored.data), keys)
            agent = self.agents[host.name] = HostAgent(env, config, ring, self.plugins)
            if host.agent is not None:
                host.agent.loop.agent_moved = self._log_moved(agent)
            try:
                await agent.start()
            except OSError as error:
                env.log.error("agent cannot start", why=str(error))
                return 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await agent.stop(leave=True, away_s=config.gossip.away_s)
            return 0

        return main

    def pager(
        self,
        host: str,
        volume: str,
        size_bytes: int,
        seconds: float,
        used_bytes: int | None = None,
        pace: Pace = QUICK,
        kind: Redundancy = DISK,
        uid: int = USER,
    ) -> SimProcess:
        """Run a process on this host that uses a volume of remote memory, or the beginning of it, and checks every
        page. With `spread` the volume is larger by that factor, and the same number of its pages is used."""
        used_bytes = size_bytes if used_bytes is None and self.spread > 1 else used_bytes
        told = self.saw_wrong, self.stale.append
        oracle = Oracle(volume, size_bytes * self.spread, *told, used_bytes, kind, self.spread, uid)
        self.oracles.setdefault(host, []).append(oracle)
        if self.custody is not None:
            self.custody.add(oracle, self.hosts[host])
        return self._run(host, "pager", oracle, pager(oracle, seconds, pace._replace(idles=pace.idles or self.idles)))

    def _run(self, host: str, name: str, oracle: Oracle, program: UserProgram) -> SimProcess:
        """Run a program as the user who owns the volume."""
        process = self.hosts[host].run(name, program)
        process.uid = oracle.uid
        return process

    def saw_wrong(self, what: str) -> None:
        self.wrong.append(what)
        self.world.process_count += 1

    def log_begins_anew(self) -> None:
        """Note that every voter's log is gone: terms and indices are counted from the beginning again."""
        for invariant in self.invariants:
            if isinstance(invariant, OneLeaderPerTerm | LogsAgree):
                invariant.forget()
        self.accepted.clear()

    def readers(self) -> list[SimProcess]:
        """Run processes that read back every page of every volume, once all is healed; each ends when it has them
        all."""
        return [
            self._run(host, "reader", oracle, reader(oracle))
            for host, oracles in self.oracles.items()
            for oracle in oracles
        ]

    def menders(self, host: str) -> list[SimProcess]:
        """Run processes that find out what is lost of the volumes of this host, and write all anew."""
        return [self._run(host, "mender", oracle, mender(oracle)) for oracle in self.oracles[host]]

    def forgive(self) -> None:
        """Let a volume lose, from now on, the pages whose lender and volume both failed before the disk had them: for
        stories with more than one fault at a time. To be called before the first pager."""
        self.custody = Custody(self, parse_size(self._slab))
        self.world.watch(self.custody)
        programs = dict(self.world.programs())
        programs["vold"] = dataclasses.replace(programs["vold"], run=self.custody.run_watched)
        self.world.programs = lambda: programs

    def administered(self) -> Administrator:
        """Let an operator do, from now on, what an agent that cannot trust its files advises."""
        self.administrator = Administrator(self)
        self.world.watch(self.administrator)
        return self.administrator

    # ---- time --------------------------------------------------------------------------------------------------------

    @property
    def hosts(self) -> dict[str, SimHost]:
        return self.world.hosts

    def start(self) -> "SimRack":
        """Start every agent within the first second."""
        for host in self.hosts.values():
            self.world.at(self.world.now + self.rng.uniform(0, 1), host.revive)
        return self

    def run(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    def until(self, reached: Callable[[], bool], within_s: float, what: str) -> float:
        """Run until `reached()`; returns the virtual seconds that took. Raises `Broken` when it is not in time."""
        start = self.world.now
        while not reached():
            if self.world.now - start >= within_s + self.patience_s:
                raise self.world.broken(f"not within {within_s + self.patience_s:g} s: {what}")
            self.world.run(self.world.now + 0.25)
        return self.world.now - start

    def run_until(self, reached: Callable[[], bool], most_s: float) -> None:
        """Run until `reached()`, looked at after every callback, but no longer than `most_s`."""
        self.world.run(self.world.now + most_s, stop=reached)

    def settle(self, within_s: float = SETTLE_S) -> float:
        """Run until every host sees every other and all know the same leader; returns the virtual seconds that took."""
        return self.until(self.settled, within_s, "all hosts see each other and one leader")

    def settled(self) -> bool:
        leaders = set()
        for name, host in self.hosts.items():
            if host.agent is None or not host.agent.alive or host.agent.loop.paused or not self.began(name):
                return False
            views = self.agents[name].hosts()
            if {view.host for view in views if view.state == "alive"} != set(self.hosts):
                return False
            leaders.add(self.agents[name].log.leader)
        return len(leaders) == 1 and None not in leaders

    def began(self, name: str) -> bool:
        """Whether this host's agent has come through its start."""
        return hasattr(self.agents.get(name), "rackview")

    def heal(self) -> None:
        faults.heal(self.world)

    def close(self) -> None:
        self.world.close()

    def __enter__(self) -> "SimRack":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- looking inside ----------------------------------------------------------------------------------------------

    def _log_moved(self, agent: HostAgent) -> Callable[[], bool]:
        """A function that tells whether the agent's Raft core handled anything since it was last called. Virtual time
        passes with every callback, so an event moves the core's own time."""
        seen: Raft | None = None
        seen_s = 0.0

        def moved() -> bool:
            nonlocal seen, seen_s
            raft: Raft | None = agent.log._raft if hasattr(agent, "log") else None
            if raft is None or (raft._now_s == seen_s and raft is seen):
                return False
            self.moved = seen = raft
            seen_s = raft._now_s
            return True

        return moved

    def failed(self) -> list[str]:
        """Hosts whose agent runs with a plugin that failed."""
        return [
            name
            for name in self.alive()
            if any(health.state == "failed" for health in self.agents[name].health.values())
        ]

    def plugin(self, name: str, plugin: str) -> Any:
        """A plugin's service on a host whose agent runs; None otherwise."""
        return self.agents[name].plugins.get(plugin) if self._runs(self.hosts[name]) and self.began(name) else None

    # ---- asking the agents -------------------------------------------------------------------------------------------

    def alive(self) -> list[str]:
        """Hosts whose agent runs now."""
        return [name for name, host in self.hosts.items() if self._runs(host)]

    def _runs(self, host: SimHost) -> bool:
        return host.up and host.agent is not None and host.agent.alive and not host.agent.loop.paused

    def leader(self) -> str | None:
        """The host that leads by its own account, with a majority behind it; None if there is none."""
        leading = [name for name in self.alive() if self.began(name) and self.agents[name].log.is_leader]
        return leading[-1] if leading else None

    def ask(self, name: str, command: str, arguments: Mapping[str, Any], within_s: float = 30.0) -> Any:
        """What `agentctl` would print of this host's answer. Raises what `answer` raises, and TimeoutError for a list
        to which some hosts did not add."""
        found = self.answer(name, command, arguments, within_s)
        if not isinstance(found, Gathered):
            return found
        if found.unanswered:
            raise TimeoutError(f"{command} of {name} is not whole: {words(found.unanswered)}")
        return found.data

    def answer(self, name: str, command: str, arguments: Mapping[str, Any], within_s: float = 30.0) -> Any:
        """What this host answers: runs the world until it is there. Raises Refused, NoLeader and OutcomeUnknown as the
        agent does, and TimeoutError when there is no answer."""
        if command not in self.agents[name].commands:
            raise TimeoutError(f"the plugin that answers {command} does not run on {name} now")
        answered: list[Any] = []
        agent, process = self.agents[name], self.hosts[name].agent
        assert process is not None

        async def call() -> None:
            try:
                answered.append(await agent.commands[command](as_root(arguments)))
            except (Refused, NoLeader, OutcomeUnknown) as no:
                answered.append(no)

        process.spawn(f"ask {command}", call())
        self.world.run(self.world.now + within_s, stop=lambda: bool(answered) or not process.alive)
        if not answered:
            raise TimeoutError(f"{name} did not answer {command} within {within_s:g} s")
        if isinstance(answered[0], Exception):
            raise answered[0]
        return answered[0]

    def ask_as(self, asks: str, host: str, plugin: str, question: Message, within_s: float = 5.0) -> Any:
        """What one agent answers another one; None when it refuses, or does not answer in time."""
        answered: list[Any] = []
        agent, process = self.agents[asks], self.hosts[asks].agent
        assert process is not None

        async def call() -> None:
            try:
                answered.append(await agent.plugins[plugin].host.ask(plugin, HostId(host), question, within_s))
            except (Refused, TimeoutError):
                answered.append(None)

        process.spawn(f"ask {host}", call())
        self.world.run(self.world.now + 2 * within_s, stop=lambda: bool(answered) or not process.alive)
        return answered[0] if answered else None

    def submit(
        self,
        spec: Mapping[str, Any],
        key: str,
        on: Callable[[], str | None] | str | None = None,
        within_s: float = 60.0,
    ) -> JobId:
        """Submit a job until an agent accepts it, with the same key, as a person at a keyboard would. `on`: at this
        host, or at the one that this returns at each try, if it is alive."""
        start = self.world.now
        while self.world.now - start < within_s + self.patience_s:
            wanted = on() if callable(on) else on
            name = wanted if wanted in self.alive() else (self.alive() or [""])[0]
            if name and self.began(name):
                try:
                    answer = self.ask(name, "scheduler.submit", {"spec": dict(spec), "key": key}, 15.0)
                    job = JobId(answer["job"] if isinstance(answer, dict) else answer.id)
                    self.accepted[job] = self.world.now
                    return job
                except (TimeoutError, NoLeader, OutcomeUnknown):
                    pass
                except Refused as no:
                    full = no.code == 4 and "disk_free_min" in no.next
                    if no.code not in (6, 7, 75) and not full:  # 7: an agent that just began knows few hosts
                        raise
            self.run(1.0)
        raise self.world.broken(f"not within {within_s:g} s: a job is taken")

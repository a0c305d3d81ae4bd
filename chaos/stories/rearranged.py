"""Elastic jobs of AddVector (`chaos.actors.adder`) on a rack that has no rest: people scale them up and down, drain
hosts and use them again, change quotas, and submit guaranteed jobs for which extras are given back; plugins wish other
processes, shares of ranks and owners of tables (`chaos.wisher`); hosts fail, are cut off or stopped, their
agents too, the leader's above all; processes, those that own tables, and supervisors are killed. Mostly a second change
comes while the first is under way.

While nothing else happens, tables go where somebody said, to a host without processes, too; of two wishes for one
configuration one is refused. At every moment each rank is carried by one process of the log, a GPU belongs to one gang,
extras count against no quota (`chaos.checks.elastic`). No job is started twice, since others always have what its
successors need, unless processes are given back while a host is away that nobody has missed yet; and in the end every
element is DELTA x steps x ranks, with the draws of each rank and step counted once.
"""

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from chaos import faults
from chaos.actors.adder import DELTA
from chaos.askers import as_root
from chaos.checks.ranks_seen import ranks_of
from chaos.faults import Kill, Pause
from chaos.rackworld import SimRack
from chaos.stories.classes import known, newest, state
from chaos.stories.cut_off import troubles
from chaos.story import ended
from chaos.wisher import Wisher
from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.ids import HostId, JobId
from covey.tensors.numbers.blocks import job_of, number_of
from plugins.facts import WantedArrangement
from plugins.scheduler.machine.log.jobs import OVER

SETTINGS = {"scheduler": {"heal_pause_s": 8.0, "elastic_grow_after_s": 6.0}}
RACK_HOSTS = (3, 6)
"""Fewest and most hosts of the rack, of which each seed has its own number."""
STEPS, FLOATS = (60, 120), 40
STARTS_S = 60.0
CALM_S = 150.0
"""Seconds after which all processes run and have the state, whatever was struck; some seconds mostly."""
BACK_S = (3.0, 60.0)
"""Least and most seconds for which a host has no power."""
SILENT_S = 7.0
OWNED_S = 60.0
"""Seconds within which tables are where somebody said, while nothing else happens."""
TROUBLES = ("cut", "agent stopped", "agent killed", "slow clock", "fast clock", "deaf", "dumb", "only stopped")
CHANGES: Sequence[str] = (
    *("scale", "scale", "scale", "drain", "resume", "guaranteed", "quota"),
    *("wish", "wish", "wish", "two wishes", "wish for all"),
)
HARMS: Sequence[str] = ("process", "process", "two", "supervisor", "agent", "leader", "silent", "power", "away")


def play(rack: SimRack) -> None:
    rack.settle()
    rng, steps = rack.rng, rack.rng.randint(*STEPS)
    jobs = [submit(rack, number, steps) for number in range(rng.choice((1, 1, 2)))]
    rack.until(
        lambda: all(calm(rack, job) for job in jobs), STARTS_S + 60.0 * (len(jobs) - 1), "all processes have begun"
    )
    storm = Storm(rack, jobs)
    if rng.random() < 0.5:
        owned(rack, storm.wisher, jobs[0])
    for _ in range(rng.randint(2, 7)):
        rack.run(rng.uniform(0.0, 5.0))
        live = [job for job in jobs if state(rack, job) not in OVER]
        if not live:
            break
        storm.one(rng.choice(live))
        while rng.random() < 0.5:
            rack.run(rng.choice((0.0, rng.uniform(0.0, 0.3), rng.uniform(0.0, 2.0))))
            storm.one(rng.choice(live))
        if rng.random() < 0.7:
            rack.until(lambda: all(calm(rack, job) for job in jobs), CALM_S, "all processes run and have the state")
    storm.over()
    storm.wisher.check()
    ended(rack, {**dict.fromkeys(jobs, ("done",)), **dict.fromkeys(storm.others, OVER)}, 400.0)
    for job in jobs:
        check_end(rack, job, steps, storm.at_risk)


def submit(rack: SimRack, number: int, steps: int) -> JobId:
    rng, hosts = rack.rng, len(rack.hosts)
    fewest = rng.randint(1, max(1, hosts // 2))
    spec = {
        "argv": ["adder", str(steps), str(FLOATS)],
        "tenant": "red",
        "workers": fewest,
        "workers_max": rng.randint(fewest + 1, 2 * hosts),
        "gpus_per_worker": 1,
        "class": rng.choice(("guaranteed", "auto")),
        "retries_preempted": 0,
        "cwd": "/",
    }
    return rack.submit(spec, f"rearranged-{rack.world.seed}-{number}")


def check_end(rack: SimRack, job: JobId, steps: int, at_risk: bool) -> None:
    now = known(rack, job)
    assert at_risk or now.tally.attempt == 1, f"{job} was started {now.tally.attempt} times"
    whole = np.full(FLOATS, DELTA * steps * now.spec.world_size, np.float32)
    for process in now.start.carried:
        if (job, process) in rack.adders.too_late:
            continue
        found = rack.adders.ended.get((job, process))
        assert found is not None and np.array_equal(found, whole), f"process {process} of {job} ended with {found}"


def calm(rack: SimRack, job: JobId) -> bool:
    """Whether the job is over, or every process that the log has runs, and has the state."""
    now = known(rack, job)
    if now.over:
        return True
    placed = {(str(place.host), process) for place in now.start.places for process in place.ranks}
    return now.state == "running" and not now.healing.missing and placed == set(with_state(rack, job))


def owned(rack: SimRack, wisher: Wisher, job: JobId) -> None:
    """Let somebody say which host is to own each table, and wait until they all are there."""
    now = known(rack, job)
    wanted = WantedArrangement(now.grant.epoch, now.healing.healed, owners=wisher.owners(now))
    while "is not current" in (refused := answered(rack, wisher, {job: wanted})):
        rack.run(1.0)
    assert not refused, refused
    rack.until(lambda: as_said(rack, job), OWNED_S, f"the tables of {job} are on {wanted.owners}")


def answered(rack: SimRack, wisher: Wisher, wanted: dict[JobId, WantedArrangement]) -> str:
    """Wish this at some agent; returns why it was refused, once that is said."""
    ask = wisher.ask(rack.rng.choice(rack.alive()), wanted)
    rack.until(lambda: ask in wisher.answers, OWNED_S, f"{ask} is answered")
    return wisher.answers[ask]


def as_said(rack: SimRack, job: JobId) -> bool:
    """Whether each table of the job is summed by the host that somebody said, as its ranks' agents know it."""
    owners, found = known(rack, job).start.owners, dict[int, tuple[int, HostId]]()
    for name in rack.alive():
        aggregator = rack.plugin(name, "aggregator")
        for table, at in aggregator.directory.known.items() if aggregator is not None else ():
            if job_of(table) == job:
                found[number_of(table)] = max(found.get(number_of(table), (0, HostId(""))), (at.epoch, at.owner))
    return all(owners[table] in ("", owner) for table, (_, owner) in found.items()) if owners else True


def with_state(rack: SimRack, job: JobId) -> list[tuple[str, int]]:
    """Host and name of the job's processes that run and have the state."""
    begun = rack.adders.begun
    return [
        (rank.host, rank.rank)
        for rank in ranks_of(rack.world)
        if rank.job == job and not rank.process.loop.paused
        if begun.get((job, rank.epoch, rank.rank)) == incarnation(rack, rank.host, rank.process.id.pid)
    ]


def incarnation(rack: SimRack, host: str, pid: int) -> int:
    return int(rack.hosts[host].commands[pid].env.get("COVEY_INCARNATION", "0"))


class Storm:
    """What people ask of a rack, and what fails in it, one after the other."""

    def __init__(self, rack: SimRack, jobs: Sequence[JobId]) -> None:
        self.rack, self.rng, self.jobs = rack, rack.rng, jobs
        self.wisher = Wisher(rack)
        self.others: list[JobId] = []
        """Jobs that do not belong to the elastic ones."""
        self.at_risk = False
        """Whether processes may have been given back while a host was away that the log had not missed yet: those that
        stayed may be on that host, and then the job begins anew."""
        self._back_s = 0.0
        """When the last host that was lost is back."""
        self._does: dict[str, Callable[[JobId], None]] = {
            "scale": self._scale,
            "drain": self._drain,
            "resume": self._resume,
            "guaranteed": self._guaranteed,
            "quota": self._quota,
            "wish": lambda job: self._wish([job]),
            "two wishes": lambda job: self._wish([job], [job]),
            "wish for all": lambda job: self._wish(self.jobs),
            "agent": lambda job: self._strike(Kill("agent", self._host(job), self.rng.uniform(0.1, 6.0))),
            "leader": self._leader,
            "supervisor": self._supervisor,
        }

    def one(self, job: JobId) -> None:
        kind = self.rng.choice(self.rng.choice((CHANGES, HARMS)))
        known_jobs = newest(self.rack).jobs
        others = [known_jobs.get(other) for other in self.others]
        waits = any(other is None or other.state in ("queued", "placing") for other in others)
        is_away = self.rack.world.now < self._back_s
        self.at_risk |= (is_away and kind in CHANGES) or (waits and (is_away or kind in ("power", "away", "silent")))
        self.rack.world.mark("rearranged", kind, str(job))
        if kind in self._does:
            self._does[kind](job)
        elif kind in ("process", "two", "silent"):
            self._processes(job, kind)
        else:
            self._lost(job, kind)

    def over(self) -> None:
        """Let every drained host be used again, and give the tenant of others a quota for each of its jobs: one that
        lost its host is queued again."""
        for host in self.rack.hosts:
            self._ask("scheduler.resume", {"id": host}, tries=3)
        self._ask("scheduler.quota_set", {"tenant": "green", "gpus": len(self.rack.hosts)}, tries=3)

    # ---- people ----

    def _scale(self, job: JobId) -> None:
        spec = known(self.rack, job).spec
        self._ask("scheduler.scale", {"id": job, "workers": self.rng.randint(spec.workers, spec.workers_max)})

    def _wish(self, *wishes: Sequence[JobId]) -> None:
        """Let plugins wish these jobs to be arranged anew, all at once."""
        for jobs in wishes:
            self.wisher.one(jobs)
        self.wisher.check()

    def _drain(self, job: JobId) -> None:
        self._ask("scheduler.drain", {"id": self._host(job)})

    def _resume(self, job: JobId) -> None:
        drained = sorted(self._queue_drained())
        if drained:
            self._ask("scheduler.resume", {"id": self.rng.choice(drained)})

    def _quota(self, job: JobId) -> None:
        """Give a tenant another quota: its next job is guaranteed, or waits for it."""
        self._ask("scheduler.quota_set", {"tenant": "green", "gpus": self.rng.choice((0, 2, len(self.rack.hosts)))})

    def _guaranteed(self, job: JobId) -> None:
        """Submit a job that gets the GPUs of extras."""
        spec = {
            "argv": ["sleeper", str(self.rng.randint(2, 20))],
            "tenant": self.rng.choice(("blue", "blue", "green")),
            "workers": self.rng.randint(1, max(1, len(self.rack.hosts) // 2)),
            "gpus_per_worker": self.rng.choice((1, 1, 2)),
            "class": self.rng.choice(("guaranteed", "auto")),
            "retries_lost": 1000,
            "retries_preempted": 1000,
            "cwd": "/",
        }
        with contextlib.suppress(Refused):
            key = f"other-{self.rack.world.seed}-{len(self.others)}"
            self.others.append(self.rack.submit(spec, key, self.rack.leader))  # others may be cut off for long

    def _ask(self, command: str, given: dict[str, object], tries: int = 1) -> None:
        """Do what `agentctl` does, at any agent; nothing where it is refused."""
        for _ in range(tries):
            names = [name for name in self.rack.alive() if self.rack.began(name)]
            if names:
                name = self.rng.choice(names)
                if tries == 1 and self.rng.random() < 0.5:
                    self._soon(name, command, given)
                    return
                with contextlib.suppress(TimeoutError, NoLeader, OutcomeUnknown, Refused):
                    self.rack.ask(name, command, given, 10.0)
                    return

    def _soon(self, name: str, command: str, given: dict[str, object]) -> None:
        """Ask, and do not wait for the answer."""
        agent, process = self.rack.agents[name], self.rack.hosts[name].agent

        async def ask() -> None:
            with contextlib.suppress(NoLeader, OutcomeUnknown, Refused):
                await agent.commands[command](as_root(given))

        if process is not None and command in agent.commands:
            process.spawn(f"a person asks {command}", ask())

    # ---- what fails ----

    def _leader(self, job: JobId) -> None:
        self._strike(Kill("agent", self.rack.leader() or self._host(job), self.rng.uniform(0.5, 8.0)))

    def _supervisor(self, job: JobId) -> None:
        host = self._host(job)
        if self._may_lose([host]):
            self._strike(Kill("program", host, 0.0, "supervisor"))

    def _processes(self, job: JobId, kind: str) -> None:
        """Kill one process or two, or stop all of a host for a while."""
        found = [rank for rank in ranks_of(self.rack.world) if rank.job == job]
        found = self.rng.sample(found, min(len(found), 2 if kind == "two" else 1))
        hosts = sorted({rank.host for rank in found})
        if not found or not self._may_lose(hosts):
            return
        if kind == "silent":
            self._strike(Pause(hosts[0], SILENT_S, "adder"))
            self._back_s = max(self._back_s, self.rack.world.now + SILENT_S)
            return
        for rank in found:
            self.rack.world.mark("fault", rank.host, f"kill process {rank.rank} of {job}")
            rank.process.signal(9)

    def _lost(self, job: JobId, kind: str) -> None:
        """Take a host away, for longer than its job waits for it, or not."""
        host = self._host(job)
        if self.rack.world.now < self._back_s or not self._may_lose([host]):
            return
        if kind == "power":
            found: list[faults.AnyFault] = [Kill("host", host, self.rng.uniform(*BACK_S))]
        else:
            found = troubles(self.rack, host, self.rng.choice(TROUBLES))
        self._back_s = self.rack.world.now + max(each.for_s for each in found)
        for fault in found:
            self._strike(fault)

    def _may_lose(self, hosts: Sequence[str]) -> bool:
        """Whether some process of each job is left that has the state, and its log knows that."""
        for job in self.jobs:
            now = known(self.rack, job)
            if now.over or not any(place.host in hosts for place in now.start.places):
                continue
            if now.state != "running" or not now.heals_without([HostId(host) for host in hosts]):
                return False
            left = {host for host, _ in with_state(self.rack, job) if host not in hosts}
            if self.rack.world.now < self._back_s or not left & set(map(str, now.healing.may_be_lost)):
                return False
        return True

    def _strike(self, fault: faults.AnyFault) -> None:
        faults.strike(self.rack.world, fault)

    def _host(self, job: JobId) -> str:
        """A host of the job, or now and then any."""
        hosts = [str(place.host) for place in known(self.rack, job).start.places]
        return self.rng.choice(hosts if hosts and self.rng.random() < 0.85 else list(self.rack.hosts))

    def _queue_drained(self) -> list[str]:
        names = [name for name in self.rack.alive() if self.rack.began(name)]
        scheduler = self.rack.plugin(names[0], "scheduler") if names else None
        return [] if scheduler is None else list(map(str, scheduler.queue.drained))

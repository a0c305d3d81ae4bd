"""How long the live leader takes for one look: some 98,000 jobs wait, 10,000 GPUs run, tenants have quotas."""

import math
import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from agent.main import settle_collector
from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.leader.leader import Leader, RackHost, ScheduleTick
from plugins.scheduler.machine.log import job_starts
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import (
    Applied,
    Attained,
    Command,
    Elapsed,
    GpusKept,
    Granted,
    Placed,
    PlaceFailed,
    QuotaSet,
    RanksReported,
    Result,
    Submitted,
    TakenBack,
)
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy.place import place
from plugins.scheduler.policy.settings import SchedulerSettings
from sim.report import Cell, Progress, Report, Table

HOSTS, EACH = 1250, 8
QUOTAS = {"red": 3000, "blue": 2500, "green": 2000, "grey": 1000, "teal": 500}
"""GPUs of each tenant's quota; 1,000 are under no quota, and three tenants without a quota share them."""
TENANTS = (*QUOTAS, "one", "two", "three")
WIDTHS, OFTEN = (1, 2, 4, 8, 16, 32, 64), (60, 12, 12, 10, 3, 2, 1)


class Rack:
    """The log, its leader, and hosts that do at once what the log says."""

    def __init__(self, waiting: int, dice: random.Random) -> None:
        self.dice = dice
        self.queue = JobTable()
        self.settings = SchedulerSettings(quotas=QUOTAS)
        self.leader = Leader(self.queue, self.settings)
        self.rack = tuple(RackHost(HostId(f"h{number:04}"), EACH) for number in range(HOSTS))
        self.free = {host.host: [f"{host.host}.{gpu}" for gpu in range(EACH)] for host in self.rack}
        self.roomy = {host.host: EACH for host in self.rack}
        """Hosts with free GPUs, and how many."""
        self.running: list[JobId] = []
        self.where: dict[JobId, int] = {}
        self.now_s = 0.0
        self.times: dict[str, list[float]] = {}
        """Seconds of CPU per look, by what the look led to."""
        for _ in range(waiting):
            self.submit()

    def say(self, command: Command) -> Result:
        return apply(self.queue, self.queue.index + 1, command)[0]

    def submit(self) -> None:
        dice = self.dice
        gpus = dice.choices(WIDTHS, OFTEN)[0]
        workers, each = (1, gpus) if gpus <= EACH and dice.random() < 0.5 else (gpus, 1)
        tenant, kind = dice.choice(TENANTS), dice.choices(("guaranteed", "opportunistic"), (9, 1))[0]
        given = {"argv": ["x"], "workers": workers, "gpus_per_worker": each, "tenant": tenant, "class": kind}
        key = f"key-{self.queue.index:09}"
        self.say(Submitted(wall_s=1.0, key=key, spec=JobSpec.parse(given)))

    def look(self, after_s: float = 0.05) -> list[Command]:
        self.now_s += after_s
        began = time.process_time()
        said = [action.command for action in self.leader.handle(ScheduleTick(self.rack, 1.0), self.now_s)]
        spent = time.process_time() - began
        kinds = {type(command) for command in said}
        what = (
            "stops a job" if TakenBack in kinds else "starts a job" if Granted in kinds
            else "reserves GPUs" if GpusKept in kinds else "changes nothing" if kinds <= {Elapsed} else "else"
        )  # fmt: skip
        self.times.setdefault(what, []).append(spent)
        for command in said:
            self.say(command)
        return said

    def follow(self, said: list[Command]) -> int:
        """Place what was granted and stop what was taken back, with a look after each, until nothing follows."""
        looks = 0
        while said:
            for command in said:
                if isinstance(command, Granted):
                    self.place(command.job)
                elif isinstance(command, TakenBack):
                    self.end(command.job, -15)
            if {type(command) for command in said} <= {Elapsed}:
                break
            said = self.look()
            looks += 1
        return looks

    def fill(self) -> None:
        """Give the GPUs out in order of age, so that the leader begins in a full rack."""
        for tenant, gpus in QUOTAS.items():
            self.say(QuotaSet(wall_s=1.0, tenant=tenant, gpus=gpus))
        for job in self.queue.live():
            if not self.roomy:
                break
            told = Granted(wall_s=1.0, job=job.id, epoch=1, coordinator=self.rack[0].host)
            if sum(self.roomy.values()) >= job.spec.gpus and isinstance(self.say(told), Applied):
                self.place(job.id)

    def place(self, id: JobId) -> None:
        job = self.queue.jobs[id]
        each = job.spec.gpus_per_worker
        found = place(self.roomy, job.spec.workers, each, 0.0, 0.3)
        if found is None:
            self.say(PlaceFailed(wall_s=1.0, job=id, epoch=job.grant.epoch, reason="no room"))
            return
        places, rank = [], 0
        for host, count in found.items():
            gpus = tuple(self.free[host].pop() for _ in range(count * each))
            self._count(host)
            places.append(Place(host, tuple(range(rank, rank + count)), gpus))
            rank += count
        self.say(Placed(wall_s=1.0, job=id, epoch=job.grant.epoch, places=tuple(places), master_addr="", master_port=1))
        self.where[id] = len(self.running)
        self.running.append(id)

    def end(self, id: JobId, code: int = 0) -> None:
        job = self.queue.jobs[id]
        for at in job.start.places:
            codes, asked = dict.fromkeys(at.ranks, code), code != 0
            told = RanksReported(wall_s=1.0, job=id, epoch=job.grant.epoch, host=at.host, codes=codes, asked=asked)
            self.say(told)
            self.free[at.host] += at.gpus
            self._count(at.host)
        last = self.running.pop()
        at_number = self.where.pop(id)
        if last != id:
            self.running[at_number] = last
            self.where[last] = at_number

    def _count(self, host: HostId) -> None:
        if self.free[host]:
            self.roomy[host] = len(self.free[host])
        else:
            self.roomy.pop(host, None)

    def step(self) -> int:
        """Let something happen, as it does all day, with a look after it, and after each thing that follows; returns
        the number of looks."""
        dice = self.dice
        match dice.randrange(4):
            case 0:
                self.end(dice.choice(self.running))
            case 1:
                self.submit()
            case _:  # a host reports what its jobs attained, which it does every 10 s
                id = dice.choice(self.running)
                job = self.queue.jobs[id]
                host = job.start.places[0].host
                served = job.measured.attained.get(host, 0.0) + 10.0 ** dice.uniform(1, 4)
                self.say(Attained(wall_s=1.0, host=host, service_gpu_s={id: served}))
        return 1 + self.follow(self.look())


def steady(waiting: int, looks: int, dice: random.Random, progress: Callable[[float], None]) -> dict[str, Any]:
    """CPU microseconds of a look in a full rack, of all and by what they lead to; and of a leader's first."""
    with mock.patch.object(job_starts, "LIVE_MAX", 10 * waiting + 10 * HOSTS * EACH):
        rack = Rack(waiting, dice)
        rack.fill()
        rack.follow(rack.look())
        for _ in range(len(rack.running)):
            rack.submit()
        for _ in range(looks // 20):
            rack.step()
        settle_collector()
        rack.times, done = {}, 0
        while done < looks:
            done += rack.step()
            progress(done / looks)
        leads = Leader(rack.queue, rack.settings)
        began = time.process_time()
        leads.handle(ScheduleTick(rack.rack, 1.0), rack.now_s)
        anew = time.process_time() - began
    times = rack.times
    found = {"all": [spent for part in times.values() for spent in part], **times}
    free = sum(len(gpus) for gpus in rack.free.values())
    return {
        "waiting": len(rack.queue.live()) - len(rack.running),
        "running": len(rack.running),
        "gpus": HOSTS * EACH,
        "gpus_free": free,
        "first_look_s": anew,
        **{
            what: {
                "looks": len(part),
                "us_p50": _at(part, 0.5),
                "us_p99": _at(part, 0.99),
                "us_max": _at(part, 1.0),
            }
            for what, part in found.items()
        },
    }


def _at(spent: list[float], share: float) -> float:
    return 1e6 * sorted(spent)[max(0, math.ceil(share * len(spent)) - 1)]


def speed(progress: Progress) -> Report:
    """Measure the leader of a rack as agents run it: what one look costs when many jobs wait."""
    data = steady(100_000, 20_000, random.Random(1), lambda share: progress(share, "looks of the live leader"))
    names = [name for name, part in data.items() if isinstance(part, dict)]
    rows: list[list[Cell]] = [
        [name, data[name]["looks"], *(f"{data[name][key]:.0f}" for key in ("us_p50", "us_p99", "us_max"))]
        for name in names
    ]
    notes = [
        f"{data['waiting']:,} jobs wait, {data['running']:,} run; {data['gpus_free']} of {data['gpus']:,} GPUs free",
        "five tenants with quotas of 9,000 GPUs, three without; one job of ten is opportunistic",
        "before each look: a job ends (1 of 4), comes (1 of 4) or reports what it attained, and all that follows",
        f"CPU time of `Leader.handle`; the first look of a new leader, which reads everything: "
        f"{data['first_look_s']:.2f} s",
        "garbage is collected as agents do (`agent.main.settle_collector`)",
    ]
    columns = ["look that", "looks", "median (us)", "99 % (us)", "worst (us)"]
    return Report("leader-speed", data, [Table("one look of the live leader", columns, rows, notes)])


EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {"leader-speed": speed}

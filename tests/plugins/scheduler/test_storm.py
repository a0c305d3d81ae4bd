"""Storms: agents die and come back, hosts are cut off, leaders change and messages are lost, by seed. Afterwards every
job has ended once, every GPU is free, and at no moment did two gangs hold one GPU."""

import asyncio
import random
from typing import Any

import pytest

from covey.core.errors import Refused
from plugins.scheduler.policy.settings import SchedulerSettings
from tests.families import in_gate
from tests.plugins.scheduler.rack import Rack, until
from tests.virtual_time import play

SETTINGS = SchedulerSettings(queue_thresholds_gpu_s=(40.0,), host_lost_after_s=20.0, quotas={"bob": 3})

STEPS = ("submit", "submit", "finish", "finish", "kill", "restart", "cut", "heal", "lead", "slow")


class Storm:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rack = Rack({"gpu1": 2, "gpu2": 2, "gpu3": 2, "gpu4": 1, "gpu5": 3}, SETTINGS)
        self.names = [str(host) for host in self.rack.hosts]
        self.submitted: set[str] = set()
        self.down: set[str] = set()

    async def play(self) -> None:
        await self.rack.start()
        while len(self.submitted) < 2:
            await self.submit("gpu1")
        for _ in range(60):
            await self.step()
            await asyncio.sleep(self.rng.choice([0.0, 0.01, 0.1, 1.0, 5.0]))
            self.nobody_shares_a_gpu()
        await self.calm()
        self.rack.check()
        for host in self.rack.hosts.values():
            assert not host.machine.ranks, f"ranks are left on {host.id}"
            assert host.service.ranks.reservations.all() == []
            assert len(host.machine.starts) == len(set(host.machine.starts)), "started twice under one epoch"
            assert host.service.ranks.told == {}
        self.rack.stop()
        await asyncio.sleep(0)

    async def step(self) -> None:
        what = self.rng.choice(
            ["submit", "submit", "finish", "finish", "kill", "restart", "cut", "heal", "lead", "calm"]
        )
        name = self.rng.choice(self.names)
        host = self.rack[name]
        match what:
            case "submit" if host.up:
                await self.submit(name)
            case "finish":
                self.finish()
            case "kill" if len(self.down) < 2 and name != self.rack.leader:
                host.die()
                self.rack.gone(name)
                self.down.add(name)
            case "restart" if name in self.down:
                await self.rack.restart(name)
                self.down.discard(name)
            case "cut" if len(self.rack.cut) < 2 and name != self.rack.leader:
                self.rack.cut_off(name)
            case "heal" if name in self.rack.cut:
                self.rack.heal(name)
            case "lead" if host.up and name not in self.rack.cut and host.log.applied_index == len(self.rack.entries):
                self.rack.lead(self.rng.choice([name, name, name, None]))
            case "slow":
                self.rack.delay_s = self.rng.choice([0.005, 0.5, 2.0])
            case _:
                pass  # not possible now

    async def submit(self, name: str) -> None:
        given: dict[str, Any] = {
            "argv": ["train"],
            "workers": self.rng.randint(1, 5),
            "tenant": self.rng.choice(["alice", "bob"]),
            "class": self.rng.choice(["guaranteed", "guaranteed", "opportunistic"]),
            "gpus_per_worker": self.rng.choice([0, 1, 1, 1, 2]),
        }
        try:
            self.submitted.add((await self.rack[name].call("submit", **given)).id)
        except Refused as error:
            assert error.code in (4, 7, 75)

    def finish(self) -> None:
        running = sorted({job for host in self.rack.hosts.values() for job, _ in host.machine.ranks})
        if running:
            code = self.rng.choice([0, 0, 0, 1, 75, -9])
            self.rack.finish(self.rng.choice(running), {self.rng.randint(0, 4): code})

    def nobody_shares_a_gpu(self) -> None:
        for host in self.rack.hosts.values():
            held = [gpu for spec in host.machine.ranks.values() for rank in spec.ranks for gpu in rank.gpus]
            assert len(held) == len(set(held)), f"two gangs run on one GPU of {host.id}"

    async def calm(self) -> None:
        """Let everybody come back; then every job must end."""
        self.rack.delay_s = 0.005
        for host in sorted(self.rack.cut):
            self.rack.heal(host)
        for name in sorted(self.down):
            await self.rack.restart(name)
        self.rack.lead("gpu1")
        await until(lambda: self.finished_all(), 3000.0)
        await asyncio.sleep(30)

    def finished_all(self) -> bool:
        self.nobody_shares_a_gpu()
        for job, epoch in [key for host in self.rack.hosts.values() for key in host.machine.ranks]:
            if self.rng.random() < 0.05:
                self.rack.finish(job)
            assert epoch > 0
        jobs = self.rack["gpu1"].service.queue.jobs
        assert self.submitted <= set(jobs), "a job that was taken is gone"
        return all(job.over for job in jobs.values())


@pytest.mark.parametrize("seed", in_gate(12, range(40)))
def test_after_a_storm_every_job_has_ended_and_every_gpu_is_free(seed: int) -> None:
    storm = Storm(seed)
    play(storm.play())
    assert storm.submitted, "a storm without jobs shows nothing"

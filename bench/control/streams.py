"""What an event stream of a large rack costs: bytes at rest, delay of a change, processor time of the agent.

    python bench/control/streams.py [--hosts 1000] [--gpus 8] [--jobs 2000] [--seconds 30] [--json FILE]

The agent's HTTP with its streams runs in a process of its own, over lists of rows that are made here: one job in four
runs, ages and times grow, each GPU's use moves by up to 2 % and its memory by up to 0.5 % between two answers. What the
real lists cost to make (gossip, the log, questions to hosts) is not in it; a copy of each row at each answer is.
Readers ask for hosts, gpus, jobs and slabs over the unix socket, and read all. A change is a job's row that has the
time in it.
"""

import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec

from agent.api.http import HttpApi
from agent.config import HttpSettings
from agent.ports.clock import RealClock
from bench.live_command import json_option, keep, options, print_head, spent_s
from covey.core.ids import HostId, JobId
from covey.ports.env import Env
from covey.ports.users import FixedUsers
from plugins.askers import Asker
from plugins.base import Command
from plugins.facts import Place
from plugins.views import GpuRow, HostRow, JobLossesView, JobSeenView, JobTallyView, JobTimesView, JobView, SlabView

GIB = 1 << 30
CHANGES_S = 0.5
"""Seconds between two changes."""
PART_BYTES = 1 << 20
COUNTS = (0, 1, 10)
"""The numbers of streams that are measured."""


class MadeRack:
    """An agent of which only the lists are there. `changing`: set from outside, a job changes every `CHANGES_S`."""

    def __init__(self, hosts: int, gpus: int, jobs: int, changing: Any) -> None:
        self.id, self.boot, self.started_wall_s, self.loop_lag_s = HostId("gpu0"), 1, 0.0, 0.0
        users = FixedUsers(own_uid=os.geteuid())
        ports = {"clock": RealClock(), "rng": random.Random(1), "users": users, "spawn": self.spawn}
        self.env = cast(Env, SimpleNamespace(**ports))
        self.counts = {"log": 0, "hosts": 0}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing, self._began_s = changing, time.monotonic()
        names = [HostId(f"gpu{n:04}") for n in range(hosts)]
        self._hosts = [HostRow(name, "alive", 0.0, "10.0.0.1:7946", False, 0.0, gpus, 0) for name in names]
        self._gpus = [
            GpuRow(name, n, f"GPU-{name}-{n}", "NVIDIA H100", 80 * GIB, 40 * GIB, 0.9, JobId("j1"), False, 0.0)
            for name in names
            for n in range(gpus)
        ]
        self._jobs = [job(n, names[n % hosts], n % 4 == 0) for n in range(jobs)]
        self._slabs = [
            SlabView(f"v{n}", 0, names[n % hosts], "mapped", names[-1], GIB, 9, 9, 5.0, 1) for n in range(hosts)
        ]
        self.commands: dict[str, Command] = {
            "agent.hosts": self._list_hosts,
            "agent.gpus": self._list_gpus,
            "scheduler.jobs": self._list_jobs,
            "agent.rack_slabs": self._list_slabs,
        }

    def spawn(self, name: str, work: Any) -> object:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        return task

    def hosts(self) -> Sequence[Any]:
        return self._hosts

    async def asker(self, uid: int) -> Asker | None:
        return Asker(uid, "root", "operator", is_agent=True)

    def metrics(self) -> Mapping[Any, float]:
        return {}

    async def change(self) -> None:
        """Change a job now and then, with the time in its row, until the process is ended."""
        while self._began_s:
            await asyncio.sleep(CHANGES_S)
            if self._changing.is_set():
                at = self.env.rng.randrange(len(self._jobs))
                self._jobs[at] = msgspec.structs.replace(self._jobs[at], reason=f"at {time.monotonic()}")
                self.counts["log"] += 1

    async def _list_hosts(self, _given: Mapping[str, Any]) -> Any:
        for_s, rng = time.monotonic() - self._began_s, self.env.rng
        return [msgspec.structs.replace(row, age_s=rng.random(), since_s=for_s) for row in self._hosts]

    async def _list_gpus(self, _given: Mapping[str, Any]) -> Any:
        rng = self.env.rng
        return [
            msgspec.structs.replace(
                row, utilization=0.9 + rng.uniform(-0.02, 0.02), memory_used_bytes=40 * GIB + rng.randrange(GIB // 5)
            )
            for row in self._gpus
        ]

    async def _list_jobs(self, _given: Mapping[str, Any]) -> Any:
        for_s = time.monotonic() - self._began_s
        return [
            row
            if row.state != "running"
            else msgspec.structs.replace(
                row, attained_gpu_s=for_s * row.gpus, times=msgspec.structs.replace(row.times, for_s=for_s)
            )
            for row in self._jobs
        ]

    async def _list_slabs(self, _given: Mapping[str, Any]) -> Any:
        rng = self.env.rng
        return [msgspec.structs.replace(row, requests_per_s=5.0 + rng.uniform(-0.5, 0.5)) for row in self._slabs]


def job(number: int, host: HostId, runs: bool) -> JobView:
    """A job of four GPUs, which runs on a host, or waits."""
    return JobView(
        id=JobId(f"j{number}"),
        name=f"train-{number}",
        tenant="ml",
        job_class="guaranteed",
        state="running" if runs else "queued",
        over=False,
        reason="" if runs else f"{number}th of the waiting jobs, in queue 0",
        workers=4,
        gpus=4,
        argv=("python", "train.py", "--lr", "1e-3"),
        cwd="/home/ann/work",
        times=JobTimesView(submitted_wall_s=1.8e9, started_wall_s=1.8e9 if runs else None),
        tally=JobTallyView(),
        losses=JobLossesView(),
        seen=JobSeenView(),
        places=(Place(host, (0, 1, 2, 3), ("0", "1", "2", "3")),) if runs else (),
        user="ann",
        uid=1001,
    )


def serve(path: str, hosts: int, gpus: int, jobs: int, changing: Any, ready: Any) -> None:
    """The agent's process."""

    async def run() -> None:
        made = MadeRack(hosts, gpus, jobs, changing)
        http = HttpApi(cast(Any, made), path, HttpSettings(group=""))
        await http.start()
        ready.set()
        await made.change()
        await http.stop()

    asyncio.run(run())


class Counted:
    """What one reader has read."""

    def __init__(self) -> None:
        self.read_bytes, self.whole_bytes, self.delays_s = 0, 0, list[float]()
        self.is_whole = asyncio.Event()

    async def read(self, path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path, limit=1 << 26)
        writer.write(b"GET /v1/events?tables=hosts,gpus,jobs,slabs HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while line := await reader.readline():
            self.read_bytes += len(line)
            if line.startswith(b"id: ") and not self.is_whole.is_set():
                self.is_whole.set()
            if line.startswith(b"data: ") and b'"reason":"at ' in line and len(line) < PART_BYTES:
                now_s = time.monotonic()
                for row in json.loads(line[6:]).get("set", {}).values():
                    if str(row.get("reason", "")).startswith("at "):
                        self.delays_s.append(now_s - float(row["reason"][3:]))


async def measured(path: str, pid: int, streams: int, seconds: float, changing: Any) -> dict[str, Any]:
    readers = [Counted() for _ in range(streams)]
    tasks = [asyncio.create_task(each.read(path)) for each in readers]
    began_s = time.monotonic()
    for each in readers:
        await each.is_whole.wait()
    whole_s = time.monotonic() - began_s
    await asyncio.sleep(1.0)
    first = sum(each.read_bytes for each in readers)
    found = {"streams": streams, "whole_s": whole_s, "whole_bytes": first / max(1, streams)}
    for name in ("rest", "changing"):
        changing.set() if name == "changing" else changing.clear()
        before, busy_s, since_s = sum(each.read_bytes for each in readers), spent_s(pid), time.monotonic()
        await asyncio.sleep(seconds)
        for_s = time.monotonic() - since_s
        found[f"{name}_bytes_s"] = (sum(each.read_bytes for each in readers) - before) / for_s / max(1, streams)
        found[f"{name}_core"] = (spent_s(pid) - busy_s) / for_s
    changing.clear()
    delays = sorted(delay for each in readers for delay in each.delays_s)
    if delays:
        found |= {"delays": len(delays), "p50_s": statistics.median(delays), "p99_s": delays[int(len(delays) * 0.99)]}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=8, help="of each host")
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30.0)
    json_option(parser)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="covey-streams-") as folder:
        path, process = f"{folder}/agent.sock", multiprocessing.get_context("spawn")
        changing, ready = process.Event(), process.Event()
        agent = process.Process(target=serve, args=(path, args.hosts, args.gpus, args.jobs, changing, ready))
        agent.start()
        try:
            assert ready.wait(60) and agent.pid is not None
            for streams in COUNTS:
                rows.append(asyncio.run(measured(path, agent.pid, streams, args.seconds, changing)))
        finally:
            agent.terminate()
            agent.join()
    titles = (
        "streams | whole after, s | MB | KiB/s at rest | % of a core at rest | with 2 changes/s | delay p50, ms | p99"
    )
    print_head(titles)
    for each in rows:
        delays = " | ".join(f"{1000 * each[name]:.0f}" if name in each else "" for name in ("p50_s", "p99_s"))
        print(
            f"| {each['streams']} | {each['whole_s']:.2f} | {each['whole_bytes'] / 1e6:.1f} "
            f"| {each['rest_bytes_s'] / 1024:.2f} | {100 * each['rest_core']:.1f} | {100 * each['changing_core']:.1f} "
            f"| {delays} |"
        )
    keep({"hosts": args.hosts, "gpus": args.hosts * args.gpus, "jobs": args.jobs, "rows": rows}, args.json)


if __name__ == "__main__":
    main()

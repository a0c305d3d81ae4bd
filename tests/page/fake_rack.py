"""A server that looks like an agent of a large rack, for the page alone: rows are those of `plugins.views`, the stream
is `/v1/events` as agents speak it, the page and its headers are the agent's own. Numbers are drawn by seed.

    python -m tests.page.fake_rack --hosts 1000 --gpus 8 --jobs 2000 --port 8471
"""

import argparse
import asyncio
import base64
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
from aiohttp import web

from agent.api.gossip_row import GossipRow, SuspectRow
from agent.api.http import PAGE, SECURITY_HEADERS
from covey.core.ids import HostId, JobId
from covey.core.tones import TONES
from plugins.facts import HostState, Place, StepTiming
from plugins.start_views import TurnView
from plugins.views import (
    AggregatorJobView,
    ElasticView,
    EventLine,
    GpuRow,
    HostRow,
    JobLossesView,
    JobSeenView,
    JobTallyView,
    JobTimesView,
    JobView,
    LeaderView,
    SlabView,
    Trouble,
    VoterRow,
)

GIB = 1 << 30
Rows = dict[str, dict[str, Any]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeRack:
    """The tables of a rack that does not exist, and small changes to them."""

    def __init__(self, hosts: int, gpus: int, jobs: int, seed: int = 7) -> None:
        self.rng, self.now_s = random.Random(seed), time.time()
        self.hosts = [HostId(f"gpu{n}") for n in range(1, hosts + 1)]
        self.gpus = gpus
        self.tables: dict[str, Rows] = {}
        self.happened: list[EventLine] = []
        self._jobs(jobs)
        self._gpus()
        self._hosts()
        self._memory()
        self._others()

    def keep(self, table: str, key: str, row: msgspec.Struct) -> None:
        self.tables.setdefault(table, {})[key] = msgspec.to_builtins(row)

    def _jobs(self, wanted: int) -> None:
        """Fill most of the GPUs with jobs; of the others some wait, and some have ended."""
        rng = self.rng
        free = [(host, index) for host in self.hosts for index in range(self.gpus)]
        held = int(len(free) * 0.82)
        self.holder: dict[tuple[HostId, int], JobId] = {}
        waiting, at = 0, 0
        for number in range(1, wanted + 1):
            width = rng.choice((1, 2, 4, 8, 8))
            state = "queued"
            places: tuple[Place, ...] = ()
            if number % 9 == 0:
                state = rng.choice(("done", "done", "failed", "cancelled"))
            elif at + width <= held:
                state, mine = "running", free[at : at + width]
                at += width
                by_host: dict[HostId, list[int]] = {}
                for host, index in mine:
                    by_host.setdefault(host, []).append(index)
                    self.holder[host, index] = JobId(f"j{number}")
                ranks, found = 0, []
                for host, indices in by_host.items():
                    names = tuple(f"GPU-{host}-{index}" for index in indices)
                    found.append(Place(host, tuple(range(ranks, ranks + len(indices))), names))
                    ranks += len(indices)
                places = tuple(found)
            waiting += state == "queued"
            self.keep("jobs", f"j{number}", self._job(number, width, state, places, waiting))

    def _job(self, number: int, width: int, state: str, places: tuple[Place, ...], waiting: int) -> JobView:
        rng, id = self.rng, f"j{number}"
        runs, over = state == "running", state in ("done", "failed", "cancelled")
        for_s = rng.uniform(30, 90000)
        reason = ahead = ""
        if state == "queued":
            end = "th" if 10 <= waiting % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(waiting % 10, "th")
            ahead = f"j{max(1, number - 3)} (vision, 4 GPUs) and {waiting - 2} more" if waiting > 1 else ""
            said = f"; ahead: {ahead}" if ahead else ""
            reason = f"{waiting}{end} of the waiting jobs, in queue 0; it needs {width} GPUs and 0 are free{said}"
        elif state == "failed":
            reason = "rank 1 exited with 1"
        step_s = rng.uniform(0.05, 1.2)
        timing = StepTiming(step_s, step_s * rng.choice((0.02, 0.1, 0.62)), step_s * rng.choice((0.04, 0.2)))
        steps = rng.randint(100, 90000) if runs else None
        tenant, user = rng.choice((("ml", "ann"), ("vision", "bob"), ("nlp", "carol"), ("ml", "dora")))
        started = self.now_s - for_s if state != "queued" else None
        elastic = ElasticView(workers_max=16, processes=width, config=3, carried={})
        return JobView(
            id=JobId(id),
            name=rng.choice(("bert-base", "resnet50", "gpt2-medium", "vit-l16", "whisper", "sweep")),
            tenant=tenant,
            job_class=rng.choice(("guaranteed", "guaranteed", "auto", "opportunistic")),
            state=state,
            over=over,
            reason=reason,
            workers=width,
            gpus=width,
            argv=("python", "train.py"),
            cwd="/home/ann/train",
            times=JobTimesView(
                submitted_wall_s=self.now_s - for_s - 40,
                started_wall_s=started,
                ended_wall_s=self.now_s - 60 if over else None,
                for_s=for_s,
            ),
            tally=JobTallyView(attempt=int(state != "queued"), preemptions=rng.choice((0, 0, 1))),
            losses=JobLossesView(),
            seen=JobSeenView(timing=timing if runs else None),
            attained_gpu_s=for_s * width if started else 0.0,
            exit_code=0 if state == "done" else 1 if over else None,
            ended_as=state if over else "",
            places=places,
            step=steps,
            metrics={"loss": rng.uniform(0.2, 3)} if runs else {},
            user=user,
            uid=1000 + len(user),
            turn=TurnView(waiting, ahead) if state == "queued" else None,
            elastic=elastic if number % 23 == 0 and runs else None,
        )  # fmt: skip

    def _gpus(self) -> None:
        rng = self.rng
        for host in self.hosts:
            for index in range(self.gpus):
                job = self.holder.get((host, index))
                busy = 0.0 if job is None else rng.choice((0.0, rng.uniform(0.3, 1.0), rng.uniform(0.8, 1.0)))
                condition, why, use = "ok", "", ""
                beside: tuple[JobId, ...] = ()
                chance = rng.random()
                if chance < 0.006:
                    condition, why, busy = "lost", "XID 79: the GPU has fallen off the bus", 0.0
                elif chance < 0.01:
                    condition, why = "unknown", "its driver does not answer"
                elif job and chance < 0.04:
                    use, busy = "idle for 34 min: no process is there", 0.0
                elif not job and chance < 0.06:
                    use, busy = "used by process 4242, which no job of the rack started", 0.97
                elif job and chance < 0.1:
                    beside = (JobId("j1"),)
                memory = 80 * GIB
                used = int(memory * (rng.uniform(0.3, 0.95) if job or "4242" in use else 0.002))
                self.keep(
                    "gpus",
                    f"{host}/{index}",
                    GpuRow(
                        host=host,
                        index=index,
                        uuid=f"GPU-{host}-{index}",
                        model="NVIDIA H100 80GB HBM3",
                        memory_total_bytes=memory,
                        memory_used_bytes=used,
                        utilization=round(busy, 2) if chance < 0.95 else None,
                        job=job,
                        simulated=True,
                        age_s=0.5,
                        beside=beside,
                        condition=condition,
                        why=why,
                        use=use,
                    ),
                )

    def _hosts(self) -> None:
        rng = self.rng
        for at, host in enumerate(self.hosts):
            state: HostState = "alive"
            if at and rng.random() < 0.01:
                state = rng.choice(("gone", "suspect"))
            free = sum((host, index) not in self.holder for index in range(self.gpus))
            twin = Trouble("two machines claim this name", "agentctl rack join, with another name")
            self.keep(
                "hosts",
                host,
                HostRow(
                    host=host,
                    state=state,
                    age_s=rng.uniform(0, 2),
                    address=f"10.0.{at // 250}.{at % 250 + 1}:7946",
                    leads=at == 1,
                    since_s=rng.uniform(60, 9e5),
                    gpus_total=self.gpus,
                    gpus_free=free,
                    slabs_free=rng.randint(0, 40),
                    slabs_lent=0,
                    suspected_by=HostId("gpu7") if state == "suspect" else None,
                    drained_by="root" if at % 97 == 96 else None,
                    closed_why="new fan" if at % 97 == 96 else "",
                    troubles=(twin,) if at % 400 == 399 else (),
                    version="0.1.0",
                ),
            )
            if state == "gone":
                for index in range(self.gpus):
                    self.tables["gpus"][f"{host}/{index}"]["host_state"] = "gone"

    def _memory(self) -> None:
        rng = self.rng
        self.tables["slabs"] = {}
        for number in range(min(120, len(self.hosts) * 3)):
            borrower, lender = rng.choice(self.hosts[:12]), rng.choice(self.hosts[-14:])
            state = rng.choice(("mapped",) * 8 + ("cold", "moving"))
            row = SlabView(
                volume=f"cache{number % 6}",
                index=number // 6,
                borrower=borrower,
                state=state,
                lender=None if state == "cold" else lender,
                size_bytes=GIB,
                pages_written=200000,
                pages_remote=0 if state == "cold" else 199000,
                requests_per_s=rng.uniform(0, 900),
                epoch=number,
            )
            self.keep("slabs", f"{row.volume}/{row.index}", row)
            if row.lender:
                self.tables["hosts"][row.lender]["slabs_lent"] += 1

    def _others(self) -> None:
        rng, now = self.rng, self.now_s
        tenants = {"ml": 4096, "vision": 2048, "nlp": 1024, "students": None}
        self.tables["tenants"] = {
            name: {"tenant": name, "users": ["ann"], "gpus": gpus, "used": int((gpus or 100) * rng.uniform(0.2, 1))}
            for name, gpus in tenants.items()
        }
        self.tables["quotas"] = {
            name: {**row, "queued_jobs": 3, "opportunistic": 2} for name, row in self.tables["tenants"].items()
        }
        leader = LeaderView(self.hosts[1], 4, 9000.0, 4211, 0.1, tuple(self.hosts[:3]))
        self.keep("leader", "leader", leader)
        running = [job for job in self.tables["jobs"].values() if job["state"] == "running"][:40]
        self.tables["tensors"] = {}
        for job in running[::2]:
            host = job["places"][0]["host"]
            row = AggregatorJobView(job["id"], host, 1, job["workers"], job["workers"], 62, GIB, 4000, 9 * GIB, 9 * GIB)
            row = msgspec.structs.replace(row, period_us=210000, work_us=20000, load=rng.random() / 2, loss=0.03)
            self.keep("tensors", f"{job['id']}/{host}", row)
        for host in self.hosts:
            probes = rng.randint(900, 4000)
            suspects = (
                (SuspectRow(HostId("gpu3"), HostId("gpu7"), 2.0),) if host == "gpu2" and len(self.hosts) > 4 else ()
            )
            self.keep("gossip", host, GossipRow(
                host=host, up_s=9000, health=rng.choice((0, 0, 0, 0, 2)), alone=False, sent=9000, sent_bytes=1 << 21,
                received=9000, received_bytes=1 << 21, probes=probes, probes_failed=rng.randint(0, 9), refutations=0,
                stalls=rng.choice((0, 0, 3)), stalled_s=0.02, full=0, dropped={}, suspects=suspects,
            ))  # fmt: skip
        for at, host in enumerate(self.hosts[:5]):
            notes = ("its disk is slow: 40 ms for an entry",) if at == 3 else ()
            self.keep("voters", host, VoterRow(host, "votes", at == 1, 4211 - at % 2, notes=notes))
        for at in range(min(200, len(self.hosts) * 8)):
            subject = f"j{at % 60 + 1}"
            event = rng.choice(("granted", "placed", "ranks run here", "stopping", "queued again", "done"))
            self.happened.append(EventLine(now - 400 + at * 2, rng.choice(self.hosts), subject, event, "", f"log/{at}"))

    # ---- what changes ----

    def step(self) -> dict[str, Rows]:
        """Some GPUs are busier, some jobs make steps; what changed, by table."""
        rng, changed = self.rng, cast(dict[str, Rows], {"gpus": {}, "jobs": {}})
        for key in rng.sample(list(self.tables["gpus"]), min(40, len(self.tables["gpus"]))):
            row = self.tables["gpus"][key]
            if row["job"] and not row["use"] and row["utilization"] is not None:
                row["utilization"] = round(min(1.0, max(0.0, row["utilization"] + rng.uniform(-0.3, 0.3))), 2)
                changed["gpus"][key] = {"utilization": row["utilization"]}
        for key in rng.sample(list(self.tables["jobs"]), min(20, len(self.tables["jobs"]))):
            row = self.tables["jobs"][key]
            if row["step"] is not None:
                row["step"] += rng.randint(1, 9)
                changed["jobs"][key] = {"step": row["step"]}
        return {table: rows for table, rows in changed.items() if rows}

    def story(self, id: str) -> list[EventLine]:
        """Events of a job that was preempted once and lost a host."""
        began = self.tables["jobs"].get(id, {"times": {"submitted_wall_s": self.now_s - 4000}})["times"][
            "submitted_wall_s"
        ]
        said = (
            ("submitted", ""), ("granted", "epoch 1; gpu1 looks for 4 GPUs"), ("placed", ""), ("ranks run here", ""),
            ("stopping", "taken back (preempted): j4 (vision, 8 GPUs) goes first"), ("queued again", ""),
            ("granted", "epoch 2"), ("placed", ""), ("hosts lost", "gpu3 is gone"),
            ("replaced", "rank 2 begins on gpu4"),
            ("grew", "from 4 to 6 processes"),
        )  # fmt: skip
        whole = max(60.0, self.now_s - began)
        at = (0, 0.08, 0.085, 0.086, 0.34, 0.36, 0.52, 0.525, 0.7, 0.71, 0.85)
        told = zip(at, said, strict=True)
        return [EventLine(began + whole * part, HostId("gpu2"), id, event, why) for part, (event, why) in told]


class FakeAgent:
    """The HTTP of one agent of that rack."""

    def __init__(self, rack: FakeRack, period_s: float = 1.0) -> None:
        self.rack, self.period_s = rack, period_s
        self.readers: set[asyncio.Queue[tuple[str, Any]]] = set()
        self.number = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._secured])
        for path, file, kind in PAGE:
            app.router.add_get(path, self._file(file.read_bytes(), kind))
        app.router.add_get("/states.json", self._json(lambda _request: TONES))
        app.router.add_get("/v1/events", self._events)
        app.router.add_get("/v1/why/{id:.*}", self._said(lambda request: self.rack.story(request.match_info["id"])))
        app.router.add_get(
            "/v1/jobs/{id}", self._said(lambda request: self.rack.tables["jobs"][request.match_info["id"]])
        )
        app.router.add_get(
            "/v1/jobs/{id}/env", self._said(lambda _: {"variables": {"API_KEY": "(hidden)", "A": "<b>"}})
        )
        app.router.add_get("/v1/jobs/{id}/curve", self._said(self._curve))
        app.router.add_get("/v1/jobs/{id}/logs", self._said(self._log))
        app.router.add_get(
            "/v1/starts", self._said(lambda _request: {"starts": self._starts(), "whole": True, "age_s": 0})
        )
        app.router.add_get("/v1/volumes", self._said(lambda _request: []))
        app.router.add_get("/v1/memory/accounts", self._said(lambda _request: []))
        app.router.add_get("/v1/leader", self._said(lambda _request: self.rack.tables["leader"]["leader"]))
        app.cleanup_ctx.append(self._changing)
        return app

    @web.middleware
    async def _secured(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if not response.prepared:
            response.headers.update(SECURITY_HEADERS)
        return response

    def _file(self, body: bytes, kind: str) -> Handler:
        async def served(_request: web.Request) -> web.Response:
            return web.Response(body=body, content_type=kind, charset="utf-8")

        return served

    def _json(self, found: Callable[[web.Request], Any]) -> Handler:
        async def answered(request: web.Request) -> web.Response:
            return web.Response(body=msgspec.json.encode(found(request)), content_type="application/json")

        return answered

    def _said(self, found: Callable[[web.Request], Any]) -> Handler:
        return self._json(lambda request: {"as_of_wall_s": time.time(), "host": "gpu1", "data": found(request)})

    def _starts(self) -> list[dict[str, Any]]:
        waiting = [job["id"] for job in self.rack.tables["jobs"].values() if job["state"] == "queued"]
        return [
            {"id": id, "p50_s": 60.0 * at + 40, "p90_s": 200.0 * at + 90, "basis": "from 34 jobs"}
            for at, id in enumerate(waiting)
        ]

    def _curve(self, request: web.Request) -> dict[str, Any]:
        rng = random.Random(request.match_info["id"])
        points = []
        for at in range(300):
            step = at * 40
            metrics = {"loss": 2.4 * 0.99**at + 0.3 + rng.gauss(0, 0.03), "accuracy": 1 - 0.7 * 0.99**at}
            step_s = 0.21 + rng.gauss(0, 0.012)
            points.append({"step": step, "step_s": step_s, "rank": 0, "epoch": 1, "metrics": metrics})
        return {"id": request.match_info["id"], "points": points, "unanswered": []}

    def _log(self, request: web.Request) -> dict[str, Any]:
        text = "".join(f"step {n * 40} loss {2.4 * 0.99**n + 0.3:.4f}\n" for n in range(300)).encode()
        offset = min(len(text), int(request.query.get("offset", "0")))
        return {
            "data": base64.b64encode(text[offset:]).decode(),
            "offset": offset,
            "end": False,
            "host": "gpu1",
            "size": len(text),
        }

    # ---- the stream ----

    async def _changing(self, _app: web.Application) -> Any:
        async def change() -> None:
            while True:
                await asyncio.sleep(self.period_s)
                self.tell(self.rack.step())

        task = asyncio.create_task(change())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def tell(self, changed: dict[str, Rows]) -> None:
        """Tell every reader what changed."""
        for table, rows in changed.items():
            for queue in self.readers:
                queue.put_nowait(("change", {"table": table, "as_of_wall_s": time.time(), "set": rows, "gone": []}))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        wanted = request.query.get("tables", "").split(",")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **SECURITY_HEADERS})
        await response.prepare(request)
        queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        for name, rows in self.rack.tables.items():
            if name in wanted:
                found = {"table": name, "as_of_wall_s": time.time(), "rows": rows, "unanswered": []}
                await self._send(response, "snapshot", found)
        for event in self.rack.happened if "happened" in wanted else ():
            await self._send(response, "happened", msgspec.to_builtins(event))
        self.readers.add(queue)
        try:
            while True:
                await self._send(response, *await queue.get())
        except ConnectionError:
            return response
        finally:
            self.readers.discard(queue)

    async def _send(self, response: web.StreamResponse, kind: str, data: Any) -> None:
        self.number += 1
        await response.write(f"id: 1.{self.number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--port", type=int, default=8471)
    given = parser.parse_args()
    agent = FakeAgent(FakeRack(given.hosts, given.gpus, given.jobs))
    web.run_app(agent.app(), host="127.0.0.1", port=given.port, access_log=None)


if __name__ == "__main__":
    main()

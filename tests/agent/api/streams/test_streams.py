"""`GET /v1/events` over real sockets, against a fake agent: what readers are told, and who is not."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import pytest
from aiohttp import ClientResponse, ClientSession, UnixConnector

from agent.api.access import job_outline
from agent.api.streams import served, watched
from agent.event_log import merged
from agent.ports.clock import RealClock
from covey.core.ids import HostId, JobId
from plugins.askers import ASKER, Asker
from plugins.views import EventLine, GpuRow, HostRow, JobView
from tests.agent.api.test_access import a_job
from tests.agent.api.test_http import Rig, opened

HOSTS = [HostRow(HostId(f"gpu{n}"), "alive", 0.5, f"10.0.0.{n}:1", n == 1, 9.0) for n in (1, 2, 3)]
ANN = Asker(1001, "ann", "user")


class Rack:
    """What the fake agent's lists say, and how often each was read."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.reads = rig, 0
        vars(rig.api.env)["clock"] = RealClock()
        self.hosts: list[HostRow] = list(HOSTS)
        self.jobs: list[JobView] = []
        self.gpus: list[GpuRow] = []
        self.rack_events: list[EventLine] = []
        for name in ("hosts", "gpus", "rack_events"):
            rig.api.commands[f"agent.{name}"] = self.reading(name)
        rig.api.commands["scheduler.jobs"] = self.reading("jobs")

    def reading(self, name: str) -> Any:
        async def command(given: Mapping[str, Any]) -> Any:
            assert isinstance(given[ASKER], Asker)
            self.reads += 1
            return list(getattr(self, name))

        return command

    def host(self, at: int, **fields: Any) -> None:
        """Change a host's row."""
        self.hosts[at] = msgspec.structs.replace(self.hosts[at], **fields)
        self.rig.api.counts["hosts"] += 1


class Stream:
    """An open stream, and the tables as a reader has them."""

    def __init__(self, answer: ClientResponse) -> None:
        self.answer, self.id = answer, ""
        self.tables: dict[str, dict[str, Any]] = {}
        self.told: list[tuple[str, dict[str, Any]]] = []

    async def next(self) -> tuple[str, dict[str, Any]]:
        """The next event that is one."""
        fields: dict[str, str] = {}
        while True:
            line = (await asyncio.wait_for(self.answer.content.readline(), 10)).decode()
            if not line:
                raise EOFError
            name, _, value = line.rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "data" in fields:
                break
        self.id = fields.get("id", self.id)
        data = json.loads(fields["data"])
        if fields["event"] != "happened":
            self._apply(fields["event"], data)
        self.told.append((fields["event"], data))
        return self.told[-1]

    def _apply(self, event: str, data: dict[str, Any]) -> None:
        if event == "snapshot":
            self.tables[data["table"]] = data["rows"]
            return
        rows = self.tables[data["table"]]
        for key, row in data["set"].items():
            rows[key] = {**rows.get(key, {}), **row}
        for key in data["gone"]:
            del rows[key]


@contextlib.asynccontextmanager
async def stream(rig: Rig, tables: str, tcp: bool = False, **options: Any) -> AsyncIterator[Stream]:
    base = f"http://{rig.http.address}" if tcp else "http://localhost"
    connector = None if tcp else UnixConnector(rig.path)
    async with (
        ClientSession(connector=connector, read_bufsize=1 << 24) as session,
        session.get(f"{base}/v1/events?tables={tables}", **options) as answer,
    ):
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream" and answer.headers["Cache-Control"] == "no-store"
        yield Stream(answer)


@pytest.fixture
async def rack() -> AsyncIterator[Rack]:
    async with opened() as rig:
        yield Rack(rig)


async def test_a_table_comes_whole_and_then_only_what_changes(rack: Rack) -> None:
    async with stream(rack.rig, "hosts") as reader:
        event, data = await reader.next()
        assert (event, data["table"], list(data["rows"])) == ("snapshot", "hosts", ["gpu1", "gpu2", "gpu3"])
        row = json.loads(msgspec.json.encode(HOSTS[1]))
        assert data["rows"]["gpu2"] == row | {"since_s": pytest.approx(9.0, abs=5)} and data["unanswered"] == []
        rack.host(1, age_s=99.0, since_s=99.0)  # time alone is no change: nothing is said of it
        rack.host(2, state="suspect", since_s=0.0)
        event, data = await reader.next()
        assert (event, data["set"], data["gone"]) == ("change", {"gpu3": {"state": "suspect", "since_s": 0.0}}, [])
        del rack.hosts[0]
        assert (await reader.next())[1]["gone"] == ["gpu1"]


async def test_a_reader_that_comes_back_gets_what_it_missed_or_everything(rack: Rack) -> None:
    async with stream(rack.rig, "hosts") as first:
        await first.next()
        seen = first.id
        for state in ("suspect", "gone"):
            rack.host(2, state=state)
            await first.next()
        async with stream(rack.rig, "hosts", headers={"Last-Event-ID": seen}) as again:
            again.tables = first.tables
            event, data = await again.next()
            assert (event, set(data["set"]), data["set"]["gpu3"]["state"]) == ("change", {"gpu3"}, "gone")
            assert again.id == first.id
        for unknown in ("9.1", "3.999", "", "x" * 99, "3", "3.-1", "3.1.u7"):
            async with stream(rack.rig, "hosts", params={"since": unknown}) as other:
                assert (await other.next())[0] == "snapshot", unknown


async def test_each_reader_sees_of_jobs_what_the_list_would_show(rack: Rack) -> None:
    bobs = a_job(id=JobId("j1"))
    rack.jobs = [bobs, a_job(id=JobId("j2"), user="ann", uid=ANN.uid)]
    rack.rig.api.known = dict.fromkeys(rack.rig.api.known, ANN)
    async with stream(rack.rig, "jobs") as reader:
        _, data = await reader.next()
        assert data["rows"] == json.loads(msgspec.json.encode({"j1": job_outline(bobs), "j2": rack.jobs[1]}))
        assert reader.id.endswith(f".u{ANN.uid}"), "what she was told is not what an operator was"
        rack.jobs[0] = msgspec.structs.replace(bobs, argv=("secret", "more"), cwd="/secret/2", exit_code=3)
        rack.rig.api.counts["log"] += 1
        assert (await reader.next())[1]["set"] == {"j1": {"exit_code": 3}}


async def test_events_are_told_once_each_and_their_reasons_to_owners(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "RACK_S", 0.1)
    rack.jobs = [a_job(id=JobId("j1")), a_job(id=JobId("j2"), user="ann", uid=ANN.uid)]
    rack.rig.api.known = dict.fromkeys(rack.rig.api.known, ANN)
    now_s = RealClock().wall_s()
    lines = [EventLine(now_s + n, HostId("gpu1"), f"job/j{n}", "failed", "secret", f"j{n}/1") for n in (1, 2)]
    rack.rack_events = lines[:1]
    async with stream(rack.rig, "happened") as reader:
        assert await reader.next() == ("happened", {**msgspec.to_builtins(lines[0]), "reason": ""})
        noted_by_another = msgspec.structs.replace(lines[0], host=HostId("gpu2"), wall_s=now_s)
        rack.rack_events = merged([[noted_by_another], lines])
        assert await reader.next() == ("happened", msgspec.to_builtins(lines[1]))
        async with stream(rack.rig, "happened", headers={"Last-Event-ID": reader.id}) as again:
            rack.rack_events = [msgspec.structs.replace(lines[0], key="j1/2", subject="host/gpu2")]
            assert (await again.next())[1]["reason"] == "secret", "it came after what was told already"


async def test_lists_are_read_once_for_all_readers_and_not_without_one(rack: Rack) -> None:
    assert rack.reads == 0
    async with contextlib.AsyncExitStack() as all_:
        readers = [await all_.enter_async_context(stream(rack.rig, "hosts,gpus")) for _ in range(10)]
        for reader in readers:
            await reader.next(), await reader.next()
            assert reader.id, "it was told everything"
        assert rack.reads < 8
    for _ in range(100):
        if not rack.rig.http._streams._watched._reading:
            break
        await asyncio.sleep(0.05)
    assert not rack.rig.http._streams._watched._reading, "nobody watches, so nothing is read"


async def test_a_reader_that_never_reads_costs_little_and_is_let_go(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "SLOW_S", 0.3)
    rack.hosts = [msgspec.structs.replace(HOSTS[0], host=HostId(f"gpu{n}"), gpus_why="x" * 2000) for n in range(2000)]
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(rack.rig.path)
        deaf.sendall(b"GET /v1/events?tables=hosts HTTP/1.1\r\nHost: x\r\n\r\n")
        async with stream(rack.rig, "hosts") as reader:
            await reader.next()
            rack.host(5, state="gone")
            assert (await reader.next())[1]["set"]["gpu5"]["state"] == "gone", "the others go on"
            async with asyncio.timeout(20):
                while not rack.rig.http._streams._ended["slow"]:
                    rack.host(6, slabs_free=rack.reads)
                    await reader.next()
            assert rack.rig.http._streams._ended == {"slow": 1}


async def test_who_may_not_open_a_stream_is_told_and_counted(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "STREAMS_USER_MAX", 2)
    monkeypatch.setattr(served, "STREAMS_ADDRESS_MAX", 1)
    rig = rack.rig
    rig.api.known = dict.fromkeys(rig.api.known, ANN)
    other = {"Origin": "http://evil.example"}
    for path, headers, status in (
        ("/v1/events?tables=hosts", other, 403),
        ("/v1/events?tables=hosts", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("/v1/events?tables=hots", {}, 400),
        ("/v1/events", {}, 400),
    ):
        got, said = await rig.ask("GET", path, headers=headers, tcp=True)
        assert got == status and said["what"] and said["why"] and said["next"], path
    assert (await rig.ask("GET", "/v1/events?tables=hosts", headers={"Host": "evil.example"}, tcp=True))[0] == 403
    assert (await rig.ask("HEAD", "/v1/events?tables=hosts"))[0] == 200
    async with stream(rig, "hosts", tcp=True, headers={"Origin": f"http://{rig.http.address}"}), stream(rig, "hosts"):
        assert (await rig.ask("GET", "/v1/events?tables=hosts", tcp=True))[0] == 503
        async with stream(rig, "jobs"):
            status, said = await rig.ask("GET", "/v1/events?tables=hosts")
            assert (status, said["code"]) == (503, 75)
            assert rig.http.refused == {"web_page": 2, "host": 1, "streams_user": 1, "streams_address": 1}
            metrics = rig.http.metrics()
            assert {series.metric.name: value for series, value in metrics.items()}["covey_http_streams"] == 3.0


async def test_a_list_that_cannot_be_read_is_not_shown_as_empty(rack: Rack) -> None:
    del rack.rig.api.commands["scheduler.jobs"]
    async with stream(rack.rig, "jobs") as reader:
        _, data = await reader.next()
        assert data["unanswered"] == [
            {
                "host": "gpu1",
                "why": "host gpu1 does not answer scheduler.jobs: its plugin `scheduler` is switched off or has failed",
                "age_s": None,
            }
        ]
        rack.rig.api.refuse("scheduler.jobs", ValueError("secret"))
        _, data = await reader.next()
        assert [each["why"] for each in data["unanswered"]] == [
            "scheduler.jobs failed: a defect in the agent (ValueError)"
        ]
    rack.hosts = [HOSTS[0], "no row"]  # type: ignore[list-item]
    async with stream(rack.rig, "hosts") as reader:
        _, data = await reader.next()
        assert data["rows"] == {} and "a defect in the agent (AttributeError)" in data["unanswered"][0]["why"]
        rack.hosts = list(HOSTS)
        rack.rig.api.counts["hosts"] += 1
        await reader.next()
        assert len(reader.tables["hosts"]) == len(HOSTS), "it is read again"


async def test_streams_end_when_the_agent_stops(rack: Rack) -> None:
    async with stream(rack.rig, "hosts") as reader:
        await reader.next()
        began_s = asyncio.get_running_loop().time()
        await rack.rig.http.stop()
        assert asyncio.get_running_loop().time() - began_s < 0.5
        with pytest.raises(EOFError):
            await reader.next()

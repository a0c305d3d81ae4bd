"""The agent's HTTP: `/v1/...` for agentctl and programs, `/livez`, `/readyz`, `/healthz` and `/metrics` for machines.

It decides nothing: each route names one command of a plugin or of the agent, checks the form of the request, and wraps
the answer. Every read is answered from what this host knows, also while no leader is known; each answer names this host
and the time, and the rows have their age.

Three ways in, an application each, and who may use which: `agent.api.admission`.

- the unix socket `agent.sock`: reads and changes, for root, the agent's own user, and users in the group of [http];
- optionally TCP. Without TLS it is for a browser on this host and for Prometheus: reads, for whoever connects; the
  routes of changes do not exist there. Over TLS it is for whoever has a certificate (`agentctl login`).

Each command is told who asks, whatever the request says of that; what each may do: `agent.api.access`.

Errors are `ErrorView` JSON. What is malformed, too long or not allowed is refused, counted in
`covey_http_refused_total`, and never reaches a plugin.
"""

import asyncio
import contextlib
import logging
import os
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Protocol, cast

import msgspec
from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from agent import metrics
from agent.api.admission import (
    Certified,
    Door,
    Network,
    NotAdmitted,
    OwnSocket,
    network_of,
    peer_ip,
    plain_name,
    uid_of,
)
from agent.api.exposition import CONTENT_TYPE, exposition
from agent.api.gate import ROOT
from agent.api.gathering import LISTS, WAIT, Gathered, wait_of
from agent.api.sockets import gid_of, tcp_socket, unix_socket
from agent.api.streams.served import EventStreams
from agent.api.tcp_door import TcpDoor
from agent.authority.service import HostAuthority
from agent.config import HttpSettings
from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.ids import HostId
from covey.core.metrics import Measured, Tally
from covey.core.tones import TONES
from covey.core.version import VERSION
from covey.ports.env import Env
from plugins.askers import ASKER, Asker
from plugins.base import Command
from plugins.facts import HostView
from plugins.scheduler.service.people.lists import FIELDS
from plugins.views import ErrorView

BODY_BYTES_MAX = 4 << 20
"""The longest request body in bytes: the longest command and environment (`covey.core.carried`), as JSON with its
escapes."""
TCP_CONNECTIONS_MAX = 128
"""The most connections open at the same time on TCP, idle ones included; one beyond that is closed at once, so that
clients cannot use up the agent's file descriptors."""
ADDRESS_CONNECTIONS_MAX = 32
"""The most of them that come from one address (IPv6: one network of 64 bits), with a certificate or without, so that
one machine leaves room for the others."""
USER_CONNECTIONS_MAX = 64
"""The most connections that one user has open at the unix socket, idle ones included; one beyond that is closed at
once. Root and the agent's own user are not bounded: they are to reach an agent that others keep busy."""
DEPTH_MAX = 32
"""The most levels of lists and objects in a body; a job has three."""
ID_CHARACTERS_MAX = 200
"""The longest id in a path, in characters: `slab/VOLUME/N` has at most 80."""
LIST_CHARACTERS_MAX = 2000
"""The most characters of what a list is asked for, by field."""
ANSWER_S_MAX = 20.0
"""Seconds that a command may take before the caller gets a timeout: the scheduler tries a change three times for 5 s
each, and its own error says more."""
STOP_S = 0.5
"""Seconds that the listeners may take to close; a part of `agent.main.LEAVE_S`. aiohttp waits for requests under way
for half of it, then cuts them off and waits as long again."""
LAG_S_MAX = 2.0
"""Seconds of event loop lag above which `/livez` answers 503; far above a garbage collection, below the watchdog's
period."""

STATUS_OF_CODE = {1: 500, 2: 400, 3: 404, 4: 403, 6: 504, 7: 422, 8: 504, 75: 503}
"""HTTP statuses by agentctl's exit code."""
CODE_OF_STATUS = {400: 2, 403: 4, 404: 3, 405: 2, 413: 2, 503: 75, 504: 6}
"""Exit codes by HTTP status, for what aiohttp itself refuses."""

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Server": "covey",
}


DEFECT_NEXT = "see the agent's log (an operator: journalctl -u covey), and report it"
DOOR = web.AppKey("door", Door)
"""The rules of the listener whose application this is."""
ASKS: web.RequestKey[Asker] = web.RequestKey("asks", Asker)
"""Who sends the request."""


class _Entrance(asyncio.Protocol):
    """Hands a connection of the unix socket to the protocol object that `admitted` gives it, or closes it."""

    def __init__(self, admitted: Callable[[asyncio.Transport], asyncio.Protocol | None]) -> None:
        self._admitted = admitted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast(asyncio.Transport, transport)
        protocol = self._admitted(connection)
        if protocol is None:
            connection.abort()
            return
        connection.set_protocol(protocol)
        protocol.connection_made(connection)


class Api(Protocol):
    """What the HTTP listeners need of the agent."""

    @property
    def id(self) -> HostId: ...
    @property
    def env(self) -> Env: ...
    @property
    def boot(self) -> int: ...
    @property
    def started_wall_s(self) -> float: ...
    @property
    def commands(self) -> Mapping[str, Command]:
        """The commands, `PLUGIN.VERB` or `agent.VERB` -> a coroutine of a JSON object that answers a Struct, list or
        dict."""

    @property
    def authority(self) -> HostAuthority:
        """The rack's certificate authority."""

    async def asker(self, uid: int) -> Asker | None:
        """Who has this uid; None: nobody that this host knows."""

    def metrics(self) -> Measured: ...
    def hosts(self) -> Sequence[HostView]: ...
    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers that grow when something has changed (`agent.api.streams.watched.Source`)."""

    @property
    def loop_lag_s(self) -> float:
        """Seconds by which the event loop's last timer was late."""


Arguments = Callable[[web.Request], Awaitable[dict[str, Any]]]
Route = Callable[[web.Request], Awaitable[web.StreamResponse]]
Add = Callable[[str, Route], object]


class HttpApi:
    """The listeners, with three ways in. `await start()` opens them (OSError when one cannot be bound), `await stop()`
    closes them."""

    def __init__(self, api: Api, unix_path: str, settings: HttpSettings) -> None:
        self.api, self.settings = api, settings
        self.unix_path = unix_path
        self.address = ""
        """The `ip:port` of the TCP listener once open, with the real port."""
        self.requests: Counter[int] = Counter()
        """The number of answers by HTTP status."""
        self.refused: Counter[str] = Counter()
        """The number of requests refused before they reached a command, by reason."""
        self._streams = EventStreams(api, self._list, lambda: self.api.boot, self.refused)
        self._times = Tally(metrics.HTTP_REQUEST_SECONDS)
        self._runners: list[web.AppRunner] = []
        self._listeners: list[asyncio.Server | TcpDoor] = []
        self._tcp: tuple[Network | Certified, ...] = ()
        self._names = settings.names

    def rename(self, names: tuple[str, ...]) -> None:
        """Be asked over TCP under these names from now on."""
        self._names = names
        for door in self._tcp:
            door.rename(names)

    async def start(self) -> None:
        try:
            await self._listen_here()
            if self.settings.bind:
                await self._listen()
        except OSError:
            await self._clean_up()
            raise

    async def _listen_here(self) -> None:
        """Open the unix socket, for the group of [http] where this host has it and the agent may let it in."""
        wanted = gid_of(self.settings.group)
        listener, gid = unix_socket(self.unix_path, wanted)
        if gid != wanted:
            why = f"the agent's user is not in group {self.settings.group}, and may not give it the socket"
            self.api.env.log.warning("only root and the agent's user may use the socket", path=self.unix_path, why=why)
        own_uid = self.api.env.users.own_uid
        door = OwnSocket(own_uid, self.api.asker, gid, self.settings.group)
        runner, loop = await self._runner(door), asyncio.get_running_loop()

        def entrance() -> _Entrance:
            return _Entrance(lambda connection: self._own_visitor(runner, connection))

        self._listeners.append(await loop.create_unix_server(entrance, sock=listener))

    async def _runner(self, door: Door) -> web.AppRunner:
        runner = web.AppRunner(
            self._app(door),
            access_log=None,
            logger=_counting_logger(self),
            keepalive_timeout=30,
            shutdown_timeout=STOP_S / 2,
            handle_signals=False,
        )
        await runner.setup()
        self._runners.append(runner)
        return runner

    async def _listen(self) -> None:
        """Open the TCP address, for TLS and for HTTP without it."""
        api, settings = self.api, self.settings
        network = Network(api.id, self._names, self.unix_path, settings.bind, settings.read_open)
        named_by, users = api.authority.named_by, api.env.users
        certified = Certified(api.id, self._names, named_by, users, api.asker, settings.group)
        self._tcp = network, certified
        plain, over_tls = await self._runner(network), await self._runner(certified)
        tcp = tcp_socket(settings.bind)
        host, port = tcp.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

        def may_come(address: str, begun: Sequence[str]) -> bool:
            handed = [peer_ip(each.transport) for one in (plain, over_tls) for each in _server(one).connections]
            there = [network_of(each) for each in (*begun, *handed)]
            few = len(there) < TCP_CONNECTIONS_MAX and there.count(network_of(address)) < ADDRESS_CONNECTIONS_MAX
            if not few:
                self.refused["full"] += 1
            return few

        def refused(why: str) -> None:
            self.refused[why] += 1

        def context(address: str) -> ssl.SSLContext:
            return api.authority.context([plain_name(each) for each in (api.id, *self._names, "localhost")], address)

        door = TcpDoor(api.env, tcp, may_come, lambda: _server(plain)(), lambda: _server(over_tls)(), context, refused)
        self._listeners.append(door)

    async def stop(self) -> None:
        """Close the listeners. Idempotent. Requests under way get a moment to finish."""
        if not self._runners:
            return
        await self._clean_up()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.unix_path)

    async def _clean_up(self) -> None:
        self._streams.close()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        runners, self._runners = self._runners, []
        await asyncio.gather(*(runner.cleanup() for runner in runners))

    def _own_visitor(self, runner: web.AppRunner, connection: asyncio.Transport) -> asyncio.Protocol | None:
        """The protocol object of a new connection to the unix socket; None where its user has too many."""
        server, uid = runner.server, uid_of(connection)
        assert server is not None
        bounded = uid not in (ROOT, self.api.env.users.own_uid)
        if bounded and sum(uid_of(each.transport) == uid for each in server.connections) >= USER_CONNECTIONS_MAX:
            self.refused["full"] += 1
            return None
        return server()

    def metrics(self) -> Measured:
        return {
            **self._times.measured(),
            **self._streams.metrics(),
            metrics.BUILD_INFO.of(VERSION): 1.0,
            metrics.BOOT.of(): float(self.api.boot),
            metrics.START_TIME_SECONDS.of(): self.api.started_wall_s,
            **{metrics.HTTP_REQUESTS.of(str(status)): float(count) for status, count in self.requests.items()},
            **{metrics.HTTP_REFUSED.of(why): float(count) for why, count in self.refused.items()},
        }

    # ---- routes ------------------------------------------------------------------------------------------------------

    def _app(self, door: Door) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._guard])
        app[DOOR] = door
        self._add_reads(app.router.add_get)
        if door.changes:
            self._add_changes(app.router.add_post)
            app.router.add_delete("/v1/volumes/{id}", self._ask("memory.remove", _path_volume))
        return app

    def _add_reads(self, get: Add) -> None:
        """Add the routes that read; none of them changes or starts anything."""
        for path, command in (
            ("hosts", "agent.hosts"),
            ("leader", "agent.leader"),
            ("memory/accounts", "memory.accounts"),
            ("quotas", "scheduler.quotas"),
            ("tenants", "scheduler.tenants"),
            ("status", "agent.health"),
        ):
            get(f"/v1/{path}", self._ask(command, _nothing))
        for path, command in LISTS.items():
            get(f"/v1/{path}", self._ask(command, _wait))
        get("/v1/jobs", self._ask("scheduler.jobs", _list_wish))
        get("/v1/starts", self._ask("scheduler.starts", _query))
        get("/v1/jobs/{id}", self._ask("scheduler.job", _path_and_wait))
        get("/v1/jobs/{id}/tuner", self._ask("tuner.show", _path_id))
        get("/v1/jobs/{id}/curve", self._ask("scheduler.curve", _path_and_wait))
        get("/v1/jobs/{id}/env", self._ask("scheduler.env", _path_id))
        get("/v1/jobs/{id}/logs", self._ask("scheduler.logs", _log_place))
        get("/v1/history", self._ask("agent.history", _query))
        get("/v1/report", self._ask("agent.report", _query))
        get("/v1/jobs/{id}/report", self._ask("scheduler.report_job", _path_id))
        get("/v1/links", self._ask("agent.links", _nothing))
        get("/v1/hosts/{id}/ping", self._ask("agent.ping", _path_and_wait))
        get("/v1/why/{id:.*}", self._ask("agent.why", _path_and_wait))
        get("/v1/events", self._events)
        get("/livez", self._livez)
        get("/readyz", self._readyz)
        get("/healthz", self._healthz)
        get("/metrics", self._metrics)
        for path, file, kind in PAGE:
            get(path, _fixed(file.read_bytes(), kind))
        get("/states.json", _fixed(msgspec.json.encode(TONES), "application/json"))

    def _add_changes(self, post: Add) -> None:
        post("/v1/jobs", self._ask("scheduler.submit", _body))
        post("/v1/starts", self._ask("scheduler.start_of", _body))
        post("/v1/jobs/{id}/cancel", self._ask("scheduler.cancel", _path_and_any_body))
        for verb in ("hold", "release", "requeue", "priority", "update", "checkpoint"):
            post(f"/v1/jobs/{{id}}/{verb}", self._ask(f"scheduler.{verb}", _path_and_any_body))
        post("/v1/jobs/{id}/move", self._ask("scheduler.move", _path_and_body))
        post("/v1/jobs/{id}/scale", self._ask("scheduler.scale", _path_and_body))
        post("/v1/jobs/{id}/arrange", self._ask("scheduler.arrange", _path_and_body))
        post("/v1/jobs/{id}/tune", self._ask("scheduler.tune", _path_and_body))
        post("/v1/jobs/{id}/sessions", self._ask("agent.open_session", _path_and_body))
        post("/v1/jobs/{id}/turn", self._ask("agent.turn_session", _path_and_body))
        post("/v1/jobs/{id}/stacks", self._ask("agent.stacks", _path_id))
        post("/v1/gpus/{id}/forget", self._ask("agent.forget_gpu", _path_id))
        post("/v1/hosts/{id}/give-up", self._ask("scheduler.give_up", _path_id))
        post("/v1/hosts/{id}/drain", self._ask("scheduler.drain", _path_and_body))
        post("/v1/hosts/{id}/resume", self._ask("scheduler.resume", _path_and_body))
        post("/v1/hosts/{id}/forget", self._ask("agent.forget_host", _path_id))
        post("/v1/hosts/{id}/cordon", self._ask("scheduler.cordon", _path_and_body))
        post("/v1/hosts/{id}/uncordon", self._ask("scheduler.uncordon", _path_and_body))
        post("/v1/volumes", self._ask("memory.create", _body))
        post("/v1/volumes/{id}/give-up", self._ask("memory.give_up", _path_volume))
        post("/v1/volumes/{id}/export", self._ask("memory.export", _volume_body))
        post("/v1/volumes/{id}/swap", self._ask("memory.swap", _volume_body))
        post("/v1/tensors/move", self._ask("aggregator.move", _body))
        post("/v1/keys/turn", self._ask("agent.turn_keys", _any_body))
        post("/v1/tokens", self._ask("agent.make_token", _nothing))
        post("/v1/login", self._ask("agent.login", _body))
        post("/v1/voters", self._ask("agent.change_voters", _body))
        post("/v1/quotas", self._ask("scheduler.quota_set", _body))
        post("/v1/tenants", self._ask("scheduler.tenant_set", _body))

    def _ask(self, name: str, arguments: Arguments) -> Route:
        async def route(request: web.Request) -> web.Response:
            given = await arguments(request)
            return self._answer(await self._command(name, {**given, ASKER: request[ASKS]}))

        return route

    async def _command(self, name: str, given: Mapping[str, Any]) -> Any:
        command = self.api.commands.get(name)
        if command is None:
            plugin = name.partition(".")[0]
            raise Refused(
                1,
                f"host {self.api.id} does not answer {name}",
                f"its plugin `{plugin}` is switched off or has failed",
                "agentctl status",
            )
        try:
            async with asyncio.timeout(ANSWER_S_MAX + given.get(WAIT, 0.0)):
                return await command(given)
        except TimeoutError:
            raise Refused(
                6, f"{name} took too long", f"no answer within {ANSWER_S_MAX:.0f} s", "agentctl status"
            ) from None

    async def _list(self, name: str, given: Mapping[str, Any]) -> Any:
        """What a list answers to a stream. Refused or NoLeader where it cannot be read, also for a defect."""
        try:
            return await self._command(name, given)
        except (Refused, NoLeader):
            raise
        except Exception as error:
            # A defect in a list must not look like a dead agent: its readers are told.
            self.api.env.log.error("a list could not be read", command=name, error=repr(error), exc_info=error)
            why = f"a defect in the agent ({type(error).__name__})"
            raise Refused(1, f"{name} failed", why, DEFECT_NEXT) from error

    def _answer(self, data: Any, status: int = 200) -> web.Response:
        said = {"data": data.data, "unanswered": data.unanswered} if isinstance(data, Gathered) else {"data": data}
        return _json({"schema": 1, "as_of_wall_s": self.api.env.clock.wall_s(), "host": self.api.id, **said}, status)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        door = request.app[DOOR]
        return await self._streams.serve(request, request[ASKS], SECURITY_HEADERS, lambda: door.admit(request))

    async def _livez(self, _request: web.Request) -> web.Response:
        """Answer 200, or 503 while the event loop lags."""
        lag_s = self.api.loop_lag_s
        return self._answer({"loop_lag_s": lag_s}, 200 if lag_s <= LAG_S_MAX else 503)

    async def _readyz(self, request: web.Request) -> web.Response:
        """Answer 200 when the event loop does not lag and no plugin has failed, else 503."""
        health = msgspec.to_builtins(await self._command("agent.health", {ASKER: request[ASKS]}))
        failed = _failed_plugins(health)
        ready = not failed and self.api.loop_lag_s <= LAG_S_MAX
        return self._answer({"ready": ready, "plugins_failed": failed}, 200 if ready else 503)

    async def _healthz(self, request: web.Request) -> web.Response:
        """Answer 200, or 503 when a plugin has failed; which, and why, is told by `agentctl status`."""
        health = msgspec.to_builtins(await self._command("agent.health", {ASKER: request[ASKS]}))
        failed = bool(_failed_plugins(health))
        return self._answer({"ok": not failed}, 503 if failed else 200)

    async def _metrics(self, _request: web.Request) -> web.Response:
        body = exposition({**self.api.metrics(), **self.metrics()})
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    # ---- admission ---------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Route) -> web.StreamResponse:
        began_s = self.api.env.clock.now_s()
        try:
            await self._admit(request)
            response = await handler(request)
        except Refused as refusal:
            response = _error(refusal.code, refusal.what, refusal.why, refusal.next)
        except NoLeader as none:
            why = str(none) or "no leader is known now"
            response = _error(75, "nothing was changed", why, "try again in a few seconds (agentctl status)")
        except OutcomeUnknown:
            response = _error(
                75, "the outcome is unknown", "the leader was lost before it answered", "check with agentctl jobs -a"
            )
        except web.HTTPException as refusal:
            self.refused[f"http_{refusal.status}"] += 1
            response = _http_error(request, refusal)
        except Exception as error:
            # A defect in a plugin must not look like a dead agent: answer 500, log it once, serve the next request.
            self.api.env.log.error("request failed", path=request.path, error=repr(error), exc_info=error)
            response = _error(1, f"{request.method} {request.path} failed", _defect(request, error), DEFECT_NEXT)
        self.requests[response.status] += 1
        if response.prepared:
            return response  # a stream that has ended: how long it lasted says nothing of the agent
        response.headers.update(SECURITY_HEADERS)
        self._times.see(self.api.env.clock.now_s() - began_s, _route_of(request))
        return response

    async def _admit(self, request: web.Request) -> None:
        """Admit a request, and note who sends it; Refused when the listener that it came over must not serve it."""
        found = await request.app[DOOR].admit(request)
        if isinstance(found, NotAdmitted):
            self.refused[found.reason] += 1
            raise Refused(4, found.what, found.why, found.next)
        request[ASKS] = found


# ---- arguments -------------------------------------------------------------------------------------------------------


async def _nothing(_request: web.Request) -> dict[str, Any]:
    return {}


async def _wait(request: web.Request) -> dict[str, Any]:
    return {WAIT: wait_of(request.query)} if WAIT in request.query else {}


async def _path_and_wait(request: web.Request) -> dict[str, Any]:
    return {**await _wait(request), "id": _id(request)}


async def _list_wish(request: web.Request) -> dict[str, Any]:
    given: dict[str, Any] = {
        name: request.query[name][:LIST_CHARACTERS_MAX] for name in FIELDS if name in request.query
    }
    for name in ("all", "mine"):
        given[name] = given.get(name, "") not in ("", "0", "false")
    return given


async def _query(request: web.Request) -> dict[str, Any]:
    return dict(request.query)


async def _path_id(request: web.Request) -> dict[str, Any]:
    return {"id": _id(request)}


async def _path_and_body(request: web.Request) -> dict[str, Any]:
    return {**await _body(request), "id": _id(request)}


async def _path_and_any_body(request: web.Request) -> dict[str, Any]:
    return {**(await _body(request) if request.can_read_body else {}), "id": _id(request)}


async def _any_body(request: web.Request) -> dict[str, Any]:
    return await _body(request) if request.can_read_body else {}


async def _path_volume(request: web.Request) -> dict[str, Any]:
    return {"volume": _id(request)}


async def _volume_body(request: web.Request) -> dict[str, Any]:
    return {**await _body(request), "volume": _id(request)}


async def _log_place(request: web.Request) -> dict[str, Any]:
    place: dict[str, Any] = {"id": _id(request), "offset": _count(request, "offset", 0)}
    if "rank" in request.query:
        place["rank"] = _count(request, "rank", 0)
    if "since_s" in request.query:
        place["since_s"] = _count(request, "since_s", 0)
    return place


async def _body(request: web.Request) -> dict[str, Any]:
    """The JSON object in the body. 413 when it is too long, Refused when it is anything else."""
    try:
        text = await request.read()
    except (ConnectionError, web.RequestPayloadError, HttpProcessingError) as error:
        raise _malformed("the body is incomplete", str(error)) from None
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _malformed("the body is not JSON", str(error)) from None
    if not isinstance(found, dict):
        raise _malformed("the body is not a JSON object", f"it is a {type(found).__name__}")
    if _is_deep(found):
        raise _malformed("invalid body", f"it is nested deeper than {DEPTH_MAX} levels")
    return found


def _is_deep(found: object) -> bool:
    """Whether Python's `repr` of this value, in any plugin, would raise RecursionError."""
    layer = [found]
    for _ in range(DEPTH_MAX):
        layer = [inner for outer in layer for inner in _within(outer)]
        if not layer:
            return False
    return True


def _within(found: object) -> Iterable[object]:
    if isinstance(found, dict):
        return found.values()
    return found if isinstance(found, list) else ()


def _id(request: web.Request) -> str:
    found = request.match_info["id"]
    if not 0 < len(found) <= ID_CHARACTERS_MAX or not found.isprintable():
        raise _malformed("invalid id", f"expected 1 to {ID_CHARACTERS_MAX} printable characters")
    return found


def _count(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise _malformed(f"invalid {name}={text[:40]!r}", "expected a whole number, 0 or more")
    return int(text)


def _malformed(what: str, why: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(reason="malformed", text=f"{what}\n{why}")


# ---- answers ---------------------------------------------------------------------------------------------------------


def _route_of(request: web.Request) -> str:
    """The route of a request, as the code has it: what clients ask for is not bounded."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical


def _json(body: Any, status: int) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def _error(code: int, what: str, why: str, next: str) -> web.Response:
    return _json(ErrorView(code, what, why, next), STATUS_OF_CODE.get(code, 500))


def _defect(request: web.Request, error: Exception) -> str:
    """A defect of the agent in words for whoever asked: what an exception says may be another user's."""
    asker = request.get(ASKS)
    told = asker is not None and asker.role == "operator"
    return repr(error) if told else f"a defect in the agent ({type(error).__name__})"


def _http_error(request: web.Request, refusal: web.HTTPException) -> web.Response:
    """Turn what aiohttp or a parser above refused into an ErrorView with the same status."""
    if refusal.status == 413:
        what, why = "the request is too long", f"a body has at most {BODY_BYTES_MAX} bytes"
    elif refusal.status == 404:
        what, why = f"there is no {request.path[:ID_CHARACTERS_MAX]}", "unknown path"
    elif refusal.status == 405:
        what, why = f"{request.path[:ID_CHARACTERS_MAX]} does not take {request.method}", "wrong method"
    else:
        what, _, why = (refusal.text or refusal.reason).partition("\n")
    return _json(ErrorView(CODE_OF_STATUS.get(refusal.status, 1), what, why, "agentctl --help"), refusal.status)


def _server(runner: web.AppRunner) -> web.Server:
    assert runner.server is not None, "it is set up"
    return runner.server


def _failed_plugins(health: Any) -> list[str]:
    plugins = health.get("plugins", {})
    return sorted(name for name, plugin in plugins.items() if plugin.get("state") == "failed")


# ---- the page --------------------------------------------------------------------------------------------------------

KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


def _page(folder: Traversable, path: str = "/") -> Iterable[tuple[str, Traversable, str]]:
    """The files of the web page below a folder: path -> file, and its type. Other files there, such as licences, are
    not served."""
    for each in sorted(folder.iterdir(), key=lambda one: one.name):
        if each.is_dir():
            yield from _page(each, f"{path}{each.name}/")
        elif kind := KINDS.get(f".{each.name.rpartition('.')[2]}"):
            yield "/" if each.name == "index.html" else path + each.name, each, kind


PAGE = tuple(_page(files("agent.api") / "page"))
"""The files of the web page: path, file in agent/api/page/, and its type."""


def _fixed(body: bytes, kind: str) -> Route:
    """A route whose answer is always the same bytes."""

    async def route(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8")

    return route


def _counting_logger(http: HttpApi) -> logging.Logger:
    """The logger of aiohttp. Bytes that are not HTTP are counted and not logged, since anyone can send them."""

    class Count(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            if isinstance(error, HttpProcessingError):
                http.refused["not_http"] += 1
            elif record.levelno >= logging.WARNING:
                http.api.env.log.error("http server failed", error=record.getMessage(), exc_info=error)

    logger = logging.Logger("covey.http", logging.DEBUG)
    logger.addHandler(Count())
    return logger

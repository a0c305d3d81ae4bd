"""Serves `GET /v1/events`: server-sent events of the tables that were asked for.

Of each reader a number for each of its tables is kept, up to which it was told everything; what it has not taken yet is
not queued but merged (`agent.api.streams.told`). One that takes nothing for `SLOW_S` is let go.
"""

import asyncio
import contextlib
import difflib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import hdrs, web

from agent import metrics
from agent.api import access
from agent.api.admission import NotAdmitted, network_of, peer_ip
from agent.api.streams.tables import HAPPENED, TABLES
from agent.api.streams.told import ToldTable
from agent.api.streams.watched import ReadList, Source, Watched
from covey.core.errors import Refused
from covey.core.metrics import Measured
from plugins.askers import Asker, OwnerUser
from plugins.views import EventLine

STREAMS_MAX, STREAMS_USER_MAX, STREAMS_ADDRESS_MAX = 64, 16, 16
"""The most streams open at the same time: in all, of one user at the unix socket or by certificate, and of one address
on TCP without one. Root and the agent's own user are bounded by the first alone."""
ALIVE_S = 15.0
"""Seconds without a change after which a line says that the stream is alive."""
SLOW_S = 30.0
"""Seconds after which a reader that takes nothing is let go."""
AGAIN_S = 30.0
"""Seconds after which it is asked again whether a reader may still read."""
PART_BYTES = 1 << 16
"""The most bytes that are given to a connection at a time."""
ID_CHARACTERS_MAX = 64
LIST_CHARACTERS_MAX = 400
"""The most characters of the tables that are asked for."""
Admit = Callable[[], Awaitable[Asker | NotAdmitted]]
"""Who reads now, or why they may not any more."""


def view_of(asker: Asker) -> str:
    """Whose view of the tables a reader has; empty: it sees all."""
    return "" if asker.role == "operator" or asker.reads_all else f"u{asker.uid}"


class Reader:
    """What is known of one reader."""

    def __init__(self, asker: Asker, boot: int, jobs: ToldTable | None = None) -> None:
        """`jobs`: the table that says whose the jobs of events are; None: it sees all events."""
        self.asker, self._boot = asker, boot
        self._jobs = jobs
        self.known: dict[str, int | None] = {}
        """Table -> the number up to which it was told everything; None: nothing."""

    def id(self) -> str:
        """The id of all that it was told: `BOOT.N`, with whose view it was; empty while a table is missing."""
        numbers = [number for number in self.known.values() if number is not None]
        if len(numbers) < len(self.known):
            return ""
        return f"{self._boot}.{min(numbers)}" + (f".{view}" if (view := view_of(self.asker)) else "")

    def messages(self, told: Iterable[ToldTable], number: int, wall_s: float) -> list[bytes]:
        """What it is to be told now, everything up to this number."""
        found: list[tuple[str, Any]] = []
        for each in told:
            if not each.is_known or (each.name == HAPPENED and self._jobs is not None and not self._jobs.is_known):
                continue
            message = each.since(self.known[each.name], self._shown, wall_s)
            self.known[each.name] = number
            if message is not None:
                found += [message] if each.name != HAPPENED else _events(message[1])
        last = len(found) - 1
        return [event(name, data, self.id() if place == last else "") for place, (name, data) in enumerate(found)]

    def _shown(self, row: Any) -> Any:
        return access.shown_to(self.asker, row, self._is_own)

    def _is_own(self, line: EventLine) -> bool:
        """Whether an event is of an own job."""
        row = self._jobs.row(line.subject.removeprefix("job/")) if self._jobs is not None else None
        return row is not None and OwnerUser(row.user, row.uid).is_user(self.asker)


def _events(data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """A message for each event of a table of events, oldest first."""
    lines = data["rows"] if "rows" in data else data["set"]
    return [(HAPPENED, line) for line in sorted(lines.values(), key=lambda line: float(line["wall_s"]))]


def event(name: str, data: Any, id: str) -> bytes:
    """One server-sent event."""
    said = f"event: {name}\n" + (f"id: {id}\n" if id else "")
    return said.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


def number_in(id: str, boot: int, view: str, newest: int) -> int | None:
    """The number in the id that a reader has seen last; None: it is of another boot or view, or nothing of ours."""
    parts = id.split(".")
    if len(id) > ID_CHARACTERS_MAX or parts[:1] != [str(boot)] or parts[2:] != [view][: bool(view)]:
        return None
    number = parts[1] if len(parts) > 1 else ""
    return int(number) if number.isascii() and number.isdigit() and int(number) <= newest else None


class EventStreams:
    """All open streams of one agent. `refused` counts, by reason, the requests that were not served."""

    def __init__(self, source: Source, read_list: ReadList, boot: Callable[[], int], refused: Counter[str]) -> None:
        self._source, self._boot, self._refused = source, boot, refused
        self._watched = Watched(source, read_list)
        self._open: list[str] = []
        """Whose each open stream is: `uid/NUMBER` or `address/NETWORK`."""
        self._ended: Counter[str] = Counter()

    def close(self) -> None:
        """End all streams."""
        self._watched.close()

    def metrics(self) -> Measured:
        return {
            metrics.HTTP_STREAMS.of(): float(len(self._open)),
            **{metrics.HTTP_STREAMS_ENDED.of(why): float(count) for why, count in self._ended.items()},
        }

    async def serve(
        self, request: web.Request, asker: Asker, headers: Mapping[str, str], admit: Admit
    ) -> web.StreamResponse:
        """Answer with a stream that lasts until its reader leaves, may not read any more, or the agent stops. Refused
        where it is not to be opened. `headers`: those of every answer; `admit`: asks who reads now."""
        self._refuse_other_pages(request)
        names = tables_in(request.query.get("tables", ""))
        for name in names:
            rule = access.RULES.get(TABLES[name].command)
            if (no := access.refusal(asker, TABLES[name].command, rule, None)) is not None:
                raise Refused(4, *no)
        response = web.StreamResponse(headers={**headers, hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8"})
        if request.method == hdrs.METH_HEAD:
            return web.Response(headers=response.headers)
        whose = self._whose(request, asker)
        self._refuse_many(whose, asker)
        seen = request.headers.get("Last-Event-ID", "") or request.query.get("since", "")
        told = {name: self._watched.watch(name) for name in _watches(names, asker)}
        reader = Reader(asker, self._boot(), told.get("jobs") if view_of(asker) else None)
        reader.known = dict.fromkeys(names, number_in(seen, self._boot(), view_of(asker), self._watched.number))
        self._open.append(whose)
        try:
            await response.prepare(request)
            why = await self._tell(request, response, reader, [told[name] for name in names], admit)
            if why != "slow":
                with contextlib.suppress(ConnectionError):
                    await response.write_eof()
        except ConnectionError:
            why = "left"
        finally:
            self._open.remove(whose)
            for name in told:
                self._watched.leave(name)
        self._ended[why] += 1
        return response

    async def _tell(
        self, request: web.Request, response: web.StreamResponse, reader: Reader, told: list[ToldTable], admit: Admit
    ) -> str:
        """Tell the reader everything, and then each change; why that has ended, as a label."""
        clock = self._source.env.clock
        asked_s = wrote_s = clock.now_s()
        await response.write(b": Covey\n\n")
        while not self._watched.is_closed:
            turned, now_s = self._watched.turned, clock.now_s()
            messages = reader.messages(told, self._watched.number, clock.wall_s())
            if not messages and now_s - wrote_s >= ALIVE_S:
                messages = [b": alive\n\n"]
            for message in messages:
                wrote_s = now_s
                if not await _taken(response, message):
                    if request.transport is not None:
                        request.transport.abort()
                    return "slow"
            if request.transport is None or request.transport.is_closing():
                return "left"
            if now_s - asked_s >= AGAIN_S:
                asked_s = now_s
                if await admit() != reader.asker:
                    return "not_allowed"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEFT_S):
                    await turned.wait()
        return "stopped"

    def _whose(self, request: web.Request, asker: Asker) -> str:
        return f"uid/{asker.uid}" if asker.uid >= 0 else f"address/{network_of(peer_ip(request.transport))}"

    def _refuse_many(self, whose: str, asker: Asker) -> None:
        """Refused where so many streams are open that there may be no further one."""
        kind, _, name = whose.partition("/")
        most = STREAMS_MAX if asker.is_agent else STREAMS_USER_MAX if kind == "uid" else STREAMS_ADDRESS_MAX
        there = len(self._open) if most == STREAMS_MAX else self._open.count(whose)
        if len(self._open) < STREAMS_MAX and there < most:
            return
        full = len(self._open) >= STREAMS_MAX
        self._refused["streams_full" if full else f"streams_{'user' if kind == 'uid' else 'address'}"] += 1
        why = f"{STREAMS_MAX} are open here, and no more may be" if full else f"{there} of {kind} {name} are open here"
        step = "close one, or ask another host's agent; lists can be read: GET /v1/jobs"
        raise Refused(75, "no further stream was opened", why, step)

    def _refuse_other_pages(self, request: web.Request) -> None:
        """Refused where a web page of somewhere else sent the request: it may not read the answer, and would take up a
        stream."""
        origin, from_where = request.headers.get(hdrs.ORIGIN), request.headers.get("Sec-Fetch-Site", "")
        same = origin is None or urlsplit(origin).netloc.lower() == request.headers.get(hdrs.HOST, "").lower()
        if same and from_where not in ("cross-site", "same-site"):
            return
        self._refused["web_page"] += 1
        why = f"a web page of {(origin or 'another origin')[:80]} asked for it"
        raise Refused(4, "this stream is not for that page", why, "open the page of the agent itself")


LEFT_S = 1.0
"""Seconds between two looks at whether a reader has left."""


async def _taken(response: web.StreamResponse, message: bytes) -> bool:
    """Give a message to the connection, in parts; whether its reader takes them."""
    parts = memoryview(message)
    try:
        for at in range(0, len(parts), PART_BYTES):
            async with asyncio.timeout(SLOW_S):
                await response.write(parts[at : at + PART_BYTES])
    except TimeoutError:
        return False
    return True


def _watches(names: Sequence[str], asker: Asker) -> Iterable[str]:
    """The tables that have to be read for a reader of these: who does not see all events sees those of own jobs."""
    return dict.fromkeys((*names, "jobs") if HAPPENED in names and view_of(asker) else names)


def tables_in(text: str) -> list[str]:
    """The tables that a request names, `hosts,jobs`. Refused names a wrong one, and the nearest right one."""
    names = list(dict.fromkeys(word for word in text[:LIST_CHARACTERS_MAX].split(",") if word))
    for name in names:
        if name not in TABLES:
            near = difflib.get_close_matches(name, TABLES, 1, 0.5)
            step = f"did you mean {near[0]}?" if near else "GET /v1/events?tables=hosts,jobs"
            raise Refused(2, f"there is no table {name[:40]!r}", f"expected some of {', '.join(TABLES)}", step)
    if not names:
        step = "GET /v1/events?tables=hosts,jobs"
        raise Refused(2, "no table is named", f"`tables` names some of {', '.join(TABLES)}", step)
    return names

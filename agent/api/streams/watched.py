"""Reads the lists of a stream for all its readers together, while somebody watches them.

A list that this host answers alone is read again when what it shows has changed, which the agent's counts tell
(`Source.counts`), and every `LOCAL_S` besides; one to which every host adds every `RACK_S`. Reading takes at most
`1 / SPARE` of a processor: the more rows, the rarer.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from agent.api.gathering import WAIT, Gathered, Unanswered
from agent.api.streams.tables import TABLES, added, ask_after, keyed
from agent.api.streams.told import ToldTable
from covey.core.errors import NoLeader, Refused
from covey.core.ids import HostId
from covey.ports.env import Env
from covey.ports.streams import UNKNOWN_USER
from plugins.askers import ASKER, Asker
from plugins.facts import HostView

LOOK_S = 0.1
"""Seconds between two looks at whether something has changed."""
LOCAL_S = 0.5
"""Seconds after which a list of this host alone is read again although nothing is known to have changed."""
RACK_S, LARGE_RACK_S, LARGE_RACK = 2.0, 5.0, 100
"""Seconds between two questions to all hosts, in racks of up to `LARGE_RACK` hosts and in larger ones."""
WAIT_S = 1.5
"""Seconds for which hosts are waited for."""
SPARE = 20.0
"""Reading a list of this host is followed by a pause of at least so many times the processor time that it took."""
READS_ALL = Asker(UNKNOWN_USER, "", "viewer", reads_all=True)
"""Whoever reads the lists for all readers: what each of them is shown is decided later."""


ReadList = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Asks a command for its rows. Refused or NoLeader where there are none, whatever the reason."""


class Source(Protocol):
    """What reading lists needs of the agent."""

    @property
    def id(self) -> HostId: ...
    @property
    def env(self) -> Env: ...
    def hosts(self) -> Sequence[HostView]: ...
    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers that grow when something has changed: `log`, of this host's copy of the log; `hosts`, of what gossip
        knows of hosts."""


class Watched:
    """The tables that somebody watches. `number` is that of the newest change; `turned` is set by the next one."""

    def __init__(self, source: Source, read_list: ReadList) -> None:
        self._source, self._read_list = source, read_list
        self.number = 0
        self.told: dict[str, ToldTable] = {}
        self.turned = asyncio.Event()
        self._watchers: Counter[str] = Counter()
        self._reading: set[str] = set()
        """The tables that a task reads."""
        self._closed = asyncio.Event()

    def watch(self, name: str) -> ToldTable:
        """Have a table read from now on; `leave` ends that. Its rows are known when `is_known` says so."""
        self._watchers[name] += 1
        told = self.told.get(name)
        if told is None:
            told = self.told[name] = ToldTable(name, TABLES[name], self.number)
        if name not in self._reading:
            self._reading.add(name)
            self._source.env.spawn(f"agent: stream of {name}", self._read_while_watched(told))
        return told

    def leave(self, name: str) -> None:
        self._watchers[name] -= 1

    def close(self) -> None:
        """Read nothing any more, and wake all readers."""
        self._closed.set()
        self._turn()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def _turn(self) -> None:
        turned, self.turned = self.turned, asyncio.Event()
        turned.set()

    async def _read_while_watched(self, told: ToldTable) -> None:
        clock, table = self._source.env.clock, told.table
        try:
            while self._watchers[told.name] > 0 and not self.is_closed:
                seen, began_s = self._source.counts.get(table.stirred_by), clock.cpu_s()
                await self._read(told)
                if table.gathered:
                    await self._pause(LARGE_RACK_S if len(self._source.hosts()) > LARGE_RACK else RACK_S)
                else:
                    await self._until_stirred(table.stirred_by, seen, clock.cpu_s() - began_s)
        finally:
            self._reading.discard(told.name)
            told.is_known = False

    async def _until_stirred(self, by: str, seen: int | None, took_s: float) -> None:
        """Wait until a list of this host has changed, or is to be read again anyway."""
        clock = self._source.env.clock
        ended_s = clock.now_s()
        await self._pause(max(LOOK_S, took_s * SPARE))
        while not self.is_closed and self._source.counts.get(by) == seen and clock.now_s() - ended_s < LOCAL_S:
            await self._pause(LOOK_S)

    async def _pause(self, for_s: float) -> None:
        try:
            async with asyncio.timeout(for_s):
                await self._closed.wait()
        except TimeoutError:
            return

    async def _read(self, told: ToldTable) -> None:
        """Read a list once, and wake the readers where it has changed."""
        was_known, own = told.is_known, self._source.id
        given = {**told.table.given, ASKER: READS_ALL, **({WAIT: WAIT_S} if told.table.gathered else {})}
        if told.table.adds:
            given["after"] = ask_after(told.rows, self._source.env.clock.wall_s())
        number, wall_s = self.number + 1, self._source.env.clock.wall_s()
        try:
            answer = await self._read_list(told.table.command, given)
            found = answer if isinstance(answer, Gathered) else Gathered(answer)
            rows, unanswered = keyed(told.table, found.data), found.unanswered
            rows = added(told.rows, rows) if told.table.adds else rows
            is_news = told.publish(rows, unanswered, number, wall_s)
        except (Refused, NoLeader) as no:
            why = f"{no.what}: {no.why}" if isinstance(no, Refused) else str(no) or "no leader is known now"
            is_news = told.publish(None, (Unanswered(own, why),), number, wall_s)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # A defect in comparing rows is told to readers, and does not end the agent, as that of a task does.
            self._source.env.log.error("a stream's rows", table=told.name, error=repr(error), exc_info=error)
            why = f"{told.name} cannot be compared: a defect in the agent ({type(error).__name__})"
            is_news = told.publish(None, (Unanswered(own, why),), number, wall_s)
        if is_news:
            self.number += 1
            self._turn()
        elif not was_known:
            self._turn()

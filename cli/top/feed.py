"""The lists that `agentctl top` shows, kept as the agent's stream of events tells them (`GET /v1/events`)."""

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cli.client import Agent, AgentctlError
from cli.watched import WatchedTable

NAMES = ("jobs", "hosts", "gpus", "slabs")
"""The tables that are shown."""
AGAIN_S = 1.0
"""Seconds until a stream that broke is asked for again."""


class Tables:
    """The rows of all tables. One thread tells it what comes, another one reads copies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables = {name: WatchedTable(name) for name in NAMES}
        self._known: set[str] = set()
        self.version = 0
        """A number that grows with each message."""
        self.trouble = "waiting for the agent's first answer"
        """Why nothing comes; empty: the rows are as they are now."""

    def tell(self, event: str, data: Mapping[str, Any]) -> None:
        """One message of the stream."""
        if event not in ("snapshot", "change"):
            return
        with self._lock:
            name = str(data["table"])
            self._tables[name].take(event, data)
            self._known.add(name)
            self.trouble = ""
            self.version += 1

    def is_known(self, name: str) -> bool:
        return name in self._known

    def unanswered(self, name: str) -> Sequence[Mapping[str, Any]]:
        """The hosts whose rows of a table are missing or old."""
        return self._tables[name].unanswered if name in self._tables else ()

    def now(self, names: Collection[str], wall_s: float) -> dict[str, dict[str, Any]]:
        """Key and row of each row of these tables, with the times in them counted on until now."""
        with self._lock:
            kept = [table for name, table in self._tables.items() if name in names]
            return {table.name: dict(zip(table.rows, table.now(wall_s), strict=True)) for table in kept}


class Feed:
    """The thread that reads the stream, and asks for it anew from where it broke."""

    def __init__(self, agent: Agent, tables: Tables) -> None:
        self._agent, self._tables, self._last = agent, tables, ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            why = self._read()
            if len(self._agent.addresses) > 1:
                self._agent.address = None
            self._tables.trouble = why
            self._stopped.wait(AGAIN_S)

    def _read(self) -> str:
        """Read until the stream ends; why it did."""
        try:
            for event in self._agent.stream("events", tables=",".join(NAMES), since=self._last or None):
                if self._stopped.is_set():
                    return "top ends"
                if event is not None:
                    name, data, id = event
                    self._tables.tell(name, data)
                    self._last = id or self._last
        except AgentctlError as error:
            return f"{error.what}: {error.why}"
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # no message of ours: from the beginning
            self._last = ""
            return f"the agent said what is not understood: {type(error).__name__}: {error}"
        return "the agent ended the stream"

"""agentctl, run in this process against the agents of a simulated rack, and what it prints."""

import contextlib
import io
import re
from collections.abc import Mapping
from typing import Any
from unittest import mock

import msgspec

import cli.main
from agent.api.gathering import LISTS, Gathered
from chaos.rackworld import SimRack
from cli.client import Agent, AgentctlError, Answer
from covey.core.errors import Refused

READS = {
    "hosts": "agent.hosts",
    "jobs": "scheduler.jobs",
    "leader": "agent.leader",
    "quotas": "scheduler.quotas",
    "tenants": "scheduler.tenants",
    "status": "agent.health",
    "memory/accounts": "memory.accounts",
    **LISTS,
}
"""Path under /v1 -> command, as in `agent/api/http.py`; `jobs/j1` and `why/j1` name what they ask about."""
OF = {"jobs": "scheduler.job", "why": "agent.why"}


class SimulatedAgent(Agent):
    """The agent of one host of the rack, without HTTP in between."""

    def __init__(self, rack: SimRack, host: str) -> None:
        super().__init__([f"unix:/run/{host}"])
        self.address, self._rack, self._host = self.addresses[0], rack, host

    def get(self, *path: str, **query: object) -> Answer:
        if path == ("starts",):
            return self._answered("scheduler.starts", {name: value for name, value in query.items() if value})
        command = READS.get("/".join(path)) or OF[path[0]]
        given: dict[str, Any] = {"id": path[1]} if command in OF.values() else {}
        if path[2:] == ("logs",):
            return self._answered("scheduler.logs", {**given, **query})
        return self._answered(command, {**given, "all": bool(query.get("all"))})

    def gather(self, *path: str) -> Answer:
        return self.get(*path)

    def of_host(self, host: str) -> Agent:
        return SimulatedAgent(self._rack, host)

    def _answered(self, command: str, given: Mapping[str, Any]) -> Answer:
        try:
            found = self._rack.answer(self._host, command, given)
        except Refused as refused:
            raise AgentctlError(refused.code, refused.what, refused.why, refused.next) from None
        more = {"unanswered": msgspec.to_builtins(found.unanswered)} if isinstance(found, Gathered) else {}
        data = msgspec.to_builtins(found.data if isinstance(found, Gathered) else found)
        return Answer(data, self._host, 0.0, {"data": data, **more})


def agentctl(rack: SimRack, host: str, line: str) -> str:
    """What a person sees who types this line on a host of the rack, whose hosts are called gpu1, gpu2 for people."""
    out = io.StringIO()
    find = mock.patch.object(cli.main, "find", lambda _agent, _environ: SimulatedAgent(rack, host))
    with find, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        cli.main.main([re.sub(r"\bgpu(\d)\b", r"h\1", word) for word in line.split()[1:]])
    return re.sub(r"\bh(\d)\b(    +)?", lambda found: f"gpu{found[1]}{(found[2] or '')[2:]}", out.getvalue())

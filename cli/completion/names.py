"""Names that the agent of this host knows now: of jobs, hosts, tenants and volumes. None when it is silent."""

import contextlib
import signal
from collections.abc import Iterable, Iterator
from typing import Any

from cli.client import Agent, AgentctlError, checked_address
from cli.completion.candidates import ENDED, HOSTS, JOBS, SUBJECTS, TENANTS, VOLUMES, Candidate

WAIT_S = 0.15
"""The longest that an agent is waited for, seconds: with the start of agentctl it is 200 ms until names are there."""
GATHER_S = 0.1
"""How long the agent waits for other hosts where it has to ask them, seconds."""
JOBS_MAX = 500
"""The most jobs that are offered: the newest."""


class TooLateError(Exception):
    """The names did not come in time."""


class Names:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def of(self, kind: str, address: str | None) -> Iterable[Candidate]:
        """The names of a kind, from the agent at that address, or the one found here. Empty: nobody says in time."""
        with contextlib.suppress(TooLateError, AgentctlError, KeyError, TypeError):
            agent = self._agent if address is None else Agent([checked_address(address)])
            agent.wait_s, agent.timeout_s = GATHER_S, WAIT_S
            with within(WAIT_S):
                return list(_read(agent, kind))
        return []


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """TooLateError in what is waited for here, whatever it is: a socket, or the next of several agents."""

    def late(_number: int, _frame: object) -> None:
        raise TooLateError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _read(agent: Agent, kind: str) -> Iterator[Candidate]:
    if kind in (JOBS, ENDED, SUBJECTS):
        ended = 1 if kind != JOBS else None
        for job in agent.get("jobs", all=ended, mine=1, sort="-id", limit=JOBS_MAX).data:
            yield Candidate(str(job["id"]), " ".join(filter(None, (_said(job["state"]), _said(job["name"])))))
    if kind in (HOSTS, SUBJECTS):
        prefix = "host/" if kind == SUBJECTS else ""
        for host in agent.get("hosts").data:
            yield Candidate(f"{prefix}{host['host']}", _said(host["state"]))
    if kind == TENANTS:
        for tenant in agent.get("tenants").data:
            yield Candidate(str(tenant["tenant"]), _said(" ".join(tenant["users"])))
    if kind in (VOLUMES, SUBJECTS):
        prefix = "volume/" if kind == SUBJECTS else ""
        for volume in agent.gather("volumes").data:
            yield Candidate(f"{prefix}{volume['volume']}", f"on {_said(volume['host'])}")


def _said(value: Any) -> str:
    """Somebody else's words, for one line of a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(value))[:80]

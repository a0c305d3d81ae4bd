"""A gang of four on four hosts is upgraded where it runs while an agent dies: all ranks or none, whichever host is
asked.

Each try: a guaranteed job of four has the quota of its tenant and a rank on each host; a gang of four of the same
tenant is demoted, since it waits for that quota, and runs beside it. The guaranteed job is cancelled, so the quota is
free and the log upgrades the gang, and at a random moment of that one agent is killed (`kill -9`).

Meanwhile and afterwards every rank is asked what its page says, and every agent that lives what its copy of the log
says. `Tried` has what they said; what must be true of it stands in `tests/rack/test_upgrade.py`, and in `Tried.whole`.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from cli.client import AgentctlError
from tests.rack.living_rack import wait
from tests.rack.sharing_rack import SharingRack, rank

SCHEDULER = "beside = 1\ndemote_after_s = 0.3\nquotas = {a = 4}"
HOSTS = ("gpu1", "gpu2", "gpu3", "gpu4")
KILL_WITHIN_S = 1.2
"""Seconds after the cancel within which the agent is killed: ranks end, the log hears of them, the gang is upgraded,
its ranks are told."""
WATCH_S = 4.0
AGREE_S, BACK_S = 15.0, 60.0
"""Seconds for hosts that live to agree on one word, and for all four once the dead agent is back."""
Words = frozenset[str]
"""What agents and ranks say that the gang is: `guaranteed`, `opportunistic`."""
GUARANTEED, OPPORTUNISTIC = Words(("guaranteed",)), Words(("opportunistic",))


@dataclass
class Tried:
    """What was seen in one try."""

    victim: str
    led: bool
    """Whether the victim was the leader."""
    kill_s: float
    """Seconds after the cancel when the agent was killed."""
    log_s: float | None = None
    """Seconds after the cancel when the first agent said that the gang is guaranteed."""
    ranks_s: float | None = None
    """Seconds after the cancel when all ranks of agents that live were guaranteed."""
    wrong: list[str] = field(default_factory=list)
    """What was seen at a moment and may not be: a rank that is guaranteed where the log does not say so of its gang, an
    agent that takes back that it is, two guaranteed jobs on a device."""
    before: Words = frozenset()
    """What agents and ranks that live said before the dead agent was back."""
    after: Words = frozenset()
    """What agents, ranks and the sharing of all four hosts said with it."""
    back_s: float = 0.0
    """Seconds from the return of the agent until all said so."""
    upgrades: int = 0
    """How often the log said that the gang was upgraded."""

    @property
    def whole(self) -> bool:
        """Whether all ranks were upgraded, or none."""
        return not self.wrong and self.before in (GUARANTEED, OPPORTUNISTIC) and self.after == GUARANTEED


class Upgrade:
    """One try on a rack."""

    def __init__(self, rack: SharingRack, rng: Random) -> None:
        self.rack = rack
        leader = rack.agent().get("leader").data["leader"]
        victim = rng.choice(HOSTS)
        self.tried = Tried(victim, victim == leader, rng.uniform(0.0, KILL_WITHIN_S))
        self.alive = [host for host in HOSTS if host != victim]
        self.said: dict[str, bool] = dict.fromkeys(HOSTS, False)
        """Whether this host's agent said that the gang is guaranteed."""
        self.owner = self.gang = ""
        self.at: dict[int, str] = {}
        """The host of each rank of the gang."""

    def run(self) -> Tried:
        self.owner = self.rack.submit("owner", rank(0.001, 0.03), workers=4, tenant="a")
        self.rack.runs(self.owner)
        self.gang = self.rack.submit("gang", rank(0.001, 0.03), workers=4, tenant="a", job_class="auto")
        found = self.rack.runs(self.gang)
        self.at = {each: place["host"] for place in found["places"] for each in place["ranks"]}
        assert found["runs_as"] == "opportunistic" and sorted(self.at.values()) == sorted(HOSTS)
        wait("all ranks have pages", lambda: all(self.rack.word(self.gang, each).get("pages") for each in self.at))
        began_s = time.monotonic()
        self.rack.agent().post("jobs", self.owner, "cancel")
        self._watch(began_s, began_s + self.tried.kill_s, HOSTS)
        self.rack.kill(self.tried.victim)
        self.said[self.tried.victim] = False  # one that begins anew has to hear from the leader what is decided
        self._watch(began_s, time.monotonic() + WATCH_S, self.alive)
        self.tried.before = settled(lambda: self._words(self.alive), (GUARANTEED, OPPORTUNISTIC), AGREE_S)
        self._return()
        return self.tried

    def _return(self) -> None:
        self.rack.start()
        began_s = time.monotonic()
        self.tried.after = settled(lambda: self._words(HOSTS) | self._shared(), (GUARANTEED,), BACK_S)
        self.tried.back_s = time.monotonic() - began_s
        rows = [row["reason"] for row in self.rack.agent().get("why", self.gang).data if row["event"] == "upgraded"]
        self.tried.upgrades = len({reason for reason in rows if "quota" in reason})
        self.rack.agent().post("jobs", self.gang, "cancel")
        wait("nothing runs", lambda: self.rack.job(self.gang)["over"] and self.rack.job(self.owner)["over"])

    def _watch(self, began_s: float, until_s: float, hosts: Sequence[str]) -> None:
        while time.monotonic() < until_s:
            self._look(began_s, hosts)
            time.sleep(0.02)

    def _look(self, began_s: float, hosts: Sequence[str]) -> None:
        ranks = {host: self._rank_says(host) for host in hosts}
        for host in hosts:
            try:
                self._agent_says(host)
            except AgentctlError:
                continue  # the leader's election
            if ranks[host] and not self.said[host]:
                self.tried.wrong.append(f"the rank on {host} is guaranteed, and not by the log")
        passed_s = time.monotonic() - began_s
        if self.tried.log_s is None and any(self.said.values()):
            self.tried.log_s = passed_s
        if self.tried.ranks_s is None and all(ranks.values()):
            self.tried.ranks_s = passed_s

    def _agent_says(self, host: str) -> bool:
        now = bool(self.rack.listed(self.gang, host)["runs_as"] == "guaranteed")
        if self.said[host] and not now:
            self.tried.wrong.append(f"{host} took back what it said")
        self.said[host] = now
        for device, jobs in self.rack.shared(host).items():
            guaranteed = [job for job, kind in jobs.items() if kind == "guaranteed"]
            if len(guaranteed) > 1:
                self.tried.wrong.append(f"{device} has {guaranteed}")
        return now

    def _shared(self) -> Words:
        """What the sharing of each host says."""
        found = [jobs.get(self.gang, "") for host in HOSTS for jobs in self.rack.shared(host).values()]
        return Words(found)

    def _rank_says(self, host: str) -> bool:
        each = next(each for each, at in self.at.items() if at == host)
        found = self.rack.word(self.gang, each)
        os.kill(found["pid"], 0)  # it lives
        return bool(found["guaranteed"])

    def _words(self, hosts: Sequence[str]) -> Words:
        said = [says(host) for host in hosts for says in (self._agent_says, self._rank_says)]
        return Words("guaranteed" if guaranteed else "opportunistic" for guaranteed in said)


def settled(words: Callable[[], Words], wanted: Sequence[Words], timeout_s: float) -> Words:
    """What they say once it is one of these words; else what they said last."""
    end_s, found = time.monotonic() + timeout_s, Words()
    while found not in wanted and time.monotonic() < end_s:
        time.sleep(0.1)
        with contextlib.suppress(AgentctlError):
            found = words()
    return found

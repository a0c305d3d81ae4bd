"""A gang of four on four hosts is upgraded where it runs while an agent dies: all ranks or none, whoever is asked.

Each try: a guaranteed job of four has the quota of its tenant and a rank on each host; a gang of four of the same
tenant is demoted, since it waits for that quota, and runs beside it. The guaranteed job is cancelled, so the quota is
free and the log upgrades the gang, and at a random moment of that one agent is killed (`kill -9`).

Meanwhile and afterwards every rank is asked what its page says, and every agent that lives what its copy of the log
says:

- a rank is guaranteed only where the log says that the gang is;
- what an agent has said once (guaranteed) it does not take back;
- agents that live, and their ranks, come to one answer, before the dead one is back: all guaranteed, or none;
- on no device two jobs are guaranteed;
- with the dead agent back all four ranks are guaranteed.
"""

import os
import time
from dataclasses import dataclass
from random import Random

from cli.client import AgentctlError
from tests.rack.sharing_rack import SharingRack, rank
from tests.rack.test_kills import wait

SCHEDULER = "beside = 1\ndemote_after_s = 0.3\nquotas = {a = 4}"
HOSTS = ("gpu1", "gpu2", "gpu3", "gpu4")
KILL_WITHIN_S = 1.2
"""After the cancel: ranks end, the log hears of them, the gang is upgraded, its ranks are told."""
WATCH_S = 4.0


@dataclass
class Tried:
    """One try."""

    victim: str
    led: bool
    """It was the leader."""
    kill_s: float
    """After the cancel."""
    log_s: float | None = None
    """After the cancel, when the first agent said that the gang is guaranteed."""
    ranks_s: float | None = None
    """The same, all ranks of agents that live."""
    before_return: str = ""
    """What all that live said before the dead agent was back: `guaranteed` or `opportunistic`."""
    back_s: float = 0.0
    """From the return of the agent until all four ranks were guaranteed."""


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
        """Rank of the gang -> its host."""

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
        self._watch(began_s, time.monotonic() + WATCH_S, self.alive)
        wait("those that live agree", lambda: self._agree(self.alive), 15.0)
        self.tried.before_return = "guaranteed" if self.said[self.alive[0]] else "opportunistic"
        self._return()
        return self.tried

    def _return(self) -> None:
        self.rack.start()
        began_s = time.monotonic()
        wait("all ranks are guaranteed", lambda: self._agree(HOSTS) and self.said[HOSTS[0]], 60.0)
        self.tried.back_s = time.monotonic() - began_s
        wait("every host's sharing has it so", lambda: all(self._shared(host) == "guaranteed" for host in HOSTS), 60.0)
        changes = [row for row in self.rack.agent().get("why", self.gang).data if row["event"] == "upgraded"]
        assert len({row["reason"] for row in changes if "quota" in row["reason"]}) <= 1, changes
        self.rack.agent().post("jobs", self.gang, "cancel")
        wait("nothing runs", lambda: self.rack.job(self.gang)["over"] and self.rack.job(self.owner)["over"])

    def _watch(self, began_s: float, until_s: float, hosts: tuple[str, ...] | list[str]) -> None:
        while time.monotonic() < until_s:
            self._look(began_s, hosts)
            time.sleep(0.02)

    def _look(self, began_s: float, hosts: tuple[str, ...] | list[str]) -> None:
        ranks = {host: self._rank_says(host) for host in hosts}
        for host in hosts:
            try:
                self._agent_says(host)
            except AgentctlError:
                continue  # the leader's election
            assert self.said[host] or not ranks[host], f"the rank on {host} is guaranteed, and not by the log"
        passed_s = time.monotonic() - began_s
        if self.tried.log_s is None and any(self.said.values()):
            self.tried.log_s = passed_s
        if self.tried.ranks_s is None and all(ranks.values()):
            self.tried.ranks_s = passed_s

    def _agent_says(self, host: str) -> bool:
        now = bool(self.rack.listed(self.gang, host)["runs_as"] == "guaranteed")
        assert now or not self.said[host], f"{host} took back what it said"
        self.said[host] = now
        for device, jobs in self.rack.shared(host).items():
            guaranteed = [job for job, kind in jobs.items() if kind == "guaranteed"]
            assert len(guaranteed) <= 1, f"{device} has {guaranteed}"
        return now

    def _shared(self, host: str) -> str | None:
        (jobs,) = self.rack.shared(host).values()
        found: str | None = jobs.get(self.gang)
        return found

    def _rank_says(self, host: str) -> bool:
        each = next(each for each, at in self.at.items() if at == host)
        found = self.rack.word(self.gang, each)
        os.kill(found["pid"], 0)  # it lives
        return bool(found["guaranteed"])

    def _agree(self, hosts: tuple[str, ...] | list[str]) -> bool:
        said = {self._agent_says(host) for host in hosts}
        return len(said) == 1 and {self._rank_says(host) for host in hosts} == said

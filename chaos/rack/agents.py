"""Agents on the hosts of a laboratory: the files an operator writes, and starting and stopping what systemd would."""

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from chaos.rack.hosts import Host, Laboratory, signal_all
from cli.client import Agent, AgentctlError

KEY = "/etc/covey/gossip.key"
UP_S = 90.0
"""Seconds that a rack may take to be whole, on a machine that is busy with other things."""

AGENT_TOML = """\
[gossip]
seeds = {seeds}
[leader]
voters = {voters}
[gpus]
simulated = {gpus}
"""
"""The file of docs/guides/install.md, with simulated GPUs."""


class AgentRack:
    """A laboratory whose hosts run agents."""

    def __init__(self, lab: Laboratory, gpus: int = 2, voters: int = 3, more_toml: str = "") -> None:
        """Write the files of all agents. `more_toml`: further sections of every agent.toml."""
        self.lab, self.hosts = lab, list(lab.hosts.values())
        first, *others = self.hosts
        made = first.run(["agentd", "--make-key", KEY])
        assert made.returncode == 0, made.stderr
        key = (first.folder / "etc" / "gossip.key").read_bytes()
        names = [host.name for host in self.hosts]
        for host in self.hosts:
            text = AGENT_TOML.format(
                seeds=_toml([f"{one.name}:7946" for one in self.hosts[:2]]),
                voters=_toml(names[:voters]),
                gpus=gpus,
            )
            (host.folder / "etc" / "agent.toml").write_text(text + more_toml)
        for host in others:
            secret = host.folder / "etc" / "gossip.key"
            secret.touch(0o600)
            secret.write_bytes(key)

    # ---- agents ----

    def start(self, hosts: Sequence[Host] = ()) -> None:
        """Start agentd on each host where it does not run."""
        for host in hosts or self.hosts:
            if host.is_up and self.agent_pid(host) is None:
                host.popen(
                    ["bash", "-c", 'cd "$HOME"; exec agentd --config /etc/covey/agent.toml'],
                    host.folder / "agentd.log",
                )

    def agent_pid(self, host: Host) -> int | None:
        found = [pid for pid, command in host.processes().items() if "/agentd --config" in command]
        return found[0] if found else None

    def stop(self, host: Host, number: signal.Signals = signal.SIGTERM) -> None:
        pid = self.agent_pid(host)
        if pid is not None:
            signal_all([pid], number)

    def agent(self, host: Host | None = None, timeout_s: float = 15.0) -> Agent:
        """A client of any agent that answers, or of the agent of one host."""
        hosts = [host] if host is not None else [one for one in self.hosts if one.is_up]
        return Agent([one.api for one in hosts], "the laboratory", timeout_s)

    def wait_up(self, hosts: Sequence[Host] = (), timeout_s: float = UP_S) -> None:
        """Wait until all of these see all hosts alive and one leader. An AssertionError names the hosts that do not,
        and their logs."""
        wanted = list(hosts or self.hosts)

        def waiting() -> list[str]:
            return [host.name for host in wanted if not self._stands(host)]

        wait(lambda: not waiting(), lambda: f"{waiting()} do not see a whole rack; {self.logs(wanted)}", timeout_s)

    def _stands(self, host: Host) -> bool:
        try:
            agent = self.agent(host, 5.0)
            rows = agent.get("hosts").data
            return sum(row["state"] == "alive" for row in rows) == len(self.hosts) and bool(
                agent.get("leader").data["leader"]
            )
        except AgentctlError:
            return False

    def logs(self, hosts: Sequence[Host], lines: int = 8) -> str:
        found = []
        for host in hosts:
            log = host.folder / "agentd.log"
            end = log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else ["no log"]
            found.append(f"{host.name}:\n" + "\n".join(f"    {line}" for line in end))
        return "\n".join(found)


def wait(holds: Callable[[], Any], otherwise: Callable[[], str], timeout_s: float, every_s: float = 0.2) -> Any:
    """Wait until `holds` is true; returns its answer. Raises AssertionError with `otherwise` when it never was."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        try:
            if found := holds():
                return found
        except AgentctlError:
            pass
        time.sleep(every_s)
    raise AssertionError(f"not within {timeout_s:.0f} s: {otherwise()}")


def _toml(words: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"

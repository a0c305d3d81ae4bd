"""What goes wrong with real hosts, drawn by seed: each fault strikes, lasts, and undoes itself.

The words are those of `chaos.faults` where both laboratories have them; here the kernel really does what is simulated
there.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chaos.rack.agents import AgentRack
from chaos.rack.hosts import Host, signal_all
from cli.client import AgentctlError

PROGRAMS = ("slabd", "vold", "spill", "aggd", "supervisor", "spares")
LONG_S = 100.0
"""Seconds that a cut-off host is away, longer than every lease: its job is taken back meanwhile."""


@dataclass
class Struck:
    """One fault under way."""

    what: str
    until_s: float
    undo: Callable[[], None]


class Storm:
    """Strikes at an `AgentRack`. A host that is harmed is left alone until it is well; `heal` undoes everything."""

    def __init__(
        self, rack: AgentRack, rng: random.Random, borrower: Host | None = None, kinds: Sequence[str] = ()
    ) -> None:
        """Prepare a storm. `kinds`: only these faults; empty: all of `KINDS`."""
        self.rack, self.rng = rack, rng
        self._kinds = sorted(kinds or KINDS)
        self.counts: dict[str, int] = {}
        self.borrower = borrower
        """The host of the pages: its power stays on, since pages that only it and one lender knew may be lost."""
        self._struck: list[tuple[Struck, tuple[Host, ...]]] = []

    # ---- strike and undo ----

    def strike(self) -> str:
        """Strike one fault at hosts that are well; returns what was done."""
        for _ in range(20):
            kind = self.rng.choice(self._kinds)
            well = self.well()
            if len(well) < len(self.rack.hosts) - 1:
                kind = "kill_program"  # two hosts are harmed already: a majority must stay, or nothing is learnt
            if not well:
                return "nothing: no host is well"
            done = KINDS[kind](self, self.rng.choice(well))
            if done is not None:
                struck, hosts = done
                self._struck.append((struck, hosts))
                self.counts[kind] = self.counts.get(kind, 0) + 1
                return struck.what
        return "nothing"

    def well(self) -> list[Host]:
        harmed = {host.name for _, hosts in self._struck for host in hosts}
        return [host for host in self.rack.hosts if host.name not in harmed]

    def pass_time(self, now_s: float | None = None) -> list[str]:
        """Undo faults whose time is over; returns what was undone."""
        at_s = time.monotonic() if now_s is None else now_s
        over = [struck for struck, _ in self._struck if struck.until_s <= at_s]
        self._struck = [(struck, hosts) for struck, hosts in self._struck if struck.until_s > at_s]
        for struck in over:
            struck.undo()
        return [struck.what for struck in over]

    def heal(self) -> None:
        self.pass_time(float("inf"))

    # ---- faults ----

    def _for(self, what: str, hosts: Sequence[Host], seconds: float, undo: Callable[[], None]) -> "Done":
        return Struck(f"{what} for {seconds:.0f} s", time.monotonic() + seconds, undo), tuple(hosts)

    def kill_agent(self, host: Host) -> "Done | None":
        return self._end_agent(host, signal.SIGKILL, "kill -9 of the agent", self.rng.uniform(0.5, 6.0))

    def restart_agent(self, host: Host) -> "Done | None":
        return self._end_agent(host, signal.SIGTERM, "restart of the agent", self.rng.uniform(1.5, 5.0))

    def kill_leader(self, host: Host) -> "Done | None":
        leader = self._leader()
        return None if leader is None or leader not in self.well() else self.kill_agent(leader)

    def stop_agent(self, host: Host) -> "Done | None":
        pid = self.rack.agent_pid(host)
        if pid is None:
            return None
        signal_all([pid], signal.SIGSTOP)
        seconds = self.rng.uniform(1.0, 25.0)
        return self._for(
            f"SIGSTOP of {host.name}'s agent", [host], seconds, lambda: _ignore(signal_all, [pid], signal.SIGCONT)
        )

    def kill_program(self, host: Host) -> "Done | None":
        running = {
            pid: name
            for pid, command in host.processes().items()
            for name in PROGRAMS
            if "agent.program" in command and f" {name}" in command
        }
        if not running:
            return None
        pid = self.rng.choice(sorted(running))
        signal_all([pid], signal.SIGKILL)
        return Struck(f"kill -9 of {running[pid]} on {host.name}", time.monotonic() + 3.0, _nothing), (host,)

    def cut_pair(self, host: Host) -> "Done | None":
        others = [other for other in self.well() if other is not host]
        if not others:
            return None
        other = self.rng.choice(others)
        one_way = self.rng.random() < 0.3
        pairs = [(host, other)] if one_way else [(host, other), (other, host)]
        for a, b in pairs:
            a.cut(b)
        arrow = "->" if one_way else "<->"
        seconds = self.rng.uniform(2.0, 20.0)
        return self._for(
            f"packets {host.name} {arrow} {other.name} vanish",
            [host, other],
            seconds,
            lambda: _join(pairs),
        )

    def unplug(self, host: Host) -> "Done | None":
        return self._unplugged(host, self.rng.uniform(1.0, 15.0))

    def unplug_for_long(self, host: Host) -> "Done | None":
        return self._unplugged(host, LONG_S)

    def power(self, host: Host) -> "Done | None":
        if host is self.borrower:
            return None
        host.power_off()

        def on() -> None:
            host.power_on()
            self.rack.start([host])

        return self._for(f"power of {host.name} off", [host], self.rng.uniform(2.0, 15.0), on)

    def fill_disk(self, host: Host) -> "Done | None":
        if not self.rack.lab.disk:
            return None
        ballast = self.rack.lab.state(host) / "ballast"
        with ballast.open("wb") as out:
            try:
                while True:
                    out.write(bytes(1 << 20))
                    out.flush()
            except OSError:
                pass

        def empty() -> None:
            ballast.unlink(missing_ok=True)
            self.rack.start([host])

        return self._for(f"disk of {host.name} full", [host], self.rng.uniform(3.0, 12.0), empty)

    def _end_agent(self, host: Host, number: signal.Signals, what: str, seconds: float) -> "Done | None":
        pid = self.rack.agent_pid(host)
        if pid is None:
            return None
        signal_all([pid], number)
        return self._for(f"{what} on {host.name}", [host], seconds, lambda: self.rack.start([host]))

    def _unplugged(self, host: Host, seconds: float) -> "Done":
        host.cable(False)
        return self._for(f"cable of {host.name} out", [host], seconds, lambda: host.cable(True))

    def _leader(self) -> Host | None:
        try:
            name = self.rack.agent(timeout_s=5.0).get("leader").data["leader"]
        except AgentctlError:
            return None
        return self.rack.lab.hosts.get(str(name))


Done = tuple[Struck, tuple[Host, ...]]

KINDS: dict[str, Callable[[Storm, Host], Done | None]] = {
    "kill_agent": Storm.kill_agent,
    "restart_agent": Storm.restart_agent,
    "kill_leader": Storm.kill_leader,
    "stop_agent": Storm.stop_agent,
    "kill_program": Storm.kill_program,
    "cut_pair": Storm.cut_pair,
    "unplug": Storm.unplug,
    "unplug_for_long": Storm.unplug_for_long,
    "power": Storm.power,
    "fill_disk": Storm.fill_disk,
}


def _join(pairs: Sequence[tuple[Host, Host]]) -> None:
    for one, other in pairs:
        if one.is_up:
            one.join(other)


def _nothing() -> None:
    """Do nothing: a fault that needs no undoing, since the program is started again elsewhere in the rack's code."""


def _ignore(act: Callable[[list[int], signal.Signals], int], pids: list[int], number: signal.Signals) -> None:
    act([pid for pid in pids if os.path.exists(f"/proc/{pid}")], number)

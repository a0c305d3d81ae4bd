"""The person who looks after a rack whose files are damaged: does what an agent that refused to start advises, and
nothing else.

    status 3, identity      deletes it and starts the agent: a new host under its old name
    status 3, the log       moves the folder away and starts the agent; the others bring it back
    status 4                the same
    the memory plugin is off  ends slabd and every vold of the host, deletes the record and its copy, restarts the agent

A story with damaged files has one; without it an agent that refused stays down, as under systemd.
"""

from agent.raft.disk import FOLDER
from chaos.rack_seen import RackSeen
from chaos.world.host import SimHost
from chaos.world.world import World
from plugins.memory.service.record import COPY as MEMORY_COPY
from plugins.memory.service.record import FILE as MEMORY

SIGKILL = 9
RECORDS = (MEMORY, MEMORY_COPY)
SPOILT = (f"{FOLDER}/", "acknowledged", "identity", "scheduler/state", *RECORDS, "gossip/", "aggregator/", "jobs/")
"""Beginnings of names of the files that stories damage: all that agents and supervisors write, except the pages of
volumes and their places, of which there is no second copy on this host."""


def may_be_spoilt(host: SimHost) -> list[str]:
    """Durable files of a host that a story may damage."""
    return [
        name
        for name, file in sorted(host.disk.files.items())
        if file.durable is not None and name.startswith(SPOILT) and not name.endswith(".log")
    ]


class Administrator:
    """An operator who looks at every host from time to time."""

    name, every_s = "the administrator", 2.0

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack
        self.obeyed: list[str] = []
        """What the operator did, in order."""

    def check(self, world: World) -> None:
        for host in self.rack.hosts.values():
            if host.up and host.refused is not None and not (host.agent is not None and host.agent.alive):
                self._obey(host)
            elif self.must_help(host.name):
                self._begin_memory_anew(host)

    def must_help(self, name: str) -> bool:
        """Whether the memory plugin of this host is off because its record is damaged."""
        agent = self.rack.agents.get(name)
        health = agent.health.get("memory") if agent is not None and name in self.rack.alive() else None
        return health is not None and health.state == "failed" and "there is no other copy" in health.why

    def _obey(self, host: SimHost) -> None:
        refused = host.refused
        assert refused is not None
        what = "identity" if host.disk.root + "/identity" in refused.next else f"{FOLDER}/"
        if host.disk.root not in refused.why + refused.next:
            raise AssertionError(f"nobody knows what to do on {host.name} after {refused}")
        self._note(host, f"deletes {what}", refused.status)
        host.disk.damage(what, "lost")
        host.revive()

    def _begin_memory_anew(self, host: SimHost) -> None:
        self._note(host, f"deletes {MEMORY} and its copy")
        for process in list(host.processes.values()):
            short = process.name.partition("/")[2]
            if short.startswith(("slabd", "slab-keeper", "vold-", "spill-")) or process.kind == "agent":
                process.signal(SIGKILL)
        for file in RECORDS:
            host.disk.damage(file, "lost")
        host.revive()

    def _note(self, host: SimHost, what: str, status: int = 0) -> None:
        self.obeyed.append(f"{host.name} {what}")
        self.rack.world.mark("administrator", host.name, what, status)

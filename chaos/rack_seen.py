"""What actors and checks see of a simulated rack. `chaos.rackworld.SimRack` is one; it makes them, so they do not
import it."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agent.host import HostAgent
from agent.raft.machine.raft import Raft
from chaos.world.host import SimHost
from chaos.world.world import World
from covey.core.ids import JobId
from plugins.base import Plugin


class RackSeen(Protocol):
    """A rack whose hosts run in one simulated world."""

    world: World
    rng: random.Random
    """Chance for the story's own choices."""
    agents: dict[str, HostAgent]
    """The newest agent of every host, alive or not."""
    wrong: list[str]
    """What workloads saw that must never be seen."""
    accepted: dict[JobId, float]
    """When each job that was submitted was accepted, s of the world."""

    @property
    def oracles(self) -> Mapping[str, Sequence[Any]]:
        """Oracles of pagers (`chaos.actors.pager.Oracle`), by the host of their volumes."""

    quotas: dict[str, int]
    """GPUs of each tenant."""
    patience_s: float
    """Further seconds within which something must be so, for what settings make slower."""
    beside: int
    """Opportunistic jobs on a GPU beside a guaranteed one."""
    moved: Raft | None
    """The Raft core that handled something in the callback that ran last."""

    @property
    def plugins(self) -> Sequence[Plugin]:
        """The plugins that every agent runs."""

    @property
    def administrator(self) -> Any:
        """The person who does what agents advise about damaged files; None where files are not damaged."""

    @property
    def hosts(self) -> Mapping[str, SimHost]:
        """The hosts by name."""

    def began(self, name: str) -> bool:
        """Whether the agent of this host has begun."""

    def plugin(self, name: str, plugin: str) -> Any:
        """The service of a plugin on a host whose agent runs; None otherwise."""

    def alive(self) -> list[str]:
        """Names of hosts whose agent is alive."""

    def saw_wrong(self, what: str) -> None:
        """Report what must never be seen."""

"""What one host says of its gossip: a line of `agentctl gossip`."""

import msgspec

from covey.core.ids import HostId
from gossip.service import GossipService

DROPPED = "dropped_"
"""What the names of gossip's counters of dropped datagrams begin with."""
COUNTED = (
    "sent",
    "sent_bytes",
    "received",
    "received_bytes",
    "probes",
    "probes_failed",
    "refutations",
    "stalls",
    "full",
)
"""Counters of gossip that are shown."""


class SuspectRow(msgspec.Struct, frozen=True):
    """A host that another one takes for perhaps dead."""

    host: HostId
    by: HostId | None
    """Whose probe had no answer first; None: it is not known."""
    since_s: float
    """Seconds since this host heard of it."""


class GossipRow(msgspec.Struct, frozen=True, kw_only=True):
    """The gossip of one host, counted since its agent started; one line of `agentctl gossip`."""

    host: HostId
    up_s: float
    """Seconds since the agent started."""
    health: int
    """Its own health (Lifeguard): 0 is healthy, and the higher, the longer it waits for others' answers."""
    alone: bool
    """Whether no other host answers although some should."""
    sent: int
    sent_bytes: int
    received: int
    received_bytes: int
    probes: int
    probes_failed: int
    """Probes that had no answer."""
    refutations: int
    """How often it said that it lives, since others suspected it."""
    stalls: int
    """How often its event loop stood still for longer than a probe may take."""
    stalled_s: float
    """The longest of these, seconds."""
    full: int
    """Hosts that it did not take into its full table."""
    dropped: dict[str, int]
    """Datagrams that it did not use, by why."""
    suspects: tuple[SuspectRow, ...] = ()
    """The hosts that it knows to be suspected now."""


def gossip_row(host: HostId, up_s: float, now_s: float, gossip: GossipService) -> GossipRow:
    """What a host says of its own gossip. `up_s`: seconds since its agent started."""
    counted, health = gossip.counters, gossip.health
    suspects = [view for view in gossip.hosts() if view.state == "suspect"]
    return GossipRow(
        host=host,
        up_s=up_s,
        health=health.score,
        alone=health.alone,
        stalled_s=health.stalled_s,
        dropped={name.removeprefix(DROPPED): n for name, n in counted.items() if name.startswith(DROPPED) and n},
        suspects=tuple(SuspectRow(view.host, view.suspected_by, max(0.0, now_s - view.since_s)) for view in suspects),
        **{name: counted.get(name, 0) for name in COUNTED},
    )

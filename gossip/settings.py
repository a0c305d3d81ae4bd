"""`[gossip]` of agent.toml, and how long a datagram may be."""

import msgspec

from gossip.types import AWAY_S_MAX

DATAGRAM_BYTES = 1232
"""The longest UDP payload sent, bytes: the smallest MTU of IPv6, 1280, less 48 bytes of headers. It never relies on
fragments."""
DATAGRAM_BYTES_MAX = 1472
"""The longest UDP payload accepted, bytes: an Ethernet frame."""


class GossipSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """[gossip]. Probe and suspicion constants are those of memberlist for a LAN."""

    bind: str = "0.0.0.0:7946"
    """The `ip:port` of the UDP socket; 7946 is Serf's port, known to firewalls. Port 0 takes a free one."""
    advertise: str = ""
    """This host's IP for the others; default: the bound one, or, bound to all, the one that the first peer saw."""
    seeds: tuple[str, ...] = ()
    """The hosts to join through, as `name:port`, `ip:port` or `[ipv6]:port`; a name means all its addresses. They are
    called while this host is alone, and later as long as one of them is missing."""
    cluster: str = "covey"
    """The rack's label: racks with different labels ignore each other even under one key."""
    key_file: str = ""
    """The file with up to three keys (64 hex digits a line), of which the first one seals. The agent reads it."""
    probe_interval_s: float = 1.0
    """Seconds between two probes, each of one host (SWIM's protocol period; memberlist LAN: 1 s)."""
    probe_timeout_s: float = 0.5
    """Seconds without an answer before others are asked to try (memberlist LAN: 0.5 s)."""
    indirect_probes: int = 3
    """The number of other hosts that are asked to ping (SWIM's k; memberlist: 3)."""
    suspicion_factor: int = 4
    """Shortest suspicion = factor * probe interval (memberlist LAN: 4), an eighth more for each ten times as many hosts
    as 10; the longest is 6 times that."""
    retransmit_factor: int = 4
    """A rumour is sent factor * ceil(log10(hosts + 1)) times by each host (memberlist LAN: 4)."""
    gossip_interval_s: float = 0.2
    """Seconds between two sendings of rumours that no probe carried (memberlist LAN: 0.2 s)."""
    gossip_fanout: int = 3
    """The number of hosts to which such rumours are sent (memberlist LAN: 3)."""
    sync_interval_s: float = 30.0
    """Seconds between two comparisons of member tables, each with one host (memberlist: push-pull every 30 s)."""
    announce_interval_s_max: float = 60.0
    """The most seconds between two calls of a missing seed or a gone host, forever, so that split racks merge."""
    spread_interval_s: float = 0.5
    """Seconds between two digests of new facts, each to a random host; a host that learned nothing sends none."""
    heartbeat_s: float = 2.0
    """Seconds without a probe after which a host tells another one what it has of all hosts, so that ages of facts show
    whether they are current; probes carry it otherwise."""
    away_s: int = 60
    """Seconds that are announced at SIGTERM: this host restarts and is back within them, and its processes keep
    running, so other hosts take nothing back. 0: it leaves. SIGINT always leaves."""
    datagram_bytes: int = DATAGRAM_BYTES
    """The longest UDP payload sent, 1232 to 1472 bytes."""
    hosts_max: int = 512
    """The most hosts remembered; gossip is designed for zones of up to 256 hosts."""

    def __post_init__(self) -> None:
        _in_range("probe_interval_s", self.probe_interval_s, 0.05, 60)
        _in_range("probe_timeout_s", self.probe_timeout_s, 0.01, self.probe_interval_s * 0.75)
        _in_range("indirect_probes", self.indirect_probes, 0, 16)
        _in_range("suspicion_factor", self.suspicion_factor, 1, 20)
        _in_range("retransmit_factor", self.retransmit_factor, 1, 20)
        _in_range("gossip_interval_s", self.gossip_interval_s, 0.02, 10)
        _in_range("gossip_fanout", self.gossip_fanout, 1, 16)
        _in_range("sync_interval_s", self.sync_interval_s, 1, 3600)
        _in_range("announce_interval_s_max", self.announce_interval_s_max, 1, 3600)
        _in_range("spread_interval_s", self.spread_interval_s, 0.05, 60)
        _in_range("heartbeat_s", self.heartbeat_s, 0.1, 60)
        _in_range("datagram_bytes", self.datagram_bytes, DATAGRAM_BYTES, DATAGRAM_BYTES_MAX)
        _in_range("away_s", self.away_s, 0, AWAY_S_MAX)
        _in_range("hosts_max", self.hosts_max, 2, 4096)
        if len(self.cluster.encode()) > 64:
            raise ValueError(f"cluster = {self.cluster!r}: expected at most 64 bytes")


def _in_range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{key} = {value}: expected {low:g} to {high:g}")

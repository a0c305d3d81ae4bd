"""`[gossip]` of agent.toml, and how long a datagram may be."""

import msgspec

from gossip.types import AWAY_S_MAX

DATAGRAM_BYTES = 1232
"""Longest UDP payload sent: the smallest MTU of IPv6, 1280, less 48 bytes of headers. Never rely on fragments."""
DATAGRAM_BYTES_MAX = 1472
"""Longest accepted: an Ethernet frame."""


class GossipSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """[gossip]. Probe and suspicion constants are those of memberlist for a LAN."""

    bind: str = "0.0.0.0:7946"
    """`ip:port` of the UDP socket; 7946 is Serf's port, known to firewalls. Port 0 takes a free one."""
    advertise: str = ""
    """This host's IP for the others; default: the bound one, or, bound to all, the one that the first peer saw."""
    seeds: tuple[str, ...] = ()
    """`name:port`, `ip:port` or `[ipv6]:port` of hosts to join through; a name means all its addresses. Called while
    this host is alone, and later as long as one of them is missing."""
    cluster: str = "covey"
    """Racks with different labels ignore each other even under one key."""
    key_file: str = ""
    """File with up to three keys (64 hex digits a line), the first one seals. Read by the agent."""
    probe_interval_s: float = 1.0
    """One host is probed this often (SWIM's protocol period; memberlist LAN: 1 s)."""
    probe_timeout_s: float = 0.5
    """Before others are asked to try (memberlist LAN: 0.5 s)."""
    indirect_probes: int = 3
    """How many others are asked (SWIM's k; memberlist: 3)."""
    suspicion_factor: int = 4
    """Shortest suspicion = factor * log10(hosts) * probe interval (memberlist LAN: 4); the longest is 6 times that."""
    retransmit_factor: int = 4
    """A rumour is sent factor * ceil(log10(hosts + 1)) times by each host (memberlist LAN: 4)."""
    gossip_interval_s: float = 0.2
    """Rumours that no probe carried are sent this often (memberlist LAN: 0.2 s)."""
    gossip_fanout: int = 3
    """... to so many hosts (memberlist LAN: 3)."""
    sync_interval_s: float = 30.0
    """Member tables are compared with one host this often (memberlist: push-pull every 30 s)."""
    announce_interval_s_max: float = 60.0
    """A missing seed or a gone host is called at least this often, forever, so that split racks merge."""
    spread_interval_s: float = 0.5
    """Facts are compared with a random host this often (two rounds a second kept 99 % of ages under 3.4 s at 200)."""
    heartbeat_s: float = 2.0
    """A host's facts get a new version this often, so that their age shows whether they are current."""
    away_s: int = 60
    """Announced at SIGTERM: this host restarts and is back within so many seconds, and its processes go on, so other
    hosts take nothing back. 0: it leaves. SIGINT always leaves."""
    datagram_bytes: int = DATAGRAM_BYTES
    """Longest UDP payload sent, 1232 to 1472."""
    hosts_max: int = 512
    """Most hosts remembered; gossip is designed for zones of up to 256 hosts."""

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

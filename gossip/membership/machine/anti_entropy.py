"""How hosts find one another: seeds, calls to hosts that are missing, and comparing tables."""

from covey.core.events import Message
from covey.ports.addresses import Address
from gossip.membership import messages as m
from gossip.membership import policy
from gossip.membership.machine.events import CallDue, SyncDue
from gossip.membership.machine.member_states import MemberStates
from gossip.membership.machine.table import Table
from gossip.types import SendDatagram, Sender, batches, identity, size

SYNC_SOON_S = 3.0
"""Seconds between two comparisons of tables as long as they differ."""
LEFT_REMEMBERED_S = 24 * 3600.0
"""Seconds for which a host that left is listed (Serf's TombstoneTimeout: 24 h)."""


class AntiEntropy:
    """Calls missing hosts, and compares and exchanges tables."""

    def __init__(self, table: Table, standing: MemberStates) -> None:
        self._table, self._standing = table, standing
        self.same_s = float("-inf")
        """When a table was last found to be equal to this host's."""

    # ---- calls ----

    def seeds_are(self, seeds: tuple[Address, ...]) -> None:
        """Take these seeds. A new one is called at once while no other host is alive."""
        new = set(seeds) - set(self._table.seeds)
        self._table.seeds = seeds
        if new and self._table.alone:
            self._table.call_generation += 1
            self._table.call_s = policy.CALL_FIRST_S
            self.call(self._table.call_generation)

    def call(self, generation: int) -> None:
        if generation != self._table.call_generation:
            return
        for address in self._to_call():
            said = self._accusations(address)
            self._table.send(address, self._table.mine(), *said, m.SyncAsk(self._table.checksum()))
        self._table.call_s = policy.call_after_s(
            self._table.call_s, self._table.alone, self._table.settings.announce_interval_s_max
        )
        self._table.timer(self._table.call_s * self._table.rng.uniform(0.8, 1.0), CallDue(generation))

    def _accusations(self, address: Address) -> list[Message]:
        """Tells the missing host there its boot as known here: its answer under an earlier one would be ignored."""
        there = [member for member in self._table.by_name() if member.missing and member.address == address]
        said = [member.accusation(self._table.now_s) for member in there if not member.remembered]
        return [accusation for accusation in said if accusation is not None]

    def _to_call(self) -> list[Address]:
        there = {member.address for member in self._table.members.values() if member.state == "alive"}
        seeds = [seed for seed in self._table.seeds if seed not in there and seed != self._table.address]
        missing = [member.address for member in self._table.by_name() if member.missing and member.address not in seeds]
        if self._table.alone:
            return seeds + policy.some(missing, 8, self._table.rng)
        return policy.some(seeds + missing, policy.CALLED_AT_ONCE, self._table.rng)

    # ---- tables ----

    def sync(self, now_s: float) -> None:
        """Compare tables with one host, and forget hosts that left long ago."""
        for member in self._table.by_name():
            if member.state == "left" and now_s - member.since_s > LEFT_REMEMBERED_S:
                self._table.drop(member)
        if now_s - self.same_s >= policy.sync_interval_s(self._table.settings.sync_interval_s, self._table.hosts()):
            peers = [member.address for member in self._table.by_name() if member.state == "alive"]
            for address in policy.some(peers, 1, self._table.rng):
                self._table.send(address, *self._where(), m.SyncAsk(self._table.checksum()))
        self._table.timer(SYNC_SOON_S * self._table.rng.uniform(0.8, 1.2), SyncDue())

    def _where(self) -> list[Message]:
        """An `Alive`, while this host's own address is unknown, which the receiver answers with `SeenAt`."""
        return [] if self._table.address else [self._table.mine()]

    def heard_sync(self, source: Address, checksum: int) -> list[Message]:
        if checksum == self._table.checksum():
            return [m.SyncSame()]
        self.send_records(source)
        return [m.SyncPull()]

    def send_records(self, to: Address) -> None:
        for batch in batches(self._table.told(), size, self._table.budget):
            self._table.out.append(SendDatagram(to, tuple(batch)))

    def heard_record(self, record: m.MemberRecord, sender: Sender, now_s: float) -> None:
        """Take a line of another host's table. A host gone there becomes suspect here, since it may live
        (memberlist)."""
        about = identity(record.host, record.uuid)
        state = policy.STATES[record.state]
        by = record.by or sender.host
        if state in ("alive", "suspect") and record.address:
            alive = m.Alive(record.host, record.uuid, record.boot, record.incarnation, record.address)
            self._standing.alive(alive, policy.Claimant(about, record.boot, record.address), record.address, now_s)
        match state:
            case "alive":
                pass
            case "suspect":
                self._standing.heard_suspect(m.Suspect(record.host, about, record.boot, record.incarnation, by), now_s)
            case "gone":
                self._heard_record_gone(m.Gone(record.host, about, record.boot, record.incarnation, by), sender, now_s)
            case "left":
                left = m.Left(record.host, about, record.boot, record.incarnation, record.away_s)
                self._standing.heard_left(left, now_s)

    def _heard_record_gone(self, gone: m.Gone, sender: Sender, now_s: float) -> None:
        member = self._standing.accused(gone)
        if member is None:
            return
        if member.remembered:
            self._standing.heard_gone(gone, now_s)
        else:
            self._standing.suspected(member, gone.boot, gone.incarnation, sender.host, now_s)

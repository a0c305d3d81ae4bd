"""What must hold in a world of logs, whatever happens to it (`world` lists it)."""

import zlib
from collections import deque

import msgspec

from agent.raft.machine.types import Apply, Event, Snapshot, SnapshotTaken, SoftState
from agent.raft.messages import Configuration, Entry, configuration_of
from chaos.crowds.log.nodes import SNAPSHOT_ENTRIES, Body, Client, Node, Violation
from covey.core.ids import HostId


class Promises:
    """What was seen of a world so far; every method looks at one thing more. Raises `Violation` when it contradicts."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.nodes: dict[HostId, Node] = {}
        self.clients: dict[bytes, Client] = {}
        self.leaders: dict[int, HostId] = {}
        self.matching: dict[tuple[int, int], int] = {}
        self.chosen: dict[int, Entry] = {}
        self.chosen_prefix: dict[int, int] = {0: 0}
        self.last_chosen = 0
        self.chosen_in: dict[int, int] = {}
        """Term -> the last entry that was known to be committed in it."""
        self.in_force: list[tuple[int, Configuration]] = []
        """(index, configuration) of the committed ones, in order."""
        self.seen = 0
        """Crashes, elections and installed snapshots: they show that a run was worth it."""

    def follows_its_log(self, node: Node) -> None:
        ledger = node.raft._raft_log
        for index in range(ledger.log.last_index, ledger.log.base_index, -1):
            found = configuration_of(ledger.log.slice(index, index)[0])
            if found:
                if found != ledger.configuration:
                    raise Violation(f"Configuration: {node.name} follows another one than its entry {index} says")
                return
        below = [found for index, found in self.in_force if index <= ledger.log.base_index]
        if below and ledger.configuration != below[-1]:
            raise Violation(f"Configuration: {node.name} follows another one than was in force at its log's base")

    def committed(self, index: int, configuration: Configuration) -> None:
        if self.in_force:
            before = self.in_force[-1][1]
            if before.rack != configuration.rack:
                raise Violation("One rack: the log began twice")
            if len({*before.hosts} ^ {*configuration.hosts}) > 1:
                raise Violation(f"One step: {before.hosts} to {configuration.hosts}")
        self.in_force.append((index, configuration))

    def led(self, node: Node, action: SoftState) -> None:
        if action.leader != node.name:
            return
        first = self.leaders.setdefault(action.term, node.name)
        if first != node.name:
            raise Violation(f"Election Safety: {first} and {node.name} both lead term {action.term}")
        log = node.raft._raft_log.log
        must = max((index for term, index in self.chosen_in.items() if term < action.term), default=0)
        if log.base_index < must and log.term_at(must) != self.chosen[must].term:
            raise Violation(f"Leader Completeness: {node.name} leads term {action.term} without entry {must}")
        for other in self.nodes.values():
            if other.up and other.raft.term < action.term and other.raft.holds_lease(other.clock(self.now_s)):
                raise Violation(f"Lease: {node.name} is elected while {other.name} may act as leader")

    def track(self, node: Node, first: int, entries: tuple[Entry, ...]) -> None:
        """Log Matching: the digest of everything up to an entry is a function of its index and term."""
        if not entries:
            return
        digest = node.prefix[first - 1]
        for index, entry in enumerate(entries, first):
            digest = zlib.crc32(stamp_of(entry), digest)
            new = (index, entry.term) not in self.matching
            if self.matching.setdefault((index, entry.term), digest) != digest:
                raise Violation(f"Log Matching: {node.name} holds another log up to entry {index}/{entry.term}")
            node.prefix[index] = digest
            if new and (found := configuration_of(entry)) and node.raft is not None and node.raft.leading:
                self.promoted(node, found)

    def promoted(self, node: Node, found: Configuration) -> None:
        """Learner first: a host that is made a voter has what is committed, or a rack of one that grows would come to
        a halt."""
        for host in {*found.hosts} - {*node.configuration.hosts}:
            learner = self.nodes[host]
            if node.configuration.learner == host and learner.up and not learner.forgot:
                has, needs = learner.raft._raft_log.durable, node.commit
                if has < needs:
                    raise Violation(f"Learner first: {host} is made a voter with {has} of {needs} entries")

    def apply(self, node: Node, action: Apply, events: deque[Event]) -> None:
        for index, entry in enumerate(action.entries, action.first):
            if index != node.applied + 1:
                raise Violation(f"{node.name} applies {index} after {node.applied}")
            node.applied = index
            known = self.chosen.setdefault(index, entry)
            if known != entry:
                raise Violation(f"State Machine Safety: {node.name} applies another entry at {index}")
            if index > self.last_chosen:
                self.last_chosen = index
                self.chosen_in[node.raft.term] = index
                if found := configuration_of(entry):
                    self.committed(index, found)
                self.chosen_prefix[index] = zlib.crc32(stamp_of(entry), self.chosen_prefix[index - 1])
            if entry.id:
                self.execute(node, index, entry)
        if node.applied >= node.snapshot_due:
            node.snapshot_due = node.applied + SNAPSHOT_ENTRIES
            events.append(SnapshotTaken(node.applied, msgspec.msgpack.encode(Body(node.once.dump(), node.state))))

    def execute(self, node: Node, index: int, entry: Entry) -> None:
        def perform(index: int, command: bytes) -> bytes:
            if entry.id in node.executed:
                raise Violation(f"Exactly once: {node.name} executes a command again at {index}")
            node.executed.add(entry.id)
            node.state.done.append(entry.id)
            node.state.digest = zlib.crc32(command, node.state.digest)
            return str(index).encode()

        outcome = node.once.apply(index, entry, perform)
        if node.raft.leading and outcome.kind != "expired":
            self.clients[entry.id].acknowledged = True

    def restore(self, node: Node, image: Snapshot) -> None:
        body = msgspec.msgpack.decode(image.data, type=Body)
        node.once.load(body.kept)
        node.state, node.executed = body.state, set(body.state.done)
        node.applied = image.index
        digest = self.chosen_prefix[image.index]
        if node.prefix.get(image.index) != digest:
            node.prefix = {image.index: digest}
        node.snapshot_due = image.index + SNAPSHOT_ENTRIES
        self.seen += 1

    def converged(self) -> bool:
        nodes = list(self.nodes.values())
        leading = [node for node in nodes if node.raft.holds_lease(node.clock(self.now_s))]
        if len(leading) != 1:
            return False
        leader = leading[0].raft
        if leader.leading.leaving(leading[0].clock(self.now_s)):
            return False
        changing = leader.configuration.learner or leader.configuration.leaving
        return not changing and all(node.applied == leader.last_index for node in nodes)


def stamp_of(entry: Entry) -> bytes:
    """Bytes that distinguish an entry from every other."""
    return entry.id + entry.term.to_bytes(4, "big") + (b"" if entry.id else entry.command)

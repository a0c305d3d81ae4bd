"""A small world for the Raft core and its disk format: many hosts, one seed, no asyncio.

Messages are lost, doubled, delayed and reordered; links are cut one way or both; hosts crash in the middle of a write,
lose what was not durable (torn frames, sectors kept at random), restart, pause, and have clocks that differ in offset
and rate. In some worlds a voter also comes back without its log, with an older copy of it, with its end cut off or with
a byte changed, as long as a majority of others still has its own; who refuses the file has it moved away. Clients
propose to whoever believes to lead, and repeat proposals whose answer is missing. After every event:

    Election Safety        at most one leader per term                                  Raft Figure 3
    Log Matching           same index and term: the same log up to there
    Leader Completeness    a new leader's log holds every entry that was ever applied
    State Machine Safety   no two hosts apply different entries at one index
    Lease                  nobody is elected while the leader of an earlier term may act as one
    Exactly once           no command is executed twice in any copy of the state
    One rack               every committed entry belongs to the log that began first, with one identity
    One step               the voters of two configurations that follow one another differ by one host at most
    Configuration          what a host takes for the configuration is what its own log says

and at the end, after everything has healed: a change of voters that was under way is completed, whoever began it; all
hosts converge on one state; every command that a client was told is applied is in it; and no host, voter or not, makes
anybody change the leader any more. `run_seeds(first, count)` is for a longer search:
`COVEY_CONSENSUS_SEEDS=1000:20000 pytest ...`.
"""

import heapq
import random
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agent.consensus.disk import FOLDER, DiskRefused, Store
from agent.consensus.machine import Once, Raft
from agent.consensus.machine.once import Kept
from agent.consensus.machine.words import (
    Apply,
    ConfigurationChanged,
    ConfigurationWanted,
    Event,
    HandOver,
    HostsChanged,
    Image,
    Led,
    Persist,
    Persisted,
    Proposal,
    Proposed,
    Restore,
    SaveSnapshot,
    Say,
    SnapshotTaken,
    Started,
    Woken,
)
from agent.consensus.messages import (
    RACK_BYTES,
    Configuration,
    Entry,
    TimeoutNow,
    VoteReply,
    Words,
    configuration_of,
    decode,
    encode,
)
from agent.consensus.policy import Timing, quorum
from covey.core import Heard, HostId
from tests.agent.consensus.fakes import MemoryDisk, PowerLost, run

SNAPSHOT_ENTRIES = 12
SLOW_S_MAX = 2.0
"""How long a write on a slow disk takes at most."""


class Violation(AssertionError):
    """Something that must hold did not."""


class State(msgspec.Struct, array_like=True):
    """The replicated state: which commands were executed, in order, and a digest of them."""

    done: list[bytes]
    digest: int


class Body(msgspec.Struct, array_like=True):
    kept: list[Kept]
    state: State


@dataclass(frozen=True)
class Weather:
    """What a seed's world is like."""

    voters: int
    observers: int
    loss: float
    double: float
    slow: float
    fault_every_s: float
    slow_disk: float
    codec: bool
    commands_per_s: float
    files_lost: float
    """Part of the faults that take a voter's log away, or a part of it."""
    changes_per_s: float

    @staticmethod
    def draw(rng: random.Random) -> "Weather":
        voters = rng.choices((1, 3, 5), (3, 12, 4))[0]
        return Weather(
            voters=voters,
            observers=rng.choice((0, 0, 1, 2, 3)),
            loss=rng.choice((0.0, 0.0, 0.02, 0.15)),
            double=rng.choice((0.0, 0.05, 0.3)),
            slow=rng.choice((0.0, 0.02, 0.2)),
            fault_every_s=rng.choice((0.25, 0.6, 1.5)),
            slow_disk=rng.choice((0.0, 0.02, 0.2)),
            codec=rng.random() < 0.15,
            commands_per_s=rng.choice((0.3, 12.0, 12.0)),
            files_lost=rng.choice((0.0, 0.15, 0.5)),
            changes_per_s=rng.choice((0.0, 0.3, 2.0)),
        )


@dataclass
class Client:
    """One command on its way."""

    proposal: Proposal
    tries: int = 0
    acknowledged: bool = False


@dataclass
class Node:
    name: HostId
    disk: MemoryDisk
    offset_s: float
    rate: float
    up: bool = False
    life: int = 0
    paused_until_s: float = 0.0
    raft: Any = None
    store: Any = None
    once: Once = field(default_factory=Once)
    state: State = field(default_factory=lambda: State([], 0))
    executed: set[bytes] = field(default_factory=set)
    applied: int = 0
    snapshot_due: int = SNAPSHOT_ENTRIES
    writes: deque[Persist | SaveSnapshot] = field(default_factory=deque)
    writing: list[Persist | SaveSnapshot] = field(default_factory=list)
    wake_at_s: float = float("inf")
    copy: dict[str, bytes] = field(default_factory=dict)
    """The files of the log as they once were."""
    configuration: Configuration = field(default_factory=Configuration)
    """As it last knew it."""
    toml: tuple[HostId, ...] = ()
    """leader.voters; empty: the founders."""
    forgot: bool = False
    """Something of its log was taken away, and it does not vote yet."""
    prefix: dict[int, int] = field(default_factory=dict)
    """Index -> digest of this host's log up to there."""

    def clock(self, world_s: float) -> float:
        return self.offset_s + self.rate * world_s

    def world(self, clock_s: float) -> float:
        return (clock_s - self.offset_s) / self.rate


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.weather = Weather.draw(self.rng)
        rng, weather = self.rng, self.weather
        names = [HostId(f"v{n}") for n in range(weather.voters)] + [HostId(f"o{n}") for n in range(weather.observers)]
        self.voters = tuple(names[: weather.voters])
        self.observers = tuple(names[weather.voters :])
        self.rack = bytes(RACK_BYTES)
        self.timing = Timing(keep_entries=4, hint_s=0.3, chunk_bytes=rng.choice((700, 5000, 100_000)))
        self.nodes = {
            name: Node(name, MemoryDisk(random.Random(rng.random())), rng.uniform(0, 1e5), rng.uniform(0.985, 1.015))
            for name in names
        }
        self.now_s = 0.0
        self.steps = 0
        self.calm = False
        self.heap: list[tuple[float, int, str, Node | None, int, Any]] = []
        self.order = 0
        self.cut: set[tuple[HostId, HostId]] = set()
        self.clients: dict[bytes, Client] = {}
        self.leaders: dict[int, HostId] = {}
        self.matching: dict[tuple[int, int], int] = {}
        self.chosen: dict[int, Entry] = {}
        self.chosen_prefix: dict[int, int] = {0: 0}
        self.last_chosen = 0
        self.chosen_in: dict[int, int] = {}
        """Term -> the last entry that was known to be committed in it."""
        self.in_force: list[tuple[int, Configuration]] = []
        """(index, configuration) of those that were committed, in order."""
        self.handed_over = 0
        """Orders to stand at once."""
        self.lost: Counter[str] = Counter()
        """Logs, by what was done to them; and what came of it."""
        self.seen = 0
        """Crashes, elections, snapshots installed: that a run was worth it."""
        for node in self.nodes.values():
            self.begin(node)
        self.later(rng.uniform(0, 0.3), "client")
        self.later(rng.expovariate(1 / weather.fault_every_s), "fault")
        if weather.changes_per_s and len(names) > 1:
            self.later(rng.expovariate(weather.changes_per_s), "change")

    # ---- running ----

    def later(self, after_s: float, kind: str, node: Node | None = None, what: Any = None) -> None:
        self.order += 1
        life = node.life if node else 0
        heapq.heappush(self.heap, (self.now_s + after_s, self.order, kind, node, life, what))

    def step(self) -> None:
        at_s, _, kind, node, life, what = heapq.heappop(self.heap)
        self.now_s = max(self.now_s, at_s)
        self.steps += 1
        if node is None:
            if not self.calm or kind == "client":
                {"client": self.client, "fault": self.fault, "change": self.change}[kind]()
            return
        if kind == "begin":
            if not node.up:
                self.begin(node)
            return
        if kind == "crash" and self.calm:
            return
        if not node.up or (kind != "heard" and node.life != life):
            return
        if node.paused_until_s > self.now_s:
            self.later(node.paused_until_s - self.now_s, kind, node, what)
            return
        if kind == "heard":
            self.feed(node, Heard(*what))
        elif kind == "crash":
            self.crash(node)
            self.later(0.0005, "begin", node)
        elif kind == "wake":
            node.wake_at_s = float("inf")
            self.feed(node, Woken())
        else:
            self.written(node)

    def feed(self, node: Node, event: Event) -> None:
        events: deque[Event] = deque([event])
        while events:
            for action in node.raft.handle(events.popleft(), node.clock(self.now_s)):
                if isinstance(action, Say):
                    self.carry(node, action.to, action.message)
                    self.handed_over += isinstance(action.message, TimeoutNow)
                    if isinstance(action.message, VoteReply) and action.message.granted:
                        self.after_a_vote(node)
                elif isinstance(action, Persist):
                    self.track(node, action.first, action.entries)
                    node.writes.append(action)
                elif isinstance(action, Apply):
                    self.apply(node, action, events)
                elif isinstance(action, Led):
                    self.led(node, action)
                elif isinstance(action, ConfigurationChanged):
                    self.after_a_change(node)
                elif isinstance(action, SaveSnapshot):
                    self.track(node, action.base_index + 1, action.entries)
                    node.writes.append(action)
                else:
                    assert isinstance(action, Restore)
                    self.restore(node, action.image)
        node.raft.check()
        node.configuration = node.raft.configuration
        self.follows_its_log(node)
        if node.writes and not node.writing:
            self.write(node)
        wake_s = node.world(node.raft.wake_s)
        if wake_s < node.wake_at_s:
            node.wake_at_s = wake_s
            self.later(max(0.0005, wake_s - self.now_s), "wake", node)

    # ---- network ----

    def carry(self, node: Node, to: HostId, message: Words) -> None:
        weather, rng = self.weather, self.rng
        if (node.name, to) in self.cut or (not self.calm and rng.random() < weather.loss):
            return
        if weather.codec:
            message = decode(encode(self.rack, message)).message
        copies = 2 if not self.calm and rng.random() < weather.double else 1
        for _ in range(copies):
            delay_s = 0.001 + rng.random() * 0.01
            if not self.calm and rng.random() < weather.slow:
                delay_s += rng.expovariate(2.0)
            self.later(delay_s, "heard", self.nodes[to], (node.name, message))

    # ---- disk ----

    def write(self, node: Node) -> None:
        if isinstance(node.writes[0], SaveSnapshot):
            node.writing = [node.writes.popleft()]
        else:
            while node.writes and isinstance(node.writes[0], Persist):
                node.writing.append(node.writes.popleft())
        slow = not self.calm and self.rng.random() < self.weather.slow_disk
        self.later(self.rng.uniform(0.1, SLOW_S_MAX) if slow else 0.001 + self.rng.random() * 0.006, "written", node)

    def store_now(self, node: Node) -> int:
        first = node.writing[0]
        if isinstance(first, SaveSnapshot):
            run(node.store.checkpoint(first))
        else:
            run(node.store.append(node.writing))
        return node.writing[-1].number

    def written(self, node: Node) -> None:
        number = self.store_now(node)
        node.writing = []
        self.feed(node, Persisted(number))

    # ---- faults ----

    def crash(self, node: Node, power: bool = True) -> None:
        """The power fails, or only the process dies, perhaps in the middle of the write that is under way."""
        if node.writing:
            node.disk.fail_after = self.rng.randrange(5)
            try:
                self.store_now(node)
            except PowerLost:
                pass
            node.disk.fail_after = None
        if power:
            node.disk.lose_power()
        node.up, node.raft = False, None
        node.writes.clear()
        node.writing = []
        self.seen += 1

    def after_a_vote(self, node: Node) -> None:
        """The moment at which forgetting hurts most."""
        if not self.calm and self.rng.random() < 0.1:
            self.later(0.0, "crash", node)

    def after_a_change(self, node: Node) -> None:
        """Between two steps of a change of voters, before or after the disk has the first one."""
        if not self.calm and self.rng.random() < 0.1:
            self.later(self.rng.choice((0.0, 0.004, 0.02)), "crash", node)

    def begin(self, node: Node) -> None:
        node.life += 1
        node.up = True
        node.paused_until_s, node.wake_at_s = 0.0, float("inf")
        node.store = Store(node.disk, node.disk.rng.randbytes)
        try:
            saved = run(node.store.load())
        except DiskRefused:
            self.lost["refused"] += 1
            self.move_away(node)
            node.store = Store(node.disk, node.disk.rng.randbytes)
            saved = run(node.store.load())
        node.once, node.state, node.applied = Once(), State([], 0), 0
        node.executed, node.snapshot_due = set(), SNAPSHOT_ENTRIES
        node.prefix = {saved.base_index: self.chosen_prefix[saved.base_index]}
        self.track(node, saved.base_index + 1, saved.entries)
        rng = random.Random(self.rng.random())
        node.raft = Raft(node.name, node.toml or self.voters, saved, self.timing, rng, node.clock(self.now_s))
        self.feed(node, Started())
        self.feed(node, HostsChanged(tuple(self.nodes)))

    # ---- files taken away ----

    def move_away(self, node: Node) -> None:
        node.disk.files = {name: data for name, data in node.disk.files.items() if not name.startswith(FOLDER)}

    def keep_copy(self, node: Node) -> None:
        node.copy = {name: data for name, data in node.disk.files.items() if name.startswith(FOLDER)}

    def may_forget(self, node: Node) -> bool:
        """A majority of others has its logs: what one host alone held since is not what everybody relies on."""
        for each in self.nodes.values():
            each.forgot = each.forgot and not (each.up and each.raft._votes_here and not each.writing)
        known = [each.configuration for each in self.nodes.values()]
        if any(node.name == each.learner for each in known):
            return False
        kept = {each.name for each in self.nodes.values() if each is not node and each.up and not each.forgot}
        now_and_next = [{*each.hosts} for each in known] + [{*each.hosts} - {each.leaving} for each in known]
        return all(len(kept & hosts) >= quorum(len(hosts)) for hosts in now_and_next)

    def take_files(self, node: Node) -> None:
        """Somebody does something to the log of a host that is down."""
        rng, files = self.rng, node.disk.files
        kind = rng.choice(("gone", "older", "cut", "changed"))
        logs = [name for name in files if name.startswith(f"{FOLDER}/log")]
        if kind == "gone" or not logs or (kind == "older" and not node.copy):
            self.move_away(node)
        elif kind == "older":
            self.move_away(node)
            node.disk.files |= node.copy
        else:
            newest = max(logs)
            at = rng.randrange(max(0, len(files[newest]) - 400), len(files[newest]))
            changed = bytes([files[newest][at] ^ rng.randrange(1, 256)]) + files[newest][at + 1 :]
            files[newest] = files[newest][:at] + (b"" if kind == "cut" else changed)
        node.forgot = True
        if self.in_force:  # whoever does so writes into agent.toml who votes by now
            node.toml = self.in_force[-1][1].hosts
        self.lost[kind] += 1

    def fault(self) -> None:
        rng = self.rng
        self.later(rng.expovariate(1 / self.weather.fault_every_s), "fault")
        if rng.random() < self.weather.files_lost:
            self.take_or_copy(self.nodes[rng.choice(sorted(self.nodes))])
            return
        node = self.nodes[rng.choice(sorted(self.nodes))]
        kind = rng.choice(
            ("crash", "crash", "cut", "cut", "pair", "isolate", "half", "heal", "heal", "pause", "all down", "office")
        )
        if kind == "crash" and node.up:
            self.crash(node)
            self.later(rng.choice((0.01, 0.3, 3.0)), "begin", node)
        elif kind == "office" and (leading := [each for each in self.nodes.values() if each.up and each.raft.leading]):
            leaving = rng.choice(leading)
            if leaving.paused_until_s <= self.now_s:
                self.feed(leaving, HandOver(leaving.clock(self.now_s) + rng.choice((0.05, 0.7, 5.0))))
        elif kind == "cut":
            self.cut.add((node.name, rng.choice(sorted(self.nodes))))
        elif kind == "pair":
            other = rng.choice(sorted(self.nodes))
            self.cut |= {(node.name, other), (other, node.name)}
        elif kind == "isolate":
            self.cut |= {pair for other in self.nodes for pair in ((node.name, other), (other, node.name))}
        elif kind == "half":
            side = {name for name in sorted(self.nodes) if rng.random() < 0.5}
            self.cut |= {(a, b) for a in self.nodes for b in self.nodes if (a in side) != (b in side)}
        elif kind == "heal":
            self.cut.clear()
        elif kind == "pause" and node.up:
            node.paused_until_s = self.now_s + rng.uniform(0.1, 3.0)
        elif kind == "all down" and rng.random() < 0.3:
            for each in self.nodes.values():
                if each.up:
                    self.crash(each)
                    self.later(rng.uniform(0.01, 0.5), "begin", each)

    def take_or_copy(self, node: Node) -> None:
        if self.rng.random() < 0.3 or not node.up or not self.may_forget(node):
            self.keep_copy(node)
            return
        self.crash(
            node, power=False
        )  # its second record is not synced (`agent.consensus.acknowledged`): not both at once
        self.take_files(node)
        self.later(self.rng.choice((0.01, 0.3, 3.0)), "begin", node)

    def heal(self) -> None:
        """From here on nothing fails."""
        self.calm = True
        self.cut.clear()
        for node in self.nodes.values():
            node.paused_until_s = 0.0
            if node.up and node.raft.commit == 0 and self.in_force:
                node.toml = self.in_force[-1][1].hosts  # it is told that agent.toml names nobody who votes by now
                self.crash(node)
            if not node.up:
                self.begin(node)

    # ---- clients ----

    def client(self) -> None:
        rng = self.rng
        self.later(rng.expovariate(self.weather.commands_per_s), "client")
        leaders = [node for node in self.nodes.values() if node.up and node.raft.leading]
        if not leaders:
            return
        node = rng.choice(leaders)
        waiting = [one for one in self.clients.values() if not one.acknowledged and one.tries < 4][-8:]
        if waiting and rng.random() < 0.3:
            chosen = [rng.choice(waiting)]
        else:
            chosen = [Client(Proposal(rng.randbytes(16), node.raft.commit, b"x" * rng.randrange(12)))]
            if rng.random() < 0.1:
                chosen += [Client(Proposal(rng.randbytes(16), node.raft.commit, b"y")) for _ in range(20)]
        for one in chosen:
            one.tries += 1
            self.clients[one.proposal.id] = one
        self.feed(node, Proposed([one.proposal for one in chosen]))

    # ---- who votes ----

    def change(self) -> None:
        """Somebody asks whoever believes to lead for another voter, fewer, or one in the place of another; or calls a
        change off."""
        rng = self.rng
        self.later(rng.expovariate(self.weather.changes_per_s), "change")
        leaders = [node for node in self.nodes.values() if node.up and node.raft.leading]
        if not leaders:
            return
        node = rng.choice(leaders)
        now: Configuration = node.raft.configuration
        learner, leaving = "", ""
        if not (now.learner or now.leaving) or rng.random() < 0.1:
            others = [name for name in self.nodes if name not in now.hosts]
            kind = rng.choice(("add", "remove", "replace", "replace"))
            learner = rng.choice(others) if others and kind != "remove" else ""
            leaving = rng.choice(now.hosts) if kind != "add" and (learner or len(now.hosts) > 1) else ""
        self.feed(node, ConfigurationWanted(now, msgspec.structs.replace(now, learner=learner, leaving=leaving)))

    def follows_its_log(self, node: Node) -> None:
        ledger = node.raft._ledger
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

    # ---- what must hold ----

    def led(self, node: Node, action: Led) -> None:
        if action.leader != node.name:
            return
        first = self.leaders.setdefault(action.term, node.name)
        if first != node.name:
            raise Violation(f"Election Safety: {first} and {node.name} both lead term {action.term}")
        log = node.raft._ledger.log
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
            if self.matching.setdefault((index, entry.term), digest) != digest:
                raise Violation(f"Log Matching: {node.name} holds another log up to entry {index}/{entry.term}")
            node.prefix[index] = digest

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

    def restore(self, node: Node, image: Image) -> None:
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
    """What makes an entry this one and no other."""
    return entry.id + entry.term.to_bytes(4, "big") + (b"" if entry.id else entry.command)


def run_seed(seed: int, steps: int = 2000) -> World:
    """One world: `steps` events with faults, then everything heals and must converge within 20 s. Violation (with the
    seed) when something that must hold does not."""
    world = World(seed)
    try:
        while world.steps < steps:
            world.step()
        world.heal()
        world.heap = [entry for entry in world.heap if entry[2] != "client"]
        heapq.heapify(world.heap)
        end_s = world.now_s + 20
        while not world.converged():
            if world.now_s > end_s:
                raise Violation("after everything healed the hosts did not converge within 20 s")
            world.step()
        quiet(world)
        states = {(tuple(node.state.done), node.state.digest) for node in world.nodes.values()}
        if len(states) != 1:
            raise Violation("hosts that applied the same entries are in different states")
        done = set(next(iter(states))[0])
        lost = [one for one in world.clients.values() if one.acknowledged and one.proposal.id not in done]
        if lost:
            raise Violation(f"{len(lost)} commands that were acknowledged are gone")
    except AssertionError as error:
        raise Violation(f"seed {seed}, event {world.steps}, {world.now_s:.3f} s, {world.weather}: {error}") from error
    return world


def quiet(world: World) -> None:
    """Nothing fails any more, so nobody changes the leader: not even who voted before and does not know better."""
    advance(world, SLOW_S_MAX)  # a write that hung before may still let a leader hand over
    terms = {node.raft.term for node in world.nodes.values()}
    advance(world, 4.0)
    after = {node.raft.term for node in world.nodes.values()}
    if max(after) > max(terms):
        raise Violation(f"terms went from {max(terms)} to {max(after)} although nothing fails")


def advance(world: World, seconds: float) -> None:
    end_s = world.now_s + seconds
    while world.now_s < end_s:
        world.step()


def run_seeds(first: int, count: int, steps: int = 2000) -> tuple[int, int, int]:
    """Worlds of the seeds `first .. first + count - 1`: (events, commands acknowledged, crashes and snapshots)."""
    events = commands = seen = 0
    for seed in range(first, first + count):
        world = run_seed(seed, steps)
        events += world.steps
        commands += sum(one.acknowledged for one in world.clients.values())
        seen += world.seen
    return events, commands, seen

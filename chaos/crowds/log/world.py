"""A small world for the Raft core and its disk format: many hosts, one seed, no asyncio.

Messages are lost, doubled, delayed and reordered; links are cut one way or both; hosts crash in the middle of a write,
lose what was not durable (torn frames, sectors kept at random), restart, pause, and have clocks that differ in offset
and rate. In some worlds a voter also comes back without its log, with an older copy of it, with its end cut off or
with a byte changed, as long as a majority of others still has its own; a host that refuses its file has it moved away.
Clients propose to any host that acts as leader, and repeat proposals whose answer is missing. After every event:

    Election Safety        at most one leader per term                                  Raft Figure 3
    Log Matching           same index and term: the same log up to there
    Leader Completeness    a new leader's log holds every entry that was ever applied
    State Machine Safety   no two hosts apply different entries at one index
    Lease                  no host is elected while the leader of an earlier term may act as one
    Exactly once           no command is executed twice in any copy of the state
    One rack               every committed entry belongs to the log that began first, with one identity
    Learner first          a host that is made a voter has every committed entry
    One step               the voters of two configurations that follow one another differ by one host at most
    Configuration          what a host takes for the configuration is what its own log says

and at the end, after everything has healed: a change of voters that was under way is completed, by any host; all hosts
converge on one state; every command that a client was told is applied is in it; and no host, voter or not, causes
another change of the leader. `chaos.stories.log_worlds` plays some of these worlds for each seed.
"""

import heapq
import random
from collections import Counter, deque
from typing import Any

import msgspec

from agent.raft.disk import FOLDER, DiskRefused, Store
from agent.raft.machine import Raft, SessionTable
from agent.raft.machine.types import (
    Apply,
    ConfigurationChanged,
    ConfigurationWanted,
    Event,
    HandOver,
    Persist,
    Persisted,
    Proposal,
    Proposed,
    RaftHostsChanged,
    RaftStarted,
    Restore,
    SaveSnapshot,
    SendRaft,
    SoftState,
    Tick,
)
from agent.raft.messages import RACK_BYTES, Configuration, TimeoutNow, VoteReply, Words, decode, encode
from agent.raft.policy import Timing, quorum
from chaos.crowds.log.nodes import SLOW_S_MAX, SNAPSHOT_ENTRIES, Client, Node, State, WorldConditions
from chaos.crowds.log.promises import Promises
from chaos.crowds.memory_disk import MemoryDisk, PowerLost, run
from covey.core.events import Heard
from covey.core.ids import HostId


class World(Promises):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.conditions = WorldConditions.draw(self.rng)
        rng, conditions = self.rng, self.conditions
        names = [HostId(f"v{n}") for n in range(conditions.voters)] + [
            HostId(f"o{n}") for n in range(conditions.observers)
        ]
        self.voters = tuple(names[: conditions.voters])
        self.observers = tuple(names[conditions.voters :])
        self.rack = bytes(RACK_BYTES)
        self.timing = Timing(keep_entries=4, hint_s=0.3, chunk_bytes=rng.choice((700, 5000, 100_000)))
        self.nodes = {
            name: Node(name, MemoryDisk(random.Random(rng.random())), rng.uniform(0, 1e5), rng.uniform(0.985, 1.015))
            for name in names
        }
        self.steps = 0
        self.calm = False
        self.heap: list[tuple[float, int, str, Node | None, int, Any]] = []
        self.order = 0
        self.cut: set[tuple[HostId, HostId]] = set()
        self.handed_over = 0
        """Orders of a leader to another host to stand for election at once."""
        self.lost: Counter[str] = Counter()
        """Counts of logs, by what was done to them, and by the result."""
        for node in self.nodes.values():
            self.begin(node)
        self.later(rng.uniform(0, 0.3), "client")
        self.later(rng.expovariate(1 / conditions.fault_every_s), "fault")
        if conditions.changes_per_s and len(names) > 1:
            self.later(rng.expovariate(conditions.changes_per_s), "change")

    @property
    def faults(self) -> int:
        return self.seen

    @property
    def ended(self) -> object:
        return self.now_s, sorted(self.chosen_prefix.items())

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
            self.dispatch(node, Heard(*what))
        elif kind == "crash":
            self.crash(node)
            self.later(0.0005, "begin", node)
        elif kind == "wake":
            node.wake_at_s = float("inf")
            self.dispatch(node, Tick())
        else:
            self.written(node)

    def dispatch(self, node: Node, event: Event) -> None:
        events: deque[Event] = deque([event])
        while events:
            for action in node.raft.handle(events.popleft(), node.clock(self.now_s)):
                if isinstance(action, SendRaft):
                    self.carry(node, action.to, action.message)
                    self.handed_over += isinstance(action.message, TimeoutNow)
                    if isinstance(action.message, VoteReply) and action.message.granted:
                        self.after_a_vote(node)
                elif isinstance(action, Persist):
                    self.track(node, action.first, action.entries)
                    node.writes.append(action)
                elif isinstance(action, Apply):
                    self.apply(node, action, events)
                elif isinstance(action, SoftState):
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
        node.configuration, node.commit = node.raft.configuration, node.raft.commit
        self.follows_its_log(node)
        if node.writes and not node.writing:
            self.write(node)
        wake_s = node.world(node.raft.wake_s)
        if wake_s < node.wake_at_s:
            node.wake_at_s = wake_s
            self.later(max(0.0005, wake_s - self.now_s), "wake", node)

    # ---- network ----

    def carry(self, node: Node, to: HostId, message: Words) -> None:
        conditions, rng = self.conditions, self.rng
        if (node.name, to) in self.cut or (not self.calm and rng.random() < conditions.loss):
            return
        if conditions.codec:
            message = decode(encode(self.rack, message)).message
        copies = 2 if not self.calm and rng.random() < conditions.double else 1
        for _ in range(copies):
            delay_s = 0.001 + rng.random() * 0.01
            if not self.calm and rng.random() < conditions.slow:
                delay_s += rng.expovariate(2.0)
            self.later(delay_s, "heard", self.nodes[to], (node.name, message))

    # ---- disk ----

    def write(self, node: Node) -> None:
        if isinstance(node.writes[0], SaveSnapshot):
            node.writing = [node.writes.popleft()]
        else:
            while node.writes and isinstance(node.writes[0], Persist):
                node.writing.append(node.writes.popleft())
        slow = not self.calm and self.rng.random() < self.conditions.slow_disk
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
        self.dispatch(node, Persisted(number))

    # ---- faults ----

    def crash(self, node: Node, power: bool = True) -> None:
        """Crash a host: its power fails, or only the process dies, perhaps in the middle of the write that is under
        way."""
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
        """Perhaps crash a host just after a vote, the moment at which a lost write does most harm."""
        if not self.calm and self.rng.random() < 0.1:
            self.later(0.0, "crash", node)

    def after_a_change(self, node: Node) -> None:
        """Perhaps crash a host between two steps of a change of voters, before or after the disk has the first one."""
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
        node.once, node.state, node.applied = SessionTable(), State([], 0), 0
        node.executed, node.snapshot_due = set(), SNAPSHOT_ENTRIES
        node.prefix = {saved.base_index: self.chosen_prefix[saved.base_index]}
        self.track(node, saved.base_index + 1, saved.entries)
        rng = random.Random(self.rng.random())
        node.commit = 0
        node.raft = Raft(node.name, node.toml or self.voters, saved, self.timing, rng, node.clock(self.now_s))
        self.dispatch(node, RaftStarted())
        self.dispatch(node, RaftHostsChanged(tuple(self.nodes)))

    # ---- files taken away ----

    def move_away(self, node: Node) -> None:
        node.disk.files = {name: data for name, data in node.disk.files.items() if not name.startswith(FOLDER)}

    def keep_copy(self, node: Node) -> None:
        node.copy = {name: data for name, data in node.disk.files.items() if name.startswith(FOLDER)}

    def may_forget(self, node: Node) -> bool:
        """Whether this host may lose its log: a majority of others has its logs, so what it alone held is not what all
        rely on."""
        for each in self.nodes.values():
            each.forgot = each.forgot and not (each.up and each.raft._votes_here and not each.writing)
        known = [each.configuration for each in self.nodes.values()]
        if any(node.name == each.learner for each in known):
            return False
        kept = {each.name for each in self.nodes.values() if each is not node and each.up and not each.forgot}
        now_and_next = [{*each.hosts} for each in known] + [{*each.hosts} - {each.leaving} for each in known]
        return all(len(kept & hosts) >= quorum(len(hosts)) for hosts in now_and_next)

    def take_files(self, node: Node) -> None:
        """Take away or change the log of a host that is down."""
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
        self.later(rng.expovariate(1 / self.conditions.fault_every_s), "fault")
        if rng.random() < self.conditions.files_lost:
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
                self.dispatch(leaving, HandOver(leaving.clock(self.now_s) + rng.choice((0.05, 0.7, 5.0))))
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
        self.crash(node, power=False)  # its second record is not synced (`agent.raft.acknowledged`): not both at once
        self.take_files(node)
        self.later(self.rng.choice((0.01, 0.3, 3.0)), "begin", node)

    def heal(self) -> None:
        """Let nothing fail from here on."""
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
        self.later(rng.expovariate(self.conditions.commands_per_s), "client")
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
        self.dispatch(node, Proposed([one.proposal for one in chosen]))

    # ---- who votes ----

    def change(self) -> None:
        """Ask a host that acts as leader for another voter, fewer, or one in the place of another; or call a change
        off."""
        rng = self.rng
        self.later(rng.expovariate(self.conditions.changes_per_s), "change")
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
        self.dispatch(node, ConfigurationWanted(now, msgspec.structs.replace(now, learner=learner, leaving=leaving)))

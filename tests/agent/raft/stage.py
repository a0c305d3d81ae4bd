"""A few hosts of one log on a stage: time and the network move only when a test says so."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from agent.raft.disk import FOLDER, Store
from agent.raft.machine import Raft
from agent.raft.machine.types import (
    Action,
    Apply,
    Event,
    HardState,
    Persist,
    Persisted,
    Proposal,
    Proposed,
    RaftHostsChanged,
    RaftStarted,
    Restore,
    Saved,
    SaveSnapshot,
    SendRaft,
    Tick,
)
from agent.raft.messages import Entry, Words
from agent.raft.policy import Timing
from chaos.crowds.memory_disk import MemoryDisk, run
from covey.core.events import Heard
from covey.core.ids import HostId

A, B, C, D, E = (HostId(name) for name in "abcde")
Sent = tuple[HostId, HostId, Words]
TIMING = Timing(keep_entries=2)


def entry(term: int, name: str = "") -> Entry:
    return Entry(term, name.encode().ljust(16, b".") if name else b"", 0, name.encode())


def log_of(*terms: int) -> tuple[Entry, ...]:
    """The entries 1, 2, ... of these terms."""
    return tuple(entry(term, f"{index}/{term}") for index, term in enumerate(terms, 1))


def proposal(name: str) -> Proposal:
    return Proposal(name.encode().ljust(16, b"."), 0, name.encode())


class Stage:
    def __init__(
        self,
        *voters: HostId,
        observers: Sequence[HostId] = (),
        logs: Mapping[HostId, Sequence[int]] | None = None,
        term: int = 0,
        timing: Timing = TIMING,
        identities: bool = False,
    ) -> None:
        """`logs`: the terms of the entries that a host begins with; `term`: the term all begin in. Without
        `identities` nobody says which log it is."""
        self.identities = identities
        self.voters, self.observers, self.timing = voters, tuple(observers), timing
        self.now_s = 100.0
        self.messages: deque[Sent] = deque()
        self.told: list[Sent] = []
        """Every message that was ever sent."""
        self.slow: set[HostId] = set()
        """The hosts whose disks take their time: until `finish_writing`."""
        self.writing: dict[HostId, list[Persist | SaveSnapshot]] = {}
        self.applied: dict[HostId, list[str]] = {}
        self.restored: dict[HostId, list[bytes]] = {}
        self.disks: dict[HostId, MemoryDisk] = {}
        self.stores: dict[HostId, Store] = {}
        self.rafts: dict[HostId, Raft] = {}
        for name in (*voters, *observers):
            self.disks[name] = MemoryDisk(random.Random(1))
            terms = (logs or {}).get(name, ())
            self._begin(name, Saved(HardState(max(term, *terms, 0), "", 0), None, 0, 0, log_of(*terms)))

    def _begin(self, name: HostId, seed: Saved | None) -> None:
        store = self.stores[name] = Store(self.disks[name], random.Random(f"{name}{self.now_s}").randbytes)
        saved = run(store.load())
        if seed is not None and not self.identities:
            run(store.append([Persist(0, seed.hard, 1, seed.entries)]))
            saved = seed
        self.applied[name], self.restored[name], self.writing[name] = [], [], []
        self.rafts[name] = Raft(name, self.voters, saved, self.timing, random.Random(name), self.now_s)
        self.tell(name, RaftStarted())
        self.tell(name, RaftHostsChanged((*self.voters, *self.observers)))

    def restart(self, name: HostId) -> None:
        """Restart a host, which loses what its disk has not finished writing, and every message under way to it."""
        self.messages = deque(message for message in self.messages if message[1] != name)
        self._begin(name, None)

    def lose_log(self, name: HostId) -> None:
        """Delete a host's folder, and start it again."""
        files = self.disks[name].files
        self.disks[name].files = {file: data for file, data in files.items() if not file.startswith(FOLDER)}
        self.restart(name)

    # ---- events ----

    def tell(self, name: HostId, event: Event) -> Sequence[Action]:
        actions = self.rafts[name].handle(event, self.now_s)
        self.rafts[name].check()
        for action in actions:
            if isinstance(action, SendRaft):
                self.messages.append((name, action.to, action.message))
                self.told.append((name, action.to, action.message))
            elif isinstance(action, Apply):
                self.applied[name] += [each.command.decode() for each in action.entries if each.id]
            elif isinstance(action, Restore):
                self.restored[name].append(action.image.data)
            elif isinstance(action, Persist | SaveSnapshot):
                self.writing[name].append(action)
        if name not in self.slow:
            self.finish_writing(name)
        return actions

    def finish_writing(self, name: HostId) -> None:
        while self.writing[name]:
            action = self.writing[name].pop(0)
            if isinstance(action, Persist):
                run(self.stores[name].append([action]))
            else:
                run(self.stores[name].checkpoint(action))
            self.tell(name, Persisted(action.number))

    def hear(self, to: HostId, sender: HostId, message: Words) -> list[Words]:
        """What `to` answers, at once, to a made-up message."""
        before = len(self.told)
        self.tell(to, Heard(sender, message))
        said = [each for name, host, each in self.told[before:] if (name, host) == (to, sender)]
        for each in said:
            self.messages.remove((to, sender, each))
        return said

    def deliver(self, lose: Callable[[HostId, HostId, Words], bool] = lambda *_: False) -> None:
        """Deliver messages until no host has anything more to say."""
        for _ in range(10_000):
            if not self.messages:
                return
            sender, to, message = self.messages.popleft()
            if to in self.rafts and not lose(sender, to, message):
                self.tell(to, Heard(sender, message))
        raise AssertionError("they never stop talking")

    def without(self, *gone: HostId) -> None:
        """Deliver messages, but nothing from or to these hosts."""
        self.deliver(lambda sender, to, _: sender in gone or to in gone)

    def stand(self, name: HostId) -> None:
        """Let a host notice that no leader was heard for longer than any host waits."""
        before = self.rafts[name].counters["prevotes"]
        for _ in range(3):  # it led until now, and was late itself
            self.now_s += 6.0
            self.tell(name, Tick())
            if self.rafts[name].counters["prevotes"] > before:
                return

    def elect(self, name: HostId, *gone: HostId) -> None:
        self.stand(name)
        self.without(*gone)
        assert self.rafts[name].leading, f"{name} was not elected"

    def beat(self, leader: HostId, *gone: HostId) -> None:
        """Send the leader's next heartbeat, and deliver all that follows from it."""
        self.now_s = max(self.now_s, self.rafts[leader].wake_s)
        self.tell(leader, Tick())
        self.without(*gone)

    def propose(self, leader: HostId, *names: str) -> None:
        self.tell(leader, Proposed([proposal(name) for name in names]))

    # ---- what came of it ----

    def terms(self, name: HostId) -> list[int]:
        """The terms of the entries in this host's memory."""
        log = self.rafts[name]._raft_log.log
        return [each.term for each in log.slice(log.base_index + 1, log.last_index)]

    def said(self, sender: HostId, to: HostId, kind: type[Words]) -> list[Words]:
        return [message for name, host, message in self.told if (name, host) == (sender, to) and type(message) is kind]

    def leaders(self) -> list[HostId]:
        return [name for name, raft in self.rafts.items() if raft.leading]

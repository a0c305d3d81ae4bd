"""The entries that this host holds, how many of them are durable, and the answers held back until they are.

    log        1 ........ commit ........ durable ........ last
               applied    known to be     on this          in memory
               at once    committed       disk

The configuration is the one of the last entry that holds one, committed or not; when that entry is cut off, the one
before it is in force again (Raft thesis §4.1).

`commit` and `durable` are independent: a follower may learn that an entry is committed (a majority holds it) before
its own disk has finished writing it. At the end of every event `finish` asks for one write of all that changed, and
holds the promises (messages of this event) back until that write is done.
"""

from collections import deque
from collections.abc import Sequence

from agent.raft.machine.log_entries import LogEntries
from agent.raft.machine.types import (
    Action,
    Apply,
    HardState,
    Persist,
    Restore,
    Saved,
    SaveSnapshot,
    SendRaft,
    Snapshot,
    SnapshotTaken,
)
from agent.raft.messages import NO_RACK, Configuration, Entry, Words, configuration_of, crc
from agent.raft.policy import ENTRY_OVERHEAD_BYTES
from covey.core.ids import HostId

KEEP_BYTES_MAX = 8 * 1024 * 1024
"""The most command bytes kept below a snapshot, whatever the number of entries."""


class Contradiction(Exception):
    """A leader's log holds another entry where this host's is known to be committed: one of the two lost entries that a
    majority had acknowledged. This host cannot repair that by itself."""

    def __init__(self, index: int, own_term: int, other_term: int) -> None:
        super().__init__(f"entry {index} is committed here in term {own_term}, the leader has one of term {other_term}")
        self.index, self.own_term, self.other_term = index, own_term, other_term


class RaftLog:
    def __init__(self, saved: Saved, founders: Configuration, keep_entries: int, hint_s: float) -> None:
        """`founders` is the configuration as long as no entry holds one."""
        self.term, self.vote = saved.hard.term, saved.hard.vote
        self.identity, self.lost, self.rack_before = saved.hard.identity, saved.hard.lost, saved.hard.rack
        first = saved.configuration if saved.configuration.voters else founders
        self._configurations = [(saved.base_index, first)]
        """The configurations: (index, the one from there on), ascending; the first is what holds at the log's base."""
        self._configure(saved.base_index + 1, saved.entries)
        self.log = LogEntries(saved.base_index, saved.base_term, saved.entries)
        self.image = saved.image
        self.commit = saved.image.index if saved.image else 0
        self.durable = self.log.last_index
        self._keep_entries, self._hint_s = keep_entries, hint_s
        self._saved_commit = max(self.commit, min(saved.hard.commit, self.log.last_index))
        self._saved_s = 0.0
        self._changed = False
        self._unsaved: int | None = None
        """The first entry that no write was asked for yet; None: all were."""
        self._number = self._identity_number = 0
        """The number of the last write, and of the one that made this log's identity durable."""
        self._writing: deque[tuple[int, int]] = deque()
        """The writes under way: (number, last index)."""
        self._promises: list[tuple[HostId, Words]] = []
        self._held: deque[tuple[int, int, HostId, Words]] = deque()
        """The answers held back: (number, term, to, message), sent once `number` is durable, if that term is still the
        present one."""
        self._actions: list[Action] = []

    def begin(self) -> None:
        """Apply what was committed according to the disk."""
        if self.image is not None:
            self._actions.append(Restore(self.image))
        self.commit_to(self._saved_commit)

    # ---- term and vote ----

    def enter(self, term: int, vote: str = "") -> None:
        """Enter a later term, in which this host has voted for `vote`, or not yet."""
        assert term > self.term, f"term {term} after {self.term}"
        self.term, self.vote, self._changed = term, vote, True

    def vote_for(self, candidate: HostId) -> None:
        assert self.vote in ("", candidate), f"second vote in term {self.term}"
        if not self.vote:
            self.vote, self._changed = candidate, True

    # ---- who votes, and which log this is ----

    @property
    def configuration(self) -> Configuration:
        """The newest configuration in the log, committed or not (Raft §6)."""
        return self._configurations[-1][1]

    @property
    def configuration_index(self) -> int:
        """The index of the entry of `configuration`."""
        return self._configurations[-1][0]

    @property
    def configuration_committed(self) -> bool:
        """Whether the entry of `configuration` is committed."""
        return self.configuration_index <= self.commit

    @property
    def rack(self) -> bytes:
        """The rack's identity, once it is certain; NO_RACK before."""
        return self._configuration_at(self.commit).rack if self.commit else NO_RACK

    def may_be_of(self, rack: bytes) -> bool:
        """Whether this log is of that rack, or was, or has heard so and is not certain."""
        return rack != NO_RACK and rack in (self.rack, self.rack_before, self.configuration.rack)

    def _configure(self, first: int, entries: Sequence[Entry]) -> None:
        for index, entry in enumerate(entries, first):
            if found := configuration_of(entry):
                self._configurations.append((index, found))

    def _configuration_at(self, index: int) -> Configuration:
        for since, found in reversed(self._configurations):
            if since <= index:
                return found
        raise AssertionError(f"entry {index} is below the log's base")

    def lose(self, identity: bytes) -> None:
        """Draw a line: this log holds less than it acknowledged, and from here on it is another one."""
        self.identity, self.lost, self._changed = identity, True, True
        self._identity_number = self.next_number

    def write_commit(self) -> None:
        """Write down, for after a restart, that this log votes since an entry was committed."""
        self._changed = True

    # ---- entries ----

    def append(self, entries: Sequence[Entry]) -> None:
        if entries:
            self._touch(self.log.last_index + 1)
            self._configure(self.log.last_index + 1, entries)
            self.log.append(entries)

    def merge(self, prev_index: int, entries: Sequence[Entry]) -> None:
        """Add a leader's entries after `prev_index`. What is here already stays; only where an existing entry has
        another term do it and its successors go (Raft §5.3, step 3 of AppendEntries). A delayed Append therefore never
        shortens the log. Contradiction when a committed entry would go."""
        for at, entry in enumerate(entries, prev_index + 1):
            known = self.log.term_at(at)
            if known != entry.term:
                if known is not None and at <= self.commit:
                    raise Contradiction(at, known, entry.term)
                if at <= self.log.last_index:
                    self._cut(at)
                self.append(entries[at - prev_index - 1 :])
                return

    def _cut(self, first: int) -> None:
        assert first > self.commit, f"entry {first} is committed and cannot be replaced"
        self.log.cut(first)
        while self._configurations[-1][0] >= first:
            self._configurations.pop()
        self._undo_durable(first - 1)
        self._touch(first)

    def _undo_durable(self, last: int) -> None:
        self.durable = min(self.durable, last)
        self._writing = deque((number, min(end, last)) for number, end in self._writing)

    def _touch(self, first: int) -> None:
        self._unsaved = first if self._unsaved is None else min(self._unsaved, first)

    def commit_to(self, index: int) -> bool:
        """Apply the new entries up to `index`, which are committed. False when there is nothing new."""
        if index <= self.commit:
            return False
        assert index <= self.log.last_index, f"commit {index} is beyond the log's end {self.log.last_index}"
        self._actions.append(Apply(self.commit + 1, self.log.slice(self.commit + 1, index)))
        if not self.commit:
            self.write_commit()  # after a restart this host still knows which rack it belongs to
        self.commit = index
        return True

    # ---- snapshots ----

    def install(self, image: Snapshot) -> None:
        """Install a leader's snapshot in the place of the whole log (Raft §7, step 7)."""
        assert image.index > self.commit, "a snapshot of what is already applied"
        self.log.reset(image.index, image.term)
        voting = image.configuration if image.configuration.voters else self.configuration
        self._configurations = [(image.index, voting)]
        self._undo_durable(0)
        self.commit, self.image = image.index, image
        self._actions.append(Restore(image))
        self._save_image(image)

    def compact(self, taken: SnapshotTaken) -> None:
        """Forget entries far enough below this host's own snapshot."""
        if taken.index > self.commit or (self.image is not None and taken.index <= self.image.index):
            return
        term = self.log.term_at(taken.index)
        assert term is not None, f"entry {taken.index} is applied but not in the log"
        self.image = Snapshot(taken.index, term, taken.data, crc(taken.data), self._configuration_at(taken.index))
        base = self._keep_from(taken.index)
        at_base = self._configuration_at(base)
        self._configurations = [(base, at_base), *(each for each in self._configurations if each[0] > base)]
        self.log.compact(base)
        self._save_image(self.image)

    def _keep_from(self, index: int) -> int:
        first = max(self.log.base_index, index - self._keep_entries)
        size = 0
        kept = self.log.slice(first + 1, index)
        for at in range(len(kept), 0, -1):
            size += len(kept[at - 1].command) + ENTRY_OVERHEAD_BYTES
            if size > KEEP_BYTES_MAX:
                return first + at
        return first

    def _save_image(self, image: Snapshot) -> None:
        log = self.log
        self._number += 1
        entries = log.slice(log.base_index + 1, log.last_index)
        at_base = self._configurations[0][1]
        self._actions.append(
            SaveSnapshot(self._number, self._hard(), image, log.base_index, log.base_term, entries, at_base)
        )
        self._writing.append((self._number, log.last_index))
        self._changed, self._unsaved, self._saved_commit = False, None, self.commit

    # ---- sending ----

    def send(self, to: HostId, message: Words) -> None:
        """Send a message at once: it promises nothing that a crash could undo."""
        self._actions.append(SendRaft(to, message))

    def answer(self, to: HostId, message: Words) -> None:
        """Answer at once, unless this log's identity is not durable yet."""
        named = not self._writing or self._writing[0][0] > self._identity_number
        (self.send if named and not self._changed else self.promise)(to, message)

    def promise(self, to: HostId, message: Words) -> None:
        """Answer once everything known by the end of this event is durable."""
        self._promises.append((to, message))

    @property
    def next_number(self) -> int:
        """The number of the write that will hold what changed in this event."""
        return self._number + 1

    def act(self, action: Action) -> None:
        self._actions.append(action)

    def persisted(self, number: int) -> None:
        """Release the promises that waited for `number`; those of an earlier term are void."""
        while self._writing and self._writing[0][0] <= number:
            self.durable = max(self.durable, self._writing.popleft()[1])
        while self._held and self._held[0][0] <= number:
            _, term, to, message = self._held.popleft()
            if term == self.term:
                self.send(to, message)

    def finish(self, now_s: float) -> list[Action]:
        """The actions of this event; the write comes last and nothing that depends on it comes before."""
        hint_due = self.commit > self._saved_commit and now_s - self._saved_s >= self._hint_s
        if self._changed or self._unsaved is not None or hint_due:
            self._persist(now_s)
        self._release_or_hold()
        actions, self._actions = self._actions, []
        return actions

    def _persist(self, now_s: float) -> None:
        self._number += 1
        first = self.log.last_index + 1 if self._unsaved is None else self._unsaved
        entries = self.log.slice(first, self.log.last_index)
        self._actions.append(Persist(self._number, self._hard(), first, entries))
        self._writing.append((self._number, self.log.last_index))
        self._changed, self._unsaved = False, None
        self._saved_commit, self._saved_s = self.commit, now_s

    def _release_or_hold(self) -> None:
        for to, message in self._promises:
            if self._writing:
                self._held.append((self._number, self.term, to, message))
            else:
                self.send(to, message)
        self._promises.clear()

    def _hard(self) -> HardState:
        rack = self.rack if self.rack != NO_RACK else self.rack_before
        return HardState(self.term, self.vote, self.commit, self.identity, self.lost, rack)

    def check(self) -> None:
        log = self.log
        assert log.base_index <= self.commit <= log.last_index, f"commit {self.commit} outside {log.base_index}.."
        assert self.durable <= log.last_index, "durable beyond the end"
        assert self.image is None or self.image.index <= self.commit, "a snapshot of what is not committed"
        assert log.base_index <= (self.image.index if self.image else 0), "compacted without a snapshot"
        assert self._configurations[0][0] <= log.base_index, "no configuration at the base"
        assert self._configurations[-1][0] <= log.last_index, "a configuration without its entry"
        assert log.last_term <= self.term, "an entry of a later term than ours"
        assert all(number <= self._number for number, *_ in self._held), "a promise that nothing releases"

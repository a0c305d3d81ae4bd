"""The state that committed commands make, and when a snapshot of it replaces them.

The log is cut by growth, so that what snapshots write stays in proportion to what commands write, and a restart takes
no longer than reading a snapshot and about its size again.
"""

from collections.abc import Callable

import msgspec

from agent.raft.machine import Outcome, SessionTable
from agent.raft.machine.session_table import AppliedRequest
from agent.raft.machine.types import Snapshot
from agent.raft.messages import Entry

LOG_BYTES = 16 * 1024 * 1024
"""Bytes of commands applied since the last snapshot after which a new one is taken, however few the entries, unless
that snapshot was longer."""
ENTRIES_SHARE = 4
"""The divisor of the last snapshot's bytes: after enough entries a snapshot is taken once they have the quotient in
bytes."""
ENTRY_BYTES = 512
"""The bytes of commands that applying one entry again at a restart is counted as."""


class LogGrowth:
    """The bytes that were applied since the last snapshot, and how long that one was."""

    def __init__(self, entries: int) -> None:
        """`entries`: the number of entries that is enough."""
        self._entries, self._enough = 0, entries
        self._grown = self._snapshot = 0

    def applied(self, command: bytes) -> None:
        self._entries += 1
        self._grown += len(command) + ENTRY_BYTES

    def cut(self, snapshot_bytes: int) -> None:
        """Begin anew: a snapshot was taken, or came from a leader."""
        self._entries, self._grown, self._snapshot = 0, 0, snapshot_bytes

    @property
    def is_due(self) -> bool:
        if self._grown >= max(LOG_BYTES, self._snapshot):
            return True
        return self._entries >= self._enough and self._grown >= self._snapshot / ENTRIES_SHARE


class StateBody(msgspec.Struct, frozen=True, array_like=True):
    """The content of a snapshot: the ids that were applied, and the state."""

    kept: list[AppliedRequest]
    state: bytes


_state = msgspec.msgpack.Decoder(StateBody)


def _unbound(index: int, command: bytes) -> bytes:
    raise AssertionError("bind() comes before start()")


class AppliedState:
    """The state of one host, whose service binds it, and the requests that are applied to it once only."""

    def __init__(self, entries: int) -> None:
        """`entries`: the number of entries that is enough for a snapshot, as in `LogGrowth`."""
        self.index = 0
        """Index of the newest entry that is applied."""
        self.sessions = SessionTable()
        self._growth = LogGrowth(entries)
        self._apply: Callable[[int, bytes], bytes] = _unbound
        self._snapshot: Callable[[], bytes] = bytes
        self._restore: Callable[[bytes], None] = lambda _: None

    def bind(
        self,
        apply: Callable[[int, bytes], bytes],
        snapshot: Callable[[], bytes],
        restore: Callable[[bytes], None],
    ) -> None:
        """Bind the state machine. Once something is applied, the state is passed on as a snapshot."""
        if self.index:
            restore(self._snapshot())
        self._apply, self._snapshot, self._restore = apply, snapshot, restore

    @property
    def bound(self) -> bool:
        return self._apply is not _unbound

    def apply(self, index: int, entry: Entry) -> Outcome | None:
        """Apply an entry. None: it has no command."""
        self.index = index
        if not entry.id:
            return None
        self._growth.applied(entry.command)
        return self.sessions.apply(index, entry, self._apply)

    @property
    def is_snapshot_due(self) -> bool:
        """Whether so much was applied since the last snapshot that the next one is due."""
        return self._growth.is_due

    def snapshot(self) -> bytes:
        """The content of a snapshot, which begins the log anew."""
        data = msgspec.msgpack.encode(StateBody(self.sessions.dump(), self._snapshot()))
        self._growth.cut(len(data))
        return data

    def restore(self, image: Snapshot) -> None:
        """Replace the state by that of a snapshot."""
        body = _state.decode(image.data)
        self.sessions.load(body.kept)
        self._restore(body.state)
        self.index = image.index
        self._growth.cut(len(image.data))

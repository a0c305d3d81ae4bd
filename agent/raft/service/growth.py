"""When the log is cut: by growth, so that what snapshots write stays in proportion to what commands write, and a
restart takes no longer than reading a snapshot and about its size again."""

LOG_BYTES = 16 * 1024 * 1024
"""Bytes of commands applied since the last snapshot after which a new one is taken, however few the entries, unless
that snapshot was longer."""
ENTRIES_SHARE = 4
"""After enough entries a snapshot is taken once they come to one over this of the last snapshot's bytes."""
ENTRY_BYTES = 512
"""What applying an entry again costs at a restart, as bytes of commands."""


class LogGrowth:
    """What was applied since the last snapshot, and how long that one was."""

    def __init__(self, entries: int) -> None:
        """`entries`: how many are enough."""
        self._entries, self._enough = 0, entries
        self._grown = self._snapshot = 0

    def applied(self, command: bytes) -> None:
        self._entries += 1
        self._grown += len(command) + ENTRY_BYTES

    def cut(self, snapshot_bytes: int) -> None:
        """A snapshot was taken, or came from a leader."""
        self._entries, self._grown, self._snapshot = 0, 0, snapshot_bytes

    @property
    def is_due(self) -> bool:
        if self._grown >= max(LOG_BYTES, self._snapshot):
            return True
        return self._entries >= self._enough and self._grown >= self._snapshot / ENTRIES_SHARE

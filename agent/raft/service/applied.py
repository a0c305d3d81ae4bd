"""When the log is cut: by growth, so that what snapshots write stays in proportion to what commands write, and a
restart takes no longer than reading a snapshot and about its size again."""

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

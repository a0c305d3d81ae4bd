"""The log in memory: entries `base_index + 1 .. last_index`; earlier ones are only in the snapshot."""

from collections.abc import Sequence

from agent.raft.messages import Entry


class LogEntries:
    """The entries of a log. Indices count from 1. `base_term` is the term of the last entry that is no longer here (0
    at the beginning)."""

    __slots__ = ("_entries", "base_index", "base_term")

    def __init__(self, base_index: int = 0, base_term: int = 0, entries: Sequence[Entry] = ()) -> None:
        self.base_index, self.base_term = base_index, base_term
        self._entries = list(entries)

    @property
    def last_index(self) -> int:
        return self.base_index + len(self._entries)

    @property
    def last_term(self) -> int:
        return self._entries[-1].term if self._entries else self.base_term

    def term_at(self, index: int) -> int | None:
        """The term of the entry at `index`; None when it is not here (compacted, or beyond the end)."""
        at = index - self.base_index
        if 0 < at <= len(self._entries):
            return self._entries[at - 1].term
        return self.base_term if at == 0 else None

    def slice(self, first: int, last: int) -> tuple[Entry, ...]:
        """The entries `first .. last`, both included; empty when first > last. `first` must lie above the base."""
        start = first - self.base_index - 1
        assert start >= 0, f"entry {first} is compacted: the log begins after {self.base_index}"
        return tuple(self._entries[start : max(start, last - self.base_index)])

    def append(self, entries: Sequence[Entry]) -> None:
        self._entries.extend(entries)

    def cut(self, first: int) -> None:
        """Drop `first` and everything after it."""
        del self._entries[max(0, first - self.base_index - 1) :]

    def compact(self, index: int) -> None:
        """Forget the entries up to `index`, which must be here."""
        term = self.term_at(index)
        assert term is not None, f"cannot compact to {index}: the log is {self.base_index}..{self.last_index}"
        del self._entries[: index - self.base_index]
        self.base_index, self.base_term = index, term

    def reset(self, index: int, term: int) -> None:
        """Forget everything: a snapshot up to `index` took its place."""
        self._entries.clear()
        self.base_index, self.base_term = index, term

    def hint(self, index: int, term: int) -> tuple[int, int]:
        """The last entry at or below `index` whose term is at most `term`, as (index, term): above it the two logs
        certainly differ, so whole terms are skipped in one exchange (Raft §5.3, end)."""
        at = min(index, self.last_index)
        while at > self.base_index and self._entries[at - self.base_index - 1].term > term:
            at -= 1
        if at <= self.base_index:
            return self.base_index, self.base_term
        return at, self._entries[at - self.base_index - 1].term

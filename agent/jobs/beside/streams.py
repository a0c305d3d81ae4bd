"""The two directions of a session's bytes: what is held between a command and whoever takes turns. No input or output
here; each holds a bounded number of bytes, and knows the offset of each in all that ever came."""

from collections import deque

from agent.jobs.beside.messages import INPUT_BYTES_MAX, OUTPUT_BYTES_MAX

Part = tuple[int, bytes]
"""Where bytes belong, and the bytes."""


class SessionOutput:
    """What a command wrote and nobody has taken yet. A reader that falls behind makes the command wait (`room`), or
    loses the oldest bytes (`drop_to_fit`)."""

    def __init__(self, most: int = OUTPUT_BYTES_MAX) -> None:
        self._most = most
        self._parts: deque[Part] = deque()
        self.start = self.end = 0
        """The offsets of the first byte that is held, and behind the last."""

    @property
    def room(self) -> int:
        """The number of bytes that may be added; words of the session itself are added whatever it is."""
        return max(0, self._most - (self.end - self.start))

    def add(self, where: int, data: bytes) -> None:
        if data:
            self._parts.append((where, data))
            self.end += len(data)

    def drop_to_fit(self, more: int) -> int:
        """Drop the oldest bytes until `more` bytes have room. Returns how many were dropped."""
        before = self.start
        self.seen(min(self.end, self.end + more - self._most))
        return self.start - before

    def seen(self, offset: int) -> None:
        """Forget all before `offset`, which has arrived. An offset that lies outside of what is held says nothing."""
        if not self.start < offset <= self.end:
            return
        while self._parts and self.start + len(self._parts[0][1]) <= offset:
            self.start += len(self._parts.popleft()[1])
        if self.start < offset:
            where, data = self._parts[0]
            self._parts[0] = where, data[offset - self.start :]
            self.start = offset

    def held(self, most: int) -> tuple[Part, ...]:
        """At most `most` of the bytes that are held, from the first one on."""
        found: list[Part] = []
        for where, data in self._parts:
            if most <= 0:
                break
            found.append((where, data[:most]))
            most -= len(data)
        return tuple(found)

    def check(self) -> None:
        """AssertionError where what is held is not what the offsets say."""
        assert self.end - self.start == sum(len(data) for _, data in self._parts)
        assert all(data for _, data in self._parts)


class SessionInput:
    """What was typed for a command and it has not read yet. Bytes that come again are dropped, and bytes behind a gap
    too: whoever sends them hears from where on they are wanted."""

    def __init__(self, most: int = INPUT_BYTES_MAX) -> None:
        self._most = most
        self._held = bytearray()
        self.taken = 0
        """The offset up to which input was taken."""
        self.ended = False
        """Whether no input follows what was taken."""

    @property
    def room(self) -> int:
        return self._most - len(self._held)

    def take(self, at: int, data: bytes, ended: bool = False) -> None:
        """Take what is new and has room. `ended`: nothing follows `data`."""
        if self.ended or at > self.taken:
            return
        new = data[self.taken - at :] if self.taken - at < len(data) else b""
        part = new[: self.room]
        self._held += part
        self.taken += len(part)
        self.ended = ended and self.taken == at + len(data)

    def held(self) -> bytes:
        return bytes(self._held)

    def written(self, count: int) -> None:
        """Forget the first `count` bytes, which the command has."""
        del self._held[:count]

    def check(self) -> None:
        """AssertionError where more is held than may be."""
        assert 0 <= len(self._held) <= self._most
        assert len(self._held) <= self.taken

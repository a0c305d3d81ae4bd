"""What a leader knows of one other host, and how much it may send before it gets an answer.

probe     one Append at a time, until the place is found where the two logs agree
stream    entries are sent ahead of the answers, up to `window` messages
snapshot  the host is further behind than the leader's log reaches: pieces of the snapshot, one at a time
"""

import enum
import math
from collections import deque

from agent.raft.machine.types import Snapshot

VOTER_WINDOW = 16
"""The most Appends under way to one voter; at 512 KiB each that is 8 MiB."""
OBSERVER_WINDOW = 1
"""The most Appends under way to an observer: the next one goes out with its answer, so that fan-out batches by
itself."""


class ProgressState(enum.Enum):
    PROBE = enum.auto()
    STREAM = enum.auto()
    SNAPSHOT = enum.auto()


class Progress:
    __slots__ = (
        "answered_round",
        "beat_s",
        "confirmed_s",
        "identity",
        "image",
        "inflight",
        "last_index",
        "lost",
        "match",
        "next",
        "offset",
        "sent_s",
        "since",
        "state",
        "told_commit",
        "voter",
        "waiting",
        "whole",
    )

    def __init__(self, next_index: int) -> None:
        self.voter = False
        """Whether the host's name is among the voters'."""
        self.whole = False
        """Whether the host receives all entries at once: voters and the learner do, observers receive what is
        committed."""
        self.identity = b""
        """The identity of the log that answers; empty until one has."""
        self.since = 0
        """The round that had last begun when this log first answered."""
        self.lost = False
        """Whether the log replaces one that is missing or holds less than it acknowledged (`AppendReply.lost`)."""
        self.last_index = 0
        """The end of the host's log, by its last answer."""
        self.match = 0
        self.next = next_index
        self.state = ProgressState.PROBE
        self.waiting = False
        """Whether one Append is under way, while probing."""
        self.inflight: deque[int] = deque()
        """The last index of each Append under way, while streaming."""
        self.told_commit = 0
        self.confirmed_s = -math.inf
        """When the last round began that this host answered."""
        self.answered_round = 0
        """The number of the last round that this host answered."""
        self.beat_s = -math.inf
        """When the next heartbeat to the host is due."""
        self.image: Snapshot | None = None
        self.offset = 0
        self.sent_s = -math.inf
        """When the current piece of the snapshot was sent."""

    @property
    def window(self) -> int:
        return VOTER_WINDOW if self.whole else OBSERVER_WINDOW

    @property
    def may_send(self) -> bool:
        if self.state is ProgressState.PROBE:
            return not self.waiting
        return self.state is ProgressState.STREAM and len(self.inflight) < self.window

    def sent(self, last: int, commit: int) -> None:
        """Note that an Append went out; it ends at `last`."""
        self.told_commit = min(commit, last)
        if self.state is ProgressState.PROBE:
            self.waiting = True
        elif last >= self.next:
            self.inflight.append(last)
            self.next = last + 1

    def accepted(self, match: int) -> bool:
        """Note that an Append was accepted. True when this host got further, or a new place to stream from was
        found."""
        if self.state is ProgressState.SNAPSHOT and self.image is not None and match < self.image.index:
            return False
        further = match > self.match
        self.match = max(self.match, match)
        while self.inflight and self.inflight[0] <= match:
            self.inflight.popleft()
        if self.state is not ProgressState.STREAM:
            self.state, self.image, self.waiting = ProgressState.STREAM, None, False
            self.inflight.clear()
            self.next = self.match + 1
            return True
        self.next = max(self.next, self.match + 1)
        return further

    def refused(self, rejected: int, try_next: int) -> bool:
        """Note that an Append was refused; `rejected` was the prev_index that did not fit. False when that answer is
        out of date."""
        if self.state is ProgressState.SNAPSHOT or rejected <= self.match:
            return False
        if self.state is ProgressState.PROBE and rejected != self.next - 1:
            return False
        self.state, self.waiting = ProgressState.PROBE, False
        self.inflight.clear()
        self.next = max(self.match + 1, min(rejected, try_next))
        return True

    def answered(self, identity: bytes, lost: bool, last_index: int, number: int, newest: int) -> bool:
        """Whether this answer to round `number` is of the log that answers now; `newest` is the round that began last.
        Another log under this name starts from nothing: entries of the former one do not count.

        Which of two logs is the later one does not follow from the order in which their answers arrive: one that was
        lost may have sent its last answer before, and it comes late. But a log that answers a round that began after
        another one was heard was there after that one."""
        if identity != self.identity:
            if self.identity:
                if number <= self.since:
                    return False
                self.match, self.next = 0, min(self.next, last_index + 1)
                self.state, self.image, self.waiting = ProgressState.PROBE, None, False
                self.inflight.clear()
                self.confirmed_s, self.answered_round = -math.inf, 0
            self.since = newest
        self.identity, self.lost, self.last_index = identity, lost, last_index
        return True

    def begin_snapshot(self, image: Snapshot) -> None:
        self.state, self.image, self.offset, self.waiting = ProgressState.SNAPSHOT, image, 0, False
        self.inflight.clear()

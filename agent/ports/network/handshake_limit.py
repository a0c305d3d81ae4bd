"""Connections to the control link that have not shown a key yet: counted, and limited.

ZeroMQ accepts every connection and gives up a handshake after `HANDSHAKE_S`; until then an idle connection holds a file
descriptor of the agent. Its monitor reports each connection accepted and ended, with the descriptor, but reports a
handshake that succeeded without it. So the numbers are right, and which connections they are is not known: one that is
older than the handshake's limit and has not ended has shown its key.
"""

import errno
from collections import Counter
from typing import Literal

HANDSHAKE_S = 3.0
"""Seconds of ZMQ_HANDSHAKE_IVL of the control link."""
GRACE_S = 1.0
"""Seconds by which ZeroMQ's timers and this host's event loop may be late."""
UNPROVEN_MAX = 128
"""The most connections without a key at a time. When 256 hosts come back in one moment, those refused try again, and
all are connected within some hundred milliseconds."""

Kind = Literal["accepted", "proven", "failed", "ended"]


class HandshakeLimit:
    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._unproven: dict[int, float] = {}
        """Connections that have not shown a key: file descriptor -> when it was accepted; oldest first."""
        self.open = 0
        """The number of connections that peers have made to this host now."""

    def unproven(self, now_s: float) -> int:
        """The number of connections not known to have shown a key."""
        for file, since_s in list(self._unproven.items()):
            if now_s - since_s > HANDSHAKE_S + GRACE_S:
                del self._unproven[file]
        return min(self.open, len(self._unproven))

    def heard(self, kind: Kind, value: int, now_s: float) -> bool:
        """Take one event of the monitor, and say whether its connection exceeds the limit. `value` is the file
        descriptor of a connection that was accepted or has ended, the error number of a handshake that failed."""
        self.unproven(now_s)
        match kind:
            case "accepted":
                return self._accepted(value, now_s)
            case "proven":
                self._counters["handshakes"] += 1
                self._unproven.pop(next(iter(self._unproven), -1), None)
            case "failed":
                self._counters["silent" if value == errno.EAGAIN else "broken_off"] += 1
            case "ended":
                self.open = max(0, self.open - 1)
                self._unproven.pop(value, None)
        return False

    def _accepted(self, file: int, now_s: float) -> bool:
        self._counters["accepted"] += 1
        self.open += 1
        self._unproven.pop(file, None)
        self._unproven[file] = now_s
        if len(self._unproven) <= UNPROVEN_MAX:
            return False
        self._counters["turned_away"] += 1
        return True

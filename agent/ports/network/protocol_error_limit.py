"""Malformed frames by process: how many, whether the process may connect, and whether the next one is logged.

A process that sends a malformed frame loses its connection, and may connect again. After `OFFENCES_MAX` of them it is
refused until it has not connected for `FORGIVE_S`; and however many such processes there are, the log gets `LINES_MAX`
lines per `FORGIVE_S`, each with the number of frames that were not logged.
"""

from collections import OrderedDict

OFFENCES_MAX = 5
FORGIVE_S = 60.0
PEERS_MAX = 256
"""The most peers remembered; beyond that the one whose last offence is oldest is forgotten."""
LINES_MAX = 10


class ProtocolErrorLimit:
    """The malformed frames of each peer, as its stream names it (`unix:pid 7`)."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Each peer's number of malformed frames, and the time of the last one or of the last refused connection."""
        self._lines = 0
        self._since_s = float("-inf")
        self._unsaid = 0

    def shut_out(self, peer: str, now_s: float) -> bool:
        """Whether the peer's connection is refused now. A refused connection starts `FORGIVE_S` again."""
        count, last_s = self._peers.get(peer, (0, 0.0))
        if count < OFFENCES_MAX:
            return False
        if now_s - last_s >= FORGIVE_S:
            del self._peers[peer]
            return False
        self._note(peer, count, now_s)
        return True

    def add(self, peer: str, now_s: float) -> int | None:
        """Count one more malformed frame: None when it is not to be logged, otherwise how many were not logged
        before."""
        count, last_s = self._peers.get(peer, (0, now_s))
        self._note(peer, (count if now_s - last_s < FORGIVE_S else 0) + 1, now_s)
        if now_s - self._since_s >= FORGIVE_S:
            self._since_s, self._lines = now_s, 0
        if self._lines >= LINES_MAX:
            self._unsaid += 1
            return None
        self._lines += 1
        unsaid, self._unsaid = self._unsaid, 0
        return unsaid

    def _note(self, peer: str, count: int, now_s: float) -> None:
        self._peers[peer] = (count, now_s)
        self._peers.move_to_end(peer)
        while len(self._peers) > PEERS_MAX:
            self._peers.popitem(last=False)

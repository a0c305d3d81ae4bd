"""A snapshot that is being received: pieces put together, and checked as a whole."""

from agent.raft.machine.types import Snapshot
from agent.raft.messages import InstallSnapshot, crc
from covey.core.ids import HostId


class SnapshotReceiver:
    """The pieces of a snapshot, at most of one at a time; the first piece of another one replaces it. It holds only
    what has arrived."""

    def __init__(self) -> None:
        self._of: tuple[HostId, int, int, int, int, int] | None = None
        self._data = bytearray()

    @property
    def length(self) -> int:
        """The next byte that is wanted."""
        return len(self._data)

    def add(self, sender: HostId, piece: InstallSnapshot) -> Snapshot | None:
        """The whole snapshot with its last piece; None while something is missing. One whose checksum is wrong is
        dropped and received from the start."""
        of = (sender, piece.term, piece.index, piece.entry_term, piece.total, piece.crc)
        if of != self._of:
            self._of = of
            self._data.clear()
        if piece.offset != len(self._data):
            return None
        self._data += piece.data
        if len(self._data) < piece.total:
            return None
        data = bytes(self._data)
        self._of = None
        self._data.clear()
        image = Snapshot(piece.index, piece.entry_term, data, piece.crc, piece.configuration)
        return image if crc(data) == piece.crc else None

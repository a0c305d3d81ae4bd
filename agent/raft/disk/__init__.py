"""The log on disk, and how a log is found to be damaged or lost.

acknowledged  how far the log went when it last acknowledged: tells a lost log from a new one
store         one generation file of checksummed frames, and the snapshot before them
"""

from agent.raft.disk.store import FOLDER, NO_ROOM, VERSION, Contradicted, DiskRefused, Store, write_length

__all__ = ["FOLDER", "NO_ROOM", "VERSION", "Contradicted", "DiskRefused", "Store", "write_length"]

"""What the log has on disk, and what becomes of it when that is not what it was.

acknowledged  how far the log went when it last said so: what tells a lost log from a new one
store         one generation file of checksummed frames, and the snapshot it stands on
"""

from agent.raft.disk.store import FOLDER, VERSION, Contradicted, DiskRefused, Store, write_length

__all__ = ["FOLDER", "VERSION", "Contradicted", "DiskRefused", "Store", "write_length"]

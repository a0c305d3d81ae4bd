"""The Raft core: `Raft.handle(event, now_s) -> actions`. It opens nothing; clock and random numbers are arguments.

types              events and actions
log_entries        the entries in memory
raft_log           which entries are held and durable, and answers held back until they are
progress           what a leader knows of one other host
leading            a leader: replication, commitment, CheckQuorum
snapshot_receiver  a snapshot that is being received
disk_pace          whether the log's disk is too slow to lead
patience           timeouts stretched by the silences seen
outlook            what other modules may ask of a core
raft               roles, votes, following
session_table      repeated proposals are applied once
"""

from agent.raft.machine.raft import Raft, Role
from agent.raft.machine.raft_log import Contradiction
from agent.raft.machine.session_table import Outcome, SessionTable

__all__ = ["Contradiction", "Outcome", "Raft", "Role", "SessionTable"]

"""The Raft core: `Raft.handle(event, now_s) -> actions`. It opens nothing, reads no clock and rolls no dice of its own.

words      events and actions
log        the entries in memory
ledger     what is held, what of it is durable, what is promised
progress   what a leader knows of one other host
leading    a leader: replication, commitment, CheckQuorum
parcel     a snapshot on its way in
outlook    what others may know of a core
raft       roles, votes, following
once       repeated proposals are applied once
"""

from agent.raft.machine.raft import Raft, Role
from agent.raft.machine.raft_log import Contradiction
from agent.raft.machine.session_table import Outcome, SessionTable

__all__ = ["Contradiction", "Outcome", "Raft", "Role", "SessionTable"]

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

from agent.consensus.machine.ledger import Contradiction
from agent.consensus.machine.once import Once, Outcome
from agent.consensus.machine.raft import Raft, Role

__all__ = ["Contradiction", "Once", "Outcome", "Raft", "Role"]

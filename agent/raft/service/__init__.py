"""The replicated log as a service.

settings    [leader] of agent.toml
proposals   a command on its way to the leader and its result on the way back
voters      the leader's decision about a change of voters
changes     a change of voters on its way to the leader
writer      the disk: group commit, a full disk
consensus   timers, messages, the state that is applied
"""

from agent.raft.service.consensus import Consensus
from agent.raft.service.settings import LeaderSettings

__all__ = ["Consensus", "LeaderSettings"]

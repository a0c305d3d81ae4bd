"""The replicated log as a service.

settings    [leader] of agent.toml
proposals   a command on its way to the leader and its result on the way back
forwarding  commands of one turn of the loop, as one message to the leader
reads       reads that decide: current once a majority has confirmed who leads
voters      the leader's decision about a change of voters
changes     a change of voters on its way to the leader
writer      the disk: group commit, a full disk
applied     the state that committed commands make; when a snapshot is due
consensus   timers, messages, who leads
"""

from agent.raft.service.consensus import Consensus
from agent.raft.service.settings import LeaderSettings

__all__ = ["Consensus", "LeaderSettings"]

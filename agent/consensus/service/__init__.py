"""The replicated log as a service.

settings    [leader] of agent.toml
proposals   a command on its way to the leader and its result on the way back
consensus   timers, messages, group commit, the state that is applied
"""

from agent.consensus.service.consensus import Consensus
from agent.consensus.service.settings import LeaderSettings

__all__ = ["Consensus", "LeaderSettings"]

"""The plugin's section of agent.toml."""

import msgspec


class InterleaveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `interleave`: all have defaults."""

    turns: bool = True
    """Whether jobs that ask for it (`agentctl submit --share-host`) take turns on this host. False: they run beside one
    another as other jobs do."""

"""The plugin's section of agent.toml."""

import msgspec

from plugins.interleave.policy.rules import REVIEW_S


class InterleaveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `interleave`: all have defaults."""

    turns: bool = True
    """Whether jobs that ask for it (`agentctl submit --share-host`) take turns on this host. False: they run beside one
    another as other jobs do."""
    regroup: bool = True
    """Whether this host asks for other groups of such jobs where it is the one to do so. False: jobs stay where they
    were placed, unless another host asks."""
    review_s: float = REVIEW_S
    """Seconds between two looks at all groups; a job that comes or ends is looked at within seconds. Default: as in
    simulations (`policy/rules.py`)."""

    def __post_init__(self) -> None:
        if not 10.0 <= self.review_s <= 86_400.0:
            raise ValueError(f"review_s = {self.review_s:g}: give 10 to 86400 seconds")

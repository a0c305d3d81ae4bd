"""Messages about groups (Harmony §4.3): profiles go to the coordinator of a group, plans come from it, turns are
local.

A plan names the epoch of each group that it replaces; a host takes it only when it is still in that epoch, so of two
plans made at the same time one fails and its maker looks again.
"""

from typing import Annotated, Literal

from msgspec import Meta

from covey.core.events import Message
from covey.core.ids import ID_PATTERN, HostId, JobId

Need = Literal["comp", "comm"]
"""Resource that a subtask uses: COMP the processors, COMM (a pull or a push) the network."""

Name = Annotated[str, Meta(pattern=ID_PATTERN)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Epoch = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class SubtaskTimed(Message, frozen=True):
    """A host ran one subtask of a job while the group had `hosts` hosts."""

    job: Name
    need: Need
    took_s: Seconds
    hosts: Annotated[int, Meta(ge=1, le=1 << 20)]


class ProposeGroup(Message, frozen=True):
    """Coordinator -> hosts: these jobs share these hosts from now on, if you are still in epoch `replaces`."""

    group: Epoch
    replaces: Epoch
    jobs: Annotated[tuple[JobId, ...], Meta(max_length=4096)]
    """Jobs in the order in which their subtasks take turns, the same on every host."""
    hosts: Annotated[tuple[HostId, ...], Meta(max_length=1 << 16)]


class GroupAnswered(Message, frozen=True):
    """Host -> coordinator: the plan is taken, or why it is not."""

    group: Epoch
    refused: Annotated[str, Meta(max_length=300)] = ""


Messages = SubtaskTimed | ProposeGroup | GroupAnswered

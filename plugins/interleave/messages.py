"""Messages about jobs that share hosts (Harmony §4.3): what hosts measured of a job goes to its coordinator, and from
there, as its profile, to those who may have to decide about the pool.

    host of some ranks --StepsMeasured--> the job's coordinator --ProfilesTold--> coordinators of jobs of the same pool,
                                                             the lowest live host of the pool, hosts of the same group

Nothing here changes anything: who wants another arrangement asks the log for it (`plugins.facts.ArrangementsWanted`).
All of it is sent again and again, so a lost message is none.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from covey.core.events import Message
from covey.core.ids import ID_PATTERN

Name = Annotated[str, Meta(pattern=ID_PATTERN)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=(1 << 53))]
JOBS_MAX = 64
"""Profiles in one message."""


class StepsMeasured(Message, frozen=True):
    """Host -> the job's coordinator: how long the parts of a mini-batch take here, as moving averages."""

    job: Name
    epoch: Count
    config: Count
    """The configuration in which it was measured (`plugins.facts.JobPlaced.config`)."""
    step: Count
    """The newest mini-batch that a process here finished."""
    timings: Count
    """Mini-batches that were measured in this configuration."""
    comp_s: Seconds
    """Seconds in which the job computes here, the processor time of its sums included."""
    comm_s: Seconds
    """Seconds in which it communicates, or waits for others."""
    sent_s: Seconds
    """Seconds in which it sends, in turns (COMM); 0 where it takes no turns."""
    step_s: Seconds
    """Seconds from one mini-batch to the next, waits included."""


class ProfileTold(msgspec.Struct, frozen=True):
    """One job, as its coordinator knows it. Of two of one epoch, that of the later configuration is
    newer, then that of the later step."""

    job: Name
    epoch: Count
    config: Count
    step: Count
    timings: Count
    work_s: Seconds
    """Host-seconds of computing in one mini-batch (`policy/model.JobProfile`)."""
    net_s: Seconds
    """Seconds of communication in one mini-batch."""
    step_s: Seconds
    """Seconds from one mini-batch to the next, as measured."""


class ProfilesTold(Message, frozen=True):
    """A coordinator -> those who may have to decide about the pool."""

    profiles: Annotated[tuple[ProfileTold, ...], Meta(max_length=JOBS_MAX)]


Messages = StepsMeasured | ProfilesTold

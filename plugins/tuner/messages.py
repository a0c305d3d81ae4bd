"""Messages between the hosts of a tuned job: what each measured, and what the tuner knows (Cruise §3.3).

The job's coordinator decides; every host of the job tells it every few seconds what its processes and its card took.
What is to change goes through the scheduler's log (`plugins.facts.ArrangementsWanted`), and needs no messages here.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from covey.core.events import Message
from covey.core.ids import ID_PATTERN
from plugins.views import TunedJobView

Name = Annotated[str, Meta(pattern=ID_PATTERN)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=(1 << 53))]


class HostTimed(Message, frozen=True):
    """Host -> coordinator: what its processes of the job and its card did in the last seconds."""

    job: Name
    epoch: Count
    config: Count
    """The number of the configuration in which all of this was measured."""
    steps: Count
    """Steps that each of its processes did; 0: it has none, or they did none."""
    step_s: Seconds = 0.0
    pass_s: Seconds = 0.0
    """Seconds that its slowest process computed for one of its ranks in a step."""
    communicate_s: Seconds = 0.0
    """Seconds of a step in which the process that waited least waited for tensors."""
    card_bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    """The most that its card carried in one direction within a twentieth of a second; 0: not known."""


class TunedHere(Message, frozen=True):
    """Question to the coordinator: what does the tuner of this job know?"""

    job: Name


class TunedNow(Message, frozen=True):
    """Answer: this; None: no tuner of the job runs here."""

    view: TunedJobView | None


Any = HostTimed | TunedHere | TunedNow


class TunerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[tuner]` in agent.toml. No job is tuned before somebody asks for it (`agentctl tune JOB`)."""

    gain: Annotated[float, Meta(ge=0.01, le=1)] = 0.05
    """Share of a step that a change must save (Cruise §3.3.1: 5 %)."""
    report_s: Annotated[float, Meta(ge=1, le=60)] = 2.0
    """Seconds between two reports of a host to the coordinator of a tuned job; ours."""

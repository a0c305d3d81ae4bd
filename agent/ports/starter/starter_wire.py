"""Messages between the agent and the starter of its host: frames (`covey.wire.frames`) on a unix socket.

    agent -> starter   AskStarter                          StarterHere
    agent -> starter   GiveConfig, GiveConfig, StartAs     StartedAs
    agent -> starter   LimitAs                             StarterDone
    agent -> starter   EndAs                               StarterDone
    agent -> starter   ForgetFolder                        StarterDone; or StarterRefused to any of them

The parts of a program's configuration come before the verb: it has the environment of the job's ranks.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from covey.core.ids import ID_PATTERN
from covey.ports.starter import EpochLimits

CONFIG_BYTES_MAX = 8 << 20
"""Most bytes of a program's configuration."""
PART_BYTES = 512 << 10
USER = r"^[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,255}\Z"
Job = Annotated[str, Meta(pattern=ID_PATTERN, max_length=63)]
Epoch = Annotated[int, Meta(ge=0, lt=10**18)]
Text = Annotated[str, Meta(max_length=400)]


class StarterFrame(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One message; the tag is the class name."""


class AskStarter(StarterFrame, frozen=True):
    """Is anybody there?"""


class GiveConfig(StarterFrame, frozen=True):
    """The next part of what the program reads from its standard input. No answer."""

    part: Annotated[bytes, Meta(max_length=PART_BYTES)]


class StartAs(StarterFrame, frozen=True):
    """Start a program as this user, in the folder of this job."""

    job: Job
    epoch: Epoch
    program: Literal["supervisor", "spares", "beside"]
    user: Annotated[str, Meta(pattern=USER)]
    uid: Annotated[int, Meta(ge=0, lt=(1 << 32) - 1)]
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    """Most memory, as agents that know no `limits` say it; 0: no limit, or `limits` says it."""
    limits: EpochLimits = EpochLimits()
    seconds: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    """Seconds after which all processes of the epoch are killed, whatever runs then; 0: never."""
    private_tmp: bool = False
    """Whether the program has a /tmp of its own."""


class LimitAs(StarterFrame, frozen=True):
    """Give this epoch, which runs, other limits."""

    job: Job
    epoch: Epoch
    limits: EpochLimits


class EndAs(StarterFrame, frozen=True):
    """End all processes of this epoch."""

    job: Job
    epoch: Epoch


class ForgetFolder(StarterFrame, frozen=True):
    """Remove the folder of this job."""

    job: Job


class StarterHere(StarterFrame, frozen=True):
    """The starter answers, and has counted what it did."""

    enforces: bool
    """Whether each epoch has a control group of its own, with limits."""
    lacks: tuple[str, ...] = ()
    """What the kernel does not limit on this host though it is told to: `memory`, `cpu` or `pids`."""
    counted: dict[str, int] = {}


class StartedAs(StarterFrame, frozen=True):
    pid: int
    started: int
    """Start time in clock ticks since boot, as in `covey.ports.processes.ProcessId`."""


class StarterDone(StarterFrame, frozen=True):
    """What was asked for is done."""


class StarterRefused(StarterFrame, frozen=True):
    why: Text
    next: Text


Question = AskStarter | StartAs | LimitAs | EndAs | ForgetFolder
to_starter: msgspec.msgpack.Decoder[GiveConfig | Question] = msgspec.msgpack.Decoder(GiveConfig | Question)
Answer = StarterHere | StartedAs | StarterDone | StarterRefused
from_starter: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
SOCKET = "starter.sock"
"""Name of the starter's socket, in its folder."""
JOBS = "jobs"
"""Folder of the jobs' folders, in the starter's."""
FOLDER = "/var/lib/covey-jobs"
"""The starter's folder, unless it is told another."""

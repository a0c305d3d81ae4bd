"""How far the guaranteed job of a GPU is known, and so how the others beside it are controlled.

    Unwatched --> Settling --> Steady        Surging, Stuck: from Settling and Steady, and back

The ladder exists from the first steady mini-batches on, and is kept through a surge and while the job is stuck.
"""

from typing import Literal, assert_never

import msgspec

from covey.core.transitions import StateTable
from plugins.sharing.machine.ladder import Ladder, Phase


class Unwatched(msgspec.Struct, frozen=True):
    """No guaranteed job runs: there is none, it waits for memory, or the device is lost."""

    ladder = None


class Settling(msgspec.Struct, frozen=True):
    """The guaranteed job runs, but not steadily yet: the others are stopped."""

    ladder = None


class Steady(msgspec.Struct, frozen=True):
    """The ladder controls the others by the guaranteed job's mini-batches."""

    ladder: Ladder


class Surging(msgspec.Struct, frozen=True):
    """The guaranteed job lacks memory: the others are stopped and give way (AntMan §3.3, figure 7a)."""

    ladder: Ladder | None


class Stuck(msgspec.Struct, frozen=True):
    """The device is busy and no mini-batch ends: its feedback means nothing, the others run at a fixed rate."""

    ladder: Ladder | None
    surging: bool
    """Whether it lacked memory before."""


Control = Unwatched | Settling | Steady | Surging | Stuck
LEFT = "the job ended or is opportunistic from now on, or the device is lost"
SILENT = "the device is busy and no mini-batch ends"
LACKS = "it spills, or fails to allocate"
TRANSITIONS: StateTable[Control] = StateTable(
    "control beside a guaranteed job",
    {
        Unwatched: {Settling: "a guaranteed job runs: it started, was found, or was upgraded"},
        Settling: {
            Steady: "its mini-batches take equally long, or it is taken as it is after a while",
            Surging: LACKS,
            Stuck: SILENT,
            Unwatched: LEFT,
        },
        Steady: {Surging: LACKS, Stuck: SILENT, Unwatched: LEFT},
        Surging: {
            Settling: "it has its memory, or there is no more; it never ran steadily",
            Steady: "it has its memory, or there is no more; it is compared with itself alone anew",
            Stuck: SILENT,
            Unwatched: LEFT,
        },
        Stuck: {
            Settling: "it finishes mini-batches again, and never ran steadily",
            Steady: "it finishes mini-batches again",
            Surging: "it finishes mini-batches again, and lacked memory before",
            Unwatched: LEFT,
        },
    },
)


def word(control: Control) -> Literal["init", "surge", "stuck"] | Phase:
    """The control in one word, for people."""
    match control:
        case Stuck():
            return "stuck"
        case Surging():
            return "surge"
        case Steady():
            return control.ladder.phase
        case Unwatched() | Settling():
            return "init"
        case _:
            assert_never(control)


def without_trouble(ladder: Ladder | None) -> Settling | Steady:
    return Settling() if ladder is None else Steady(ladder)


def unstuck(control: Stuck) -> Settling | Steady | Surging:
    return Surging(control.ladder) if control.surging else without_trouble(control.ladder)

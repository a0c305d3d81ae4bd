"""The frames at the socket of a job's spares (`agent/jobs/spares/spares.py`), and which command a spare can become."""

from collections.abc import Mapping

import msgspec

from covey.core.ids import JobId
from covey.ports.addresses import Address
from covey.ports.processes import Command

SPARES_MAX = 64
"""The most spares of one job on one host."""
OF_ONE_RANK = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "PET_NODE_RANK"),
        *("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "PET_NPROC_PER_NODE"),
        *("MASTER_ADDR", "MASTER_PORT", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"),
        *("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"),
    )
)
"""Variables that a program reads when it begins its work, not when a module is imported. All COVEY_* are read so
too."""
KNOWN_EARLIER = ("COVEY_JOB_ID", "COVEY_EPOCH", "COVEY_TOKEN")
"""COVEY_* variables that a spare has all the same: by them it is found and ended with the ranks of its epoch."""


class SparesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The spares that a host keeps of one job and epoch."""

    job: JobId
    epoch: int
    command: Command
    """The command of any of the epoch's ranks; what all have in common a spare has too."""
    modules: tuple[str, ...]
    """The modules that a spare imports."""
    socket: Address
    agent_uid: int = -1
    """The agent's user, where the keeper runs as another; -1: they run as the same."""


class SpareFrame(msgspec.Struct, frozen=True, tag=True):
    """A frame on the socket of a job's spares."""


class KeepSpares(SpareFrame, frozen=True):
    """Agent -> keeper: `count` spares are to wait. 0: none any more, and the keeper ends."""

    count: int


class SparesStatus(SpareFrame, frozen=True):
    """Keeper -> agent, whenever it changes: how many spares wait."""

    warm: int
    why: str = ""
    """Why there are no spares, or fewer, for good."""


class TakeSpare(SpareFrame, frozen=True):
    """Supervisor -> keeper: a spare is to become this command, which is not started otherwise before the answer."""

    command: Command


class SpareTaken(SpareFrame, frozen=True):
    """Keeper -> supervisor: a spare has become the command. `Processes.resume` finds it."""


class NoSpare(SpareFrame, frozen=True):
    """Keeper -> supervisor: no spare has become the command, or will."""

    why: str


Frame = KeepSpares | SparesStatus | TakeSpare | SpareTaken | NoSpare
decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def common(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank's environment that all ranks of its job share."""
    return {name: value for name, value in env.items() if name in KNOWN_EARLIER or not _is_of_one_rank(name)}


def _is_of_one_rank(name: str) -> bool:
    return name in OF_ONE_RANK or name.startswith("COVEY_")


def unlike(kept: Command, wanted: Command) -> str:
    """Why a spare of `kept` cannot become `wanted`; empty: it can. What modules may have read when they were imported
    must be the same."""
    if (kept.argv, kept.cwd) != (wanted.argv, wanted.cwd):
        return "another program, or another directory"
    before, now = common(kept.env), common(wanted.env)
    differ = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return f"it began with another {', '.join(differ[:4])}" if differ else ""

"""Record of a job that an aggregator sums; kept on disk."""

import msgspec

from covey.core.ids import HostId, JobId
from plugins.aggregator.messages import Demand


class ServedJob(msgspec.Struct, frozen=True):
    """One job summed by this host."""

    job: JobId
    epoch: int
    workers: int
    secret: bytes
    coordinator: HostId
    """Host that offered the job, or took over its coordination; it is told when the job is dropped, or has to leave."""
    demand: Demand | None = None
    """Demand that was promised to it; None: on trial, or no host had room for it and one must sum it."""
    order: int = 0
    """Order of assignment: of two jobs the one with the higher number was assigned later."""
    refused: str = ""
    """The last refusal that its coordinator heard before it came here, for people."""
    stays: bool = False
    """It is here for the sake of its hosts' cards (`GangPlaced.stays`)."""
    size_bytes: int = 0
    """Bytes of its tensors, as its coordinator knew when it offered it."""
    unpromised: bool = False
    """No host had room for what it needs."""
    not_direct: str = ""
    """Why no rank of the job sums it instead, for people."""

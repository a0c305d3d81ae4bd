"""What an aggregator knows of a job that it sums; kept on disk."""

import msgspec

from covey.core.ids import HostId, JobId
from plugins.aggregator.messages import Demand


class ServedJob(msgspec.Struct, frozen=True):
    """One job summed here."""

    job: JobId
    epoch: int
    workers: int
    secret: bytes
    coordinator: HostId
    """Who offered it, or took over from that one; it is told when the job is dropped, or has to leave."""
    demand: Demand | None = None
    """What was promised to it; None: on trial, or nobody had room for it and somebody must sum it."""
    order: int = 0
    """Order of assignment: of two jobs the one with the higher number was assigned later."""
    refused: str = ""
    """The last refusal that its coordinator heard before it came here, for people."""
    stays: bool = False
    """It is here for the sake of its hosts' cards (`GangPlaced.stays`)."""
    size_bytes: int = 0
    """Bytes of its tensors, as its coordinator knew when it offered it."""
    unpromised: bool = False
    """Nobody had room for what it needs."""

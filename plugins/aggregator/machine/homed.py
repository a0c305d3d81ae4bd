"""One job as its home knows it; only `Home` changes it."""

from typing import Literal

from covey.core import HostId, JobId
from plugins.aggregator.machine.events import Placed
from plugins.aggregator.machine.gauge import Gauge
from plugins.aggregator.messages import Assigned

State = Literal["away", "surveying", "offering", "assigned", "nobody"]


class Homed:
    def __init__(self, placed: Placed, gauge: Gauge) -> None:
        self.placed, self.gauge = placed, gauge
        self.state: State = "away"
        self.epoch = 0
        """Highest epoch seen or used."""
        self.assigned: Assigned | None = None
        self.asked: list[HostId] = []
        """Hosts of the survey that have not answered."""
        self.offered_to: HostId | None = None
        self.secret = b""
        self.moving = False
        """An owner that can go on is there while another one is looked for."""
        self.wanted: HostId | None = None
        """The only host to offer it to: it holds room."""
        self.promised = True
        """The present offer, or the present owner, is with what the job needs."""
        self.quiet = False
        """Only to aggregators with little to do: it hurt, or was hurt."""
        self.again_s = 0.0
        """When to look for room again, if not promised."""
        self.refused = ""
        """The last refusal, for people."""
        self.seen = (0, 0)
        """Bytes of its largest tensor, and of all, as told to other rooms."""
        self.declined: dict[HostId, str] = {}
        self.avoid: HostId | None = None
        self.complaints: tuple[float, float] | None = None
        """First and last of the present series, seconds."""
        self.checking = False
        self.superseded: dict[HostId, int] = {}
        """Former owners that may not know it yet -> their epoch."""

    @property
    def job(self) -> JobId:
        return self.placed.job

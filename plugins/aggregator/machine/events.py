"""Events that several machines of this plugin hear, and actions that several ask for."""

import msgspec

from covey.core.ids import HostId, JobId
from plugins.aggregator.messages import Assigned, Question
from plugins.aggregator.policy import Candidate
from plugins.facts import Place


class GangPlaced(msgspec.Struct, frozen=True):
    """The replicated log says where the gang of this grant runs."""

    job: JobId
    grant: int
    world_size: int
    places: tuple[Place, ...]
    prefers: HostId | None = None
    """Host that is preferred when hosts are equally good for the job; None: none is."""
    stays: bool = False
    """The preferred host must sum it, however busy: this is one of several tables of a job, which share its hosts'
    cards among them."""
    direct: bool = False
    """A rank of the job is to own it where one can, best one on the preferred host."""
    said_since: int = 0
    """The configuration of the job that said the preferred host, for which people's earlier wishes are over; 0: nobody
    said one."""
    config: int = 0
    """The job's configuration in the log (`JobPlaced.config`): it grows with each change of its places, whatever
    becomes of them."""


class Unplaced(msgspec.Struct, frozen=True):
    """The gang of this grant is over; `ended`: the job will not run again."""

    job: JobId
    grant: int
    ended: bool


class RackUpdated(msgspec.Struct, frozen=True):
    """The rack by gossip, once a second and whenever a host comes or goes."""

    gone: frozenset[HostId]
    candidates: tuple[Candidate, ...]
    drained: bool = False
    """This host is drained: no new job is to be summed here, and those that are go elsewhere."""


class QuestionAnswered(msgspec.Struct, frozen=True):
    """An answer to a question of this host; None: no answer in time, or none that could be understood."""

    host: HostId
    question: Question
    answer: msgspec.Struct | None


class AskQuestion(msgspec.Struct, frozen=True):
    """Action: ask `to` a question and hand back `QuestionAnswered`."""

    to: HostId
    question: Question
    deadline_s: float


class Keep(msgspec.Struct, frozen=True):
    """Action: write what this plugin knows to disk."""


class TellRanks(msgspec.Struct, frozen=True):
    """Action: tell the joined ranks of this run on this host their assignment."""

    assigned: Assigned

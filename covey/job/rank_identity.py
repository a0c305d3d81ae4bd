"""Which rank of which job this process is, read from its environment."""

import sys
from collections.abc import Mapping
from socket import AF_UNIX, SOCK_STREAM
from socket import socket as Connection
from typing import NamedTuple

from covey.core.errors import CoveyError
from covey.core.ids import HostId, JobId
from covey.tensors.numbers.blocks import TABLES_MAX

CONNECT_S = 2.0


class RankIdentity(NamedTuple):
    job: JobId
    rank: int
    world_size: int
    epoch: int
    host: HostId
    here: range
    """The range of ranks on this host, from the lowest to the highest; ranks between them may be on other hosts."""
    incarnation: int
    """How many processes of this rank were lost before this one."""
    tables: int
    """Number of tables of the job's tensors, by the hosts of its start (`covey.tensors.numbers.blocks`): the same on
    each of its ranks."""
    elastic: bool
    """Whether this process may carry several ranks, of which `rank` is the first (`covey.job.carrying`)."""
    host_memory: int
    """Memory that the job's processes on this host may take together, bytes; 0: not limited."""
    processes: int
    """The number of the job's processes that began on this host together."""
    token: str
    socket: str
    preempt_file: str

    def connected(self) -> Connection:
        """A connection to the agent of this process, which does not block. OSError when it is away."""
        connection = Connection(AF_UNIX, SOCK_STREAM)
        try:
            connection.settimeout(CONNECT_S)
            connection.connect(self.socket)
        except OSError:
            connection.close()
            raise
        connection.setblocking(False)
        return connection


def identity(environ: Mapping[str, str]) -> RankIdentity:
    """The identity that this environment gives. CoveyError when this process is not a rank of a job."""
    path = environ.get("COVEY_SOCKET")
    if not path:
        what, why = "this process is not part of a Covey job", "COVEY_SOCKET is not set in its environment"
        raise CoveyError(what, why, f"agentctl submit --workers 1 -- python {sys.argv[0] or 'train.py'}")
    try:
        rank = int(environ["COVEY_RANK"])
        here = [int(each) for each in environ.get("COVEY_RANKS_HERE", str(rank)).split(",")]
        return RankIdentity(
            JobId(environ["COVEY_JOB_ID"]),
            rank,
            int(environ["COVEY_WORLD_SIZE"]),
            int(environ["COVEY_EPOCH"]),
            HostId(environ.get("COVEY_HOST", "")),
            range(min(here), max(here) + 1),
            int(environ.get("COVEY_INCARNATION", "0")),
            _tables(environ["COVEY_TABLES"]),
            environ.get("COVEY_ELASTIC", "") == "1",
            int(environ.get("COVEY_HOST_MEMORY", "0")),
            len(here),
            environ["COVEY_TOKEN"],
            path,
            environ.get("COVEY_PREEMPT_FILE", ""),
        )
    except (KeyError, ValueError) as error:
        what = "this process is not a whole part of a Covey job"
        why = f"COVEY_SOCKET is set, but {error} is missing or no such number"
        raise CoveyError(what, why, "start it with agentctl submit, and keep its environment") from error


class RefusedByAgent(OSError):
    """The agent refused this process; joining again at once would not help."""


def _tables(said: str) -> int:
    """The number of tables. ValueError when no job has so many."""
    if not 1 <= int(said) <= TABLES_MAX:
        raise ValueError(f"COVEY_TABLES, which is {said},")
    return int(said)

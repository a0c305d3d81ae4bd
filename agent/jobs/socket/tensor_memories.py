"""Memory in which the ranks of a job on this host exchange tensors: all of the job's, or those that are here, which add
up what they have before it goes to an aggregator. Which was given which:

    all of them joined, each can   -> memory is made, each is given it
    one cannot, now or later       -> each is told: whatever it has not shared yet goes to an aggregator
    this agent began anew          -> ranks that have it keep it; if one has and another has not, each is told

The agent needs the memory for nothing but to hand it on: ranks that have it work on without an agent.
"""

from collections.abc import Callable, Mapping, Sequence

from agent.jobs.socket.connected import ConnectedProcess
from covey.core.ids import JobId
from covey.ports.pages import Pages, SharedPage
from covey.tensors.same_host.layout import RANKS_MAX
from covey.wire.job import NoTensorMemory, TensorMemoryHere
from plugins.base import RanksSpec

RESTARTED = "the agent was restarted before every rank had the memory"


class TensorMemories:
    """The memories in which ranks of all jobs here exchange tensors."""

    def __init__(self, pages: Pages, say: Callable[[JobId, str], None]) -> None:
        """`say` is told why a job shares none."""
        self._pages, self._say = pages, say
        self._made: dict[tuple[JobId, int], SharedPage] = {}
        self._refused: dict[tuple[JobId, int], str] = {}

    @staticmethod
    def follows(spec: RanksSpec | None) -> bool:
        """Whether the job's ranks here are all there are, or several in a row: `Joined.tensor_memory`. Not those of an
        elastic job: which of them are here changes."""
        if spec is None or not 0 < len(spec.ranks) <= RANKS_MAX or spec.carried:
            return False
        ranks = [rank.rank for rank in spec.ranks]
        in_a_row = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
        return in_a_row and (len(ranks) > 1 or spec.world_size == 1)

    def joined(self, job: JobId, epoch: int, ranks: int, peers: Sequence[ConnectedProcess]) -> None:
        """Give the memory to a job's processes once all ranks have joined. `ranks`: how many of the job are here.
        `peers`: all processes of this epoch now, one more than before."""
        key, best = (job, epoch), dict.fromkeys(sorted(peer.rank for peer in peers), 0)
        for peer in peers:
            best[peer.rank] = max(best[peer.rank], peer.tensor_memory)
        if len(best) < ranks:
            return
        if why := self._refused.get(key) or self._why_not(key, best, peers):
            self.refuse(job, epoch, why, peers)
            return
        for peer in peers if key in self._made else ():
            if peer.tensor_memory == 1:
                peer.tensor_memory = 2
                peer.put(TensorMemoryHere(), (self._made[key],))

    def refuse(self, job: JobId, epoch: int, why: str, peers: Sequence[ConnectedProcess]) -> None:
        """Share no more than is shared already, and tell each process so once."""
        if (job, epoch) not in self._refused:
            self._say(job, why)
            self._refused[job, epoch] = why
        for peer in peers:
            if peer.tensor_memory and not peer.told_no_memory:
                peer.told_no_memory = True
                peer.send(NoTensorMemory(why))

    def gone(self, job: JobId, epoch: int, peers: Sequence[ConnectedProcess]) -> None:
        """Close the memory once no process is left. `peers`: those that are left."""
        if not peers:
            self._refused.pop((job, epoch), None)
            if (page := self._made.pop((job, epoch), None)) is not None:
                page.close()

    def _why_not(self, key: tuple[JobId, int], best: Mapping[int, int], peers: Sequence[ConnectedProcess]) -> str:
        """Why the ranks share no memory; empty: they do. `best`: for each rank, what one of its processes can. Memory
        is made if no process has any."""
        cannot = [rank for rank, can in best.items() if not can]
        if cannot:
            return f"rank {cannot[0]} cannot share memory, or COVEY_SHARED_TENSORS forbids it"
        if key in self._made or all(peer.tensor_memory != 1 for peer in peers):
            return ""
        if max(best.values()) == 2:
            return RESTARTED
        try:
            self._made[key] = self._pages.make_memory(len(best), min(best))
        except OSError as error:
            return f"the kernel has no memory to share: {error}"
        return ""

"""What this host says of processes that stay while others of their elastic job are to end: that one of them has the
job's state now. Before some host has said so none ends (`plugins.scheduler.machine.log.jobs.SureStart`)."""

from covey.core.errors import NoLeader, OutcomeUnknown
from covey.core.ids import JobId
from plugins.base import Host, RanksSpec
from plugins.facts import Place
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import Attained, StateStays
from plugins.scheduler.service.log import QueueLog


class SureOfState:
    def __init__(self, host: Host, log: QueueLog) -> None:
        self.host, self.log = host, log
        self._saying: dict[JobId, None] = {}
        """Jobs of which the log is being told."""

    def look(self, job: Job) -> None:
        """Tell the log if a process here has the job's state, and stays. `job`: as a log has it that is current, so
        what is seen here now is newer than the change that waits for it."""
        runner, place = self.host.runner, job.place_on(self.host.id)
        known = runner.spec(job.id, job.grant.epoch)
        if place is None or known is None or job.healing.sure is None or job.id in self._saying:
            return
        have = runner.have_state(job.id, job.grant.epoch)
        if not staying(known, place, job.spec.gpus_per_worker).isdisjoint(have):
            self._saying[job.id] = None
            says = StateStays(job.grant.epoch, job.healing.healed)
            self.host.env.spawn(f"{job.id} has its state here", self._say(job.id, says))

    async def _say(self, job: JobId, says: StateStays) -> None:
        """Say it once: where that fails, the next look says it again."""
        try:
            await self.log.propose(Attained(wall_s=0.0, host=self.host.id, service_gpu_s={}, stays={job: says}))
        except (NoLeader, OutcomeUnknown):
            return
        finally:
            del self._saying[job]


def staying(known: RanksSpec, place: Place, gpus_per_worker: int) -> set[int]:
    """Processes that run here and are in this place too, on the same GPUs. Where two changes wait, one that begins with
    the second may have the name of one that ends with the first."""
    each, devices = gpus_per_worker, place.devices
    now = {process: devices[at * each : (at + 1) * each] for at, process in enumerate(place.ranks)}
    return {rank.rank for rank in known.ranks if now.get(rank.rank) == rank.gpus}

"""Whether ranks failed because a peer was cut off: the others of its gang then end with an error like any other (NCCL,
Gloo).

So a host whose ranks failed asks the other hosts of their gang whether they are there, before it reports. A host that
answers costs no time; one that does not is named in the report, and the log counts that end as a lost host, not as a
failure. It is this host's own view that counts, not the leader's: its ranks failed over the way between these two.
"""

import asyncio

from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from plugins.base import Host
from plugins.facts import RanksEnded
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import UNREACHABLE_MAX
from plugins.scheduler.messages.wire import JobNow
from plugins.scheduler.policy import explain

ANSWER_S = 2.0
"""Seconds that each host may take to answer, all asked at once."""


async def unreachable(host: Host, job: Job | None, ended: RanksEnded) -> tuple[HostId, ...]:
    """Other hosts of the gang that do not answer now, when ranks here have failed by themselves. A host that says it is
    away for a moment is not among them: only its agent restarts, and the ranks there keep running."""
    failure = explain.first_failure(ended.codes)
    if job is None or job.grant.epoch != ended.epoch or job.ending.after is not None:
        return ()
    if failure is None or failure[1] == explain.EXIT_AGAIN or ended.lost or ended.reason:
        return ()
    state = {view.host: view.state for view in host.hosts()}
    others = [at.host for at in job.awaited if at.host != host.id and state.get(at.host) != "away"]
    others = sorted(others, key=lambda other: state.get(other) == "alive")[:UNREACHABLE_MAX]
    answered = await asyncio.gather(*(_answers(host, other, job.id) for other in others))
    return tuple(other for other, does in zip(others, answered, strict=True) if not does)


async def _answers(host: Host, other: HostId, job: JobId) -> bool:
    try:
        await host.ask("scheduler", other, JobNow(job), ANSWER_S)
    except TimeoutError:
        return False
    except Refused:
        return True
    return True

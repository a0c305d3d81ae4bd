"""What a host does while it leads: it decides, proposes, and confirms the leases of every host's ranks.

Before the first of these its copy of the log must hold all that was decided under earlier leaders, and the log must
know that nothing more is decided under them (`Leads`).

Which reads decide. A lease of ranks does: it is given on the word of this host alone, so a majority confirms first that
it leads (`ReplicatedLog.be_current`). Nothing else that is done after a look at a copy of the log relies on who leads:
decisions are commands, which the log refuses under an earlier `Leads`; ranks start under such a lease, or, where they
are to be kept, on GPUs that the host itself holds for them; and lists for people say how old they are.
"""

import asyncio

from covey.core.errors import NoLeader, OutcomeUnknown
from covey.core.metrics import Tally
from plugins.base import Host
from plugins.scheduler.machine.leader.leader import Leader, ScheduleTick
from plugins.scheduler.machine.leader.leases import LeaseAsked
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.messages.commands import Applied, Leads
from plugins.scheduler.messages.wire import LeasesRenewed, RenewLeases
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.service import metrics, views
from plugins.scheduler.service.log import QueueLog

CONFIRM_S = 1.5
"""The most seconds for which a leader asks a majority whether it still leads before it confirms a host's ranks."""
KNOW_S = 5.0
"""Seconds for which a new leader tries to learn everything before it begins anew."""
LOOK_S = 1.0
"""The most seconds between two looks."""
SOON_S = 0.05
"""The least seconds between two looks when nothing happens; a host that was just elected looks for its first entry so
often."""


class Leadership:
    def __init__(self, host: Host, queue: JobTable, log: QueueLog, settings: SchedulerSettings) -> None:
        self.host, self.queue, self.log = host, queue, log
        self.leader = Leader(queue, settings, views.sharing_of(settings))
        self.counters = {"grants": 0, "preemptions": 0}
        self.decisions = Tally(metrics.DECISION_SECONDS)
        self.look = asyncio.Event()
        self._led_term = 0
        """The term in which this host leads and knows all that was decided before; 0: none."""

    async def lead_on(self) -> None:
        while True:
            await set_within(self.look, self._pause_s())
            term = self.host.log.term
            if not self.host.log.is_leader:
                self._led_term = 0
                continue
            if self._led_term != term:
                self._led_term = 0
                self.leader.forget()
                if not await self._know_everything(term):
                    continue
                self._led_term = term
            await self._decide()

    def _pause_s(self) -> float:
        if self.host.log.leader != self.host.id:
            return LOOK_S
        if not self._led_term:
            return SOON_S
        return min(LOOK_S, max(SOON_S, self.leader.still_in_s(self.host.env.clock.now_s())))

    async def _know_everything(self, term: int) -> bool:
        """Whether this copy holds all that was decided under earlier leaders, and the log takes no more of it."""
        try:
            async with asyncio.timeout(KNOW_S):
                await self.log.barrier()
                over_s = max(self.queue.leases_over_s, self.leader.terms.over_s)
                pauses_s = self.leader.leases.pauses_over_s
                leads = Leads(wall_s=0.0, term=term, leases_over_s=over_s, pauses_over_s=pauses_s)
                result = await self.log.propose(leads)
        except (TimeoutError, NoLeader, OutcomeUnknown):
            return False
        return isinstance(result, Applied)

    async def _decide(self) -> None:
        env = self.host.env
        now_s = env.clock.now_s()
        hosts = self.host.hosts()
        rack = views.rack_of(hosts, now_s, self.leader.sharing is not None)
        look = ScheduleTick(rack, max(0.0, env.clock.wall_s()), self._led_term, views.speechless(hosts))
        decided = self.leader.handle(look, now_s)
        self.decisions.see(env.clock.now_s() - now_s)
        for action in decided:
            if not self.host.log.is_leader:
                return
            try:
                result = await self.log.propose(action.command)
            except (NoLeader, OutcomeUnknown) as error:
                env.log.debug("a decision did not reach the log", why=str(error))
                return
            name = type(action.command).__name__
            self.counters["grants"] += name == "Granted" and isinstance(result, Applied)
            self.counters["preemptions"] += getattr(action.command, "cause", "") == "preempted"

    async def renew(self, question: RenewLeases) -> LeasesRenewed | None:
        """The leader's answer to a host that asks for leases; None when this host does not lead. A majority confirms
        first that it leads: by its own clock alone a machine that was suspended would give leases beside the next
        leader. A host that is the only voter gives itself leases without end: while its agent is away no host can
        lead."""
        log = self.host.log
        if not self._leads:
            return None
        try:
            await log.be_current(CONFIRM_S)
        except NoLeader:
            return None
        if not self._leads:
            return None
        (given,) = self.leader.leases.handle(LeaseAsked(question.host, question.grants), self.host.env.clock.now_s())
        alone = tuple(log.voters) == (question.host,)
        terms = self.leader.terms
        return LeasesRenewed(
            given.grants, None if alone else terms.lease_s, terms.grace_s, None if alone else terms.pause_s
        )

    @property
    def _leads(self) -> bool:
        """Whether this host leads, by its lease, and knows all that was decided before."""
        return bool(self._led_term) and self._led_term == self.host.log.term and self.host.log.is_leader


async def set_within(event: asyncio.Event, timeout_s: float) -> None:
    """Return when `event` is set, or after the timeout; it is clear then."""
    alarm = asyncio.get_running_loop().call_later(timeout_s, event.set)
    try:
        await event.wait()
    finally:
        alarm.cancel()
    event.clear()

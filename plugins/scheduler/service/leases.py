"""This host's leases: what its ranks may rely on, renewed with the log's leader while they run.

    ranks to start, ranks that run --> RenewLeases --> the leader, or any other host that reaches it
    LeasesRenewed: these, for so long --> runner.renew --> their supervisors

While the log has no leader, no host can grant anything elsewhere either, and the next leader waits for one whole lease.
So ranks that run keep running as long as a majority of voters answers, each for itself, that it knows no leader
(`Leaderless`), and no copy of the log, theirs or this host's, has an entry that ended these ranks, or may have: a host
that was cut off does not know what was decided meanwhile. A host that reaches neither a leader nor that majority cannot
tell whether the voters are dead or it is cut off: its ranks end.

Ranks of a job that is submitted with `--on-lost keep` need no lease. Nothing else starts here without one: a host that
receives the log but cannot make itself heard would otherwise begin what is being taken back.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from plugins.base import Host, RankLease
from plugins.scheduler.machine.leader.leases import over_there
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.messages.commands import Command, MalformedCommand, open_command
from plugins.scheduler.messages.wire import GRANTS_MAX, Leaderless, LeasesRenewed, RenewLeases
from plugins.scheduler.policy.leases import PAUSE_RENEWALS, RENEWALS, Terms
from plugins.scheduler.service.leadership import set_within

ASK_S = 2.0
"""Seconds that the leader may take to answer; a relayed question may take twice as long."""
RELAYS = 3
"""The number of other hosts that are asked when the leader does not answer this one: the way to it may be cut for this
one alone."""
AGAIN_S = 1.0
"""Seconds to wait after a renewal that no host answered."""
Key = tuple[JobId, int]


class HostLeases:
    """The leases of this host's ranks: it asks for them, and tells the runner. `here(question)`: what this host itself
    answers, None when it does not lead."""

    def __init__(
        self,
        host: Host,
        queue: JobTable,
        terms: Terms,
        here: Callable[[RenewLeases], Awaitable[LeasesRenewed | None]],
    ) -> None:
        self.host, self.queue, self.terms, self._here = host, queue, terms, here
        self.leases: dict[Key, RankLease] = {}
        """The newest lease of everything that runs here or is about to."""
        self._wanted: dict[Key, None] = {}
        """Grants that are about to start."""
        self._may_be_lost: set[Key] = set()
        """Grants whose ranks stand still when they are not confirmed within seconds."""
        self.news = asyncio.Event()
        """Set when a grant that was wanted has its lease."""
        self._wake = asyncio.Event()

    def look(self) -> None:
        """Ask again at once where ranks would stand still soon: the leader has changed."""
        if self._may_be_lost:
            self._wake.set()

    def valid(self, key: Key) -> RankLease | None:
        """A lease under which these ranks may start now; None when there is none yet: it is being asked for."""
        self._wanted[key] = None  # also one that has its lease: it is kept until these ranks run
        lease = self.leases.get(key)
        if lease is not None and self.host.env.clock.boot_s() < lease.until_s:
            return lease
        self.leases.pop(key, None)
        self._wake.set()
        return None

    def may_be_lost(self, key: Key) -> None:
        """Note that these ranks here stand still from now on when they are not confirmed in time, and ask for them at
        once."""
        self._may_be_lost.add(key)
        self._wake.set()

    async def keep(self) -> None:
        """Renew leases for as long as the plugin lives."""
        while True:
            await set_within(self._wake, await self._renew())

    async def _renew(self) -> float:
        """Renew once, for everything; returns the seconds until the next time."""
        self._wake.clear()
        wanted, self._wanted = self._wanted, {}
        lacking = [key for key in wanted if key not in self.leases]
        keys = [key for key in dict.fromkeys([*self.host.runner.running(), *wanted]) if self._needs(*key)]
        self.leases = {key: lease for key, lease in self.leases.items() if key in keys}
        self._may_be_lost &= set(keys)
        if not keys:
            return AGAIN_S
        pauses_s = [await self._renew_some(tuple(keys[at : at + GRANTS_MAX])) for at in range(0, len(keys), GRANTS_MAX)]
        if any(key in self.leases for key in lacking):  # and for nothing else, or those who look and ask never rest
            self.news.set()
        return min(pauses_s)

    def _needs(self, id: JobId, epoch: int) -> bool:
        job = self.queue.jobs.get(id)
        return job is None or job.grant.epoch != epoch or job.spec.on_lost != "keep"

    def _came(self, id: JobId, epoch: int) -> bool:
        """Whether the job's ranks here came to it while it ran: they stand still when they are not confirmed in time,
        from their beginning, since others may be started in their place."""
        job = self.queue.jobs.get(id)
        place = None if job is None or job.grant.epoch != epoch else job.place_on(self.host.id)
        return place is not None and place.since > 0

    async def _renew_some(self, keys: tuple[Key, ...]) -> float:
        asked_s, question = self.host.env.clock.boot_s(), RenewLeases(self.host.id, keys)
        hurry = any(key in self._may_be_lost or self._came(*key) for key in keys)
        answer = await self._ask(question, self.terms.pause_s / PAUSE_RENEWALS if hurry else ASK_S)
        if answer is None:
            self._wanted |= dict.fromkeys(keys)
            return AGAIN_S / PAUSE_RENEWALS if hurry else AGAIN_S
        lease = RankLease(asked_s, answer.lease_s, answer.grace_s, answer.pause_s)
        given = {key: lease for key in answer.grants if key in keys}
        self.leases |= given
        await self.host.runner.renew(given)
        if answer.lease_s is None:
            return AGAIN_S
        if answer.pause_s is not None and hurry:
            return min(answer.lease_s / RENEWALS, answer.pause_s / PAUSE_RENEWALS)
        return answer.lease_s / RENEWALS

    async def _ask(self, question: RenewLeases, within_s: float) -> LeasesRenewed | None:
        """The leader's answer, on whichever way, or the former terms while there is no leader; None: neither.
        `within_s`: seconds that the leader may take."""
        own = await self._here(question)
        if own is not None:
            return own
        leader = self.host.log.leader
        if leader is not None and leader != self.host.id:
            answer = await self._ask_one(leader, question, within_s)
            if answer is not None:
                return answer
        relayed, leaderless = await asyncio.gather(
            self._ask_others(question, leader, 2 * within_s), self._while_nobody_leads(question, within_s)
        )
        return relayed or leaderless

    async def _ask_others(self, question: RenewLeases, leader: HostId | None, within_s: float) -> LeasesRenewed | None:
        others = [view.host for view in self.host.hosts() if view.state == "alive"]
        others = [host for host in others if host not in (self.host.id, leader)]
        relays = self.host.env.rng.sample(others, min(RELAYS, len(others)))
        answers = await asyncio.gather(*(self._ask_one(relay, question, within_s) for relay in relays))
        return next((answer for answer in answers if answer is not None), None)

    async def _ask_one(self, to: HostId, question: RenewLeases, deadline_s: float) -> LeasesRenewed | None:
        answer = await self._answer(to, question, deadline_s)
        return answer if isinstance(answer, LeasesRenewed) else None

    async def _answer(self, to: HostId, question: RenewLeases, deadline_s: float) -> msgspec.Struct | None:
        try:
            return await self.host.ask("scheduler", to, question, deadline_s)
        except (TimeoutError, Refused):
            return None

    async def _while_nobody_leads(self, question: RenewLeases, within_s: float) -> LeasesRenewed | None:
        """The former terms for what runs, when a majority of voters knows no leader."""
        voters, me = self.host.log.voters, self.host.id
        direct = msgspec.structs.replace(question, relayed=True)
        answers = await asyncio.gather(*(self._answer(voter, direct, within_s) for voter in voters if voter != me))
        confirmed = next((answer for answer in answers if isinstance(answer, LeasesRenewed)), None)
        if confirmed is not None:
            return confirmed
        leaderless = sum(isinstance(answer, Leaderless) for answer in answers) + knows_no_leader(self.host)
        if leaderless <= len(voters) // 2:
            return None
        running, over = self.host.runner.running(), set(over_here(self.host, self.queue, question))
        over.update(*(answer.over for answer in answers if isinstance(answer, Leaderless)))
        grants = tuple(grant for grant in question.grants if grant in running and grant not in over)
        return LeasesRenewed(grants, self.terms.lease_s, self.terms.grace_s, self.terms.pause_s)


def knows_no_leader(host: Host) -> bool:
    """Whether this host is a voter that no present leader can count in its majority."""
    return host.id in host.log.voters and host.log.leaderless_s > 0


def over_here(host: Host, queue: JobTable, question: RenewLeases) -> tuple[Key, ...]:
    """`over_there` by this host's copy of the log. A command that cannot be read may be about anything."""
    undecided: list[Command] = []
    for data in host.log.undecided() if question.grants else ():
        try:
            undecided.append(open_command(data))
        except MalformedCommand:
            return question.grants
    return over_there(queue.jobs, undecided, question.host, question.grants)


async def relay(host: Host, queue: JobTable, question: RenewLeases) -> msgspec.Struct:
    """Take another host's question to the leader that this host knows. Refused when there is none."""
    what, next = f"{host.id} cannot confirm ranks of {question.host}", "ask the leader (agentctl leader)"
    leader = host.log.leader
    if knows_no_leader(host):
        return Leaderless(over_here(host, queue, question))
    if question.relayed or leader is None or leader == host.id:
        raise Refused(75, what, "it is not the leader", next)
    try:
        return await host.ask("scheduler", leader, msgspec.structs.replace(question, relayed=True), ASK_S)
    except TimeoutError as error:
        raise Refused(75, what, f"the leader {leader} does not answer it", next) from error

"""Users of the rack's hosts, who ask any agent for what is theirs and for what is not.

Ann and bob have a tenant, eve has none, and somebody connects over TCP. Each is who the agent's gate takes them for,
by uid. They submit, look, cancel, scale and read output, of their own jobs and of one another's. No answer shows
anybody what belongs to somebody else, and nothing is done to a job but by its owner.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from chaos.actors.people import Askers
from chaos.askers import ANN, BOB, EVE, VISITOR, asked_by
from chaos.rack_seen import RackSeen
from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.ids import JobId
from plugins.askers import Asker
from plugins.scheduler.machine.log.jobs import OVER

ASKED_S = (0.05, 0.8)
"""Least and most seconds between two questions."""
JOBS_MAX = 8
"""Most jobs that all users submit together."""
LOOKS = ("scheduler.jobs", "agent.rack_volumes", "agent.health", "agent.hosts", "scheduler.tenants", "agent.gpus")
ABOUT = ("scheduler.job", "agent.why", "agent.story")
OWN = (
    *("scheduler.logs", "scheduler.cancel", "scheduler.scale", "scheduler.move", "scheduler.tune", "tuner.show"),
    *("scheduler.hold", "scheduler.release", "scheduler.requeue", "scheduler.priority", "scheduler.update"),
)
OPERATE = (
    ("scheduler.quota_set", {"tenant": "ml", "gpus": 1000}),
    ("scheduler.tenant_set", {"tenant": "ml", "users": ["eve"]}),
    ("scheduler.drain", {"id": "h1"}),
    ("agent.change_voters", {"remove": "h1"}),
)


class UsersAsking(Askers):
    """Users, each of whom may act on their own jobs, and on nobody else's."""

    asked_s = ASKED_S

    def __init__(self, rack: RackSeen, until_s: float) -> None:
        self.owners: dict[JobId, str] = {}
        """Whose the accepted jobs are."""
        self.cancelled: set[tuple[JobId, str]] = set()
        """Jobs whose end was asked for, and by whom."""
        self.answered = 0
        super().__init__(rack, until_s)

    def ask_one(self, name: str) -> None:
        uid = self.rng.choice((ANN.uid, ANN.uid, BOB.uid, BOB.uid, EVE.uid, -1))
        process = self.rack.hosts[name].agent
        assert process is not None
        process.spawn("a user asks", self._asks(name, uid, *self._question(uid)))

    def _question(self, uid: int) -> tuple[str, dict[str, Any]]:
        kind = self.rng.random()
        if kind < 0.15 and self.submitted < JOBS_MAX:
            self.submitted += 1
            user = {ANN.uid: "ann", BOB.uid: "bob"}.get(uid, "none")
            return "scheduler.submit", {
                "argv": ["sleeper", f"{self.rng.uniform(1, 15):.1f}"],
                "name": f"{secret_of(user)}-{self.submitted}",
                "cwd": "/",
                "env": {"KEY": secret_of(user)},
                "gpus_per_worker": self.rng.choice((0, 1)),
                "key": f"users-{self.rack.world.seed}-{self.submitted}",
                **({"tenant": "red"} if self.rng.random() < 0.1 else {}),
            }
        job = {"id": str(self.rng.choice([*self.jobs, JobId("j1"), JobId("j999")]))}
        if kind < 0.35:
            return self.rng.choice(LOOKS), {"all": True}
        if kind < 0.6:
            return self.rng.choice(ABOUT), job
        if kind < 0.95:
            return self.rng.choice(OWN), {**job, "workers": 1, "what": "0", "up": True, "by": "root", "owner": None}
        command, given = self.rng.choice(OPERATE)
        return command, dict(given)

    async def _asks(self, name: str, uid: int, command: str, given: Mapping[str, Any]) -> None:
        agent = self.rack.agents[name]
        asker = VISITOR if uid < 0 else await agent.asker(uid)
        assert asker is not None
        if command not in agent.commands:
            return
        id = JobId(str(given.get("id", "")))
        if command == "scheduler.cancel":
            self.cancelled.add((id, asker.user))
        try:
            answer = await agent.commands[command](asked_by(asker, given))
        except (Refused, NoLeader, OutcomeUnknown):
            self.refused += 1
            return
        self.answered += 1
        self._judge(asker, command, given, answer)

    def _judge(self, asker: Asker, command: str, given: Mapping[str, Any], answer: Any) -> None:
        what = f"{command} of {asker.user or 'a visitor'} with {dict(given)}"
        text = msgspec.json.encode(answer).decode()
        if any(secret_of(user) in text for user in ("ann", "bob") if user != asker.user):
            self.rack.saw_wrong(f"{what} showed what belongs to somebody else")
        if command in OWN and self._owner(JobId(str(given["id"]))) != asker.user:
            self.rack.saw_wrong(f"{what} was answered to somebody else than its owner")
        if command in dict(OPERATE):
            self.rack.saw_wrong(f"{what} was done")
        if command == "scheduler.submit":
            if asker.role != "user" or given.get("tenant") == "red":
                self.rack.saw_wrong(f"{what} was accepted")
            self.owners[answer.id], self.jobs[answer.id] = asker.user, OVER

    def _owner(self, id: JobId) -> str | None:
        """Whose a job is, as the copies of the log say: an agent may have died before it answered its submitter."""
        for name in self.rack.alive():
            scheduler = self.rack.plugin(name, "scheduler")
            if scheduler is not None and (job := scheduler.queue.jobs.get(id)) is not None:
                return job.spec.owner.user if job.spec.owner is not None else ""
        return None

    def check(self) -> None:
        """What the copies of the log say once all is over: each job is its submitter's, and none was cancelled but by
        its owner."""
        for name in self.rack.hosts:
            for job in self.rack.plugin(name, "scheduler").queue.jobs.values():
                user = job.spec.owner.user if job.spec.owner is not None else ""
                assert self.owners.get(job.id, user) == user != "", f"{job.id} is {user}'s on {name}"
                assert job.state != "cancelled" or (job.id, user) in self.cancelled, f"who cancelled {job.id}?"


def secret_of(user: str) -> str:
    """A word that stands in the name and environment of this user's jobs."""
    return f"secret-of-{user}"

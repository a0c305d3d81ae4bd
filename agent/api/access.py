"""Who may do what: one table of all commands, one function that judges, one that says what is shown. All pure.

    the kernel's word -> Asker (`role_of`) -> may it? (`refusal`, by RULES) -> the command -> what is shown (`shown_to`)

An *operator* may do everything: root, the agent's own user, and whom `[access] operators` names. A *user* has a tenant:
submits for it, and has own jobs and volumes. A *viewer* looks; one who was in a tenant before still reads and ends the
own jobs and volumes. A command that is not in `RULES` is refused to everybody, and so is one of whose asker nothing is
known.

Everybody sees every job, since a rack is shared: who, tenant, state, GPUs, place in the queue. Of a job that belongs to
somebody else nothing more is shown: no name, no arguments, no directory, no words that a script or its host said. Of
the records of ended jobs (`history`, `report`) a user sees own ones only: the commands see to that, by who asks.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from agent.api.gathering import Gathered
from plugins.askers import Asker, OwnerUser, Role
from plugins.base import Plugin
from plugins.scheduler.machine.log.tenants import few
from plugins.scheduler.policy.explain import BEFORE
from plugins.views import EventLine, JobLossesView, JobSeenView, JobTallyView, JobView, VolumeView

GROUP = "@"
"""What stands before the name of a group in `[access] operators`."""
Needs = Literal["look", "log in", "use", "own", "operate"]
"""What a command needs: `look`, anybody; `log in`, a user whom the kernel names; `use`, a tenant; `own`, to own what it
is about; `operate`, an operator."""
Of = Literal["", "job", "volume"]


class Rule(NamedTuple):
    """What one command needs of whoever asks for it."""

    needs: Needs
    of: Of = ""
    """The kind of what the command is about, where that belongs to somebody."""
    changes: bool = False
    """Whether the command changes something; one that only reads is answered to those who may read all, too."""
    ends: bool = False
    """Whether the command only ends, or gives back, what is the asker's own: its owner may do that out of all tenants,
    too."""
    is_private: bool = False
    """Whether those who may read all are not answered either."""
    noted: tuple[str, ...] = ()
    """The subjects of what the event log says of it, where nothing else does, with a field of the request in braces."""


class NotAllowed(NamedTuple):
    """Why a command is not performed: one line what, one line why, one line what to do next."""

    what: str
    why: str
    next: str


LOOK = Rule("look")
OPERATE = Rule("operate", changes=True)
OWN_JOB = Rule("own", "job", changes=True)
VOLUME = ("volume/{volume}",)
RULES: Mapping[str, Rule] = {
    "agent.hosts": LOOK,
    "agent.gpus": LOOK,
    "agent.local_gpus": LOOK,
    "agent.local_clock": LOOK,
    "agent.links": LOOK,
    "agent.local_paths": LOOK,
    "agent.ping": LOOK,
    "agent.leader": LOOK,
    "agent.local_voter": LOOK,
    "agent.voters": LOOK,
    "agent.health": LOOK,
    "agent.rack_slabs": LOOK,
    "agent.rack_volumes": LOOK,
    "agent.rack_tensors": LOOK,
    "agent.rack_shared_gpus": LOOK,
    "agent.rack_interference": LOOK,
    "agent.rack_groups": LOOK,
    "agent.events": LOOK,
    "agent.rack_events": LOOK,
    "agent.story": Rule("look", "job"),
    "agent.why": Rule("look", "job"),
    "agent.forget_gpu": Rule("operate", changes=True, noted=("gpu/{id}",)),
    "agent.change_voters": Rule("operate", changes=True, noted=("host/{add}", "host/{remove}")),
    "agent.gossip": LOOK,
    "agent.local_gossip": LOOK,
    "agent.keys": LOOK,
    "agent.local_keys": LOOK,
    "agent.turn_keys": OPERATE,
    "agent.make_token": OPERATE,
    "agent.login": Rule("log in", changes=True),
    "agent.open_session": Rule("own", "job", changes=True, noted=("job/{id}",)),
    "agent.turn_session": OWN_JOB,
    "agent.stacks": OWN_JOB,
    "scheduler.jobs": LOOK,
    "scheduler.job": LOOK,
    "scheduler.starts": LOOK,
    "scheduler.quotas": LOOK,
    "scheduler.tenants": LOOK,
    "scheduler.rack": LOOK,
    "scheduler.gpu_uses": LOOK,
    "scheduler.history": LOOK,
    "scheduler.report": LOOK,
    "scheduler.report_job": LOOK,
    "agent.history": LOOK,
    "agent.report": LOOK,
    "scheduler.logs": Rule("own", "job"),
    "scheduler.curve": Rule("own", "job"),
    "scheduler.env": Rule("own", "job", is_private=True),
    "scheduler.submit": Rule("use", changes=True),
    "scheduler.start_of": Rule("use", changes=True),  # it submits nothing, and is for whoever may submit
    "scheduler.cancel": Rule("own", "job", changes=True, ends=True),
    "scheduler.hold": OWN_JOB,
    "scheduler.release": OWN_JOB,
    "scheduler.requeue": OWN_JOB,
    "scheduler.checkpoint": OWN_JOB,
    "scheduler.priority": OWN_JOB,
    "scheduler.update": OWN_JOB,
    "scheduler.move": OWN_JOB,
    "scheduler.scale": OWN_JOB,
    "scheduler.arrange": OWN_JOB,
    "scheduler.tune": OWN_JOB,
    "scheduler.give_up": OPERATE,
    "scheduler.drain": OPERATE,
    "scheduler.resume": OPERATE,
    "scheduler.cordon": OPERATE,
    "scheduler.forget": OPERATE,
    "scheduler.knows": OPERATE,
    "agent.forget_host": OPERATE,
    "scheduler.uncordon": OPERATE,
    "scheduler.quota_set": OPERATE,
    "scheduler.tenant_set": OPERATE,
    "tuner.show": Rule("own", "job"),
    "memory.volumes": LOOK,
    "memory.slabs": LOOK,
    "memory.accounts": LOOK,
    "memory.create": Rule("use", changes=True, noted=VOLUME),
    "memory.remove": Rule("own", "volume", changes=True, ends=True, noted=VOLUME),
    "memory.give_up": Rule("own", "volume", changes=True, ends=True, noted=VOLUME),
    "memory.export": Rule("operate", changes=True, noted=VOLUME),
    "memory.swap": Rule("operate", changes=True, noted=VOLUME),
    "aggregator.tensors": LOOK,
    "aggregator.move": Rule("operate", changes=True, noted=("{job}",)),
    "sharing.gpus": LOOK,
    "sharing.interference": LOOK,
    "interleave.groups": LOOK,
}
"""What each command needs. Exports and swap are the operator's: the first makes a socket where the agent's user may,
the second is the whole host's."""


def rules_of(plugins: Sequence[Plugin]) -> Mapping[str, Rule]:
    """The table, with the commands of plugins that declare theirs. No plugin changes what is in the table."""
    said = {f"{plugin.name}.{name}": who for plugin in plugins for name, who in plugin.asked_by.items()}
    return {**{name: LOOK if who == "anybody" else OPERATE for name, who in said.items()}, **RULES}


# ---- who asks --------------------------------------------------------------------------------------------------------


def role_of(user: str, groups: Collection[str], operators: Collection[str], tenants: Sequence[str]) -> Role:
    """The role of a user of this host. `operators`: names, and groups as `@NAME`; `tenants`: those that the user is
    in."""
    if user in operators or any(f"{GROUP}{group}" in operators for group in groups):
        return "operator"
    return "user" if tenants else "viewer"


# ---- may they --------------------------------------------------------------------------------------------------------


def refusal(asker: Asker, command: str, rule: Rule | None, owner: OwnerUser | None) -> NotAllowed | None:
    """Why this command is not performed for whoever asks; None: it is. `rule`: what the table says of it, if anything.
    `owner`: whose is what it is about; None: nobody knows, or it is about nothing that belongs to somebody."""
    what = "this request is not allowed"
    if rule is None:
        return NotAllowed(what, f"nobody has said who may ask for {command}", "report this")
    if rule.needs == "log in":
        return _no_login(asker)
    if (
        asker.role == "operator"
        or rule.needs == "look"
        or (asker.reads_all and not rule.changes and not rule.is_private)
    ):
        return None
    if rule.needs == "operate":
        why = f"{command} is for operators, and {asker.name} is a {asker.role}"
        return NotAllowed(what, why, "ask an operator of the rack ([access] operators in agent.toml), or use sudo")
    if rule.needs == "own" and (owner is None or not owner.is_user(asker)):
        return _not_owner(what, asker, rule, owner)
    takes = rule.changes and not rule.ends
    if asker.role == "viewer" and takes:
        why = f"{asker.name} is in no tenant, and may only look, and end what is {asker.name}'s own"
        return NotAllowed(what, why, f"ask an operator: agentctl tenant set TENANT --add {asker.name}")
    return None


def _no_login(asker: Asker) -> NotAllowed | None:
    """Why whoever asks gets no certificate. Scripts of jobs without an owner run as the agent's own user: with one they
    could do everything for days after. One that was made by another would never end."""
    what, on_host = "no certificate was made", "on a host of the rack, as the user: agentctl login"
    if asker.uid < 0 or asker.by_certificate:
        return NotAllowed(what, "only a host's kernel says who logs in, at the unix socket of its agent", on_host)
    if asker.is_agent:
        why = f"{asker.name} is root or the agent's own user, whom no certificate names"
        return NotAllowed(what, why, f"{on_host}; operators are in [access] operators of agent.toml")
    return None


def _not_owner(what: str, asker: Asker, rule: Rule, owner: OwnerUser | None) -> NotAllowed:
    whose = "the agent's own user" if owner is None or owner.uid is None else owner.user or f"uid {owner.uid}"
    why = f"the {rule.of} belongs to {whose}, and {asker.name or 'it'} is somebody else"
    if asker.uid < 0:
        why = f"the {rule.of} belongs to {whose}, and over TCP it cannot be told who asks"
    return NotAllowed(what, why, "ask its owner or an operator, or use agentctl on its host as one of them")


def own_volume(asker: Asker, given: Mapping[str, Any], tenants: Sequence[str]) -> Mapping[str, Any] | NotAllowed:
    """The request for a volume as its asker may make it: a user's volume is the user's own, and counts against the
    budget of one of the user's tenants."""
    if asker.role == "operator":
        return given
    what, wanted = "this volume was not created", given.get("tenant") or None
    if given.get("uid", asker.uid) != asker.uid:
        return NotAllowed(what, f"{asker.name} may create own volumes only", "leave --user out")
    if given.get("create"):
        why = "pages of an earlier volume of that name, which may be another user's, would be dropped"
        return NotAllowed(what, why, "leave --force out, or ask an operator")
    if not tenants:
        return NotAllowed(what, f"{asker.name} is in no tenant", "ask an operator: agentctl tenant set")
    if wanted is not None and wanted not in tenants:
        why = f"{asker.name} is in {few(tenants)}, and not in tenant {str(wanted)[:80]}"
        return NotAllowed(what, why, f"--tenant {tenants[0]}")
    if wanted is None and len(tenants) > 1:
        why = f"{asker.name} is in several tenants, {few(tenants)}, and a volume counts against one tenant's budget"
        return NotAllowed(what, why, f"name one of them: --tenant {tenants[0]}")
    return {**given, "uid": asker.uid, "tenant": wanted or tenants[0]}


# ---- what is shown ---------------------------------------------------------------------------------------------------

SAYS_NOTHING_OF_SCRIPTS = frozenset((
    *("granted", "promoted", "demoted", "upgraded", "reserves GPUs", "shares GPUs", "to move"),
    *("other jobs move for it", "owners forgotten", "tuner on", "tuner off"),
    *("held", "released", "priority", "waits no longer", "time limit changed", "tasks cancelled"),
))  # fmt: skip
"""The events of a job whose reason is made of numbers and of names of hosts, jobs, tenants and users alone. The reasons
of all others are for the job's owner: words of a script or of its host may be among them."""


def shown_to(asker: Asker, answer: Any, is_own: Callable[[EventLine], bool] = lambda _line: False) -> Any:
    """What of an answer is shown to whoever asked. `is_own`: whether an event is of an own job or volume."""
    if asker.role == "operator" or asker.reads_all:
        return answer
    if isinstance(answer, Gathered):
        return msgspec.structs.replace(answer, data=shown_to(asker, answer.data, is_own))
    if isinstance(answer, list | tuple):
        return [shown_to(asker, each, is_own) for each in answer]
    if isinstance(answer, JobView):
        return answer if OwnerUser(answer.user, answer.uid).is_user(asker) else job_outline(answer)
    if isinstance(answer, VolumeView):
        return answer if _owns_volume(asker, answer) else msgspec.structs.replace(answer, path="", trouble="")
    if isinstance(answer, EventLine):
        return answer if not _is_private(answer) or is_own(answer) else msgspec.structs.replace(answer, reason="")
    return answer


def job_outline(job: JobView) -> JobView:
    """What everybody sees of a job: made anew of what is shown, so that a new field is not."""
    return JobView(
        id=job.id,
        name="",
        tenant=job.tenant,
        job_class=job.job_class,
        runs_as=job.runs_as,
        state=job.state,
        over=job.over,
        reason=job.reason.partition(BEFORE)[0] if job.state == "queued" else "",
        workers=job.workers,
        gpus=job.gpus,
        argv=(),
        cwd="",
        times=job.times,
        tally=JobTallyView(attempt=job.tally.attempt, preemptions=job.tally.preemptions),
        losses=JobLossesView(on_lost=job.losses.on_lost),
        seen=JobSeenView(),
        queue=job.queue,
        attained_gpu_s=job.attained_gpu_s,
        epoch=job.epoch,
        coordinator=job.coordinator,
        exit_code=job.exit_code,
        places=job.places,
        beside=job.beside,
        reserved_gpus=job.reserved_gpus,
        age_s=job.age_s,
        user=job.user,
        uid=job.uid,
        array=job.array,
        task=job.task,
        held=job.held,
        after=job.after,
        begin_wall_s=job.begin_wall_s,
        time_limit_s=job.time_limit_s,
        turn=job.turn,
    )


def _owns_volume(asker: Asker, volume: VolumeView) -> bool:
    return OwnerUser(uid=volume.uid if volume.uid >= 0 else None).is_user(asker)


def _is_private(line: EventLine) -> bool:
    """Whether the reason of this event is for the owner of its subject."""
    kind = line.subject.partition("/")[0]
    if kind in ("host", "gpu", "tenant"):
        return False
    return line.event not in SAYS_NOTHING_OF_SCRIPTS

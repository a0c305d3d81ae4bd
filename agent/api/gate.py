"""The gate before all commands of an agent: it finds out who asks, judges by the table (`agent.api.access`), and shows
of the answer what they may see. Whatever asks an agent for a command on behalf of a person comes through here.

Agents that ask one another over control links are not people: their questions (`RackView.answer`) do not come through.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agent.api import access
from agent.api.access import NotAllowed, Rule
from covey.core.errors import NoLeader, Refused
from covey.core.ids import HostId
from covey.ports.env import Env
from plugins.askers import Asker, OwnerUser, asker_of
from plugins.base import Command
from plugins.scheduler.messages.spec import USER_PATTERN
from plugins.views import EventLine

ROOT = 0
PLUGIN_OF = {"job": "scheduler", "volume": "memory"}
"""The plugin that knows whose a job or a volume is."""
_JOB = re.compile(r"(?:job/)?(j[0-9]+)")
_NAME = re.compile(USER_PATTERN)
_FIELD = re.compile(r"\{(\w+)\}")
FIELD_CHARACTERS_MAX = 80
"""The most characters of a request's field in the name of an event's subject."""


class GuardedAgent(Protocol):
    """What the gate needs of the agent."""

    @property
    def id(self) -> HostId: ...
    @property
    def env(self) -> Env: ...
    async def owner_of(self, plugin: str, name: str) -> OwnerUser: ...
    def tenants_of(self, user: str) -> Sequence[str]: ...
    def note(self, subject: str, event: str, reason: str) -> None: ...


class Gate:
    """`rules`: the table; `operators`: as in `[access] operators`."""

    def __init__(self, agent: GuardedAgent, rules: Mapping[str, Rule], operators: Sequence[str]) -> None:
        self._agent, self._rules, self._operators = agent, rules, frozenset(operators)

    async def asker(self, uid: int) -> Asker | None:
        """Who asks, from the number that the kernel tells; None: this host does not know the user by name."""
        user = await self._agent.env.users.numbered(uid)
        name = user.name if user is not None and _NAME.fullmatch(user.name) else ""
        if uid in (ROOT, self._agent.env.users.own_uid):
            return Asker(uid, name, "operator", is_agent=True)
        if user is None or not name or user.uid != uid:
            return None
        if any(each.startswith(access.GROUP) for each in self._operators):
            user = await self._agent.env.users.with_groups(user)
        role = access.role_of(name, user.groups, self._operators, self._agent.tenants_of(name))
        return Asker(uid, name, role)

    def guarded(self, name: str, command: Command) -> Command:
        """The command, for those who may ask for it."""

        async def answer(given: Mapping[str, Any]) -> Any:
            asker, rule = asker_of(given), self._rules.get(name)
            owner = await self._owner(asker, rule, given) if rule is not None else None
            _refuse(access.refusal(asker, name, rule, owner))
            assert rule is not None
            if name == "memory.create":
                given = self._own_volume(asker, given)
            found = await command(given)
            for noted in rule.noted:
                if subject := _subject(noted, given):
                    self._agent.note(subject, "asked", f"{name}, by {asker.name}")
            owns = owner is not None and owner.is_user(asker)
            about = str(given.get("id", ""))
            return access.shown_to(asker, found, lambda line: owns and self._is_of(line, about))

        return answer

    def _own_volume(self, asker: Asker, given: Mapping[str, Any]) -> Mapping[str, Any]:
        found = access.own_volume(asker, given, self._agent.tenants_of(asker.user))
        if isinstance(found, NotAllowed):
            raise Refused(4, *found)
        return found

    async def _owner(self, asker: Asker, rule: Rule, given: Mapping[str, Any]) -> OwnerUser | None:
        """Whose is what a command is about, where that matters. Refused where there is no such thing."""
        if not rule.of or asker.role == "operator":
            return None
        if rule.needs == "own":
            name = str(given.get("volume" if rule.of == "volume" else "id", ""))
            return await self._agent.owner_of(PLUGIN_OF[rule.of], name)
        return await self._owner_of_events(str(given.get("id", "")))

    def _is_of(self, line: EventLine, about: str) -> bool:
        """Whether an event is of the job, or of this host's volume, that was asked about. Another host may have a
        volume of the same name, and a volume may be called like a job."""
        if job := _JOB.fullmatch(about):
            return line.subject in (job[1], f"job/{job[1]}")
        name = about.removeprefix("volume/")
        return line.host == self._agent.id and (
            line.subject == f"volume/{name}" or line.subject.startswith(f"slab/{name}/")
        )

    async def _owner_of_events(self, subject: str) -> OwnerUser | None:
        """The owner of the job or volume that has these events; None: it is neither, or is not known here."""
        job = _JOB.fullmatch(subject)
        plugin, name = ("scheduler", job[1]) if job else ("memory", subject.removeprefix("volume/"))
        try:
            return await self._agent.owner_of(plugin, name)
        except (Refused, NoLeader):
            return None


def _refuse(no: NotAllowed | None) -> None:
    if no is not None:
        raise Refused(4, *no)


def _subject(noted: str, given: Mapping[str, Any]) -> str:
    """The subject of an event, with a field of the request in it; empty where the request does not have it."""
    field = _FIELD.search(noted)
    said = str(given.get(field[1]) or "")[:FIELD_CHARACTERS_MAX] if field else ""
    return _FIELD.sub(lambda _: said, noted) if said else ""

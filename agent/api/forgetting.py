"""Forgetting a host that will never come back: its seat among the voters, the jobs that wait for it, its drain, its row
in gossip, and slabs that volumes still hope to get back from it.

    refused while it lives -> it votes no more -> its jobs are taken back -> the log says so -> every host drops its row

Its seat is not empty for long where another host can vote: the leader adds one (`agent.raft.service.voters.grown`).
Each step is harmless when it is taken twice, so a command that stopped half way is typed again. A host that comes back
all the same joins like a new one: whoever has the key may. `agentctl keys rotate` shuts it out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from covey.core.errors import Refused
from covey.core.ids import HostId
from covey.ports.env import Env
from plugins.base import Command
from plugins.facts import HostView
from plugins.views import VotersView

NAME_MAX = 63
LIVING = ("alive", "suspect", "away")
HEARD_S = 60.0
"""Seconds after its start in which an agent may not have heard of every living host (chosen: gossip takes a few)."""


class Forgotten(msgspec.Struct, frozen=True):
    """What was forgotten of a host."""

    jobs: tuple[str, ...]
    """Jobs that waited for it, and are taken back."""
    voted: bool
    """Whether it voted, or was about to."""


class ForgettingAgent(Protocol):
    """What this file needs of the agent."""

    @property
    def id(self) -> HostId: ...
    @property
    def env(self) -> Env: ...
    @property
    def up_s(self) -> float: ...
    def hosts(self) -> Sequence[HostView]: ...
    def voters_now(self) -> VotersView: ...
    async def change_voters(self, add: str, remove: str, force: bool) -> str: ...
    def plugin_commands(self) -> Mapping[str, Command]: ...


def refusal(host: HostId, me: HostId, state: str | None, is_in_log: bool, up_s: float) -> Refused | None:
    """Why the host cannot be forgotten; None: it can. `state`: what gossip says of it, if anything; `is_in_log`: it
    votes, is drained or has jobs; `up_s`: seconds since this agent began."""
    what = f"{str(host)[:80]} was not forgotten"
    if host == me:
        return Refused(4, what, "it is this host", "on another host, once this one is shut down for good")
    if state in LIVING:
        why = f"it is {state}: only a host that is gone, or has left, is forgotten"
        return Refused(4, what, why, f"agentctl hosts drain {host} --wait, then shut it down")
    if state is None and not is_in_log:
        return Refused(3, f"there is no host {str(host)[:80]!r}", "no host of that name is known", "agentctl hosts")
    if state is None and up_s < HEARD_S:
        why = "this agent has just begun, and may not have heard of it"
        return Refused(75, what, why, f"again in a minute: agentctl hosts forget {host}")
    return None


async def forget(agent: ForgettingAgent, given: Mapping[str, Any]) -> Forgotten:
    """Forget a host. Refused: it lives, or nobody knows it, or the voters cannot be changed now. `given`: `id`, and who
    asks."""
    host, commands = HostId(str(given.get("id", ""))[: NAME_MAX + 1]), agent.plugin_commands()
    view = next((each for each in agent.hosts() if each.host == host), None)
    now = agent.voters_now()
    voted = host in (*now.voters, now.learner)
    asked = {**given, "id": host, "boot": int(agent.env.clock.wall_s()) if view is None else view.boot}
    knows = commands.get("scheduler.knows")
    is_in_log = voted or (knows is not None and bool(await knows(asked)))
    state = None if view is None else view.state
    if (refused := refusal(host, agent.id, state, is_in_log, agent.up_s)) is not None:
        raise refused
    if voted:
        await agent.change_voters("", host, False)
    if knows is None:
        why = "the plugin scheduler is off here, and it is what tells the other hosts"
        raise Refused(1, f"{host} was not forgotten", why, "agentctl status; then the same line on another host")
    return Forgotten(tuple(str(job.id) for job in await commands["scheduler.forget"](asked)), voted)

"""One list made of the answers of every host: a host that does not answer in time is named beside it.

All hosts that gossip has as alive or suspect are asked at once, for as long as the reader waits. What an earlier answer
of a silent host said is shown with its age. A list is whole only when every host answered: its reader is told who did
not (`plugins.views.Unanswered`), and why.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from covey.core.errors import Refused
from covey.core.ids import HostId
from covey.core.units import format_seconds
from covey.ports.env import Env
from plugins.facts import HostView

WAIT_S = 3.0
"""Seconds for which a list waits for hosts unless its reader says otherwise: longer than a message that is lost once
and repeated twice (`agent.rpc.rpc.RETRY_S`)."""
WAIT_S_MAX = 600.0
"""The longest wait that a reader may ask for, seconds."""
WAIT = "timeout_s"
"""The argument of a list that says how long it may wait, seconds."""
LISTS = {
    "gpus": "agent.gpus",
    "slabs": "agent.rack_slabs",
    "volumes": "agent.rack_volumes",
    "tensors": "agent.rack_tensors",
    "shared_gpus": "agent.rack_shared_gpus",
    "interference": "agent.rack_interference",
    "groups": "agent.rack_groups",
    "gossip": "agent.gossip",
    "keys": "agent.keys",
    "voters": "agent.voters",
}
"""Path under /v1 -> command of each list to which every host adds: `?timeout_s=` says how long it waits for hosts, and
its answer names under `unanswered` those whose part is missing."""
T = TypeVar("T")

Ask = Callable[[HostId, str, dict[str, str], float], Awaitable[list[Any]]]
"""Asks one host for rows: `ask(host, read, arguments, seconds) -> rows`; TimeoutError or Refused when there are
none."""


class Unanswered(msgspec.Struct, frozen=True):
    """A host whose part of a list is missing, or older than the rest."""

    host: HostId
    why: str
    age_s: float | None = None
    """Age of its rows that are shown from an earlier answer, seconds; None: none of its rows is shown."""


class Gathered(msgspec.Struct, frozen=True):
    """What all hosts answered together: the `data` of an answer, and who is missing from it."""

    data: Any
    unanswered: tuple[Unanswered, ...] = ()
    """The hosts whose part is missing; empty: the list is whole."""


class Rack(Protocol):
    """What gathering needs of the agent."""

    @property
    def id(self) -> HostId: ...
    @property
    def env(self) -> Env: ...
    def hosts(self) -> Sequence[HostView]: ...


class Gathering:
    """The lists of the rack: it asks every host, and remembers what each said last."""

    def __init__(self, rack: Rack, ask: Ask) -> None:
        self._rack, self._ask = rack, ask
        self._last: dict[str, dict[HostId, tuple[float, list[Any]]]] = {}

    async def everywhere(self, read: str, arguments: dict[str, str], wait_s: float) -> Gathered:
        """The rows of every host that answers within `wait_s`, and the last known ones of those that do not."""
        views = self._rack.hosts()
        asked = [view.host for view in views if view.state in ("alive", "suspect")]
        answers = await asyncio.gather(*(self._one(host, read, arguments, wait_s) for host in asked))
        now_s = self._rack.env.clock.now_s()
        known = {} if arguments else self._last.setdefault(read, {})
        for host in known.keys() - {view.host for view in views}:
            del known[host]  # it was forgotten, by whoever knows that it will never come back
        missing = {view.host: _restarts(view) for view in views if view.state == "away"}
        for host, rows in zip(asked, answers, strict=True):
            if isinstance(rows, str):
                missing[host] = rows
            else:
                known[host] = (now_s, rows)
        shown = [_aged(row, now_s - at_s) for host in sorted(known) for at_s, rows in [known[host]] for row in rows]
        ages = {host: now_s - at_s for host, (at_s, rows) in known.items()}
        return Gathered(shown, tuple(Unanswered(host, why, ages.get(host)) for host, why in sorted(missing.items())))

    async def _one(self, host: HostId, read: str, arguments: dict[str, str], wait_s: float) -> list[Any] | str:
        """The rows of one host, or why there are none."""
        try:
            async with asyncio.timeout(wait_s):
                return await self._ask(host, read, arguments, wait_s)
        except TimeoutError:
            return f"no answer within {format_seconds(wait_s)}"
        except Refused as no:
            return f"{no.what}: {no.why}"


def wait_of(arguments: Mapping[str, Any]) -> float:
    """Seconds for which the reader of a list waits. Refused when it is no number of seconds up to `WAIT_S_MAX`."""
    asked = arguments.get(WAIT, WAIT_S)
    try:
        wait_s = float(asked)
    except (TypeError, ValueError, OverflowError):
        wait_s = 0.0
    if not 0 < wait_s <= WAIT_S_MAX:
        why = f"expected seconds above 0, and at most {WAIT_S_MAX:g}"
        raise Refused(2, f"invalid {WAIT}: {str(asked)[:40]!r}", why, "agentctl slabs --timeout 10s")
    return wait_s


def words(unanswered: tuple[Unanswered, ...]) -> str:
    """The hosts that are missing, for a sentence: `gpu3 (no answer within 3 s), gpu4 (it restarts)`."""
    return ", ".join(f"{each.host} ({each.why})" for each in unanswered)


def _restarts(view: HostView) -> str:
    return f"its agent restarts and will be back within {format_seconds(view.away_s)}"


def _aged(row: T, age_s: float) -> T:
    """The row with `age_s`, if it has that field and the age is over 0."""
    return msgspec.structs.replace(row, age_s=age_s) if age_s > 0 and hasattr(row, "age_s") else row  # type: ignore[type-var]

"""The tables of a stream: which command has the rows of each, what names a row, and what of a row is no change.

A row of a stream is the row of the list. Two rows of the same key that differ only in how much time has gone by, or by
less than a measured value moves by itself, are the same row: the earlier one stands. All pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

Row = Any
"""A Struct of a list, such as `HostRow`."""


class ListTable(NamedTuple):
    """One list, as a stream has it."""

    command: str
    key: Callable[[Row], str]
    """The name of a row, which no other row of the list has."""
    gathered: bool = False
    """Whether the other hosts are asked for it."""
    stirred_by: str = ""
    """Which of the agent's counts grows when the list has changed, if one does: `log`, `hosts`."""
    given: Mapping[str, Any] = {}
    """What its command is given."""
    rows: Callable[[Any], Iterable[Row]] = list
    """The rows in what its command answers."""
    counting: tuple[str, ...] = ("age_s",)
    """The fields that only tell how much time has gone by; `times.for_s` is one within a field."""
    adds: bool = False
    """Whether its command is asked for what is newer alone, and adds that to what there is."""
    noise: Mapping[str, Callable[[Row], float]] = {}
    """Measured fields -> by how much one may move, from what the row had, until that is a change."""


def _slab(row: Row) -> str:
    """VOLUME/INDEX, with the number of the place where a slab has several."""
    return f"{row.volume}/{row.index}" + (f"/{row.member}" if row.member else "")


def _event_key(row: Row) -> str:
    """What an event is that several hosts may have noted, or one."""
    return f"{row.subject}/{row.key}" if row.key else f"{row.subject}/{row.host}/{row.wall_s}/{row.event}"


HAPPENED = "happened"
"""The table of events: what hosts noted of jobs, volumes, GPUs and hosts. Each is told as an event of its own."""
COUNTED = ("sent", "sent_bytes", "received", "received_bytes", "probes")
"""What a host's gossip counts all the time: told when it has grown by a part."""
EVENTS_KEPT, EVENTS_S, LATE_S = 1000, 3600.0, 60.0
"""The newest events that are kept; how old one may be that is told first, s; how much later than others' a host's
events may come, s: its clock may be behind, and its answer late."""
PARTS = 0.05
"""By which part of it a measured rate or time moves by itself (chosen)."""


def _counted(field: str, row: Row) -> float:
    return 1.0 + float(getattr(row, field)) * PARTS


TABLES: Mapping[str, ListTable] = {
    "hosts": ListTable("agent.hosts", lambda row: row.host, stirred_by="hosts", counting=("age_s", "since_s")),
    "jobs": ListTable(
        "scheduler.jobs",
        lambda row: row.id,
        stirred_by="log",
        given={"all": True},
        counting=("age_s", "times.for_s", "losses.away"),
        noise={"attained_gpu_s": lambda row: 30.0 * max(1, row.gpus)},
    ),
    "gpus": ListTable(
        "agent.gpus",
        lambda row: f"{row.host}/{row.index}",
        gathered=True,
        noise={"utilization": lambda _row: PARTS, "memory_used_bytes": lambda row: row.memory_total_bytes / 100},
    ),
    "slabs": ListTable(
        "agent.rack_slabs",
        _slab,
        gathered=True,
        noise={"requests_per_s": lambda row: 1.0 + row.requests_per_s * PARTS},
    ),
    "volumes": ListTable("agent.rack_volumes", lambda row: f"{row.host}/{row.volume}", gathered=True, counting=()),
    "accounts": ListTable("memory.accounts", lambda row: f"{row.kind}/{row.name}", counting=()),
    "tenants": ListTable("scheduler.tenants", lambda row: row.tenant, stirred_by="log", counting=()),
    "quotas": ListTable(
        "scheduler.quotas",
        lambda row: row.tenant,
        stirred_by="log",
        counting=(),
        noise={"recent_gpus": lambda row: 0.1 + row.recent_gpus * PARTS},
    ),
    "tensors": ListTable(
        "agent.rack_tensors",
        lambda row: f"{row.job}/{row.host}/{row.by}",
        gathered=True,
        counting=("age_s", "waits_s"),
        noise={
            "period_us": lambda row: row.period_us * PARTS,
            "work_us": lambda row: row.work_us * PARTS,
            "load": lambda _row: PARTS,
            "loss_measured": lambda _row: PARTS,
        },
    ),
    "gossip": ListTable(
        "agent.gossip",
        lambda row: row.host,
        gathered=True,
        counting=("up_s",),
        noise={name: partial(_counted, name) for name in COUNTED},
    ),
    HAPPENED: ListTable("agent.rack_events", _event_key, gathered=True, counting=("wall_s", "host"), adds=True),
    "leader": ListTable(
        "agent.leader", lambda _row: "leader", rows=lambda view: [view], stirred_by="log", counting=("age_s", "since_s")
    ),
    "voters": ListTable("agent.voters", lambda row: row.host, gathered=True, rows=lambda view: view.rows),
}
"""The tables that can be asked for."""


def keyed(table: ListTable, answer: Any) -> dict[str, Row]:
    """The rows of an answer by their keys. Where two hosts have something of one name, the later row's key says its
    host as well."""
    found: dict[str, Row] = {}
    for row in table.rows(answer):
        key = table.key(row)
        if key in found:
            key = f"{key}@{getattr(row, 'borrower', '') or getattr(row, 'host', '')}"
        found[key] = row
    return found


def added(before: Mapping[str, Row], rows: Mapping[str, Row]) -> dict[str, Row]:
    """The newest events of these two tables together."""
    newest = sorted({**rows, **before}.items(), key=lambda each: float(each[1].wall_s))
    return dict(newest[-EVENTS_KEPT:])


def ask_after(before: Mapping[str, Row], wall_s: float) -> float:
    """The wall clock after which events are new to whoever has these, s."""
    return max((row.wall_s - LATE_S for row in before.values()), default=wall_s - EVENTS_S)


def settled(table: ListTable, before: Row, now: Row) -> Row:
    """`before` itself where `now` says nothing else; `now` where it does."""
    quiet: dict[str, Any] = {}
    for field in table.counting:
        outer, _, inner = field.partition(".")
        if inner:
            within = getattr(now, outer)
            quiet[outer] = msgspec.structs.replace(within, **{inner: _stood(getattr(before, outer), within, inner)})
        else:
            quiet[outer] = getattr(before, outer)
    for field, moves_by in table.noise.items():
        was, has = getattr(before, field), getattr(now, field)
        if was is not None and has is not None and abs(has - was) < moves_by(before):
            quiet[field] = was
    return before if msgspec.structs.replace(now, **quiet) == before else now


def _stood(before: Any, now: Any, field: str) -> Any:
    """What a counting field had before; of seconds by host only where the hosts are the same."""
    was, has = getattr(before, field), getattr(now, field)
    return has if isinstance(has, dict) and has.keys() != was.keys() else was


class Difference(NamedTuple):
    """What is different between two tables."""

    set: Mapping[str, tuple[Row | None, Row]]
    """Key -> the row before, None of a new one, and the row now."""
    gone: Sequence[str]


def difference(table: ListTable, before: Mapping[str, Row], now: Mapping[str, Row]) -> Difference:
    """What has to be said to whoever knows `before`, so that they know `now`. A row that stands is not in it."""
    changed: dict[str, tuple[Row | None, Row]] = {}
    for key, row in now.items():
        was = before.get(key)
        if was is None or settled(table, was, row) is not was:
            changed[key] = was, row
    return Difference(changed, [key for key in before if key not in now])


def fields_changed(before: Row | None, now: Row) -> dict[str, Any]:
    """The fields of a row that differ, as JSON has them; all of a new one."""
    has: dict[str, Any] = msgspec.to_builtins(now)
    if before is None:
        return has
    return {field: has[field] for field in now.__struct_fields__ if getattr(before, field) != getattr(now, field)}

"""What somebody asks of the records of jobs: checks of it, numbers of jobs as ranges, and sums."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, get_args

import msgspec

from covey.core.errors import Refused
from covey.core.job_records import NUMBER_MAX, By, GpuSeconds, JobRecord, Range, RecordsAsked, RecordSum
from plugins.askers import Asker

LIMIT, LIMIT_MAX = 1000, 100_000
"""How many jobs a history has unless its reader says otherwise, and the most that it may have."""
TEXT_MAX = 64
_encode = msgspec.msgpack.Encoder().encode


# ---- what is asked ----


def records(given: Mapping[str, Any]) -> RecordsAsked:
    """The records that a request asks for. Refused (2) when a field cannot be used."""
    since, limit = given.get("since_wall_s"), given.get("limit")
    return RecordsAsked(
        user=_text(given, "user"),
        tenant=_text(given, "tenant"),
        name=_text(given, "name"),
        state=_text(given, "state"),
        host=_text(given, "host"),
        since_wall_s=None if since is None else _number(since, "since_wall_s", "seconds since 1970", 0, 1e12),
        limit=LIMIT if limit is None else int(_number(limit, "limit", "a whole number", 1, LIMIT_MAX)),
    )


def by(given: Mapping[str, Any]) -> By:
    """By what a report adds up. Refused (2): it has no such sums."""
    asked: By
    for asked in get_args(By):
        if given.get("by", "user") == asked:
            return asked
    why = f"expected one of {', '.join(get_args(By))}"
    raise Refused(2, f"invalid by: {str(given.get('by'))[:40]!r}", why, "agentctl report --by tenant")


def own(asks: RecordsAsked, asker: Asker) -> RecordsAsked:
    """What the asker may see of it: an operator all, others own jobs. Refused (4) when another user's are asked for."""
    if asker.role == "operator" or asker.reads_all:
        return asks
    if asks.user not in ("", asker.user):
        why = f"{asker.name} is a {asker.role}, and sees own jobs only"
        raise Refused(4, "this request is not allowed", why, "leave --user out, or ask an operator")
    if asker.uid < 0:
        why = "over TCP it cannot be told who asks, and everybody sees own jobs only"
        raise Refused(4, "this request is not allowed", why, "use agentctl on a host of the rack, or agentctl login")
    return msgspec.structs.replace(asks, uid=asker.uid, user=asker.user)


def _text(given: Mapping[str, Any], field: str) -> str:
    value = given.get(field)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > TEXT_MAX or not value.isprintable():
        why = f"expected a text of at most {TEXT_MAX} printable characters"
        raise Refused(2, f"invalid {field}: {str(value)[:40]!r}", why, "agentctl history --help")
    return value


def _number(value: Any, field: str, expected: str, low: float, high: float) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not low <= found <= high or (expected == "a whole number" and found != int(found)):
        why = f"expected {expected} from {low:g} to {high:.0f}"
        raise Refused(2, f"invalid {field}: {str(value)[:40]!r}", why, "agentctl history --help")
    return found


def matches(asks: RecordsAsked, record: JobRecord) -> bool:
    """Whether a job is among those that are asked for; one that has not ended is among those since any time."""
    if (asks.user and record.user != asks.user) or (asks.tenant and record.tenant != asks.tenant):
        return False
    if asks.uid is not None and record.uid != asks.uid:
        return False
    if asks.state and asks.state != record.state:
        return False
    return (not asks.name or fnmatchcase(record.name, asks.name)) and (not asks.host or asks.host in record.hosts)


# ---- numbers of jobs ----


def joined(one: Sequence[Range], other: Sequence[Range]) -> tuple[Range, ...]:
    """All numbers of both, in ascending ranges that do not meet."""
    found: list[Range] = []
    for low, high in sorted((*one, *other)):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def without(one: Sequence[Range], other: Sequence[Range]) -> tuple[Range, ...]:
    """The numbers of `one` that are not in `other`; both are ascending, and their ranges do not meet."""
    found: list[Range] = []
    for low, high in one:
        for begin, end in other:
            if end < low or begin > high:
                continue
            if low < begin:
                found.append((low, begin - 1))
            low = end + 1
            if low > high:
                break
        if low <= high:
            found.append((low, high))
    return tuple(found)


def count(numbers: Iterable[Range]) -> int:
    return min(NUMBER_MAX, sum(high - low + 1 for low, high in numbers))


# ---- records ----


def fitting(found: Sequence[JobRecord], bytes_max: int) -> list[JobRecord]:
    """The first of these that take about so many bytes together, one at least."""
    taken: list[JobRecord] = []
    left = bytes_max
    for record in found:
        left -= len(_encode(record))
        if left < 0 and taken:
            break
        taken.append(record)
    return taken


def added(sums: Iterable[RecordSum], live: Iterable[JobRecord], by: By) -> list[RecordSum]:
    """Sums of ended jobs with those of jobs that have not ended, in order of what they are of."""
    found = {each.of: each for each in sums}
    for record in live:
        for of, seconds in _parts(record, by):
            known = found.get(of) or RecordSum(of, 0, GpuSeconds())
            found[of] = RecordSum(of, known.jobs + 1, known.seconds + seconds)
    return [found[of] for of in sorted(found)]


def _parts(record: JobRecord, by: By) -> list[tuple[str, GpuSeconds]]:
    if by == "gpu":
        held = record.seconds.held
        return [(gpu, record.seconds.times(gpu_s / held)) for gpu, gpu_s in record.by_gpu.items() if held]
    return [(record.user if by == "user" else record.tenant, record.seconds)]

"""Durations and times at which a job may begin, as people and Slurm write them."""

import re
import time

from cli.client import USAGE, AgentctlError

EXAMPLE = "--begin 18:30, --begin 2027-01-31T08:00, or --begin 2h"
DAY_S = 86_400
NAMED = {"midnight": "00:00", "noon": "12:00", "elevenses": "11:00", "fika": "15:00", "teatime": "16:00"}
UNITS_S = {"second": 1, "minute": 60, "hour": 3600, "day": DAY_S, "week": 7 * DAY_S}
FORMS = ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d")


def begin_s(text: str, now_s: float) -> float:
    """Seconds since 1970 of a time to come: a time of day (the next one), a date with or without one, `now+2hours`,
    `tomorrow`, or how long from now, with a unit. AgentctlError: it is none, or is over."""
    said = text.strip()
    if said == "now":
        return now_s
    if (found := re.fullmatch(r"now\+(\d{1,9})([a-z]*)", said)) is not None:
        unit = found[2].rstrip("s") or "second"
        if unit not in UNITS_S:
            raise _wrong(text, f"expected one of {', '.join(UNITS_S)}s after the number")
        return now_s + int(found[1]) * UNITS_S[unit]
    if said == "tomorrow":
        return _midnight(now_s + DAY_S + 7200)
    if (found := re.fullmatch(r"(\d{1,2}):(\d\d)(?::(\d\d))?", NAMED.get(said, said))) is not None:
        hour, minute, second = int(found[1]), int(found[2]), int(found[3] or 0)
        if hour > 23 or minute > 59 or second > 59:
            raise _wrong(text, "a time of day is from 00:00 to 23:59:59")
        today = _at(now_s, hour, minute, second)
        return today if today > now_s else _at(_midnight(now_s) + DAY_S + 7200, hour, minute, second)
    for form in FORMS:
        try:
            found_s = time.mktime(time.strptime(said, form))
        except (ValueError, OverflowError):
            continue
        if found_s < now_s - DAY_S:
            raise _wrong(text, "that time is over")
        return max(found_s, 0.0)
    from covey.core.units import parse_seconds

    try:
        return now_s + parse_seconds(said)
    except ValueError:
        why = "expected a time of day, a date with or without one, or how long from now, with a unit"
        raise _wrong(text, why) from None


def _at(day_s: float, hour: int, minute: int, second: int) -> float:
    day = time.localtime(day_s)
    return time.mktime((day.tm_year, day.tm_mon, day.tm_mday, hour, minute, second, 0, 0, -1))


def _midnight(day_s: float) -> float:
    return _at(day_s, 0, 0, 0)


def _wrong(text: str, why: str) -> AgentctlError:
    return AgentctlError(USAGE, f"invalid --begin {text[:80]}", why, EXAMPLE)


def duration(flag: str, text: str) -> float:
    from covey.core.units import parse_seconds

    number = text.strip()
    if number.replace(".", "", 1).isdigit() and float(number):
        why = "a number without a unit means minutes in Slurm and seconds elsewhere"
        raise AgentctlError(USAGE, f"{flag} {text} has no unit", why, f"{flag} {number}min, or {flag} {number}s")
    if found := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", number):
        parts = [int(part or 0) for part in found.groups()]
        days, hours, minutes, seconds = parts if found[1] or found[4] else [0, 0, *parts[1:3]]
        whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        why = "expected a number and a unit, not Slurm's days-hours:minutes:seconds"
        raise AgentctlError(USAGE, f"invalid {flag} {text}", why, f"{flag} {whole}s")
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise AgentctlError(USAGE, f"invalid {flag} {text}", str(error), "agentctl submit --help") from None

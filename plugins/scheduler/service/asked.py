"""Checks of what people give with a question or a change over HTTP; Refused (2) when it cannot be used."""

from collections.abc import Mapping
from typing import Any

import msgspec

from covey.core.errors import Refused
from plugins.askers import asker_of
from plugins.scheduler.messages.commands import WEIGHT_MAX, WEIGHT_MIN, QuotaSet, WeightSet

WHOLE_MAX = 1 << 53
"""The largest number that every reader of JSON understands; messages take no more than 64 bits."""
SECONDS_MAX = 600.0
"""The longest time for which a reader may have an agent wait, seconds."""


def whole(given: Mapping[str, Any], field: str, default: int) -> int:
    value = given.get(field, default)
    try:
        found = int(value)
        if abs(found) > WHOLE_MAX:
            raise ValueError(f"the limit is {WHOLE_MAX}")
        return found
    except (TypeError, ValueError, OverflowError) as error:
        why = f"{str(value)[:40]!r} is not a whole number"
        raise Refused(2, f"invalid {field}", why, "give a whole number") from error


def text(given: Mapping[str, Any], field: str, most: int) -> str:
    """The first `most` characters of a text, from whatever JSON may hold, as the log can hold it; empty: none was
    given."""
    value = given.get(field)
    return "" if value is None else str(value)[:most].encode(errors="replace").decode()


def seconds(given: Mapping[str, Any], field: str, default: float) -> float:
    value = given.get(field, default)
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = 0.0
    if not 0 < found <= SECONDS_MAX:
        why = f"{str(value)[:40]!r} is not a number of seconds above 0 and up to {SECONDS_MAX:g}"
        raise Refused(2, f"invalid {field}", why, "give a number of seconds")
    return found


def by(given: Mapping[str, Any]) -> str:
    """Who asks, in the words of events. Only the kernel's word counts, and not what a request says of itself."""
    return asker_of(given).name


def weight_set(given: Mapping[str, Any]) -> WeightSet:
    tenant, weight = given.get("tenant"), given.get("weight")
    try:
        return msgspec.convert({"wall_s": 0.0, "tenant": tenant, "weight": weight}, WeightSet)
    except msgspec.ValidationError as error:
        why = f"expected a tenant (a-z, 0-9, '.', '-') and a number from {WEIGHT_MIN:g} to {WEIGHT_MAX:g}"
        what = f"invalid weight {weight!r} for tenant {tenant!r}"[:200]
        raise Refused(2, what, why, "agentctl quota alice --weight 2") from error


def quota_set(given: Mapping[str, Any]) -> QuotaSet:
    tenant, gpus = given.get("tenant"), given.get("gpus")
    try:
        return msgspec.convert({"wall_s": 0.0, "tenant": tenant, "gpus": gpus}, QuotaSet)
    except msgspec.ValidationError as error:
        why = "expected a tenant (a-z, 0-9, '.', '-'; or * for all others) and a whole number of GPUs, or nothing"
        what = f"invalid quota {gpus!r} for tenant {tenant!r}"[:200]
        raise Refused(2, what, why, "agentctl quota alice 8") from error

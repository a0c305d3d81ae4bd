"""What an agent believes of an answer by who sums: a rank belongs to a user, and may say anything."""

from typing import Any

import msgspec
import pytest

from covey.core.ids import JobId
from covey.wire.job import SumsNow, decoder
from covey.wire.sums import JOBS_MAX, MISSING_MAX, JobCounters, Now

COUNTED = JobCounters(JobId("j1"), (1 << 32) + 1, 4, 4, 2, 8, 3, 100, 100, missing=[1], waits_s=0.5, away=[2])
NOW = Now("10.0.0.1:9", [COUNTED], 0.5, 0, 0, 64, near="\0covey/1")


def decoded(now: Now) -> object:
    return decoder.decode(msgspec.msgpack.encode(SumsNow(now)))


def test_an_answer_is_read_as_it_was_said() -> None:
    assert decoded(NOW) == SumsNow(NOW)


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "a" * 81},
        {"near": "n" * 109},
        {"jobs": [COUNTED] * (JOBS_MAX + 1)},
        {"busy_s": float("nan")},
        {"busy_s": float("inf")},
        {"busy_s": -1.0},
        {"memory_bytes": -1},
        {"bad_frames": 1 << 63},
        {"lanes": 0},
    ],
)
def test_an_answer_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoded(msgspec.structs.replace(NOW, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": -1},
        {"workers": -1},
        {"bytes": 1 << 63},
        {"busy_us": -1},
        {"missing": list(range(MISSING_MAX + 1))},
        {"missing": [-1]},
        {"missing": [0xFFFF]},
        {"away": [-1]},
        {"waits_s": float("nan")},
        {"may_take_us": -2},
    ],
)
def test_counters_out_of_bounds_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoded(msgspec.structs.replace(NOW, jobs=[msgspec.structs.replace(COUNTED, **changes)]))

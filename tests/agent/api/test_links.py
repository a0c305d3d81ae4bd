"""Round trips, clock offsets and long messages to other hosts, by a clock that the test moves."""

import pytest

from agent.api.links import PAD_BYTES, ClockRow, links
from covey.core.errors import Refused
from covey.core.ids import HostId
from tests.agent.api.test_rack_view import Clock

AHEAD_S, BACK_S = 3.0, 0.5


async def test_each_host_is_measured_and_what_is_not_known_is_named() -> None:
    clock = Clock()

    async def ask(host: HostId, pad: int, seconds: float) -> ClockRow:
        if host == "silent" or (host == "small" and pad):
            raise TimeoutError
        if host == "older":
            raise Refused(1, "older cannot answer", "it is of another version", "agentctl version")
        clock.at_s += BACK_S / 2
        row = ClockRow(host, clock.at_s + AHEAD_S, pad if host != "cuts" else pad // 2)
        clock.at_s += BACK_S / 2
        return row

    for name, whole in (("well", True), ("small", False), ("cuts", False)):
        (row,) = await links([HostId(name)], clock, ask)
        assert (row.rtt_s, row.offset_s, row.whole) == (BACK_S, AHEAD_S, whole)
    for name, why in (("silent", "did not answer within"), ("older", "it is of another version")):
        (row,) = await links([HostId(name)], clock, ask)
        assert (row.rtt_s, row.offset_s, row.whole) == (None, None, None) and why in row.why
    assert PAD_BYTES > 3 * 9000, "several segments, jumbo frames included"


@pytest.mark.parametrize(
    ("lost", "rtt_s", "questions"), [((3,), BACK_S, 3), ((1,), BACK_S, 3), ((1, 2), None, 2), ((1, 3), BACK_S, 3)]
)
async def test_of_small_questions_those_that_were_answered_count(
    lost: tuple[int, ...], rtt_s: float | None, questions: int
) -> None:
    clock, asked = Clock(), list[int]()

    async def ask(host: HostId, pad: int, seconds: float) -> ClockRow:
        asked.append(pad)
        if not pad and asked.count(0) in lost:
            raise TimeoutError
        clock.at_s += BACK_S
        return ClockRow(host, clock.at_s, pad)

    (row,) = await links([HostId("b")], clock, ask)
    assert (row.rtt_s, asked.count(0)) == (rtt_s, questions)
    assert bool(row.why) == (rtt_s is None)

"""Round trips, clock offsets and long messages to other hosts, by a clock that the test moves."""

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

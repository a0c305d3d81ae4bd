"""How long a gang that heals is without a rank when a host is lost, in virtual time."""

import pytest

from chaos.replaced import lose_host
from tests.families import in_gate


@pytest.mark.parametrize("seed", [3, 10, 21, 57])
def test_a_lost_host_has_a_successor_within_six_seconds(seed: int) -> None:
    """Ranks are suspended 5.7 s after their last lease; 8.3 s when a suspicion had to end, or a look was due."""
    took_s, led = lose_host(seed, "quiet")
    assert not led
    assert took_s < 5.9


@pytest.mark.parametrize("seed", in_gate(1, [16, 19, 30, 58]))
def test_a_lost_leader_has_a_successor_within_seven_and_a_half_seconds(seed: int) -> None:
    """The time is an election, of 1.2 to 1.75 s, and 5.7 s in which the leader's leases end."""
    took_s, led = lose_host(seed, "quiet")
    assert led
    assert took_s < 7.6

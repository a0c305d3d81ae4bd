"""Random faults by seed, then none: every host sees every other, knows the newest facts, and is quiet.

`covey-chaos soak --story gossip_worlds` plays more seeds.
"""

import pytest

from chaos.crowds.gossip import Crowd
from chaos.crowds.gossip_swarm import play
from gossip.types import MemberSuspected
from tests.families import in_gate


@pytest.mark.parametrize("seed", in_gate(3, [7017, 33, 115, 1, 2, 5, 40, 105]))
def test_after_any_faults_a_rack_is_whole_within_ninety_seconds_and_then_quiet(seed: int) -> None:
    play(seed)


def test_a_deaf_host_suspects_everybody_and_buries_nobody_in_the_eyes_of_others() -> None:
    """The deaf host speaks and cannot hear: the rack's worst member (consul #5567, one sick node fails hundreds)."""
    crowd = Crowd(seed=3)
    hosts = crowd.rack(8)
    crowd.run(5)
    deaf, others = hosts[0], hosts[1:]
    crowd.cut |= {(host.place, deaf.place) for host in others}
    crowd.run(120)
    assert deaf.told, "it has noticed"
    for host in others:
        assert all(host.sees(other.name) == "alive" for other in others if other is not host)
        downs = {getattr(fact, "host", "") for _, fact in host.told if type(fact).__name__ == "HostDown"}
        assert downs <= {deaf.name}
    blamed = {getattr(fact, "by", "") for host in others for _, fact in host.told if isinstance(fact, MemberSuspected)}
    assert deaf.name in blamed, "and it is known who suspected"

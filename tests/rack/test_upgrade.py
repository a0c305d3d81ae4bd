"""An upgrade in place on four real agents, one of which dies in the middle of it."""

from random import Random

import pytest

from tests.rack.sharing_rack import sharing_rack
from tests.rack.upgrades import GUARANTEED, OPPORTUNISTIC, SCHEDULER, Upgrade

pytestmark = [pytest.mark.rack, pytest.mark.xdist_group("rack")]


def test_a_gang_on_four_hosts_is_upgraded_whole_though_an_agent_dies() -> None:
    """Reference: AntMan §3.3, Job upgrade: "all the tasks of the job"."""
    with sharing_rack(4, 1, SCHEDULER) as rack:
        tried = Upgrade(rack, Random()).run()
    assert tried.wrong == [], tried
    assert tried.before in (GUARANTEED, OPPORTUNISTIC), f"agents that live and their ranks come to one word: {tried}"
    assert tried.after == GUARANTEED, f"with the dead agent back the log, the ranks and all hosts say so: {tried}"
    assert tried.upgrades <= 1, tried

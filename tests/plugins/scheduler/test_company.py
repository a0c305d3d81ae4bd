"""Jobs that take turns come to the same hosts."""

from functools import partial
from typing import Any

import pytest

from covey.core.ids import HostId
from plugins.scheduler.messages.spec import Pack
from plugins.scheduler.policy.place import in_company, spread
from tests.plugins.scheduler.rack import Rack, until
from tests.virtual_time import play

H1, H2, H3, H4 = (HostId(f"h{at}") for at in range(1, 5))


def runs(rack: Rack, job: str) -> bool:
    return bool(rack.job(job).state == "running")


NOW = {H1: 1, H2: 0, H3: 0, H4: 7}
"""The ranks of each host; a job of the group is on h1."""


@pytest.mark.parametrize(
    ("workers", "pack", "wanted"),
    [
        (1, "few", {H1: 1}),
        (2, "few", {H1: 1, H2: 1}),
        (6, "few", {H1: 2, H2: 2, H3: 2}),
        (32, "few", {H1: 10, H2: 10, H3: 10, H4: 2}),
        (3, "apart", {H1: 1, H2: 1, H3: 1}),
        (9, "host", {H1: 9}),
    ],
)
def test_workers_beyond_the_hosts_of_their_group_go_where_the_fewest_ranks_are(
    workers: int, pack: Pack, wanted: dict[HostId, int]
) -> None:
    assert spread(in_company(NOW, "night", {H1}, workers, pack), workers, pack) == wanted


def test_without_a_group_or_any_host_of_it_a_job_may_be_on_all() -> None:
    assert in_company(NOW, "", {H1}, 2, "few") == in_company(NOW, "night", (), 2, "few") == NOW
    assert in_company(NOW, "auto", (), 2, "few").keys() == {H2, H3}, "hosts without ranks"


def test_jobs_of_one_group_of_one_tenant_come_to_the_same_hosts() -> None:
    async def story() -> list[list[HostId]]:
        rack = Rack({"h1": 0, "h2": 0, "h3": 0})
        await rack.start()
        given: list[dict[str, Any]] = [
            {"share_host": "x", "tenant": "ann"},
            {"share_host": "x", "tenant": "ann"},
            {"share_host": "x", "tenant": "bob"},
            {"share_host": "x", "tenant": "ann"},
            {},
        ]
        found = []
        for number, more in enumerate(given, 1):
            spec = {"argv": ["train"], "workers": 1, "gpus_per_worker": 0, **more}
            await rack["h3"].call("submit", spec=spec)
            await until(partial(runs, rack, f"j{number}"))
            found.append([place.host for place in rack.job(f"j{number}").start.places])
        rack.check()
        rack.stop()
        return found

    first, second, other, third, plain = play(story())
    assert first == second == third
    assert other != first, "a name belongs to its tenant"
    assert plain not in (first, other)

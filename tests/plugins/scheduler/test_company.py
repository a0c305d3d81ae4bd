"""Jobs that take turns come to the same hosts."""

from functools import partial
from typing import Any

from covey.core.ids import HostId
from tests.plugins.scheduler.rack import Rack, until
from tests.virtual_time import play


def runs(rack: Rack, job: str) -> bool:
    return bool(rack.job(job).state == "running")


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

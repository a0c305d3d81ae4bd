"""Wall clocks are set by hours, forward and back: no duration that anybody sees changes with them."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from chaos.rackworld import SimRack
from covey.core.errors import Refused
from covey.core.ids import JobId
from tests.families import in_gate

HOUR_S = 3600.0
VIEWS = (
    *(
        "hosts",
        "gpus",
        "leader",
        "voters",
        "health",
        "jobs",
        "queue",
        "quotas",
        "slabs",
        "volumes",
        "tensors",
        "memory",
    ),
    *(
        "rack_slabs",
        "rack_volumes",
        "rack_tensors",
        "rack_shared_gpus",
        "rack_interference",
        "latencies",
        "budgets",
        "memory",
    ),
)
"""The names of commands that answer without being told of what."""


def durations(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Everything that is a number of seconds and no date, and where it is."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key.endswith("_s") and not key.endswith(("wall_s", "gpu_s")) and isinstance(inner, float | int):
                yield f"{path}/{key}", float(inner)
            yield from durations(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from durations(inner, f"{path}/{number}")


def views(rack: SimRack, name: str) -> dict[str, float]:
    """The durations in every view that this host answers without being told more."""
    found: dict[str, float] = {}
    for command in sorted(rack.agents[name].commands):
        if command.split(".")[1] in VIEWS:
            try:
                answer = rack.ask(name, command, {"all": True})
            except Refused:
                continue
            found |= dict(durations(msgspec.to_builtins(answer), command))
    return found


def job_of(rack: SimRack, name: str, job: JobId) -> Any:
    return next(view for view in rack.ask(name, "scheduler.jobs", {"all": True}) if view.id == job)


@pytest.mark.parametrize("step_h", in_gate(1, [((30.0, -3.0, 0.0),), ((5.0, 5.0, 5.0),), ((-9.0, -9.0, -9.0),)]))
def test_no_view_of_any_host_counts_by_a_clock_that_steps(step_h: tuple[float, ...]) -> None:
    with SimRack(21, hosts=3) as rack:
        rack.start()
        rack.settle()
        runs = rack.submit({"argv": ["sleeper", "600"], "workers": 2, "cwd": "/"}, "runs-for-long")
        waits = rack.submit({"argv": ["sleeper", "1"], "workers": 6, "cwd": "/"}, "waits-for-room")
        rack.pager("h2", "vol1", 1 << 18, 60.0)
        rack.run(20.0)
        before = {name: views(rack, name) for name in rack.hosts}
        began_s = rack.world.now
        for host, hours in zip(rack.hosts.values(), step_h, strict=True):
            host.clock.skew(1, hours * HOUR_S, 1.0)
        rack.run(10.0)
        ends = rack.submit({"argv": ["sleeper", "3"], "workers": 1, "gpus_per_worker": 0, "cwd": "/"}, "ends-soon-now")
        for host, hours in zip(rack.hosts.values(), step_h, strict=True):
            host.clock.skew(1, -hours * HOUR_S, 1.0)
        rack.until(lambda: job_of(rack, "h1", ends).state == "done", 30.0, "it ends")
        for name in rack.hosts:
            after, passed_s = views(rack, name), rack.world.now - began_s
            shown = [path for path in before[name] if path in after]
            assert len(shown) > 10 and any(path.startswith("scheduler.jobs") for path in shown)
            wrong = {path: after[path] for path in shown if abs(after[path] - before[name][path]) > passed_s + 2}
            assert not wrong
            for job in (runs, waits):
                assert 19 < job_of(rack, name, job).times.for_s < 21 + passed_s + 4
            assert 2.5 < job_of(rack, name, ends).times.for_s < 12, (
                "what it took, though it ended before it began by date"
            )

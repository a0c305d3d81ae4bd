"""docs/guides/day-two.md: each trouble is made in a simulated rack, its two commands are typed, and they print what the
page shows, until cause and next step are on the screen."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import cli.main
from chaos import faults
from chaos.rackworld import SimRack
from chaos.world.disk import SimFile
from plugins.scheduler.machine.host.gpu_uses import IDLE_S
from tests.docs.simulated_agentctl import agentctl
from tests.families import in_gate

PAGE = Path(__file__).parents[2] / "docs/guides/day-two.md"
QUIET = {"cwd": "/", "gpus_per_worker": 1}


def submit(rack: SimRack, name: str, argv: str, workers: int, tenant: str = "vision") -> None:
    spec = {"argv": argv.split(), "name": name, "tenant": tenant, "workers": workers, **QUIET}
    rack.submit(spec, f"day-two-{name}", on="h1")


def strike(rack: SimRack, fault: faults.AnyFault) -> None:
    faults.strike(rack.world, fault)


def a_job_that_fails(rack: SimRack) -> str:
    submit(rack, "prepare", "sleeper 3 7", workers=2)
    rack.run(20.0)
    wrote = bytearray(b"reading 12 shards\nFileNotFoundError: /data/shard-07\n")
    rack.hosts["h1"].disk.files["jobs/j1/rank0.log"] = SimFile(wrote, wrote)
    return "h1"


def a_host_that_dies(rack: SimRack) -> str:
    submit(rack, "train", "sleeper 5000", workers=8)
    rack.run(10.0)
    strike(rack, faults.Kill("host", "h4", 900.0))
    rack.run(20.0)
    return "h1"


def a_sick_gpu(rack: SimRack) -> str:
    submit(rack, "train", "sleeper 5000", workers=1)
    rack.run(10.0)
    strike(rack, faults.SickDevice("h3", "lost", 1, 900.0))
    rack.run(10.0)
    return "h1"


def used(rack: SimRack, host: str, number: int, program: str, memory_bytes: int, utilization: float) -> int:
    """Let a process of that host use one of its GPUs; returns its pid."""
    probes: Any = rack.hosts[host].probes
    pid = int(rack.hosts[host].find(program)[0].id.pid)
    probes.devices.use(probes.gpus()[number].uuid, pid, memory_bytes, utilization)
    return pid


def a_gpu_that_others_use(rack: SimRack) -> str:
    submit(rack, "notebook", "sleeper 5000", workers=1)
    rack.run(10.0)
    used(rack, "h1", 0, "sleeper", 10 << 30, 0.0)
    used(rack, "h3", 1, "agent", 12 << 30, 0.9)
    rack.run(IDLE_S + 30.0)
    return "h1"


def a_full_disk(rack: SimRack) -> str:
    strike(rack, faults.FillDisk("h3", for_s=900.0))
    rack.run(45.0)
    return "h1"


def a_leader_that_hangs(rack: SimRack) -> str:
    leader = rack.leader()
    assert leader is not None
    submit(rack, "train", "sleeper 5000", workers=1)
    strike(rack, faults.Pause(leader, 900.0))
    rack.run(20.0)
    return next(host for host in sorted(rack.hosts) if host != leader)


def a_flapping_link(rack: SimRack) -> str:
    others = tuple(host for host in rack.hosts if host != "h4")
    for _ in range(4):
        strike(rack, faults.Partition(("h4",), others, for_s=15.0))
        rack.run(40.0)
    return "h1"


def a_tenant_who_complains(rack: SimRack) -> str:
    rack.answer("h1", "scheduler.quota_set", {"tenant": "vision", "gpus": 2})
    submit(rack, "first", "sleeper 5000", workers=2)
    submit(rack, "second", "sleeper 5000", workers=2)
    rack.run(15.0)
    return "h1"


class Trouble(NamedTuple):
    make: Callable[[SimRack], str]
    """Makes it, and names the host where a person types."""
    lines: tuple[str, ...]
    """The commands, without `agentctl`."""
    wanted: tuple[str, ...]
    """What must be on the screen after them: the cause, and the next step."""


TROUBLES = {
    "A job fails": Trouble(a_job_that_fails, ("jobs -a", "job j1"), ("exited with 7", "agentctl logs j1")),
    "A host dies": Trouble(a_host_that_dies, ("hosts", "why j1"), ("gone", "taken back in", "hosts give-up gpu4")),
    "A GPU is sick": Trouble(a_sick_gpu, ("gpus", "why host/gpu3"), ("fallen off the bus", "gpus forget")),
    "A GPU is used by others, or by nobody": Trouble(
        a_gpu_that_others_use, ("gpus", "job j1"), ("which no job of the rack started", "ps -fp", "idle for")
    ),
    "A disk is full": Trouble(
        a_full_disk, ("hosts", "why host/gpu3"), ("is free in", "make room where NOTE says, on gpu3")
    ),
    "The leader hangs": Trouble(
        a_leader_that_hangs, ("voters", "why host/{leader}"), ("away", "leads", "suspected", "voters replace")
    ),
    "A link flaps": Trouble(a_flapping_link, ("hosts", "why host/gpu4"), ("4 times in the last 10 min", "next:")),
    "A tenant complains": Trouble(
        a_tenant_who_complains, ("quota", "why j2"), ("uses 2 of its quota of 2 by j1", "or the quota is raised")
    ),
}
"""Heading of the page -> the trouble."""


def transcript(heading: str) -> str:
    """What a person types and sees."""
    make, lines, _ = TROUBLES[heading]
    with SimRack(46, hosts=4, watched=False).start() as rack:
        rack.settle()
        rack.run(30.0)
        leader = str(rack.leader()).replace("h", "gpu")
        host = make(rack)
        typed = [f"agentctl {line.format(leader=leader)}" for line in lines]
        shown = [f"$ {line}\n{agentctl(rack, host, line)}" for line in typed]
    return "\n".join(text.rstrip() for text in shown)


def alike(text: str) -> list[str]:
    """The text without what differs from one day to the next: widths, times of day, ages."""
    text = re.sub(r"\d\d:\d\d:\d\d|\d\d-\d\d \d\d:\d\d", "TIME", text)
    text = re.sub(r"\d+(\.\d)? (s|min|h)( \d+ (s|min))?\b", "AGE", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def sections() -> dict[str, str]:
    found = re.findall(r"^## (.+)\n(?:(?!^## )(?:.*\n))*?```text\n((?:.*\n)*?)```", PAGE.read_text(), re.MULTILINE)
    return dict(found)


@pytest.mark.parametrize("heading", in_gate(2, TROUBLES))
def test_two_commands_show_the_cause_and_the_next_step(heading: str) -> None:
    _, lines, wanted = TROUBLES[heading]
    shown = transcript(heading)
    assert len(lines) <= 2 and [each for each in wanted if each not in " ".join(shown.split())] == [], shown
    assert alike(sections()[heading]) == alike(shown), shown


def test_the_page_shows_no_other_trouble_and_names_no_command_that_does_not_exist() -> None:
    assert list(sections()) == list(TROUBLES)
    for line in re.findall(r"`agentctl ([^`]+)`", PAGE.read_text()):
        cli.main.parse(line.split())

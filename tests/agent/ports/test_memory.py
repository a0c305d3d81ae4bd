"""Memory of a host, from copies of what kernels write."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from agent.ports.memory.stalls import FILE, watch
from covey.core.units import GIB, MIB
from covey.kernel.host_memory import available_bytes, memory_now
from plugins.memory.machine.lending.events import LenderTick, StoreFound
from plugins.memory.machine.lending.lender import Lender
from plugins.memory.policy.lending import Headroom

MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\nHugePages_Total:  0\n"
PSI = "some avg10=12.34 avg60=1.00 avg300=0.10 total=123\nfull avg10=3.00 avg60=0.00 avg300=0.00 total=5\n"


def machine(root: Path, **files: str) -> str:
    for name, text in {
        "proc/meminfo": MEMINFO,
        **{key.replace("__", "/"): text for key, text in files.items()},
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_a_machine_without_cgroups_has_what_the_kernel_says(tmp_path: Path) -> None:
    now = memory_now(machine(tmp_path, proc__pressure__memory=PSI))
    assert (now.total_bytes, now.available_bytes, now.pressure_some_avg10) == (16 * GIB, 8 * GIB, 12.34)


def test_a_machine_without_pressure_figures_has_no_pressure(tmp_path: Path) -> None:
    assert memory_now(machine(tmp_path)).pressure_some_avg10 == 0.0


def test_the_smallest_limit_up_the_tree_of_groups_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__self__cgroup="0::/lab/covey\n")
    group = tmp_path / "sys/fs/cgroup/lab/covey"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text(f"{1 * GIB}\n")
    (group.parent / "memory.max").write_text(f"{4 * GIB}\n")
    (group.parent / "memory.current").write_text(f"{3 * GIB}\n")
    (group.parent / "memory.stat").write_text(f"anon {2 * GIB}\ninactive_file {512 * MIB}\n")
    (group.parent / "memory.pressure").write_text(PSI)
    now = memory_now(root)
    assert (now.total_bytes, now.available_bytes) == (4 * GIB, GIB + 512 * MIB)
    assert now.pressure_some_avg10 == 12.34
    assert available_bytes(root) == GIB + 512 * MIB, "what a script takes of it is no more than its container has"


def test_where_a_group_is_slowed_down_is_a_limit_too(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__self__cgroup="0::/covey\n")
    group = tmp_path / "sys/fs/cgroup/covey"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{6 * GIB}\n")
    (group / "memory.high").write_text(f"{4 * GIB}\n")
    (group / "memory.current").write_text(f"{3 * GIB}\n")
    now = memory_now(root)
    assert (now.total_bytes, now.available_bytes) == (4 * GIB, GIB)
    (group / "memory.high").write_text("max\n")
    assert memory_now(root).total_bytes == 6 * GIB


def test_a_group_of_the_first_version_counts_too(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__self__cgroup="5:cpu,memory:/job\n0::/\n")
    group = tmp_path / "sys/fs/cgroup/memory/job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (group.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (group.parent / "memory.usage_in_bytes").write_text("1\n")
    now = memory_now(root)
    assert (now.total_bytes, now.available_bytes) == (2 * GIB, 0)


def test_limit_and_pressure_of_a_group_decide_what_its_host_lends(tmp_path: Path) -> None:
    """From the files to the offer: 4 GiB of limit, 3 in use, an eighth kept; then somebody waits for memory.
    Reference: Infiniswap §2.5.1."""
    root = machine(tmp_path, proc__self__cgroup="0::/covey\n")
    group = tmp_path / "sys/fs/cgroup/covey"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{4 * GIB}\n")
    (group / "memory.current").write_text(f"{3 * GIB}\n")
    lender = Lender(random.Random(1), random.Random(2).randbytes, Headroom(fraction=0.125), GIB, 10.0, 60.0)
    lender.handle(StoreFound("10.0.0.1:7", ()), 0.0)
    lender.handle(LenderTick(memory_now(root), 0), 1.0)
    assert lender.spare_bytes() == GIB - GIB // 2
    (group / "memory.pressure").write_text(PSI)
    lender.handle(LenderTick(memory_now(root), 0), 2.0)
    assert lender.spare_bytes() == 0


@pytest.mark.parametrize("text", ["", "MemTotal: x kB\n", "\xff\xfe", "MemTotal:\n"])
def test_figures_that_are_none_are_nothing_to_spare(tmp_path: Path, text: str) -> None:
    root = machine(tmp_path, proc__pressure__memory="some avg10=x\n", proc__self__cgroup="0::/../..\nnonsense\n")
    (tmp_path / "proc/meminfo").write_text(text)
    now = memory_now(root)
    assert (now.total_bytes, now.available_bytes, now.pressure_some_avg10) == (0, 0, 0.0)


def test_this_machine_has_memory() -> None:
    now = memory_now()
    assert 0 < now.available_bytes <= now.total_bytes
    assert 0.0 <= now.pressure_some_avg10 <= 100.0


def test_the_kernel_is_asked_to_say_when_tasks_wait_for_memory(tmp_path: Path) -> None:
    plain = tmp_path / "memory"
    plain.write_text(PSI)

    async def watched() -> tuple[str, str, str]:
        return watch(lambda: None, str(tmp_path / "none")), watch(lambda: None, str(plain)), watch(lambda: None)

    none, other, kernels = asyncio.run(watched())
    assert none.endswith("none: No such file or directory")
    assert "takes no trigger" in other, "a file that is not the kernel's"
    assert kernels == "" or not os.path.exists(FILE)


def test_what_a_kernel_killed_for_memory_is_counted_where_it_says_so(tmp_path: Path) -> None:
    assert memory_now(machine(tmp_path)).oom_kills is None
    assert memory_now(machine(tmp_path, proc__vmstat="pgfault 12\noom_kill 3\n")).oom_kills == 3

"""Racks whose hosts have names and addresses of their own, in network namespaces: as documents write them.

Each forms from names, trains a job over all hosts with known bits, and keeps pages in another host's memory.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.rack.agents import AgentRack
from chaos.rack.booted import why_not_booted
from chaos.rack.guard import group_roots, groups_below, started
from chaos.rack.hosts import IPV4, IPV6, SECOND, Laboratory, Network, why_not

pytestmark = [
    pytest.mark.rack,
    pytest.mark.xdist_group("hosts"),
    pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be made here: {why_not()}"),
]
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
STEPS = 150
BLOCKS = """
import time
import covey
import numpy as np

with covey.join() as job:
    for round in range(40):
        mine = np.full(300_000, job.rank + round, np.float32)  # a Block for each host, or more
        total = job.tensors.push_pull("g", mine)
        assert (total == 6 + 4 * round).all(), (round, total)
        job.step(round)
        time.sleep(0.1)
print("all sums are right")
"""
BORROW = """
from covey import RemoteMemory
from covey.core.units import MIB
import time
with RemoteMemory.open("v1", 64 * MIB) as memory:
    until = time.monotonic() + 6
    while time.monotonic() < until:
        for page in range(64):
            memory.write(page * 4096, bytes([page]) * 4096)
    assert all(memory.read(page * 4096, 4096) == bytes([page]) * 4096 for page in range(64))
"""
"""A script whose volume is hot for some seconds, so that its slab is worth a place on another host."""


@pytest.fixture(scope="module")
def expected() -> str:
    """The parameters that one process ends with."""
    command = [sys.executable, str(DIGITS), f"--steps={STEPS}", "--sequential=4"]
    return sha256(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def sha256(text: str) -> str:
    found = re.search(r"parameters sha256=([0-9a-f]{64})", text)
    assert found, text[-500:]
    return found[1]


@pytest.fixture(
    params=[
        pytest.param(((IPV4,), False), id="names, no default route"),
        pytest.param(((IPV4, SECOND), True), id="two addresses a host", marks=pytest.mark.long),
        pytest.param(((IPV6,), False), id="IPv6 alone", marks=pytest.mark.long),
    ]
)
def rack(request: pytest.FixtureRequest) -> Iterator[AgentRack]:
    networks, default_route = request.param
    with standing(networks, default_route) as lab:
        rack = AgentRack(lab)
        rack.start()
        rack.wait_up()
        yield rack


def standing(networks: tuple[Network, ...], default_route: bool) -> Laboratory:
    return Laboratory(4, networks=networks, default_route=default_route)


def test_a_rack_of_names_trains_and_lends_memory(rack: AgentRack, expected: str) -> None:
    third = rack.hosts[2]
    third.environ |= {name: os.environ[name] for name in ("OPENBLAS_CORETYPE",) if name in os.environ}
    assert third.shell("agentd --config /etc/covey/agent.toml --check").returncode == 0
    submit = f"agentctl submit --workers 4 --wait -- python {DIGITS} --steps={STEPS}"
    submitted = third.shell(submit, timeout_s=120)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    log = third.shell("agentctl logs j1 --rank 0")
    assert sha256(log.stdout) == expected, log.stdout + log.stderr
    hosts = {row["host"]: row["address"] for row in rack.agent(third).get("hosts").data}
    assert {name: address.partition("%")[0] for name, address in hosts.items()} == {
        host.name: hosts_address(host.address) for host in rack.hosts
    }, "everybody is known under the address that its seeds are reached from"
    (third.folder / "root" / "borrow.py").write_text(BORROW)
    train_with_several_owners(rack)
    borrowed = third.shell("COVEY_SOCKET=/run/covey/jobs.sock python borrow.py", timeout_s=90)
    assert borrowed.returncode == 0, borrowed.stderr
    slabs = rack.agent(third).get("slabs").data
    assert any(slab["state"] == "mapped" and slab["lender"] not in (None, "gpu3") for slab in slabs), slabs


def train_with_several_owners(rack: AgentRack) -> None:
    """Train a job whose own ranks sum its tables, each host one; every sum is right."""
    third = rack.hosts[2]
    (third.folder / "root" / "blocks.py").write_text(BLOCKS)
    submitted = third.shell("agentctl submit --workers 4 -- python blocks.py")
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.split()[0]
    owners: dict[str, tuple[str, str]] = {}

    def all_sum() -> bool:
        rows = [row for row in rack.agent(third).get("tensors").data if row["job"].partition("/")[0] == job]
        owners.update({row["job"]: (row["host"], row["by"]) for row in rows if row["rounds"] > 3})
        return len(owners) > 1

    end_s = time.monotonic() + 60
    while not all_sum():
        assert time.monotonic() < end_s, f"several hosts are to sum: {owners}"
        time.sleep(0.2)
    assert len({host for host, _ in owners.values()}) == len(owners), owners
    assert all(by.startswith("rank ") for _, by in owners.values()), owners
    waited = third.shell(f"agentctl wait {job}", timeout_s=120)
    assert waited.returncode == 0, waited.stdout + waited.stderr
    log = third.shell(f"agentctl logs {job} --rank 0").stdout
    assert "all sums are right" in log, log


def hosts_address(address: str) -> str:
    return f"[{address}]:7946" if ":" in address else f"{address}:7946"


KILLED = """
import os, signal, sys, time
from chaos.rack.booted import BootedHost
from chaos.rack.guard import started
from chaos.rack.hosts import Host, Laboratory

lab = Laboratory(2, kind={"booted": BootedHost, "plain": Host}[sys.argv[1]])
lab.__enter__()
host = lab.hosts["gpu1"]
entered = [host.popen(["sleep", "600"]) for _ in range(2)]
while len(sleeping := [pid for pid, line in host.processes().items() if "sleep 600" in line]) < 2:
    time.sleep(0.01)
os.kill(sleeping[0], signal.SIGSTOP)
pids = [lab._guard.pid, lab._switch.pid, *sleeping, *(process.pid for process in entered)]
pids += [pid for each in lab.hosts.values() for pid in (each.init.pid, each.init_pid, *each.processes())]
print(lab.folder, *(f"{pid}:{started(pid)}" for pid in pids), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["plain", pytest.param("booted", marks=pytest.mark.long)])
def test_nothing_of_a_laboratory_outlives_a_killed_driver(kind: str) -> None:
    """Nothing of it is left: hosts, what entered them (one is stopped, and its nsenter with it), control groups and
    folders."""
    if kind == "booted" and (trouble := why_not_booted()):
        pytest.skip(trouble)
    driver = subprocess.run([sys.executable, "-c", KILLED, kind], capture_output=True, text=True, check=False)
    assert driver.returncode == -signal.SIGKILL, driver.stderr
    folder, *pids = driver.stdout.split()
    assert len(pids) >= 10

    def left() -> list[str]:
        found = [pid for pid in pids if pid == f"{(number := int(pid.partition(':')[0]))}:{started(number)}"]
        found += [path for root in group_roots() for path in groups_below(root, Path(folder).name)]
        return found + [folder] * Path(folder).exists()

    until_s = time.monotonic() + 30
    while left() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not left()

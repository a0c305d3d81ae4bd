"""Racks whose hosts have names and addresses of their own, in network namespaces: as documents write them.

Each forms from names, trains a job over all hosts with known bits, and keeps pages in another host's memory.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.rack.agents import AgentRack
from chaos.rack.hosts import IPV4, IPV6, SECOND, Laboratory, Network, why_not

pytestmark = [
    pytest.mark.rack,
    pytest.mark.xdist_group("hosts"),
    pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be made here: {why_not()}"),
]
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
STEPS = 150
BORROW = """
from covey import RemoteMemory
from covey.units import MIB
import time
with RemoteMemory.open("v1", 64 * MIB) as memory:
    until = time.monotonic() + 6
    while time.monotonic() < until:
        for page in range(64):
            memory.write(page * 4096, bytes([page]) * 4096)
    assert all(memory.read(page * 4096, 4096) == bytes([page]) * 4096 for page in range(64))
"""
"""Hot for some seconds, so that its slab is worth a place on another host."""


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
        pytest.param(((IPV4, SECOND), True), id="two addresses a host"),
        pytest.param(((IPV6,), False), id="IPv6 alone"),
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
    borrowed = third.shell("COVEY_SOCKET=/run/covey/jobs.sock python borrow.py", timeout_s=90)
    assert borrowed.returncode == 0, borrowed.stderr
    slabs = rack.agent(third).get("slabs").data
    assert any(slab["state"] == "mapped" and slab["lender"] not in (None, "gpu3") for slab in slabs), slabs


def hosts_address(address: str) -> str:
    return f"[{address}]:7946" if ":" in address else f"{address}:7946"

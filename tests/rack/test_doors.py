"""A real agent whose HTTP is open to a network, and visitors who end their connections in every way: of another user of
its host, and of another host. None changes anything, whether the agent looks while they are there or afterwards.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.rack.agents import AgentRack, wait
from chaos.rack.hosts import Host, Laboratory, why_not
from tests.agent.api import visitor
from tests.agent.api.visitor import IMPATIENT
from tests.families import in_gate

pytestmark = [
    pytest.mark.rack,
    pytest.mark.xdist_group("hosts"),
    pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be made here: {why_not()}"),
]
PORT = 8470
HTTP = f'[http]\nbind = "0.0.0.0:{PORT}"\nnames = ["gpu1.rack.example.org"]\n'
OTHER = 64_999
TIMES = 3
HANGING_UP = {"01": "ESTABLISHED", "08": "CLOSE_WAIT"}
"""States of /proc/net/tcp in which the agent still has a connection."""


@pytest.fixture(scope="module")
def rack() -> Iterator[AgentRack]:
    """An agent on gpu1 alone; gpu2 has an address in the same network."""
    with Laboratory(2) as lab:
        rack = AgentRack(lab, voters=1, more_toml=HTTP)
        rack.start([rack.hosts[0]])
        wait(lambda: rack.agent(rack.hosts[0]).get("leader").data["leader"], lambda: rack.logs(rack.hosts[:1]), 60)
        yield rack


def curl(host: Host, path: str, name: str = "localhost") -> str:
    """The answer of gpu1 as that host gets it: status line and body."""
    ask = f"""
import socket
with socket.create_connection(("{host.lab.hosts["gpu1"].address}", {PORT}), 20) as c:
    c.sendall(b"GET {path} HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: close\\r\\n\\r\\n")
    found = b""
    while part := c.recv(65536):
        found += part
print(found.decode())
"""
    done = host.run(["python", "-c", ask])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("whose", ["another user of its host", "another host"])
@pytest.mark.parametrize("agent", in_gate(1, ["at work", "looks when they are gone"]))
def test_however_visitors_of_a_real_agent_leave_nothing_is_changed(rack: AgentRack, whose: str, agent: str) -> None:
    gpu1, gpu2 = rack.hosts
    if whose != "another host" and os.geteuid() != 0:
        pytest.skip("only root can be another user")
    where, uid = (gpu2, -1) if whose == "another host" else (gpu1, OTHER)
    before = rack.agent(gpu1).get("jobs", all=1).data
    address = "127.0.0.1" if where is gpu1 else gpu1.address
    patient = agent == "at work"
    pid = rack.agent_pid(gpu1)
    assert pid is not None
    if not patient:
        os.kill(pid, signal.SIGSTOP)
    try:
        words = [address, PORT, uid, TIMES, int(patient)]
        visited = where.run(["python", "-I", "-S", visitor.__file__, *map(str, words)], timeout_s=120)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert visited.returncode == 0, visited.stderr
    if patient:
        answers = [line for line in visited.stdout.splitlines() if line.startswith("polite")]
        assert len(answers) == 2 * TIMES
        assert all("HTTP/1.1 403" in line and "agentctl --agent unix:/run/covey/agent.sock" in line for line in answers)
    wait(lambda: not connections(gpu1), lambda: f"connections stay: {connections(gpu1)}", 60)
    submitted = gpu1.shell("agentctl submit --gpus 0 -- true")
    assert submitted.returncode == 0, submitted.stderr
    jobs = {row["id"] for row in rack.agent(gpu1).get("jobs", all=1).data}
    assert jobs - {row["id"] for row in before} == {submitted.stdout.split()[0]}, "the log has our own job and no other"
    refused = float(metric(gpu1, 'covey_http_refused_total{why="change"}'))
    assert refused >= len(IMPATIENT) - 4, "the visitors did get as far as an agent that refuses them"


def connections(host: Host) -> list[str]:
    """Connections of others with the agent's TCP address, as its kernel has them."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in host.shell(f"cat /proc/net/{name}").stdout.splitlines()]
    return [row[2] for row in rows if row[1].endswith(f":{PORT:04X}") and row[3] in HANGING_UP]


def metric(host: Host, name: str) -> str:
    lines = curl(host, "/metrics").splitlines()
    return next((line.rpartition(" ")[2] for line in lines if line.startswith(name)), "0")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here; next: apt install prometheus")
def test_what_prometheus_reads_by_a_dns_name_is_what_it_expects(rack: AgentRack) -> None:
    answer = curl(rack.hosts[1], "/metrics", "gpu1.of.some.example:8470")
    head, _, text = answer.replace("\r\n", "\n").partition("\n\n")
    assert "text/plain; version=0.0.4" in head
    told = subprocess.run(
        ["promtool", "check", "metrics"], input=text.strip() + "\n", capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")


def test_over_the_network_counters_are_read_by_any_name_and_nothing_else(rack: AgentRack) -> None:
    gpu1, gpu2 = rack.hosts
    for name in ("gpu1", "gpu1.rack.example.org:8470", gpu1.address):
        assert curl(gpu2, "/healthz", name).startswith("HTTP/1.1 200")
        assert "jobs cannot be read here" in curl(gpu2, "/v1/jobs?all=1", name)
    assert curl(gpu2, "/healthz", "evil.example").startswith("HTTP/1.1 403")
    assert curl(gpu2, "/metrics", "any.name.example").startswith("HTTP/1.1 200")
    gpu1.shell("sed 's/^names/read_open = true\\nnames/' /etc/covey/agent.toml > /run/covey/open.toml")
    checked = gpu1.shell("agentd --config /run/covey/open.toml --check")
    assert checked.returncode == 2 and f"other machines reach 0.0.0.0:{PORT}" in checked.stderr, checked
    reading = gpu2.shell(f"agentctl --agent http://{gpu1.address}:{PORT} hosts")
    assert reading.returncode == 4 and "agentctl login" in reading.stderr
    changing = gpu2.shell(f"agentctl --agent http://{gpu1.address}:{PORT} submit -- true")
    assert changing.returncode == 4 and "nothing can be changed over http" in changing.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_host_gets_nowhere_at_the_unix_socket(rack: AgentRack) -> None:
    """Neither the socket's mode lets him in, nor a mode that somebody opened."""
    gpu1 = rack.hosts[0]
    asks = f"""
import os, socket
os.setgroups([]); os.setresgid({OTHER}, {OTHER}, {OTHER}); os.setresuid({OTHER}, {OTHER}, {OTHER})
with socket.socket(socket.AF_UNIX) as c:
    try:
        c.connect("/run/covey/agent.sock")
    except PermissionError:
        print("not connected")
    else:
        c.sendall(b"POST /v1/jobs HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\nContent-Length: 2\\r\\n\\r\\n{{}}")
        print(c.recv(4096).decode())
"""
    assert gpu1.run(["python", "-c", asks]).stdout.strip() == "not connected"
    place = Path(gpu1.folder, "run")
    modes = {path: path.stat().st_mode & 0o777 for path in (place, place / "agent.sock")}
    for folder in (place, *place.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    (place / "agent.sock").chmod(0o666)
    try:
        said = gpu1.run(["python", "-c", asks])
        assert "403" in said.stdout and f"uid {OTHER} sent the request" in said.stdout, said
    finally:
        for path, mode in modes.items():
            path.chmod(mode)

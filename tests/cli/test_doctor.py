"""What `agentctl doctor` finds at a rack and at a host, and what it says about it."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.hosts import doctor, examined
from cli.hosts.doctor import Looked
from cli.hosts.examined import Finding
from covey.kernel import userfault
from tests.cli.conftest import FakeAgent
from tests.cli.rack_answers import Run
from tests.cli.rack_answers import run as run

WELL = Looked(4 << 20, {"covey.service": True}, "/opt/covey", "", 1, "madvise")
STATUS: dict[str, Any] = {
    "leader": "gpu1",
    "plugins": {"memory": {"state": "on", "why": ""}},
    "log": "",
    "lines": {"pages": "over RDMA, mlx5_0"},
    "seeds_unknown": {},
    "notes": [],
}
HOST: dict[str, Any] = {"host": "gpu1", "state": "alive", "plugins_failed": []}


def at_rack(*hosts: dict[str, Any], **status: Any) -> list[Finding]:
    return list(doctor.of_rack({**STATUS, **status}, [HOST, *hosts]))


def at_host(**looked: Any) -> list[Finding]:
    return [each for each in doctor.of_host(WELL._replace(**looked)) if each.state != "good"]


def test_a_rack_that_is_well_is_good() -> None:
    assert at_rack() == [
        Finding("rack", "good", "hosts alive: 1 of 1; gpu1 leads"),
        Finding("pages", "good", "over RDMA, mlx5_0"),
    ]
    assert at_host() == []


@pytest.mark.parametrize(
    ("status", "found"),
    [
        (
            {"leader": None},
            Finding("leader", "wrong", "none now: running jobs continue, changes wait", "agentctl voters"),
        ),
        (
            {"plugins": {"memory": {"state": "failed", "why": "the disk is full"}}},
            Finding("plugin memory", "wrong", "the disk is full", "agentctl status"),
        ),
        (
            {"seeds_unknown": {"gpu9:7946": "no such name"}},
            Finding("seed gpu9:7946", "wrong", "no such name", "getent hosts gpu9"),
        ),
        ({"log": "agent.toml names others"}, Finding("log", "wrong", "agent.toml names others")),
        (
            {"lines": {"swap": "not offered: no helper; next: systemctl enable --now covey-swap"}},
            Finding("swap", "lacking", "not offered: no helper", "systemctl enable --now covey-swap"),
        ),
        (
            {"lines": {"byte path": "interpreted: it was never compiled; next: python -m agent.compiled"}},
            Finding("byte path", "lacking", "interpreted: it was never compiled", "python -m agent.compiled"),
        ),
        ({"lines": {"byte path": "compiled"}}, Finding("byte path", "good", "compiled")),
        (
            {"lines": {"jobs of other users": "not possible: no starter; next: systemctl enable --now covey-starter"}},
            Finding(
                "jobs of other users", "lacking", "not possible: no starter", "systemctl enable --now covey-starter"
            ),
        ),
    ],
)
def test_what_an_agent_says_is_found_with_its_next_step(status: dict[str, Any], found: Finding) -> None:
    assert found in at_rack(**status)


def test_hosts_that_are_missing_or_have_lost_a_plugin_are_named() -> None:
    gone = {"host": "gpu2", "state": "gone", "plugins_failed": []}
    away = {"host": "gpu3", "state": "away", "plugins_failed": []}
    lame = {"host": "gpu4", "state": "alive", "plugins_failed": ["memory"]}
    full = {"host": "gpu5", "state": "alive", "plugins_failed": [], "no_room": "its log waits for room"}
    found = {(each.what, each.state) for each in at_rack(gone, away, lame, full)}
    assert found >= {("host gpu2", "wrong"), ("host gpu3", "lacking"), ("host gpu4", "wrong"), ("host gpu5", "wrong")}


def test_what_is_wrong_with_a_host_that_is_alive_is_found_with_what_to_type() -> None:
    sick = {"host": "gpu2", "state": "alive", "plugins_failed": [], "troubles": [{"what": "a twin", "next": "rename"}]}
    assert Finding("host gpu2", "wrong", "a twin", "rename") in at_rack(sick)


@pytest.mark.parametrize(
    ("looked", "what", "state"),
    [
        ({"send_bytes_max": 212992}, "sockets", "lacking"),
        ({"units": {"covey-swap.service": False}}, "covey-swap.service", "wrong"),
        ({"no_faults": "Function not implemented"}, "arrays", "lacking"),
        ({"ptrace_scope": 2}, "tensors", "lacking"),
        ({"huge_pages": "never"}, "huge pages", "lacking"),
    ],
)
def test_what_a_host_lacks_is_found_with_its_next_step(looked: dict[str, Any], what: str, state: str) -> None:
    (found,) = at_host(**looked)
    assert (found.what, found.state) == (what, state) and found.next


def test_what_cannot_be_seen_is_nobodys_fault() -> None:
    assert at_host(send_bytes_max=None, units={}, ptrace_scope=None, huge_pages=None) == []


def test_a_host_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def refuses() -> userfault.OwnFaults:
        raise OSError(1, "not permitted")

    monkeypatch.setattr(userfault, "opened", refuses)
    written("proc/sys/net/core/wmem_max", "212992\n")
    written("proc/sys/kernel/yama/ptrace_scope", "1\n")
    written("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    for unit, text in (("covey.service", "of before"), ("covey-swap.service", f"of {tmp_path}/venv/bin")):
        written(f"etc/systemd/system/{unit}", text)
        written(f"venv/share/covey/{unit}", "of /opt/covey/bin")
    assert doctor.look(tmp_path, tmp_path / "venv") == Looked(
        212992,
        {"covey.service": False, "covey-swap.service": True},
        str(tmp_path / "venv"),
        "not permitted",
        1,
        "madvise",
    )
    assert doctor.look(tmp_path / "none", tmp_path).units == {}


def test_it_is_printed_the_worst_last_and_ends_with_1_if_anything_is_wrong(
    run: Run, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "look", lambda root, prefix: WELL)
    monkeypatch.setattr(examined, "of_process_limits", lambda root, pid, hosts: ())
    agent.replies["GET /v1/status"] = STATUS
    agent.replies["GET /v1/hosts"] = [HOST]
    agent.replies["GET /v1/gpus"] = agent.replies["GET /v1/links"] = []
    agent.replies["GET /v1/voters"] = {"voters": ["gpu1"], "rows": []}
    code, out, _ = run("doctor")
    assert (code, out.splitlines()[0]) == (0, "good     rack: hosts alive: 1 of 1; gpu1 leads")
    agent.replies["GET /v1/status"] = {**STATUS, "leader": None, "notes": ["slow; next: do it"]}
    code, out, _ = run("doctor")
    assert code == 1
    assert out.splitlines()[-5:-1] == [
        "lacking  note: slow",
        "           next: do it",
        "wrong    leader: none now: running jobs continue, changes wait",
        "           next: agentctl voters",
    ]
    code, out, _ = run("doctor", "--json")
    assert code == 1
    assert {"what": "note", "state": "lacking", "why": "slow", "next": "do it"} in json.loads(out)["data"]


def test_a_host_that_is_alive_and_does_not_answer_is_wrong(
    run: Run, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.replies["GET /v1/status"] = STATUS
    agent.replies["GET /v1/hosts"] = [HOST, {**HOST, "host": "gpu2"}, {**HOST, "host": "gpu3", "state": "away"}]
    agent.replies["GET /v1/voters"] = {"voters": ["gpu1"], "rows": []}
    agent.replies["GET /v1/gpus"] = agent.replies["GET /v1/links"] = []
    missing = ("gpu1", "gpu2", "gpu3")
    agent.unanswered = [{"host": host, "why": "no answer within 3 s", "age_s": None} for host in missing]
    monkeypatch.setattr(examined, "of_driver", lambda *_: pytest.fail("what it lists is not known"))
    code, out, _ = run("doctor")
    assert code == 1
    assert "wrong    host gpu2: its gossip works, but its agent did not answer: no answer within 3 s" in out
    assert "host gpu3: alive" not in out

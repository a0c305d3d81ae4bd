"""The files of a rack: written once, readable, and a person's changes stay."""

import json
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.client import REFUSED, USAGE, AgentctlError, rack_addresses
from cli.rack import files as rack_files
from cli.rack import ports as rack_ports
from cli.rack.files import RackHost, hosts_of, locked, make_run_dirs, run_root, tail, write_rack
from cli.rack.ports import Claims


def generate(directory: Path, hosts: int, gpus: int, environ: dict[str, str]) -> list[RackHost]:
    """Generate the files of one start of a rack that is over."""
    with Claims() as claims:
        return rack_files.generate(directory, hosts, gpus, environ, claims)


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """An environment with a short place for sockets, like XDG_RUNTIME_DIR."""
    with tempfile.TemporaryDirectory(prefix="cv") as folder:
        yield {"XDG_RUNTIME_DIR": folder}


def parsed(host: RackHost) -> dict[str, dict[str, object]]:
    return tomllib.loads(host.config.read_text())


def test_every_host_has_its_own_name_ports_state_and_sockets(tmp_path: Path, environ: dict[str, str]) -> None:
    hosts = generate(tmp_path / ".rack", 4, 2, environ)
    assert [host.name for host in hosts] == ["gpu1", "gpu2", "gpu3", "gpu4"]
    binds = [bind for host in hosts for bind in (host.gossip, host.control, host.http)]
    assert len(set(binds)) == 12
    assert all(bind.startswith("127.0.0.1:") and int(bind[10:]) in rack_ports.PORTS for bind in binds)
    assert len({host.state_dir for host in hosts}) == len({host.run_dir for host in hosts}) == 4
    for host in hosts:
        tree = parsed(host)
        assert tree["leader"]["voters"] == ["gpu1", "gpu2", "gpu3"]
        assert tree["gpus"] == {"simulated": 2, "simulated_memory": "16 GiB"}
        assert tree["gossip"]["seeds"] == [other.gossip for other in hosts[:3]]
        assert tree["gossip"]["key_file"] == str(tmp_path / ".rack" / "gossip.key")


def test_the_daemon_understands_what_is_generated(tmp_path: Path, environ: dict[str, str]) -> None:
    config = pytest.importorskip("agent.config")
    keys = pytest.importorskip("agent.keys")
    for host in generate(tmp_path / ".rack", 2, 3, environ):
        read = config.load(str(host.config), {})
        assert (read.name, read.advertise, read.gpus.simulated) == (host.name, "127.0.0.1", 3)
        assert len(keys.load(Path(read.gossip.key_file), make=False)) == 1


def test_devices_of_cores_are_the_machines_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("agent.config")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5, 7, 8})
    with Claims() as claims:
        hosts = rack_files.generate(tmp_path / ".rack", 2, 2, {}, claims, "cpu")
        for host in hosts:
            devices = config.load(str(host.config), {}).gpus.cpu
            assert [device.core_numbers for device in devices] == [(2, 3), (5, 7, 8)]
            assert {device.memory_bytes for device in devices} == {2 << 30}
        for too_many in (0, 6):
            with pytest.raises(AgentctlError) as caught:
                rack_files.generate(tmp_path / str(too_many), 1, too_many, {}, claims, "cpu")
            assert caught.value.code == USAGE and "5 cores" in caught.value.why


def test_the_key_is_secret_and_differs_from_rack_to_rack(tmp_path: Path, environ: dict[str, str]) -> None:
    texts = []
    for name in ("a", "b"):
        generate(tmp_path / name, 1, 0, environ)
        key = tmp_path / name / "gossip.key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        texts.append(key.read_text())
    assert texts[0] != texts[1]


def test_a_persons_changes_stay(tmp_path: Path, environ: dict[str, str]) -> None:
    first = generate(tmp_path, 2, 2, environ)
    changed = first[0].config.read_text().replace('lend = "128 MiB"', 'lend = "1 GiB"  # mine')
    first[0].config.write_text(changed)
    key = (tmp_path / "gossip.key").read_text()
    assert generate(tmp_path, 2, 8, environ) == first
    assert first[0].config.read_text() == changed
    assert (tmp_path / "gossip.key").read_text() == key


def test_a_rack_that_grows_keeps_its_voters_and_finds_the_old_hosts(tmp_path: Path, environ: dict[str, str]) -> None:
    old = generate(tmp_path, 3, 2, environ)
    grown = generate(tmp_path, 5, 2, environ)
    assert grown[:3] == old
    assert parsed(grown[4])["leader"]["voters"] == ["gpu1", "gpu2", "gpu3"]
    assert set(parsed(grown[4])["gossip"]["seeds"]) <= {host.gossip for host in old}  # type: ignore[call-overload]
    assert generate(tmp_path, 2, 2, environ) == old[:2]


@pytest.mark.parametrize(("hosts", "voters"), [(1, 1), (2, 1), (3, 3), (12, 3)])
def test_voters_are_an_odd_number(tmp_path: Path, environ: dict[str, str], hosts: int, voters: int) -> None:
    found = generate(tmp_path, hosts, 0, environ)
    assert len(found) == hosts
    assert len(parsed(found[-1])["leader"]["voters"]) == voters  # type: ignore[arg-type]
    assert [host.name for host in hosts_of(tmp_path)] == [f"gpu{n}" for n in range(1, hosts + 1)]


def test_ports_in_use_are_not_taken(tmp_path: Path, environ: dict[str, str]) -> None:
    wanted = int(generate(tmp_path / "a", 1, 0, environ)[0].http.rpartition(":")[2])
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", wanted))
        busy.listen()
        assert not rack_ports.is_free(f"127.0.0.1:{wanted}")
        with Claims() as claims:
            assert wanted not in rack_ports.free_ports(tmp_path / "a", 50, set(), claims)
    assert rack_ports.is_free(f"127.0.0.1:{wanted}")


def test_two_racks_that_start_at_once_get_different_ports_before_any_is_bound(tmp_path: Path) -> None:
    with Claims() as first, Claims() as second:
        ours = rack_ports.free_ports(tmp_path, 12, set(), first)
        theirs = rack_ports.free_ports(tmp_path, 12, set(), second)
        assert len({*ours, *theirs}) == 24
        assert not second.take(ours[0])
    with Claims() as third:
        assert third.take(ours[0]), "a claim ends with its start"


def test_too_few_free_ports_are_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rack_ports, "PORTS", range(16_000, 16_002))
    with Claims() as claims, pytest.raises(AgentctlError, match="3 free ports are needed"):
        rack_ports.free_ports(tmp_path, 3, set(), claims)


def test_sockets_get_a_short_path_whatever_the_environment_says(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    for base in (str(deep), "/nonexistent", ""):
        root = run_root(tmp_path, {"XDG_RUNTIME_DIR": base})
        assert root.parent == Path("/tmp")
        assert str(os.geteuid()) in root.name
    assert run_root(tmp_path / "a", {}) != run_root(tmp_path / "b", {})


def test_a_socket_folder_of_somebody_else_is_refused(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = generate(tmp_path, 1, 0, environ)
    make_run_dirs(hosts)
    assert stat.S_IMODE(hosts[0].run_dir.stat().st_mode) == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(AgentctlError) as caught:
        make_run_dirs(hosts)
    assert caught.value.code == REFUSED


@pytest.mark.parametrize("text", ["name = ", "name = 3", "", 'name = "a"\nstate_dir = "b"'])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "gpu1").mkdir()
    (tmp_path / "gpu1" / "agent.toml").write_text(text)
    with pytest.raises(AgentctlError) as caught:
        hosts_of(tmp_path)
    assert caught.value.code == USAGE
    assert "gpu1/agent.toml" in caught.value.what


def test_a_copied_rack_does_not_touch_the_one_it_was_copied_from(tmp_path: Path, environ: dict[str, str]) -> None:
    generate(tmp_path / "a" / ".rack", 2, 2, environ)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(AgentctlError, match="copied or moved"):
        hosts_of(tmp_path / "b" / ".rack")
    assert len(hosts_of(tmp_path / "a" / ".rack")) == 2


@pytest.mark.parametrize("hosts", [0, -1, 65])
def test_a_rack_has_a_sensible_number_of_hosts(tmp_path: Path, environ: dict[str, str], hosts: int) -> None:
    with pytest.raises(AgentctlError):
        generate(tmp_path, hosts, 2, environ)


def test_agentctl_finds_the_sockets_in_rack_json(tmp_path: Path, environ: dict[str, str]) -> None:
    hosts = generate(tmp_path, 2, 2, environ)
    write_rack(tmp_path, hosts, {"gpu1": (77, 123)})
    assert rack_addresses(tmp_path / "rack.json") == [host.address for host in hosts]
    rows = json.loads((tmp_path / "rack.json").read_text())["hosts"]
    assert [(row["pid"], row["started"]) for row in rows] == [(77, 123), (0, 0)]


def test_one_start_or_stop_at_a_time_and_the_lock_goes_away(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with locked(tmp_path):
            order.append("second")

    with locked(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path), pytest.raises(AgentctlError, match="busy"), locked(tmp_path, patience_s=0.0):
        pass


def test_the_tail_of_a_log_is_short_and_an_absent_one_is_empty(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xff\n" + b"\n".join(b"line %d" % n for n in range(5000)))
    assert tail(tmp_path / "log", 2) == "line 4998\nline 4999"
    assert tail(tmp_path / "absent") == ""

"""`agentctl login`: where the key and the certificate go, a request that is signed on another machine, and what is no
certificate. What TLS does with them: `tests/agent/api/test_tls.py`.
"""

import io
import ssl
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from agent.authority.certificates import Named, requested_key
from agent.authority.service import HostAuthority
from agent.ports.clock import RealClock
from cli import tls
from cli.client import FAILED, REFUSED, USAGE, Agent, AgentctlError, checked_address
from cli.files import put, replacing
from tests.cli.conftest import FakeAgent
from tests.cli.rack_answers import Run
from tests.cli.rack_answers import run as run
from tests.cli.test_client import write_rack

RACK = HostAuthority(lambda: (b"k" * 32,), RealClock())


def certified(body: dict[str, Any]) -> dict[str, Any]:
    """What an agent answers to ann's request."""
    key, until_s = requested_key(body["csr"]), time.time() + body["days"] * 86_400
    assert key is not None and body.keys() == {"csr", "days"}
    certificate = RACK.certified(key, Named("ann", 1001, until_s), b"s" * 16)
    return {"user": "ann", "uid": 1001, "until_wall_s": until_s, "certificate": certificate, "authority": RACK.pem}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "covey"


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_a_login_leaves_a_key_that_nobody_else_reads_and_that_was_not_sent(
    run: Run, agent: FakeAgent, folder: Path
) -> None:
    agent.replies["POST /v1/login"] = certified
    code, out, _ = run("login", "--days", "7")
    assert code == 0 and out.startswith("ann (uid 1001) until ")
    assert modes(folder) == {"login.pem": 0o600, "authority.pem": 0o644}
    text = (folder / "login.pem").read_text()
    assert "PRIVATE KEY" in text and not tls.is_over(folder / "login.pem")
    assert "PRIVATE" not in str(agent.asked) and agent.asked[-1][1]["days"] == 7
    tls.context("https://gpu1:8470")
    (folder / "login.pem").write_text(tls.head("ann", 1_000_000.0) + text)
    with pytest.raises(AgentctlError, match="out of date since 1970-01-12"):
        Agent(["https://127.0.0.1:1"]).get("hosts")


def test_a_request_is_signed_on_a_host_and_its_key_stays_where_it_was_made(
    run: Run, agent: FakeAgent, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.replies["POST /v1/login"] = certified
    code, request, _ = run("login", "--request", "-")
    assert code == 0 and requested_key(request) is not None and modes(folder) == {"login.key": 0o600}
    monkeypatch.setattr("sys.stdin", io.StringIO(request))
    code, signed, _ = run("login", "--sign", "-", "--days", "2")
    assert code == 0 and modes(folder) == {"login.key": 0o600}, "the host keeps nothing"
    other = folder / "other"
    other.write_text(signed.replace("ann", "a\\nb"))
    assert run("login", "--take", str(other))[0] == FAILED
    monkeypatch.setattr("sys.stdin", io.StringIO(signed))
    assert run("login", "--take", "-")[0] == 0
    other.unlink()
    assert modes(folder) == {"login.pem": 0o600, "authority.pem": 0o644}
    tls.context("https://gpu1:8470")


def test_what_is_no_certificate_of_the_own_key_is_not_taken(
    run: Run, agent: FakeAgent, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.replies["POST /v1/login"] = certified
    file = folder.parent.parent / "signed"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\x1f\x8b\xff"), "utf-8"))
    code, _, said = run("login", "--take", "-")
    assert code == FAILED and "cannot read -" in said and "next:" in said
    for text in ("", "{}", "[1]", "-----BEGIN CERTIFICATE-----", "\x00", '{"user": "ann", "uid": "x"}'):
        file.write_text(text)
        code, _, said = run("login", "--take", str(file))
        assert code == FAILED and "this is no certificate" in said and "next:" in said
    assert run("login", "--request", str(file))[0] == 0
    _, signed, _ = run("login", "--sign", str(file))
    assert run("login", "--request", str(file))[0] == 0, "another key"
    file.write_text(signed)
    code, _, said = run("login", "--take", str(file))
    assert code == REFUSED and "it is not for the key in" in said and modes(folder) == {"login.key": 0o600}
    agent.replies["POST /v1/login"] = {"certificate": 5}
    assert run("login")[0] == FAILED and run("login", "--sign", str(folder / "none"))[0] == FAILED
    assert run("login", "--take", "-", "--sign", "-")[0] == USAGE
    assert modes(folder) == {"login.key": 0o600}


def test_whoever_names_hosts_of_tls_logs_in_again_at_this_hosts_socket(
    run: Run, agent: FakeAgent, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COVEY_AGENT=https://... saves typing, and the certificate of yesterday is no way to that of today."""
    agent.replies["POST /v1/login"] = certified
    monkeypatch.setenv("COVEY_AGENT", "https://127.0.0.1:1,https://127.0.0.1:2")
    write_rack(Path.cwd(), str(agent.path))
    assert run("login")[0] == 0 and modes(folder) == {"login.pem": 0o600, "authority.pem": 0o644}
    for known in (("--agent", "https://127.0.0.1:1", "login"), ("--agent", "127.0.0.1:1", "login")):
        code, _, said = run(*known)
        assert code == REFUSED and "login needs the unix socket of a host" in said and "next:" in said
    monkeypatch.setenv("COVEY_AGENT", f"https://127.0.0.1:1,{agent.address}")
    (folder / "login.pem").unlink()
    assert run("login")[0] == 0, "of several agents it asks the one at a socket"


def test_what_interrupts_a_write_leaves_no_key_and_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "login.pem"
    put(path, "before", 0o600)
    for interruption in (KeyboardInterrupt, OSError):
        with pytest.raises(interruption), replacing(path, 0o600) as file:
            file.write(b"PRIVATE KEY")
            raise interruption
    assert path.read_text() == "before" and modes(tmp_path) == {"login.pem": 0o600}
    (tmp_path / "theirs").write_text("kept")
    path.unlink()
    path.symlink_to(tmp_path / "theirs")
    put(path, "mine", 0o640)
    assert not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert (tmp_path / "theirs").read_text() == "kept", "a link is replaced, and not written through"


def test_why_a_host_refuses_a_certificate_is_told_from_its_alert(folder: Path) -> None:
    for reason, why in (
        ("SSLV3_ALERT_BAD_CERTIFICATE", "by that host's clock it is not good yet, or it is no user's: compare clocks"),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "by that host's clock it is out of date"),
        ("TLSV1_ALERT_UNKNOWN_CA", "it is of another rack"),
    ):
        error = ssl.SSLError(1, reason)
        error.reason = reason
        words = tls.refused("https://gpu1:8470", error)
        assert words is not None and why in words.why and tls.refused("gpu1:8470", error) is None


def test_an_address_of_tls_is_one() -> None:
    assert checked_address(" https://gpu1:8470/ ") == "https://gpu1:8470"
    for wrong in ("https://", "https://gpu1", "https://gpu1:x", "ftp://gpu1:1:2x"):
        with pytest.raises(AgentctlError):
            checked_address(wrong)

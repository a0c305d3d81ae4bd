"""`agentctl bundle`: one file of what helps whoever looks from afar, and no secret in it."""

import json
import os
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cli.hosts.scrubbed import Scrubber, arguments_in
from covey.core.hidden import HIDDEN, without_secret_values
from tests.cli.conftest import FakeAgent, job_view
from tests.cli.rack_answers import Run
from tests.cli.rack_answers import run as run

JOINS = "covey-bqcwktlfld77pndjn4k76guaj27fujbovvhehzqkrciimqk3"
"""A token that lets a host join."""
KEY = "5eed" * 16
"""A gossip key of the rack."""
TOKEN = "hf_PlantedTokenOfSomebody12345"
PASSWORD = "correct-horse-battery"
SECRETS = (KEY, TOKEN, PASSWORD)
JOURNAL = f"""\
2026-11-29T11:52:16 gpu1 covey-agent[159]: agent started boot=1795952970 plugins=["memory"]
2026-11-29T11:52:17 gpu1 covey-agent[159]: cannot fetch url=https://ann:{PASSWORD}@mirror.example.org/data token={TOKEN}
2026-11-29T11:52:18 gpu1 covey-agent[159]: a line that should have no key {KEY} in it
"""


@pytest.fixture
def planted(agent: FakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with secrets in every place that a bundle looks at. Returns the folder of its settings."""
    argv = [
        "python",
        "train.py",
        "--hf-token",
        TOKEN,
        f"--password={PASSWORD}",
        "--url",
        f"https://u:{PASSWORD}@x",
        KEY,
    ]
    one = job_view(id="j7", argv=argv, name=f"train token={TOKEN}", reason=f"exit 1: Authorization: Bearer {TOKEN}")
    why = {"wall_s": 1.0, "host": "gpu1", "subject": "j7", "event": "failed", "key": "", "reason": f"bad {PASSWORD}"}
    status = {"boot": 2, "up_s": 6.0, "plugins": {}, "notes": [f"next: curl -H 'Authorization: Bearer {TOKEN}'"]}
    agent.replies |= {
        "GET /v1/status": status, "GET /v1/jobs": [one], "GET /v1/why/j7": [why], "GET /metrics": {KEY: 1},
        "GET /v1/gpus": [], "GET /v1/links": [], "GET /v1/voters": {"voters": ["gpu1"], "rows": []},
        "GET /v1/hosts": [{"host": "gpu1", "state": "alive", "plugins_failed": [], "gossip_key": KEY}],
    }  # fmt: skip
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "gossip.key").write_text(f"# a key\n{KEY}\n")
    (etc / "agent.toml").write_text(
        f'name = "gpu1"\n# was: {KEY}, password: {PASSWORD}\n[http]\nnames = ["x"] # {TOKEN}\n'
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("DB_PASSWORD", PASSWORD)

    def said(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        out = JOURNAL if command[0] == "journalctl" else f"key = {KEY}\nname = 'gpu1' # default\n"
        return subprocess.CompletedProcess(command, 0, out, "")

    monkeypatch.setattr("cli.hosts.bundle.subprocess.run", said)
    return etc


def read(path: Path) -> dict[str, str]:
    """Name of each file, without the folder -> its text."""
    with tarfile.open(path) as archive:
        found = {member.name.partition("/")[2]: archive.extractfile(member) for member in archive.getmembers()}
        return {name: file.read().decode() for name, file in found.items() if file is not None}


def test_what_helps_is_in_it(run: Run, planted: Path, tmp_path: Path) -> None:
    code, out, _ = run("bundle", "b.tar.gz", "--config", str(planted / "agent.toml"))
    files = read(tmp_path / "b.tar.gz")
    wanted = {"status.json", "doctor.json", "hosts.json", "jobs.json", "why/j7.json", "metrics.txt", "README.txt"}
    assert code == 0 and set(files) >= wanted | {"agent.toml", "config.toml", "journal.txt", "host.json"}
    assert "agent started boot=1795952970" in files["journal.txt"]
    (one,) = json.loads(files["jobs.json"])["data"]
    assert (one["id"], one["argv"]) == ("j7", ["python", "(7 arguments left out)"])
    assert 'name = "gpu1"' in files["agent.toml"]
    assert "b.tar.gz: " in out and "look through it" in out


def test_no_secret_is_in_it_wherever_one_was(run: Run, planted: Path, tmp_path: Path) -> None:
    run("bundle", "b.tar.gz", "--config", str(planted / "agent.toml"))
    files = read(tmp_path / "b.tar.gz")
    found = [(name, secret) for name, text in files.items() for secret in SECRETS if secret in text or secret in name]
    assert found == []
    assert sum(HIDDEN in text for text in files.values()) >= 7, "they were there to be hidden"


def test_it_finds_secrets_that_nothing_named(
    run: Run, planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks are all that is known of another user's environment, and of a key that this user may not read."""
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("DB_PASSWORD")
    (planted / "gossip.key").unlink()
    run("bundle", "b.tar.gz", "--config", str(planted / "agent.toml"))
    whole = "\n".join(read(tmp_path / "b.tar.gz").values())
    assert [secret for secret in SECRETS if secret in whole] == []


def test_only_its_writer_may_read_it_and_no_file_behind_a_link_is_written(
    run: Run, planted: Path, tmp_path: Path
) -> None:
    """Somebody has put a link where root is about to write, and a file that others may read."""
    theirs, path = tmp_path / "theirs", tmp_path / "b.tar.gz"
    for is_link in (True, False):
        theirs.write_text("whole")
        if is_link:
            path.symlink_to(theirs)
        else:
            os.chmod(path, 0o644)
        run("bundle", "b.tar.gz", "--config", str(planted / "agent.toml"))
        assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600 and not path.is_symlink()
        assert theirs.read_text() == "whole" and "status.json" in read(path)
        assert sorted(each.name for each in tmp_path.glob(".b.tar*")) == []


def test_it_is_written_also_when_no_agent_answers(run: Run, agent: FakeAgent, planted: Path, tmp_path: Path) -> None:
    address = "unix:" + str(tmp_path / "nobody.sock")
    code, out, _ = run("--agent", address, "bundle", "b.tar.gz", "--config", str(planted / "agent.toml"))
    assert code == 0 and "without what the agent says: no agent answers" in out
    assert {"journal.txt", "agent.toml", "host.json", "README.txt"} <= set(read(tmp_path / "b.tar.gz"))


def test_a_place_that_cannot_be_written_is_said(run: Run, planted: Path) -> None:
    code, _, err = run("bundle", "/nowhere/b.tar.gz", "--config", str(planted / "agent.toml"))
    assert code == 1 and "cannot write /nowhere/b.tar.gz" in err and "next:" in err
    os.mkfifo("pipe")
    for file, why in (("/", "a folder"), (".", "a folder"), ("pipe", "no plain file")):
        code, out, err = run("bundle", file, "--config", str(planted / "agent.toml"))
        assert (code, out, len(err.splitlines())) == (1, "", 3) and "cannot write /" in err and why in err
    assert stat.S_ISFIFO(os.lstat("pipe").st_mode), "what stands there stays"


@pytest.mark.parametrize(
    "text",
    [
        "loss=0.25 step 1000, host gpu1 at 10.77.0.1:7946, boot 1795952970",
        "GPU-8f2b1c3a-1d2e-4f5a-9b8c-7d6e5f4a3b2c is degraded",
        "/opt/covey/lib/python3.11/site-packages/agent/main.py line 12",
        "agentd --config /etc/covey/agent.toml --check",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Scrubber().text(text) == text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("AWS_SECRET_ACCESS_KEY=abc/def+x", f"AWS_SECRET_ACCESS_KEY={HIDDEN}"),
        ("--api-key sesame --epochs 3", f"--api-key {HIDDEN} --epochs 3"),
        ('{"db_password": "se same"}', f'{{"db_password": {HIDDEN}}}'),
        ("psql://ann:sesame@db/x", f"psql://{HIDDEN}@db/x"),
        ("Authorization: Bearer abcdef123", f"Authorization: {HIDDEN}"),
        ("ghp_0123456789abcdef", HIDDEN),
        (f"echo {JOINS} | agentctl", f"echo {HIDDEN} | agentctl"),
        (f"key {KEY} here", f"key {HIDDEN} here"),
        ("q8Zk2LrT0pXw7VbN4mYc1HsD", HIDDEN),
    ],
)
def test_what_looks_like_a_secret_goes(text: str, left: str) -> None:
    named = without_secret_values({"HF_TOKEN": text, "TEXT": text, "EMPTY_KEY": ""})
    assert named == {"EMPTY_KEY": "", "HF_TOKEN": HIDDEN, "TEXT": left}
    assert Scrubber().text(text) == left


def test_arguments_of_jobs_are_known_as_secrets_elsewhere() -> None:
    found = arguments_in([{"argv": ["python", "train.py", "--lr", "0.1", "memory", "--who=ann-of-ours"]}])
    assert list(found) == ["ann-of-ours"], "what every other line has too would hide all of it"

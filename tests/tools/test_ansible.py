"""The Ansible role: it parses where Ansible is, and types nothing that agentctl does not take."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.main import parse
from tests.rack.by_ansible import playbook

ROOT = Path(__file__).parents[2]
PLAYBOOK = ROOT / "deploy/ansible/covey.yml"
TASKS = ROOT / "deploy/ansible/roles/covey/tasks/main.yml"


needs_ansible = pytest.mark.skipif(not playbook(), reason="there is no Ansible here; next: make .venv/.ansible")


@needs_ansible
def test_its_syntax_is_right(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("[covey]\ngpu1\ngpu2\n")
    line = [playbook(), "-i", str(tmp_path / "hosts"), "--syntax-check", "-e", "covey_deb=x.deb", str(PLAYBOOK)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_ansible
def test_a_first_host_installed_anew_begins_no_second_rack(tmp_path: Path) -> None:
    """It is refused before anything is done, also where it is not known whether another host is of a rack."""
    said = {
        "none": {"gpu1": "", "gpu2": 'voters = []\n# voters = ["gpu1"]\n', "gpu3": None},
        "others": {"gpu1": None, "gpu2": 'voters = ["gpu2"]\n', "gpu3": "voters = []\n"},
        "all": {"gpu1": 'voters = ["gpu1"]\n', "gpu2": 'voters = ["gpu1"]\n', "gpu3": None},
    }
    refused = {name: _played(tmp_path / name, hosts) for name, hosts in said.items()}
    assert "gpu1 is of no rack, and others are, or it is not known of them: gpu2;" in refused["others"]
    assert "covey_deb is not set" in refused["none"] and "covey_deb is not set" in refused["all"], "the next task"
    assert "not known of them: gpu3;" in _played(tmp_path / "limited", said["none"], "--limit", "gpu1,gpu2")
    moved = _played(tmp_path / "moved", said["others"], "-e", "covey_first=gpu2")
    assert "covey_deb is not set" in moved, moved


@needs_ansible
def test_the_next_host_waits_until_this_one_is_in_the_rack(tmp_path: Path) -> None:
    """The agent answers at its second question, and at its third knows a leader; then the others see it."""
    (tmp_path / "agentctl").write_text(
        f"""#!{sys.executable}
import json, pathlib, sys
asked = pathlib.Path("{tmp_path}/asked")
before = asked.read_text() if asked.exists() else ""
asked.write_text(before + sys.argv[1] + " ")
n = len(before.split()) + 1
rows = [dict(host="gpu2", state="alive"), dict(host="gpu1", state="alive" if n > 4 else "suspect")]
print(json.dumps(dict(host="gpu1", data=rows if sys.argv[1] == "hosts" else dict(leader="gpu2" if n > 2 else None))))
sys.exit(5 if n == 1 else 0)
"""
    )
    (tmp_path / "agentctl").chmod(0o755)
    from_here = ("--start-at-task", "The agent of this host follows a leader")
    _played(tmp_path / "rack", {"gpu1": None}, *from_here, path=f"{tmp_path}:", code=0)
    assert (tmp_path / "asked").read_text().split() == ["status"] * 3 + ["hosts"] * 2


def _played(folder: Path, hosts: dict[str, str | None], *more: str, path: str = "", code: int = 2) -> str:
    """What the playbook says where each host has these settings (None: no such file), and no package is given."""
    folder.mkdir()
    for host, text in hosts.items():
        if text is not None:
            (folder / host).write_text(text)
    (folder / "hosts").write_text(f"[covey]\n{chr(10).join(hosts)}\n")
    given = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable}
    settings = json.dumps(given | {"covey_toml": f"{folder}/{{{{ inventory_hostname }}}}"})
    line = [playbook(), "-i", str(folder / "hosts"), "-e", settings, *more]
    environ = os.environ | {"ANSIBLE_LOCAL_TEMP": str(folder), "ANSIBLE_REMOTE_TEMP": str(folder)}
    environ["PATH"] = path + environ["PATH"]
    done = subprocess.run([*line, str(PLAYBOOK)], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def test_each_agentctl_line_of_it_is_one_and_the_token_is_no_argument() -> None:
    lines = re.findall(r"(?m)(?:command: |cmd: \")(agentctl [^\"\n]*)", TASKS.read_text())
    rack = ["agentctl rack init", "agentctl rack token --json", "agentctl rack join {{ covey_at }}"]
    asked = ["agentctl status --json", "agentctl hosts --json"]
    assert [line.split(" --leave-own")[0] for line in lines] == [*rack, *asked]
    for line in lines:
        words = line.replace("{{ covey_at }}", "gpu1:7946").split()[1:]
        assert vars(parse(words)), line
        assert "--token " not in line, "other users of a host see the arguments of its commands"

"""The Ansible role: it parses where Ansible is, and types nothing that agentctl does not take."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cli.main import parse

ROOT = Path(__file__).parents[2]
PLAYBOOK = ROOT / "deploy/ansible/covey.yml"
TASKS = ROOT / "deploy/ansible/roles/covey/tasks/main.yml"


@pytest.mark.skipif(
    shutil.which("ansible-playbook") is None, reason="there is no Ansible here; next: pip install ansible"
)
def test_its_syntax_is_right(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("[covey]\ngpu1\ngpu2\n")
    line = ["ansible-playbook", "-i", str(tmp_path / "hosts"), "--syntax-check", "-e", "covey_deb=x.deb", str(PLAYBOOK)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_agentctl_line_of_it_is_one_and_the_token_is_no_argument() -> None:
    lines = re.findall(r"(?m)(?:command: |cmd: \")(agentctl [^\"\n]*)", TASKS.read_text())
    assert [line.split()[:3] for line in lines] == [["agentctl", "rack", word] for word in ("init", "token", "join")]
    for line in lines:
        words = line.replace("{{ covey_at }}", "gpu1:7946").split()[1:]
        assert vars(parse(words)), line
        assert "--token " not in line, "other users of a host see the arguments of its commands"

"""The Ansible role on three hosts that are booted with systemd: it makes a rack of them, changes nothing when it is
played again, and installs the next version host by host under a job that notices nothing.

A part of `make operator-test` (`operated.py`). Ansible's own connection over SSH is used, with a program in the place
of `ssh` that enters the host instead.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from chaos.rack.agents import wait
from chaos.rack.booted import BootedHost
from chaos.rack.hosts import Laboratory
from covey.core.version import VERSION
from tests.rack.installed import PAGE, typed
from tests.rack.next_release import NEXT_VERSION
from tests.rack.test_deb import DebHost

PLAYBOOK = Path(__file__).parents[2] / "deploy/ansible/covey.yml"
PLAYED_S = 400.0
SSH = """#!{python} -I
import json, os, sys

words = sys.argv[1:]
while words[0].startswith("-"):
    words = words[2 if words[0] in ("-o", "-p", "-l", "-i", "-F") else 1 :]
host, *command = words
how = json.load(open("{hosts}"))[host]
os.chdir("/")
os.execvpe(how["enter"][0], [*how["enter"], "sh", "-c", " ".join(command)], how["environ"])
"""
"""Stands for `ssh`: runs the command on the host that is named, as its root."""


def playbook() -> str:
    """Ansible's program; empty: it is not here."""
    beside = Path(sys.executable).with_name("ansible-playbook")
    return str(beside) if beside.exists() else shutil.which("ansible-playbook") or ""


class Ansible:
    """Whoever plays the role, from this machine."""

    def __init__(self, folder: Path, hosts: Sequence[BootedHost]) -> None:
        self.folder, self.hosts = folder, hosts
        self.ssh = folder / "ssh"
        self.ssh.write_text(SSH.format(python=sys.executable, hosts=folder / "entered.json"))
        self.ssh.chmod(0o755)
        (folder / "hosts").write_text("[covey]\n" + "".join(f"{host.name}\n" for host in hosts))

    def play(self, package: Path) -> Mapping[str, int]:
        """How much it changed on each host."""
        entered = {host.name: {"enter": host.enter(), "environ": host.environment()} for host in self.hosts}
        (self.folder / "entered.json").write_text(json.dumps(entered))
        given = {
            "ansible_ssh_executable": str(self.ssh),
            "ansible_ssh_transfer_method": "piped",
            "ansible_become": False,
            "ansible_python_interpreter": "/usr/bin/python3",
            "covey_deb": str(package),
        }
        line = [playbook(), "-i", str(self.folder / "hosts"), "-e", json.dumps(given), str(PLAYBOOK)]
        environ = os.environ | {"ANSIBLE_HOME": str(self.folder), "ANSIBLE_LOCAL_TEMP": str(self.folder)}
        done = subprocess.run(line, capture_output=True, text=True, check=False, env=environ, timeout=PLAYED_S)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.findall(r"(?m)^(\S+) +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=0 ", done.stdout)
        assert {name for name, _ in found} == {host.name for host in self.hosts}, done.stdout
        return {name: int(changed) for name, changed in found}


def walk(package: Path, newer: Path, folder: Path) -> None:
    """From three hosts with nothing to a rack that runs the next version; AssertionError where it is not so."""
    assert "ansible-playbook -i HOSTS deploy/ansible/covey.yml -e covey_deb=" in PAGE.read_text()
    DebHost.folder_of_package = package.parent
    with Laboratory(3, default_route=True, kind=DebHost) as lab:
        hosts = [host for host in lab.hosts.values() if isinstance(host, BootedHost)]
        first = hosts[0]
        for host in hosts:  # images of containers forbid services to start
            typed(host, "rm -f /usr/sbin/policy-rc.d; mkdir -p /opt")
        who = Ansible(folder, hosts)
        assert all(who.play(package).values()), "each was installed"
        line = json.loads(typed(first, "agentctl hosts --json"))["data"]
        assert sorted((row["host"], row["state"]) for row in line) == [(host.name, "alive") for host in hosts]
        again = who.play(package)
        assert not any(again.values()), f"played again it changes {again}"
        for host in hosts:
            typed(host, "sed -i 's/^#simulated = 0$/simulated = 2/' /etc/covey/agent.toml; systemctl restart covey")
        wait(lambda: "3 of 3 hosts alive" in first.shell("agentctl hosts").stdout, first.journal, 60.0, 0.5)
        job = typed(first, "cd /tmp; agentctl submit --gpus 1 -- sh -c 'echo begun; sleep 150; echo ended'").split()[0]
        who.play(newer)
        for host in hosts:
            said = typed(host, "agentctl version")
            assert NEXT_VERSION in said.split() and VERSION not in said.split(), said
        assert typed(first, f"agentctl wait {job}; agentctl logs {job}", 240.0).split().count("begun") == 1

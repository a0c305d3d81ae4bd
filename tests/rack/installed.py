"""Hosts whose first process is systemd, installed by what docs/guides/install.md tells people to type."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from chaos.rack.agents import wait
from chaos.rack.booted import BootedHost

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "install.md"
BY_PIP = ("python3 -m venv", "pip install")
"""The beginnings of lines that this environment of the tests replaces."""
KEY = "/etc/covey/gossip.key"
TOML = """\
[gossip]
seeds = ["gpu1:7946", "gpu2:7946"]
[leader]
voters = ["gpu1"]
"""
DEVICES = """\
[gpus]
simulated = 2
[memory]
slab = "4 MiB"
"""
TOML += DEVICES


def installation() -> list[str]:
    """The lines of the first block of the page, without comments; the last one begins a rack on the host."""
    text = PAGE.read_text().partition("## One host, then many\n")[2].partition("```sh\n")[2].partition("\n```")[0]
    lines = [re.sub(r"\s+# .*", "", line.strip()) for line in text.splitlines()]
    assert lines[0].startswith(BY_PIP)
    assert lines[-1] == "agentctl rack init"
    return [line for line in lines if not line.startswith(BY_PIP)]


def typed(host: BootedHost, line: str, timeout_s: float = 60.0) -> str:
    done = host.shell(line, timeout_s)
    said = f"{done.stdout}{done.stderr}"
    assert done.returncode == 0, f"{host.name}: {line}\n{said}\n{host.journal()}"
    assert "Traceback" not in said
    return said


def written(host: BootedHost, path: str, text: str) -> None:
    typed(host, f"umask 077; printf %s {shlex.quote(text)} > {path}")


def install(hosts: Sequence[BootedHost], toml: str = TOML, key: str = "") -> None:
    """Type all lines but the one that begins a rack, and write these settings; one gossip key for all, made on the
    first where none is given."""
    for host in hosts:
        typed(host, "set -e; " + "\n".join(installation()[:-1]))
        typed(host, f"printf %s {shlex.quote(toml)} > /etc/covey/agent.toml")
        if key:
            written(host, KEY, key)
        else:
            typed(host, f"agentd --make-key {KEY}")
            key = typed(host, f"cat {KEY}")


def start(hosts: Sequence[BootedHost], timeout_s: float = 60.0) -> None:
    """Start the agent of each host, and wait until the hosts see one another."""
    for host in hosts:
        typed(host, "systemctl enable --now covey", timeout_s)
    for host in hosts:
        alive(host, len(hosts), timeout_s)


def alive(host: BootedHost, count: int, within_s: float = 60.0) -> None:
    """Wait until the host sees `count` hosts, all of them alive, and one that leads."""

    def shown() -> str:
        return host.shell("agentctl hosts").stdout

    def seen() -> bool:
        return f"{count} of {count} hosts alive; gpu" in shown()

    wait(seen, lambda: f"{shown()}\n{host.journal()}", within_s, 0.5)


def memory(line: str) -> str:
    """A script that has 32 MiB of remote memory."""
    script = f"""
import random
from covey.remote import RemoteMemory
memory, data = RemoteMemory.open("v1", 32 << 20, "/run/covey/jobs.sock"), random.Random(1).randbytes(32 << 20)
{line}
"""
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(script)}"

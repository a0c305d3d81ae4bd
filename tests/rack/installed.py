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
    """The lines of the first block of the page, without comments; the last two check the settings and start it."""
    text = PAGE.read_text().partition("## One host, then many\n")[2].partition("```sh\n")[2].partition("\n```")[0]
    lines = [re.sub(r"\s+# .*", "", line.strip()) for line in text.splitlines()]
    assert lines[0].startswith(BY_PIP)
    assert "--check" in lines[-2]
    assert "enable --now" in lines[-1]
    return [line for line in lines if not line.startswith(BY_PIP)]


def more_hosts() -> tuple[str, list[str]]:
    """The `agent.toml` that the page gives to a rack of several hosts, and the lines typed once all hosts are seen."""
    rest = PAGE.read_text().partition("An empty `agent.toml` is a rack of one")[2]
    toml = rest.partition("```toml\n")[2].partition("```")[0]
    lines = rest.partition("```sh\n")[2].partition("\n```")[0].splitlines()
    assert 'voters = ["gpu1"]' in toml and lines and all("agentctl voters add" in line for line in lines)
    return toml, [line.strip() for line in lines]


def typed(host: BootedHost, line: str, timeout_s: float = 60.0) -> str:
    done = host.shell(line, timeout_s)
    said = f"{done.stdout}{done.stderr}"
    assert done.returncode == 0, f"{host.name}: {line}\n{said}\n{host.journal()}"
    assert "Traceback" not in said
    return said


def written(host: BootedHost, path: str, text: str) -> None:
    typed(host, f"umask 077; printf %s {shlex.quote(text)} > {path}")


def install(hosts: Sequence[BootedHost], toml: str = TOML, key: str = "") -> None:
    """Type all lines but those that start the installation, with these settings; one gossip key for all, made on the
    first where none is given."""
    lines = [line for line in installation() if "--make-key" not in line]
    for host in hosts:
        typed(host, "set -e; " + "\n".join(lines[:-2]))
        typed(host, f"printf %s {shlex.quote(toml)} > /etc/covey/agent.toml")
        if key:
            written(host, KEY, key)
        else:
            typed(host, f"agentd --make-key {KEY}")
            key = typed(host, f"cat {KEY}")


def start(hosts: Sequence[BootedHost], timeout_s: float = 60.0) -> None:
    """Type the last two lines of the page on each host, and wait until the hosts see one another."""
    for host in hosts:
        typed(host, "set -e; " + "\n".join(installation()[-2:]), timeout_s)
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

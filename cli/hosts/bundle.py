"""Write one file with what somebody needs who looks into a trouble from afar: covey-bundle-HOST-TIME.tar.gz.

It holds what status, doctor, hosts, jobs and why of the newest jobs say, metrics, the settings and the agent's journal,
as far as this user may read it. It is written also when no agent answers, with what this host has. Keys, tokens and
passwords are taken out, and the arguments of jobs; environments and output of jobs are never in it. Look through it
before you send it: what a person wrote into a job's name stays.
"""

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cli.client import FAILED, Agent, AgentctlError
from cli.context import Context
from cli.files import replacing
from cli.hosts import doctor
from cli.hosts.scrubbed import Scrubber, arguments_in
from covey.core.hidden import is_secret
from covey.core.version import VERSION

CONFIG = "/etc/covey/agent.toml"
JOBS = 20
"""The number of jobs, the newest, whose events are in it."""
JOURNAL_LINES = 5000
JOURNAL_S = 20.0
ASKED = ("hosts", "leader", "voters", "gpus", "quotas", "volumes", "slabs")
"""What the agent is asked for, each an answer of its HTTP API, and a file of the bundle."""
KEYS = ("gossip.key", "/var/lib/covey/gossip.key")
"""Where keys of the rack may lie: beside agent.toml, and in the state directory."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", help="file to write (covey-bundle-HOST-TIME.tar.gz)")
    parser.add_argument("--config", metavar="FILE", default=CONFIG, help=f"the agent's settings (default: {CONFIG})")
    parser.add_argument("--unit", metavar="NAME", default="covey", help="the agent's unit in the journal (covey)")


def run(context: Context) -> int:
    if context.args.file is not None:
        _check(Path(context.args.file).absolute())
    bundle = Bundle(context)
    bundle.collect(Path(context.args.config), context.args.unit)
    host = bundle.host or platform.node() or "host"
    name = f"covey-bundle-{host}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(context.args.file or f"{name}.tar.gz").absolute()
    try:
        written(path, name, bundle.files())
    except OSError as error:
        raise _cannot(path, error.strerror or str(error)) from None
    if context.json:
        found = {"path": str(path), "files": sorted(bundle.found), "lacks": bundle.lacks}
        return context.say_json({"schema": 1, "host": host, "data": found})
    for what, why in bundle.lacks.items():
        context.say(f"without {what}: {why}")
    size = path.stat().st_size / 1024
    context.say(f"{path}: {len(bundle.found)} files, {size:.0f} KiB; look through it, then send it")
    return 0


def _check(path: Path) -> None:
    """AgentctlError where something stands at that path that a bundle may not replace, or that cannot be known."""
    try:
        if path.exists() and not path.is_file():
            raise _cannot(path, "a folder stands there" if path.is_dir() else "what stands there is no plain file")
    except OSError as error:
        raise _cannot(path, error.strerror or str(error)) from None


def _cannot(path: Path, why: str) -> AgentctlError:
    return AgentctlError(FAILED, f"cannot write {path}", why, "agentctl bundle /tmp/bundle.tar.gz")


class Bundle:
    """What was found, and what could not be had. Nothing leaves it but scrubbed (`files`)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.host = ""
        self.found: dict[str, Any] = {}
        """Name of a file -> JSON, or text."""
        self.lacks: dict[str, str] = {}
        self._scrubber = Scrubber(value for name, value in os.environ.items() if is_secret(name))

    def collect(self, config: Path, unit: str) -> None:
        self._of_agent()
        self._of_host(config)
        self._journal(unit)

    def files(self) -> Iterator[tuple[str, str]]:
        """Each file, scrubbed, and a first one that says what is there."""
        for name, value in self.found.items():
            if isinstance(value, str):
                yield name, self._scrubber.text(value)
            else:
                yield name, json.dumps(self._scrubber.json(value), indent=1, ensure_ascii=False) + "\n"
        lines = [f"agentctl bundle {VERSION}, host {self.host or 'unknown'}", "", *self.found]
        yield "README.txt", "\n".join([*lines, *(f"without {what}: {why}" for what, why in self.lacks.items())]) + "\n"

    # ---- what the agent says ----

    def _of_agent(self) -> None:
        agent = self._context.agent
        try:
            status = agent.get("status")
        except AgentctlError as error:
            self.lacks["what the agent says"] = f"{error.what}: {error.why}"
            return
        self.host = status.host
        self._keep("status", lambda: status.whole)
        for name in ASKED:
            self._keep(name, partial(_whole, agent, name))
        self._keep("jobs", lambda: agent.get("jobs", all=1).whole)
        for job in newest(self.found.get("jobs.json", {}).get("data", ())):
            self._keep(f"why/{job}", partial(_whole, agent, "why", job))
        self._keep("doctor", lambda: [each._asdict() for each in doctor.findings(self._context, status)])
        self._keep("metrics.txt", lambda: agent.text("/metrics"))

    def _keep(self, name: str, answer: Callable[[], Any]) -> None:
        try:
            found = answer()
        except AgentctlError as error:
            self.lacks[name] = f"{error.what}: {error.why}"
            return
        self._scrubber.learn(arguments_in(found))
        self.found[name if "." in name else f"{name}.json"] = found

    # ---- what this host has ----

    def _of_host(self, config: Path) -> None:
        words = {
            "agentctl": VERSION, "python": sys.version, "executable": sys.executable, "kernel": platform.release(),
            "machine": platform.machine(), "system": release(), "cores": os.cpu_count(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }  # fmt: skip
        self.found["host.json"] = words
        for path in (config.parent / KEYS[0], Path(KEYS[1])):
            try:
                self._scrubber.learn(line.strip() for line in path.read_text().splitlines() if line[:1] != "#")
            except (OSError, UnicodeDecodeError):
                continue
        try:
            self.found["agent.toml"] = config.read_text()
        except (OSError, UnicodeDecodeError) as error:
            self.lacks["agent.toml"] = str(error)
            return
        self._said(
            "config.toml", [str(Path(sys.executable).with_name("agentd")), "--config", str(config), "--show-config"]
        )

    def _journal(self, unit: str) -> None:
        lines = ["journalctl", "-u", unit, "-n", str(JOURNAL_LINES), "--no-pager", "-q", "-o", "short-iso-precise"]
        self._said("journal.txt", lines)

    def _said(self, name: str, command: list[str]) -> None:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=JOURNAL_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self.lacks[name] = str(error)
            return
        if done.returncode or not done.stdout.strip():
            self.lacks[name] = (
                " ".join(done.stderr.split()) or f"{command[0]} has nothing, or this user may not read it"
            )
        else:
            self.found[name] = done.stdout


def _whole(agent: Agent, *path: str) -> Any:
    return agent.gather(*path).whole


def newest(jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The newest jobs, by their numbers."""
    return sorted((str(job["id"]) for job in jobs), key=lambda id: (len(id), id))[-JOBS:]


def release() -> str:
    try:
        return str(platform.freedesktop_os_release().get("PRETTY_NAME", ""))
    except OSError:
        return ""


def written(path: Path, folder: str, files: Iterator[tuple[str, str]]) -> None:
    """Write the archive, for this user alone to read, whole or not at all. A file or link of that name is replaced, and
    not written through: whoever can write to /tmp could have put it there. OSError."""
    with replacing(path, 0o600) as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in files:
            data = text.encode(errors="backslashreplace")
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(data))

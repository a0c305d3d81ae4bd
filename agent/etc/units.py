"""`agentd --install-unit`: units, the agent's user, its folders and `agent.toml`, from where pip puts them into /etc.

What pip brings (`share/covey` of the environment) names the programs in /opt/covey; what is installed names this
environment's. `agent.toml` and a key that are there already stay as they are.
"""

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

USUAL = "/opt/covey"
"""The environment that units name as they are shipped."""
SHARE = "share/covey"
UNITS = ("covey.service", "covey-starter.service", "covey-swap.service")
PLACES: Mapping[str, str] = {name: f"etc/systemd/system/{name}" for name in UNITS} | {
    "covey.sysusers.conf": "etc/sysusers.d/covey.conf",
    "covey.tmpfiles.conf": "etc/tmpfiles.d/covey.conf",
    "covey.sysctl.conf": "etc/sysctl.d/10-covey.conf",
    "agent.toml": "etc/covey/agent.toml",
}
"""File of `share/covey` -> where it is installed. `10-`: what others set in /etc/sysctl.d wins."""
KEPT = ("agent.toml",)
"""Files that people change: they are written only where there are none."""
NEXT = (
    "systemd-sysusers covey.conf",
    "systemd-tmpfiles --create covey.conf",
    "systemctl daemon-reload",
    "systemctl enable --now covey",
)
"""What makes the installed files count."""


class NotInstalled(Exception):
    """Why units cannot be installed from here."""

    def __init__(self, what: str, why: str, next: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what, self.why, self.next = what, why, next


class PlacedFile(NamedTuple):
    path: Path
    outcome: str
    """`written`, `as it was`, or `kept`: a person's file."""


def rendered(text: str, prefix: str) -> str:
    """A shipped file for the environment at `prefix`."""
    return text.replace(USUAL, prefix.rstrip("/"))


def shipped(prefix: Path) -> Path:
    """The folder of what is installed: the environment's, or the checkout's that it is an editable installation of.
    NotInstalled where there is neither."""
    for folder in (prefix / SHARE, Path(__file__).parents[2] / "systemd"):
        if all((folder / name).is_file() for name in PLACES):
            return folder
    why = f"{prefix / SHARE} lacks {', '.join(PLACES)}"
    raise NotInstalled("the units are not there", why, "install covey-agent from its wheel, or from a checkout")


def closed_to_others(program: Path) -> Path | None:
    """The first folder on the way to a program, or to what it is a link to, that other users may not pass; None: the
    agent's user can run it."""
    for path in (program.absolute(), program.resolve()):
        for folder in (*reversed(path.parents), path):
            if not folder.stat().st_mode & stat.S_IXOTH:
                return folder
    return None


def check_open(prefix: Path) -> None:
    """NotInstalled where the agent's user may not run what is in this environment."""
    if (closed := closed_to_others(prefix / "bin" / "python")) is not None:
        why = f"the agent runs as the user covey, which may not pass {closed}"
        next_step = f"/usr/bin/python3 -m venv {USUAL}, install covey-agent there, and run its agentd --install-unit"
        raise NotInstalled(f"{prefix} cannot be the agent's environment", why, next_step)


def install(root: Path, prefix: Path) -> Iterator[PlacedFile]:
    """Write the files under `root`. OSError where that is not permitted, NotInstalled where there are none."""
    folder = shipped(prefix)
    for name, place in PLACES.items():
        text, path = rendered((folder / name).read_text(), str(prefix)), root / place
        there = path.read_text() if path.is_file() else None
        if there == text:
            yield PlacedFile(path, "as it was")
        elif there is not None and name in KEPT:
            yield PlacedFile(path, "kept")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.new")
            beside.write_text(text)
            beside.chmod(0o644)
            os.replace(beside, path)
            yield PlacedFile(path, "written")


def environment() -> Path:
    """The environment of this `agentd`."""
    return Path(sys.prefix)

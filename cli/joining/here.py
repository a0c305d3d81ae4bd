"""This host's agent as `agentctl rack` finds it, and makes it: its files, their owner, and how it is started.

As root the agent is the one that docs/guides/install.md installs: /etc/covey/agent.toml, the user `covey`, the unit
`covey`. Any other user has an agent of its own, under ~/.config/covey.
"""

import argparse
import contextlib
import errno
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from agent import keys
from agent.config import Config, ConfigError, load
from agent.keyring import service as ring
from agent.raft.disk import FOLDER
from cli.client import FAILED, REFUSED, TOO_LATE, Agent, AgentctlError
from cli.context import Context
from cli.files import put
from cli.joining.toml_lines import CannotWrite, Settings, with_settings
from covey.wire.checked import Damaged

SYSTEM_TOML = Path("/etc/covey/agent.toml")
USER = "covey"
"""The user of the agent that root installs."""
UNIT = "covey.service"
UNITS = ("/etc/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
ASK_AGAIN_S = 0.3
START_S = 60.0
"""Seconds for which an agent is waited for that was started."""
GIVEN_UP = "given-up"


class Owner(NamedTuple):
    uid: int
    gid: int


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help=f"agent.toml of this host (default as root: {SYSTEM_TOML})")
    parser.add_argument("--no-start", action="store_true", help="write the files, and do not start the agent")


class Here:
    """The agent of this host. AgentctlError when its agent.toml is wrong."""

    def __init__(self, context: Context) -> None:
        given = context.args.config
        self.toml = Path(given).absolute() if given else _default_toml()
        self.did: list[str] = []
        """What was done, for people."""
        self.args = context.args
        self._may_start, self._was_running = not context.args.no_start, False
        self.text = self._read()
        try:
            self.config: Config = load(str(self.toml) if self.toml.exists() else None, os.environ)
        except ConfigError as error:
            raise AgentctlError(FAILED, error.what, error.why, error.next) from None

    def _read(self) -> str:
        try:
            return self.toml.read_text()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise self._cannot("read", self.toml, error) from None

    # ---- what is there ----

    @property
    def key_path(self) -> Path:
        """Where the key is written: systemd gives the agent the one beside agent.toml."""
        return Path(self.config.gossip.key_file or self.toml.parent / keys.NAME)

    def keys_found(self) -> list[bytes]:
        """The keys with which the agent would start; none when there is no file. AgentctlError for a bad one."""
        for path in (self.key_path, Path(self.config.state_dir) / keys.NAME):
            try:
                if path.is_file():
                    return self._turned(keys.load(path, make=False))
            except ConfigError as error:
                raise AgentctlError(FAILED, error.what, error.why, error.next) from None
            except OSError as error:
                raise self._cannot("read", path, error) from None
        return []

    def _turned(self, given: list[bytes]) -> list[bytes]:
        """The keys in the place of these, where the rack's keys were rotated since."""
        try:
            return list(ring.unsealed((Path(self.config.state_dir) / ring.FILE).read_bytes(), given).keys)
        except (FileNotFoundError, Damaged):
            return given

    @property
    def log_folder(self) -> Path:
        return Path(self.config.state_dir) / FOLDER

    def has_log(self) -> bool:
        """Whether an agent has run here: it began a log of its own, or received that of a rack."""
        try:
            return self.log_folder.is_dir()
        except OSError as error:
            raise self._cannot("read", self.log_folder, error) from None

    @property
    def agent(self) -> Agent:
        return Agent([f"unix:{self.config.run_dir}/agent.sock"], str(self.toml))

    def runs(self) -> bool:
        with contextlib.suppress(AgentctlError):
            return bool(self.agent.get("status").host)
        return False

    # ---- what is written ----

    def planned(self, settings: Settings, instead: bool, comment: str) -> str:
        """The text of agent.toml with the settings. AgentctlError when a person's line says something else."""
        try:
            return with_settings(self.text or f"# {comment}\n", settings, instead)
        except CannotWrite as cannot:
            why = f"{cannot}; what a person wrote there is not changed"
            raise AgentctlError(REFUSED, f"{self.toml} cannot be written", why, f"edit {self.toml}") from None

    def write_toml(self, text: str, settings: Settings) -> bool:
        """Write agent.toml; whether anything changed."""
        if text == self.text:
            self.did.append(f"{self.toml} is kept as it is")
            return False
        mode, owner = 0o644, None
        with contextlib.suppress(OSError):
            before = os.stat(self.toml)
            mode, owner = before.st_mode & 0o777, Owner(before.st_uid, before.st_gid)
        self._put(self.toml, text, mode, owner)
        self.did.append(f"{self.toml} is {'changed' if self.text else 'written'}: {_told(settings)}")
        self.text = text
        return True

    def write_key(self, found: Sequence[bytes]) -> None:
        text = "".join(f"{line}\n" for line in (keys.COMMENT, *(key.hex() for key in found)))
        self._put(self.key_path, text, 0o600, self._owner())
        self.did.append(f"{self.key_path} is written")

    def _put(self, path: Path, text: str, mode: int, owner: Owner | None) -> None:
        try:
            put(path, text, mode, owner)
        except OSError as error:
            raise self._cannot("write", path, error) from None

    def _owner(self) -> Owner | None:
        """The agent's user, where root writes for it."""
        if os.geteuid():
            return None
        with contextlib.suppress(OSError):
            found = os.stat(self.config.state_dir)
            return Owner(found.st_uid, found.st_gid)
        with contextlib.suppress(KeyError):
            if self.toml == SYSTEM_TOML:
                user = pwd.getpwnam(USER)
                return Owner(user.pw_uid, user.pw_gid)
        return None

    def move_aside(self, path: Path) -> None:
        """Give the file or folder another name, under which nothing uses it."""
        names = (path.with_name(f"{path.name}.{GIVEN_UP}{more}") for more in ("", *(f".{n}" for n in range(2, 1000))))
        to = next(name for name in names if not name.exists())
        try:
            os.rename(path, to)
        except OSError as error:
            raise self._cannot("move", path, error) from None
        self.did.append(f"{path} is now {to}")

    def check_writable(self) -> None:
        """AgentctlError when the files cannot be written, before anything is asked for."""
        for path in (self.toml, self.key_path):
            folder = next(each for each in path.parents if each.exists())
            if not os.access(folder, os.W_OK | os.X_OK):
                raise self._cannot("write", path, PermissionError(errno.EACCES, f"no right to write in {folder}"))

    def _cannot(self, verb: str, path: Path, error: Exception) -> AgentctlError:
        why = getattr(error, "strerror", None) or str(error)
        return AgentctlError(FAILED, f"cannot {verb} {path}", why, "run agentctl as root, or as the agent's user")

    # ---- the process ----

    @property
    def by_systemd(self) -> bool:
        """Whether systemd runs the agent of this file."""
        booted = os.path.isdir("/run/systemd/system") and os.geteuid() == 0
        return booted and self.toml == SYSTEM_TOML and any(os.path.exists(f"{place}/{UNIT}") for place in UNITS)

    @property
    def by_hand(self) -> str:
        """What a person types to start the agent."""
        return "systemctl enable --now covey" if self.by_systemd else f"agentd --config {self.toml}"

    def stop(self) -> None:
        self._systemctl("stop", "covey")
        self._was_running = False
        self.did.append("the agent was stopped")

    def start(self, changed: bool) -> bool:
        """Start the agent where systemd runs it, anew where its files changed; whether it runs now. Elsewhere a person
        is told what to start."""
        if self._may_start and self.by_systemd:
            self._systemctl("enable", "--now", "covey")
            if changed and self._was_running:
                self._systemctl("restart", "covey")
            self.did.append("the agent runs: systemctl status covey")
        elif changed and self._was_running:
            self.did.append("the agent runs with what agent.toml said before: restart it")
        return self.runs() if not self._may_start else self.by_systemd or self.runs()

    def remember_if_it_runs(self) -> None:
        """To be called before the files change: an agent that runs has read the earlier ones."""
        self._was_running = self.runs()

    def _systemctl(self, *words: str) -> None:
        done = subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["it gave no reason"])[0]
            next_step = "systemctl status covey; journalctl -u covey -n 20"
            raise AgentctlError(FAILED, f"systemctl {' '.join(words)} failed", why, next_step)

    def wait(self, holds: Callable[[], str], what: str) -> str:
        """What `holds` says once it says something. AgentctlError when it does not in time."""
        limit_s = self.args.timeout or START_S
        end_s, why = time.monotonic() + limit_s, "no answer yet"
        while time.monotonic() < end_s:
            try:
                if found := holds():
                    return found
                why = "its agent runs, and sees no leader of the rack yet"
            except AgentctlError as error:
                why = error.why
            time.sleep(ASK_AGAIN_S)
        raise AgentctlError(TOO_LATE, f"{what} after {limit_s:g} s", why, "agentctl doctor; journalctl -u covey -n 20")


def _default_toml() -> Path:
    if os.geteuid() == 0 or _is_agents_user():
        return SYSTEM_TOML
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "covey" / "agent.toml"


def _is_agents_user() -> bool:
    try:
        return os.geteuid() == pwd.getpwnam(USER).pw_uid
    except KeyError:
        return False


def _told(settings: Settings) -> str:
    return ", ".join(f"{section}.{key}" for section, key in settings)


def say_done(context: Context, did: Sequence[str]) -> None:
    """Say on stderr what was done: stdout is for what comes of it."""
    if not context.json:
        for line in did:
            print(line, file=sys.stderr, flush=True)


def join_line(agent: Agent) -> tuple[str, str]:
    """A new token as the line that is typed on the host that joins, and a warning; empty: none."""
    made = agent.post("tokens").data
    line = f"agentctl rack join {made['at']} --token {made['token']}"
    loopback = made["at"].startswith(("127.", "[::1]"))
    note = f"{made['at']} is reached from this host alone; set advertise in its agent.toml" if loopback else ""
    return line, note

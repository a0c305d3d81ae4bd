"""The gossip keyring on disk: one key a line, 64 hex digits, the first one seals, all of them open."""

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from agent.api.sockets import gid_of
from agent.config import Config, ConfigError

KEYS_MAX = 3
NAME = "gossip.key"
COMMENT = "# Covey's gossip key: the same file on every host of the rack, secret to everybody else"
_LINE = re.compile(r"^[0-9a-f]{64}$")


def find(config: Config, environ: Mapping[str, str]) -> Path:
    """The keyring's file: the one named in agent.toml, else systemd's credential if a key is in it, else the one beside
    agent.toml, else the state directory's own, which need not exist. ConfigError when none is there and the seeds are
    other hosts: a key that is made here opens nothing of theirs."""
    if config.gossip.key_file:
        return Path(config.gossip.key_file)
    credential = Path(environ.get("CREDENTIALS_DIRECTORY", "/nonexistent")) / NAME
    beside, own = Path(config.source).parent / NAME, Path(config.state_dir) / NAME
    if _is_there(credential) and not _is_empty(credential):
        return credential
    found = beside if _is_there(beside) else own
    if config.gossip.seeds and not _is_there(found):
        raise ConfigError(
            "there is no gossip key",
            f"{', '.join(config.gossip.seeds)} are seeds, but neither {beside} nor {own} exists",
            f"agentctl rack join, with a token of another host, or copy its key to {beside}; "
            f"for the first host of a rack: agentctl rack init, or agentd --make-key {beside}",
        )
    return found


def _is_there(path: Path) -> bool:
    """Whether the file is there, also where this user may not see it: reading it then says so."""
    try:
        return path.is_file()
    except PermissionError:
        return True


def _is_empty(path: Path) -> bool:
    """Whether the file has comments only: what the unit gives where no key was made."""
    try:
        return not _lines(path.read_text("ascii"))
    except (OSError, UnicodeDecodeError):
        return False


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def load(path: Path, make: bool, group: str = "") -> list[bytes]:
    """The keys, each 32 bytes. With `make`, a missing file is made (a rack of one can grow by sharing it). `group`: the
    users who ask the agent are in it, so it must not be able to read them."""
    if make and not _is_there(path):
        generate(path)
    try:
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the gossip key in {path}", str(error), "copy the file from another host of the rack"
        ) from error
    found = _lines(text)
    if not 1 <= len(found) <= KEYS_MAX or not all(_LINE.match(line) for line in found):
        why = f"expected 1 to {KEYS_MAX} lines of 64 hex digits"
        raise ConfigError(f"{path} does not hold gossip keys", why, "copy the file from another host of the rack")
    if path.stat().st_mode & 0o007:
        raise ConfigError(f"{path} can be read by everybody", "the gossip key is a secret", f"chmod o-rwx {path}")
    if path.stat().st_mode & 0o070 and path.stat().st_gid == gid_of(group):
        why = f"users of the rack are in group {group} ([http] group), and the gossip key is a secret"
        raise ConfigError(f"{path} can be read by group {group}", why, f"chmod g-rwx {path}")
    return [bytes.fromhex(line) for line in found]


def generate(path: Path) -> None:
    """Make a new key, readable by its owner alone. FileExistsError when there is one: it may be in use."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w") as out:
        out.write(f"{COMMENT}\n{secrets.token_hex(32)}\n")

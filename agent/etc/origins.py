"""`agentd --show-config`: every setting, its value in force at a start, and where it came from, as a file in TOML.

Each line is a setting of `agent.toml` with all that is not written there filled in, so that what is printed may be
given to another host and means the same there.
"""

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent.config import SECTIONS, Config
from agent.etc.reload import is_live
from plugins.registry import PLUGINS

DEFAULT = "default"
DIRECTORIES = {"state_dir": ("STATE_DIRECTORY", "XDG_STATE_HOME"), "run_dir": ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR")}
"""Setting -> variables of the environment that say it, the first one first."""


def settings_of(config: Config) -> dict[str, Any]:
    """Every setting that is in force, by its name in agent.toml (`gossip.seeds`); of a plugin that is off none."""
    top = {
        "name": config.name,
        "state_dir": config.state_dir,
        "run_dir": config.run_dir,
        "advertise": config.advertise,
        "plugins": list(config.plugins),
    }
    parts = {name: getattr(config, name) for name in SECTIONS} | dict(config.plugins)
    return top | {f"{name}.{key}": value for name, part in parts.items() for key, value in _fields(part)}


def _fields(part: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(part):
        yield field.name, msgspec.to_builtins(getattr(part, field.name))


def written_in(path: str) -> set[str]:
    """The settings that this file has. OSError or a ValueError where it cannot be read."""
    tree = tomllib.loads(Path(path).read_text())
    sections = {*SECTIONS, *(plugin.name for plugin in PLUGINS)}
    top = {name for name in tree if name not in sections}
    return top | {f"{name}.{key}" for name in sections for key in tree.get(name, {})}


def origin(name: str, written: set[str], source: str, environ: Mapping[str, str]) -> str:
    """Where the value of a setting came from, in a word or two."""
    if name in written:
        return source
    if name == "name":
        return "the machine's host name"
    if name == "plugins":
        return "all there are"
    if name in DIRECTORIES:
        first, second = DIRECTORIES[name]
        if first in environ:
            return f"${first}"
        if os.geteuid() and second in environ:
            return f"${second}"
        return f"{DEFAULT} for {'other users' if os.geteuid() else 'root'}"
    return DEFAULT


def shown(config: Config, written: set[str], environ: Mapping[str, str]) -> Iterator[str]:
    """The lines of the file, one for each setting; what a reload applies is marked."""
    values = settings_of(config)
    lines = {name: _assigned(name.rpartition(".")[2], value) for name, value in values.items()}
    width = min(60, max(map(len, lines.values())))
    section = ""
    yield f"# agentd --show-config: {config.source}; `live`: systemctl reload covey applies it"
    for name, line in lines.items():
        if (now := name.rpartition(".")[0]) != section:
            section = now
            yield ""
            yield f"[{section}]"
        where = origin(name, written, config.source, environ)
        yield f"{line:<{width}}  # {where}{', live' if is_live(name) else ''}"


def _assigned(key: str, value: Any) -> str:
    """`key = value`. TOML has no word for nothing, and an empty address is found when the agent starts."""
    return f"#{key} =" if value is None else f"{key} = {toml(value)}"


def toml(value: Any) -> str:
    """A value as TOML writes it on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return "inf" if value == float("inf") else repr(value)
    return json.dumps(value, ensure_ascii=False)

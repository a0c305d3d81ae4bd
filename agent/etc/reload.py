"""`systemctl reload covey`: agent.toml is read again, and what may change under a running agent is applied.

A setting is live only where nothing was built on its first value: a level, a limit that is looked up each time it
matters, names that are compared with each request. Addresses, keys, periods of gossip and elections, sizes of new
volumes and everything the log of the rack was begun with need a restart, which jobs and volumes survive.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from agent.config import SECTIONS, Config

LIVE = (
    "log.level",
    "http.names",
    *("jobs.output_rank_max", "jobs.output_host_max", "jobs.keep_ended", "jobs.keep_ended_for", "jobs.disk_free_min"),
    *("memory.budgets", "memory.default_budget", "memory.volumes_max", "memory.volumes_per_job_max"),
)
"""The settings that are applied while the agent runs."""


class Reloaded(NamedTuple):
    """Which settings differ from those in force."""

    live: Sequence[str]
    """Applied now."""
    restart: Sequence[str]
    """In force after a restart."""

    @property
    def told(self) -> str:
        """For people: `applied live: log.level; needs a restart: gossip.seeds`."""
        parts = (("applied live", self.live), ("needs a restart", self.restart))
        said = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names)
        return said or "nothing has changed"


def is_live(name: str) -> bool:
    return name in LIVE


def compared(before: Mapping[str, Any], now: Mapping[str, Any]) -> Reloaded:
    """What differs between the settings in force and those of the file, by name, sorted. A plugin that is switched on
    or off brings all its settings with it; it is named once, as `plugins`."""
    both = before.keys() & now.keys()
    differs = sorted(name for name in both if before[name] != now[name])
    if before.keys() != now.keys() and "plugins" not in differs:
        differs = sorted([*differs, "plugins"])
    return Reloaded([name for name in differs if is_live(name)], [name for name in differs if not is_live(name)])


def applied(config: Config, now: Config, names: Sequence[str]) -> Config:
    """The configuration in force, with these live settings as the file has them now."""
    sections: dict[str, dict[str, Any]] = {}
    for name in names:
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = getattr(part_of(now, section), key)
    parts = {name: msgspec.structs.replace(part_of(config, name), **values) for name, values in sections.items()}
    own: dict[str, Any] = {name: part for name, part in parts.items() if name in SECTIONS}
    plugins = dict(config.plugins) | {name: part for name, part in parts.items() if name not in SECTIONS}
    return dataclasses.replace(config, **own, plugins=plugins)


def part_of(config: Config, section: str) -> msgspec.Struct:
    """The settings of a section of agent.toml, the agent's own or a plugin's that is on."""
    part = getattr(config, section) if section in SECTIONS else config.plugins[section]
    assert isinstance(part, msgspec.Struct)
    return part

"""agent.toml -> a frozen, checked `Config`. An empty file works; a wrong key or value is refused with the place, what
was expected and the nearest valid name. Checked once here, trusted everywhere after."""

import difflib
import ipaddress
import math
import os
import re
import socket
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from agent.jobs.output import JobsSettings
from agent.ports.devices import settings as devices
from agent.ports.devices.settings import GpuSettings
from agent.raft.service import LeaderSettings
from covey.core.ids import ID_PATTERN, HostId
from covey.ports.addresses import Address, hears_others, ip_port, is_ip
from gossip.service import GossipSettings
from plugins.base import Plugin
from plugins.registry import PLUGINS
from plugins.scheduler.messages.spec import USER_PATTERN

DEFAULTS = "defaults"
"""The source of a configuration without a file."""


class ConfigError(Exception):
    """The configuration is wrong: one line what, one line why, one line what to do next."""

    def __init__(self, what: str, why: str, next: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what, self.why, self.next = what, why, next


class Top(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys above the first section."""

    name: str = ""
    """This host's name, unique in the rack; default: the machine's host name."""
    state_dir: str = ""
    """The folder of what survives a restart; default: $STATE_DIRECTORY, /var/lib/covey for root, ~/.local/state/covey
    otherwise."""
    run_dir: str = ""
    """The folder of unix sockets; default: $RUNTIME_DIRECTORY, /run/covey for root, $XDG_RUNTIME_DIR/covey or
    /tmp/covey-UID."""
    advertise: str = ""
    """The IP address under which other hosts reach this one; default: this host's address towards the seeds
    (`agent.advertise`)."""
    plugins: tuple[str, ...] = ()
    """The plugins that are on; empty: all of them."""


class ControlSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[control]: ZeroMQ links between agents."""

    bind: str = "0.0.0.0:0"
    """The TCP address of the control links. Port 0 takes a free one: peers learn it by gossip."""


class HttpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[http]: the API is always on the unix socket `agent.sock`; `bind` adds TCP, for users with a certificate of the
    rack (`agentctl login`), for browsers on this host and for Prometheus."""

    group: str = "covey"
    """The group whose users may use `agent.sock` (`agent.api.access` says for what). Where this host has no such
    group, or it is empty, the socket is for the agent's own user and root."""
    bind: str = ""
    """The TCP address of the API, such as `127.0.0.1:8470`; empty: unix socket only. Over TLS users may do there what
    they may on this host. Whoever connects without a certificate reads, on loopback, what everybody may know of jobs;
    beyond loopback `/metrics`, `/livez`, `/readyz` and `/healthz` alone."""
    read_open: bool = False
    """Whether whoever connects to `bind`, which must be on loopback, may read everything: all jobs, their arguments and
    their output."""
    names: tuple[str, ...] = ()
    """DNS names under which this host may be asked over TCP, such as `gpu1.example.org`, beside its IP addresses,
    `localhost` and its own name; its certificate has them. `/metrics`, `/livez` and `/readyz` answer under any name."""


class AccessSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[access]: who may do what, beside root and the agent's own user."""

    operators: tuple[str, ...] = ()
    """Users of this host, and groups as `@NAME`, who may do everything. They reach `agent.sock` as members of the group
    of [http]."""


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[log]: what the agent writes to its log."""

    level: str = "info"
    """The least level that is logged: debug, info, warning or error."""

    def __post_init__(self) -> None:
        if self.level not in ("debug", "info", "warning", "error"):
            raise ValueError(f"level = {self.level!r}: expected debug, info, warning or error")


@dataclass(frozen=True)
class Config:
    name: HostId
    state_dir: str
    run_dir: str
    advertise: str
    """The advertised IP address; empty until `agent.advertise.settle` has found it, unless the file says it."""
    gossip: GossipSettings
    control: ControlSettings
    http: HttpSettings
    access: AccessSettings
    leader: LeaderSettings
    gpus: GpuSettings
    log: LogSettings
    jobs: JobsSettings
    plugins: Mapping[str, msgspec.Struct]
    """Settings of each plugin that is switched on, in the registry's order."""
    source: str = ""
    """The file that the configuration came from."""


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "gossip": GossipSettings,
    "control": ControlSettings,
    "http": HttpSettings,
    "access": AccessSettings,
    "leader": LeaderSettings,
    "gpus": GpuSettings,
    "log": LogSettings,
    "jobs": JobsSettings,
}


def load(path: str | None, environ: Mapping[str, str]) -> Config:
    """Read and check `path` (None: all defaults). ConfigError says file, key, what was expected, nearest name."""
    if path is None:
        return parse({}, DEFAULTS, environ)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}", error.strerror or str(error), "give another file: agentd --config FILE"
        ) from error
    try:
        tree = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML", str(error), "correct that line and start again") from error
    return parse(tree, path, environ)


def parse(
    tree: dict[str, Any], source: str, environ: Mapping[str, str], plugins: tuple[Plugin, ...] | None = None
) -> Config:
    """The checked Config of a parsed file."""
    known_plugins = {plugin.name: plugin for plugin in (tuple(PLUGINS) if plugins is None else plugins)}
    sections = SECTIONS | {name: plugin.settings for name, plugin in known_plugins.items()}
    top_keys = {key: value for key, value in tree.items() if key not in sections}
    top = _section(Top, top_keys, source, "", others=tuple(sections))
    parts = {name: _section(kind, tree.get(name, {}), source, name) for name, kind in sections.items()}
    for name in top.plugins:
        if name not in known_plugins:
            raise _bad_value(source, "plugins", f"there is no plugin {name!r}", f"plugins are {_names(known_plugins)}")
    on = [name for name in known_plugins if not top.plugins or name in top.plugins]
    name = top.name or _host_name()
    if not re.match(ID_PATTERN, name):
        raise _bad_value(
            source, "name", f"{name!r} is not a host name", "use a-z, 0-9, '-' and '.', at most 63 characters"
        )
    gossip, leader, control, http = parts["gossip"], parts["leader"], parts["control"], parts["http"]
    assert isinstance(http, HttpSettings)
    assert isinstance(gossip, GossipSettings)
    assert isinstance(leader, LeaderSettings)
    binds = {"gossip.bind": gossip.bind, "control.bind": control.bind} | ({"http.bind": http.bind} if http.bind else {})
    for key, address in binds.items():
        _check_address(source, key, address)
    _check_http(source, http)
    assert isinstance(parts["access"], AccessSettings)
    _check_access(source, parts["access"])
    for seed in gossip.seeds:
        _check_seed(source, seed)
    _checked_advertise("gossip.advertise", gossip.advertise, source)
    if wrong := devices.trouble(parts["gpus"]):
        raise _bad_value(source, *wrong)
    return Config(
        name=HostId(name),
        state_dir=os.path.abspath(top.state_dir or _state_dir(environ)),
        run_dir=_checked_run_dir(os.path.abspath(top.run_dir or _run_dir(environ)), source),
        advertise=_checked_advertise("advertise", top.advertise, source),
        gossip=gossip,
        control=control,
        http=http,
        access=parts["access"],
        leader=leader,
        gpus=parts["gpus"],
        log=parts["log"],
        jobs=parts["jobs"],
        plugins={name: parts[name] for name in on},
        source=source,
    )


def _section(kind: type[msgspec.Struct], values: Any, source: str, name: str, others: tuple[str, ...] = ()) -> Any:
    """One section of the file as its Struct. `others` are further valid names at this level, for the hint."""
    label = f"{name}." if name else ""
    if not isinstance(values, dict):
        raise _bad_value(source, name, f"expected a section [{name}]", f"write it as a table: [{name}]")
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, [*fields, *others], 1, 0.5)
            next_step = f"did you mean `{label}{near[0]}`?" if near else "remove it, see docs/reference/agent-toml.md"
            here = f"[{name}] knows" if name else "the settings at the top of the file are"
            raise ConfigError(
                f"{source}: `{label}{key}` is not a setting", f"{here} {_names([*fields, *others])}", next_step
            )
    for key, value in values.items():
        never = value == math.inf and type(None) in get_args(fields[key])  # TOML has no null
        if isinstance(value, float) and not math.isfinite(value) and not never:
            raise _bad_value(source, label + key, f"{value} is not a finite number", "correct it and start again")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        key = (label + where.rstrip("`").lstrip(".")).rstrip(".")
        raise _bad_value(source, key, what, "correct the value and start again") from error


def _bad_value(source: str, key: str, why: str, next: str) -> ConfigError:
    return ConfigError(f"{source}: `{key}` has an invalid value", why, next)


def _names(names: Any) -> str:
    return ", ".join(sorted(names))


def _host_name() -> str:
    return re.sub(r"[^a-z0-9.-]", "-", socket.gethostname().lower()).strip(".-") or "localhost"


def _state_dir(environ: Mapping[str, str]) -> str:
    if "STATE_DIRECTORY" in environ:
        return environ["STATE_DIRECTORY"].split(":")[0]
    if os.geteuid() == 0:
        return "/var/lib/covey"
    return os.path.join(environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "covey")


def _run_dir(environ: Mapping[str, str]) -> str:
    if "RUNTIME_DIRECTORY" in environ:
        return environ["RUNTIME_DIRECTORY"].split(":")[0]
    if os.geteuid() == 0:
        return "/run/covey"
    base = environ.get("XDG_RUNTIME_DIR")
    return os.path.join(base, "covey") if base else f"/tmp/covey-{os.geteuid()}"


SOCKET_NAME_BYTES_MAX = 40
"""The longest name of a socket that a plugin makes in run_dir, in bytes."""


def _checked_run_dir(path: str, source: str) -> str:
    if len(os.fsencode(path)) + 1 + SOCKET_NAME_BYTES_MAX > 107:
        raise _bad_value(
            source,
            "run_dir",
            f"{path!r} is too long: a unix socket's path has at most 107 bytes; names take {SOCKET_NAME_BYTES_MAX}",
            "choose a shorter one, such as /run/covey",
        )
    return path


def _check_address(source: str, key: str, address: str) -> None:
    """Check an address where a socket listens: an IP and a port. Without the IP some sockets would listen
    everywhere."""
    try:
        host, _ = ip_port(address)
    except OSError as error:
        raise _bad_value(
            source, key, str(error), "write it as in 127.0.0.1:8470; port 0 means any free port"
        ) from error
    if not is_ip(host):
        why = f"{address!r} is not an IP of this host; expected IP:PORT or [IPV6]:PORT"
        raise _bad_value(source, key, why, "write an IP of this host, or 0.0.0.0 for all of them")


def _check_http(source: str, http: HttpSettings) -> None:
    if http.read_open and hears_others(http.bind):
        why = f"other machines reach {http.bind}, and whoever does would read all jobs and their output"
        raise _bad_value(source, "http.read_open", why, "leave it out: users have certificates (agentctl login)")
    for name in http.names:
        if len(name) > 253 or not re.match(NAME_PATTERN, name):
            raise _bad_value(source, "http.names", f"{name!r} is not a DNS name", "write it as in gpu1.example.org")


def _check_access(source: str, access: AccessSettings) -> None:
    for operator in access.operators:
        if not re.fullmatch(USER_PATTERN, operator.removeprefix("@")):
            why = f"{operator!r} is no name of a user, nor of a group"
            raise _bad_value(source, "access.operators", why, 'write operators = ["ann", "@wheel"]')


def tenants_together(config: Config) -> str:
    """What is wrong while no starter answers on a host of this configuration: it has several tenants, of whom nobody
    said that they trust one another. Empty: nothing."""
    tenants = sorted(getattr(config.plugins.get("scheduler"), "quotas", {}))
    if len(tenants) < 2 or config.jobs.separate == "no":
        return ""
    who = ", ".join(tenants[:3])
    return f"{len(tenants)} tenants ({who}), and no limits: without a starter all jobs run as the agent's user"


TENANTS_NEXT = 'systemctl enable --now covey-starter; or [jobs] separate = "no" where they trust one another'


def open_to_read(binds: Iterable[tuple[HostId, Address]]) -> list[str]:
    """A note for people about the hosts with `read_open` whose `[http] bind` other machines reach; empty where none
    is."""
    found = [f"{host} ({bind})" for host, bind in sorted(binds) if hears_others(bind)]
    if not found:
        return []
    why = (
        f"anyone who can reach {', '.join(found)} may read all jobs, their "
        "arguments and their output ([http] read_open)"
    )
    return [f"{why}; next: leave read_open out there, unless that is intended"]


NAME_PATTERN = r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?\Z"
"""A host's name as resolvers know it (RFC 1123, and underscores, which container networks use)."""


def _check_seed(source: str, seed: str) -> None:
    """Check a seed: an IP or a name, and a port that is not 0."""
    try:
        host, port = ip_port(seed)
        good = port > 0 and (is_ip(host) or (len(host) <= 253 and re.match(NAME_PATTERN, host) is not None))
    except OSError:
        good = False
    if not good:
        why = f"{seed!r} is not a host and a port; expected NAME:PORT, IP:PORT or [IPV6]:PORT"
        raise _bad_value(source, "gossip.seeds", why, "write it as in gpu1:7946, 10.0.0.7:7946 or [fd00::7]:7946")


def _checked_advertise(key: str, text: str, source: str) -> str:
    """The advertised IP, to which a peer can connect, or empty: a name may mean another machine there, 0.0.0.0 means
    none, and a link-local IPv6 address means nothing without an interface."""
    if not text:
        return text
    try:
        ip = ipaddress.ip_address(text)
        usable = not ip.is_unspecified and not (ip.version == 6 and ip.is_link_local)
    except ValueError:
        usable = False
    if not usable:
        raise _bad_value(source, key, f"{text!r} is not the IP of a host", "write this host's IP, such as 10.0.0.7")
    return text

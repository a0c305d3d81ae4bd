"""A rack's folder: what `covey-rack` writes there, and what a person may change.

    .rack/gossip.key          one secret for all hosts, mode 0600
    .rack/gpuN/agent.toml     written once, then yours: a later start reads what stands there
    .rack/gpuN/agentd.log     what the agent said
    .rack/gpuN/...            the agent's state
    .rack/rack.json           which agents were started, for agentctl; goes away on stop
    .rack/rack.lock           held while a rack is started or stopped; goes away on stop

Unix sockets lie elsewhere, under a short path, because a socket's path has at most 107 bytes.
"""

import fcntl
import hashlib
import json
import os
import secrets
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.client import FAILED, REFUSED, USAGE, AgentctlError
from cli.files import put
from cli.rack.ports import Claims, free_ports
from cli.table import plural

PORTS_PER_HOST = 3
HOSTS_MAX = 64
RUN_DIR_BYTES_MAX = 60
"""Longest run directory, bytes: what agents add to it must fit into a socket's path."""
LOCK_S = 60.0


@dataclass(frozen=True)
class RackHost:
    """One host of the rack, as its agent.toml says."""

    name: str
    config: Path
    state_dir: Path
    run_dir: Path
    gossip: str
    control: str
    http: str

    @property
    def socket(self) -> Path:
        return self.run_dir / "agent.sock"

    @property
    def log(self) -> Path:
        return self.config.with_name("agentd.log")

    @property
    def address(self) -> str:
        """For agentctl."""
        return f"unix:{self.socket}"


def run_root(directory: Path, environ: Mapping[str, str]) -> Path:
    """Where this rack's sockets are made: short, this user's, and different for each folder."""
    name = run_root_name(directory)
    base = environ.get("XDG_RUNTIME_DIR") or "/tmp"
    if not os.path.isdir(base) or len(os.fsencode(base)) + len(name) + 8 > RUN_DIR_BYTES_MAX:
        base = "/tmp"
    return Path(base) / name


def run_root_name(directory: Path) -> str:
    return f"covey-{os.geteuid()}-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:8]}"


def run_roots(directory: Path, hosts: Sequence[RackHost], environ: Mapping[str, str]) -> list[Path]:
    """Every folder that is this rack's alone: XDG_RUNTIME_DIR may have been another one when it was started."""
    name = run_root_name(directory)
    made = {host.run_dir.parent for host in hosts if host.run_dir.parent.name == name}
    return sorted(made | {run_root(directory, environ), Path("/tmp") / name})


def hosts_of(directory: Path) -> list[RackHost]:
    """Every host that has an agent.toml here, by number. AgentctlError names a file that cannot be read."""
    found = directory.glob("*/agent.toml")
    return [read_host(path) for path in sorted(found, key=lambda path: (len(path.parent.name), path.parent.name))]


def read_host(config: Path) -> RackHost:
    def section(name: str) -> Any:
        value = tree.get(name, {})
        return value if isinstance(value, dict) else {}

    try:
        tree = tomllib.loads(config.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise AgentctlError(
            USAGE, f"{config} cannot be read", str(error), "correct it, or remove it: the next start writes a new one"
        ) from None
    for key in ("name", "state_dir", "run_dir"):
        if not isinstance(tree.get(key), str):
            raise AgentctlError(
                USAGE,
                f"{config} lacks `{key}`",
                "every host of a rack on one machine needs this setting",
                "remove the file and start again",
            )
    state_dir = Path(tree["state_dir"])
    if state_dir != config.parent and state_dir.parts[-2:] == config.parent.parts[-2:]:
        # Two racks with one state and the same sockets would stop one another.
        why, next_step = (
            f"its files still name {state_dir}",
            f"remove {config.parent.parent}: the next start writes it again",
        )
        raise AgentctlError(USAGE, f"the rack in {config.parent.parent} was copied or moved here", why, next_step)
    return RackHost(
        name=tree["name"],
        config=config,
        state_dir=state_dir,
        run_dir=Path(tree["run_dir"]),
        gossip=str(section("gossip").get("bind", "")),
        control=str(section("control").get("bind", "")),
        http=str(section("http").get("bind", "")),
    )


def generate(
    directory: Path, hosts: int, gpus: int, environ: Mapping[str, str], claims: Claims, devices: str = "simulated"
) -> list[RackHost]:
    """The first `hosts` hosts of the rack; the files of those that have none yet are written. What is there stays.
    `devices`: of a new host, `gpus` of them: `simulated`, or `cpu`, cores of this machine, which all hosts share; or
    `nvml`, the GPUs that this machine's driver lists, of one host alone."""
    if devices == "nvml" and hosts != 1:
        why = "each host would give the same GPUs to jobs"
        raise AgentctlError(
            USAGE, f"--hosts {hosts} cannot be used with --devices nvml", why, "covey-rack run --hosts 1 --devices nvml"
        )
    if not 1 <= hosts <= HOSTS_MAX:
        raise AgentctlError(USAGE, f"invalid --hosts {hosts}", f"expected 1 to {HOSTS_MAX}", "covey-rack run --hosts 4")
    directory.mkdir(parents=True, exist_ok=True)
    key = directory / "gossip.key"
    if not key.exists():
        write_new(key, f"# The gossip key of this rack: who has it may join.\n{secrets.token_hex(32)}\n", 0o600)
    there = hosts_of(directory)
    names = {host.name for host in there}
    missing = [name for name in (f"gpu{n}" for n in range(1, hosts + 1)) if name not in names]
    ports = iter(free_ports(directory, PORTS_PER_HOST * len(missing), taken_by(there), claims))
    plan = {name: [next(ports) for _ in range(PORTS_PER_HOST)] for name in missing}
    seeds = [host.gossip for host in there] + [f"127.0.0.1:{gossip}" for gossip, _, _ in plan.values()]
    voters = voters_of(there) or sorted(names | set(missing))[: 3 if hosts >= 3 else 1]
    root = run_root(directory, environ)
    for name, (gossip, control, http) in plan.items():
        folder = directory / name
        folder.mkdir(mode=0o700, exist_ok=True)
        text = TEMPLATE.format(
            name=name,
            state_dir=folder,
            run_dir=root / name,
            key_file=key,
            gossip=gossip,
            control=control,
            http=http,
            seeds=json.dumps(seeds[:3]),
            voters=json.dumps(voters),
            gpus=gpu_lines(devices, gpus),
        )
        write_new(folder / "agent.toml", text, 0o644)
    return hosts_of(directory)[:hosts]


TEMPLATE = """\
# One host of a rack on this machine. Written once by covey-rack; change what you like, then: covey-rack stop, start.
# Every setting that is not here has its default; `agentd --check --config THIS` says whether the file is good.

name = "{name}"
state_dir = "{state_dir}"
run_dir = "{run_dir}"              # unix sockets: short, since a socket's path has at most 107 bytes
advertise = "127.0.0.1"

[gossip]                           # who is there
bind = "127.0.0.1:{gossip}"        # UDP
seeds = {seeds}
key_file = "{key_file}"

[control]                          # messages between agents
bind = "127.0.0.1:{control}"       # TCP, ZeroMQ

[http]                             # the API is on run_dir/agent.sock; this adds a page and metrics for a browser
bind = "127.0.0.1:{http}"

[leader]
voters = {voters}   # an odd number; every other host only follows the log

[gpus]
{gpus}

[memory]                           # remote memory
lend = "128 MiB"                   # at most, to other hosts
slab = "16 MiB"
same_host = "socket"               # each agent here stands for a host of its own

[scheduler]

[aggregator]
"""

SIMULATED = """\
simulated = {gpus}                      # GPUs to pretend
simulated_memory = "16 GiB\""""
REAL = """\
backend = "nvml"                   # the GPUs that NVIDIA's driver lists"""
CPU_MEMORY = "2 GiB"
"""Memory of each device that is made of cores."""


def gpu_lines(devices: str, gpus: int) -> str:
    """Section [gpus] of a new host."""
    match devices:
        case "nvml":
            return REAL
        case "cpu":
            return cpu_devices(gpus)
        case _:
            return SIMULATED.format(gpus=gpus)


def cpu_devices(count: int) -> str:
    """The cores of this machine in `count` parts, as devices of one host. AgentctlError when there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(cores):
        why = f"a device needs at least one core, and this machine has {plural(len(cores), 'core')} for us"
        raise AgentctlError(USAGE, f"invalid --gpus {count} with --devices cpu", why, "covey-rack run --gpus 1")
    parts = [cores[len(cores) * n // count : len(cores) * (n + 1) // count] for n in range(count)]
    listed = ",\n".join(f'  {{cores = "{",".join(map(str, part))}", memory = "{CPU_MEMORY}"}}' for part in parts)
    said = "# CPU cores instead of GPUs. The hosts of this rack share the machine, so they share these cores."
    return f"{said}\ncpu = [\n{listed},\n]"


def voters_of(hosts: Sequence[RackHost]) -> list[str]:
    """What the first host's file says; empty when there is none."""
    if not hosts:
        return []
    leader = tomllib.loads(hosts[0].config.read_text()).get("leader", {})
    voters = leader.get("voters", []) if isinstance(leader, dict) else []
    return [str(name) for name in voters]


def write_new(path: Path, text: str, mode: int) -> None:
    """Never over a file that is there."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(file, "w") as out:
        out.write(text)


# ---- ports -----------------------------------------------------------------------------------------------------------


def taken_by(hosts: Sequence[RackHost]) -> set[int]:
    binds = [bind for host in hosts for bind in (host.gossip, host.control, host.http)]
    return {int(port) for port in (bind.rpartition(":")[2] for bind in binds) if port.isdigit()}


# ---- sockets, lock, rack.json ----------------------------------------------------------------------------------------


def make_run_dirs(hosts: Sequence[RackHost]) -> None:
    """Mode 0700, the outer one 0711: a volume's socket may be another user's, who must get there. AgentctlError when
    another user made the folder first: its sockets would be theirs."""
    for host in hosts:
        for folder, mode in ((host.run_dir.parent, 0o711), (host.run_dir, 0o700)):
            folder.mkdir(mode=mode, exist_ok=True)
            found = folder.lstat()
            if found.st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink():
                why = f"it belongs to user {found.st_uid}"
                raise AgentctlError(REFUSED, f"cannot use {folder} for sockets", why, "set XDG_RUNTIME_DIR")


PROOF_LOCK = "proof.lock"


@contextmanager
def locked(directory: Path, name: str = "rack.lock", patience_s: float = LOCK_S) -> Iterator[None]:
    """One at a time: start and stop, or with `PROOF_LOCK` two proofs, which would write over each other's pages. The
    file goes away with the lock."""
    path = directory / name
    until_s = time.monotonic() + patience_s
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            if time.monotonic() > until_s:
                why = f"another covey-rack holds {path}"
                raise AgentctlError(FAILED, "the rack is busy", why, "wait until it has ended, or end it") from None
            time.sleep(0.1)
            continue
        if _is_current(file, path):
            break
        os.close(file)  # its holder removed it between our open and our lock
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _is_current(file: int, path: Path) -> bool:
    try:
        return os.fstat(file).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def write_rack(directory: Path, hosts: Sequence[RackHost], pids: Mapping[str, tuple[int, int]]) -> None:
    """rack.json, where agentctl looks."""
    rows = [
        {
            "name": host.name,
            "socket": str(host.socket),
            "http": host.http,
            "config": str(host.config),
            "pid": pids.get(host.name, (0, 0))[0],
            "started": pids.get(host.name, (0, 0))[1],
        }
        for host in hosts
    ]
    text = json.dumps({"schema": 1, "directory": str(directory), "hosts": rows}, indent=2) + "\n"
    put(directory / "rack.json", text, 0o600)


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""

"""Hosts made of namespaces, on one machine.

The driver stays outside: it enters namespaces with nsenter, and reaches sockets and files through folders that are
bound into each host:

    FOLDER/gpu1/etc     /etc/covey        agent.toml, gossip.key
    FOLDER/gpu1/run     /run/covey        sockets: FOLDER/gpu1/run/agent.sock is the agent's
    FOLDER/gpu1/state   /var/lib/covey    survives the host's power; a size makes it a file system of its own
    FOLDER/gpu1/root    $HOME             the working directory of what runs there

Every /etc/hosts has the names of all hosts. Packets between two hosts vanish (`cut`) by a wrong hardware address in
the neighbour table of the sender, so that the sender is told nothing, as when a switch loses them.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

NOWHERE = "02:00:00:00:00:fe"
"""A hardware address that no host has."""
INIT, GUARD = Path(__file__).with_name("init.py"), Path(__file__).with_name("guard.py")
COMMANDS = ("unshare", "nsenter", "ip", "mount")
START_S = 20.0

SET_UP = """
set -e
mount -t proc proc /proc
mkdir -p "$FOLDER/upper" "$FOLDER/work"
mount -t tmpfs tmpfs /run
mkdir -p /run/covey /run/upper /run/work
mount --bind "$FOLDER/run" /run/covey
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work /etc
mkdir -p /etc/covey
mount --bind "$FOLDER/etc" /etc/covey
mount --bind "$FOLDER/hosts" /etc/hosts
: > "$FOLDER/resolv.conf"
if [ -e /etc/resolv.conf ]; then mount --bind "$FOLDER/resolv.conf" /etc/resolv.conf; fi
mount -t tmpfs tmpfs /var/lib
mkdir -p /var/lib/covey
mount --bind "$FOLDER/state" /var/lib/covey
hostname "$NAME"
ip link set lo up
cd "$FOLDER/root"
exec "$PYTHON" -I -S "$INIT"
"""


class NoLaboratory(Exception):
    """Namespaces cannot be made here; the text says why, and what would help."""


@dataclass(frozen=True)
class Network:
    """One bridge. `prefix`: the addresses of its hosts up to their number, such as `10.77.0.` or `fd77::`."""

    prefix: str
    bits: int = 24

    def address(self, number: int) -> str:
        return f"{self.prefix}{number}"


IPV4 = Network("10.77.0.")
SECOND = Network("10.78.0.")
IPV6 = Network("fd77::", 64)


def why_not() -> str:
    """Why no laboratory can be built on this machine; empty when it can."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)}: not found; next: apt install iproute2 util-linux"
    tried = subprocess.run(
        ["unshare", *_new_user(), "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True
    )
    if tried.returncode:
        return f"{tried.stderr.strip()}; next: run as root, or allow user namespaces"
    return ""


def _new_user() -> list[str]:
    return [] if os.geteuid() == 0 else ["--user", "--map-root-user"]


def _old_user() -> list[str]:
    return [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]


@dataclass(eq=False)
class Host:
    set_up: ClassVar[str] = SET_UP
    """Script that bash runs before the first process begins."""
    name: str
    number: int
    folder: Path
    networks: tuple[Network, ...]
    lab: "Laboratory"
    init: "subprocess.Popen[bytes] | None" = None
    init_pid: int = 0
    environ: dict[str, str] = field(default_factory=dict)
    started: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    """Processes started by `popen`: an nsenter stops itself when what it started is stopped, and must be ended with
    its host."""

    @property
    def address(self) -> str:
        return self.networks[0].address(self.number)

    @property
    def api(self) -> str:
        """Address of the host's agent for agentctl, from outside."""
        return f"unix:{self.folder}/run/agent.sock"

    @property
    def is_up(self) -> bool:
        return self.init is not None and self.init.poll() is None

    # ---- power ----

    def made_with(self) -> dict[str, str]:
        """Variables of the script `set_up`."""
        return {"FOLDER": str(self.folder), "NAME": self.name, "PYTHON": sys.executable, "INIT": str(INIT)}

    def power_on(self) -> None:
        """Start an empty process tree on the same disk. Raises NoLaboratory when the namespaces cannot be made."""
        self.init = subprocess.Popen(
            [
                *self.lab.inside(),
                *("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"),
                *("--propagation", "private", "bash", "-c", self.set_up),
            ],
            env={**os.environ, **self.made_with()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.lab.guarded(self.init.pid)
        assert self.init.stdout is not None
        assert self.init.stderr is not None
        if self.init.stdout.readline() != b"up\n":
            raise NoLaboratory(f"{self.name}: {self.init.stderr.read().decode(errors='replace').strip()}")
        self.init_pid = _only_child(self.init.pid)
        self.lab.guarded(self.init_pid)
        for at, network in enumerate(self.networks):
            port = f"h{self.number}n{at}"
            _tried([*self.lab.inside(), "ip", "link", "del", port])  # the kernel may still be taking the old one apart
            self.lab.ip("link", "add", port, "type", "veth", "peer", "name", f"eth{at}", "netns", str(self.init_pid))
            self.lab.ip("link", "set", port, "master", f"br{at}", "up")
            self.ip("addr", "add", f"{network.address(self.number)}/{network.bits}", "dev", f"eth{at}", *_dad(network))
            self.ip("link", "set", f"eth{at}", "up")
        if self.lab.default_route:
            self.ip("route", "add", "default", "via", self.networks[0].address(254))

    def power_off(self) -> None:
        """End everything on this host in the middle of what it does; its disk stays."""
        if self.init is None:
            return
        self.init.kill()
        self.init.wait()
        for process in self.started:
            process.kill()
            process.wait()
        self.started.clear()
        for stream in (self.init.stdin, self.init.stdout, self.init.stderr):
            if stream is not None:
                stream.close()
        self.init, self.init_pid = None, 0

    # ---- commands ----

    def enter(self) -> list[str]:
        assert self.init_pid, f"{self.name} has no power"
        pid = str(self.init_pid)
        return ["nsenter", "--target", pid, *_old_user(), "--net", "--mount", "--uts", "--ipc", "--pid"]

    def popen(self, argv: Sequence[str], log: Path | None = None, **more: str) -> "subprocess.Popen[bytes]":
        """Start a command on this host, with its output at the end of `log`."""
        out = log.open("ab") if log is not None else None
        try:
            process = subprocess.Popen(
                [*self.enter(), *argv],
                cwd="/",
                env={**self.environment(), **more},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            self.started.append(process)
            self.lab.guarded(process.pid)
            return process
        finally:
            if out is not None:
                out.close()

    def conversation(self, argv: Sequence[str]) -> "subprocess.Popen[str]":
        """Start a command on this host that reads lines from a pipe and writes lines into another one."""
        process = subprocess.Popen(
            [*self.enter(), *argv],
            cwd="/",
            env=self.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lab.guarded(process.pid)
        return process

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, **more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*self.enter(), *argv],
            cwd="/",
            env={**self.environment(), **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def shell(self, line: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
        """Run a line that a person types on this host."""
        return self.run(["bash", "-c", f'cd "$HOME"; {line}'], timeout_s)

    def environment(self) -> dict[str, str]:
        """Environment of a person who logs in on this host; all that is Covey's in it is where its programs are."""
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.folder / "root"),
            "LANG": "C.UTF-8",
            **self.environ,
        }

    def ip(self, *words: str) -> None:
        _checked([*self.lab.inside(), "nsenter", "--target", str(self.init_pid), "--net", "ip", *words])

    # ---- processes ----

    def processes(self) -> dict[int, str]:
        """Pid as seen from outside, and command line, of all that runs on this host except its init."""
        found: dict[int, str] = {}
        try:
            mine = os.readlink(f"/proc/{self.init_pid}/ns/pid")
        except OSError:
            return found
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.init_pid:
                continue
            try:
                if os.readlink(entry / "ns" / "pid") == mine:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    found[int(entry.name)] = b" ".join(words).decode(errors="replace").strip()
            except OSError:
                continue
        return {pid: command for pid, command in sorted(found.items()) if command}

    def find(self, *words: str) -> list[int]:
        """Pids of processes whose command line holds all of these words."""
        return [pid for pid, command in self.processes().items() if all(word in command.split() for word in words)]

    # ---- the network ----

    def cut(self, other: "Host") -> None:
        """Let packets from this host to `other` vanish without an error."""
        for at, network in enumerate(self.networks):
            words = ("lladdr", NOWHERE, "dev", f"eth{at}", "nud", "permanent")
            self.ip("neigh", "replace", network.address(other.number), *words)

    def join(self, other: "Host") -> None:
        for at, network in enumerate(self.networks):
            _tried(
                [
                    *self.lab.inside(),
                    *("nsenter", "--target", str(self.init_pid), "--net"),
                    *("ip", "neigh", "del", network.address(other.number), "dev", f"eth{at}"),
                ]
            )

    def cable(self, plugged: bool) -> None:
        """Plug or unplug all networks of this host, at the switch."""
        for at in range(len(self.networks)):
            self.lab.ip("link", "set", f"h{self.number}n{at}", "up" if plugged else "down")


class Laboratory:
    """A switch and its hosts; use it with `with`. Nothing of it is left at the end, nor when the driver is killed
    (`guard.py`)."""

    def __init__(
        self,
        hosts: int,
        networks: Sequence[Network] = (IPV4,),
        default_route: bool = False,
        disk: str = "",
        names: Mapping[int, str] | None = None,
        kind: type[Host] = Host,
    ) -> None:
        """Prepare hosts. `disk`: a size such as `64m` makes the state of each host a file system of that size; empty:
        a folder."""
        self.folder = Path(tempfile.mkdtemp(prefix="covey-lab-"))
        self.networks, self.default_route, self.disk = tuple(networks), default_route, disk
        self._switch: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self.hosts: dict[str, Host] = {}
        for number in range(1, hosts + 1):
            name = (names or {}).get(number, f"gpu{number}")
            self.hosts[name] = kind(name, number, self.folder / name, self.networks, self)

    def __enter__(self) -> "Laboratory":
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        if trouble := why_not():
            raise NoLaboratory(trouble)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        assert self._guard.stdout is not None
        self._guard.stdout.readline()
        self._tell(f"folder {self.folder}")
        self._switch = subprocess.Popen(
            [
                *("unshare", *_new_user(), "--net", "--mount", "--fork", "--kill-child", "--propagation", "private"),
                *(sys.executable, "-I", "-S", str(INIT)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.guarded(self._switch.pid)
        assert self._switch.stdout is not None
        self._switch.stdout.readline()
        self._pid = _only_child(self._switch.pid)
        self.ip("link", "set", "lo", "up")
        for at, network in enumerate(self.networks):
            self.ip("link", "add", f"br{at}", "type", "bridge")
            self.ip("addr", "add", f"{network.address(254)}/{network.bits}", "dev", f"br{at}", *_dad(network))
            self.ip("link", "set", f"br{at}", "up")
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{host.address} {host.name}" for host in self.hosts.values()]
        for host in self.hosts.values():
            for part in ("etc", "run", "state", "root"):
                (host.folder / part).mkdir(parents=True, mode=0o700)
            (host.folder / "hosts").write_text("\n".join(lines) + "\n")
            if self.disk:
                options = f"size={self.disk},mode=0700"
                _checked([*self.inside(), "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(host.folder / "state")])
            host.power_on()

    def close(self) -> None:
        for host in self.hosts.values():
            host.power_off()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
            for stream in (self._switch.stdin, self._switch.stdout):
                if stream is not None:
                    stream.close()
            self._switch = None
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._guard is not None:
            self._tell("done")
            self._guard.communicate()
            self._guard = None

    def guarded(self, pid: int) -> None:
        """Tell the guard of a process that must end with the driver."""
        self._tell(f"pid {pid}")

    def _tell(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # somebody killed it
                self._guard.stdin.write(f"{line}\n".encode())
                self._guard.stdin.flush()

    def inside(self) -> list[str]:
        return ["nsenter", "--target", str(self._pid), *_old_user(), "--net", "--mount"]

    def ip(self, *words: str) -> None:
        _checked([*self.inside(), "ip", *words])

    def state(self, host: Host) -> Path:
        """The state directory of a host, as the driver can read it."""
        return Path(f"/proc/{self._pid}/root") / (host.folder / "state").relative_to("/")


def _dad(network: Network) -> tuple[str, ...]:
    """Options for an address: an IPv6 address is tentative for a second unless duplicate detection is off."""
    return ("nodad",) if ":" in network.prefix else ()


def _checked(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise NoLaboratory(f"{' '.join(argv[-6:])}: {done.stderr.strip()}")


def _tried(argv: Sequence[str]) -> None:
    """Run a command that undoes something, which may have been undone already."""
    subprocess.run(argv, capture_output=True)


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def signal_all(pids: Sequence[int], number: signal.Signals) -> int:
    """Send a signal to these processes; returns how many there were."""
    count = 0
    for pid in pids:
        try:
            os.kill(pid, number)
            count += 1
        except ProcessLookupError:
            continue
    return count

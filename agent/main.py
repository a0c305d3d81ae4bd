"""agentd: one agent. Reads agent.toml, opens the ports, runs until SIGTERM, then leaves the rack and exits 0."""

import argparse
import asyncio
import gc
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import uvloop

from agent import journal, keys
from agent import log as logs
from agent import program as programs
from agent.advertise import settle
from agent.api.http import HttpApi
from agent.compiled.files import told_of_agent
from agent.config import DEFAULTS, TENANTS_NEXT, Config, ConfigError, load, tenants_together
from agent.etc import origins, reload, units
from agent.host import DEVICES_FILE, JOBS_SOCKET, HostAgent
from agent.keyring.policy import KeyRing
from agent.keyring.service import FILE as RING
from agent.keyring.service import of_file, unsealed
from agent.locks import StateDirectoryTaken, StateLock
from agent.ports.clock import RealClock
from agent.ports.devices.choice import backend
from agent.ports.disk import DirectoryDisk
from agent.ports.job_records import RECORDS, ThreadedRecords
from agent.ports.last_room import FULL, RESERVE_BYTES_MAX
from agent.ports.memory.pages import FILES, FILES_A_HOST, MemfdPages, allow_many
from agent.ports.network.bytes import SocketBytes
from agent.ports.network.datagrams import UdpDatagrams
from agent.ports.network.links import MORE_FILES, ZmqLinks
from agent.ports.probes import RealProbes
from agent.ports.processes.forker import Forker, NotForked, begin
from agent.ports.processes.processes import ProgramBase, RealProcesses
from agent.ports.starter.starter_link import StarterLink
from agent.ports.starter.starter_wire import SOCKET
from agent.ports.users import SystemUsers
from agent.raft.disk import FOLDER, DiskRefused, Store
from agent.raft.service import voters
from agent.tasks import Tasks
from covey.core.version import VERSION
from covey.ports.addresses import ip_port
from covey.ports.env import Env
from covey.verbs.pyverbs_port import PyVerbs
from covey.wire.checked import Damaged, StateRefused

FORCED_EXIT_S = 5.0
"""The most seconds from SIGTERM to exit; what takes longer is cut off."""
LOG_RESERVE_BYTES = RESERVE_BYTES_MAX
"""Bytes set aside on disk for the log and records: enough for hours, in which an operator can make room."""
FILES_OF_UNIT = 65_536
"""What the systemd unit allows: LimitNOFILE."""
LEAVE_S = FORCED_EXIT_S - 1
"""The part of `FORCED_EXIT_S` for the orderly end, one after the other: the HTTP listeners (`agent.api.http`), the
plugins (`agent.runtime.plugin_runtime`), the log (`agent.raft.service`: a successor, then a write under way), gossip.
Each has a limit of its own, so that gossip tells the other hosts that this host leaves even when a plugin hangs."""
LAG_PERIOD_S = 0.1
STATUS_PERIOD_S = 5.0
COLLECT_AFTER = (50_000, 20, 100)
"""The thresholds given to `gc.set_threshold` (chosen): reference counts free nearly everything here, cycles are few."""


class Notifier:
    """Tells systemd the agent's state (sd_notify(3)): one datagram of `KEY=value` lines to $NOTIFY_SOCKET. It does
    nothing where there is no systemd."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._path = environ.get("NOTIFY_SOCKET", "")
        period_us = environ.get("WATCHDOG_USEC", "")
        self.watchdog_s = int(period_us) / 1e6 if period_us.isdigit() else None
        """Seconds for which systemd waits for a WATCHDOG=1 before it kills the agent; None: it does not watch."""

    def tell(self, **values: str | int) -> None:
        """Send lines, as in `tell(READY=1, STATUS="4 hosts alive")`. A full or absent socket is ignored."""
        if not self._path:
            return
        address = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        text = "\n".join(f"{key}={value}" for key, value in values.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            try:
                sender.sendto(text.encode(), address)
            except OSError:
                return


class Daemon:
    """One agent in one process: its ports, its HTTP listeners, its notifications to systemd. `read`: the configuration
    as its file has it; `config`: with what was found out since (`agent.advertise`)."""

    def __init__(
        self, config: Config, read: Config, ring: KeyRing, environ: Mapping[str, str], forker: Forker | None = None
    ) -> None:
        self._config, self._ring, self._environ, self._forker = config, ring, environ, forker
        self._path = None if read.source == DEFAULTS else read.source
        self._in_force = origins.settings_of(read)
        """Every setting that is in force, as a file would have it."""
        self._unapplied = ""
        """What `systemctl status` says of a file that is not in force; empty: it is."""
        self._notifier = Notifier(environ)
        self._log = logs.for_host(config.name)
        self._stop = asyncio.Event()
        self._away_s = config.gossip.away_s
        """The seconds of absence that are gossiped at the end: systemd starts the agent again, also after a failure."""
        self._failure = ""
        self._refused: StateRefused | None = None
        self._tasks = Tasks(self._log, self._fatal)
        self._watching: object = None
        self._clock = RealClock()
        socket = f"{config.run_dir}/{JOBS_SOCKET}"
        remembered = f"{config.state_dir}/{DEVICES_FILE}"
        self._devices = backend(config.gpus, config.name, socket, self._log, self._clock.now_s, remembered)

    def _fatal(self, task: str, error: BaseException) -> None:
        self._failure = self._failure or f"{task}: {error!r}"
        if isinstance(error, StateRefused):
            self._refused = self._refused or error
        self._stop.set()

    def _allow_files(self) -> None:
        """Let this process open as many files as it may, and say if these are few for the largest rack."""
        needs = FILES + FILES_A_HOST * self._config.gossip.hosts_max
        may = allow_many(max(needs, FILES_OF_UNIT))
        if may < needs:
            self._log.warning("this agent may open few files", may=may, needs=needs, next=MORE_FILES)

    def _asked_to_stop(self, away_s: int) -> None:
        self._away_s = away_s
        self._stop.set()

    async def run(self) -> int:
        """Run the agent, and return its exit status: 0 after SIGTERM, 1 after an unhandled error, 3 and 4 when this
        host's state cannot be trusted (`covey.wire.checked.StateRefused`): a restart does not help."""
        loop = asyncio.get_running_loop()
        for number, away_s in ((signal.SIGTERM, self._config.gossip.away_s), (signal.SIGINT, 0)):
            loop.add_signal_handler(number, self._asked_to_stop, away_s)
        hung_up: list[int] = []  # SIGHUP while it starts: its file may have changed since it was read
        loop.add_signal_handler(signal.SIGHUP, hung_up.append, signal.SIGHUP)
        self._allow_files()
        env = self._env()
        agent = HostAgent(env, self._config, self._ring)
        socket_path = f"{self._config.run_dir}/agent.sock"
        http = HttpApi(agent, socket_path, self._config.http)
        try:
            await self._devices.start_up()
            await agent.start()
            await http.start()
        except OSError as error:
            _cannot_start(error, self._config)
            return 1
        except StateRefused as refused:
            return _refuse(refused)
        settle_collector()
        self._watching = self._tasks.spawn("agent: lag", self._watch(agent))
        loop.add_signal_handler(signal.SIGHUP, self._reload, agent, http)
        self._notifier.tell(READY=1, STATUS=await self._status(agent))
        if hung_up:
            self._reload(agent, http)
        await self._stop.wait()
        self._notifier.tell(STOPPING=1)
        self._log.info("leaving", why=self._failure or "asked to")
        try:
            async with asyncio.timeout(LEAVE_S):
                await http.stop()
                await agent.stop(leave=True, away_s=self._away_s)
                await self._tasks.cancel_all()
        except TimeoutError:
            self._log.warning("the agent did not leave in time and is cut off")
        self._devices.close()
        if self._refused is not None:
            return _refuse(self._refused)
        return 1 if self._failure else 0

    def _reload(self, agent: HostAgent, http: HttpApi) -> None:
        """Read agent.toml again, and apply what is live. One that is not valid changes nothing."""
        self._notifier.tell(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)
        try:
            now = load(self._path, self._environ)
        except ConfigError as error:
            self._log.error("agent.toml is not applied", what=error.what, why=error.why, next=error.next)
            told = self._unapplied = "agent.toml is not valid, what was in force stays: journalctl -u covey -p err -n 1"
        else:
            differs = reload.compared(self._in_force, origins.settings_of(now))
            self._config = reload.applied(self._config, now, differs.live)
            self._in_force |= {name: value for name, value in origins.settings_of(now).items() if name in differs.live}
            logs.set_level(self._config.log.level)
            http.rename(self._config.http.names)
            agent.reconfigure(self._config)
            say = self._log.warning if differs.restart else self._log.info
            say("agent.toml was read again", told=differs.told)
            self._unapplied = f"needs a restart: {', '.join(differs.restart)}" if differs.restart else ""
            told = f"agent.toml was read again; {differs.told}"
        self._notifier.tell(READY=1, STATUS=told)

    def _env(self) -> Env:
        config = self._config
        base = ProgramBase(config.name, config.state_dir, config.run_dir, config.advertise, log_level=config.log.level)
        bytes = SocketBytes(self._log)
        return Env(
            host=config.name,
            clock=self._clock,
            rng=random.Random(int.from_bytes(os.urandom(16))),
            entropy=os.urandom,
            spawn=self._tasks.spawn,
            log=self._log,
            datagrams=UdpDatagrams(),
            links=ZmqLinks(self._log),
            bytes=bytes,
            disk=DirectoryDisk(config.state_dir, LOG_RESERVE_BYTES),
            processes=RealProcesses(base, self._forker),
            pages=MemfdPages(),
            probes=RealProbes(self._devices),
            run_dir=config.run_dir,
            verbs=PyVerbs(),
            starter=StarterLink(bytes, config.jobs.users_dir, base),
            byte_path=told_of_agent(),
            users=SystemUsers(),
            records=ThreadedRecords(os.path.join(config.state_dir, RECORDS), self._log),
        )

    async def _watch(self, agent: HostAgent) -> None:
        """Measure how late the loop is; send systemd's watchdog its signal and one line of status."""
        clock, next_status_s, next_dog_s = agent.env.clock, 0.0, 0.0
        dog_s = self._notifier.watchdog_s
        while True:
            before_s = clock.now_s()
            await asyncio.sleep(LAG_PERIOD_S)
            now_s = clock.now_s()
            agent.loop_lag_s = max(0.0, now_s - before_s - LAG_PERIOD_S)
            agent.loop_lags.see(agent.loop_lag_s)
            if dog_s is not None and now_s >= next_dog_s:
                self._notifier.tell(WATCHDOG=1)
                next_dog_s = now_s + dog_s / 3
            if now_s >= next_status_s:
                self._notifier.tell(STATUS=await self._status(agent))
                next_status_s = now_s + STATUS_PERIOD_S

    async def _status(self, agent: HostAgent) -> str:
        alive = sum(view.state == "alive" for view in agent.hosts())
        leader = f"leader {agent.log.leader}" if agent.log.leader else "no leader"
        failed = [name for name, health in agent.health.items() if health.state == "failed"]
        leader += f"; {agent.log.trouble}" if agent.log.trouble else ""
        leader += f"; {self._unapplied}" if self._unapplied else ""
        return f"{alive} {'host' if alive == 1 else 'hosts'} alive, {leader}" + (
            f", FAILED plugins: {', '.join(failed)}" if failed else ""
        )


def settle_collector() -> None:
    """Leave the objects that exist now out of garbage collections, which then stop the loop for less long, and less
    often. With 100,000 jobs in the log one full collection took 40 to 160 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def check_own(run_dir: str) -> None:
    """ConfigError unless only this user or root can put a socket into the folder: another user's socket would receive
    submissions."""
    found = os.stat(run_dir)
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        why = (
            f"it belongs to uid {found.st_uid} and has mode {found.st_mode & 0o777:o}; others could replace our sockets"
        )
        raise ConfigError(f"cannot use run_dir {run_dir}", why, f"chmod 700 {run_dir}, or set run_dir in agent.toml")


def check_wheels() -> None:
    """ConfigError when covey-agent and covey-job of this environment are not of one version: an upgrade took one."""
    try:
        installed = metadata.version("covey-agent")
    except metadata.PackageNotFoundError:
        return  # a tree that was not installed
    if installed != VERSION:
        why = f"covey-agent is {installed}, covey-job is {VERSION}"
        raise ConfigError("the installed wheels have different versions", why, "install both anew, of one version")


def check(config: Config, environ: Mapping[str, str]) -> int:
    """Print that the file is good, and which names do not resolve now: they may when the agent runs. Return the exit
    status: 1 where tenants are not kept apart, unless systemd asks: an agent that ran yesterday is to start, and then
    says so itself. ConfigError."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        settled = runner.run(settle(config, UdpDatagrams()))
        began = os.path.isdir(os.path.join(config.state_dir, FOLDER))
        told = runner.run(log_differs(config)) if began else ""
    on = ", ".join(config.plugins)
    print(f"agentd: {config.source} is valid: host {config.name} at {settled.config.advertise}, plugins {on}")
    if told:
        print(f"agentd: {told}")
    for seed, why in settled.unknown.items():
        print(f"agentd: seed {seed} cannot be resolved now\n  why: {why}\n  next: getent hosts {ip_port(seed)[0]}")
    return 0 if is_of_systemd(environ) else check_tenants(config)


def is_of_systemd(environ: Mapping[str, str]) -> bool:
    """Whether systemd started this process for a unit. What it starts inherits its variables; before systemd 248 there
    is none that names the process."""
    pid = environ.get("SYSTEMD_EXEC_PID")
    return "INVOCATION_ID" in environ if pid is None else pid == str(os.getpid())


def check_tenants(config: Config) -> int:
    """Complain where several tenants would run as one user, without limits, though nobody said that they may; the exit
    status. A starter of which nothing can be seen counts as none."""
    if not (what := tenants_together(config)):
        return 0
    starter = os.path.join(config.jobs.users_dir, SOCKET)
    try:
        os.stat(starter)
    except (FileNotFoundError, NotADirectoryError):
        why = f"no starter listens at {starter}"
    except OSError as error:
        why = f"it cannot be seen whether a starter listens at {starter}: {error.strerror}"
    else:
        return 0
    _complain(what, why, TENANTS_NEXT)
    return 1


async def log_differs(config: Config) -> str:
    """A warning when the log of this host names other voters than agent.toml, or cannot be read; else empty."""
    disk = DirectoryDisk(config.state_dir)
    try:
        now = await Store(disk, os.urandom).peek()
    except (DiskRefused, OSError) as error:
        return f"the log cannot be read: {error}"
    finally:
        disk.close()
    return voters.differs(config.leader.voters or (config.name,), now, config.source) if now.voters else ""


def _refuse(refused: StateRefused) -> int:
    _complain(refused.what, refused.why, refused.next)
    return refused.status


def _cannot_start(error: OSError, config: Config) -> None:
    if error.errno in FULL:
        next_step = (
            f"free some space, then start it again: df -h {config.state_dir}; du -xh {config.state_dir} | sort -h"
        )
        _complain("cannot start: the disk of its state directory is full", str(error), next_step)
    else:
        _complain("cannot start", str(error), f"see which process uses it, or change {config.source}")


def _complain(what: str, why: str, next: str) -> None:
    begins = journal.prefix("error", os.environ, sys.stderr)
    for line in (f"agentd: {what}", f"  why: {why}", f"  next: {next}"):
        print(f"{begins}{line}", file=sys.stderr)


def found_ring(state_dir: str, given: list[bytes]) -> KeyRing:
    """The keys of this host: those that it was given since, where there are some, else those of the file. OSError."""
    path = Path(state_dir) / RING
    try:
        return unsealed(path.read_bytes(), given)
    except FileNotFoundError:
        return of_file(given)
    except Damaged as error:
        next_step = "agentctl rack join HOST:7946 --leave-own --token T, if no host answers"
        _complain(f"the keys in {path} do not count", str(error), next_step)
        return of_file(given)


def make_key(path: Path) -> int:
    """Make a key, and return the exit status."""
    try:
        keys.generate(path)
    except OSError as error:
        _complain(
            f"cannot write {path}",
            error.strerror or str(error),
            "name another file; an existing key is never overwritten",
        )
        return 2
    print(f"agentd: {path} is written; copy it to every host of the rack, and to nobody else")
    return 0


def show_config(config: Config) -> None:
    """Print every setting, its value and where it came from."""
    written = origins.written_in(config.source) if config.source != DEFAULTS else set()
    try:
        print("\n".join(origins.shown(config, written, os.environ)), flush=True)
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def install_unit(root: Path) -> int:
    """Install the units of this environment under `root`, and return the exit status."""
    try:
        if root == Path("/"):
            units.check_open(units.environment())
        for placed in units.install(root, units.environment()):
            print(f"agentd: {placed.path}: {placed.outcome}")
    except units.NotInstalled as error:
        _complain(error.what, error.why, error.next)
        return 2
    except OSError as error:
        _complain(
            f"cannot write {error.filename}", error.strerror or str(error), "run it as root, or give --prefix DIR"
        )
        return 2
    if root == Path("/"):
        print("agentd: next: " + " && ".join(units.NEXT))
    return 0


def begin_forker() -> Forker | None:
    """The forker of this agent's programs, which has their code in memory and nothing of this host; None: there can be
    none, and programs are executed."""
    for name in programs.OF_NO_PLUGIN:  # those of plugins came with these
        programs.program_named(name)
    try:
        return begin(programs.main)
    except NotForked:
        return None


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("agentd", description="Covey's agent: one per GPU host.")
    parser.add_argument("--config", metavar="FILE", help="agent.toml; without it every setting has its default")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    parser.add_argument(
        "--show-config", action="store_true", help="print every setting and where it came from, and exit"
    )
    parser.add_argument(
        "--install-unit",
        action="store_true",
        help="write units, the agent's user, folders and agent.toml where systemd looks for them, and exit",
    )
    parser.add_argument("--prefix", metavar="DIR", default="/", help="with --install-unit: the root to write under (/)")
    parser.add_argument("--make-key", metavar="FILE", help="write a new gossip key, the same for all hosts, and exit")
    parser.add_argument("--version", action="version", version=VERSION)
    return parser


def main() -> None:
    options = arguments().parse_args()
    if options.make_key:
        sys.exit(make_key(Path(options.make_key)))
    if options.install_unit:
        sys.exit(install_unit(Path(options.prefix).absolute()))
    try:
        check_wheels()
        config = load(options.config, os.environ)
        if options.show_config:
            show_config(config)
            return
        if options.check:
            sys.exit(check(config, os.environ))
        os.makedirs(config.state_dir, mode=0o700, exist_ok=True)
        os.makedirs(config.run_dir, mode=0o700, exist_ok=True)
        check_own(config.run_dir)
        forker = begin_forker()
        key_path = keys.find(config, os.environ)
        read = keys.load(key_path, make=not config.gossip.key_file, group=config.http.group)
        ring = found_ring(config.state_dir, read)
        lock = StateLock(config.state_dir)
    except StateRefused as refused:
        sys.exit(_refuse(refused))
    except (ConfigError, StateDirectoryTaken) as error:
        _complain(error.what, error.why, error.next)
        sys.exit(2)
    except OSError as error:
        what = error.filename or config.state_dir
        next_step = f"df -h {what}" if error.errno in FULL else "change state_dir or run_dir"
        _complain(f"cannot use {what}", error.strerror or str(error), next_step)
        sys.exit(2)
    logs.configure(config.log.level)

    async def live() -> int:
        try:
            settled = await settle(config, UdpDatagrams())
        except ConfigError as error:
            _complain(error.what, error.why, error.next)
            return 2
        return await Daemon(settled.config, config, ring, os.environ, forker).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(live())
    lock.release()
    sys.exit(status)

"""Run a rack of several agents on this machine, to look at, to break, and to develop with.

run      start the rack, run a real job and remote memory on it, check both, print what happened (make run)
start    start the agents that are not running, and wait until they see each other and have a leader
stop     end every process of the rack and remove its sockets and locks (make stop); state and logs stay
status   list the agents, and which of them run
summary  print what the rack is doing now
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NoReturn

from cli.client import FAILED, NO_AGENT, TRY_AGAIN, USAGE, Agent, AgentctlError
from cli.main import Parser, say_error
from cli.rack import files as rack_files
from cli.rack import ports as rack_ports
from cli.rack import processes as rack_processes
from cli.rack import summary as rack_summary
from cli.rack.files import RackHost
from cli.rack.processes import Ours
from cli.table import Paint, plural, table

UP_S = 40.0
"""Seconds without progress after which a start is given up, and `UP_S_OF_HOST` more for each agent: they answer, see
each other and elect a leader. A crowd on few cores takes minutes, of which each second brings it further."""
UP_S_OF_HOST = 2.0
PROGRESS_S = 5.0
"""Seconds between two lines that say how far a start is."""
LEAVE_S = 5.0
"""How long an agent may take to leave after SIGTERM."""
NOT_HANDED_ON = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
Say = Callable[[str], None]


class _Agentd(subprocess.Popen[bytes]):
    """An agent that is meant to outlive us: forgetting it is not an accident, so no warning at the end."""

    def __del__(self, *_: object) -> None:
        """Does nothing: the parent class would warn that the process still runs."""


class Timer:
    """Lines with the time since the beginning."""

    def __init__(self, say: Say | None = None) -> None:
        self.began_s = time.monotonic()
        self._say = print_line if say is None else say

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.began_s

    def say(self, text: str) -> None:
        self._say(f"{self.passed_s:6.1f} s  {text}")


def print_line(text: str) -> None:
    print(text, flush=True)


# ---- start -----------------------------------------------------------------------------------------------------------


def start(
    directory: Path,
    hosts: int | None,
    gpus: int,
    environ: Mapping[str, str],
    timer: Timer,
    agentd: Sequence[str] | None = None,
    devices: str = "simulated",
) -> list[RackHost]:
    """All hosts, up, seeing each other, with a leader. Agents that run already are left alone. `hosts` None:
    as many as there are, or 4. AgentctlError with the end of the log of an agent that did not come up."""
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    command = agentd_command() if agentd is None else list(agentd)
    with rack_files.locked(directory), rack_ports.Claims() as claims:
        count = hosts if hosts is not None else len(rack_files.hosts_of(directory)) or 4
        rack = rack_files.generate(directory, count, gpus, environ, claims, devices)
        rack_files.make_run_dirs(rack)
        running = {host.name: pid for host in rack if (pid := rack_processes.lock_holder(host.state_dir))}
        started: dict[str, _Agentd] = {}
        for host in rack:
            if host.name not in running:
                check_ports(host)
                started[host.name] = launch(command, host, directory, environ)
        pids = running | {name: process.pid for name, process in started.items()}
        rack_files.write_rack(
            directory, rack, {name: (pid, rack_processes.start_ticks(pid) or 0) for name, pid in pids.items()}
        )
        already = f", {len(running)} were running" if running else ""
        timer.say(f"{plural(len(started), 'agent')} started{already}; files in {directory}")
        wait_up(rack, started, timer)
    return rack


def agentd_command() -> list[str]:
    """The agentd installed beside this Python."""
    found = Path(sys.executable).with_name("agentd")
    if not found.exists():
        next_step = "in a checkout: make setup; elsewhere install covey-agent from its wheel"
        raise AgentctlError(FAILED, "agentd is not installed", f"there is no {found}", next_step)
    return [str(found)]


def check_ports(host: RackHost) -> None:
    for key, bind in (("gossip.bind", host.gossip), ("control.bind", host.control), ("http.bind", host.http)):
        if bind and not bind.endswith(":0") and not rack_ports.is_free(bind):
            what = f"{host.name} cannot start: {bind} is in use"
            raise AgentctlError(
                FAILED,
                what,
                "another process uses it (ss -ltnup)",
                f"end that process, or change {key} in {host.config}",
            )


def launch(command: Sequence[str], host: RackHost, directory: Path, environ: Mapping[str, str]) -> _Agentd:
    """agentd, detached, its output at the end of its log. Everything it starts carries COVEY_RACK, so that stop finds
    it whatever happened."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in NOT_HANDED_ON and not name.startswith(("COVEY_", "MAKE", "MFLAGS"))
    }
    with host.log.open("ab") as log:
        return _Agentd(
            [*command, "--config", str(host.config)],
            cwd=directory,
            env={**kept, "COVEY_RACK": str(directory)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_up(rack: Sequence[RackHost], started: Mapping[str, _Agentd], timer: Timer) -> None:
    """Until every agent answers, sees all others alive, and knows the leader."""
    wait_for(lambda host: not answers(host), started, rack, timer, "do not answer")
    timer.say(f"{plural(len(rack), 'agent')} up")
    wait_for(lambda host: alive_seen(host) < len(rack), started, rack, timer, "do not see all others")
    timer.say(f"every agent sees {len(rack)} hosts alive")
    wait_for(lambda host: leader_of(host) is None, started, rack, timer, "do not know a leader")
    timer.say(f"{leader_of(rack[0])} is the leader")


def wait_for(
    lacks: Callable[[RackHost], bool],
    started: Mapping[str, _Agentd],
    rack: Sequence[RackHost],
    timer: Timer,
    trouble: str,
) -> None:
    """Until no host lacks it, saying how far it is; hosts that once had it are not asked again. An agent that ends
    meanwhile, or no progress for long, is an AgentctlError."""
    found, since_s, said_s = list(rack), time.monotonic(), time.monotonic()
    patience_s = UP_S + UP_S_OF_HOST * len(rack)
    while left := [host for host in found if lacks(host)]:
        for host in rack:
            process = started.get(host.name)
            if process is not None and process.poll() is not None:
                did_not_come_up(host, f"agentd ended with status {process.returncode}")
        now_s = time.monotonic()
        if len(left) < len(found):
            found, since_s = left, now_s
        if now_s - since_s > patience_s:
            names = ", ".join(host.name for host in found)
            did_not_come_up(found[0], f"for {patience_s:.0f} s nothing changed, and these {trouble}: {names}")
        if now_s - said_s > PROGRESS_S:
            said_s = now_s
            timer.say(f"{len(found)} of {plural(len(rack), 'agent')} {trouble} yet")
        time.sleep(0.05)


def did_not_come_up(host: RackHost, why: str) -> NoReturn:
    end = rack_files.tail(host.log)
    shown = f"{why}; the end of {host.log}:\n" + "\n".join("    | " + line for line in end.splitlines())
    raise AgentctlError(FAILED, f"{host.name} did not come up", shown if end else why, f"less {host.log}")


def ask(host: RackHost) -> Agent:
    return Agent([host.address], f"rack host {host.name}", timeout_s=5.0)


def answers(host: RackHost) -> bool:
    try:
        return ask(host).get("leader").host == host.name
    except AgentctlError:
        return False


def alive_seen(host: RackHost) -> int:
    try:
        return sum(row["state"] == "alive" for row in ask(host).get("hosts").data)
    except AgentctlError:
        return 0


def leader_of(host: RackHost) -> str | None:
    try:
        found = ask(host).get("leader").data["leader"]
    except AgentctlError as error:
        if error.code not in (NO_AGENT, TRY_AGAIN):
            raise
        return None
    return None if found is None else str(found)


# ---- stop ------------------------------------------------------------------------------------------------------------


def stop(directory: Path, environ: Mapping[str, str], say: Say = print_line) -> None:
    """End every process of the rack and remove its sockets and locks, also those of agents that were killed. State and
    logs stay. AgentctlError when something could not be ended."""
    directory = directory.absolute()
    with rack_files.locked(directory) if directory.is_dir() else nullcontext():
        rack = rack_files.hosts_of(directory)
        roots = rack_files.run_roots(directory, rack, environ)
        run_dirs = [*roots, *(host.run_dir for host in rack)]
        agents = [ours for ours in rack_processes.find(directory, run_dirs) if ours.kind == "agent"]
        killed = rack_processes.end(agents, LEAVE_S)
        if agents:
            how = f", {killed} had to be killed" if killed else ""
            say(f"{plural(len(agents), 'agent')} left{how}")
        programs = end_programs(directory, run_dirs)
        if programs:
            words = {"agent": "agent", "program": "program", "rank": "job process"}
            counts = {word: sum(ours.kind == kind for ours in programs) for kind, word in words.items()}
            named = [plural(count, word) for word, count in counts.items() if count]
            say(f"{' and '.join(named)} ended")
        leftovers = rack_processes.remove_leftovers(roots, run_dirs, [host.state_dir for host in rack])
        if leftovers:
            say(f"{plural(leftovers, 'socket or lock file')} removed")
        (directory / "rack.json").unlink(missing_ok=True)
        if (directory / rack_files.PROOF_LOCK).exists():  # of a run that was killed; one that goes on keeps it
            with suppress(AgentctlError), rack_files.locked(directory, rack_files.PROOF_LOCK, patience_s=0.0):
                pass
    if not (agents or programs or leftovers):
        say(f"nothing was running in {directory}")
    elif directory.is_dir():
        say(f"stopped; state and logs stay in {directory}")


def end_programs(directory: Path, run_dirs: Sequence[Path]) -> list[Ours]:
    """End what agents left behind, again and again, for a program may start another one meanwhile."""
    ended: dict[Ours, None] = {}
    for attempt in range(5):
        found = rack_processes.find(directory, run_dirs)
        if not found:
            return list(ended)
        rack_processes.end(found, 2.0 if attempt == 0 else 0.3)
        ended |= dict.fromkeys(found)
    left = rack_processes.find(directory, run_dirs)
    if not left:
        return list(ended)
    shown = ", ".join(f"{ours.pid} ({ours.what[:60]})" for ours in left[:5])
    raise AgentctlError(
        FAILED, f"{plural(len(left), 'process')} could not be ended", shown, f"kill -9 {left[0].pid}, then stop again"
    )


# ---- look ------------------------------------------------------------------------------------------------------------


def status(directory: Path, say: Say = print_line) -> int:
    """0 when every agent runs, 5 when none does, 1 in between."""
    rack = rack_files.hosts_of(directory.absolute())
    pids = [rack_processes.lock_holder(host.state_dir) for host in rack]
    rows = [
        (host.name, "running" if pid else "gone", pid, host.address, f"http://{host.http}/" if host.http else "")
        for host, pid in zip(rack, pids, strict=True)
    ]
    say(table(("HOST", "AGENT", "PID", "ADDRESS", "PAGE"), rows, ("PID",), Paint()))
    up = sum(pid is not None for pid in pids)
    say(f"{up} of {plural(len(rack), 'agent')} running; next: {'agentctl hosts' if up else 'covey-rack start'}")
    return 0 if rack and up == len(rack) else FAILED if up else NO_AGENT


def arguments() -> Parser:
    parser = Parser(
        "covey-rack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("verb", choices=("run", "start", "stop", "status", "summary"))
    parser.add_argument(
        "--hosts", type=int, metavar="N", help="number of hosts (default: as many as the rack has, or 4)"
    )
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="devices of a new host (default 2)")
    parser.add_argument(
        "--devices",
        choices=("simulated", "cpu", "nvml"),
        default="simulated",
        help="devices of a new host: simulated GPUs (default); cpu: cores of this machine, to which ranks are bound; "
        "nvml: this machine's GPUs (needs --hosts 1)",
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(".rack"), metavar="DIR", help="directory of the rack (default: .rack)"
    )
    parser.add_argument("--debug", action="store_true", help="tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        return command(arguments().parse_args(given))
    except AgentctlError as error:
        if "--debug" in given:
            raise
        say_error(error, as_json=False, program="covey-rack")
        return error.code
    except KeyboardInterrupt:
        print(
            "\ninterrupted; the rack keeps running if it was started; next: covey-rack status, covey-rack stop",
            file=sys.stderr,
        )
        return 130


def command(args: argparse.Namespace) -> int:
    if not 0 <= args.gpus <= 64:
        raise AgentctlError(USAGE, f"invalid --gpus {args.gpus}", "expected 0 to 64", "covey-rack run --gpus 2")
    if args.verb == "stop":
        stop(args.dir, os.environ)
        return 0
    if args.verb == "status":
        return status(args.dir)
    if args.verb == "start":
        start(args.dir, args.hosts, args.gpus, os.environ, Timer(), devices=args.devices)
        print_line("next: agentctl hosts")
        return 0
    if args.verb == "summary":
        rack_summary.summary(rack_files.hosts_of(args.dir.absolute()), print_line)
        return 0
    from cli.rack import proof as rack_proof  # needs the job side: only where it is used

    timer = Timer()
    rack = start(args.dir, args.hosts, args.gpus, os.environ, timer, devices=args.devices)
    with rack_files.locked(args.dir.absolute(), rack_files.PROOF_LOCK, patience_s=0.0):
        return rack_proof.run(rack, timer)

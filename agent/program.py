"""`covey-program`: the entry point of every process of Covey beside the agent.

The agent hands over a `ProgramStart` on standard input: where this host's files are, and the program's own
configuration. The program gets ports like the agent's (all but control links), runs until its work is over or SIGTERM
comes, and writes JSON lines to its log. Only what the named program needs is imported: a supervisor is up in a fraction
of the time that all plugins would take.
"""

import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from agent.compiled.files import PROGRAMS as BYTE_PROGRAMS
from agent.compiled.files import use as use_compiled
from agent.ports.clock import RealClock
from agent.ports.devices.nvidia.nvml import NvmlDevices
from agent.ports.disk import DirectoryDisk
from agent.ports.last_room import LastingLog
from agent.ports.memory.pages import MemfdPages
from agent.ports.network.datagrams import UdpDatagrams
from agent.ports.probes import RealProbes
from agent.ports.processes.forker import of_program
from agent.ports.processes.inheritance import unblock_signals
from agent.ports.processes.processes import (
    GROUP_READS,
    LOADED_FD,
    ProgramBase,
    ProgramStart,
    RealProcesses,
    leave_words,
)
from agent.tasks import Tasks
from covey.core.ids import HostId
from covey.ports.addresses import Address
from covey.ports.env import Env
from covey.ports.log import LineLog, Logger
from covey.ports.starter import NobodyElse
from covey.verbs.pyverbs_port import PyVerbs
from plugins.base import Program

COLLECT_AFTER = (20_000, 20, 50)
"""The thresholds given to `gc.set_threshold`. Reference counts free nearly everything; with 64 requests under way
Python's own numbers had it look for cycles at every second one, a tenth of a volume's processor time."""
LEVELS = ("debug", "info", "warning", "error")
SECRETS = ("key", "secret", "token", "password")
"""A field whose name contains one of these is never written."""


def collect_seldom(is_byte_path: bool) -> None:
    """Have garbage collections look only at what came since the import: a full collection of what was imported stopped
    a volume for 15 ms. A program that holds larger things than pages keeps Python's own thresholds."""
    gc.freeze()
    if is_byte_path:
        gc.set_threshold(*COLLECT_AFTER)


OF_NO_PLUGIN = ("supervisor", "spares", "pager", "beside")
"""Programs that no plugin lists."""


def program_named(name: str) -> Program:
    """The program of this name. KeyError when no plugin has it. Plugins are imported only if it is none of the agent's
    own."""
    if name == "supervisor":
        from agent.jobs.supervisor.supervisor import PROGRAM

        return PROGRAM
    if name == "spares":
        from agent.jobs.spares.spares import PROGRAM as SPARES

        return SPARES
    if name == "beside":
        from agent.jobs.beside.session import PROGRAM as BESIDE

        return BESIDE
    if name == "spill":  # a volume does not answer before its writer is up
        from plugins.memory.datapath.spill.spill_writer import PROGRAM as SPILL

        return SPILL
    if name == "vold":
        from plugins.memory.datapath.vold import PROGRAM as VOLD

        return VOLD
    if name == "slabd":  # borrowers wait for it when it comes back
        from plugins.memory.datapath.lending.slabd import PROGRAM as SLABD

        return SLABD
    if name == "aggd-lane":  # its aggd adds alone until it is up
        from plugins.aggregator.datapath.lanes.lane import LANE

        return LANE
    if name == "keeper":
        from plugins.memory.datapath.lending.slab_keeper import PROGRAM as KEEPER

        return KEEPER
    if name == "pager":
        from agent.arrays.keeper import PROGRAM as PAGER

        return PAGER
    from plugins.registry import PLUGINS

    return {program.name: program for plugin in PLUGINS for program in plugin.programs}[name]


class JsonLog(LineLog):
    """`covey.ports.log.Logger` without structlog, whose import takes longer than everything else a supervisor does."""

    def __init__(self, out: TextIO, level: str = "info", **bound: Any) -> None:
        self._out, self._from, self._bound = out, LEVELS.index(level), bound

    def _line(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if LEVELS.index(level) < self._from:
            return
        error = fields.pop("exc_info", None)
        if isinstance(error, BaseException):
            fields["exception"] = "".join(traceback.format_exception(error))
        hidden = {k: "(hidden)" if any(word in k for word in SECRETS) else v for k, v in fields.items()}
        line = {"event": event, **self._bound, **hidden, "level": level, "timestamp": datetime.now(UTC).isoformat()}
        try:
            print(json.dumps(line, default=repr), file=self._out, flush=True)
        except OSError:
            return  # a full disk must not end a datapath program


class NoLinks:
    """Programs have no control links: the agent of their host tells them what to do."""

    address: Address = ""
    public_key: bytes = b""

    async def open(self, bind: Address, heard: Callable[[HostId, bytes], None]) -> None:
        raise OSError("a program has no control links; it talks to the agent of its own host over a unix socket")

    def know(self, host: HostId, address: Address, public_key: bytes) -> None:
        """No links, so no peers."""

    def forget(self, host: HostId) -> None:
        """No links, so no peers."""

    def send(self, to: HostId, data: bytes) -> bool:
        return False

    async def close(self) -> None:
        """Close nothing: nothing is open."""


def real_env(
    base: ProgramBase, log: Logger, tasks: Tasks, probes: RealProbes, disk: DirectoryDisk, byte_path: str = ""
) -> Env:
    """A program's ports on this machine."""
    from agent.ports.network.bytes import SocketBytes  # compiled, or not: `main` says which, before anything imports it

    return Env(
        host=HostId(base.host),
        clock=RealClock(),
        rng=random.Random(os.urandom(16)),
        entropy=os.urandom,
        spawn=tasks.spawn,
        log=log,
        datagrams=UdpDatagrams(),
        links=NoLinks(),
        bytes=SocketBytes(log),
        disk=disk,
        processes=RealProcesses(base, *of_program),
        probes=probes,
        pages=MemfdPages(),
        run_dir=base.run_dir,
        verbs=PyVerbs(),
        starter=NobodyElse(os.geteuid()),
        byte_path=byte_path,
    )


async def run(program: Program, base: ProgramBase, config: Any, log: Logger, byte_path: str = "") -> int:
    """Run a program, and return its exit status: 0 when the work is over or SIGTERM came, 1 when it failed. `byte_path`
    says how its byte path runs (`agent.compiled.files.told`)."""
    loop = asyncio.get_running_loop()
    failed: list[BaseException] = []

    def fatal(_name: str, error: BaseException) -> None:
        failed.append(error)
        leave_words(base.run_dir, base.instance, failed[0])
        work.cancel()

    if program.goes_first:
        go_first(program.goes_first, log)
    tasks = Tasks(log, fatal)
    disk = DirectoryDisk(base.state_dir, mode=GROUP_READS) if base.user else DirectoryDisk(base.state_dir)
    env = real_env(base, log, tasks, RealProbes(NvmlDevices(log)), disk, byte_path)
    work = loop.create_task(program.run(env, config), name=program.name)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        log.info("program told to end")
    except Exception as error:
        log.error("program failed", why=repr(error), exc_info=error)
        failed.append(error)
        leave_words(base.run_dir, base.instance, failed[0])
    await tasks.cancel_all()
    disk.close()
    return 1 if failed else 0


def go_first(score: int, log: Logger) -> None:
    """Set this program's oom_score_adj: the agent is killed last (systemd/covey.service), and what it starts would
    inherit that."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(score))
    except OSError as error:
        log.warning("when memory runs out, jobs are killed before this process", why=str(error))


def say_loaded() -> None:
    """Tell the agent that started this program, if it still listens, that the code is loaded."""
    tells = os.environ.pop(LOADED_FD, "")
    if tells:
        with contextlib.suppress(OSError):
            os.write(int(tells), b"1")
            os.close(int(tells))


def main() -> None:
    """Run the program and exit: 0 when the work is over, 1 when it failed, 2 when it was not started by an agent."""
    try:
        start = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ProgramStart)
    except msgspec.DecodeError:
        print("covey-program: started by hand; agents start their own programs\nnext: agentd --help", file=sys.stderr)
        sys.exit(2)
    unblock_signals()
    base = start.base
    log = JsonLog(LastingLog(sys.stderr), base.log_level, host=base.host, program=base.program, instance=base.instance)
    byte_path = use_compiled(base.program)
    try:
        program = program_named(base.program)
        config = msgspec.msgpack.decode(start.config, type=program.config)
    except (KeyError, msgspec.DecodeError) as error:
        log.error("program not started", why=repr(error))
        leave_words(base.run_dir, base.instance, error)
        sys.exit(2)
    try:
        import uvloop

        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        loop_factory = None
    say_loaded()
    if byte_path:
        log.info("byte path", runs=byte_path)
    collect_seldom(base.program in BYTE_PROGRAMS)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        code = runner.run(run(program, base, config, log, byte_path))
    sys.exit(code)


if __name__ == "__main__":
    main()

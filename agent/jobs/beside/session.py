"""A session: the program that holds the terminal or the pipes of one command beside a rank (`agent.jobs.beside`).

    agent --Turn--> session --bytes--> pty or pipes --> command          one connection for each turn
          <-Turned-        <--bytes--

It ends once the command has ended and an answer said so; when nobody has taken a turn for `kept_s`, or there was no
input and output for `idle_s`, it ends the command first; so it does when the job's supervisor has ended.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import pty
import signal
import struct
import termios

import msgspec

from agent.jobs.beside.conversation import Conversation
from agent.jobs.beside.messages import ERR, NOTICE, OUT, OUTPUT_BYTES_MAX, SessionConfig, turns
from agent.jobs.supervision import Adopting, claimed_socket
from covey.core.units import format_seconds
from covey.ports.env import Env
from covey.ports.processes import Process, StartsBetween
from covey.ports.streams import ByteStream
from covey.wire.frames import pack, read_frame
from plugins.base import Program

READ_BYTES = 32 << 10
LOOK_S = 0.5
LINGER_S = 2.0
"""Seconds for which a session answers again, once an answer said how its command ended: that answer may be lost."""
ENDED_S = 30.0
"""Seconds for which the last output of a command that has ended is kept for whoever does not take it."""
DRAIN_S, DRAIN_LOOK_S = 0.5, 0.01
"""Seconds after a command's end for which what it left running may still write (its pipes may stay open for
ever), and between two looks."""
HANG_UP_S = 2.0
"""Seconds between asking a command to end and ending it by force."""
WARN_S = 60.0
"""Seconds before an idle shell is ended at which it is told so; half of the idle time where that is shorter."""
NOT_FOUND, NOT_STARTED = 127, 126
"""Exit codes of a command that does not exist, and of one that cannot be started, as a shell has them."""
UNKNOWN = 255


class BesideSession:
    """The session of one `SessionConfig`."""

    def __init__(self, env: Env, config: SessionConfig) -> None:
        self._env, self._config = env, config
        self.conversation = Conversation(env.clock, self)
        self._process: Process | None = None
        self._input = -1
        """The descriptor of the command's input; -1: it is closed."""
        self._outputs: dict[int, int] = {}
        """Descriptors of the command's output, and where each belongs."""
        self._paused: set[int] = set()
        self._writes = False
        self._hung_up = self._warned = False
        self._ended = asyncio.Event()

    async def run(self) -> None:
        config = self._config
        async with claimed_socket(self._env, config.socket, self._serve, config.agent_uid) as first:
            if not first:
                return
            processes = self._env.processes
            if isinstance(processes, Adopting):
                processes.adopt()
            try:
                self._begin()
            except OSError as error:
                self._cannot_start(error)
            self._env.spawn("session: end of the job", self._with_job())
            self._env.spawn("session: look", self._look_after())
            self._tell_rank(signal.SIGUSR1)
            await self._ended.wait()
            self._tell_rank(signal.SIGTERM)
            await self._until_told()
            if isinstance(processes, Adopting):
                await processes.end_strays(0.0)

    async def _serve(self, stream: ByteStream) -> None:
        turn = await read_frame(stream, turns)
        if self._config.terminal and turn.ended:  # the other terminal was lost; this one stays
            turn = msgspec.structs.replace(turn, ended=False)
        await stream.write(pack(await self.conversation.turn(turn)))

    # ---- the command ----

    def _begin(self) -> None:
        config, processes = self._config, self._env.processes
        if not isinstance(processes, StartsBetween):
            raise OSError("no command can be started beside ranks here")
        if config.terminal:
            own, others = pty.openpty()
            _set_size(others, config.rows, config.columns)
            theirs = (others, others, others)
            self._input, self._outputs = own, {own: OUT}
        else:
            (read_in, self._input), (read_out, out), (read_err, err) = (os.pipe() for _ in range(3))
            theirs = (read_in, out, err)
            self._outputs = {read_out: OUT, read_err: ERR}
        try:
            self._process = processes.start_between(config.command, theirs, config.terminal)
        finally:
            for each in set(theirs):
                os.close(each)
        for each in {self._input, *self._outputs}:
            os.set_blocking(each, False)
        for each in self._outputs:
            asyncio.get_running_loop().add_reader(each, self._read, each)
        self._env.spawn("session: command", self._follow(self._process))
        self.has_input()

    def _cannot_start(self, error: OSError) -> None:
        name = self._config.command.argv[0] if self._config.command.argv else "the shell"
        why = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename and error.filename != name else ""
        words = f"{name} cannot be started: {why}{where}\n"
        self._close_all()
        self.conversation.add(ERR, words.encode(errors="replace"))
        self.conversation.ends(NOT_FOUND if error.errno == errno.ENOENT else NOT_STARTED)
        self._ended.set()

    async def _follow(self, process: Process) -> None:
        code = await process.wait()
        until_s = self._env.clock.now_s() + DRAIN_S
        while True:
            if not self._outputs or (not self._paused and self._env.clock.now_s() > until_s):
                break
            await asyncio.sleep(DRAIN_LOOK_S)
        self._close_all()
        self.conversation.ends(UNKNOWN if code is None else 128 - code if code < 0 else code)
        self._ended.set()

    def _close_all(self) -> None:
        for descriptor in list(self._outputs):
            self._close_output(descriptor)
        self._close_input()

    def _close_output(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        del self._outputs[descriptor]
        self._paused.discard(descriptor)
        if descriptor == self._input:  # a terminal is both
            self._close_input()
        else:
            os.close(descriptor)

    def _close_input(self) -> None:
        if self._input < 0 or self._input in self._outputs:
            return
        asyncio.get_running_loop().remove_writer(self._input)
        os.close(self._input)
        self._input, self._writes = -1, False

    # ---- bytes ----

    def _read(self, descriptor: int) -> None:
        """Read output; where nobody takes it, the command waits, or an unattended terminal loses its oldest lines."""
        output = self.conversation.output
        drops = self._hung_up or (self._config.terminal and not self.conversation.is_attended)
        if drops:
            output.drop_to_fit(READ_BYTES)
        elif not output.room:
            self._paused.add(descriptor)
            asyncio.get_running_loop().remove_reader(descriptor)
            return
        try:
            data = os.read(descriptor, min(READ_BYTES, max(1, output.room)))
        except BlockingIOError:
            return
        except OSError:  # a terminal whose last process has ended
            data = b""
        if not data:
            self._close_output(descriptor)
            return
        self.conversation.add(self._outputs[descriptor], data)

    def has_room(self) -> None:
        if not self.conversation.output.room:
            return
        for descriptor in self._paused & self._outputs.keys():
            asyncio.get_running_loop().add_reader(descriptor, self._read, descriptor)
        self._paused.clear()

    def has_input(self) -> None:
        if self._input >= 0 and not self._writes:
            self._writes = True
            asyncio.get_running_loop().add_writer(self._input, self._write)

    def _write(self) -> None:
        waiting = self.conversation.input
        try:
            waiting.written(os.write(self._input, waiting.held()) if waiting.held() else 0)
        except BlockingIOError:
            return
        except OSError:  # the command reads no more
            waiting.written(len(waiting.held()))
        if not waiting.held():
            asyncio.get_running_loop().remove_writer(self._input)
            self._writes = False
            if waiting.ended and not self._config.terminal:
                self._close_input()
        self.conversation.wake()

    def resize(self, rows: int, columns: int) -> None:
        if self._config.terminal and self._input >= 0:
            _set_size(self._input, rows, columns)

    # ---- the end ----

    def interrupt(self) -> None:
        self._signal(signal.SIGINT)

    def leave(self) -> None:
        self._hang_up()

    def _signal(self, number: int) -> None:
        processes = self._env.processes
        if self._process is not None and not self._ended.is_set() and isinstance(processes, StartsBetween):
            processes.signal_between(self._process, number)

    def _hang_up(self, words: str = "") -> None:
        """End the command: as a terminal does that is closed, and soon after by force."""
        if self._hung_up or self._ended.is_set():
            return
        self._hung_up = True
        if words:
            self.conversation.add(NOTICE, words.encode())
        for descriptor in list(self._paused):
            self._read(descriptor)
        self.has_room()
        self._signal(signal.SIGHUP if self._config.terminal else signal.SIGTERM)
        self._signal(signal.SIGCONT)
        self._env.spawn("session: end", self._force())

    async def _force(self) -> None:
        await asyncio.sleep(HANG_UP_S)
        self._signal(signal.SIGKILL)

    async def _with_job(self) -> None:
        """End with the job's supervisor, whose ranks' GPUs are another job's from then on."""
        ends_with = self._config.ends_with
        if ends_with is None:
            return
        found = self._env.processes.find(ends_with)
        if found is not None:
            await found.wait()
        self._hang_up("\r\nthe job has ended on this host\r\n")

    def _tell_rank(self, number: int) -> None:
        """Tell the rank that is there for this session alone."""
        found = None if self._config.holds is None else self._env.processes.find(self._config.holds)
        if found is not None:
            found.signal(number)

    async def _until_told(self) -> None:
        """Wait until whoever typed the command knows how it ended, or does not come back."""
        talk = self.conversation
        while True:
            if talk.told:
                await asyncio.sleep(LINGER_S)
                return
            if talk.away_s > min(self._config.kept_s, ENDED_S):
                return
            await asyncio.sleep(LOOK_S)

    async def _look_after(self) -> None:
        """End the command when nobody comes back for it, or it is idle for too long."""
        talk, config, clock = self.conversation, self._config, self._env.clock
        while not self._ended.is_set():
            now_s = clock.now_s()
            if self._paused and config.terminal and not self.conversation.is_attended:
                for descriptor in list(self._paused):
                    asyncio.get_running_loop().add_reader(descriptor, self._read, descriptor)
                self._paused.clear()
            if talk.away_s > config.kept_s:
                self._hang_up()
            elif config.idle_s:
                self._look_idle(now_s - talk.busy_s)
            await asyncio.sleep(LOOK_S)

    def _look_idle(self, idle_s: float) -> None:
        most_s = self._config.idle_s
        left_s = most_s - idle_s
        if left_s <= 0:
            self._hang_up(f"ended: no input and no output for {format_seconds(most_s)}\r\n")
        elif left_s > min(WARN_S, most_s / 2):
            self._warned = False
        elif not self._warned:
            self._warned = True
            busy_s = self.conversation.busy_s
            words = (
                f"\r\nno input and no output: this shell ends in {format_seconds(round(left_s))}; type to keep it\r\n"
            )
            self.conversation.add(NOTICE, words.encode())
            self.conversation.busy_s = busy_s


def _set_size(terminal: int, rows: int, columns: int) -> None:
    if rows and columns:
        with contextlib.suppress(OSError):
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


async def run_session(env: Env, config: SessionConfig) -> None:
    await BesideSession(env, config).run()


PROGRAM = Program("beside", SessionConfig, run_session)
assert READ_BYTES < OUTPUT_BYTES_MAX

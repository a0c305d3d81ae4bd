"""A volume with its process, a lender and their sockets, all real and without agents, for scripts in processes of their
own: numpy touches an array with its interpreter's lock held, so a script never shares one with the processes that serve
it."""

import os
import select
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import msgspec

from agent.ports.processes.processes import ProgramBase, ProgramStart
from covey.core.units import MIB
from covey.kernel import userfault
from covey.wire import frames
from plugins.memory.datapath.lending.slabd import SlabdConfig
from plugins.memory.datapath.vold import VoldConfig
from plugins.memory.datapath.wire.control import (
    ControlFrame,
    ControlHello,
    ListSlabs,
    OpenSlabFrame,
    Question,
    RegisterSlabFrame,
    SlabList,
    Told,
    Yes,
    answer_decoder,
)

SLOW = 10 if os.environ.get("COVEY_TEST_RDMA") == "1" else 1
"""Factor on time limits: in the emulated guest every instruction is translated."""
PAGE, SLAB = 4096, 16 * MIB
SECRET, TOKEN = b"c" * 32, b"t" * 32
STRANGER = 64999
"""A uid that no user has."""
ROOT = Path(__file__).parent.parent.parent


ANYONES = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *site.getsitepackages()])}


def python_of(uid: int) -> str | None:
    """An interpreter with what we need that this user may execute; root's own may be where other users cannot go."""
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            argv = (python, "-c", "import numpy, uvloop, msgspec")
            subprocess.run(argv, env=ANYONES, user=uid, group=uid, extra_groups=[], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    return None


def faults_are_possible() -> bool:
    try:
        os.close(userfault.opened().descriptor)
    except OSError:
        return False
    return True


def until(what: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait for it: long, for where the machine is busy a program needs 20 s to import what it is made of."""
    deadline = time.monotonic() + within_s * SLOW
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


class LiveVolume:
    """A running volume; a context manager. `lent`: its slabs are at a lender. `agent_uid`: the processes' user."""

    def __init__(
        self,
        size: int = 32 * MIB,
        uid: int | None = None,
        lent: bool = True,
        slab: int = SLAB,
        page: int = PAGE,
        agent_uid: int | None = None,
        maps: bool = False,
    ) -> None:
        self._maps = maps
        self.size, self._lent, self._slab, self._page = size, lent, slab, page
        self._agent_uid = agent_uid
        self.uid = os.geteuid() if uid is None else uid
        self._directory = tempfile.TemporaryDirectory(prefix="cv", ignore_cleanup_errors=True)
        os.chmod(self._directory.name, 0o711)
        self.state = os.path.join(self._directory.name, "state")
        self.run_dir = os.path.join(self._directory.name, "run")
        for folder in (self.state, self.run_dir):
            os.mkdir(folder, 0o700)
            if agent_uid is not None:
                os.chown(folder, agent_uid, agent_uid)
        self.path = f"{self.run_dir}/vol-data.sock"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._address, self._opened = "", False

    def __enter__(self) -> "LiveVolume":
        if self._lent:
            self.start_slabd()
            self.lend()
        self.start_vold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self.pagers():
            _kill(pid)
        for name in list(self.processes):
            self.kill(name)
        for pid in self._named(b"slab-keeper"):
            _kill(pid)
        self._directory.cleanup()

    # ---- programs ----

    def start(self, program: str, config: msgspec.Struct) -> None:
        base = ProgramBase("h1", self.state, self.run_dir, "127.0.0.1", program, program)
        handed = os.memfd_create("start")
        os.write(handed, msgspec.msgpack.encode(ProgramStart(base, msgspec.Raw(msgspec.msgpack.encode(config)))))
        os.lseek(handed, 0, os.SEEK_SET)
        argv = (sys.executable, "-P", "-m", "agent.program", program, program)
        with open(f"{self.state}/{program}.log", "ab") as log:
            if self._agent_uid is None:
                self.processes[program] = subprocess.Popen(argv, stdin=handed, stdout=log, stderr=log, cwd=ROOT)
            else:
                uid, python = self._agent_uid, python_of(self._agent_uid)
                assert python is not None
                self.processes[program] = subprocess.Popen(
                    (python, *argv[1:]), stdin=handed, stdout=log, stderr=log, cwd=ROOT, env=ANYONES,
                    user=uid, group=uid, extra_groups=[],
                )  # fmt: skip
        os.close(handed)

    def start_slabd(self) -> None:
        self.start("slabd", SlabdConfig(bind="127.0.0.1:0", secret=SECRET, lend_bytes=4 * self.size))

    def start_vold(self) -> None:
        self.start(
            "vold",
            VoldConfig(
                volume="data",
                size_bytes=self.size,
                page_bytes=self._page,
                slab_bytes=self._slab,
                token=TOKEN,
                secret=SECRET,
                queue_pages=4096,
                deadline_s=2.0 * SLOW,
                uid=self.uid,
                maps=self._maps,
            ),
        )
        until(lambda: _listens(self.path))
        if self._lent and not self._opened:  # one that begins anew knows where its slabs are
            self._opened = True
            for index in range(-(-self.size // self._slab)):
                question = OpenSlabFrame(1, index, 1, "h2", self._address, b"s" * 16)
                opened = self.ask("vold-data", question)
                assert isinstance(opened, Yes), opened

    def lend(self) -> None:
        until(lambda: _listens(f"{self.run_dir}/slabd.sock"))
        for index in range(-(-self.size // self._slab)):
            question = RegisterSlabFrame(1, "h1", "data", index, 1, self._slab, self._page, b"s" * 16)
            assert isinstance(self.ask("slabd", question), Yes)
        listed = self.ask("slabd", ListSlabs(1))
        assert isinstance(listed, SlabList)
        self._address = listed.address

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def ask(self, name: str, question: Question) -> ControlFrame:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(60.0 * SLOW)
            stream.connect(f"{self.run_dir}/{name}.sock")
            stream.sendall(frames.pack(ControlHello(SECRET)) + frames.pack(question))
            while True:
                size = frames.body_size(_exactly(stream, 4))
                frame = frames.unpack(_exactly(stream, size), answer_decoder)
                if not isinstance(frame, Told):
                    return frame

    def pagers(self) -> list[int]:
        """Pids of this volume's keeper, first, and of its pagers."""
        return self._named(b"pager-data")

    def _named(self, name: bytes) -> list[int]:
        return sorted(pid for pid in _pids() if self._is_ours(pid, name))

    def _is_ours(self, pid: int, name: bytes) -> bool:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state != "Z" and words[-2:-1] == [name] and os.readlink(f"/proc/{pid}/cwd") == self.state
        except (FileNotFoundError, ProcessLookupError):
            return False

    # ---- scripts ----

    def script(self, text: str, uid: int | None = None, **more: str) -> "subprocess.Popen[str]":
        """A script in which PATH is the volume's socket."""
        return script_of(self.path, text, uid, **more)

    def run(self, text: str, uid: int | None = None, within_s: float = 30.0 * SLOW, **more: str) -> str:
        """Output of a script, which must end well."""
        process = self.script(text, uid, **more)
        said, errors = process.communicate(timeout=within_s)
        assert process.returncode == 0, f"{process.returncode}\n{said}\n{errors[-3000:]}"
        return said


def script_of(path: str, text: str, uid: int | None = None, **more: str) -> "subprocess.Popen[str]":
    """A script in which PATH is that path, and numpy, RemoteArray and RemoteMemory are imported; another user's, if one
    is given. It says what it found on standard output."""
    head = (
        "import os, signal, sys, time\nimport numpy\nfrom covey.remote import RemoteArray, RemoteMemory,"
        f" RemoteMemoryError\nPATH = {path!r}\n"
    )
    if uid is not None:  # after the imports: another user may not be able to read what root's Python is made of
        head += f"os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})\n"
    return subprocess.Popen(
        (sys.executable, "-P", "-c", head + text),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT), **more},
    )


@contextmanager
def scripted(volume: LiveVolume, text: str) -> Iterator["subprocess.Popen[str]"]:
    """A script that is killed at the end, if it has not ended."""
    process = volume.script(text)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def heard(process: "subprocess.Popen[str]") -> str:
    """The next line of a script, which must come within a minute."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60.0 * SLOW)[0], "it says nothing"
    line = process.stdout.readline()
    assert line, f"it ended: {process.wait()}\n{process.stderr.read() if process.stderr else ''}"
    return line.strip()


def tell(process: "subprocess.Popen[str]", line: str = "go on") -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _exactly(stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = stream.recv(size - len(data))
        assert part, "the process hung up"
        data += part
    return data


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass

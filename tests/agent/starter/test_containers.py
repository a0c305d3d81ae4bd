"""Ranks in containers of a real podman, as a user of this machine who has subordinate ids. Where podman, such a user or
a static busybox is missing, the reason of the skipped tests says which."""

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from agent.jobs.beside.messages import OpenSession, SessionOpened, SessionTurn, Turned, TurnSession
from agent.jobs.beside.service import BesideSessions
from agent.jobs.runner import SupervisedRunner
from agent.ports.processes import shims
from agent.ports.processes.processes import watch
from agent.ports.processes.procfs import descendants, pids, stat, user_of, words
from covey.core.ids import HostId, JobId
from covey.ports.env import Env
from covey.ports.processes import Command, Container
from plugins.base import RanksSpec
from plugins.facts import RanksEnded, RanksStarted
from tests.agent.here import Here, ranks, until
from tests.agent.starter.starter_here import host_with_starter

J1 = JobId("j1")
PODMAN_S = 60.0
"""Seconds for what waits for podman, on a machine that is busy."""
TOOLS = ("podman", "newuidmap", "busybox")


def a_user() -> pwd.struct_passwd | str:
    """A user who may have rootless containers, or why there is none."""
    if os.geteuid() != 0:
        return "only root can be another user"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} is not installed"
    if subprocess.run(("ldd", shutil.which("busybox") or ""), capture_output=True, check=False).returncode == 0:
        return "busybox is not static"
    ids = Path("/etc/subuid")
    names = {line.partition(":")[0] for line in ids.read_text().splitlines()} if ids.exists() else set[str]()
    found = next((user for user in pwd.getpwall() if user.pw_name in names and user.pw_uid >= 1000), None)
    return found or "no user has subordinate ids (usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER)"


USER = a_user()
pytestmark = [
    pytest.mark.skipif(isinstance(USER, str), reason=f"no rootless container can run here: {USER}"),
    pytest.mark.xdist_group("starter"),  # its sessions are known by job, epoch and user
]


class Image:
    """Image tiny:1 in the storage of a user whose home is in `folder`, and nowhere else."""

    def __init__(self, folder: Path) -> None:
        assert not isinstance(USER, str)
        self.home, self.uid, self.gid = folder / "home", USER.pw_uid, USER.pw_gid
        self.account = pwd.struct_passwd((*USER[:5], str(self.home), "/bin/sh"))
        self._sockets, rootfs = folder / "x", folder / "rootfs"
        folder.chmod(0o755)
        (rootfs / "bin").mkdir(parents=True)
        (folder / "r").mkdir()
        shutil.copy(shutil.which("busybox") or "", rootfs / "bin/busybox")
        (rootfs / "bin/sh").symlink_to("busybox")
        for each in (self.home, self._sockets):
            each.mkdir()
            os.chown(each, self.uid, self.gid)
        self._sockets.chmod(0o700)
        done = self.podman("import --change ENV=RANK=image --change ENV=OF=image - tiny:1", f"tar -C {rootfs} -c . |")
        if done.returncode:
            self.close()
            raise AssertionError(done.stderr)

    def podman(self, line: str, before: str = "") -> "subprocess.CompletedProcess[str]":
        env = {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self._sockets), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
        who = {"user": self.uid, "group": self.gid, "extra_groups": list[int]()}
        shell = ("/bin/sh", "-c", f"{before} podman {line}")
        return subprocess.run(shell, env=env, cwd="/", **who, capture_output=True, text=True, check=False)  # type: ignore[call-overload, no-any-return]

    def close(self) -> None:
        """End the process that podman left to hold the user's namespace."""
        for path in self._sockets.rglob("pause.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)

    def processes(self) -> dict[int, str]:
        """Whatever runs as the user, but for what holds the namespace for the next podman that people start."""
        found = dict[int, str]()
        for pid in pids():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if user_of(pid) == self.uid and _lives(pid):
                    found[pid] = " ".join(words(pid, "cmdline"))
        return {pid: line for pid, line in found.items() if line not in ("podman", "catatonit -P")}


def _lives(pid: int) -> bool:
    fields = stat(pid)
    return fields is not None and fields[0] != "Z"


@pytest.fixture
async def both() -> AsyncIterator[tuple[Here, Image, Path]]:
    with tempfile.TemporaryDirectory(prefix="covey-", ignore_cleanup_errors=True) as directory:
        folder = Path(directory)
        image = Image(folder)
        before = image.processes()
        try:
            async with host_with_starter(directory, image.uid, lambda name: image.account) as (host, _):
                yield host, image, folder
        finally:
            image.close()
            for pid in image.processes().keys() - before.keys():  # of a test that failed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def of_user(image: Image, script: str, *, count: int = 1, of: str = "tiny:1", **env: str) -> RanksSpec:
    spec = ranks("j1", "/bin/busybox", "sh", "-c", script, count=count)
    assert not isinstance(USER, str)
    cwd = str(image.home / "work")
    os.makedirs(cwd, exist_ok=True)
    os.chown(cwd, image.uid, image.gid)
    return msgspec.structs.replace(spec, user=USER.pw_name, uid=image.uid, image=of, cwd=cwd, env=env)


async def output(runner: SupervisedRunner, rank: int = 0, until_it_says: str = "") -> str:
    """What a rank printed, at the latest once it says this."""
    for _ in range(500):
        said = (await runner.read_log(J1, rank, 0, 1 << 20)).data.decode()
        if until_it_says in said:
            return said
        await asyncio.sleep(0.01)
    raise AssertionError(f"{until_it_says!r} is not in {said!r}")


SAVES = """
b=/bin/busybox
echo rank $RANK $OF $EPOCHS user $($b id -u):$($b id -g) umask $(umask) in $PWD home $HOME
[ -d ${COVEY_SOCKET%/*} ] && echo the folder of sockets is there
[ -e /etc/passwd ] && [ ! -e /usr/bin/podman ] && echo the image is seen
echo saved > state.$RANK
trap "[ -e $COVEY_PREEMPT_FILE ] && echo told; exit 75" TERM
while :; do $b sleep 0.1; done
"""


async def test_ranks_run_in_an_image_as_their_user_and_end_as_ranks_do(both: tuple[Here, Image, Path]) -> None:
    host, image, folder = both
    runner = host.runner()
    await runner.start(of_user(image, SAVES, count=2, EPOCHS="3", OF="host", COVEY_UMASK="027"))
    await until(lambda: host.told(RanksEnded) or len(list(image.home.glob("work/state.*"))) == 2, PODMAN_S)
    ids = f"user {image.uid}:{image.gid} umask 0027 in {image.home}/work home {image.home}"
    for rank in (0, 1):
        said = await output(runner, rank, "the image is seen")
        assert f"rank {rank} image 3 {ids}" in said and "the folder of sockets is there" in said, host.lines.text
        found = (image.home / f"work/state.{rank}").stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (image.uid, image.gid, 0o640)
    assert len(image.podman("ps --quiet").stdout.split()) == 2
    main = host.told(RanksStarted)[-1].pids[0]
    assert "--env=COVEY_TOKEN " in image.processes()[main], "a value among arguments is everybody's"
    await stands_still_whole(folder)
    await runner.stop(J1, 1, 20.0, "another job needs the GPUs")
    await until(lambda: host.told(RanksEnded), PODMAN_S)
    assert host.told(RanksEnded)[0].codes == {0: 75, 1: 75}, await output(runner)
    await output(runner, 0, "told")
    await until(lambda: not image.processes(), 20.0)
    assert image.podman("ps --all --quiet").stdout == ""


async def stands_still_whole(folder: Path) -> None:
    """All that runs of rank 0 is suspended, the program in the container first of all, and continues."""
    container = Container(image="tiny:1")
    command = Command(argv=(), cwd="/", env={}, output="", run=f"{folder}/u/jobs/j1/1.rank0", container=container)
    kept = shims.resume(command, watch)
    assert kept is not None
    program = kept._program()
    assert program is not None and "busybox" in words(program.pid, "cmdline")[0]

    def states() -> set[str]:
        found = {(stat(each.pid) or "Z")[0] for each in (*descendants(kept.shim.pid), program)}
        return found - {"Z"}

    kept.stand_still()
    await until(lambda: states() == {"T"})
    kept.go_on()
    await until(lambda: "T" not in states())


async def test_what_does_not_end_is_killed_and_nothing_of_it_is_left(both: tuple[Here, Image, Path]) -> None:
    host, image, _ = both
    runner = host.runner()
    stubborn = "trap '' TERM; /bin/busybox touch here; (while :; do /bin/busybox sleep 1; done) & wait; wait; wait"
    await runner.start(of_user(image, stubborn))
    await until(lambda: host.told(RanksEnded) or (image.home / "work/here").exists(), PODMAN_S)
    assert any("conmon" in line for line in image.processes().values()), await output(runner)
    await runner.stop(J1, 1, 0.5, "cancelled")
    await until(lambda: host.told(RanksEnded), PODMAN_S)
    assert host.told(RanksEnded)[0].codes == {0: -9}
    await until(lambda: not image.processes(), 20.0)
    assert image.podman("ps --all --quiet").stdout == ""


async def test_an_image_that_is_not_there_is_refused_in_words_and_not_pulled(both: tuple[Here, Image, Path]) -> None:
    host, image, _ = both
    runner = host.runner()
    await runner.start(of_user(image, "echo never", of="tiny:2"))
    await until(lambda: host.told(RanksEnded), PODMAN_S)
    (ended,) = host.told(RanksEnded)
    assert not isinstance(USER, str)
    name = USER.pw_name
    what, why = "image tiny:2 cannot be used on h1", f"{name} has no such image there, and agents never pull one"
    next = f"podman pull tiny:2 on h1 as {name}"
    assert (ended.codes, ended.reason) == ({0: 127}, f"rank 0 cannot start: {what}: {why}; next: {next}")
    assert await output(runner) == f"covey: {what}\n  why: {why}\n  next: {next}\n"


class Beside(NamedTuple):
    """What sessions beside ranks need of an agent: this host's."""

    id: HostId
    env: Env
    runner: SupervisedRunner


class TypedBeside:
    """A command beside rank 0, and whoever typed it."""

    def __init__(self, sessions: BesideSessions, opened: SessionOpened) -> None:
        self.sessions, self.opened, self.at, self.seen, self.said = sessions, opened, 0, 0, b""

    async def turn(self, **fields: object) -> Turned:
        found = self.opened
        turn = SessionTurn(**fields)  # type: ignore[arg-type]
        about = TurnSession(job=found.job, epoch=found.epoch, session=found.session, turn=turn)
        answer = await self.sessions.answer(about)
        assert isinstance(answer, Turned)
        return answer

    async def until(self, word: bytes) -> int | None:
        """The exit code, once the command says this or has ended."""
        async with asyncio.timeout(PODMAN_S):
            while True:
                answer = await self.turn(seen=self.seen, wait_s=5.0)
                self.said += b"".join(data for _, data in answer.parts)
                self.seen = answer.at + sum(len(data) for _, data in answer.parts)
                if answer.code is not None or word in self.said:
                    return answer.code


def lasting(image: Image) -> set[int]:
    """What runs as the user, without what ends by itself in a moment."""
    return {pid for pid, line in image.processes().items() if "sleep 0.1" not in line or "sh -c" in line}


async def test_commands_enter_the_container_of_a_rank_and_leave_nothing(both: tuple[Here, Image, Path]) -> None:
    host, image, _ = both
    runner = host.runner()
    await runner.start(of_user(image, "/bin/busybox touch here; while :; do /bin/busybox sleep 0.1; done"))
    await until(lambda: host.told(RanksEnded) or (image.home / "work/here").exists(), PODMAN_S)
    before = lasting(image)
    agent: Any = Beside(host.env.host, host.env, runner)
    sessions = BesideSessions(agent, f"{host.env.run_dir}/jobs.sock")

    async def typed(kind: str, script: str = "", **more: object) -> TypedBeside:
        argv = ("/bin/busybox", "sh", "-c", script) if script else ()
        fields: dict[str, Any] = {"kind": kind, "session": f"ex-{len(script)}", "argv": argv, **more}
        opened = await sessions.answer(OpenSession(job=J1, rank=0, **fields))
        assert isinstance(opened, SessionOpened)
        return TypedBeside(sessions, opened)

    who = "[ ! -e /usr/bin/podman ] && echo in $RANK ${COVEY_TOKEN:-no token} $PWD $(/bin/busybox id -u)"
    says = f"{who}; /bin/busybox cat; exit 7"
    command = await typed("exec", says)
    await command.turn(at=0, data=b"piped\n", ended=True)
    assert await command.until(b"never") == 7
    assert command.said == f"in 0 no token {image.home}/work {image.uid}\npiped\n".encode()

    loop = "while :; do /bin/busybox sleep 0.1; done"
    stubborn = await typed("exec", f"trap 'echo int' INT; trap '' TERM; echo on; {loop}")
    await stubborn.until(b"on")
    await stubborn.turn(signals=1)
    await stubborn.until(b"int")
    await stubborn.turn(leaves=True)
    assert await stubborn.until(b"never") == 128 + signal.SIGKILL

    none = await typed("exec", argv=("/none/such",))
    assert await none.until(b"never") == 127 and b"/none/such" in none.said

    shell = await typed("shell", session="sh-0", terminal=True, rows=33, columns=111)
    size = b"/bin/busybox stty size\n"
    await shell.turn(at=0, data=size)
    await shell.until(b"33 111")
    await shell.turn(at=len(size), data=b"exit 5\n")
    assert await shell.until(b"never") == 5, shell.said
    await until(lambda: lasting(image) == before, 20.0)

"""What a host has for containers, and the commands of podman that start none: whether an image is there, and what of a
container is removed. All of it runs as the rank's own user, in the supervisor."""

import asyncio
import contextlib
import glob
import os
import pwd
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from agent.ports.processes import containers
from agent.ports.processes.containers import ContainerHost, Groups
from covey.core.carried import for_process
from covey.ports.processes import Command, Container

CDI_FILES = tuple(f"{folder}/*.{kind}" for folder in ("/etc/cdi", "/var/run/cdi") for kind in ("yaml", "yml", "json"))
CDI_BYTES_MAX = 16 << 20
GROUPS = "/sys/fs/cgroup"
TOOL_S = 60.0
"""Most seconds for an answer of podman: its first one, on a slow disk, takes long."""
KNOWN_S = 10.0
"""Seconds for which an answer holds: ranks that start together ask once."""
ABSENT = 1
"""Exit status of `podman image exists` for an image that is not there; others are errors."""
WORDS_MAX = 300
INCARNATION = "COVEY_INCARNATION"
"""The variable of a process that takes the place of another one of its rank."""
RunTool = Callable[[Sequence[str], Mapping[str, str]], Awaitable[tuple[int, str]]]
"""Runs a command; its exit status, and what it wrote."""


class Containers:
    """Makes commands of ranks in containers. `host`: this host's name; `run`: runs a command with an environment."""

    def __init__(self, host: str, run: RunTool) -> None:
        self._host, self._run = host, run
        self._images: dict[str, tuple[float, Mapping[str, str]]] = {}
        """When each image was looked at, and the variables that it sets: another image may get its name later."""

    async def contained(self, command: Command, container: Container) -> Command:
        """The command that runs this one in its container. ContainerRefused says why there is none."""
        host = await asyncio.to_thread(look, self._host, command, container)
        if host.tool and host.uid and containers.tool_of(container) == "podman":
            env, trouble = await self._image_env(command, container, host)
            host = host._replace(image_env=env, trouble=trouble)
        refused = containers.refusal(command, container, host)
        if refused is not None:
            raise refused
        if INCARNATION in command.env:
            await self.clear([command])  # what a process of this rank before it left; its own start would say so aloud
        return containers.contained(command, container, host)

    def entered(self, command: Command, container: Container, terminal: bool) -> Command:
        """The command that runs this one in the container of its rank. ContainerRefused says why there is none."""
        return containers.entered(command, container, look(self._host, command, container), terminal)

    async def _image_env(
        self, command: Command, container: Container, host: ContainerHost
    ) -> tuple[Mapping[str, str] | None, str]:
        """The variables that an image of podman's sets, None where it is not there; and why podman does not know."""
        looked_s, known = self._images.get(container.image, (-KNOWN_S, {}))
        if time.monotonic() - looked_s < KNOWN_S:
            return known, ""
        env = containers.tool_environment(command.env, host)
        podman = (host.tool, containers.MANAGER, "image")
        code, words = await self._run((*podman, "exists", container.image), env)
        if code == ABSENT:
            return None, ""
        if code == 0:
            code, words = await self._run((*podman, "inspect", "--format={{json .Config.Env}}", container.image), env)
        if code:
            return None, error_in(words) or f"it ended with {code}"
        found = variables_of(words)
        self._images[container.image] = time.monotonic(), found
        return found, ""

    async def clear(self, commands: Sequence[Command]) -> str:
        """Remove what is left of these commands' containers. Returns why something is left; empty: nothing is."""
        ours = [each for each in commands if each.container and containers.tool_of(each.container) == "podman"]
        if not ours or ours[0].container is None:
            return ""
        host = await asyncio.to_thread(look, self._host, ours[0], ours[0].container)
        if not host.tool:
            return ""
        names = sorted({containers.name_of(each) for each in ours})
        env = containers.tool_environment(ours[0].env, host)
        code, words = await self._run(containers.clearing(host.tool, names), env)
        return (error_in(words) or f"podman ended with {code}") if code else ""


def variables_of(words: str) -> Mapping[str, str]:
    """The variables in podman's answer, which may have warnings around it."""
    for line in words.splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            found: Any = msgspec.json.decode(line)
            if isinstance(found, list):
                return {name: value for name, _, value in (str(pair).partition("=") for pair in found)}
    return {}


def error_in(words: str) -> str:
    """The error in what podman wrote: its last one, or its last line where none is marked."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("Error: ")]
    return (errors or lines)[-1].removeprefix("Error: ")[:WORDS_MAX] if lines else ""


def look(name: str, command: Command, container: Container) -> ContainerHost:
    """What the host has, but for the image of podman's."""
    tool, uid = containers.tool_of(container), os.geteuid()
    runtime_dir = f"/run/user/{uid}"
    asked = (*containers.folders_of(command), containers.RDMA)
    image = os.path.join(command.cwd, container.image)
    is_there = tool == "apptainer" and os.path.exists(for_process(image))
    return ContainerHost(
        name=name,
        user=_user_of(uid),
        uid=uid,
        gid=os.getegid(),
        tool=shutil.which(tool, path=containers.PATH) or "",
        groups=groups_of(os.path.exists(f"{GROUPS}/cgroup.controllers"), os.path.isdir(f"{GROUPS}/unified")),
        runtimes=tuple(each for each in ("crun", "runc") if shutil.which(each, path=containers.PATH)),
        gains=_gains(),
        runtime_dir=runtime_dir if _is_ours(runtime_dir, uid) else "",
        queues=os.path.isdir("/dev/mqueue"),
        cdi=containers.cdi_names(_cdi_files()) if container.gpus else frozenset(),
        folders=frozenset(path for path in asked if os.path.isdir(for_process(path))),
        image_env={} if is_there else None,
    )


def groups_of(controllers: bool, unified: bool) -> Groups:
    """Which control groups a host has. `controllers`: the folder of them is one of version 2; `unified`: it has a
    folder of version 2 in it."""
    if controllers:
        return "unified"
    return "hybrid" if unified else "legacy"


def _user_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _gains() -> bool:
    with open("/proc/self/status") as file:
        return "NoNewPrivs:\t1" not in file.read()


def _is_ours(path: str, uid: int) -> bool:
    try:
        return os.stat(path).st_uid == uid
    except OSError:
        return False


def _cdi_files() -> list[str]:
    found = []
    for path in sorted(path for pattern in CDI_FILES for path in glob.glob(pattern)):
        try:
            with open(path, errors="replace") as file:
                found.append(file.read(CDI_BYTES_MAX))
        except OSError:
            continue  # it names nothing that this user may have
    return found

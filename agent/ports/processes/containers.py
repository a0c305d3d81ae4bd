"""How a rank runs in a container, decided from what the host has: the argument list of podman or apptainer, or why not.

Nothing is done here: `container_host.py` looks at the host and runs the commands.

    shim -> podman run            the rank's main process: its exit code is the program's
              |    '-> podman     the same, in the user's namespace
              '- conmon           the shim adopts it
                   '-> program    its pid is in PATH.pid

The container has the host's network, pids, names of hosts and shared memory, so ranks meet each other and the agent as
without one, and no control group of its own: an ordinary user cannot make one, so all of it stays in the job's. That is
why podman is told to use `cgroupfs`, and gets no address of the user's session bus, over which it would move itself to
a scope of the user's. (`--cgroups=disabled` would say the same, but podman refuses it together with the host's pids.)

A signal is sent to the program itself, not to podman: some releases of it (4.3) pass SIGTERM on and end at once, with
status 0.
"""

import hashlib
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from agent.ports.processes.inheritance import umask_of
from covey.core.carried import for_people
from covey.ports.processes import Command, Container

Tool = Literal["podman", "apptainer"]
Groups = Literal["unified", "hybrid", "legacy"]
"""The version of the host's control groups: 2, 1 with 2 beside it, or 1."""

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
"""Where podman and apptainer are looked for, and where they find what they run."""
MANAGER = "--cgroup-manager=cgroupfs"
NO_BUS = "unix:path=/nonexistent"
OF_THE_HOST = frozenset(
    """PATH LD_LIBRARY_PATH LD_PRELOAD LD_AUDIT PYTHONHOME VIRTUAL_ENV CONDA_PREFIX SHELL TMPDIR XDG_RUNTIME_DIR
    DBUS_SESSION_BUS_ADDRESS NVIDIA_VISIBLE_DEVICES""".split()  # noqa: SIM905
)
"""Variables that name programs and folders of the host: the container has the image's, or none."""
NOT_THE_TOOLS = frozenset(
    """LD_LIBRARY_PATH LD_PRELOAD LD_AUDIT TMPDIR XDG_RUNTIME_DIR CONTAINER_HOST CONTAINER_CONNECTION
    CONTAINER_SSHKEY""".split()  # noqa: SIM905
)
"""Variables of the rank that podman itself does not get: with some of them it would ask a service to start the
container, outside of the job's limits."""
PASSED = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")
OURS = ("COVEY_", "HOME", "USER", "LOGNAME", "PYTHONPATH")
"""What the names begin with of variables that hold whatever the image says, beside `Container.ours`."""
CDI_KIND = "nvidia.com/gpu"
_CDI_NAME = re.compile(r"""\bname["']?\s*:\s*["']?([A-Za-z0-9][A-Za-z0-9._:-]*)""")
NOT_MOUNTED = frozenset("/ /bin /dev /etc /lib /lib64 /proc /root /run /sbin /sys /tmp /usr /var".split())  # noqa: SIM905
"""Folders that are mounted for nobody whose home they are: they would hide the image's own."""
RDMA = "/dev/infiniband"


class ContainerRefused(OSError):
    """What cannot run, why, and the next step. `strerror` has the last two, `filename` the first."""

    def __init__(self, what: str, why: str, next: str) -> None:
        super().__init__(1, f"{why}; next: {next}", what)
        self.lines = f"covey: {what}\n  why: {why}\n  next: {next}\n"


class ContainerHost(NamedTuple):
    """What is known of the host, and of the user as whom the rank runs."""

    name: str
    user: str
    uid: int
    gid: int
    tool: str = ""
    """Path of podman or apptainer; empty: it is not there."""
    groups: Groups = "unified"
    runtimes: tuple[str, ...] = ()
    """Which of crun and runc are there."""
    gains: bool = True
    """Whether programs of the rank may gain privileges, as newuidmap does."""
    runtime_dir: str = ""
    """The user's folder for sockets, such as /run/user/1001; empty: nobody made one, and podman uses one in /tmp."""
    queues: bool = True
    """Whether there is /dev/mqueue, which has to be shared with the rest of the host's IPC."""
    cdi: frozenset[str] = frozenset()
    """Names of the NVIDIA devices that podman can give to a container."""
    folders: frozenset[str] = frozenset()
    """Folders of the host that the rank is to see, and that are there."""
    image_env: Mapping[str, str] | None = None
    """The variables that the image sets; None: there is no such image."""
    trouble: str = ""
    """Why podman does not work for this user; empty: it does."""


def tool_of(container: Container) -> Tool:
    """What runs this image."""
    is_path = container.image.startswith("/") or container.image.endswith(".sif")
    return "apptainer" if is_path else "podman"


def name_of(command: Command) -> str:
    """The container's name: the same for all processes of a rank in an epoch here, one after the other, and for no
    others."""
    env = command.env
    mark = hashlib.sha256(env.get("COVEY_TOKEN", "").encode()).hexdigest()[:8]
    return f"covey-{env.get('COVEY_JOB_ID', '')}-{env.get('COVEY_EPOCH', '')}-r{env.get('COVEY_RANK', '')}-{mark}"


def pid_file_of(command: Command) -> str:
    """The file in which podman says which process the program is."""
    return f"{command.run}.pid"


def runtime_of(groups: Groups, found: Collection[str]) -> str:
    """The runtime for such control groups; empty: none of them can. crun refuses hybrid ones, runc needs a user
    session for version 2."""
    order = {"unified": ("crun",), "hybrid": ("runc",), "legacy": ("crun", "runc")}[groups]
    return next((runtime for runtime in order if runtime in found), "")


def cdi_names(files: Iterable[str]) -> frozenset[str]:
    """The names of NVIDIA devices in the text of CDI's files, YAML or JSON."""
    return frozenset(name for text in files if CDI_KIND in text for name in _CDI_NAME.findall(text))


def folders_of(command: Command) -> tuple[str, ...]:
    """The folders of the host that the rank is to see: its user's home, its own, and what its environment names."""
    shows = () if command.container is None else command.container.shows
    return tuple(dict.fromkeys((*_writes(command), *shows)))


def _writes(command: Command) -> tuple[str, ...]:
    home = posixpath.normpath(command.env.get("HOME", "/"))
    saves = _saves(command)
    kept = () if home in NOT_MOUNTED or not home.startswith("/") else (home,)
    return (*kept, command.cwd, *((saves,) if saves else ()))


def _saves(command: Command) -> str:
    """The folder in which the job's own one for checkpoints is made, where it is not below the working directory;
    empty: it is."""
    folder = posixpath.dirname(posixpath.normpath(command.env.get("COVEY_CHECKPOINT_DIR", f"{command.cwd}/own")))
    return "" if folder == command.cwd or folder.startswith(f"{command.cwd}/") else folder


def mounts(command: Command, host: ContainerHost) -> tuple[tuple[str, bool], ...]:
    """The folders that are mounted, each at its own path, and whether the rank may write there. One inside of another
    that is mounted is seen by that."""
    writes = _writes(command)
    found: dict[str, bool] = {}
    for folder in sorted(set(folders_of(command)), key=lambda path: (path not in writes, path)):
        inside = any(folder == other or folder.startswith(f"{other}/") for other in found)
        if not inside and (folder in host.folders or folder == command.cwd):
            found[folder] = folder in writes
    return tuple(found.items())


def passed(command: Command, container: Container, image_env: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that the program has of the rank's. What Covey sets holds whatever the image says; of the
    submitter's those hold that the image does not set."""
    found = []
    for name in sorted(command.env):
        is_ours = name in container.ours or name.startswith(OURS)
        stays = name in OF_THE_HOST or name in NOT_THE_TOOLS
        if PASSED.match(name) and not stays and (is_ours or name not in image_env):
            found.append(name)
    return tuple(found)


def refusal(command: Command, container: Container, host: ContainerHost) -> ContainerRefused | None:
    """Why the rank cannot run in its image here; None: it can."""
    image, tool = for_people(container.image), tool_of(container)
    what = f"image {image} cannot be used on {host.name}"

    def no(why: str, next: str) -> ContainerRefused:
        return ContainerRefused(what, why, next)

    if host.uid == 0:
        return no("containers of jobs are rootless, and this rank would run as root", "submit as a user")
    if not host.tool:
        return no(f"{tool} is not installed there", f"install {tool} on {host.name}")
    saves = _saves(command)
    if saves in NOT_MOUNTED:
        return no(f"COVEY_CHECKPOINTS, {saves}, would hide what the image has there", "give a folder below it")
    if saves and saves not in host.folders:
        return no(f"COVEY_CHECKPOINTS, {for_people(saves)}, is no folder there", f"mkdir -p {for_people(saves)}")
    if odd := [folder for folder, _ in mounts(command, host) if ":" in folder or "," in folder]:
        return no(f"{tool} cannot mount {for_people(odd[0])}: it takes ':' and ',' for marks", "rename the folder")
    if tool == "apptainer":
        if host.image_env is None:
            return no("there is no such file or folder", f"copy it to {image} on {host.name}, or to a shared folder")
        return None
    if not host.gains:
        why = "it would run as the agent's own user, whose jobs gain no privileges, and newuidmap needs some"
        return no(why, "systemctl enable --now covey-starter, and submit as a user")
    if not runtime_of(host.groups, host.runtimes):
        wanted = "runc" if host.groups == "hybrid" else "crun"
        return no(f"podman needs {wanted} there, for {host.groups} control groups", f"install {wanted} on {host.name}")
    if host.trouble:
        # without a folder of the user's own podman looks for the one of the session in which it was first used
        lingers = f"loginctl enable-linger {host.user} on {host.name}, or "
        next = f"podman image exists {image} on {host.name} as {host.user}"
        return no(f"podman: {host.trouble}", next if host.runtime_dir else lingers + next)
    if host.image_env is None:
        why = f"{host.user} has no such image there, and agents never pull one"
        return no(why, f"podman pull {image} on {host.name} as {host.user}")
    if missing := [gpu for gpu in container.gpus if gpu not in host.cdi]:
        why = f"podman knows no device {CDI_KIND}={missing[0]}: CDI does not name it"
        next = f"nvidia-ctk cdi generate --device-name-strategy=uuid --output=/etc/cdi/nvidia.yaml on {host.name}"
        return no(why, next)
    return None


def contained(command: Command, container: Container, host: ContainerHost) -> Command:
    """The command that runs this one in its container. Values of variables are not among its arguments, which everybody
    on the host can read."""
    image_env = host.image_env or {}
    names = passed(command, container, image_env)
    env = command.env
    if python := image_env.get("PYTHONPATH"):
        env = env | {"PYTHONPATH": ":".join(filter(None, (*_hooked(env, container), python, *_behind(env, container))))}
    if tool_of(container) == "apptainer":
        inside = {f"APPTAINERENV_{name}": env[name] for name in names if name != "HOME"}
        argv = apptainer_arguments(command, container, host)
        return msgspec.structs.replace(command, argv=argv, env={**tool_environment(env, host), **inside})
    argv = podman_arguments(command, container, host, names)
    return msgspec.structs.replace(command, argv=argv, env=tool_environment(env, host))


def _hooked(env: Mapping[str, str], container: Container) -> Sequence[str]:
    first = env.get("PYTHONPATH", "").split(":")[:1]
    return [path for path in first if posixpath.dirname(path) in container.shows]


def _behind(env: Mapping[str, str], container: Container) -> Sequence[str]:
    return env.get("PYTHONPATH", "").split(":")[len(_hooked(env, container)) :]


def podman_arguments(
    command: Command, container: Container, host: ContainerHost, names: Sequence[str]
) -> tuple[str, ...]:
    """The argument list of podman. `names`: the variables that the program has of podman's own."""
    runtime = runtime_of(host.groups, host.runtimes)
    shared = ("--ipc=host",) if host.queues else ("--ipc=private", "--volume=/dev/shm:/dev/shm")
    return (
        *(host.tool, MANAGER, f"--runtime={runtime}", "run"),
        *("--rm", "--pull=never", f"--name={name_of(command)}", f"--pidfile={pid_file_of(command)}"),
        *(f"--label=covey={command.env.get('COVEY_JOB_ID', '')}", "--log-driver=passthrough", "--no-healthcheck"),
        *("--network=host", "--pid=host", "--uts=host", "--cgroupns=host", *shared),
        *("--userns=keep-id", f"--user={host.uid}:{host.gid}"),
        *(("--group-add=keep-groups",) if runtime == "crun" else ()),
        *("--security-opt=label=disable", "--ulimit=host", f"--umask={umask_of(command.env):04o}"),
        *(f"--volume={folder}:{folder}{'' if writes else ':ro'}" for folder, writes in mounts(command, host)),
        *((f"--device={RDMA}",) if RDMA in host.folders else ()),
        *(f"--device={CDI_KIND}={gpu}" for gpu in container.gpus),
        *(f"--env={name}" for name in names),
        # many images say `all`, which a hook of older drivers would obey
        "--env=NVIDIA_VISIBLE_DEVICES=void",
        *(f"--workdir={command.cwd}", "--entrypoint=", container.image, *command.argv),
    )


def apptainer_arguments(command: Command, container: Container, host: ContainerHost) -> tuple[str, ...]:
    """The argument list of apptainer, by its manual: nobody here has run it."""
    return (
        *(host.tool, "exec", "--cleanenv", f"--pwd={command.cwd}"),
        *(f"--bind={folder}:{folder}{'' if writes else ':ro'}" for folder, writes in mounts(command, host)),
        *(("--nv",) if container.gpus else ()),
        *(posixpath.join(command.cwd, container.image), *command.argv),
    )


def entered(command: Command, container: Container, host: ContainerHost, terminal: bool) -> Command:
    """The command that runs this one in the rank's container, beside the rank; without arguments: a shell.
    ContainerRefused where nobody can enter it."""
    if tool_of(container) == "apptainer" or not host.tool:
        why = "no command enters a container of apptainer" if host.tool else "podman is not installed there"
        what = f"the container of {for_people(container.image)} cannot be entered on {host.name}"
        raise ContainerRefused(what, why, "put the command into the job's own")
    term = ("--env=TERM",) if terminal else ()
    argv = (
        *(host.tool, MANAGER, f"--runtime={runtime_of(host.groups, host.runtimes)}", "exec", "--interactive"),
        *(("--tty", *term) if terminal else ()),
        *(f"--user={host.uid}:{host.gid}", f"--workdir={command.cwd}"),
        *(f"--env={name}=" for name in container.hides),
        *(name_of(command), *(command.argv or ("/bin/sh",))),
    )
    return msgspec.structs.replace(command, argv=argv, env=tool_environment(command.env, host), container=None)


def tool_environment(env: Mapping[str, str], host: ContainerHost) -> dict[str, str]:
    """The environment of podman or apptainer itself."""
    own = {name: value for name, value in env.items() if name not in NOT_THE_TOOLS}
    there = {"XDG_RUNTIME_DIR": host.runtime_dir} if host.runtime_dir else {}
    return {**own, "PATH": PATH, "DBUS_SESSION_BUS_ADDRESS": NO_BUS, **there}


def clearing(tool: str, names: Sequence[str]) -> tuple[str, ...]:
    """The command that removes what is left of these containers."""
    return (tool, MANAGER, "rm", "--force", "--ignore", "--time=0", *names)

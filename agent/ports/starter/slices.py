"""Slices and units of other users' jobs: their names, their properties, and the commands of systemd that make them.

    covey-jobs.slice
      +- covey-jobs-JOB:EPOCH.slice                        the limits of all that runs of the job on this host
           +- covey-job:JOB:EPOCH:supervisor-a1b2.service  its ranks too; what it left running when it died stays there
           +- covey-job:JOB:EPOCH:spares-c3d4.service

Nothing is done here: the starter runs the commands, and the agent knows by the names where to look.
"""

from pathlib import Path

import msgspec

from agent.ports.starter.starter_wire import LimitAs, StartAs
from covey.ports.starter import EpochLimits, MemoryPeak

SLICE = "covey-jobs.slice"
GROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "cpu", "pids")
FILES_MAX = 65_536
"""Open files, as the agent's own jobs may have."""
UMASK = 0o027
"""The umask of programs: an access list lets the agent read what a group may. A job says its own."""
TASKS_MAX = 32_768
"""Most processes and threads of one epoch on a host: thousands of data loaders, and no fork bomb."""
FOR_ALL = (
    *("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset", "char-infiniband_verbs"),
    *("char-infiniband_cm", "/dev/infiniband/rdma_cm", "/dev/fuse", "/dev/net/tun", "/dev/kvm"),
)
"""Devices that no job has for itself: the driver's, which open no GPU, RDMA, and what rootless containers use."""


def slice_of(job: str, epoch: int) -> str:
    """The slice of an epoch. In names of slices `-` stands for a slice within a slice."""
    return "covey-jobs-" + job.replace("-", "\\x2d") + f":{epoch}.slice"


def slices_of(job: str) -> str:
    """A pattern of the slices of a job's epochs. `epoch_of` says which are: in patterns a backslash is not itself."""
    return "covey-jobs-" + job.replace("-", "?x2d") + ":*.slice"


def epoch_of(job: str, unit: str) -> int | None:
    """The epoch whose slice this unit is; None: it is none of this job."""
    epoch = unit.removesuffix(".slice").rpartition(":")[2]
    return int(epoch) if epoch.isdecimal() and unit == slice_of(job, int(epoch)) else None


def units_of(job: str, epoch: int) -> str:
    """The pattern of the epoch's units, and of no others."""
    return f"covey-job:{job}:{epoch}:*.service"


def timer_of(job: str, epoch: int) -> str:
    return f"covey-end:{job}:{epoch}.timer"


def lacking(groups: Path) -> tuple[str, ...]:
    """Controllers that this kernel does not have, or has given to somebody else: they limit nothing here."""
    try:
        there = (groups / "cgroup.controllers").read_text().split()
    except OSError:  # version 1 of control groups: a folder for each
        there = [name for name in CONTROLLERS if (groups / name / "cgroup.procs").exists()]
    return tuple(name for name in CONTROLLERS if name not in there)


def unit_command(ask: StartAs, user: str, folder: str, unit: str, given: str) -> tuple[str, ...]:
    """The beginning of the command that starts a unit. `given`: the file that the program reads."""
    properties = {
        "UMask": f"{UMASK:04o}",
        "WorkingDirectory": folder,
        "StandardInput": f"file:{given}",
        "StandardOutput": "journal",
        "StandardError": "journal",
        "LimitNOFILE": str(FILES_MAX),
        "LimitMEMLOCK": "infinity",  # what RDMA registers is locked
        "OOMPolicy": "continue",  # its supervisor tells which rank was killed
        "KillMode": "process",  # ranks outlive a supervisor that dies; the next one finds them
        "PrivateTmp": "yes" if ask.private_tmp else "no",
    }
    return (
        *("systemd-run", "--quiet", "--collect", "--no-ask-password", "--service-type=exec"),
        *(f"--unit={unit}", f"--slice={slice_of(ask.job, ask.epoch)}", f"--uid={user}"),
        f"--description=Covey job {ask.job} of {user}",
        *(f"--property={name}={value}" for name, value in properties.items()),
    )


def make_slice(job: str, epoch: int) -> tuple[str, ...]:
    """Make the slice of an epoch. Made so, it leaves no file when it is stopped."""
    manager = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
    signature = "ssa(sv)a(sa(sv))"
    return ("busctl", "call", *manager, "StartTransientUnit", signature, slice_of(job, epoch), "fail", "0", "0")


def limits_of(ask: StartAs) -> EpochLimits:
    """The limits that an agent asks for, also one that knows the memory alone."""
    return ask.limits if ask.limits.memory_bytes else msgspec.structs.replace(ask.limits, memory_bytes=ask.memory_bytes)


def set_limits(ask: LimitAs) -> tuple[str, ...]:
    limits = ask.limits
    return (
        *("systemctl", "set-property", "--runtime", slice_of(ask.job, ask.epoch)),
        f"MemoryMax={limits.memory_bytes or 'infinity'}",
        f"CPUQuota={f'{100 * limits.cpus}%' if limits.cpus else ''}",
        f"CPUWeight={limits.weight}",
        f"TasksMax={TASKS_MAX}",
        *devices(limits.gpus, limits.caps),
    )


def devices(gpus: tuple[int, ...] | None, caps: tuple[int, ...]) -> tuple[str, ...]:
    """Which device files may be opened: those of these GPUs, and what every job may have."""
    if gpus is None:
        return ("DevicePolicy=auto", "DeviceAllow=")
    own = (*(f"/dev/nvidia{gpu}" for gpu in gpus), *(f"/dev/nvidia-caps/nvidia-cap{cap}" for cap in caps))
    return ("DevicePolicy=closed", "DeviceAllow=", *(f"DeviceAllow={device} rw" for device in (*FOR_ALL, *own)))


def kill_later(job: str, epoch: int, seconds: int) -> tuple[str, ...]:
    """A timer that kills all processes of the epoch, whatever the agent and its supervisor do. RuntimeMaxSec= of a unit
    would end its first process alone, as ranks outlive their supervisor."""
    return (
        *("systemd-run", "--quiet", "--collect", f"--unit={timer_of(job, epoch).removesuffix('.timer')}"),
        *(f"--on-active={seconds}", "--timer-property=AccuracySec=1s", "--"),
        *("systemctl", "kill", "--all", "--signal=KILL", units_of(job, epoch)),
    )


def memory_peak(job: str, epoch: int, groups: Path = GROUPS) -> MemoryPeak | None:
    """What the kernel counted of an epoch's memory, as long as its slice is there; None: it is not, or this kernel does
    not count."""
    folder = groups / "covey.slice" / SLICE / slice_of(job, epoch)
    try:
        events = dict(line.split() for line in (folder / "memory.events").read_text().splitlines())
        # oom_kill alone also counts those of a host, or of a container, without memory
        killed = int(events["oom_kill"]) if int(events["oom"]) else 0
        limit = (folder / "memory.max").read_text().strip()
    except (OSError, ValueError, KeyError):
        return None
    try:
        peak = int((folder / "memory.peak").read_text())
    except (OSError, ValueError):  # Linux before 5.19
        peak = 0
    return MemoryPeak(peak, killed, int(limit) if limit.isdigit() else 0)

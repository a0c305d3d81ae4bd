"""Slices and units of other users' jobs: their names and their properties, as systemd's manager takes them.

    covey-jobs.slice
      +- covey-jobs-JOB:EPOCH.slice                        the limits of all that runs of the job on this host
           +- covey-job:JOB:EPOCH:supervisor-a1b2.service  its ranks too; what it left running when it died stays there
           +- covey-job:JOB:EPOCH:spares-c3d4.service

Nothing is done here: the starter asks systemd's manager, and the agent knows by the names where to look.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from agent.ports.starter.starter_wire import StartAs
from covey.ports.starter import EpochLimits, MemoryPeak

Properties = list[tuple[str, tuple[str, object]]]
"""Properties of a unit: name, and type (of D-Bus) and value (org.freedesktop.systemd1(5))."""
SLICE = "covey-jobs.slice"
GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = "covey-jobs"
"""The folder of epochs' groups there where no systemd makes slices."""
CONTROLLERS = ("memory", "cpu", "pids")
FILES_MAX = 65_536
"""Open files, as the agent's own jobs may have."""
KILLED_LATER = -300
"""The oom_score_adj of supervisors and shims: at a job's limit of memory its ranks are killed, which begin with 0. A
user may give his ranks as much, so it is no more than that."""
INFINITY = (1 << 64) - 1
UMASK = 0o027
"""The umask of programs: an access list lets the agent read what a group may. A job says its own."""
TASKS_MAX = 32_768
"""Most processes and threads of one epoch on a host: thousands of data loaders, and no fork bomb."""
SYSTEMCTL = "/usr/bin/systemctl"
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


def lacking(groups: Path, file: str = "cgroup.controllers") -> tuple[str, ...]:
    """Controllers that this kernel does not have, or has given to somebody else: they limit nothing here."""
    try:
        there = (groups / file).read_text().split()
    except OSError:  # version 1 of control groups: a folder for each
        there = [name for name in CONTROLLERS if (groups / name / "cgroup.procs").exists()]
    return tuple(name for name in CONTROLLERS if name not in there)


def unit_properties(ask: StartAs, user: str, folder: str, given: str, program: Sequence[str]) -> Properties:
    """A service that runs the program. `given`: the file that it reads."""
    return [
        ("Description", ("s", f"Covey job {ask.job} of {user}")),
        ("Slice", ("s", slice_of(ask.job, ask.epoch))),
        ("User", ("s", user)),
        *command(program),
        ("CollectMode", ("s", "inactive-or-failed")),
        ("UMask", ("u", UMASK)),
        ("WorkingDirectory", ("s", folder)),
        ("StandardInputFile", ("s", given)),
        ("StandardOutput", ("s", "journal")),
        ("StandardError", ("s", "journal")),
        ("LimitNOFILE", ("t", FILES_MAX)),
        ("LimitMEMLOCK", ("t", INFINITY)),  # what RDMA registers is locked
        ("OOMPolicy", ("s", "continue")),  # its supervisor tells which rank was killed
        ("OOMScoreAdjust", ("i", KILLED_LATER)),
        ("KillMode", ("s", "process")),  # ranks outlive a supervisor that dies; the next one finds them
        ("PrivateTmp", ("b", ask.private_tmp)),
    ]


def command(argv: Sequence[str]) -> Properties:
    return [("Type", ("s", "exec")), ("ExecStart", ("a(sasb)", [(argv[0], list(argv), False)]))]


def limits_of(ask: StartAs) -> EpochLimits:
    """The limits that an agent asks for, also one that knows the memory alone."""
    return ask.limits if ask.limits.memory_bytes else msgspec.structs.replace(ask.limits, memory_bytes=ask.memory_bytes)


def limit_properties(limits: EpochLimits) -> Properties:
    return [
        ("MemoryMax", ("t", limits.memory_bytes or INFINITY)),
        ("CPUQuotaPerSecUSec", ("t", 1_000_000 * limits.cpus or INFINITY)),
        ("CPUWeight", ("t", limits.weight)),
        ("TasksMax", ("t", TASKS_MAX)),
        *devices(limits.gpus, limits.caps),
    ]


def devices(gpus: tuple[int, ...] | None, caps: tuple[int, ...]) -> Properties:
    """Which device files may be opened: those of these GPUs, and what every job may have. An empty list takes back what
    was allowed."""
    none: Properties = [("DeviceAllow", ("a(ss)", []))]
    if gpus is None:
        return [("DevicePolicy", ("s", "auto")), *none]
    own = (*(f"/dev/nvidia{gpu}" for gpu in gpus), *(f"/dev/nvidia-caps/nvidia-cap{cap}" for cap in caps))
    allowed = [(device, "rw") for device in (*FOR_ALL, *own)]
    return [("DevicePolicy", ("s", "closed")), *none, ("DeviceAllow", ("a(ss)", allowed))]


def kill_later(job: str, epoch: int, seconds: int) -> tuple[Properties, tuple[str, Properties]]:
    """A timer that kills all processes of the epoch, whatever the agent and its supervisor do, and the service that it
    starts. RuntimeMaxSec= of a unit would end its first process alone, as ranks outlive their supervisor."""
    kill = (SYSTEMCTL, "kill", "--all", "--signal=KILL", units_of(job, epoch))
    timer: Properties = [
        ("TimersMonotonic", ("a(st)", [("OnActiveSec", 1_000_000 * seconds)])),
        ("AccuracyUSec", ("t", 1_000_000)),
        ("RemainAfterElapse", ("b", False)),
        ("CollectMode", ("s", "inactive-or-failed")),
    ]
    service = timer_of(job, epoch).replace(".timer", ".service")
    return timer, (service, [*command(kill), ("CollectMode", ("s", "inactive-or-failed"))])


def memory_peak(job: str, epoch: int, groups: Path = GROUPS) -> MemoryPeak | None:
    """What the kernel counted of an epoch's memory, as long as its slice is there; None: it is not, or this kernel does
    not count."""
    by_systemd, by_starter = (
        groups / "covey.slice" / SLICE / slice_of(job, epoch),
        groups / OWN_GROUPS / f"{job}:{epoch}",
    )
    folder = by_systemd if by_systemd.is_dir() else by_starter
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

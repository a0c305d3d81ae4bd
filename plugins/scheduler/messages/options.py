"""What a person may say of a job: the bounds and the words of each option, declared once.

`JobSpec` takes its bounds from here (`spec.within`), the errors of `JobSpec.parse` their "expected ...", and
`agentctl submit` its flags and their help. Nothing heavier than the standard library is imported: agentctl has to start
fast.

A new option is one entry of `OPTIONS` and one typed field of `JobSpec`.
"""

from typing import Literal, NamedTuple, assert_never, get_args

from covey.core.carried import ARGUMENTS_MAX, VARIABLES_MAX
from plugins.scheduler.messages.arrays import FORM, TASKS_MAX

JobClass = Literal["guaranteed", "auto", "opportunistic"]
"""The class of a job (AntMan §3.3). `guaranteed` counts against the tenant's quota; `opportunistic` uses what is left
and yields. `auto` is guaranteed until it has waited for long (`demote_after_s`); then opportunistic, until its tenant's
quota has room for it."""

StopSignal = Literal["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"]
"""The signal that asks a rank to end."""

Pack = Literal["few", "host", "any", "apart"]
"""How a gang lies on hosts: on the fewest that have room, on one, in gaps, or one worker on each
(`policy/place.py`)."""

Kind = Literal["text", "choice", "count", "number", "seconds", "bytes", "switch"]
"""How an option is written. `switch`: true or false in JSON, and in agentctl a flag without a value, which says the
opposite of the default."""

RANKS_MAX = 64
"""The most ranks of an elastic job: each knows every rank's own state (`covey.healing.owns`)."""
TIME_S_MAX = 1e9
GRACE_S_MAX = 3600
"""The longest time between the signal that asks ranks to end and SIGKILL, seconds."""
SIGNAL_BEFORE_MAX = 86_400
"""The longest warning before a time limit, seconds: a day."""
STARTS_MAX = 1_000_000
BYTES_MAX = 1 << 53
"""Largest whole number that JSON carries exactly, bytes (8 PiB)."""


class Option(NamedTuple):
    """One field of a job."""

    field: str
    """The field's name in JSON."""
    kind: Kind
    low: float | None = None
    high: float | None = None
    over_low: bool = False
    """Whether `low` itself is too small."""
    choices: tuple[str, ...] = ()
    words: str = ""
    """What is expected, for kind `text`; for other kinds what is to be known beyond kind and bounds, after a comma, a
    colon or the like."""
    flag: str = ""
    """The option's flag of `agentctl submit`; empty: it has none, or sets the field in a way of its own."""
    flag_choices: tuple[str, ...] = ()
    """The values that the flag takes, where they are not `choices`."""
    metavar: str = ""
    help: str = ""

    @property
    def expected(self) -> str:
        """What a value has to be, in the words that follow `expected`."""
        match self.kind:
            case "text":
                return self.words
            case "choice":
                return f"one of {', '.join(self.choices)}{self.words}"
            case "switch":
                return f"true or false{self.words}"
            case "count":
                return f"a whole number {self._bounds}{self.words}"
            case "bytes":
                return f"a whole number of bytes {self._bounds}{self.words}"
            case "number":
                return f"a number {self._bounds}{self.words}"
            case "seconds":
                return f"a number of seconds {self._bounds}{self.words}"
            case _:
                assert_never(self.kind)

    @property
    def _bounds(self) -> str:
        low, high = f"{self.low:.0f}", f"{self.high:.0f}"
        return f"over {low}, at most {high}" if self.over_low else f"from {low} to {high}"


CPUS_MAX = 4096
"""Most processors of a worker: more than any host has."""
NO_LIMIT = ", or nothing for no limit"
AUTO = "auto"
"""The group of all jobs, of any tenant, that leave it to Covey with whom they share hosts in turns."""
IMAGE_WORDS = "an image's name, such as pytorch:2.7 or docker.io/library/python:3.12, or the absolute path of one"
CALLED = "1 to 63 letters, digits and . _ - + = : @ , beginning with a letter, a digit or _, such as BERT_large"
OUTPUT_WORDS = "an absolute path of at most 4096 characters, in which %j is the job's id and %r the rank; or nothing"
NAMED = "1 to 63 of a-z, 0-9, '.' and '-', beginning with a letter or digit"

OPTIONS: tuple[Option, ...] = (
    Option(
        "name", "text", words=CALLED, flag="--name", help="name of the job, such as BERT_large (default: the script's)",
    ),
    Option(
        "workers", "count", 1, 4096, flag="--workers", metavar="N|N..M",
        help="number of processes (default 1); N..M: an elastic job of M ranks, which starts with N processes and has "
        "N to M of them while it runs (agentctl scale)",
    ),
    Option("workers_max", "count", 0, RANKS_MAX, words=", and at least workers; 0 is as many as workers"),
    Option(
        "gpus_per_worker", "count", 0, 64, flag="--gpus", metavar="N", help="GPUs for each worker or node (default 1)",
    ),
    Option(
        "image", "text", words=f"{IMAGE_WORDS}; or nothing", flag="--image", metavar="IMAGE",
        help="run each worker in a container of this image, as the user: a name such as pytorch:2.7, which podman has "
        "on each host, or the path of a .sif file or a folder, for apptainer (default: in no container)",
    ),
    Option(
        "array", "text", words=f"{FORM}, of at most {TASKS_MAX:,} tasks; or nothing", flag="--array",
        metavar="N-M%%K", help="an array of jobs like this one, such as 0-99%%8: one for each index, which it finds in "
        "COVEY_TASK; each begins when there is room for it, at most 8 at once",
    ),
    Option(
        "after", "text", words="a list of at most 64 jobs with how each has to end, such as ok:j3 or any:j5",
        flag="--after", metavar="ok:JOB|any:JOB", help="start when these jobs, with commas between them, have ended: "
        "ok: it is done, else this one is held; any: however it ended",
    ),
    Option(
        "begin_wall_s", "number", 0, 1e11, words=", seconds since 1970; or nothing", flag="--begin", metavar="TIME",
        help="start at this time at the earliest: 18:30, 2027-01-31T08:00, or in a while: 2h (agents' clocks)",
    ),
    Option(
        "hold", "switch", flag="--hold", help="do not start before agentctl release",
    ),
    Option("argv", "text", words=f"a list of 1 to {ARGUMENTS_MAX} strings, the program first"),
    Option("cwd", "text", words="an absolute path of at most 4096 characters"),
    Option(
        "stdout", "text", words=OUTPUT_WORDS, flag="--output", metavar="FILE",
        help="add what the ranks write to this file on their hosts as well, as the user: %%j is the job's id, %%r the "
        "rank, %%a the task of an array, %%x the name, %%N the host; folders are made (default: agentctl logs alone)",
    ),
    Option(
        "stderr", "text", words=OUTPUT_WORDS, flag="--error", metavar="FILE",
        help="a file of its own for standard error (default: with the rest)",
    ),
    Option("env", "text", words=f"an object of at most {VARIABLES_MAX} strings, without '=' in a name"),
    Option(
        "pack", "choice", choices=get_args(Pack), flag="--pack", flag_choices=("host", "any"),
        help="host: all workers on one host, waiting for one with room; any: wherever GPUs are free, filling gaps; "
        "default: the fewest hosts that have room now, and gaps once a model was seen not to slow down when spread",
    ),
    Option(
        "bind_gpus", "switch", flag="--bind-gpus",
        help="each worker sees its own GPUs only, as device 0 and up (for programs that use every GPU they see); "
        "default: it sees all GPUs of the job on its host, and uses the one numbered LOCAL_RANK",
    ),
    Option(
        "gpu_memory", "bytes", 0, BYTES_MAX, words=" (8 PiB), where 0 says nothing", flag="--gpu-memory",
        metavar="SIZE", help="memory that each rank needs on each of its GPUs, such as 8GiB: where GPUs are shared, a "
        "GPU that has less free memory is not used beside other jobs",
    ),
    Option(
        "remote_memory", "bytes", 0, BYTES_MAX, words=" (8 PiB), where 0 is no limit", flag="--remote-memory",
        metavar="SIZE", help="the most memory of other hosts that the volumes of its ranks may take together, such as "
        "8GiB (default: limited only by its tenant's budget)",
    ),
    Option(
        "host_memory", "bytes", 0, BYTES_MAX, words=" (8 PiB), where 0 is not said", flag="--mem",
        metavar="SIZE", help="memory that its processes on one host may take together, such as 64GiB: hosts that have "
        "less free are not chosen, data Blocks keep within it, and where limits are enforced the kernel kills what "
        "takes more (default: any host, and there the host's part of memory by its GPUs)",
    ),
    Option(
        "cpus", "count", 0, CPUS_MAX, words=", where 0 is not said", flag="--cpus", metavar="N",
        help="processors of each worker: hosts where other jobs left fewer are not chosen, and where limits are "
        "enforced its workers run on no more (default: any host, and what other jobs leave of the processors)",
    ),
    Option(
        "private_tmp", "switch", flag="--private-tmp",
        help="a /tmp of its own on each host, removed with the job, where jobs run as their users; spares, and ranks "
        "that begin under another supervisor than those before them, have another",
    ),
    Option(
        "share_host", "text", words=f"{AUTO} or the name of a group: {NAMED}; or nothing", flag="--share-host",
        metavar="GROUP|auto", help="take turns with the tenant's jobs of the same group that run on the same hosts: "
        "one computes while another sends; auto: with all jobs that say auto; its workers go to hosts where those jobs "
        "are (only jobs with --gpus 0; default: it takes no turns)",
    ),
    Option(
        "hooks", "switch", flag="--no-hooks",
        help="do not hook the script; default: a folder of Covey comes first in PYTHONPATH, so the steps of PyTorch "
        "and JAX scripts are seen without a change to them",
    ),
    Option(
        "tenant", "text", words=NAMED, flag="--tenant",
        help="the tenant whose quota the job counts against (default: the user's only one; for operators: default)",
    ),
    Option(
        "class", "choice", choices=get_args(JobClass), flag="--class",
        help="guaranteed (default): within the tenant's quota; opportunistic: on GPUs that are left over, and yields; "
        "auto: guaranteed, and opportunistic after a long wait",
    ),
    Option("skew", "number", 0, 1, words=": bytes of the largest tensor over bytes of all"),
    Option(
        "time_limit_s", "seconds", 0, TIME_S_MAX, over_low=True, words=NO_LIMIT, flag="--time", metavar="TIME",
        help="longest time to run, such as 2h",
    ),
    Option(
        "signal_before_s", "seconds", 0, SIGNAL_BEFORE_MAX, words=", less than time_limit_s", flag="--signal-before",
        metavar="TIME", help="with --time: ask the job to end this long before its limit, such as 10min; what is left "
        "of it is killed at the limit (default: it is asked at the limit, and killed after its grace)",
    ),
    Option(
        "retries", "count", 0, STARTS_MAX, flag="--retries", metavar="N",
        help="how often to start the job again after a failure (default 0)",
    ),
    Option("retries_lost", "count", 0, STARTS_MAX),
    Option("retries_again", "count", 0, STARTS_MAX),
    Option("retries_preempted", "count", 0, STARTS_MAX, words=NO_LIMIT),
    Option(
        "on_lost", "choice", choices=("heal", "restart", "keep"), flag="--on-lost",
        flag_choices=("heal", "restart", "stop", "keep"),
        help="when a host is lost: heal (default): another host takes over its ranks and the others keep running, if "
        "the script registered its state (job.state), else as restart; restart: the whole job starts again; stop: the "
        "job fails; keep: ranks on a host that is cut off keep running, and the job waits until the host is back or "
        "is given up",
    ),
    Option(
        "spares", "count", 0, 64, flag="--spares", metavar="N",
        help="processes, on each of its hosts and on one more, that have imported what the script imports and wait to "
        "replace a lost rank (default 0; needs a script that registers its state)",
    ),
    Option(
        "hang_s", "seconds", 1, TIME_S_MAX, words=NO_LIMIT, flag="--hang", metavar="TIME",
        help="how long the other ranks may wait for one rank, or all make no progress, such as 10m: then the stacks "
        "of all are kept (agentctl logs), and that rank is started again; the job fails if no single rank is at fault "
        "(default: no limit)",
    ),
    Option(
        "grace_s", "seconds", 0, GRACE_S_MAX, flag="--grace", metavar="TIME",
        help="time between the signal that asks ranks to end and SIGKILL (default 60s)",
    ),
    Option(
        "stop_signal", "choice", choices=get_args(StopSignal), flag="--stop-signal",
        help="the signal that asks ranks to end (default TERM)",
    ),
)  # fmt: skip
"""All options, in the order in which `agentctl submit --help` lists them."""


def named(field: str) -> Option:
    """The option of this name. KeyError: there is none."""
    found = next((option for option in OPTIONS if option.field == field), None)
    if found is None:
        raise KeyError(field)
    return found

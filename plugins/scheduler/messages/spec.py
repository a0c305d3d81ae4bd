"""What a person asks for: one job, checked once.

`JobSpec.parse` is the only validation of a submission. Every error names the field, what was found and what was
expected, and on a misspelt field the nearest one there is. The limits are in the types, so the struct is bounded too
when it comes back out of the log or from another host.
"""

import difflib
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from covey.core.carried import (
    ARGUMENTS_MAX,
    NAME_CHARACTERS_MAX,
    STRING_BYTES_MAX,
    TEXT,
    VARIABLES_MAX,
    argv_excess,
    env_excess,
    for_people,
)
from covey.core.ids import HostId
from plugins.scheduler.messages import options, output_names
from plugins.scheduler.messages.arrays import FORM, TASKS_MAX, tasks_of
from plugins.scheduler.messages.options import JobClass as JobClass
from plugins.scheduler.messages.options import Pack as Pack
from plugins.scheduler.messages.options import StopSignal as StopSignal

GRACE_S = 60.0
"""Seconds that a job gets to write a checkpoint when its submission does not say."""

OnLost = Literal["heal", "restart", "keep"]
"""What becomes of ranks on a host that no leader reaches. `heal`: another host takes them over and the rest of the job
continues, if its script registered its state; if not, as `restart`: they end there, and the whole job is placed again.
`keep` lets them run, and the job waits for that host."""
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$", max_length=63)]
TITLE_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.+=:@,-]{0,62}\Z"
Title = Annotated[str, Meta(pattern=TITLE_PATTERN, max_length=63)]
"""A job's name as people write it."""
After = Annotated[str, Meta(pattern=r"^(ok|any):j[1-9][0-9]{0,17}\Z", max_length=24)]
"""A job that must end before this one starts: `ok:j3`, it must be done; `any:j3`, however it ends."""
AFTER_MAX = 64
OutputName = Annotated[str, Meta(pattern=f"^(/{TEXT}+)?\\Z", max_length=4096)]
"""The name of a file for output, with words (`messages.output_names`); empty: none."""
Argument = Annotated[str, Meta(pattern=f"^{TEXT}*$", max_length=3 * STRING_BYTES_MAX)]
"""An argument that a process can be given, as `covey.core.carried` writes it: each byte has at most three
characters."""
Variable = Annotated[str, Meta(pattern=f"^(?:(?!=){TEXT})+$", max_length=3 * NAME_CHARACTERS_MAX)]
Key = Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{8,64}$", max_length=64)]
"""The key that makes a submission idempotent: the same key twice is one job."""


class SealedEnv(msgspec.Struct, frozen=True):
    """What the log holds of a submitter's environment: its name, its key, and who had it when the job was submitted.
    The environment itself lies sealed on those hosts and on hosts that ran the job (`service/ranks/envs.py`)."""

    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$", max_length=32)]
    """Digest of the sealed bytes, which says nothing of what is in them."""
    key: Annotated[bytes, Meta(max_length=32)] = b""
    """The key of the environment; empty once the job is over."""
    holders: Annotated[tuple[Annotated[HostId, Meta(max_length=63)], ...], Meta(max_length=16)] = ()
    """The hosts that have the environment, the submitting agent's first."""


USER_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,255}$"
"""A user's name as jobs, tenants and events have it: no space, so that no name reads like a sentence of ours."""
UserName = Annotated[str, Meta(pattern=USER_PATTERN, max_length=256)]


IMAGE_MAX = 4096
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_DOMAIN = r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,252}(?::[0-9]{1,5})?/)?"
IMAGE_PATTERN = (
    rf"^(?:{_DOMAIN}{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
    rf"|/{TEXT}+)?\Z"
)
"""An image's name as podman knows it, or an absolute path: nothing that begins like an option, or that names a place
to fetch an image from (`docker://`, `docker-archive:/`)."""
OF_ITS_OWN = frozenset("/ /bin /boot /dev /etc /lib /lib32 /lib64 /opt /proc /run /sbin /sys /usr /var".split())  # noqa: SIM905
"""Folders that every image has: one of the host in their place would hide the image's programs."""


class JobOwner(msgspec.Struct, frozen=True):
    """The user who submitted a job, as the kernel of the host told it where that was done. No request says it."""

    user: UserName
    """The user's name: a host where it stands for another uid runs nothing of the job."""
    uid: Annotated[int, Meta(ge=0, lt=(1 << 32) - 1)]


class SpecError(ValueError):
    """A submission that cannot be taken: one line what, one line why, one line what to do next."""

    def __init__(self, field: str, what: str, why: str, next: str) -> None:
        super().__init__(f"{what}: {why}")
        self.field, self.what, self.why, self.next = field, what, why, next


def within(field: str) -> Meta:
    """The bounds of this field, as its option declares them (`messages/options.py`)."""
    option = options.named(field)
    if option.over_low:
        return Meta(gt=option.low, le=option.high)
    return Meta(ge=option.low, le=option.high)


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, rename={"job_class": "class"}):
    """One job: a gang of `workers` processes that starts whole or not at all."""

    name: Name
    """The name that what is known of earlier jobs goes by: lower case, so that it can be one of a unit and a file."""
    title: Annotated[str, Meta(pattern=rf"({TITLE_PATTERN})|^\Z", max_length=63)] = ""
    """The job's name as it was written, where that is another; empty: `name`."""
    tenant: Name = "default"
    job_class: JobClass = "guaranteed"
    workers: Annotated[int, within("workers")] = 1
    workers_max: Annotated[int, within("workers_max")] = 0
    """The most processes of an elastic job, and the number of its ranks for ever; `workers` is the fewest, which its
    quota and its order count. 0: the job always has `workers` processes."""
    gpus_per_worker: Annotated[int, within("gpus_per_worker")] = 1
    argv: Annotated[tuple[Argument, ...], Meta(min_length=1, max_length=ARGUMENTS_MAX)]
    cwd: Annotated[str, Meta(pattern=f"^/{TEXT}*$", max_length=4096)] = "/"
    env: Annotated[dict[Variable, Argument], Meta(max_length=VARIABLES_MAX)] = {}
    skew: Annotated[float, within("skew")] = 0.0
    """Bytes of the largest tensor over bytes of all tensors (NSDI'19 §3.2); over `packlimit` the gang is packed. 0: as
    seen when a job of this name ran before."""
    time_limit_s: Annotated[float, within("time_limit_s")] | None = None
    """Seconds that the job may run, all attempts together; None: no limit."""
    signal_before_s: Annotated[float, within("signal_before_s")] = 0.0
    """How long before its limit the job is asked to end, seconds; what is left of it is killed at the limit. 0: it is
    asked at the limit, and killed after its grace."""
    grace_s: Annotated[float, within("grace_s")] = GRACE_S
    """Seconds between the stop signal and SIGKILL, to write a checkpoint."""
    stop_signal: StopSignal = "TERM"
    """The signal that asks ranks to end, without its SIG."""
    pack: Pack = "few"
    gpu_memory: Annotated[int, within("gpu_memory")] = 0
    """Device memory that each rank asks for on each of its GPUs, bytes; 0: not said. Where GPUs are shared, a host that
    has less does not take the job."""
    remote_memory: Annotated[int, within("remote_memory")] = 0
    """The most memory of other hosts that the job's volumes may have, all its hosts together, bytes; 0: not limited."""
    host_memory: Annotated[int, within("host_memory")] = 0
    """Memory that the processes of the job on one host may take together, bytes; 0: not said. Hosts that have less free
    do not take the job, and where limits are enforced the kernel kills what takes more."""
    cpus: Annotated[int, within("cpus")] = 0
    """Processors of each worker; 0: not said. Hosts where fewer are promised to nobody do not take it."""
    private_tmp: bool = False
    """Whether its ranks have a /tmp of their own on each host."""
    image: Annotated[str, Meta(pattern=IMAGE_PATTERN, max_length=IMAGE_MAX)] = ""
    """The image in whose container each rank runs (`covey.ports.processes.Container`); empty: in none."""
    share_host: Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9.-]{0,62})?$", max_length=63)] = ""
    """The group of jobs with which this one takes turns on hosts that they share (`plugins/interleave`): `auto`, a name
    of its tenant's, or empty: it takes no turns."""
    bind_gpus: bool = False
    """Whether each rank sees its own GPUs only; otherwise all that the job has on its host
    (`agent/jobs/rank_env.py`)."""
    hooks: bool = True
    """Whether steps of a script are seen without a change to it (`covey/hooks`)."""
    on_lost: OnLost = "heal"
    array: Annotated[str, Meta(pattern=r"^([0-9][0-9,:%-]*)?\Z", max_length=1000)] = ""
    """The tasks of an array as they were written (`policy.arrays`): each is a job like this one, and begins when there
    is room for it; empty: the job is no array."""
    after: Annotated[tuple[After, ...], Meta(max_length=AFTER_MAX)] = ()
    """The jobs that must end before this one starts."""
    begin_wall_s: Annotated[float, within("begin_wall_s")] | None = None
    """When the job may start at the earliest, by the leader's wall clock, in seconds since 1970; None: at once."""
    hold: bool = False
    """Whether the job is held until somebody releases it."""
    stdout: OutputName = ""
    """The file to which hosts add what the ranks write (`messages.output_names`), as the user; empty: none."""
    stderr: OutputName = ""
    """The file for standard error, where that has one of its own; empty: it goes where `stdout` goes."""
    hang_s: Annotated[float, within("hang_s")] | None = None
    """Seconds for which the others may wait for the part of one rank in a sum; then its stacks are kept, and its
    process is ended: a successor takes its place, or the job fails. None: for ever."""
    spares: Annotated[int, within("spares")] = 0
    """The number of processes that wait on each of the job's hosts, and on one more, to become one of its ranks, if the
    job heals."""
    retries: Annotated[int, within("retries")] = 0
    """The number of times that the job is started again after a failure of its own."""
    retries_lost: Annotated[int, within("retries_lost")] = 5
    """The number of times that the job is started again after a host lost its ranks (chosen: a job that takes its hosts
    along should not take all)."""
    retries_again: Annotated[int, within("retries_again")] = 1000
    """The number of times that the job is started again after exit 75 (chosen: a job that saves and asks again every
    hour for weeks)."""
    retries_preempted: Annotated[int, within("retries_preempted")] | None = None
    """The number of times that the job is started again after it had to yield; None: always, since that is not its
    fault."""
    owner: JobOwner | None = None
    """Whose job it is; None: that of the agent's own user, as which its ranks run."""

    @property
    def called(self) -> str:
        """The job's name for people."""
        return self.title or self.name

    @property
    def elastic(self) -> bool:
        """Whether the number of the job's processes may change while it runs."""
        return self.workers_max > self.workers

    @property
    def world_size(self) -> int:
        """The number of ranks, whichever processes carry them."""
        return max(self.workers, self.workers_max)

    @property
    def gpus(self) -> int:
        """GPUs of the whole gang: the W of 2DAS."""
        return self.workers * self.gpus_per_worker

    @property
    def runs_for_s(self) -> float | None:
        """Seconds that the job may run before it is asked to end; None: no limit."""
        return None if self.time_limit_s is None else max(0.0, self.time_limit_s - self.signal_before_s)

    @property
    def width(self) -> int:
        """What the gang's service is charged with per second: its GPUs, or its workers when it uses none."""
        return self.gpus or self.workers

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "JobSpec":
        """The job that `given` describes. SpecError names the field and what was expected, on a typo the
        nearest name."""
        if not isinstance(given, Mapping):
            raise _wrong("spec", given, "an object with fields such as argv, workers and gpus_per_worker")
        fields = {("class" if name == "job_class" else name): value for name, value in given.items()}
        expected = {option.field: option.expected for option in options.OPTIONS}
        for name in fields:
            if name not in expected:
                raise _unknown(name, expected)
        if fields.get("argv") is None:
            raise SpecError(
                "argv", "nothing to run", "argv is missing", 'give a command, such as argv = ["./train.py"]'
            )
        types = {field.encode_name: field.type for field in msgspec.structs.fields(cls)} | {"name": Title}
        checked = {
            name: _checked(name, value, types[name], expected[name])
            for name, value in sorted(fields.items())
            if value is not None
        }
        if checked.get("spares") and checked.get("on_lost", "heal") != "heal":
            why = (
                f"spares replace single ranks, and with on_lost = {checked['on_lost']!r} "
                "ranks are not replaced one by one"
            )
            raise SpecError("spares", "this job cannot have spares", why, 'leave spares out, or set on_lost = "heal"')
        _check_warning(checked)
        _check_range(checked)
        _check_turns(checked)
        _check_image(checked)
        _check_outputs(checked)
        _check_array(checked)
        _settle_name(checked)
        return msgspec.convert(checked, cls)


def _check_warning(checked: dict[str, Any]) -> None:
    """Check that a warning before the time limit has a limit that it comes before."""
    before, limit = checked.get("signal_before_s", 0.0), checked.get("time_limit_s")
    if before and (limit is None or before >= limit):
        why = "it has no time limit" if limit is None else f"its time limit is {limit:g} s"
        what = f"this job cannot be warned {before:g} s before its limit"
        raise SpecError("signal_before_s", what, why, "set a longer time_limit_s (--time), or leave it out")


def _check_range(checked: dict[str, Any]) -> None:
    """Check the range of an elastic job, and what does not go with one. A range of one number is none."""
    fewest, most = checked.get("workers", 1), checked.pop("workers_max", 0)
    if most in (0, fewest):
        return
    range = f"{fewest}..{most}"
    if most < fewest:
        why = "the first number is the fewest processes, and the second one the most"
        raise SpecError("workers_max", f"invalid range of workers: {range}", why, f"--workers {most}..{fewest}")
    what = f"this job cannot have {range} workers"
    if (on_lost := checked.get("on_lost", "heal")) != "heal":
        why = f"processes that remain carry the ranks of those that end, and on_lost = {on_lost!r} does not allow that"
        raise SpecError("on_lost", what, why, 'set on_lost = "heal", or give one number of workers')
    if (pack := checked.get("pack", "few")) in ("host", "apart"):
        why = f"pack = {pack!r} fixes the hosts of its workers, and an elastic job gets and gives back hosts"
        raise SpecError("pack", what, why, "leave pack out, or give one number of workers")
    if checked.get("spares"):
        why = "processes that remain carry the ranks of a lost one at once, so none waits to replace it"
        raise SpecError("spares", what, why, "leave spares out, or give one number of workers")
    checked["workers_max"] = most


def _check_turns(checked: dict[str, Any]) -> None:
    """Check that a job which takes turns has no GPUs: a GPU is held by one job, or shared in other ways."""
    group = checked.get("share_host")
    if not group or checked.get("gpus_per_worker", 1) == 0:
        return
    why = (
        f"its {checked.get('gpus_per_worker', 1)} GPUs for each worker are not given in turns, and jobs take turns at "
        "processors and network only"
    )
    next = "set gpus_per_worker = 0 (--gpus 0), or leave share_host out"
    raise SpecError("share_host", f"this job cannot share hosts in turns with group {group}", why, next)


def _check_image(checked: dict[str, Any]) -> None:
    """Check what does not go with a container."""
    image, cwd = checked.get("image"), checked.get("cwd", "/")
    if not image:
        return
    if checked.get("spares"):
        why = "a spare waits before it is known which rank it becomes, and a rank's container is made for that rank"
        raise SpecError("spares", f"this job cannot have spares in image {image}", why, "leave spares or image out")
    if "/" + posixpath.normpath(cwd).lstrip("/") in OF_ITS_OWN:
        why = "the working directory is mounted into the container at its own path, and would hide what the image has"
        next = "give a directory of your own: cd to it before agentctl submit, or --cwd DIR"
        raise SpecError("cwd", f"a job in an image cannot run in {cwd}", why, next)


def _check_outputs(checked: dict[str, Any]) -> None:
    """Check the words in names of files for output, and what does not go with standard error by itself."""
    for field in ("stdout", "stderr"):
        if word := output_names.unknown(checked.get(field, "")):
            what = f"invalid {field}: {checked[field]!r:.80} has {word}"
            raise SpecError(field, what, f"expected {output_names.known()}", "write %% for a percent sign")
    if checked.get("stderr") and checked.get("spares"):
        why = "a spare has its output before it is known which rank it becomes, and one pipe for all of it"
        raise SpecError("stderr", "this job cannot have a file for standard error", why, "leave stderr or spares out")


def _check_array(checked: dict[str, Any]) -> None:
    """Check that the tasks of an array are as `policy.arrays` reads them."""
    if not (text := checked.get("array")):
        return
    try:
        tasks_of(text)
    except ValueError as error:
        what, next = f"invalid array: {text!r:.80}", f"expected {FORM}, of at most {TASKS_MAX:,} tasks"
        raise SpecError("array", what, str(error), next) from None


def _settle_name(checked: dict[str, Any]) -> None:
    """Find the name that all hosts go by, and keep the one that was written beside it."""
    called = checked.get("name") or name_of(checked["argv"])
    name = re.sub(r"[^a-z0-9.-]+", "-", called.lower()).strip("-.") or "job"
    checked["name"], checked["title"] = name, "" if name == called else called


def _checked(name: str, value: Any, type: Any, expected: str) -> Any:
    if isinstance(value, float) and value != value:
        raise _wrong(name, value, expected)
    if name in ("argv", "env"):
        _fits_a_process(name, value)
    try:
        return msgspec.to_builtins(msgspec.convert(value, type))
    except (msgspec.ValidationError, RecursionError) as error:
        raise _wrong(name, value, expected) from error


def _wrong(name: str, value: Any, expected: str) -> SpecError:
    try:
        shown = repr(value)
    except RecursionError:
        shown = "nested so deeply"
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return SpecError(name, f"invalid {name}: {shown}", f"expected {expected}", f"correct {name} and submit again")


def _fits_a_process(name: str, value: Any) -> None:
    """SpecError names the argument or the variable that Linux does not take, or that is too large, and its size."""
    if name == "argv" and isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        for place, each in enumerate(value):
            if not _TEXT.fullmatch(each):
                raise SpecError("argv", f"invalid argument {place}: {_short(each)}", NO_TEXT, TEXT_NEXT)
        if excess := argv_excess(value):
            raise SpecError("argv", *excess, "put long content into a file, and give the job the file's name")
    if name == "env" and isinstance(value, Mapping):
        for variable, content in value.items():
            if not (isinstance(variable, str) and isinstance(content, str)):
                why = f"a variable must be text, and this is a {type(content).__name__}"
                raise SpecError("env", f"variable {_short(variable)} cannot be passed on", why, "write it in quotes")
            if not variable or "=" in variable or not _TEXT.fullmatch(variable):
                why = "a name is text of at least one character, without '=' and NUL"
                raise SpecError("env", f"invalid name of a variable: {_short(variable)}", why, "give it another name")
            if not _TEXT.fullmatch(content):
                raise SpecError("env", f"variable {for_people(variable)} cannot be passed on", NO_TEXT, TEXT_NEXT)
        if excess := env_excess(value):
            next = "leave variables out (env -u NAME agentctl submit ..., or --no-env), or read long ones from a file"
            raise SpecError("env", *excess, next)


_TEXT = re.compile(f"{TEXT}*")
NO_TEXT = "it has a NUL, or half of a pair of UTF-16, and a process cannot be given these"
TEXT_NEXT = (
    "write a byte that is not UTF-8 as NUL and its two hexadecimal digits (covey/core/carried.py; agentctl does)"
)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _unknown(name: Any, known: Iterable[str]) -> SpecError:
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    next = f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(known))}"
    return SpecError(str(name)[:80], f"{str(name)[:80]!r} is not a field of a job", "there is no such field", next)


def name_of(argv: tuple[str, ...] | list[str]) -> str:
    """A name for a job whose submitter gave none: the script's, or the program's."""
    script = next((part for part in argv[:4] if part.endswith((".py", ".sh"))), argv[0])
    stem = script.rsplit("/", 1)[-1].rsplit(".", 1)[0]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("-.").rstrip("-._")[:63] or "job"

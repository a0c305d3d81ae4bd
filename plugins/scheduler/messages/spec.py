"""What a person asks for: one job, checked once.

`JobSpec.parse` is the only validation of a submission. Every error names the field, what was found and what was
expected, and on a misspelt field the nearest one there is. The limits stand in the types, so the same struct is bounded
when it comes back out of the log or from another host.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from covey.core import HostId
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

GRACE_S = 60.0
"""Seconds that a job gets to write a checkpoint when it does not say."""

OnLost = Literal["heal", "restart", "keep"]
"""What becomes of ranks on a host that no leader reaches. `heal`: another host takes them over and the rest of the job
goes on, if its script attached its state; if not, as `restart`: they end there, and the whole job is placed again.
`keep` lets them run, and the job waits for that host."""
JobClass = Literal["guaranteed", "auto", "opportunistic"]
"""AntMan §3.3. `guaranteed` counts against the tenant's quota; `opportunistic` uses what is left and yields. `auto` is
guaranteed until it waited for long (`demote_after_s`); then opportunistic, until its tenant's quota has room for it."""

Pack = Literal["few", "host", "any", "apart"]
"""How a gang lies on hosts: on the fewest that have room, on one, in gaps, or one worker on each
(`policy/place.py`)."""

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$", max_length=63)]
Argument = Annotated[str, Meta(pattern=f"^{TEXT}*$", max_length=3 * STRING_BYTES_MAX)]
"""What a process can be given, as `covey.core.carried` writes it: each byte has at most three characters."""
Variable = Annotated[str, Meta(pattern=f"^(?:(?!=){TEXT})+$", max_length=3 * NAME_CHARACTERS_MAX)]
Key = Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{8,64}$", max_length=64)]
"""What makes a submission idempotent: the same key twice is one job."""


class SealedEnv(msgspec.Struct, frozen=True):
    """What the log holds of a submitter's environment: its name, its key, and who had it when the job was submitted.
    The environment itself lies sealed on those hosts and on hosts that ran the job (`service/envs.py`)."""

    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$", max_length=32)]
    """Of the sealed bytes, which say nothing of what is in them."""
    key: Annotated[bytes, Meta(max_length=32)] = b""
    """Empty once the job is over."""
    holders: Annotated[tuple[Annotated[HostId, Meta(max_length=63)], ...], Meta(max_length=16)] = ()
    """The submitting agent's host first."""


class SpecError(ValueError):
    """A submission that cannot be taken: one line what, one line why, one line what to do next."""

    def __init__(self, field: str, what: str, why: str, next: str) -> None:
        super().__init__(f"{what}: {why}")
        self.field, self.what, self.why, self.next = field, what, why, next


SPARES_MAX = 64


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, rename={"job_class": "class"}):
    """One job: a gang of `workers` processes that starts whole or not at all."""

    name: Name
    tenant: Name = "default"
    job_class: JobClass = "guaranteed"
    workers: Annotated[int, Meta(ge=1, le=4096)] = 1
    gpus_per_worker: Annotated[int, Meta(ge=0, le=64)] = 1
    argv: Annotated[tuple[Argument, ...], Meta(min_length=1, max_length=ARGUMENTS_MAX)]
    cwd: Annotated[str, Meta(pattern=f"^/{TEXT}*$", max_length=4096)] = "/"
    env: Annotated[dict[Variable, Argument], Meta(max_length=VARIABLES_MAX)] = {}
    skew: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Bytes of the largest tensor over bytes of all tensors (NSDI'19 §3.2); over `packlimit` the gang is packed. 0: as
    seen when a job of this name ran before."""
    time_limit_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Seconds of running, all attempts together; None: no limit."""
    grace_s: Annotated[float, Meta(ge=0, le=3600)] = GRACE_S
    """Between SIGTERM and SIGKILL: to write a checkpoint."""
    pack: Pack = "few"
    gpu_memory: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    """Device memory that each rank asks for on each of its GPUs, bytes; 0: not said. Where GPUs are shared, a host that
    has less does not take it."""
    remote_memory: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    """Most memory of other hosts that its volumes have, all its hosts together, bytes; 0: not limited."""
    bind_gpus: bool = False
    """Each rank sees its own GPUs only; otherwise all that the job has on its host (`agent/jobs/rank_env.py`)."""
    attach: bool = True
    """Steps of a script are seen without a change to it (`covey/hooks`)."""
    on_lost: OnLost = "heal"
    hang_s: Annotated[float, Meta(ge=1, le=1e9)] | None = None
    """For how long the others may wait for the part of one rank in a sum; then its stacks are kept, and its process is
    ended: a successor takes its place, or the job fails. None: for ever."""
    spares: Annotated[int, Meta(ge=0, le=SPARES_MAX)] = 0
    """Processes that wait on each of its hosts, and on one more, to become one of its ranks: of a job that heals."""
    retries: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Starts that it gets again after a failure of its own."""
    retries_lost: Annotated[int, Meta(ge=0, le=1_000_000)] = 5
    """The same after a host lost its ranks (chosen: a job that takes its hosts along should not take all)."""
    retries_again: Annotated[int, Meta(ge=0, le=1_000_000)] = 1000
    """The same after exit 75 (chosen: a job that saves and asks again every hour for weeks)."""
    retries_preempted: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    """The same after it had to yield; None: always, since that is not its fault."""

    @property
    def gpus(self) -> int:
        """GPUs of the whole gang: the W of 2DAS."""
        return self.workers * self.gpus_per_worker

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
        for name in fields:
            if name not in EXPECTED:
                raise _unknown(name)
        if fields.get("argv") is None:
            raise SpecError(
                "argv", "nothing to run", "argv is missing", 'give a command, such as argv = ["./train.py"]'
            )
        checked = {name: _checked(name, value) for name, value in sorted(fields.items()) if value is not None}
        if checked.get("spares") and checked.get("on_lost", "heal") != "heal":
            why = f"they replace single ranks, and with on_lost = {checked['on_lost']!r} none is replaced alone"
            raise SpecError("spares", "this job can have no spares", why, 'leave spares out, or set on_lost = "heal"')
        checked.setdefault("name", name_of(checked["argv"]))
        return msgspec.convert(checked, cls)


EXPECTED: dict[str, str] = {
    "name": "1 to 63 of a-z, 0-9, '.' and '-', beginning with a letter or digit",
    "tenant": "1 to 63 of a-z, 0-9, '.' and '-', beginning with a letter or digit",
    "class": "one of guaranteed, auto, opportunistic",
    "workers": "a whole number from 1 to 4096",
    "gpus_per_worker": "a whole number from 0 to 64",
    "argv": f"a list of 1 to {ARGUMENTS_MAX} strings, the program first",
    "cwd": "an absolute path of at most 4096 characters",
    "env": f"an object of at most {VARIABLES_MAX} strings, without '=' in a name",
    "skew": "a number from 0 to 1: bytes of the largest tensor over bytes of all",
    "time_limit_s": "a number of seconds over 0, at most 1000000000, or nothing for no limit",
    "grace_s": "a number of seconds from 0 to 3600",
    "pack": "one of few, host, any, apart",
    "on_lost": "one of heal, restart, keep",
    "hang_s": "a number of seconds from 1 to 1000000000, or nothing for no limit",
    "spares": "a whole number from 0 to 64",
    "retries": "a whole number from 0 to 1000000",
    "retries_lost": "a whole number from 0 to 1000000",
    "retries_again": "a whole number from 0 to 1000000",
    "retries_preempted": "a whole number from 0 to 1000000, or nothing for no limit",
    "gpu_memory": "a whole number of bytes from 0 to 9007199254740992 (8 PiB), where 0 says nothing",
    "remote_memory": "a whole number of bytes from 0 to 9007199254740992 (8 PiB), where 0 is no limit",
    "bind_gpus": "true or false",
    "attach": "true or false",
}
_TYPES: dict[str, Any] = {field.encode_name: field.type for field in msgspec.structs.fields(JobSpec)}


def _checked(name: str, value: Any) -> Any:
    if name in ("time_limit_s", "grace_s", "hang_s", "skew") and isinstance(value, float) and value != value:
        raise _wrong(name, value, EXPECTED[name])
    if name in ("argv", "env"):
        _fits_a_process(name, value)
    try:
        return msgspec.to_builtins(msgspec.convert(value, _TYPES[name]))
    except (msgspec.ValidationError, RecursionError) as error:
        raise _wrong(name, value, EXPECTED[name]) from error


def _wrong(name: str, value: Any, expected: str) -> SpecError:
    try:
        shown = repr(value)
    except RecursionError:
        shown = "nested so deeply"
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return SpecError(name, f"{name} cannot be {shown}", f"expected {expected}", f"correct {name} and submit again")


def _fits_a_process(name: str, value: Any) -> None:
    """SpecError names the argument or the variable that Linux does not take, or that is too large, and its size."""
    if name == "argv" and isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        for place, each in enumerate(value):
            if not _TEXT.fullmatch(each):
                raise SpecError("argv", f"argument {place} cannot be {_short(each)}", NO_TEXT, TEXT_NEXT)
        if excess := argv_excess(value):
            raise SpecError("argv", *excess, "put what is long into a file, and give the job the file's name")
    if name == "env" and isinstance(value, Mapping):
        for variable, content in value.items():
            if not (isinstance(variable, str) and isinstance(content, str)):
                why = f"a variable is a text, and this is a {type(content).__name__}"
                raise SpecError("env", f"variable {_short(variable)} cannot be carried", why, "write it in quotes")
            if not variable or "=" in variable or not _TEXT.fullmatch(variable):
                why = "a name is text of at least one character, without '=' and NUL"
                raise SpecError("env", f"no variable can have the name {_short(variable)}", why, "give it another name")
            if not _TEXT.fullmatch(content):
                raise SpecError("env", f"variable {for_people(variable)} cannot be carried", NO_TEXT, TEXT_NEXT)
        if excess := env_excess(value):
            next = "leave variables out (env -u NAME agentctl submit ..., or --no-env), or read long ones from a file"
            raise SpecError("env", *excess, next)


_TEXT = re.compile(f"{TEXT}*")
NO_TEXT = "it has a NUL, or half of a pair of UTF-16, and no process can be given these"
TEXT_NEXT = "write a byte that is no UTF-8 as NUL and its two hexadecimal digits (covey/core/carried.py; agentctl does)"


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _unknown(name: Any) -> SpecError:
    near = difflib.get_close_matches(str(name), EXPECTED, n=1, cutoff=0.5)
    next = f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(EXPECTED))}"
    return SpecError(str(name)[:80], f"{str(name)[:80]!r} is no field of a job", "it is not known here", next)


def name_of(argv: tuple[str, ...] | list[str]) -> str:
    """A name for a job whose submitter gave none: the script's, or the program's."""
    script = next((part for part in argv[:4] if part.endswith((".py", ".sh"))), argv[0])
    stem = script.rsplit("/", 1)[-1].rsplit(".", 1)[0].lower()
    return re.sub(r"[^a-z0-9.-]+", "-", stem).strip("-.")[:63] or "job"

"""Start a job: agentctl submit [flags] -- COMMAND ...

The command runs once for each worker, in this directory and with this environment (so an activated venv or conda just
works), plus RANK, WORLD_SIZE, MASTER_ADDR and the like. The gang starts whole or not at all.
"""

import argparse
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cli.client import USAGE, Agent, AgentctlError, Gone
from cli.context import Context

NOT_CARRIED = frozenset(
    """_ OLDPWD SHLVL PWD TERM COLORTERM COLUMNS LINES LS_COLORS PS1 PS2 PROMPT_COMMAND TERM_PROGRAM TMUX STY WINDOWID
    DISPLAY WAYLAND_DISPLAY XAUTHORITY INVOCATION_ID JOURNAL_STREAM NOTIFY_SOCKET WATCHDOG_USEC WATCHDOG_PID LISTEN_FDS
    LISTEN_PID MAIL MAILCHECK HISTFILE LESSOPEN LESSCLOSE MAKEFLAGS MFLAGS MAKELEVEL MAKE_TERMOUT MAKE_TERMERR
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE
    NNODES MASTER_ADDR MASTER_PORT
    CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES""".split()  # noqa: SIM905
)
"""Variables of the terminal, the session, the make or the rank that submits: they mean nothing or the wrong thing in
the job."""
NOT_CARRIED_PREFIXES = tuple(
    "COVEY_ PET_ TORCHELASTIC_ SSH_ XDG_SESSION XDG_SEAT XDG_VTNR DBUS_ SUDO_".split()  # noqa: SIM905
)
LITTLE = ("PATH", "HOME", "USER", "LANG")
"""What is carried with --no-env."""
CLASSES = ("guaranteed", "auto", "opportunistic")
CLASS_HELP = (
    "guaranteed (default): within the tenant's quota; opportunistic: on GPUs that are left, and yields; "
    "auto: guaranteed, and opportunistic once it waited long"
)
BIND_HELP = (
    "each worker sees its own GPUs only, as device 0 and up (for programs that take every GPU they see); default: it "
    "sees all of the job's on its host, and LOCAL_RANK is its own"
)
NODES_HELP = "one process on each of N different hosts, for launchers: --nodes 2 --gpus 8 -- torchrun train.py"
PACK_HELP = (
    "host: all workers on one host, and wait for one with room; any: wherever GPUs are free, filling gaps; "
    "default: the fewest hosts that have room now, and gaps once a model has shown that spreading does not slow it"
)
ON_LOST_HELP = (
    "when a host is lost, heal (default): another one takes its ranks over and the rest of the job goes on, if the "
    "script attached its state, else as restart: the whole job begins again; stop: it fails; keep: ranks on a host "
    "that is cut off go on, and the job waits until it is back or is given up"
)
GPU_MEMORY_HELP = (
    "what each rank needs on each of its GPUs, such as 8GiB: where GPUs are shared, one that has less now is not taken "
    "beside others"
)
REMOTE_MEMORY_HELP = (
    "the most memory of other hosts that its volumes have, all its hosts together, such as 8GiB (default: no limit but "
    "its tenant's budget)"
)
NO_ATTACH_HELP = (
    "leave PYTHONPATH as it is; default: a folder of ours comes first in it, and the steps of PyTorch and JAX "
    "scripts are seen without a change to them"
)
AGGREGATE_HELP = (
    "gradients of PyTorch's DistributedDataParallel are averaged by Covey, without a change to the script: the same "
    "bits whatever fails (covey.torch.attach)"
)
HANG_HELP = (
    "how long the others may wait for one rank, or all stand still, such as 10m: then the stacks of all are kept "
    "(agentctl logs), and that rank is started again, or the job fails where nobody can be named (default: for ever)"
)
SPARES_HELP = (
    "processes on each of its hosts, and on one more, that have imported what the script imports and wait to become a "
    "rank that is lost (default 0; where the script attached its state)"
)
SUBMIT_TRIES = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="default: the script's")
    parser.add_argument("--workers", type=int, metavar="N", help="processes of the gang (default 1)")
    parser.add_argument("--nodes", type=int, metavar="N", help=NODES_HELP)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs for each worker or node (default 1)")
    parser.add_argument("--pack", choices=("host", "any"), help=PACK_HELP)
    parser.add_argument("--bind-gpus", action="store_true", help=BIND_HELP)
    parser.add_argument("--gpu-memory", metavar="SIZE", help=GPU_MEMORY_HELP)
    parser.add_argument("--remote-memory", metavar="SIZE", help=REMOTE_MEMORY_HELP)
    parser.add_argument("--no-attach", action="store_true", help=NO_ATTACH_HELP)
    parser.add_argument("--aggregate", action="store_true", help=AGGREGATE_HELP)
    parser.add_argument("--tenant", help="who pays (default: default)")
    parser.add_argument("--class", dest="job_class", choices=CLASSES, help=CLASS_HELP)
    parser.add_argument("--env", action="append", default=[], metavar="KEY=VAL", help="one more variable; repeatable")
    parser.add_argument("--no-env", action="store_true", help="do not carry this environment, only PATH and HOME")
    parser.add_argument("--cwd", metavar="DIR", help="default: this directory")
    parser.add_argument("--time", metavar="TIME", help="longest time to run, such as 2h")
    parser.add_argument("--retries", type=int, metavar="N", help="starts again after a failure (default 0)")
    parser.add_argument("--on-lost", choices=("heal", "restart", "stop", "keep"), help=ON_LOST_HELP)
    parser.add_argument("--spares", type=int, metavar="N", help=SPARES_HELP)
    parser.add_argument("--hang", metavar="TIME", help=HANG_HELP)
    parser.add_argument("--grace", metavar="TIME", help="between SIGTERM and SIGKILL (default 60s)")
    parser.add_argument("--wait", action="store_true", help="until it has ended; return its exit code")
    parser.add_argument("--follow", action="store_true", help="show what it writes; return its exit code")
    parser.add_argument("word", nargs="*", help=argparse.SUPPRESS)


def run(context: Context) -> int:
    args = context.args
    if args.word:
        what, example = f"{args.word[0]!r} is out of place", f"agentctl submit -- {' '.join(args.word)}"
        raise AgentctlError(USAGE, what, "the command begins after a lone --", example)
    command = getattr(args, "command", [])
    if not command:
        example = "agentctl submit --workers 4 -- python train.py"
        raise AgentctlError(USAGE, "there is no command to run", "a job needs one, after a lone --", example)
    if len(command) == 1 and len(command[0].split()) > 1 and not os.path.exists(command[0]):
        what = f"there is no program {command[0][:80]!r}"
        why = "the whole command is one word in quotes, and no shell takes it apart"
        example = f"agentctl submit -- {command[0]}    (or: -- sh -c {command[0]!r})"
        raise AgentctlError(USAGE, what, why, example)
    spec = spec_of(args, command, os.environ, here(os.environ, args.cwd))
    refuse_what_is_too_large(spec)
    spec["env"].setdefault("COVEY_UMASK", f"{umask():03o}")
    job = send(context.agent, spec)
    if args.follow:
        from cli.jobs.logs import follow

        context.say(f"{job['id']} {job['state']}: {job['reason']}")
        follow(context, job["id"], range(job["workers"]), job["workers"] > 1, until_ended=True)
    if args.follow or args.wait:
        from cli.jobs.wait import wait

        return wait(context, job["id"])
    if context.json:
        return context.say_json({"schema": 1, "data": job})
    context.say(f"{job['id']} {context.paint.state(job['state'])}{': ' if job['reason'] else ''}{job['reason']}")
    print(f"next: agentctl logs {job['id']} -f", file=sys.stderr)
    return 0


def spec_of(args: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str], here: str) -> dict[str, Any]:
    """The body of POST /v1/jobs. What was not given is left to the agent."""
    if args.nodes is not None and (args.workers is not None or args.pack is not None):
        what = f"--nodes and {'--workers' if args.workers is not None else '--pack'} do not go together"
        raise AgentctlError(USAGE, what, "--nodes N is N workers, each on a host of its own", "leave one of them out")
    kept = LITTLE if args.no_env else [name for name in environ if means_something(name)]
    env = {name: environ[name] for name in kept if name in environ} | dict(pair(text) for text in args.env)
    spec: dict[str, Any] = {
        "argv": [text_of(word) for word in command],
        "cwd": text_of(os.path.abspath(os.path.join(here, args.cwd or ""))),
        "env": {text_of(name): text_of(value) for name, value in env.items()},
        "workers": next((count for count in (args.workers, args.nodes) if count is not None), 1),
        "gpus_per_worker": args.gpus,
    }
    if args.bind_gpus:
        spec["bind_gpus"] = True
    if args.gpu_memory is not None:
        spec["gpu_memory"] = memory("--gpu-memory", args.gpu_memory)
    if args.remote_memory is not None:
        spec["remote_memory"] = memory("--remote-memory", args.remote_memory)
        if not spec["remote_memory"]:
            what, why = f"--remote-memory {args.remote_memory} cannot be used", "a job without any attaches no volume"
            raise AgentctlError(USAGE, what, why, "--remote-memory 8GiB, or leave it out")
    if args.no_attach and args.aggregate:
        what, why = (
            "--aggregate and --no-attach do not go together",
            "it is by attaching that Covey sees the script's DDP",
        )
        raise AgentctlError(USAGE, what, why, "leave --no-attach out, or call covey.torch.attach(ddp) in the script")
    if args.no_attach:
        spec["attach"] = False
    if args.aggregate:
        spec["env"]["COVEY_AGGREGATE"] = "1"
    if args.nodes is not None or args.pack is not None:
        spec["pack"] = "apart" if args.nodes is not None else args.pack
    given = (
        ("name", args.name),
        ("tenant", args.tenant),
        ("class", args.job_class),
        ("retries", args.retries),
        ("spares", args.spares),
        ("on_lost", "restart" if args.on_lost == "stop" else args.on_lost),
        ("retries_lost", 0 if args.on_lost == "stop" else None),
    )
    for field, value in given:
        if value is not None:
            spec[field] = value
    times = ("time_limit_s", "--time", args.time), ("grace_s", "--grace", args.grace), ("hang_s", "--hang", args.hang)
    for field, flag, text in times:
        if text is not None:
            spec[field] = duration(flag, text)
    return spec


def umask() -> int:
    """What the files that a job makes are to lack, as if it ran here."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def send(agent: Agent, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The JobView of the new job. The same key goes with every try, so a repeated submission is one job."""
    body = {**spec, "key": secrets.token_hex(16)}
    for _ in range(SUBMIT_TRIES - 1):
        try:
            return dict(agent.post("jobs", body=body).data)
        except Gone:
            if len(agent.addresses) < 2:
                raise
            agent.address = None
    return dict(agent.post("jobs", body=body).data)


def means_something(name: str) -> bool:
    """Whether a variable of the caller is one of a job too."""
    return name not in NOT_CARRIED and not name.startswith(NOT_CARRIED_PREFIXES)


def text_of(word: str) -> str:
    """What the kernel gave us, whatever the locale, as text that arrives byte for byte."""
    from covey.core.carried import carried

    return carried(os.fsencode(word))


def here(environ: Mapping[str, str], given: str | None) -> str:
    """This directory under the name it was entered by: a home that is a symbolic link is the same on other hosts, what
    it points to may not be. AgentctlError when it was deleted."""
    named = environ.get("PWD", "")
    try:
        if os.path.isabs(named) and os.path.samefile(named, "."):
            return named
        return os.getcwd()
    except OSError as error:
        if given is not None and os.path.isabs(given):
            return "/"
        why = f"it is where the job would run, and it was deleted, or may not be read: {error.strerror}"
        raise AgentctlError(USAGE, "this directory is gone", why, "cd to another one, or --cwd /a/directory") from None


def refuse_what_is_too_large(spec: Mapping[str, Any]) -> None:
    """AgentctlError names it, and its size. The agent would say the same, but it takes no request of any length."""
    from covey.core.carried import argv_excess, env_excess

    if excess := argv_excess(spec["argv"]):
        raise AgentctlError(USAGE, *excess, "put what is long into a file, and give the job the file's name")
    if excess := env_excess(spec["env"]):
        next_step = "env -u NAME agentctl submit ... (or --no-env), or read long values from a file in the job"
        raise AgentctlError(USAGE, *excess, next_step)


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise AgentctlError(USAGE, f"--env {text!r} cannot be used", "expected KEY=VAL", "--env EPOCHS=3")
    return name, value


def duration(flag: str, text: str) -> float:
    from covey.core.units import parse_seconds

    number = text.strip()
    if number.replace(".", "", 1).isdigit() and float(number):
        why = "a bare number is minutes in Slurm and seconds elsewhere"
        raise AgentctlError(USAGE, f"{flag} {text} has no unit", why, f"{flag} {number}min, or {flag} {number}s")
    if found := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", number):
        parts = [int(part or 0) for part in found.groups()]
        days, hours, minutes, seconds = parts if found[1] or found[4] else [0, 0, *parts[1:3]]
        whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        why = "a time is a number and a unit (Slurm writes days-hours:minutes:seconds)"
        raise AgentctlError(USAGE, f"{flag} {text} cannot be used", why, f"{flag} {whole}s")
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise AgentctlError(USAGE, f"{flag} {text} cannot be used", str(error), "agentctl submit --help") from None


def memory(flag: str, text: str) -> int:
    """Bytes."""
    from covey.core.units import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise AgentctlError(USAGE, f"{flag} {text} cannot be used", str(error), f"{flag} 8GiB") from error

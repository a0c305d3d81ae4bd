"""Start a job: agentctl submit [options] -- COMMAND ..., or agentctl submit [options] FILE [-- ARGUMENTS ...]

The command runs once for each worker, in this directory and with this environment (so an activated venv or conda
environment works), plus RANK, WORLD_SIZE, MASTER_ADDR and the like. Either all workers start or none.

FILE is a script with #COVEY lines, which hold options of this command, or #SBATCH lines, or it is a TOML file
(job.toml) with these options under their names and `command`. Options that are typed come before those of the file.
"""

import argparse
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from cli.client import USAGE, Agent, AgentctlError, Gone
from cli.context import Context
from cli.job_files import reading
from cli.job_files.reading import JobFile
from cli.job_files.sbatch_options import Said
from cli.times import begin_s, duration
from plugins.scheduler.messages import options
from plugins.scheduler.messages.options import Option

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
    "COVEY_ PET_ TORCHELASTIC_ SSH_ XDG_SESSION XDG_SEAT XDG_VTNR DBUS_ SUDO_ SLURM_".split()  # noqa: SIM905
)
LITTLE = ("PATH", "HOME", "USER", "LANG")
"""What is carried with --no-env."""
NODES_HELP = "one process on each of N different hosts, for launchers: --nodes 2 --gpus 8 -- torchrun train.py"
AGGREGATE_HELP = (
    "gradients of PyTorch's DistributedDataParallel are averaged by Covey, without a change to the script: the same "
    "bits whatever fails (covey.torch.attach)"
)
NOTIFY_HELP = (
    "when the job has ended, run this command in a shell, or post JSON to this http(s) URL: a job of its own without "
    "GPUs, which finds how it ended in COVEY_AFTER (j7:done, or j7:failed:3)"
)
POSTS = """
import json, os, sys, urllib.request
job, _, how = os.environ["COVEY_AFTER"].partition(":")
state, _, code = how.partition(":")
body = json.dumps({"job": job, "name": sys.argv[2], "state": state, "exit_code": int(code or 0)}).encode()
asked = urllib.request.Request(sys.argv[1], body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(asked, timeout=60).status)
"""
"""The program that tells a URL of the end of a job."""
SUBMIT_TRIES = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    for option in options.OPTIONS:
        if option.flag:
            add_option(parser, option)
        if option.field == "workers":
            parser.add_argument("--nodes", type=int, metavar="N", help=NODES_HELP)
        if option.field == "hooks":
            parser.add_argument("--aggregate", action="store_true", help=AGGREGATE_HELP)
    parser.add_argument(
        "--env", action="append", default=[], metavar="KEY=VAL",
        help="set an environment variable, or name one of this environment to carry; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--env-file", action="append", default=[], metavar="FILE",
        help="set the variables of this file, a KEY=VAL in each line; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--no-env",
        action="store_true",
        help="do not copy this environment into the job, only PATH, HOME, USER and LANG",
    )
    parser.add_argument("--cwd", metavar="DIR", help="working directory of the job (default: this directory)")
    parser.add_argument("--notify", metavar="CMD|URL", help=NOTIFY_HELP)
    parser.add_argument("--dry-run", action="store_true", help="say when it would start, and do not submit it")
    parser.add_argument("--wait", action="store_true", help="wait until the job has ended, and return its exit code")
    parser.add_argument(
        "--follow", action="store_true", help="show the job's output until it has ended, and return its exit code"
    )
    parser.add_argument("word", nargs="*", metavar="FILE", help="a script or a TOML file that says what the job is")


def add_option(parser: argparse.ArgumentParser, option: Option) -> None:
    """The flag of a job's option; what it says stands under the option's field, None when it was not given."""
    flag, field, help = option.flag, option.field, option.help
    if field in ("workers", "begin_wall_s"):
        parser.add_argument(flag, dest=field, metavar=option.metavar, help=help)
        return
    match option.kind:
        case "switch":
            says = not flag.startswith("--no-")
            parser.add_argument(flag, dest=field, action="store_const", const=says, help=help)
        case "choice":
            parser.add_argument(flag, dest=field, choices=option.flag_choices or option.choices, help=help)
        case "count":
            parser.add_argument(flag, dest=field, type=int, metavar=option.metavar, help=help)
        case "number":
            parser.add_argument(flag, dest=field, type=float, metavar=option.metavar, help=help)
        case "text" | "seconds" | "bytes":
            parser.add_argument(flag, dest=field, metavar=option.metavar or None, help=help)
        case _:
            assert_never(option.kind)


def run(context: Context) -> int:
    args, command = context.args, getattr(context.args, "command", [])
    if args.word:
        return submit(context, *from_file(args, command))
    if not command:
        example = "agentctl submit --workers 4 -- python train.py"
        raise AgentctlError(USAGE, "no command to run", "the job's command must come after a lone --", example)
    if len(command) == 1 and len(command[0].split()) > 1 and not os.path.exists(command[0]):
        what = f"no program {command[0][:80]!r}"
        why = "the whole command is one quoted argument, and no shell splits it"
        example = f"agentctl submit -- {command[0]}    (or: -- sh -c {command[0]!r})"
        raise AgentctlError(USAGE, what, why, example)
    return submit(context, args, command)


def would_start(context: Context, args: argparse.Namespace, command: Sequence[str]) -> int:
    """Say when the job would start that these options and this command say; the exit code."""
    from cli.jobs.starting import words

    spec, notes = checked(args, command)
    answer = context.agent.post("starts", body=spec)
    print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"not submitted; {words(answer.data)}")
    return 0


def checked(args: argparse.Namespace, command: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The job that these options and this command say, and what is to be said of it on stderr. AgentctlError names what
    cannot be."""
    place = here(os.environ, args.cwd)
    spec = spec_of(args, command, os.environ, place)
    cwd = os.path.abspath(os.path.join(place, args.cwd or ""))
    notes = [] if spec.get("image") else with_python(spec, command, cwd, os.environ)
    refuse_what_is_too_large(spec)
    spec["env"].setdefault("COVEY_UMASK", f"{umask():03o}")
    return spec, notes


def with_python(spec: dict[str, Any], command: Sequence[str], cwd: str, environ: Mapping[str, str]) -> list[str]:
    """Which Python runs the command, and what it lacks, as lines for people. An environment of the caller that is not
    on PATH comes first on the job's PATH. AgentctlError: that environment is not whole."""
    from cli.pythons import chosen, covey_job

    path = spec["env"].get("PATH")
    typed = None if path is None or path == text_of(environ.get("PATH", "")) else path
    found = chosen.chosen(command, cwd, environ, typed)
    if found is None:
        return []
    notes = [f"note: {found.words}"]
    if found.path:
        spec["env"]["PATH"] = text_of(found.path)
    reason = covey_job.why_needed(spec, command, cwd) if found.python else ""
    folder = os.path.dirname(covey_job.script_of(command, cwd)) or cwd
    if reason and (lacks := covey_job.lacking(found.python, reason, folder, {**environ, "PATH": found.path})):
        notes.append("note: {}\n  why:  {}\n  next: {}".format(*lacks))
    return notes


def submitted(context: Context, args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The new job that these options and this command say."""
    spec, notes = checked(args, command)
    notice = notice_of(args.notify, spec) if args.notify is not None else None
    job = send(context.agent, spec)
    print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
    if notice is not None:
        told = send(context.agent, {**notice, "after": [f"any:{job['id']}"]})
        print(f"note: {told['id']} tells of its end: agentctl job {told['id']}", file=sys.stderr)
    return job


def submit(context: Context, args: argparse.Namespace, command: Sequence[str]) -> int:
    """Submit the job that these options and this command say, and say so; the exit code."""
    if args.dry_run:
        return would_start(context, args, command)
    job = submitted(context, args, command)
    if over_rack := (job.get("elastic") or {}).get("over_rack"):
        print(f"note: {over_rack}", file=sys.stderr)
    if args.follow:
        from cli.jobs.logs import Wanted, follow, ranks_in

        context.say(f"{job['id']} {job['state']}: {job['reason']}")
        count = ranks_in(job)
        follow(context, job["id"], range(count), count > 1, Wanted(follows=True))
    if args.follow or args.wait:
        from cli.jobs.wait import wait

        return wait(context, job["id"])
    if context.json:
        return context.say_json({"schema": 1, "data": job})
    context.say(f"{job['id']} {context.paint.state(job['state'])}{': ' if job['reason'] else ''}{job['reason']}")
    print(f"next: agentctl logs {job['id']} -f", file=sys.stderr)
    return 0


def from_file(args: argparse.Namespace, more: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options and the command of the job that the file says whose name is the first word."""
    words = args.word

    if len(words) > 1 or not (os.path.exists(words[0]) or words[0].endswith((".sh", ".toml", ".sbatch", ".slurm"))):
        what, example = f"unexpected argument {words[0]!r}", f"agentctl submit -- {' '.join(words)}"
        if len(words) > 1 and os.path.isfile(words[0]):
            what = f"unexpected argument {words[1]!r}"
            example = f"agentctl submit {words[0]} -- {' '.join(words[1:])}    (arguments of the file)"
        raise AgentctlError(USAGE, what, "the job's command must come after a lone --", example)
    return with_file(reading.read(words[0]), args, more)


def with_file(
    file: JobFile, typed: argparse.Namespace, more: Sequence[str] = (), slurm: Said | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """The options and the command of the job that `file` says. What was `typed` comes before what the file says;
    `slurm`: options of sbatch that were typed; `more`: arguments of the file's command."""
    from cli.main import Parser, refuse_unknown

    parser = Parser("agentctl submit", allow_abbrev=False, add_help=False)
    arguments(parser)
    found, groups = parser.parse_args([]), reading.options_of(file, slurm or {})
    for place, words in groups:
        try:
            found, unknown = parser.parse_known_args(words, found)
            refuse_unknown(parser, [*unknown, *found.word])
            fields_of(parser.parse_args(words))
        except AgentctlError as error:
            raise AgentctlError(error.code, f"{place}: {error.what}", error.why, error.next) from None
    for action in parser._actions:
        of_file, of_people = getattr(found, action.dest), getattr(typed, action.dest, action.default)
        if isinstance(of_file, list) and action.dest != "word":
            setattr(found, action.dest, [*of_file, *of_people])
        elif of_people != action.default:
            setattr(found, action.dest, of_people)
    if getattr(typed, "nodes", None) is not None:
        found.workers, found.pack = None, None
    elif getattr(typed, "workers", None) is not None or getattr(typed, "pack", None) is not None:
        found.nodes = None
    found.name = reading.name_of(file) if found.name is None else found.name
    return found, [*file.command, *more]


def spec_of(args: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str], here: str) -> dict[str, Any]:
    """The body of POST /v1/jobs. What was not given is left to the agent."""
    refuse_what_contradicts_itself(args)
    kept = LITTLE if args.no_env else [name for name in environ if means_something(name)]
    env = {name: environ[name] for name in kept if name in environ}
    for path in args.env_file:
        env |= variables_of(path)
    env |= dict(pair(text, environ) for text in args.env)
    cwd = os.path.abspath(os.path.join(here, args.cwd or ""))
    spec: dict[str, Any] = {
        "argv": [text_of(word) for word in command],
        "cwd": text_of(cwd),
        "env": {text_of(name): text_of(value) for name, value in env.items()},
    }
    spec |= fields_of(args)
    for field in ("stdout", "stderr"):
        if spec.get(field):
            spec[field] = text_of(os.path.abspath(os.path.join(cwd, spec[field])))
    if spec.get("image"):
        spec["image"] = text_of(image_of(spec["image"], here))
    if args.aggregate:
        spec["env"]["COVEY_AGGREGATE"] = "1"
    if args.nodes is not None:
        spec["workers"], spec["pack"] = args.nodes, "apart"
    if args.on_lost == "stop":
        spec["on_lost"], spec["retries_lost"] = "restart", 0
    return spec


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the job that these options say. AgentctlError names a wrong value."""
    spec: dict[str, Any] = {}
    for option in options.OPTIONS:
        said = getattr(args, option.field, None) if option.flag else None
        if said is not None and option.field == "workers":
            spec |= workers_of(said)
        elif said is not None and option.field == "begin_wall_s":
            spec[option.field] = begin_s(said, time.time())
        elif said is not None and option.field == "after":
            spec[option.field] = after_of(said)
        elif said is not None:
            spec[option.field] = value_of(option, said)
    if spec.get("remote_memory") == 0:
        what, why = f"invalid --remote-memory {args.remote_memory}", "a job without remote memory needs no limit for it"
        raise AgentctlError(USAGE, what, why, "--remote-memory 8GiB, or leave it out")
    if spec.get("host_memory") == 0:
        what, why = f"invalid --mem {args.host_memory}", "no process can do without memory"
        raise AgentctlError(USAGE, what, why, "--mem 64GiB, or leave it out")
    if spec.get("cpus") == 0:
        what, why = "invalid --cpus 0", "no process can do without a processor"
        raise AgentctlError(USAGE, what, why, "--cpus 4, or leave it out")
    return spec


def refuse_what_contradicts_itself(args: argparse.Namespace) -> None:
    """AgentctlError names two flags that do not go together."""
    if args.nodes is not None and (args.workers is not None or args.pack is not None):
        what = f"--nodes and {'--workers' if args.workers is not None else '--pack'} cannot be used together"
        raise AgentctlError(USAGE, what, "--nodes N means N workers, each on a different host", "leave one of them out")
    if args.dry_run and (args.follow or args.wait):
        flag = "--follow" if args.follow else "--wait"
        what, why = f"--dry-run and {flag} cannot be used together", "with --dry-run no job is submitted"
        raise AgentctlError(USAGE, what, why, "leave one of them out")
    if args.follow and getattr(args, "array", None):
        what, why = "--follow and --array cannot be used together", "each task of an array has output of its own"
        raise AgentctlError(USAGE, what, why, "agentctl submit --wait ..., or agentctl logs JOB[INDEX]")
    if args.hooks is False and args.aggregate:
        what, why = (
            "--aggregate and --no-hooks cannot be used together",
            "Covey finds the script's DDP by its hooks, which --no-hooks leaves out",
        )
        raise AgentctlError(USAGE, what, why, "leave --no-hooks out, or call covey.torch.attach(ddp) in the script")


def image_of(image: str, here: str) -> str:
    """The image as hosts find it: the absolute path of a file or folder that apptainer runs, or a name."""
    is_path = image.startswith(("/", "./", "../")) or image.endswith((".sif", "/"))
    return os.path.abspath(os.path.join(here, image)) if is_path else image


def after_of(text: str) -> list[str]:
    """The jobs that must end first, from `ok:j3,any:5`. AgentctlError names the part that is none."""
    found: list[str] = []
    for part in text.split(","):
        kind, colon, job = part.strip().partition(":")
        if not colon and re.fullmatch(r"j?\d+", kind):
            job = kind
        if kind not in ("ok", "any") or not re.fullmatch(r"j?[1-9]\d{0,17}", job):
            near = {"afterok": "ok", "afterany": "any", "done": "ok", "success": "ok"}.get(kind, "ok")
            why = "expected ok:JOB (it must be done) or any:JOB (however it ends), with commas between them"
            raise AgentctlError(USAGE, f"invalid --after {part[:80]!r}", why, f"--after {near}:{job or 'j1'}")
        found.append(f"{kind}:j{job.removeprefix('j')}")
    return found


def workers_of(text: str) -> dict[str, int]:
    """The fields of `--workers 4` or `--workers 4..16`."""
    found = re.fullmatch(r"(-?\d{1,9})(?:\.\.(\d{1,9}))?", text.strip())
    if found is None:
        why = "expected a whole number, or the fewest and the most of an elastic job as N..M"
        raise AgentctlError(USAGE, f"invalid --workers {text!r:.80}", why, "--workers 4, or --workers 4..16")
    fewest = int(found[1])
    return {"workers": fewest} if found[2] in (None, found[1]) else {"workers": fewest, "workers_max": int(found[2])}


def value_of(option: Option, said: Any) -> Any:
    """What the agent is told for this value of a flag: seconds, bytes, or the value itself."""
    match option.kind:
        case "seconds":
            return duration(option.flag, said)
        case "bytes":
            return memory(option.flag, said)
        case "text" | "choice" | "count" | "number" | "switch":
            return said
        case _:
            assert_never(option.kind)


def umask() -> int:
    """What the files that a job makes are to lack, as if it ran here."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def notice_of(said: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The job that tells of the end of the one that `spec` describes. AgentctlError: neither a command nor a URL."""
    if not said.strip():
        raise AgentctlError(USAGE, "invalid --notify ''", "expected a command or a URL", "--notify 'echo $COVEY_AFTER'")
    name = str(spec.get("name") or "job")
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", said):
        if not re.fullmatch(r"https?://[^\s/?#]+\S*", said):
            raise AgentctlError(
                USAGE, f"invalid --notify {said[:80]}", "expected http://HOST or https://HOST", "https://"
            )
        argv = ["python3", "-c", POSTS, text_of(said), name]
    else:
        argv = ["/bin/sh", "-c", text_of(said)]
    kept = {field: spec[field] for field in ("cwd", "env", "tenant") if field in spec}
    env = {name: value for name, value in kept["env"].items() if name != "COVEY_SLURM"}
    return {**kept, "env": env, "argv": argv, "name": f"tell-{name}"[:63], "gpus_per_worker": 0, "hooks": False}


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
        why = f"the job would run in it, and it was deleted or cannot be read: {error.strerror}"
        raise AgentctlError(
            USAGE, "the current directory is gone", why, "cd to another one, or --cwd /a/directory"
        ) from None


def refuse_what_is_too_large(spec: Mapping[str, Any]) -> None:
    """AgentctlError names it, and its size. The agent would say the same, but it takes no request of any length."""
    from covey.core.carried import argv_excess, env_excess

    if excess := argv_excess(spec["argv"]):
        raise AgentctlError(USAGE, *excess, "put long content into a file, and give the job the file's name")
    if excess := env_excess(spec["env"]):
        next_step = "env -u NAME agentctl submit ... (or --no-env), or read long values from a file in the job"
        raise AgentctlError(USAGE, *excess, next_step)


def pair(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """A variable's name and value, from KEY=VAL or from the name of one that is set here."""
    name, equals, value = text.partition("=")
    if not equals and name in environ:
        return name, environ[name]
    if not equals or not name:
        why = "expected KEY=VAL, or the name of a variable that is set here"
        raise AgentctlError(USAGE, f"invalid --env {text!r}", why, "--env EPOCHS=3")
    return name, value


def variables_of(path: str) -> dict[str, str]:
    """The variables of a file: KEY=VAL in each line, with or without `export` before it and quotes around the value.
    Empty lines and those that begin with # say nothing. AgentctlError names a line that is none of these."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError as error:
        what, why = f"cannot read --env-file {path}", error.strerror or str(error)
        raise AgentctlError(USAGE, what, why, "--env-file job.env, with KEY=VAL in each line") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.removeprefix("export ").partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name or " " in name:
            what = f"{path} line {number}: invalid {text[:80]!r}"
            raise AgentctlError(USAGE, what, "expected KEY=VAL", f"correct line {number} of {path}")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        found[name] = value[1:-1] if quoted else value
    return found


def memory(flag: str, text: str) -> int:
    """Bytes."""
    from covey.core.units import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise AgentctlError(USAGE, f"invalid {flag} {text}", str(error), f"{flag} 8GiB") from error

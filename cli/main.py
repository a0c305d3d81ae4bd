"""`agentctl`: look at a rack and act on it. Every command prints tables for people, or with `--json` JSON for programs.

Exit codes: 0 done, 1 error, 2 wrong usage, 3 not found, 4 refused, 5 no agent answers, 6 deadline passed, 7 can never
be placed, 8 hosts did not answer and the list lacks them, 75 no leader now, try again. `wait` and `submit --wait`
return the job's own code (128+N for signal N).
"""

import argparse
import contextlib
import errno
import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from cli import hints
from cli.client import USAGE, AgentctlError, find
from cli.context import Context
from cli.table import BOLD, DIM, RED, Paint

LOOK, ACT = "look", "act"
NOUNS = {
    "hosts": (LOOK, "list hosts, their state, and what each can spare; drain one"),
    "gpus": (LOOK, "list all GPUs and who holds each (--shared: how jobs share them)"),
    "groups": (LOOK, "show which jobs share hosts in turns, and how busy they keep them"),
    "interference": (LOOK, "show how much jobs that share a GPU slow the guaranteed one"),
    "top": (LOOK, "show jobs, hosts, GPUs and slabs as they change, and go from one to the other"),
    "jobs": (LOOK, "list jobs, and why each is in its state (-a: ended ones too)"),
    "job": (LOOK, "show one job: hosts, ranks, steps"),
    "history": (LOOK, "list jobs that have ended, also those of long ago"),
    "report": (LOOK, "show what became of GPU-hours: used, idle, lost; by user, tenant, GPU, or of one job"),
    "logs": (LOOK, "show what a job's ranks wrote (-f: follow)"),
    "why": (LOOK, "show all events of one job, slab, volume or host"),
    "slabs": (LOOK, "list the slabs of all volumes, and the host that lends memory for each"),
    "memory": (LOOK, "show latencies of remote memory, and what tenants and jobs use"),
    "tensors": (LOOK, "show which hosts sum the gradients of which jobs"),
    "gossip": (LOOK, "show what hosts tell one another, who suspects whom, and what was dropped"),
    "ping": (LOOK, "show how this host reaches another: round trip, and over what pages and tensors go"),
    "page": (LOOK, "print the address of the agent's page (--open: open it)"),
    "leader": (LOOK, "show which host leads, and since when"),
    "status": (LOOK, "show the answering agent and its plugins"),
    "doctor": (LOOK, "find what is wrong with the rack or missing on this host, with the next step"),
    "bundle": (LOOK, "write one file for whoever looks into a trouble: status, jobs, settings, journal, no secrets"),
    "version": (LOOK, "print the versions of agentctl and of all agents"),
    "completion": (LOOK, "print the script that completes agentctl's words in bash, zsh or fish"),
    "submit": (ACT, "start a job: agentctl submit --workers 4 -- python train.py"),
    "run": (ACT, "run a job as if it ran here: agentctl run --gpus 2 -- python train.py"),
    "stacks": (ACT, "show where the Python threads of a job's ranks are, while they run"),
    "exec": (ACT, "run a command beside a job's rank: agentctl exec j1 -- nvidia-smi"),
    "shell": (ACT, "open a shell beside a job's rank, or in a job of its own: agentctl shell --gpus 1"),
    "cancel": (ACT, "end jobs: agentctl cancel j1 j5-j9 j12[3-7], or by --user, --state, --name, --tenant"),
    "hold": (ACT, "keep a job that waits from starting"),
    "release": (ACT, "let a held job start"),
    "requeue": (ACT, "stop a job and queue it again (--hold: and hold it)"),
    "checkpoint": (ACT, "let a job that runs save a checkpoint and go on"),
    "preempt": (ACT, "try what a job does when it is preempted: agentctl preempt --test j1"),
    "priority": (ACT, "let a waiting job come before the others of its tenant (--up), or behind them (--down)"),
    "update": (ACT, "change a job's time limit: agentctl update j1 --time 4h"),
    "move": (ACT, "move a job's ranks to another host: agentctl move j1 gpu2"),
    "scale": (ACT, "give an elastic job more or fewer processes: agentctl scale j1 8"),
    "tune": (ACT, "divide an elastic job's ranks and sums among its hosts by measuring: agentctl tune j1"),
    "wait": (ACT, "wait for a job and return its exit code"),
    "volume": (ACT, "create, list, show and remove volumes of remote memory; swap, NBD"),
    "rack": (ACT, "begin a rack on this host (init), join one (join), let a host join (token)"),
    "login": (ACT, "get a certificate, with which other hosts know you: agentctl --agent https://gpu1:8470 jobs"),
    "keys": (
        ACT,
        "show the keys of gossip by their hashes; give all hosts a new one (rotate, or install, use, remove)",
    ),
    "voters": (ACT, "show or change which hosts vote on the log"),
    "quota": (ACT, "show or set how many GPUs a tenant may hold"),
    "tenant": (ACT, "list tenants, and say which users may submit for which: agentctl tenant add ml --users ann"),
}
"""Noun -> (group, one line). The module `cli.FOLDER.NOUN` is imported when it is asked for."""
FOLDERS = {
    "hosts": ("bundle", "doctor", "gossip", "gpus", "hosts", "keys", "leader", "status", "version", "voters", "why"),
    "jobs": (
        *("cancel", "groups", "interference", "job", "jobs", "logs", "move"),
        *("quota", "scale", "submit", "tensors", "tune", "wait"),
    ),
    "completion": ("completion",),
    "joining": ("login",),
    "reaching": ("page", "ping"),
    "top": ("top",),
    "memory": ("memory", "slabs"),
    "beside": ("exec", "run", "shell", "stacks"),
    "books": ("history", "report"),
    "checkpoints": ("checkpoint", "preempt"),
    "queue": ("hold", "priority", "release", "requeue", "update"),
}
VERBS = {
    "rack": {
        "init": "begin a rack on this host: key, agent.toml, agent; print the line for further hosts",
        "join": "let this host join a rack: agentctl rack join gpu1:7946 --token T",
        "token": "make a token for one further host, and print the line to type there",
    },
    "volume": {
        "ls": "list the volumes of all hosts, and their traffic",
        "show": "show one volume: kind, owner, traffic, latencies, swap, troubles",
        "create": "create a volume: agentctl volume create vol1 64MiB",
        "rm": "remove a volume and everything in it",
        "swap": "use a volume as swap of its host: agentctl volume swap swap1 64GiB",
        "unswap": "end that: bring its pages back into memory, then remove the volume",
        "export": "serve a volume as an NBD device on a unix socket",
        "unexport": "stop serving it there",
        "give-up": "stop waiting for lenders that do not answer; their newest pages are lost",
    },
    "tenant": {
        "list": "list the tenants, their users and their quotas",
        "add": "add a tenant: agentctl tenant add ml --users ann,bob --quota 16",
        "set": "change its users or its quota: agentctl tenant set ml --add carol",
        "remove": "remove all its users; its jobs continue",
    },
}
"""Noun that has commands of its own -> command -> one line. The first is meant when none is named."""
SLURM = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
"""Names of Slurm's commands: a link to agentctl of such a name is that command (`cli.slurm`)."""
PACKAGES = {"rack": "joining"}
"""Noun that has commands of its own -> their package in `cli`, where it has another name."""
NAMED = ("rack",)
"""Nouns whose command has to be named: each of them changes something."""
MODULES = {noun: f"cli.{folder}.{noun}" for folder, nouns in FOLDERS.items() for noun in nouns} | {
    f"{noun} {verb}": f"cli.{PACKAGES.get(noun, noun)}.{verb.replace('-', '_')}"
    for noun, verbs in VERBS.items()
    for verb in verbs
}
"""Command as it is typed after `agentctl` -> its module."""


class Parser(argparse.ArgumentParser):
    """argparse, with errors of our three lines, and examples where its help ends."""

    def error(self, message: str) -> NoReturn:
        raise AgentctlError(USAGE, message, " ".join(self.format_usage().split()), f"{self.prog} --help")

    def format_help(self) -> str:
        self.epilog = epilog_of(self.prog.removeprefix("agentctl").strip())
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is None or value in action.choices:
            return
        known, flag = [str(each) for each in action.choices], next(reversed(action.option_strings), "")
        near = hints.nearest(str(value), known)
        what = f"invalid {flag or action.metavar or action.dest} {str(value)[:80]!r}"
        step = f"did you mean {flag} {near}?" if flag else f"{self.prog} {near}"
        step = step if near else f"{self.prog} --help"
        raise AgentctlError(USAGE, what, f"expected one of {', '.join(known)}", step)


def epilog_of(command: str) -> str:
    """The examples of a command, or of agentctl where it is empty."""
    from cli.examples import epilog  # only where it is needed: agentctl's imports are a budget

    return epilog(command)


def shared_flags() -> argparse.ArgumentParser:
    """Flags that stand before or after the noun."""
    flags = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    flags.add_argument("--json", action="store_true", help="print JSON, errors too")
    flags.add_argument(
        "--agent",
        metavar="ADDRESS",
        help="agent to ask: unix:PATH, https://HOST:PORT (agentctl login), http://HOST:PORT (default: search)",
    )
    flags.add_argument("--timeout", metavar="TIME", help="how long to wait, such as 30s")
    flags.add_argument("--color", choices=("auto", "always", "never"), help="use colours (default: auto)")
    flags.add_argument("--debug", action="store_true", help="print a traceback when agentctl fails")
    return flags


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """All arguments; `noun` is the command with its verb, empty when help is asked for. AgentctlError: wrong usage."""
    top = Parser("agentctl", parents=[shared_flags()], add_help=False, allow_abbrev=False)
    top.add_argument("-h", "--help", action="store_true")
    top.add_argument("--version", action="store_true")
    before, noun, after = split(argv)
    args, unknown = top.parse_known_args(before)
    refuse_unknown(top, unknown)
    if args.version:
        noun = noun or "version"
    defaults = {"json": False, "agent": None, "timeout": None, "color": "auto", "debug": False}
    merged = argparse.Namespace(**defaults | vars(args), noun=noun)
    if noun is None or (args.help and not noun):
        merged.noun = ""
        return merged
    if noun == "help":
        merged.noun = ""
        return merged if not after else parse([*after[:2], "--help"])
    if noun not in NOUNS:
        raise unknown_command(noun)
    if "--" in after:
        place = list(after).index("--")
        after, merged.command = after[:place], list(after[place + 1 :])
    if args.help:
        after = [*after[: int(noun in VERBS)], "--help"]
    command, after = (noun, list(after)) if noun not in VERBS else verb_of(noun, after, merged)
    module = importlib.import_module(MODULES[command])
    parser = parser_of(command, module.__doc__)
    module.arguments(parser)
    try:
        rest, unknown = parser.parse_known_args(after, merged)
    except AgentctlError:  # what is missing or wrong may be so because of a slip in an option
        known = parser._option_string_actions
        refuse_unknown(parser, [word for word in after if word[:2] == "--" and word.partition("=")[0] not in known])
        raise
    refuse_unknown(parser, unknown)
    rest.noun, rest.run = command, module.run
    return rest


def parser_of(command: str, text: str | None) -> Parser:
    """A parser of the shared flags, for a command or for a noun that has commands of its own."""
    return Parser(f"agentctl {command}", parents=[shared_flags()], description=text, allow_abbrev=False,
                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip


def verb_of(noun: str, words: Sequence[str], found: argparse.Namespace) -> tuple[str, list[str]]:
    """`volume create`, and what follows it; shared flags before the verb go to `found`. AgentctlError when there is no
    such verb."""
    before, verb, after = split(words)
    lines = "\n".join(f"  {name:<9} {text}" for name, text in VERBS[noun].items())
    text = importlib.import_module(f"cli.{PACKAGES.get(noun, noun)}").__doc__
    parser = parser_of(noun, f"{text}\n\ncommands:\n{lines}\n\n`agentctl {noun} COMMAND --help` says more.")
    parser.usage = f"agentctl {noun} COMMAND ..."
    _, unknown = parser.parse_known_args(before, found)
    refuse_unknown(parser, unknown)
    if verb is None and noun in NAMED:
        raise AgentctlError(
            USAGE, f"{noun}: no command is named", f"expected {', '.join(VERBS[noun])}", f"agentctl {noun} --help"
        )
    verb = verb or next(iter(VERBS[noun]))
    if verb not in VERBS[noun]:
        near = hints.for_verb(noun, verb, VERBS[noun])
        why = f"agentctl {noun} has {', '.join(VERBS[noun])}"
        step = f"agentctl {near}" if near else f"agentctl {noun} --help"
        raise AgentctlError(USAGE, f"unknown command '{noun} {verb}'", why, step)
    return f"{noun} {verb}", after


def split(argv: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """Flags before the noun, the noun, and what follows it."""
    takes_value = False
    for i, word in enumerate(argv):
        if takes_value:
            takes_value = False
        elif word in ("--agent", "--timeout", "--color"):
            takes_value = True
        elif not word.startswith("-"):
            return list(argv[:i]), word, list(argv[i + 1 :])
    return list(argv), None, []


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    if not unknown:
        return
    word = unknown[0].partition("=")[0]
    command = parser.prog.removeprefix("agentctl").strip()
    known = [flag for action in parser._actions for flag in action.option_strings]
    next_step = hints.for_flag(command, word, known) or f"{parser.prog} --help"
    if not word.startswith("-"):
        why = f"{parser.prog} takes no more arguments"
        raise AgentctlError(USAGE, f"unexpected argument {word!r}", why, next_step)
    if command == "submit":
        next_step += "    (flags of the job's own command come after a lone --)"
    raise AgentctlError(USAGE, f"unknown option {word}", f"{parser.prog} has no such option", next_step)


def unknown_command(noun: str) -> AgentctlError:
    near = hints.for_noun(noun, NOUNS)
    next_step = f"agentctl {near}" if near else "agentctl --help lists the commands"
    return AgentctlError(USAGE, f"unknown command {noun!r}", "agentctl has no command of that name", next_step)


def help_text(paint: Paint) -> str:
    lines = ["agentctl: look at a rack of GPU hosts and act on it, through any of its agents", ""]
    for group in (LOOK, ACT):
        lines.append(paint(group, BOLD))
        lines += [f"  {noun:<12}  {text}" for noun, (kind, text) in NOUNS.items() if kind == group]
        lines.append("")
    lines.append(paint("options of every command", BOLD))
    lines += [
        "  --json        print JSON, for programs",
        "  --agent       the agent to ask: unix:PATH, https://HOST:PORT or http://HOST:PORT; also $COVEY_AGENT",
        "  --timeout     how long to wait, such as 30s",
        "",
    ]
    lines += [paint("agentctl COMMAND --help explains a command.", DIM), "", epilog_of("")]
    return "\n".join(lines)


def say_error(error: AgentctlError, as_json: bool, program: str = "agentctl") -> None:
    """On stderr: three lines for people, one object for programs."""
    fields: dict[str, Any] = {"code": error.code, "what": error.what, "why": error.why, "next": error.next}
    if as_json:
        print(json.dumps({"schema": 1, "error": fields}), file=sys.stderr)
        return
    paint = Paint(out=sys.stderr)
    print(f"{paint(program + ':', RED)} {error.what}\n  why:  {error.why}\n  next: {error.next}", file=sys.stderr)


def run(argv: Sequence[str]) -> int:
    """The exit code. AgentctlError and whatever a defect raises pass through."""
    args = parse(argv)
    if not args.noun:
        print(help_text(Paint(args.color)))
        return 0
    agent = find(args.agent, os.environ)
    if args.timeout is not None:
        args.timeout = seconds(args.timeout)
        agent.wait_s = args.timeout
        agent.timeout_s = min(agent.timeout_s, args.timeout)
    return int(args.run(Context(args, agent, Paint(args.color))))


def by_name(name: str, given: Sequence[str]) -> int:
    """Run one of Slurm's commands, by whose name agentctl was called."""
    return int(importlib.import_module("cli.slurm.names").run(name, given))


def seconds(text: str) -> float:
    from covey.core.units import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise AgentctlError(USAGE, f"invalid --timeout {text}", str(error), "agentctl --help") from None


def speak_in_any_locale() -> None:
    """Letters that this terminal has not are shown by number, as Python writes them (`gr\\xf6\\xdfe` under LC_ALL=C); a
    stream that whoever called us has closed is /dev/null."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def forget_output() -> None:
    """Nobody can have what is still to be written, and the interpreter must not complain of it when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    name = os.path.basename(sys.argv[0]) if argv is None and sys.argv else ""
    given = sys.argv[1:] if argv is None else list(argv)
    own = given[: given.index("--")] if "--" in given else given
    as_json, debug = "--json" in own, "--debug" in own
    speak_in_any_locale()
    try:
        try:
            return by_name(name, given) if name in SLURM else run(given)
        finally:
            sys.stdout.flush()  # here, and not when the interpreter ends
    except AgentctlError as error:
        if debug:
            raise
        say_error(error, as_json, name if name in SLURM else "agentctl")
        return error.code
    except BrokenPipeError:
        forget_output()  # the reader (`| head`) has seen enough
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            raise
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO, errno.EBADF):
            why = f"it cannot read its input or write its output: {error.strerror}"
            forget_output()
        say_error(
            AgentctlError(1, "agentctl failed", why, "run the same command with --debug for a traceback"), as_json
        )
        return 1

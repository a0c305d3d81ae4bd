"""`agentctl`: look at a rack and act on it. Every noun has a table for people and `--json` for programs.

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
    "hosts": (LOOK, "who is in the rack, and what each can spare"),
    "gpus": (LOOK, "every GPU of the rack, and who holds it (--watch: who shares it)"),
    "interference": (LOOK, "what jobs on one GPU cost the guaranteed one"),
    "jobs": (LOOK, "jobs and why each is where it is (-a: ended ones too)"),
    "job": (LOOK, "one job: places, ranks, steps"),
    "logs": (LOOK, "what its ranks wrote (-f: follow)"),
    "why": (LOOK, "all events of one job, slab, volume or host"),
    "slabs": (LOOK, "whose memory lies where"),
    "volumes": (LOOK, "remote memory volumes and their traffic"),
    "tensors": (LOOK, "whose gradients are summed where"),
    "leader": (LOOK, "who leads, and since when"),
    "status": (LOOK, "the answering agent and its plugins"),
    "doctor": (LOOK, "what is wrong, what this host lacks, and the next step for each"),
    "submit": (ACT, "start a job: agentctl submit --workers 4 -- python train.py"),
    "cancel": (ACT, "end a job"),
    "move": (ACT, "have ranks go on on another host: agentctl move j1 gpu2"),
    "wait": (ACT, "wait for a job and return its exit code"),
    "attach": (ACT, "make a remote memory volume: agentctl attach NAME 64MiB"),
    "memory": (ACT, "remote memory as swap, or as a block device: agentctl memory attach --size 64G --swap"),
    "detach": (ACT, "forget a volume and everything in it"),
    "voters": (ACT, "see or change which hosts vote on the log"),
    "quota": (ACT, "see or set how many GPUs a tenant may hold"),
    "version": (LOOK, "of agentctl"),
}
"""Noun -> (group, one line). The module `cli.FOLDER.NOUN` is imported when it is asked for."""
FOLDERS = {
    "hosts": ("doctor", "gpus", "hosts", "leader", "status", "version", "voters", "why"),
    "jobs": ("cancel", "interference", "job", "jobs", "logs", "move", "quota", "submit", "tensors", "wait"),
    "memory": ("attach", "detach", "memory", "slabs", "volumes"),
}
MODULES = {noun: f"cli.{folder}.{noun}" for folder, nouns in FOLDERS.items() for noun in nouns}


class Parser(argparse.ArgumentParser):
    """argparse, with errors of our three lines."""

    def error(self, message: str) -> NoReturn:
        raise AgentctlError(USAGE, message, " ".join(self.format_usage().split()), f"{self.prog} --help")


def shared_flags() -> argparse.ArgumentParser:
    """Flags that stand before or after the noun."""
    flags = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    flags.add_argument("--json", action="store_true", help="JSON, errors too")
    flags.add_argument(
        "--agent", metavar="ADDRESS", help="unix:PATH, or http://HOST:PORT for reading (default: found by itself)"
    )
    flags.add_argument("--timeout", metavar="TIME", help="how long to wait, such as 30s")
    flags.add_argument("--color", choices=("auto", "always", "never"), help="default: auto")
    flags.add_argument("--debug", action="store_true", help="tracebacks")
    return flags


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """All arguments; `noun` is empty when only help is wanted. AgentctlError on wrong usage."""
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
        return merged if not after else parse([after[0], "--help"])
    if noun not in NOUNS:
        raise unknown_noun(noun)
    if "--" in after:
        place = list(after).index("--")
        after, merged.command = after[:place], list(after[place + 1 :])
    module = importlib.import_module(MODULES[noun])
    parser = Parser(f"agentctl {noun}", parents=[shared_flags()], description=module.__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    module.arguments(parser)
    rest, unknown = parser.parse_known_args(["--help"] if args.help else after, merged)
    refuse_unknown(parser, unknown)
    rest.run = module.run
    return rest


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
    if word.startswith("-"):
        known = [flag for action in parser._actions for flag in action.option_strings]
        next_step = hints.for_flag(parser.prog.rpartition(" ")[2], word, known) or f"{parser.prog} --help"
        if parser.prog.endswith(" submit"):
            next_step += "    (flags of the job's own command come after a lone --)"
        raise AgentctlError(USAGE, f"{parser.prog} has no flag {word}", "it is not known here", next_step)
    raise AgentctlError(
        USAGE, f"{word!r} is one word too many", f"{parser.prog} does not take it", f"{parser.prog} --help"
    )


def unknown_noun(noun: str) -> AgentctlError:
    near = hints.for_noun(noun, NOUNS)
    next_step = f"agentctl {near}" if near else "agentctl --help    (it lists all commands)"
    return AgentctlError(USAGE, f"agentctl has no command {noun!r}", "it is none of the things it can do", next_step)


def help_text(paint: Paint) -> str:
    lines = ["agentctl: look at a rack of GPU hosts and act on it, through any of its agents", ""]
    for group in (LOOK, ACT):
        lines.append(paint(group, BOLD))
        lines += [f"  {noun:<9} {text}" for noun, (kind, text) in NOUNS.items() if kind == group]
        lines.append("")
    lines.append(paint("everywhere", BOLD))
    lines += [
        "  --json    for programs",
        "  --agent   unix:PATH, or http://HOST:PORT for reading; also $COVEY_AGENT",
        "",
    ]
    lines.append(paint("agentctl NOUN --help says more.", DIM))
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


def seconds(text: str) -> float:
    from covey.core.units import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise AgentctlError(USAGE, f"--timeout {text} cannot be used", str(error), "agentctl --help") from None


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
    given = sys.argv[1:] if argv is None else list(argv)
    own = given[: given.index("--")] if "--" in given else given
    as_json, debug = "--json" in own, "--debug" in own
    speak_in_any_locale()
    try:
        try:
            return run(given)
        finally:
            sys.stdout.flush()  # here, and not when the interpreter ends
    except AgentctlError as error:
        if debug:
            raise
        say_error(error, as_json)
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
            why = f"what was to be written, or read, could not be: {error.strerror}"
            forget_output()
        say_error(AgentctlError(1, "agentctl failed", why, "the same again with --debug shows where"), as_json)
        return 1

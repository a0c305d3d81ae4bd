"""What commands about several jobs have in common: ids and ranges of them, one request for each, one line for each."""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

from cli.client import USAGE, AgentctlError, Answer
from cli.context import Context, not_found

JOBS_MAX = 10_000
"""The most jobs that one command names: as many as the log has at once."""
_ONE = re.compile(r"j?(\d{1,18})(?:\[([^\]]+)\])?")
_MANY = re.compile(r"j?(\d{1,18})-j?(\d{1,18})")
_TASK = re.compile(r"j?(\d{1,18})_(\d{1,9})")


def jobs_argument(parser: argparse.ArgumentParser, several: str = "+") -> None:
    parser.add_argument("job", metavar="JOB", nargs=several, help="such as j1, j5-j9, or a task of an array: j12[3]")


def ids_of(words: Sequence[str]) -> list[str]:
    """The jobs that these words name, each once, in their order: `j1`, `j5-j9`, `j12[3]`. AgentctlError names a wrong
    range."""
    found: dict[str, None] = {}
    for word in [part for each in words for part in _parts(each)]:
        if (many := _MANY.fullmatch(word)) is not None:
            first, last = int(many[1]), int(many[2])
            if not 0 < first <= last or last - first >= JOBS_MAX:
                why = f"expected at most {JOBS_MAX:,} jobs, the lowest first"
                raise AgentctlError(USAGE, f"invalid range of jobs {word[:80]!r}", why, "j5-j9")
            found |= dict.fromkeys(f"j{number}" for number in range(first, last + 1))
        elif (task := _TASK.fullmatch(word)) is not None:
            found[f"j{task[1]}[{task[2]}]"] = None
        elif (one := _ONE.fullmatch(word)) is not None:
            found[f"j{one[1]}" + (f"[{one[2]}]" if one[2] else "")] = None
        else:
            found[word] = None  # the agent says that there is no such job, and agentctl which one is nearly called so
    return list(found)


def _parts(word: str) -> list[str]:
    """The parts of a word between commas that are not within brackets."""
    return [part for part in re.split(r",(?![^\[]*\])", word) if part]


def each(context: Context, ask: Callable[[str], Answer], say: Callable[[dict[str, Any]], str], verb: str) -> int:
    """Ask for each of the jobs, say what became of each, and return the code of the first that was refused. With one
    job its refusal is the command's."""
    ids = ids_of(context.args.job)
    if len(ids) == 1:
        try:
            answer = ask(ids[0])
        except AgentctlError as error:
            not_found(context, error, ids[0])
        if context.json:
            return context.say_json(answer.whole)
        context.say(say(answer.data))
        return 0
    done: list[Any] = []
    refused: list[tuple[str, AgentctlError]] = []
    for id in ids:
        try:
            done.append(ask(id).data)
        except AgentctlError as error:
            refused.append((id, error))
            continue
        if not context.json:
            context.say(say(done[-1]))
    return summed_up(context, done, refused, verb)


def summed_up(context: Context, done: list[Any], refused: list[tuple[str, AgentctlError]], verb: str) -> int:
    """The exit code of a command about several jobs; what was refused is said in one error."""
    if context.json:
        context.say_json({"schema": 1, "data": done})
    if not refused:
        return 0
    id, error = refused[0]
    more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    raise AgentctlError(error.code, f"{id}{more}: not {verb}: {error.what}", error.why, error.next)

"""What may stand in the place of a word of a command line: commands, options, what options take one of, and names.

The parsers say it: the same that read the command line when it is run.
"""

import argparse
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cli.main import MODULES, NOUNS, VERBS, parser_of

FILES = "files"
"""The kind of names that the shell completes by itself."""
JOBS, ENDED, HOSTS, TENANTS, VOLUMES, SUBJECTS = "jobs", "ended", "hosts", "tenants", "volumes", "subjects"
"""Kinds of names: of jobs that wait or run, of jobs also when they have ended, and so on; of all that has a history."""
BY_DEST = {
    "job": JOBS, "host": HOSTS, "hosts": HOSTS, "to": HOSTS, "what": HOSTS, "tenant": TENANTS, "volume": VOLUMES,
    "id": SUBJECTS,
}  # fmt: skip
"""Argument, by the field that it sets -> what it names."""
BY_COMMAND = {
    "job job": ENDED, "logs job": ENDED, "report job": ENDED, "shell word": JOBS, "tenant add tenant": "",
    "volume create volume": "", "volume show volume": VOLUMES, "gpus gpu": "", "submit word": FILES, "run word": FILES,
}  # fmt: skip
"""Command and argument -> what it names, where that is another thing; empty: nothing that there is already."""
PATHS = ("FILE", "PATH", "DIR")
"""What options are said to take that take names of files."""


class Candidate(NamedTuple):
    word: str
    about: str = ""
    """What it is, in some words."""


Found = Sequence[Candidate]
NamesOf = Callable[[str, str | None], Iterable[Candidate]]
"""The names of a kind that there are, from the agent that the command line names, or from any."""


class Line:
    """What is known of a command line from its words before the last."""

    def __init__(self, before: Sequence[str]) -> None:
        self.command, self.agent = "", None if "--agent" not in before else _after(before, "--agent")
        self.parser: argparse.ArgumentParser = parser_of("", None)
        self.places = 0
        """The number of arguments without a name so far."""
        self.pending: argparse.Action | None = None
        """The option whose value comes next."""
        self.values = 0
        """The number of values of that option so far."""
        self.is_over = False
        """After a lone `--`, or a command that there is not: the words are not agentctl's."""
        for word in before:
            self._read(word)

    def _read(self, word: str) -> None:
        if self.is_over or word == "--":
            self.is_over = True
        elif word == "=" and self.pending is not None:
            return  # bash takes `--rank=1` for three words
        elif word.startswith("-") and len(word) > 1:
            action = self.parser._option_string_actions.get(word)
            self.pending, self.values = (action, 0) if action is not None and action.nargs != 0 else (None, 0)
        elif self.pending is not None:
            self.values += 1
            if self.values >= (self.pending.nargs if isinstance(self.pending.nargs, int) else 1):
                self.pending = None
        elif self.command in MODULES:
            self.places += 1
        else:
            self._enter(f"{self.command} {word}".strip())

    def _enter(self, command: str) -> None:
        self.command = command
        if command in MODULES:
            self.parser = parser_of(command, None)
            importlib.import_module(MODULES[command]).arguments(self.parser)
        elif command not in VERBS:
            self.is_over = True

    def place(self) -> argparse.Action | None:
        """The argument without a name that comes next; None: there is no more."""
        actions = [action for action in self.parser._actions if not action.option_strings]
        last = actions[-1] if actions and actions[-1].nargs in ("*", "+") else None
        return actions[self.places] if self.places < len(actions) else last


def _after(words: Sequence[str], flag: str) -> str | None:
    return next(iter(words[words.index(flag) + 1 :]), None)


def candidates(words: Sequence[str], names_of: NamesOf) -> Found | None:
    """What may stand in the place of the last of the words after `agentctl`; None: a name of a file."""
    line, word = Line(words[:-1]), words[-1]
    if word == "=" and line.pending is not None:
        word = ""
    if line.is_over:
        return None if line.command in MODULES else []
    prefix = ""
    if line.pending is None and word.startswith("--") and "=" in word:
        flag, _, word = word.partition("=")
        line.pending, prefix = line.parser._option_string_actions.get(flag), f"{flag}="
        if line.pending is None:
            return []
    found = _possible(line, word, names_of)
    if found is None:
        return None
    return [Candidate(prefix + each.word, each.about) for each in found if each.word.startswith(word)]


def _possible(line: Line, word: str, names_of: NamesOf) -> Iterable[Candidate] | None:
    if line.pending is not None:
        kind = (JOBS, HOSTS)[line.values] if line.pending.nargs == 2 else ""
        return _values(line, line.pending, kind, names_of)
    if word.startswith("-"):
        return list(_options(line))
    if line.command in MODULES:
        action = line.place()
        return [] if action is None else _values(line, action, "", names_of)
    if line.command in VERBS:
        return [Candidate(verb, about) for verb, about in VERBS[line.command].items()]
    return [Candidate(noun, about) for noun, (_, about) in NOUNS.items()]


def _values(line: Line, action: argparse.Action, kind: str, names_of: NamesOf) -> Iterable[Candidate] | None:
    if action.choices is not None:
        return [Candidate(str(choice)) for choice in action.choices]
    kind = kind or BY_COMMAND.get(f"{line.command} {action.dest}", BY_DEST.get(action.dest, ""))
    if kind == FILES or (not kind and action.metavar in PATHS):
        return None
    return names_of(kind, line.agent) if kind else []


def _options(line: Line) -> Iterable[Candidate]:
    for action in line.parser._actions:
        flag = next((each for each in reversed(action.option_strings) if each.startswith("--")), "")
        if flag and action.help != argparse.SUPPRESS:
            yield Candidate(flag, " ".join(str(action.help or "").replace("%%", "%").split()))

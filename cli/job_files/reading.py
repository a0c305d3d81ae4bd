"""Files that say what a job is: a script with `#COVEY` and `#SBATCH` lines, or a TOML file.

A script's lines are read up to its first command, and its text goes along as it is now: an edit while the job waits
changes nothing. A TOML file has the options of `agentctl submit` under their names, and `command`.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NamedTuple

from cli.client import USAGE, AgentctlError
from cli.job_files import sbatch_options
from cli.job_files.sbatch_options import Said, wrong

SCRIPT_BYTES_MAX = 128 * 1024 - 1
"""The longest script: it is one argument of its shell, and Linux takes no longer one."""
BY_TEXT = {"sh": "-c", "bash": "-c", "dash": "-c", "zsh": "-c", "ksh": "-c", "python": "-c", "python3": "-c"}
"""Interpreters that take a script's text as an argument, and after which option."""
MARKS = ("#COVEY", "#SBATCH")


class JobFile(NamedTuple):
    """What a file says of a job."""

    options: list[tuple[str, list[str]]]
    """Options of `agentctl submit`, and where they stand."""
    slurm: Said
    command: list[str]
    name: str
    """What the job is called where nothing says so."""
    notes: list[str]


def read(path: str) -> JobFile:
    """AgentctlError: there is no such file, or it is none of a job."""
    try:
        with open(path, "rb") as file:
            data = file.read(SCRIPT_BYTES_MAX + 1)
    except OSError as error:
        raise _no_file(path, error) from None
    if len(data) > SCRIPT_BYTES_MAX:
        why = f"it is longer than {SCRIPT_BYTES_MAX:,} bytes, which is what one argument may have"
        raise AgentctlError(USAGE, f"{path} is too long for a job's file", why, f"agentctl submit -- sh {path}")
    if path.endswith(".toml"):
        return _toml(path, data)
    if not data.startswith(b"#!"):
        why = "a script begins with a line such as #!/bin/bash, and other job files end in .toml"
        raise AgentctlError(USAGE, f"{path} is no job file", why, f"agentctl submit -- {_started_by(path)}")
    return script(path, data)


def _started_by(path: str) -> str:
    return f"python {path}" if path.endswith(".py") else f"sh {path}" if path.endswith(".sh") else f"./{path}"


def _no_file(path: str, error: OSError) -> AgentctlError:
    folder = os.path.dirname(path) or "."
    try:
        near = get_close_matches(os.path.basename(path), os.listdir(folder), 1, 0.6)
    except OSError:
        near = []
    step = f"did you mean {os.path.join(os.path.dirname(path), near[0])}?" if near else "agentctl submit -- COMMAND ..."
    why = error.strerror or str(error)
    return AgentctlError(USAGE, f"cannot read the job file {path}", why, step)


def script(path: str, data: bytes) -> JobFile:
    """The job of a script; `path` names it for people."""
    name = os.path.basename(path)
    text = data.decode("utf-8", "surrogateescape")
    if "\0" in text:
        raise AgentctlError(USAGE, f"{name} is no script", "it has a NUL byte", "agentctl submit -- COMMAND ...")
    options: list[tuple[str, list[str]]] = []
    slurm: list[Said] = []
    notes: list[str] = []
    reads = True
    for number, line in enumerate(text.splitlines(), 1):
        place, word = f"{name} line {number}", line.split(maxsplit=1)[0] if line.strip() else ""
        reads = reads and (not word or word.startswith("#"))
        if word in MARKS and not reads:
            notes.append(f"{place}: {word} after the first command is a comment, as in Slurm")
        elif word == "#COVEY":
            options.append((place, _words(line, place)))
        elif word == "#SBATCH":
            said, rest = sbatch_options.read(_words(line, place), place)
            if rest:
                raise wrong(place, f"unexpected {rest[0]!r}", "options begin with -", f"correct {place}")
            slurm.append(said)
        elif reads and number > 1 and (near := _nearly_a_mark(word)):
            notes.append(f"{place}: {word} is a comment; did you mean {near}?")
    stem = name.rsplit(".", 1)[0] or name
    return JobFile(options, sbatch_options.merged(slurm), command_of(path, text), stem, notes)


def options_of(file: JobFile, typed: Said) -> list[tuple[str, list[str]]]:
    """The options of `agentctl submit` that a file says, by the place where they stand. `typed`: options of sbatch that
    were typed, and come before the file's. What is other than in Slurm is said on stderr."""
    said = sbatch_options.merged([file.slurm, typed])
    ours = sbatch_options.translated(said) if said else sbatch_options.Translated([], [])
    for note in (*file.notes, *ours.notes):
        print(f"note: {note}", file=sys.stderr)
    words = [*ours.words, "--env", "COVEY_SLURM=1"] if said else []
    return [(", ".join(dict.fromkeys(at.place for at in said.values())), words), *file.options]


def name_of(file: JobFile) -> str:
    """What a job is called of which neither its file nor anybody says it."""
    return re.sub(r"[^A-Za-z0-9_.+=:@,-]+", "-", file.name).lstrip(".+=:@,-")[:63] or "job"


def _nearly_a_mark(word: str) -> str:
    if word in MARKS or word.startswith("##") or not word.startswith("#") or len(word) < 4:
        return ""
    return next(iter(get_close_matches(word.upper(), MARKS, 1, 0.75)), "")


def _words(line: str, place: str) -> list[str]:
    """The words after the mark, up to a comment."""
    rest = re.split(r"\s#", line.split(maxsplit=1)[1] if " " in line.strip() or "\t" in line.strip() else "")[0]
    try:
        return shlex.split(rest)
    except ValueError as error:
        raise wrong(place, "its quotes do not match", str(error), f"correct {place}") from None


def command_of(path: str, text: str) -> list[str]:
    """The command that runs this script as it is now, wherever: its interpreter with its text; where that takes none,
    the file itself."""
    shebang = text.splitlines()[0][2:].split()
    program = os.path.basename(shebang[0]) if shebang else ""
    words = shebang[1:] if program == "env" else shebang
    program = os.path.basename(words[0]).rstrip("0123456789.") if words else ""
    if option := BY_TEXT.get(program):
        shown = [] if program.startswith("python") else [os.path.basename(path)]
        return [*words, option, text, *shown]
    return [os.path.abspath(path)]


def _toml(path: str, data: bytes) -> JobFile:
    import tomllib  # only where it is needed: agentctl's imports are a budget

    name = os.path.basename(path)
    try:
        found = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise wrong(name, "it is no TOML", str(error), f"correct {name}") from None
    command = found.pop("command", None)
    if command is None:
        raise wrong(name, "no command", "expected a list of the program and its arguments", 'command = ["./train.py"]')
    if not (isinstance(command, list) and command and all(isinstance(word, str) for word in command)):
        why = "expected a list of strings, the program first"
        raise wrong(name, f"invalid command: {command!r:.80}", why, 'command = ["python", "train.py"]')
    options = [(f"{name} {key}", _flags(f"{name} {key}", key, value)) for key, value in found.items()]
    return JobFile(options, {}, command, name.rsplit(".", 1)[0], [])


def _flags(place: str, key: str, value: Any) -> list[str]:
    """The option of `agentctl submit` that a key of a TOML file stands for."""
    flag = f"--{key.replace('_', '-')}"
    if key == "env" and isinstance(value, dict):
        return [part for name, text in value.items() for part in ("--env", f"{name}={_text(f'{place} {name}', text)}")]
    if value is True:
        return [flag]
    if value is False:
        return []
    parts: Iterable[Any] = value if isinstance(value, list) else [value]
    return [f"{flag}={_text(place, part)}" for part in parts]


def _text(place: str, value: Any) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise wrong(place, f"invalid value {value!r:.80}", "expected text or a number", f"correct {place}")

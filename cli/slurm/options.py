"""Options of squeue, scancel, sinfo, sacct and scontrol: what each takes, and how a wrong one is answered."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from cli.client import USAGE, AgentctlError


class Options(NamedTuple):
    """What was typed after one of Slurm's names."""

    values: Mapping[str, str]
    """Long name -> value; empty for an option without one."""
    words: Sequence[str]


def read(program: str, given: Sequence[str], values: Mapping[str, str], flags: Mapping[str, str]) -> Options:
    """The options of a program. `values` and `flags`: long name -> its letter, or nothing, of options that take a
    value and of those that take none. AgentctlError names one that is neither, and the nearest."""
    letters = {letter: name for table in (values, flags) for name, letter in table.items() if letter}
    found: dict[str, str] = {}
    words: list[str] = []
    rest = list(given)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            words.append(word)
            continue
        name, equals, value = word[2:].partition("=") if word.startswith("--") else (word[1:2], "", word[2:])
        if not word.startswith("--"):
            if name in letters and letters[name] in flags and value:
                rest.insert(0, f"-{value}")
                value = ""
            name, equals = letters.get(name, name), "=" if value else ""
        if name in flags and not equals:
            found[name] = ""
        elif name in values:
            if not equals and not rest:
                raise AgentctlError(
                    USAGE, f"{word} has no value", f"expected --{name}=VALUE", f"{program} --{name}=..."
                )
            found[name] = value if equals else rest.pop(0)
        else:
            known = [f"--{each}" for each in (*values, *flags)]
            near = get_close_matches(word.partition("=")[0], known, 1, 0.5)
            step = f"did you mean {near[0]}?" if near else f"{program} has {', '.join(sorted(known))} here"
            raise AgentctlError(USAGE, f"unknown option {word}", f"{program} has no such option here", step)
    return Options(found, words)

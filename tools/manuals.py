"""Manual pages and completions of Covey's programs, made from their parsers.

python -m tools.manuals DIR      writes them as a package has them: DIR/usr/share/...; `make deb` does this
"""

import argparse
import copy
import gzip
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import shtab
from argparse_manpage.manpage import Manpage  # type: ignore[import-untyped]  # it has no types

from agent import main as agentd
from agent.swap import main as covey_swapd
from cli.main import MODULES, NOUNS, VERBS, shared_flags
from cli.rack import rack as covey_rack
from covey.core.version import VERSION

WORDS = {
    "agentctl": "look at a rack of GPU hosts and act on it",
    "agentd": "the agent of a GPU host",
    "covey-rack": "a rack of several agents on this machine, to try it",
    "covey-swapd": "the swap helper of a host",
}
"""Program -> what its manual page says of it in one line."""
LISTS = {"job": "jobs", "id": "jobs", "host": "hosts", "hosts": "hosts", "volume": "volume"}
"""Argument of agentctl -> the command that lists what may be given, the first word of each line."""
_NAMES = """\
_covey_names() { agentctl --timeout 2s $1 2> /dev/null | awk 'NR > 1 && !/ knows it, / { print $1 }'; }
"""
_BASH, _ZSH = 'compgen -W "$(_covey_names "{list}")" -- "$1"', 'compadd -- ${{(f)"$(_covey_names "{list}")"}}'
SYSTEM = ("agentd", "covey-swapd")
"""Programs of section 8: what systemd starts."""


def agentctl() -> argparse.ArgumentParser:
    """All of agentctl as one parser; agentctl itself reads the arguments of one command at a time."""
    top = argparse.ArgumentParser("agentctl", parents=[shared_flags()], description=WORDS["agentctl"])
    nouns = top.add_subparsers(metavar="COMMAND", dest="noun")
    for noun, (_, line) in NOUNS.items():
        if noun not in VERBS:
            _add(nouns, noun, noun, line)
            continue
        module = importlib.import_module(MODULES[f"{noun} {next(iter(VERBS[noun]))}"].rpartition(".")[0])
        parser = nouns.add_parser(noun, help=line, description=module.__doc__, parents=[shared_flags()])
        verbs = parser.add_subparsers(metavar="COMMAND", dest="verb")
        for verb, text in VERBS[noun].items():
            _add(verbs, verb, f"{noun} {verb}", text)
    return top


def _add(to: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, command: str, line: str) -> None:
    module = importlib.import_module(MODULES[command])
    parser = to.add_parser(name, help=line, description=module.__doc__, parents=[shared_flags()])
    module.arguments(parser)
    for action in parser._actions:
        if action.dest in LISTS and not action.choices:
            function = _function(LISTS[action.dest])
            action.complete = {"bash": function, "zsh": function}  # type: ignore[attr-defined]  # shtab's way


def _function(listed: str) -> str:
    """The shell function that completes what this command lists."""
    return f"_covey_{listed}"


def names_now(shell: str) -> str:
    """The shell functions that complete names of jobs, hosts and volumes: those that the agent of this host knows."""
    body = {"bash": _BASH, "zsh": _ZSH}[shell]
    lines = [f"{_function(each)}() {{ {body.format(list=each)}; }}" for each in dict.fromkeys(LISTS.values())]
    return _NAMES + "\n".join(lines) + "\n"


def programs() -> dict[str, argparse.ArgumentParser]:
    """The parser of each program that people type."""
    return {
        "agentctl": agentctl(),
        "agentd": agentd.arguments(),
        "covey-rack": covey_rack.arguments(),
        "covey-swapd": covey_swapd.arguments(),
    }


def files() -> Iterator[tuple[str, bytes]]:
    """Each file that a package has of them: its path from the root, what is in it."""
    day = time.strftime("%Y-%m-%d", time.gmtime((Path(__file__).parent.parent / "CHANGELOG.md").stat().st_mtime))
    for name, parser in programs().items():
        section = 8 if name in SYSTEM else 1
        words = {"description": WORDS[name], "project_name": "covey", "version": VERSION, "manual_title": "Covey"}
        page = str(Manpage(copy.deepcopy(parser), words | {"manual_section": section, "date": day}))
        yield f"usr/share/man/man{section}/{name}.{section}.gz", gzip.compress(page.encode(), mtime=0)
        for shell, place in (
            ("bash", f"bash-completion/completions/{name}"),
            ("zsh", f"zsh/vendor-completions/_{name}"),
        ):
            preamble = names_now(shell) if name == "agentctl" else ""
            yield f"usr/share/{place}", shtab.complete(parser, shell, preamble=preamble).encode()


def write(root: Path) -> None:
    for name, content in files():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


if __name__ == "__main__":
    write(Path(sys.argv[1]))

"""Manual pages and completions of Covey's programs, made from their parsers.

python -m tools.manuals DIR      writes them as a package has them: DIR/usr/share/...; `make deb` does this
"""

import argparse
import copy
import gzip
import importlib
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import shtab
from argparse_manpage.manpage import Manpage  # type: ignore[import-untyped]  # it has no types

from agent import main as agentd
from agent.swap import main as covey_swapd
from cli.completion.scripts import SCRIPTS
from cli.examples import epilog
from cli.main import MODULES, NOUNS, VERBS, shared_flags
from cli.rack import rack as covey_rack
from covey.core.version import VERSION
from tools import annotated

WORDS = {
    "agentctl": "look at a rack of GPU hosts and act on it",
    "agentd": "the agent of a GPU host",
    "covey-rack": "a rack of several agents on this machine, to try it",
    "covey-swapd": "the swap helper of a host",
}
"""Program -> what its manual page says of it in one line."""
PLACES = {
    "bash": "bash-completion/completions/{}",
    "zsh": "zsh/vendor-completions/_{}",
    "fish": "fish/vendor_completions.d/{}.fish",
}
"""Shell -> where it looks for the completion of a program, below /usr/share."""
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
    said = f"{module.__doc__}\n\n{epilog(command)}"
    parser = to.add_parser(name, help=line, description=said, parents=[shared_flags()])
    module.arguments(parser)


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
    yield "usr/share/man/man5/agent.toml.5.gz", gzip.compress(agent_toml(day).encode(), mtime=0)
    for name, parser in programs().items():
        section = 8 if name in SYSTEM else 1
        words = {"description": WORDS[name], "project_name": "covey", "version": VERSION, "manual_title": "Covey"}
        page = str(Manpage(copy.deepcopy(parser), words | {"manual_section": section, "date": day}))
        yield f"usr/share/man/man{section}/{name}.{section}.gz", gzip.compress(page.encode(), mtime=0)
        for shell, place in PLACES.items():
            if name == "agentctl":
                yield f"usr/share/{place.format(name)}", SCRIPTS[shell].lstrip().encode()
            elif shell != "fish":
                yield f"usr/share/{place.format(name)}", shtab.complete(parser, shell).encode()


def agent_toml(day: str) -> str:
    """The manual page of agent.toml: what the annotated file says, a section of the page for each of its sections."""
    lines = [
        f'.TH AGENT.TOML "5" "{day}" "covey {VERSION}" "Covey"',
        ".SH NAME",
        "agent.toml \\- settings of an agent",
        ".SH SYNOPSIS",
        "/etc/covey/agent.toml",
        ".SH DESCRIPTION",
        "An empty file is a rack of one host, and every setting then has the value that stands here.",
        r"\fBagentd \-\-config FILE \-\-check\fR checks a file,",
        r"\fBagentd \-\-config FILE \-\-show\-config\fR prints every setting and where it came from.",
        "Several hosts need the same gossip key, seeds and voters:",
        r"\fBagentctl rack\fR writes them.",
    ]
    for name, kind in annotated.sections().items():
        lines.append(f'.SH "{f"[{name}]" if name else "BEFORE THE FIRST SECTION"}"')
        for line, said in annotated.settings(name, kind):
            lines += [".TP", rf"\fB{_roff(line)}\fR", *_folded(said)]
    lines += [".SH SEE ALSO", r"\fBagentd\fR(8), \fBagentctl\fR(1)"]
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    """Text that roff prints as it is."""
    return text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq").replace("`", r"\(ga")


def _folded(text: str) -> list[str]:
    """Text in short lines, none of which roff takes for a request."""
    return [rf"\&{line}" if line[0] in ".'" else line for line in textwrap.wrap(_roff(text), 76)]


def write(root: Path) -> None:
    for name, content in files():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


if __name__ == "__main__":
    write(Path(sys.argv[1]))

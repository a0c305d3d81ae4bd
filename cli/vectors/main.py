"""`covey-vectors DIR`: replays files of exact cases through the policies that agents call.

The name of a file says its schema; a name that is not known is an error. Exit codes: 0 all passed, 1 some failed, 2 the
folder or a file cannot be used.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cli
from cli.client import USAGE, AgentctlError
from cli.main import Parser, say_error
from cli.table import GREEN, RED, Paint
from cli.vectors import handlers
from cli.vectors.types import UNUSABLE, Handler

DIFFERENCES_MAX = 10
"""Differences of one case that are printed before the rest becomes a number."""
SHIPPED_TRACES = Path(cli.__file__).parent.parent / "bench" / "traces"


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        return run(given)
    except AgentctlError as error:
        say_error(error, "--json" in given, "covey-vectors")
        return error.code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def run(argv: Sequence[str]) -> int:
    parser = Parser("covey-vectors", description=__doc__, allow_abbrev=False)
    parser.add_argument("dir", type=Path, help="folder of *.json files, or one such file")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="where cases find the traces that they name")
    parser.add_argument("--json", action="store_true", help="one object for programs")
    parser.add_argument("--quiet", action="store_true", help="only what differs, and the count")
    options = parser.parse_args(argv)
    known, missing = handlers.load()
    jobs = [(path, part) for path in vector_files(options.dir) for part in parts(path, known, missing)]
    traces = options.traces if options.traces is not None else (SHIPPED_TRACES if SHIPPED_TRACES.is_dir() else None)
    if options.traces is not None and not options.traces.is_dir():
        raise AgentctlError(USAGE, f"{options.traces} is no folder", "--traces names a folder of traces", "correct it")
    paint = Paint()
    passed = failed = 0
    found: list[dict[str, Any]] = []
    for path, (name, content) in jobs:
        here = 0
        cases = replay(known[name], content, traces) if name in known else unbuilt(missing[name])
        for case, differences in cases:
            here += 1
            passed, failed = (passed, failed + 1) if differences else (passed + 1, failed)
            if differences:
                found.append({"file": path.name, "name": name, "case": case, "differences": differences})
                if not options.json:
                    say(f"{path.name}: {case}", differences, paint)
        if here == 0:
            failed += 1
            found.append({"file": path.name, "name": name, "case": "", "differences": ["it holds no case"]})
            if not options.json:
                say(path.name, ["it holds no case"], paint)
        if not options.json and not options.quiet:
            wrong = sum(1 for each in found if each["name"] == name)
            print(f"{name}: {here - wrong if here else 0} of {here} passed", flush=True)
    if options.json:
        print(json.dumps({"schema": 1, "passed": passed, "failed": failed, "differing": found}))
    else:
        print(f"{paint(f'{passed} passed', GREEN)}, {paint(f'{failed} failed', RED) if failed else '0 failed'}")
    return 1 if failed else 0


def vector_files(folder: Path) -> list[Path]:
    """The files to replay, by name. AgentctlError when there is none."""
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise AgentctlError(USAGE, f"{folder} is not there", "a folder of *.json files is expected", "name one")
    files = sorted(folder.glob("*.json"))
    if not files:
        raise AgentctlError(USAGE, f"{folder} holds no vectors", "a folder of *.json files is expected", "name one")
    return files


def parts(path: Path, known: dict[str, Handler], missing: dict[str, str]) -> list[tuple[str, Any]]:
    """(handler's name, its content) for one file. AgentctlError for a name or a content that nothing replays."""
    names = sorted([*known, *missing])
    inside = [name for name in names if name.startswith(path.stem + "/")]
    if path.stem not in names and not inside:
        kinds = ", ".join(sorted({name.partition("/")[0] for name in names}))
        why = "the name of a file says its schema"
        raise AgentctlError(USAGE, f"{path.name} is no known kind of vectors", why, f"known: {kinds}")
    content = decoded(path)
    if path.stem in names:
        found = [(path.stem, content)]
    elif isinstance(content, dict):
        unknown = sorted(key for key in content if f"{path.stem}/{key}" not in names)
        if unknown:
            why = f"known: {', '.join(name.partition('/')[2] for name in inside)}"
            raise AgentctlError(USAGE, f"{path.name} holds a list {unknown[0]!r}", why, "correct the file")
        found = [(f"{path.stem}/{key}", content[key]) for key in content]
    else:
        why = f"an object with the lists {', '.join(name.partition('/')[2] for name in inside)} is expected"
        raise AgentctlError(USAGE, f"{path.name} is no object", why, "correct the file")
    for name, part in found:
        if not isinstance(part, list):
            raise AgentctlError(USAGE, f"{name} is no list", "a list of cases is expected", "correct the file")
    return found


def decoded(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise AgentctlError(USAGE, f"{where}: no JSON", error.msg, "correct the file") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise AgentctlError(USAGE, f"{path} cannot be read", str(error), "correct the file") from None


def replay(handler: Handler, content: Any, traces: Path | None) -> Iterator[tuple[str, list[str]]]:
    """Every case; a handler that breaks counts as one more failed case, and the rest of its file is lost."""
    try:
        yield from handler(content, traces)
    except UNUSABLE as error:
        yield "the rest of the file", [f"it cannot be replayed: {type(error).__name__}: {error}"]


def unbuilt(module: str) -> Iterator[tuple[str, list[str]]]:
    """What a known file without a handler comes to: it failed."""
    yield "all cases", [f"the room {module} is not built yet: nothing here replays them"]


def say(where: str, differences: list[str], paint: Paint) -> None:
    print(f"{paint('differs', RED)} {where}")
    for line in differences[:DIFFERENCES_MAX]:
        print(f"  {line}")
    if len(differences) > DIFFERENCES_MAX:
        print(f"  and {len(differences) - DIFFERENCES_MAX} more", flush=True)

"""`covey-vectors DIR`: replays files of exact cases through the policies that agents call.

The name of a file says its schema, by what it begins with; a name that is not known is an error. Exit codes: 0 all
passed, 1 some failed, 2 the folder or a file cannot be used.
"""

import gzip
import importlib
import json
import os
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cli
from cli.client import USAGE, AgentctlError
from cli.main import Parser, say_error
from cli.table import GREEN, RED, Paint
from sim.vectors.types import UNUSABLE, Handler

DIFFERENCES_MAX = 10
"""Most differences of one case that are printed; of the rest only the number is."""
ENDS = (".json", ".json.gz")
GZIP = b"\x1f\x8b"
MODULES: dict[str, tuple[str, ...]] = {
    "scheduler": ("2das_small", "2das_traces", "gittins_index", "placement", "quota"),
    "aggregator": ("autops_assign", "parameters/autops"),
    "tuner": ("parameters/cruise",),
    "interleave": ("harmony_group", "parameters/harmony"),
}
"""Module of this package -> the names of the files (`file/key` for one list of several) that it replays."""
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
    parser.add_argument("dir", type=Path, help="folder of *.json or *.json.gz files, or one such file")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="where cases find the traces that they name")
    parser.add_argument("--json", action="store_true", help="one object for programs")
    parser.add_argument("--quiet", action="store_true", help="only what differs, and the count")
    options = parser.parse_args(argv)
    known, missing = load_handlers()
    if options.traces is not None and not options.traces.is_dir():
        raise AgentctlError(USAGE, f"{options.traces} is no folder", "--traces names a folder of traces", "correct it")
    files = vector_files(options.dir)
    jobs = [(label, part) for label, path in files for part in parts(label, path, known, missing)]
    traces = [options.traces] if options.traces is not None else near(options.dir)
    paint = Paint()
    passed = 0
    found: list[dict[str, Any]] = []
    for label, (name, key, content) in jobs:
        here = wrong = 0
        where = f"{label}: {key}" if key else label
        for case, differences in replay(known[name], content, traces) if name in known else unbuilt(missing[name]):
            here += 1
            if differences:
                wrong += 1
                found.append({"file": label, "name": name, "case": case, "differences": differences})
                if not options.json:
                    say(f"{where}: {case}", differences, paint)
        if here == 0:
            found.append({"file": label, "name": name, "case": "", "differences": ["it holds no case"]})
            if not options.json:
                say(where, ["it holds no case"], paint)
        passed += here - wrong
        if not options.json and not options.quiet:
            print(f"{where}: {here - wrong} of {here} passed", flush=True)
    if options.json:
        print(json.dumps({"schema": 1, "passed": passed, "failed": len(found), "differing": found}))
    else:
        told = paint(f"{len(found)} failed", RED) if found else "0 failed"
        print(f"{paint(f'{passed} passed', GREEN)}, {told}")
    return 1 if found else 0


def vector_files(folder: Path) -> list[tuple[str, Path]]:
    """The files to replay, those of sub-folders too, by name: (name below the folder, path). Hidden ones are left
    alone. Raises AgentctlError when there is none."""
    if folder.is_file():
        return [(folder.name, folder)]
    if not folder.is_dir():
        raise AgentctlError(USAGE, f"{folder} is not there", "a folder of *.json files is expected", "name one")
    names = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.endswith(ENDS) and path.is_file()
    )
    names = [name for name in names if not any(part.startswith(".") for part in Path(name).parts)]
    if not names:
        raise AgentctlError(USAGE, f"{folder} holds no vectors", "a folder of *.json files is expected", "name one")
    return [(name, folder / name) for name in names]


def near(folder: Path) -> list[Path]:
    """Folders where traces may lie without `--traces`: beside the vectors, or those that are shipped."""
    home = (folder if folder.is_dir() else folder.parent).resolve()
    return [path for path in (home, home / "traces", home.parent / "traces", SHIPPED_TRACES) if path.is_dir()]


def schema_of(name: str, schemas: Collection[str]) -> str | None:
    """The schema that the name of a file begins with: `quota` for `quota.json`, `quota-2.json`, `quota.x.json.gz`."""
    fitting = [each for each in schemas if name.startswith(each) and not name[len(each) : len(each) + 1].isalpha()]
    return max(fitting, key=len, default=None)


def parts(
    label: str, path: Path, known: Mapping[str, Handler], missing: Mapping[str, str]
) -> list[tuple[str, str, list[Any]]]:
    """(handler's name, key in the file or nothing, cases) for one file. Raises AgentctlError for a name or a content
    that nothing replays."""
    names: dict[str, list[str]] = {}  # schema -> its lists, if it has several
    for each in sorted([*known, *missing]):
        schema, _, key = each.partition("/")
        names.setdefault(schema, []).extend([key] if key else [])
    fitting = schema_of(path.name, names)
    if fitting is None:
        why = "the name of a file says its schema"
        raise AgentctlError(USAGE, f"{label} is no known kind of vectors", why, f"known: {', '.join(names)}")
    schema, content, lists = fitting, decoded(path), names[fitting]
    if not lists:
        found = [(schema, "", content)]
    elif isinstance(content, dict):
        unknown = sorted(key for key in content if key not in lists)
        if unknown:
            why = f"known: {', '.join(lists)}"
            raise AgentctlError(USAGE, f"{label} holds a list {unknown[0]!r}", why, "correct the file")
        found = [(f"{schema}/{key}", key, content[key]) for key in content]
    else:
        why = f"an object with the lists {', '.join(lists)} is expected"
        raise AgentctlError(USAGE, f"{label} is no object", why, "correct the file")
    for _, key, part in found:
        if not isinstance(part, list):
            what = f"{label}: {key} is no list" if key else f"{label} is no list"
            raise AgentctlError(USAGE, what, "a list of cases is expected", "correct the file")
    return found or [(f"{schema}/{lists[0]}", "", [])]


def decoded(path: Path) -> Any:
    try:
        packed = path.read_bytes()
        return json.loads(gzip.decompress(packed) if packed[:2] == GZIP else packed)
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise AgentctlError(USAGE, f"{where}: no JSON", error.msg, "correct the file") from None
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise AgentctlError(USAGE, f"{path} cannot be read", str(error), "correct the file") from None


def replay(handler: Handler, content: list[Any], traces: Sequence[Path]) -> Iterator[tuple[str, list[str]]]:
    """Replay every case; a handler that breaks counts as one more failed case, and the rest of its file is lost."""
    try:
        yield from handler(content, traces)
    except UNUSABLE as error:
        yield "the rest of the file", [f"it cannot be replayed: {type(error).__name__}: {error}"]


def unbuilt(module: str) -> Iterator[tuple[str, list[str]]]:
    """The result of a known file without a handler: it failed."""
    yield "all cases", [f"the room {module} is not built yet: nothing here replays them"]


def say(where: str, differences: list[str], paint: Paint) -> None:
    print(f"{paint('differs', RED)} {where}")
    for line in differences[:DIFFERENCES_MAX]:
        print(f"  {line}")
    if len(differences) > DIFFERENCES_MAX:
        print(f"  and {len(differences) - DIFFERENCES_MAX} more", flush=True)


def load_handlers() -> tuple[dict[str, Handler], dict[str, str]]:
    """All handlers by name, and for every known name without one the module that would have it."""
    found: dict[str, Handler] = {}
    missing: dict[str, str] = {}
    for module, names in MODULES.items():
        theirs = _handlers(f"sim.vectors.{module}")
        found |= theirs
        missing |= {name: module for name in names if name not in theirs}
    return found, missing


def _handlers(path: str) -> Mapping[str, Handler]:
    """`HANDLERS` of the module, empty when the module is not there. An import that fails inside it is a defect."""
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        return {}
    handlers: Mapping[str, Handler] = module.HANDLERS
    return handlers

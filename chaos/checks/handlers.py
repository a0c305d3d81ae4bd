"""Which `except` handlers of the simulated code were entered: one that never was holds untested code.

    covey-chaos soak --handlers          plays stories as usual, and then lists the handlers never entered

`python -m chaos.watched` installs an import hook before any package of the product is loaded, and continues as
`covey-chaos`. The hook compiles the product's modules with one more statement at the head of each handler, which notes
the handler in a set: exact, and without a tracer it costs nothing elsewhere. A handler is named by file, function and
what it catches, so that its name outlives other changes of the file.

`chaos/checks/handlers.toml` lists the handlers that no story is expected to enter, each with the reason.
"""

import ast
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType

from chaos import PRODUCT

ROOT = Path(__file__).parents[2]
LISTED = "chaos/checks/handlers.toml"
SHARE = 0.9
"""Least share of the handlers not listed with a reason that a soak of 300 CPU seconds must enter."""
NOTE = "__entered__"

known: dict[str, None] = {}
"""Every handler of the modules that were loaded through the hook."""
entered: set[str] = set()


def named(tree: ast.Module, file: str) -> Iterator[tuple[str, ast.ExceptHandler]]:
    """Every handler of a module and its name, such as `agent/ports/disk.py DirectoryDisk.read: FileNotFoundError`."""
    times: Counter[str] = Counter()

    def inside(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.ExceptHandler]]:
        for child in ast.iter_child_nodes(node):
            here = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                here = (*names, child.name)
            elif isinstance(child, ast.ExceptHandler):
                catches = "everything" if child.type is None else ast.unparse(child.type)
                name = f"{file} {'.'.join(names) or 'module'}: {catches}"
                times[name] += 1
                yield (name if times[name] == 1 else f"{name} #{times[name]}"), child
            yield from inside(child, here)

    yield from inside(tree, ())


def handlers_of(path: Path, root: Path = ROOT) -> list[str]:
    return [name for name, _ in named(ast.parse(path.read_text()), str(path.relative_to(root)))]


def listed(root: Path = ROOT) -> dict[str, str]:
    """Handler -> the reason why no story enters it."""
    return {entry["handler"]: entry["why"] for entry in tomllib.loads((root / LISTED).read_text())["left"]}


class _Loader(importlib.machinery.SourceFileLoader):
    """A loader that compiles a module with a note at the head of every handler; byte code on disk is neither read nor
    written."""

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path))
        for name, handler in list(named(tree, str(Path(self.path).relative_to(ROOT)))):
            known[name] = None
            note = ast.parse(f"{NOTE}({name!r})").body[0]
            handler.body.insert(0, ast.copy_location(note, handler))
        code: CodeType = compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PRODUCT:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if type(spec.loader) is importlib.machinery.SourceFileLoader:
                    spec.loader = _Loader(spec.loader.name, spec.loader.path)
                return spec
        return None


def install() -> None:
    """Load the product's modules with notes from now on. Raises RuntimeError when some were loaded before."""
    before = sorted(name for name in sys.modules if name.partition(".")[0] in PRODUCT)
    if before:
        raise RuntimeError(f"{', '.join(before[:3])} were loaded before their handlers could be watched")
    setattr(builtins, NOTE, entered.add)
    sys.meta_path.insert(0, _Finder())


def installed() -> bool:
    return hasattr(builtins, NOTE)


def report(root: Path = ROOT) -> tuple[str, bool]:
    """How many handlers were entered and which were not, as text; and whether that is enough."""
    reasons = listed(root)
    never = [name for name in sorted(known) if name not in entered and name not in reasons]
    wanted = [name for name in known if name not in reasons or name in entered]
    share = 1 - len(never) / max(1, len(wanted))
    lines = [f"never entered: {name}" for name in never]
    surprising = sorted(entered & reasons.keys())
    lines += [f"entered, and {LISTED} says why it never is: {name}" for name in surprising]
    lines.append(
        f"{len(entered)} of {len(known)} except handlers of the loaded modules were entered; {share:.0%} of those that "
        f"are not listed with a reason ({len(reasons)} are)"
    )
    return "\n".join(lines), share >= SHARE

"""Whether a test can fail: does it assert, itself or through helpers? Their bodies are read, their names not trusted.

A test asserts when `assert`, `pytest.raises` (`fail`, `warns`), a machine's `check()` or the raising of an
AssertionError is in it, or in a helper that it calls: a function, method or class of its own file, or of a file under
`tests` or `chaos` that it imports from; or in a fixture that it names.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
PYTEST = ("pytest.raises", "pytest.fail", "pytest.warns")
RAISED = ("AssertionError", "Violation", "Broken", "broken")
"""Names of the project's AssertionErrors, and `World.broken`, which makes one."""
AT_ONCE = ("__init__", "__call__", "__enter__", "__exit__", "__aenter__", "__aexit__")
"""Methods that run when a class, or an instance of it, is called or entered."""


class File:
    """One parsed file: its functions and methods by name, its classes, and what it imports from helpers."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self._root = path, root
        self.functions: dict[str, list[Function]] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.imported: dict[str, str] = {}
        """Name in this file -> dotted module."""
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, FUNCTIONS):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("tests", "chaos"):
                self.imported |= {alias.asname or alias.name: f"{node.module}" for alias in node.names}

    def tests(self) -> list[Function]:
        return [node for nodes in self.functions.values() for node in nodes if node.name.startswith("test_")]

    def helpers(self) -> list["File"]:
        """This file, and the files it imports from (`from chaos import faults` is the file, not the package)."""
        names = {f"{module}.{name}" for name, module in self.imported.items()} | set(self.imported.values())
        paths = (self._root / f"{name.replace('.', '/')}.py" for name in sorted(names))
        return [self, *(opened(path, self._root) for path in paths if path.is_file())]


@cache
def opened(path: Path, root: Path) -> File:
    return File(path, root)


def can_fail(test: Function, file: File) -> bool:
    """Whether something that this test does can fail it. A fuzzed decoder counts when the test names the one error
    that is allowed: any other one fails it."""
    fuzzed = any("given" in ast.unparse(decorator) for decorator in test.decorator_list)
    return (fuzzed and any(isinstance(node, ast.Try) for node in ast.walk(test))) or _asserts(test, file, set())


def _asserts(function: Function, file: File, seen: set[tuple[Path, int]]) -> bool:
    key = (file.path, function.lineno)
    if key in seen:
        return False
    seen.add(key)
    return any(map(_is_check, ast.walk(function))) or any(
        _asserts(helper, where, seen) for helper, where in _helpers(function, file)
    )


def _is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Raise) and node.exc is not None:
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return ast.unparse(raised).rpartition(".")[2] in RAISED
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return called in PYTEST or called.endswith(".check")


def _helpers(function: Function, file: File) -> Iterator[tuple[Function, File]]:
    """Functions that it calls and names, with their files, where they can be found."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield from _called(node.func, file)
    for argument in function.args.args:
        for where in file.helpers():
            for helper in where.functions.get(argument.arg, []):
                if any("fixture" in ast.unparse(decorator) for decorator in helper.decorator_list):
                    yield helper, where


def _called(called: ast.expr, file: File) -> Iterator[tuple[Function, File]]:
    name = getattr(called, "attr", getattr(called, "id", ""))
    for where in file.helpers():
        if where is not file and isinstance(called, ast.Name) and name not in file.imported:
            continue
        for helper in where.functions.get(name, []):
            if not helper.name.startswith("test_"):
                yield helper, where
        if isinstance(called, ast.Name) and name in where.classes:
            for method in where.classes[name].body:
                if isinstance(method, FUNCTIONS) and method.name in AT_ONCE:
                    yield method, where

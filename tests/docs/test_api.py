"""Every public name that a script imports, or that a plugin is made of, is explained. `test_site.py`: and shown."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import covey

ROOT = Path(__file__).parents[2]
API = {
    "covey/job/client.py": {"CoveyError", "JobClient", "join"},
    "covey/core/errors.py": {"CoveyError", "RankLeft", "TensorError"},
    "covey/remote.py": {"RemoteMemory", "RemoteMemoryError"},
    "covey/tensors/numbers/moments.py": {"Moments"},
    "covey/job/tensors.py": {"TensorClient"},
    "covey/tensors/numbers/updates.py": {"SGD", "Adam"},
    "plugins/base.py": None,
}
"""File -> which of its names are public; None: all that do not begin with `_`."""


def explained(body: list[ast.stmt], at: int) -> bool:
    """Whether a docstring follows the field or constant at this place."""
    after = body[at + 1] if at + 1 < len(body) else None
    return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)


def unexplained(source: str, public: set[str] | None = None) -> list[str]:
    """Public classes, functions, methods and fields without a docstring, as `Class.name`."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for at, node in enumerate(body):
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    name, has = node.name, bool(ast.get_docstring(node))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    has = explained(body, at)
                case _:
                    continue
            if name.startswith("_") or (not prefix and public is not None and name not in public):
                continue
            if not has:
                yield prefix + name
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{name}.")

    return list(walk(ast.parse(source).body, ""))


@pytest.mark.parametrize("path", API)
def test_every_public_name_is_explained(path: str) -> None:
    assert unexplained((ROOT / path).read_text(), API[path]) == []


def test_what_scripts_import_is_among_what_is_looked_at() -> None:
    looked_at = set().union(*(names for names in API.values() if names))
    assert {getattr(covey, name).__name__ for name in covey.__all__} <= looked_at


def test_a_name_without_a_docstring_is_found() -> None:
    fields = '    x: int\n    y: int\n    """Bytes."""\n'
    source = f'class A:\n    """It is."""\n{fields}    def f(self): ...\n    def _g(self): ...\n'
    assert unexplained(source) == ["A.x", "A.f"]
    assert unexplained("def f(): ...\ndef g(): ...", {"g"}) == ["g"]

"""Tests that sleep in real time and then assert.

On a busy machine perhaps nothing ran in that time: what they say did not happen was never tried, and what they say
happened may be late. `tests.quiet` has what to do instead. Files that play in virtual time are exempt: there a sleep
costs nothing, and when it ends all that was due has run.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

VIRTUAL = re.compile(r"\bvirtual_time\b|\bVirtualLoop\b|\bSimHost\b|\bWorld\(")
"""What makes a loop, or a world, whose clock jumps, in the text of a file."""
VIRTUAL_HELPER = re.compile(VIRTUAL.pattern + r"|(?<![.\w])play\(")
"""What makes such a loop or world in a file that imports it from a helper of tests."""
WAITS = re.compile(r"\b(sleep|wait|wait_for|join)\(")
SLEEPS = ("sleep", "time.sleep", "asyncio.sleep")
GIVES_UP = ("wait", "wait_for")
"""Methods that end after a time although nothing came, and say so."""


def sleeps(path: Path, root: Path) -> list[int]:
    """Lines in which something in this file sleeps for a time that is not 0, or waits in vain, and then asserts."""
    text = path.read_text()
    if not WAITS.search(text) or VIRTUAL.search(text):
        return []
    tree = ast.parse(text)
    lines = sorted({line for node in ast.walk(tree) for line in _in(node)})
    return [] if lines and any(VIRTUAL_HELPER.search(each) for each in _imported(path, tree, root)) else lines


def _imported(path: Path, tree: ast.Module, root: Path) -> Iterator[str]:
    """Text of each function, class and import of a helper of tests that it imports by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("tests.")):
            folder = path.parents[node.level - 1] if node.level else root
            found = folder / f"{(node.module or '').replace('.', '/')}.py"
            names = {alias.name for alias in node.names}
            yield from (text for made, text in _made_in(found) if made & names)


@cache
def _made_in(path: Path) -> list[tuple[frozenset[str], str]]:
    """Functions, classes and imports of a file: names, and text."""
    body = ast.parse(path.read_text()).body if path.is_file() else []
    return [
        (frozenset({getattr(made, "name", ""), *(each.name for each in getattr(made, "names", []))}), ast.unparse(made))
        for made in body
    ]


def _in(node: ast.AST) -> Iterator[int]:
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(node, name, None)
        if isinstance(statements, list):
            for first, second in pairwise(statements):
                if isinstance(second, ast.Assert) and (_sleeps(first) or _joins(first, second)):
                    yield first.lineno
    if isinstance(node, ast.Assert):
        yield from (node.lineno for part in ast.walk(node.test) if _is_in_vain(part))


def _called(statement: ast.AST) -> ast.Call | None:
    value = statement.value if isinstance(statement, ast.Expr) else statement
    value = value.value if isinstance(value, ast.Await) else value
    return value if isinstance(value, ast.Call) else None


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _sleeps(statement: ast.stmt) -> bool:
    call = _called(statement)
    if call is None or ast.unparse(call.func) not in SLEEPS or not call.args:
        return False
    seconds = call.args[0]
    return not (isinstance(seconds, ast.Constant) and seconds.value == 0)


def _joins(statement: ast.stmt, then: ast.Assert) -> bool:
    """Whether these are `thread.join(0.1)`, and an assertion that the thread is alive."""
    call = _called(statement)
    if call is None or _name(call) != "join" or not call.args:
        return False
    parts = then.test.values if isinstance(then.test, ast.BoolOp) else [then.test]
    return any(isinstance(part, ast.Call) and _name(part) == "is_alive" for part in parts)


def _is_in_vain(part: ast.AST) -> bool:
    """Whether this is `not done.wait(0.3)`."""
    if not isinstance(part, ast.UnaryOp) or not isinstance(part.op, ast.Not):
        return False
    call = _called(part.operand)
    return call is not None and _name(call) in GIVES_UP and bool(call.args or call.keywords)

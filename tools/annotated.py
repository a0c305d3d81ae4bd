"""systemd/agent.toml: every setting with its default and its docstring in the code.

python -m tools.annotated       writes it; `make agent-toml` runs it
"""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from agent import config
from agent.etc.reload import is_live
from plugins.registry import PLUGINS

FILE = Path(__file__).parent.parent / "systemd" / "agent.toml"
HEAD = """\
# agent.toml of one host: /etc/covey/agent.toml. An empty file is a rack of one, and every setting is as it stands here.
# Remove the # before what you change, then: agentd --config /etc/covey/agent.toml --check
# Several hosts need the same gossip key, seeds and voters: agentctl rack writes them (docs/guides/install.md).
"""
WIDTH = 118


def text() -> str:
    return HEAD + "\n".join(line for name, kind in sections().items() for line in section(name, kind)) + "\n"


def sections() -> dict[str, type[msgspec.Struct]]:
    """Name of each section of agent.toml -> the class of its settings; those before the first section have no name."""
    found: dict[str, type[msgspec.Struct]] = {"": config.Top, **config.SECTIONS}
    return found | {plugin.name: plugin.settings for plugin in PLUGINS}


def section(name: str, kind: type[msgspec.Struct]) -> Iterator[str]:
    yield ""
    if name:
        yield f"[{name}]"
    for line, said in settings(name, kind):
        yield from textwrap.wrap(said, WIDTH, initial_indent="# ", subsequent_indent="# ")
        yield f"#{line}"


def settings(name: str, kind: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    """Each setting of a section with its default, as it stands in the file, and what it means."""
    said = words(kind)
    for field in msgspec.structs.fields(kind):
        live = " A reload applies it." if is_live(f"{name}.{field.name}") else ""
        value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        yield f"{field.name} = {toml(value)}", said.get(field.name, "") + live


def words(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Field of the class -> the docstring under it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    said = {}
    for field, under in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(under, ast.Expr):
            said[field.target.id] = " ".join(ast.literal_eval(under.value).split())
    return said


def toml(value: Any) -> str:
    """A value in TOML, which has no word for nothing: such a setting is written without a value."""
    if value is None:
        return "        # not set"
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    FILE.write_text(text())

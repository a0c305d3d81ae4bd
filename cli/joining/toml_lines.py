"""Settings written into the text of an agent.toml: lines are added, and no line of a person's is lost.

What comes out is parsed again and compared with what was meant, so a file that is written in an unusual way (a section
as an inline table, say) is refused, not spoiled.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

Settings = Mapping[tuple[str, str], str | list[str]]
"""(section, key) -> value."""


class CannotWrite(Exception):
    """The settings cannot be written into this text; the words say which one, and why."""


def with_settings(text: str, settings: Settings, instead: bool = False) -> str:
    """The text with these settings. Those that have another value there are CannotWrite, or, with `instead`, made
    comments."""
    meant = tomllib.loads(text)
    for (section, key), value in settings.items():
        before = meant.get(section, {})
        if key in before and before[key] != value:
            if not instead:
                raise CannotWrite(f"it says [{section}] {key} = {_toml(before[key])}")
            text = _without(text, section, key)
        if before.get(key) != value:
            text = _inserted(text, section, f"{key} = {_toml(value)}")
        meant.setdefault(section, {})[key] = value
    try:
        found: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = str(error)
    if found != meant:
        lines = "; ".join(f"[{section}] {key} = {_toml(value)}" for (section, key), value in settings.items())
        raise CannotWrite(f"its lines cannot be changed safely; write there yourself: {lines}")
    return text


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _header(section: str) -> "re.Pattern[str]":
    return re.compile(rf"^[ \t]*\[[ \t]*{re.escape(section)}[ \t]*\][ \t]*(#.*)?$", re.MULTILINE)


def _inserted(text: str, section: str, line: str) -> str:
    """The text with the line at the beginning of the section, which comes last where there is none."""
    if found := _header(section).search(text):
        return f"{text[: found.end()]}\n{line}{text[found.end() :]}"
    begin = text if not text or text.endswith("\n") else f"{text}\n"
    return f"{begin}[{section}]\n{line}\n"


def _without(text: str, section: str, key: str) -> str:
    """The text with the setting, which may have several lines, as a comment."""
    header = _header(section).search(text)
    lines = text.splitlines()
    first = 0 if header is None else text[: header.end()].count("\n") + 1
    for at in range(first, len(lines)):
        if re.match(rf"[ \t]*{re.escape(key)}[ \t]*=", lines[at]):
            end = next((end for end in range(at + 1, len(lines) + 1) if _is_toml(lines[at:end])), at + 1)
            lines[at:end] = [f"#{line}" for line in lines[at:end]]
            break
    return "\n".join(lines) + "\n"


def _is_toml(lines: list[str]) -> bool:
    try:
        tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError:
        return False
    return True

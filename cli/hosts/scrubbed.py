"""Text and JSON without secrets, for whoever gets a bundle.

Two ways, one after the other. What is known to be secret goes wherever it stands: keys of the rack, values of this
process's environment with a name like a secret's, arguments of jobs, which are left out as a whole. What looks like a
secret goes too: what follows such a name, logins in URLs, tokens of known services, long words as keys are.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HIDDEN = "(hidden)"
NAMES = ("key", "secret", "token", "password", "passwd", "credential", "authorization", "bearer", "cookie")
"""A name with one of these in it says that its value is secret."""
SHORT = 6
"""Letters of a value that is too short to be looked for elsewhere: it would hide words of every other line."""
_NAME = rf"[\w.-]*(?:{'|'.join(NAMES)})[\w.-]*"
_VALUE = r"""(?:"[^"\n]*"|'[^'\n]*'|(?:bearer\s+|basic\s+)?[^\s,;"')}\]]+)"""
_LETTER, _APART = r"[A-Za-z0-9+_=-]", r"[\w/+.-]"
"""A letter of a long word, and one beside which it is a part of a path or of a name."""
_UUID = r"(?:GPU-|MIG-)?[0-9a-f]{8}-[0-9a-f]{4}-"
_MIXED = rf"(?!{_UUID})(?={_LETTER}*[a-z])(?={_LETTER}*[A-Z])(?={_LETTER}*[0-9])"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"://[^/\s@\"']+@"), f"://{HIDDEN}@"),
    (re.compile(rf"(?i)({_NAME}[\"']?\s*[=:]\s*){_VALUE}"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)(--?{_NAME}\s+)(?!\()[^\s\"',;)\]]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{6,}"), rf"\1{HIDDEN}"),
    (re.compile(r"\b(?:hf_|sk-|gh[opusr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|eyJ|npm_|pypi-)[\w.-]{8,}"), HIDDEN),
    (re.compile(r"covey-[a-z2-7]{40,}"), HIDDEN),
    (re.compile(r"(?i)(?<![\w-])[0-9a-f]{32,}(?![\w-])"), HIDDEN),
    (re.compile(rf"(?<!{_APART}){_MIXED}{_LETTER}{{24,}}(?!{_APART})"), HIDDEN),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL), HIDDEN),
)  # fmt: skip


def is_secret(name: str) -> bool:
    return any(word in name.lower() for word in NAMES)


class Scrubber:
    """`known`: what is secret, wherever it stands."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known: set[str] = set()
        self.learn(known)

    def learn(self, known: Iterable[str]) -> None:
        self._known |= {word for word in known if len(word) >= SHORT}

    def text(self, text: str) -> str:
        for word in sorted(self._known, key=len, reverse=True):
            text = text.replace(word, HIDDEN)
        for pattern, put in _PATTERNS:
            text = pattern.sub(put, text)
        return text

    def json(self, value: Any) -> Any:
        """A value with its strings scrubbed, and without what stands under a secret's name or in an `argv`."""
        if isinstance(value, Mapping):
            return {self.text(str(name)): self._named(str(name), each) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.json(each) for each in value]
        return self.text(value) if isinstance(value, str) else value

    def _named(self, name: str, value: Any) -> Any:
        if name == "argv" and isinstance(value, (list, tuple)):
            return [self.text(str(value[0])), f"({len(value) - 1} arguments left out)"] if value else []
        return HIDDEN if is_secret(name) and isinstance(value, str) and value else self.json(value)


_ORDINARY = re.compile(r"[A-Za-z]*|[\d.,:x]*|.*\.(?:py|sh|toml|json|yaml|yml|txt|cfg)")
"""Arguments that other lines have too: a word, a number, a file of a script."""


def arguments_in(value: Any) -> Iterator[str]:
    """Every argument of a command in an answer (`argv`) that may be a secret: not the program, the names of options, or
    what is ordinary."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name == "argv" and isinstance(each, (list, tuple)):
                yield from (word for word in map(_given, each[1:]) if not _ORDINARY.fullmatch(word))
            else:
                yield from arguments_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from arguments_in(each)


def _given(argument: object) -> str:
    """What was given: `x` of `--name=x` and of `x`; nothing of `--name`."""
    word = str(argument)
    flag, equals, rest = word.partition("=")
    if not flag.startswith("-"):
        return word
    return rest if equals else ""

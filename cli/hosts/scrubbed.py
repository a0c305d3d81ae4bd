"""Text and JSON without secrets, for whoever gets a bundle.

Two ways, one after the other. What is known to be secret goes wherever it stands: keys of the rack, values of this
process's environment with a name like a secret's, arguments of jobs, which are left out as a whole. What looks like a
secret goes too: what follows such a name, logins in URLs, tokens of known services, long words as keys are.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from covey.core.hidden import HIDDEN, is_secret, without_secrets

SHORT = 6
"""Letters of a value that is too short to be looked for elsewhere: it would hide words of every other line."""


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
        return without_secrets(text)

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

"""Text and variables without secrets, for people who may see the rest."""

import re
from collections.abc import Mapping

HIDDEN = "(hidden)"
NAMES = ("key", "secret", "token", "password", "passwd", "credential", "authorization", "bearer", "cookie")
"""A name with one of these in it says that its value is secret."""
SHOWN_MAX = 1000
"""Characters of a value that are shown."""
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
    """Whether a variable or option of this name is taken for a secret."""
    return any(word in name.lower() for word in NAMES)


def without_secrets(text: str) -> str:
    """A text without what looks like a secret in it."""
    for pattern, put in _PATTERNS:
        text = pattern.sub(put, text)
    return text


def without_secret_values(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of an environment by name: the value of one with a name like a secret's is hidden as a whole, of others
    what looks like one. Of a value that is longer than `SHOWN_MAX` the rest is left out."""
    return {name: _shown(name, variables[name]) for name in sorted(variables)}


def _shown(name: str, value: str) -> str:
    text = HIDDEN if is_secret(name) and value else without_secrets(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]} ... ({len(text):,} characters)"

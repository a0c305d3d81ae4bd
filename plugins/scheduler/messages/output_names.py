"""Names of the files that a job's output goes to (`--output`, `--error`): words with `%` stand for what a rank knows.

The log has the name as it was submitted; each host writes the words out for its own ranks
(`agent/jobs/launching.py`)."""

import re
from collections.abc import Mapping

WORDS: Mapping[str, str] = {
    "j": "the job's id, such as j12",
    "i": "the job's number, such as 12",
    "A": "the number of the array that the job is a task of, or of the job",
    "a": "the task's index in its array",
    "r": "the rank",
    "x": "the job's name",
    "N": "the host",
    "u": "the job's user",
}
"""What follows a `%` -> what it stands for; `%%` is a `%`."""
_WORD = re.compile(r"%(.?)")


def unknown(name: str) -> str:
    """The first `%` of a file's name that stands for nothing, with what follows it; empty: there is none."""
    return next((found[0] for found in _WORD.finditer(name) if found[1] not in ("%", *WORDS)), "")


def known() -> str:
    """The words that there are, for people."""
    return ", ".join(f"%{letter} ({meaning})" for letter, meaning in WORDS.items())


def written_out(name: str, values: Mapping[str, str]) -> str:
    """The name with `values` in the places of the words, by their letters; what is in them never leaves the folder that
    the name says."""
    safe = {letter: value.replace("/", "_") or "_" for letter, value in values.items()}
    return _WORD.sub(lambda found: "%" if found[1] == "%" else safe.get(found[1], found[0]), name)

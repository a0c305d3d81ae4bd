"""What agentctl answers to a slip in each of its words: commands, options, and what they take one of.

`typos.txt` holds the answers. `python -m tests.cli.test_typos` writes it anew from the parsers (`make samples`).
"""

import contextlib
import importlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import hints
from cli.main import MODULES, NOUNS, VERBS, main, parser_of

FILE = Path(__file__).parent / "typos.txt"


def slip(word: str, taken: set[str]) -> str:
    """The word with two neighbouring letters swapped, from its middle on, so that it is none of `taken`."""
    begin = 2 if word.startswith("--") else 0
    places = sorted(range(begin, len(word) - 1), key=lambda i: abs(2 * i - begin - len(word) + 2))
    swapped = [word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in places if word[i] != word[i + 1]]
    return next((each for each in swapped if each not in taken), word + word[-1])


def typed() -> Iterator[tuple[str, str]]:
    """Each line with a slip in it, and the word that was meant."""
    for noun in NOUNS:
        yield slip(noun, {*NOUNS, *hints.NOUNS}), noun
    for noun, verbs in VERBS.items():
        for verb in verbs:
            yield f"{noun} {slip(verb, {*verbs, *hints.VERBS[noun]})}", verb
    seen: set[tuple[str, ...]] = set()
    for command, module in MODULES.items():
        parser = parser_of(command, None)
        importlib.import_module(module).arguments(parser)
        known = {flag for action in parser._actions for flag in action.option_strings}
        for action in parser._actions:
            flag = next((each for each in reversed(action.option_strings) if each.startswith("--")), "")
            same = (flag or f"{command} {action.dest}", *map(str, action.choices or ()))
            if same in seen:  # as in a command before: run and shell take what submit takes
                continue
            seen.add(same)
            if flag:
                yield f"{command} {slip(flag, known)}", flag
            places = [each.dest for each in parser._actions if not each.option_strings]
            before = f" {flag}" if flag else " j1" * places.index(action.dest)
            for choice in map(str, action.choices or ()):
                yield f"{command}{before} {slip(choice, set(map(str, action.choices or ())))}", choice


def answer(line: str) -> str:
    """What agentctl says to it on stderr; its exit code is 2."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main(line.split()) == 2, line
    return said.getvalue()


def transcript() -> str:
    return "\n".join(f"$ agentctl {line}\n{answer(line)}" for line, _ in typed())


def test_every_slip_is_answered_as_the_transcript_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_AGENT", "unix:/nowhere")
    assert transcript() == FILE.read_text(), "next: make samples"


def test_every_slip_is_answered_with_the_word_that_was_meant() -> None:
    answers = FILE.read_text().split("\n\n")
    for said, (line, meant) in zip(answers, typed(), strict=True):
        assert said.startswith(f"$ agentctl {line}\n")
        assert meant in said.splitlines()[3].replace("?", " ").split(), said


@pytest.mark.parametrize(
    ("word", "meant", "is_so"),
    [("wyh", "why", True), ("wy", "why", True), ("whhy", "why", True), ("wha", "why", True), ("", "rm", False),
     ("mr", "rm", True), ("r", "rm", False), ("rms", "rm", False), ("yhw", "why", False), ("gpu", "jobs", False)],
)  # fmt: skip
def test_a_slip_is_one_letter_or_two_neighbours(word: str, meant: str, is_so: bool) -> None:
    assert hints.is_one_slip(word, meant) is is_so


if __name__ == "__main__":
    FILE.write_text(transcript())

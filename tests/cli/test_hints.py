"""The hint of an error is the command that does it: each one is parsed, and means what was asked for."""

import shlex

import pytest

from cli import hints
from cli.client import AgentctlError
from cli.main import NOUNS, VERBS, parse

EXAMPLES = {
    "HOST": "gpu1", "ID": "j1", "VOLUME": "demo", "COMMAND": "true", "NAME": "ann", "N": "2", "DIR": "/tmp",
    "KEY=VAL": "A=1", "ADDRESS": "127.0.0.1:8470", "SIZE": "64MiB", "PATH": "/tmp/v.sock",
}  # fmt: skip


def words(text: str) -> list[str]:
    """Words that a person types who follows the hint, without the remark in brackets."""
    return [EXAMPLES.get(word, word) for word in shlex.split(text.partition("    (")[0])]


@pytest.mark.parametrize("said", sorted(hints.NOUNS))
def test_a_word_of_another_tool_is_answered_with_a_command_that_there_is(said: str) -> None:
    assert said not in NOUNS, "it is a command here"
    with pytest.raises(AgentctlError) as caught:
        parse([said])
    typed = words(caught.value.next)
    assert typed[0] == "agentctl" and parse(typed[1:]).noun.split() == typed[1:][: 1 + (typed[1] in VERBS)]


@pytest.mark.parametrize("said", sorted({*hints.SUBMIT_FLAGS, *hints.OTHERWISE}))
def test_a_flag_of_another_tool_is_answered_with_what_does_it(said: str) -> None:
    with pytest.raises(AgentctlError) as caught:
        parse(["submit", said, "--", "true"])
    assert caught.value.what == f"unknown option {said}"
    if said in hints.SUBMIT_FLAGS:
        parse(["submit", *words(hints.SUBMIT_FLAGS[said]), "--", "true"])
        assert caught.value.next.startswith(hints.SUBMIT_FLAGS[said])


@pytest.mark.parametrize(("noun", "said"), [(noun, said) for noun, flags in hints.OF_NOUN.items() for said in flags])
def test_a_flag_of_another_noun_is_answered_too(noun: str, said: str) -> None:
    hint = hints.OF_NOUN[noun][said]
    given = {"logs": ["j1"], "cancel": ["j1"], "volume rm": ["v1"]}.get(noun, ["v1", "1MiB"] if " " in noun else [])
    with pytest.raises(AgentctlError) as caught:
        parse([*noun.split(), *given, said])
    assert caught.value.next == hint
    typed = words(hint.partition(" |")[0])
    parse(typed[1:] if typed[0] == "agentctl" else [*noun.split(), *given, *typed])


@pytest.mark.parametrize(("noun", "said"), [(noun, said) for noun, verbs in hints.VERBS.items() for said in verbs])
def test_a_verb_of_another_tool_is_answered_with_the_one_here(noun: str, said: str) -> None:
    assert said not in VERBS[noun], "it is a verb here"
    with pytest.raises(AgentctlError) as caught:
        parse([noun, said, "demo"])
    assert caught.value.what == f"unknown command '{noun} {said}'"
    typed = words(caught.value.next)
    assert parse(typed[1:]).noun == f"{noun} {hints.VERBS[noun][said].split()[0]}"


@pytest.mark.parametrize(
    ("said", "hint"),
    [("hots", "hosts"), ("jbos", "jobs"), ("submitt", "submit -- COMMAND"), ("squeu", "jobs"), ("dotcor", "doctor")],
)
def test_a_slip_is_answered_with_the_word_that_was_meant(said: str, hint: str) -> None:
    assert hints.for_noun(said, NOUNS) in (hint, hint.partition(" ")[0])


@pytest.mark.parametrize("said", ["frobnicate", "x", "weigh", "--", "matrix"])
def test_what_is_near_nothing_gets_no_hint_that_does_something_else(said: str) -> None:
    assert hints.for_noun(said, NOUNS) == ""
    assert hints.for_flag("submit", f"--{said}", ["--time", "--wait", "--tenant"]) == ""

"""Bytes of a process as text, and back."""

import json
import os
import re

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.core.carried import (
    STRING_BYTES_MAX,
    TEXT,
    argv_excess,
    carried,
    env_excess,
    for_people,
    for_process,
    size,
)

given_bytes = st.binary().map(lambda data: data.replace(b"\0", b""))


@given(given_bytes | st.text().map(lambda text: text.encode(errors="ignore").replace(b"\0", b"")))
@example(b"caf\xe9")
@example("café数据".encode())
@example(b"\xc3\xa9\xc3 \xf0\x9f\x98\xed\xa0\x80")
def test_every_argument_arrives_byte_for_byte(data: bytes) -> None:
    text = carried(data)
    for sent in (json.loads(json.dumps(text)), msgspec.msgpack.decode(msgspec.msgpack.encode(text))):
        assert os.fsencode(for_process(sent)) == data
    assert re.fullmatch(f"{TEXT}*", text) and size(text) == len(data)
    assert "\0" not in for_people(text)


def test_what_is_utf8_is_carried_as_it_is_and_a_screen_shows_the_rest_by_number() -> None:
    assert carried("größe=数".encode()) == "größe=数"
    assert for_people(carried(b"caf\xe9")) == "caf\\xe9"


@pytest.mark.parametrize("byte", ["x", "\0e9", "é"])
def test_the_kernels_own_limit_is_the_limit_of_one_string(byte: str) -> None:
    """A byte that is not UTF-8 counts once, since the process gets one byte."""
    fits = byte * ((STRING_BYTES_MAX - 2) // size(byte))
    assert argv_excess([fits]) is None or "together" in argv_excess([fits])[0]  # type: ignore[index]
    assert env_excess({"A": fits}) is None
    long = env_excess({"A": fits + byte * 2})
    assert long is not None and long[0].startswith("variable A has 131,07") and "131,071 bytes" in long[1]

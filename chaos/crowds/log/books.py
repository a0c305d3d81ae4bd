"""A small state for clients of a log, one copy per host: by key a quota that is set and read, the number of the last
job id that was given, or who has a lease on a slab of memory. All three are one number or name, so one key may be any.
"""

from typing import Any

import msgspec

FIRST = 0
"""The state of a key that nobody has named: no quota, no job id, no lease."""


class Put(msgspec.Struct, frozen=True, tag=True):
    """Set a quota. The answer: True."""

    value: int


class Look(msgspec.Struct, frozen=True, tag=True):
    """Read: what the key holds. It changes nothing, so it is answered from a copy."""


class Count(msgspec.Struct, frozen=True, tag=True):
    """Give the next job id. The answer: its number."""


class Take(msgspec.Struct, frozen=True, tag=True):
    """Take a lease that nobody has. The answer: whether `owner` has it now."""

    owner: str


class Give(msgspec.Struct, frozen=True, tag=True):
    """Give a lease back. The answer: whether `owner` had it."""

    owner: str


Asked = Put | Look | Count | Take | Give


class BookCommand(msgspec.Struct, frozen=True):
    """A request about one key, as it travels through the log."""

    key: str
    asked: Asked


command_of = msgspec.msgpack.Decoder(BookCommand).decode


def perform(state: Any, asked: Asked) -> tuple[int | str, Any]:
    """What a key holds after this request, and the answer."""
    match asked:
        case Put(value):
            return value, True
        case Look():
            return state, state
        case Count():
            given = state + 1 if isinstance(state, int) else 1
            return given, given
        case Take(owner):
            held = state not in (FIRST, owner)
            return (state, False) if held else (owner, True)
        case Give(owner):
            return (FIRST, True) if state == owner else (state, False)

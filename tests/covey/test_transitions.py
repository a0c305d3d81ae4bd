"""A state changes only as its table allows."""

import msgspec
import pytest

from covey.core.transitions import CheckedState, StateTable


class Shut(msgspec.Struct, frozen=True):
    pass


class Ajar(msgspec.Struct, frozen=True):
    by: str


class Walled(msgspec.Struct, frozen=True):
    pass


DOOR: StateTable[Shut | Ajar | Walled] = StateTable(
    "a door", {Shut: {Ajar: "pushed", Walled: "not needed"}, Ajar: {Ajar: "pushed again", Shut: "let go"}, Walled: {}}
)


class Door:
    state = CheckedState(DOOR)

    def __init__(self, state: Shut | Ajar | Walled = Shut()) -> None:
        self.state = state


def test_a_change_in_the_table_is_made_also_within_one_kind() -> None:
    door = Door()
    door.state = Ajar("wind")
    door.state = Ajar("cat")
    assert door.state == Ajar("cat") and Door().state == Shut()


def test_a_change_that_is_not_in_the_table_raises_and_changes_nothing() -> None:
    door = Door()
    with pytest.raises(AssertionError, match="a door: no row leads from Shut to Shut"):
        door.state = Shut()
    door.state = Walled()
    with pytest.raises(AssertionError, match="from Walled to Ajar"):
        door.state = Ajar("ram")
    assert door.state == Walled()


def test_a_value_begins_as_the_first_kind_unless_others_are_named() -> None:
    with pytest.raises(AssertionError, match="a door cannot begin as Ajar"):
        Door(Ajar("thief"))
    assert StateTable[str]("lamp", {"off": {"on": "lit"}, "on": {}}, begins=["on"]).first("on") == "on"


def test_a_row_to_a_kind_without_a_line_is_an_error() -> None:
    with pytest.raises(ValueError, match="lamp: on has no line in the table"):
        StateTable("lamp", {"off": {"on": "lit"}})


def test_strings_are_kinds_of_their_own() -> None:
    lamp = StateTable[str]("lamp", {"off": {"on": "lit"}, "on": {}})
    assert lamp.next("off", "on") == "on"
    with pytest.raises(AssertionError, match="no row leads from on to off"):
        lamp.next("on", "off")

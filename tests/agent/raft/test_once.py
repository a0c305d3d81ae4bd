"""A command is applied once, however often and however late it is proposed again."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.raft.machine import Outcome, SessionTable
from agent.raft.messages import Entry


def command(name: str, base: int = 0) -> Entry:
    return Entry(1, name.encode().ljust(16, b"."), base, name.encode())


def echo(index: int, data: bytes) -> bytes:
    return data + str(index).encode()


def never(index: int, data: bytes) -> bytes:
    raise AssertionError("applied twice")


def test_the_second_copy_is_not_applied_and_has_the_first_ones_result() -> None:
    once = SessionTable()
    assert once.apply(1, command("x"), echo) == Outcome("applied", 1, b"x1")
    assert once.apply(2, command("x"), never) == Outcome("repeated", 1, b"x1")
    assert once.find(command("x").id) == Outcome("repeated", 1, b"x1")


def test_a_copy_so_late_that_its_first_may_be_forgotten_is_not_applied() -> None:
    once = SessionTable(window=10)
    once.apply(1, command("x"), echo)
    for index in range(2, 12):
        once.apply(index, command(f"c{index}", base=index - 1), echo)
    assert once.find(command("x").id) is None
    assert once.apply(12, command("x"), never) == Outcome("expired", 12, None)


def test_a_new_command_with_a_recent_base_is_applied_whatever_came_before() -> None:
    once = SessionTable(window=10)
    assert once.apply(1000, command("x", base=990), echo).kind == "applied"
    assert once.apply(1001, command("y", base=990), echo).kind == "expired"


def test_results_are_kept_up_to_a_size_and_ids_longer() -> None:
    once = SessionTable(result_bytes_max=100)
    for index in range(1, 11):
        once.apply(index, command(f"c{index}"), lambda index, data: bytes(30))
    assert once.apply(11, command("c10"), never).result == bytes(30)
    assert once.apply(12, command("c1"), never) == Outcome("repeated", 1, None)


@given(st.integers(0, 10_000))
def test_no_schedule_of_repeats_applies_a_command_twice_and_copies_agree(seed: int) -> None:
    """Copies that restart from a snapshot in between decide the same."""
    rng = random.Random(seed)
    one, other = SessionTable(window=8, result_bytes_max=64), SessionTable(window=8, result_bytes_max=64)
    applied: list[bytes] = []
    known: list[Entry] = []

    def run(index: int, data: bytes) -> bytes:
        applied.append(data)
        return data * rng.randrange(1, 3)

    for index in range(1, 80):
        if known and rng.random() < 0.5:
            entry = rng.choice(known)
        else:
            entry = command(f"n{index}", base=rng.randrange(max(0, index - 4), index))
            known.append(entry)
        outcome = one.apply(index, entry, run)
        again = other.apply(index, entry, lambda index, data, result=outcome.result: result or b"")  # type: ignore[misc]
        assert (again.kind, again.result) == (outcome.kind, outcome.result)
        if rng.random() < 0.1:
            fresh = SessionTable(window=8, result_bytes_max=64)
            fresh.load([type(kept)(kept.index, kept.id, kept.result) for kept in other.dump()])
            other = fresh
    assert len(applied) == len(set(applied))


def test_nothing_is_expired_that_is_proposed_in_time() -> None:
    once = SessionTable(window=100)
    kinds = {once.apply(index, command(f"c{index}", base=index - 50), echo).kind for index in range(50, 500)}
    assert kinds == {"applied"}


@pytest.mark.parametrize("late", [99, 100, 101])
def test_the_window_is_exact(late: int) -> None:
    """An id is remembered exactly as long as a copy of it might still be accepted."""
    once = SessionTable(window=100)
    once.apply(1, command("x", base=0), echo)
    outcome = once.apply(1 + late, command("x", base=0), never)
    assert outcome.kind == ("repeated" if late < 100 else "expired")

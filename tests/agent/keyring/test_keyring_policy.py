"""Which step of a rotation comes next, and what a host does to its ring."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.keyring.policy import KeyRing, KeyStep, lacking, name, needed, newest, planned, stepped
from agent.keyring.service import in_place, of_file
from covey.core.errors import Refused
from covey.core.ids import HostId

OLD, NEW, NEWER = b"o" * 32, b"n" * 32, b"r" * 32
A, B, C = HostId("a"), HostId("b"), HostId("c")
HOSTS = (A, B, C)
FIRST = of_file([OLD])


def ring(*keys: bytes) -> KeyRing:
    numbers = {OLD: 0, NEW: 1, NEWER: 2}
    return KeyRing(keys, tuple(numbers[key] for key in keys), FIRST.instead_of)


def plan(*rings: KeyRing) -> tuple[str, str, tuple[HostId, ...]]:
    found = planned([one.row(host) for host, one in zip(HOSTS, rings, strict=False)], A)
    return found.step, found.id, found.hosts


@pytest.mark.parametrize(
    ("rings", "step", "hosts"),
    [
        ((ring(OLD), ring(OLD)), "new", (A, B)),
        ((ring(OLD, NEW), ring(OLD)), "install", (B,)),
        ((ring(NEW, OLD), ring(OLD), ring(OLD, NEW)), "install", (B,)),  # b was away, and comes first
        ((ring(OLD, NEW), ring(OLD, NEW)), "use", (A, B)),
        ((ring(OLD, NEW), ring(NEW, OLD)), "use", (A,)),
        ((ring(NEW, OLD), ring(NEW, OLD)), "remove", (A, B)),
        ((ring(NEW), ring(NEW, OLD)), "remove", (B,)),
        ((ring(NEW), ring(OLD)), "install", (B,)),
        ((ring(NEW), ring(NEW)), "new", (A, B)),
    ],
)
def test_a_step_begins_when_all_have_taken_the_one_before(
    rings: tuple[KeyRing, ...], step: str, hosts: tuple[HostId, ...]
) -> None:
    found = plan(*rings)
    assert (found[0], found[2]) == (step, hosts)


def test_a_key_that_a_host_got_from_a_file_is_the_same_key() -> None:
    joined = of_file([NEW])
    assert newest([ring(NEW).row(A), joined.row(B)], B) == name(NEW)
    assert plan(ring(NEW), joined)[0] == "new"


def test_a_host_refuses_to_remove_while_it_seals_with_another_key() -> None:
    for has in (ring(OLD), ring(OLD, NEW)):
        with pytest.raises(Refused):
            stepped(has, KeyStep("remove", name(NEW)))
    with pytest.raises(Refused, match="was not installed"):
        stepped(ring(OLD), KeyStep("use", name(NEW)))
    with pytest.raises(Refused, match="3 keys already"):
        stepped(ring(OLD, NEW, NEWER), KeyStep("install", name(b"x" * 32), b"x" * 32, 3))
    with pytest.raises(Refused, match="5 bytes"):
        stepped(ring(OLD), KeyStep("install", "id", b"short", 3))


def test_a_key_is_needed_while_a_host_seals_with_it_or_is_gone() -> None:
    rows = [ring(NEW, OLD).row(A), ring(NEW, OLD).row(B)]
    assert needed(rows, name(OLD), []) == "" and lacking(rows, name(NEWER)) == (A, B)
    assert needed([*rows, ring(OLD, NEW).row(C)], name(OLD), []) == "c seals with it"
    assert needed(rows, name(OLD), [C]) == "c: gone, and its keys are not known"
    assert (
        stepped(ring(NEW, OLD), KeyStep("drop", name(OLD)))
        == ring(NEW)
        == stepped(ring(NEW), KeyStep("drop", name(OLD)))
    )
    with pytest.raises(Refused, match="seals with it"):
        stepped(ring(OLD, NEW), KeyStep("drop", name(OLD)))


def test_a_step_that_was_taken_is_taken_again_without_a_change() -> None:
    has = ring(OLD)
    for step in (KeyStep("install", name(NEW), NEW, 1), KeyStep("use", name(NEW)), KeyStep("remove", name(NEW))):
        after = stepped(has, step)
        assert stepped(after, step) == after != has
        has = after
    assert has == ring(NEW)


def test_keys_that_an_operator_puts_there_later_count_more_than_the_ring() -> None:
    assert in_place(ring(NEW), FIRST) == ring(NEW)
    assert in_place(ring(NEW), of_file([NEWER])) == of_file([NEWER])
    assert in_place(None, FIRST) == FIRST


def test_a_key_is_not_printed() -> None:
    assert NEW.hex() not in repr(KeyStep("install", name(NEW), NEW, 1)) and "nnn" not in str(
        KeyStep("install", "", NEW)
    )


@given(st.binary(max_size=300))
def test_random_bytes_are_no_step(body: bytes) -> None:
    try:
        found = msgspec.msgpack.Decoder(KeyStep).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    assert isinstance(found, KeyStep)


@given(
    st.sampled_from(("tell", "install", "use", "remove", "drop")),
    st.sampled_from((name(OLD), name(NEW), "")) | st.text(max_size=8),
    st.sampled_from((OLD, NEW)) | st.binary(max_size=32),
    st.integers(0, 1 << 31),
)
def test_whatever_step_is_asked_for_the_ring_stays_one_or_refuses(step: Any, id: str, key: bytes, number: int) -> None:
    for has in (ring(OLD), ring(OLD, NEW), ring(OLD, NEW, NEWER)):
        try:
            after = stepped(has, KeyStep(step, id, key, number))
        except Refused:
            continue
        assert 1 <= len(after.keys) == len(after.numbers) <= 3 and len({*after.keys}) == len(after.keys)
        assert after.keys[0] in has.keys


@given(st.randoms(use_true_random=False))
def test_a_rotation_by_anybody_whose_steps_are_lost_ends_and_all_are_heard(rng: random.Random) -> None:
    """Whatever acknowledgements are lost and whoever continues, each host opens what every other seals."""
    rings = dict.fromkeys(HOSTS, FIRST)
    key = rng.randbytes(32)
    for _ in range(200):
        if {one.keys for one in rings.values()} == {(key,)}:
            break
        now = planned([one.row(host) for host, one in rings.items()], rng.choice(HOSTS))
        is_new = now.step == "new" or now.step == "install"
        step = KeyStep("install", name(key), key, 1) if is_new else KeyStep(now.step, now.id)  # type: ignore[arg-type]
        for host in now.hosts:
            if rng.random() < 0.7:
                rings[host] = stepped(rings[host], step)
        assert all(one.keys[0] in other.keys for one in rings.values() for other in rings.values())
    assert {one.keys for one in rings.values()} == {(key,)}

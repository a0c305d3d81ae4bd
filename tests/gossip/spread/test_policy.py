"""Which facts are newer, what another host lacks, and what a map may hold."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.settings import DATAGRAM_BYTES
from gossip.spread import messages, policy
from gossip.spread.messages import KEYS_MAX, TOMBSTONES_MAX, VALUE_BYTES_MAX, Delta, FactEntry, KnownVersion
from gossip.spread.policy import ENTRY_BYTES, MAP_BYTES_MAX, Facts
from gossip.types import U32_MAX, U63_MAX, size

keys = st.sampled_from([f"k{number}" for number in range(14)])
writes = st.lists(st.tuples(keys, st.none() | st.binary(max_size=2)), max_size=30)


def own(story: list[tuple[str, bytes | None]]) -> list[Facts]:
    """Every state that a host's map went through."""
    states = [Facts(boot=1)]
    for key, value in story:
        states.append(policy.written(states[-1], key, value, 0.0))
    return states


@given(writes)
def test_a_map_holds_what_was_written_last(story: list[tuple[str, bytes | None]]) -> None:
    expected: dict[str, bytes] = {}
    for key, value in story:
        if value is None:
            expected.pop(key, None)
        else:
            expected[key] = value
    assert own(story)[-1].values == dict(sorted(expected.items()))


@given(writes, st.data())
def test_a_delta_from_any_earlier_state_leads_to_the_present_one(
    story: list[tuple[str, bytes | None]], data: st.DataObject
) -> None:
    """The delta leads there even if removals were forgotten in between: then it is the whole map (chitchat's RESET)."""
    states = own(story)
    newest = states[-1]
    theirs = states[data.draw(st.integers(0, len(states) - 1))]
    after = policy.since(newest, theirs.boot, theirs.version)
    if theirs.version == newest.version:
        assert after is None
        return
    assert after is not None
    told = policy.merged(theirs, policy.delta(7, newest, after, 0.0), 0.0)
    assert told is not None and told.values == newest.values and told.version == newest.version
    live = {key: entry for key, entry in told.entries.items() if entry.value is not None}
    assert live == {key: entry for key, entry in newest.entries.items() if entry.value is not None}


@given(writes, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=40))
def test_two_copies_that_tell_each_other_in_any_order_never_go_back_and_meet(
    story: list[tuple[str, bytes | None]], talks: list[tuple[int, int]]
) -> None:
    """A copy may be told by another copy, not only by the owner."""
    states = own(story)
    written = {state.version: state.values for state in states}
    copies = [Facts(), Facts()]
    for state, talk in talks:
        sources = [states[min(state, len(states) - 1)], *copies]
        source, target = sources[talk % 3], talk % 2
        after = policy.since(source, copies[target].boot, copies[target].version)
        if after is not None:
            told = policy.merged(copies[target], policy.delta(7, source, after, 0.0), 0.0)
            assert told is not None and policy.is_newer(told.boot, told.version, copies[target])
            copies[target] = told
            assert told.values == written[told.version]
    if copies[0].version == copies[1].version:
        assert copies[0].values == copies[1].values


def test_a_delta_with_a_gap_before_it_is_not_taken() -> None:
    """chitchat: test_node_skip_delta_from_the_future."""
    facts = Facts(1, 5, 0, 0.0, {"a": FactEntry("a", 5, b"1")})
    assert policy.merged(facts, Delta(7, 1, 6, 8, 0, 0, ()), 0.0) is None
    assert policy.merged(facts, Delta(7, 2, 5, 8, 0, 0, ()), 0.0) is None, "of another boot, and not whole"
    assert policy.merged(facts, Delta(7, 1, 5, 8, 6, 0, ()), 0.0) is None, "removals that were missed are forgotten"
    assert policy.merged(facts, Delta(7, 1, 5, 8, 5, 0, ()), 0.0) is not None


def test_old_news_is_not_taken() -> None:
    facts = Facts(2, 5)
    assert policy.merged(facts, Delta(7, 2, 0, 5, 0, 0, ()), 0.0) is None
    assert policy.merged(facts, Delta(7, 1, 0, 99, 0, 0, ()), 0.0) is None


def test_a_new_boot_takes_the_place_of_all_that_was_there() -> None:
    facts = Facts(1, 50, 0, 0.0, {"a": FactEntry("a", 5, b"1")})
    told = policy.merged(facts, Delta(7, 2, 0, 1, 0, 0, (FactEntry("b", 1, b"2"),)), 0.0)
    assert told is not None and (told.boot, told.version, told.values) == (2, 1, {"b": b"2"})


def test_more_entries_than_a_host_may_have_are_not_taken() -> None:
    many = tuple(FactEntry(f"k{number}", number + 1, b"") for number in range(KEYS_MAX + TOMBSTONES_MAX))
    facts = policy.merged(Facts(), Delta(7, 1, 0, 40, 0, 0, many), 0.0)
    assert facts is not None
    more = Delta(7, 1, 40, 41, 0, 0, (FactEntry("one more", 41, b""),))
    assert policy.merged(facts, more, 0.0) is None


def test_the_time_on_the_way_counts_into_the_age() -> None:
    facts = Facts(1, 3, 0, fresh_s=10.0)
    told = policy.merged(Facts(), policy.delta(7, facts, 0, now_s=12.5), now_s=100.0)
    assert told is not None and told.fresh_s == 97.5


def test_writing_the_same_again_is_no_news() -> None:
    facts = policy.written(Facts(boot=1), "a", b"1", 0.0)
    assert policy.written(facts, "a", b"1", 5.0) is facts
    assert policy.written(facts, "never there", None, 5.0) is facts


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    facts = Facts(boot=1)
    with pytest.raises(ValueError, match="256"):
        policy.written(facts, "a", bytes(VALUE_BYTES_MAX + 1), 0.0)
    with pytest.raises(ValueError, match="key"):
        policy.written(facts, "", b"", 0.0)
    with pytest.raises(ValueError, match="key"):
        policy.written(facts, "k" * 65, b"", 0.0)
    for number in range(KEYS_MAX):
        facts = policy.written(facts, f"{number}", b"x", 0.0)
    with pytest.raises(ValueError, match="32 keys"):
        policy.written(facts, "one more", b"x", 0.0)
    facts = Facts(boot=1)
    for key in "abc":
        facts = policy.written(facts, key, bytes(VALUE_BYTES_MAX), 0.0)
    with pytest.raises(ValueError, match="960"):
        policy.written(facts, "d", bytes(VALUE_BYTES_MAX), 0.0)


def test_a_removed_key_makes_room_for_another() -> None:
    facts = Facts(boot=1)
    for number in range(KEYS_MAX):
        facts = policy.written(facts, f"{number}", b"x", 0.0)
    facts = policy.written(facts, "0", None, 0.0)
    facts = policy.written(facts, "one more", b"x", 0.0)
    assert len(facts.values) == KEYS_MAX


def test_old_removals_are_forgotten_when_there_are_too_many_or_no_room() -> None:
    facts = Facts(boot=1)
    for number in range(TOMBSTONES_MAX + 3):
        facts = policy.written(facts, f"{number}", b"x", 0.0)
        facts = policy.written(facts, f"{number}", None, 0.0)
    assert len(facts.entries) == TOMBSTONES_MAX and facts.floor == 6
    long = Facts(boot=1)
    for number in range(TOMBSTONES_MAX):
        long = policy.written(long, f"{number}" + "k" * 60, b"x", 0.0)
        long = policy.written(long, f"{number}" + "k" * 60, None, 0.0)
    for key in "abc":
        long = policy.written(long, key, bytes(VALUE_BYTES_MAX), 0.0)
    assert policy.map_bytes(long.entries) <= MAP_BYTES_MAX and len(long.values) == 3


@given(writes)
def test_a_whole_map_always_fits_into_one_datagram(story: list[tuple[str, bytes | None]]) -> None:
    facts = own(story)[-1]
    whole = policy.delta(U63_MAX, facts, 0, 0.0)
    empty = Delta(U63_MAX, U63_MAX, U32_MAX, U32_MAX, U32_MAX, U32_MAX, ())
    assert size(whole) <= size(empty) + 2 + policy.map_bytes(facts.entries)


def test_the_largest_map_of_the_longest_name_fits_into_the_smallest_datagram() -> None:
    from gossip.packet import budget

    entries = tuple(FactEntry(f"{number:02}" + "k" * 7, U32_MAX, b"v" * 10) for number in range(32))
    assert policy.map_bytes({entry.key: entry for entry in entries}) == MAP_BYTES_MAX
    whole = Delta(U63_MAX, U63_MAX, U32_MAX, U32_MAX, U32_MAX, U32_MAX, entries)
    assert size(whole) <= budget(DATAGRAM_BYTES, "n" * 63)


@given(st.text(min_size=1, max_size=64), st.binary(max_size=256))
def test_an_entry_costs_no_more_than_it_is_counted_for(key: str, value: bytes) -> None:
    entry = FactEntry(key, U32_MAX, value)
    cost = size(Delta(0, 0, 0, 0, 0, 0, (entry,))) - size(Delta(0, 0, 0, 0, 0, 0, ()))
    assert cost <= ENTRY_BYTES + len(key.encode()) + len(value)


@given(st.lists(st.integers(0, U63_MAX), unique=True, max_size=50), st.integers(1, 10))
def test_ranges_cover_every_identity_once(identities: list[int], per_batch: int) -> None:
    known = [KnownVersion(identity, 1, 1) for identity in sorted(identities)]
    batches = [known[start : start + per_batch] for start in range(0, len(known), per_batch)] or [[]]
    found = policy.ranges(batches)
    assert found[0][0] == 0 and found[-1][1] == U63_MAX
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(found))
    assert all(low <= row.identity <= high for low, high, known in found for row in known)


def test_a_map_written_anew_beats_what_was_known_before() -> None:
    facts = policy.written(policy.written(Facts(boot=1), "a", b"1", 0.0), "b", b"2", 0.0)
    anew = policy.renumbered(facts, 500, 0.0)
    assert anew.version > 500 and anew.values == facts.values
    told = policy.merged(Facts(1, 500, 0, 0.0, {"z": FactEntry("z", 3, b"old")}), policy.delta(7, anew, 0, 0.0), 0.0)
    assert told is not None and told.values == facts.values
    assert policy.since(anew, 1, 500) == 0


@given(st.integers(1, U32_MAX), st.integers(-32767, 32767))
def test_which_version_is_newer_holds_over_the_turn_of_the_counter(version: int, apart: int) -> None:
    other = max(1, version + apart)
    assert messages.behind(messages.wrapped(other), version) == version - other
    assert (
        messages.behind(messages.wrapped(0), version) == version and messages.behind(messages.wrapped(version), 0) < 0
    )
    assert messages.behind(messages.wrapped(0), 0) == 0


@given(st.floats(0, 700))
def test_an_age_on_its_way_never_gets_younger(age_s: float) -> None:
    steps = messages.steps(age_s)
    assert steps == messages.AGE_UNKNOWN or -1e-6 <= steps * messages.AGE_STEP_S - age_s <= messages.AGE_STEP_S

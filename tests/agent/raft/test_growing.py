"""The leader lets hosts vote by itself: as many as wanted, one at a time, and never where a person has decided."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.raft import policy
from agent.raft.messages import ChangeVoters, Configuration, Voter
from agent.raft.service.settings import LeaderSettings
from agent.raft.service.voters import VotersSeen, decide, grown
from covey.core.ids import HostId

NOBODY = HostId("")
ALL = [HostId(name) for name in "abcdefg"]
hosts = st.frozensets(st.sampled_from(ALL))


def configuration(voters: str, learner: str = "", leaving: str = "", by_people: bool = False) -> Configuration:
    made = Configuration(tuple(Voter(HostId(name)) for name in voters), bytes(8), HostId(learner), HostId(leaving))
    return msgspec.structs.replace(made, by_people=by_people)


def seen(alive: str, silent: str = "", strangers: str = "") -> VotersSeen:
    everybody = frozenset(map(HostId, alive))
    return VotersSeen(everybody, frozenset(), everybody - {*silent}, frozenset(map(HostId, strangers)))


def learner(now: Configuration, rack: VotersSeen, stable: str, wanted: int = 3) -> str:
    return str(grown(now, rack, frozenset(map(HostId, stable)), wanted).learner)


@pytest.mark.parametrize(
    ("voters", "alive", "stable", "wanted", "next"),
    [
        ("a", "ab", "b", 3, ""),  # two voters survive no loss, and need both
        ("a", "abc", "bc", 3, "b"),
        ("a", "abc", "c", 3, ""),  # b has just come
        ("ab", "abc", "c", 3, "c"),
        ("ab", "ab", "", 3, ""),
        ("abc", "abcde", "de", 3, ""),
        ("abc", "abcde", "de", 5, "d"),
        ("abcd", "abcde", "e", 5, "e"),
        ("a", "abcde", "bcde", 1, ""),
        ("abcde", "abcdefg", "fg", 5, ""),
    ],
)
def test_as_many_hosts_as_wanted_vote_and_an_odd_number(
    voters: str, alive: str, stable: str, wanted: int, next: str
) -> None:
    assert learner(configuration(voters), seen(alive), stable, wanted) == next


def test_nothing_is_added_while_a_voter_is_silent_or_a_host_is_of_another_rack() -> None:
    assert learner(configuration("abc"), seen("abcde", silent="b"), "de", 5) == ""
    assert learner(configuration("a"), seen("abcd", silent="b"), "bcd") == "c"
    assert learner(configuration("a"), seen("abcd", strangers="b"), "bcd") == "c"


def test_a_change_of_a_person_is_the_last_word() -> None:
    rack = seen("abcd")
    asked = decide(ChangeVoters(bytes(8), HostId("b"), NOBODY, False), configuration("a"), rack)
    assert asked.by_people and asked.learner == "b"
    for now in (configuration("a", by_people=True), asked, configuration("abc", leaving="b", by_people=True)):
        assert grown(now, rack, frozenset(ALL), 5) == now


def test_a_person_calls_off_what_the_leader_began_for_good() -> None:
    begun = grown(configuration("a"), seen("abc"), frozenset(ALL), 3)
    assert begun.learner == "b"
    off = decide(ChangeVoters(bytes(8), NOBODY, HostId("b"), False), begun, seen("abc"))
    assert off == configuration("a", by_people=True) and grown(off, seen("abc"), frozenset(ALL), 3) == off


def test_an_addition_whose_host_is_lost_is_called_off_and_another_follows() -> None:
    begun = configuration("a", learner="b")
    assert grown(begun, seen("abcd"), frozenset(ALL), 3) == begun
    off = grown(begun, seen("acd"), frozenset(ALL), 3)
    assert off == configuration("a") and learner(off, seen("acd"), "cd") == "c"


@given(
    st.sets(st.sampled_from(ALL), min_size=1, max_size=5),
    hosts,
    hosts,
    hosts,
    hosts,
    st.booleans(),
    st.sampled_from((1, 3, 5)),
)
def test_whatever_is_asked_for_is_one_step_and_takes_no_vote_away(
    voters: set[HostId],
    alive: frozenset[HostId],
    heard: frozenset[HostId],
    strangers: frozenset[HostId],
    stable: frozenset[HostId],
    by_people: bool,
    wanted: int,
) -> None:
    now = configuration("".join(sorted(voters)), by_people=by_people)
    rack = VotersSeen(alive, frozenset(), heard, strangers)
    found = grown(now, rack, stable, wanted)
    assert policy.one_step(now, found) and found.voters == now.voters and not found.leaving
    if found != now:
        assert not by_people and found.learner in stable & alive & heard and found.learner not in voters | strangers
        assert len(voters) < wanted and voters <= heard


@pytest.mark.parametrize("wanted", [0, 2, 4, 7])
def test_a_number_that_is_not_odd_or_too_large_is_refused(wanted: int) -> None:
    with pytest.raises(ValueError, match="expected 1, 3 or 5"):
        LeaderSettings(voters_wanted=wanted)

"""A new host gets the key by a token, once and in time; nobody else does, and nothing crashes either side."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId
from gossip.joining.machine import TOKENS_MAX, JoinTokens
from gossip.joining.messages import (
    ASK_BYTES,
    GIVING_BYTES_MAX,
    ID_BYTES,
    MAC_BYTES,
    SECRET_BYTES,
    SEEDS_MAX,
    TOKEN_CHARACTERS,
    VERSION,
    VOTERS_MAX,
    JoinRefusal,
    JoinToken,
    RackGiven,
    decode_given,
    encode_given,
    is_ask,
    pack_ask,
    parsed,
    read_answer,
    read_ask,
)
from gossip.joining.policy import REPLIES_PER_S, TOKEN_S, JoinAsking, by_key, give, mac, voters_to_name
from gossip.settings import DATAGRAM_BYTES

KEY, OTHER = b"k" * 32, b"o" * 32
PRIVATE, SERVER = b"\1" * 32, b"\2" * 32
GPU1 = HostId("gpu1")
GIVEN = RackGiven(GPU1, (KEY,), "covey", (GPU1,), ("10.0.0.1:7946",))


def made(tokens: JoinTokens, seed: int = 1, now_s: float = 0.0) -> JoinToken:
    token = tokens.make(random.Random(seed).randbytes(ID_BYTES + SECRET_BYTES), now_s)
    assert token is not None
    return token


def outcome(tokens: JoinTokens, asking: JoinAsking, now_s: float = 1.0) -> tuple[str, RackGiven | JoinRefusal | None]:
    replied = tokens.asked(asking.datagram, GIVEN, SERVER, now_s)
    return replied.outcome, asking.answer(replied.reply)


# ---- one token, one host, one hour ----


def test_a_host_with_a_token_is_given_the_key() -> None:
    tokens = JoinTokens((KEY,))
    assert outcome(tokens, JoinAsking(made(tokens), PRIVATE)) == ("given", GIVEN)


def test_an_ask_that_is_sent_again_gets_the_same_answer() -> None:
    tokens = JoinTokens((KEY,))
    asking = JoinAsking(made(tokens), PRIVATE)
    first = tokens.asked(asking.datagram, GIVEN, SERVER, 1.0)
    again = tokens.asked(asking.datagram, GIVEN, b"\3" * 32, TOKEN_S + 9)
    assert (first.outcome, again.outcome) == ("given", "repeated") and first.reply == again.reply


def test_a_used_an_expired_a_wrong_and_an_unknown_token_are_told_apart() -> None:
    tokens = JoinTokens((KEY,))
    used, late = made(tokens, 1), made(tokens, 2)
    assert outcome(tokens, JoinAsking(used, PRIVATE))[0] == "given"
    wrong = JoinToken(late.id, late.rack, b"x" * SECRET_BYTES)
    cases = (
        ("used", used, 2.0),
        ("wrong", wrong, 2.0),
        ("unknown", made(JoinTokens((KEY,)), 3), 2.0),
        ("expired", late, TOKEN_S),
    )
    for reason, token, now_s in cases:
        word, answer = outcome(tokens, JoinAsking(token, b"\4" * 32), now_s)
        assert word == reason and isinstance(answer, JoinRefusal) and answer.reason == reason


def test_a_wrong_secret_does_not_use_the_token_up() -> None:
    tokens = JoinTokens((KEY,))
    token = made(tokens)
    for n in range(5):
        assert (
            outcome(tokens, JoinAsking(JoinToken(token.id, token.rack, bytes([n]) * SECRET_BYTES), PRIVATE))[0]
            == "wrong"
        )
    assert outcome(tokens, JoinAsking(token, PRIVATE)) == ("given", GIVEN)


def test_a_host_with_the_key_needs_no_token_and_one_with_another_key_is_refused() -> None:
    tokens = JoinTokens((OTHER, KEY))
    given = RackGiven(GPU1, (OTHER, KEY), "covey", (GPU1,), ())
    asking = JoinAsking(by_key(KEY), PRIVATE)
    replied = tokens.asked(asking.datagram, given, SERVER, 1.0)
    assert replied.outcome == "given" and replied.by_key and asking.answer(replied.reply) == given
    assert tokens.asked(asking.datagram, given, b"\5" * 32, 1.0).reply == replied.reply, "a copy costs no new answer"
    assert outcome(tokens, JoinAsking(by_key(b"x" * 32), PRIVATE))[0] == "wrong"


# ---- what an attacker gets ----


def test_the_key_crosses_the_wire_sealed_and_a_copy_of_all_datagrams_opens_nothing() -> None:
    tokens = JoinTokens((KEY,))
    token = made(tokens)
    asking = JoinAsking(token, PRIVATE)
    reply = tokens.asked(asking.datagram, GIVEN, SERVER, 1.0).reply
    assert KEY not in reply and token.secret not in asking.datagram + reply
    assert JoinAsking(token, b"\6" * 32).answer(reply) is None, "the token alone does not open what was recorded"
    eavesdropper = JoinAsking(token, b"\6" * 32)
    eavesdropper.datagram = asking.datagram
    assert eavesdropper.answer(reply) is None


def test_a_member_that_does_not_know_the_token_is_not_trusted() -> None:
    token = made(JoinTokens((KEY,)))
    asking = JoinAsking(token, PRIVATE)
    ask = read_ask(asking.datagram)
    assert ask is not None
    for secret, believed in ((b"i" * SECRET_BYTES, None), (token.secret, GIVEN)):
        answer = give(JoinToken(token.id, token.rack, secret), ask, asking.datagram, GIVEN, SERVER)
        assert answer is not None and asking.answer(answer) == believed


def test_a_token_is_of_the_rack_whose_key_sealed_when_it_was_made() -> None:
    tokens = JoinTokens((KEY,))
    asking = JoinAsking(made(tokens), PRIVATE)
    elsewhere = RackGiven(GPU1, (OTHER,), "covey", (GPU1,), ())
    assert asking.answer(tokens.asked(asking.datagram, elsewhere, SERVER, 1.0).reply) is None


def test_a_flood_is_answered_slowly_and_keeps_no_token_from_its_host() -> None:
    tokens = JoinTokens((KEY,))
    strange, token = JoinAsking(made(JoinTokens((KEY,)), 9), PRIVATE), made(tokens)
    words = [outcome(tokens, strange, 1.0)[0] for _ in range(200)]
    assert words.count("unknown") <= REPLIES_PER_S + 1 and words[-1] == "flooded"
    assert outcome(tokens, JoinAsking(token, PRIVATE), 1.0) == ("given", GIVEN)
    assert outcome(tokens, strange, 2.0)[0] == "unknown"


def test_tokens_that_ended_make_room_and_good_ones_do_not() -> None:
    tokens = JoinTokens((KEY,))
    for seed in range(TOKENS_MAX):
        made(tokens, seed)
    more = random.Random(5000).randbytes(ID_BYTES + SECRET_BYTES)
    assert tokens.make(more, 1.0) is None
    assert tokens.make(more, TOKEN_S) is not None


# ---- the text of a token, and what a new host is told ----


@given(st.binary(min_size=ID_BYTES + SECRET_BYTES, max_size=ID_BYTES + SECRET_BYTES))
def test_a_token_is_read_as_it_was_written_in_capitals_too(data: bytes) -> None:
    token = JoinTokens((KEY,)).make(data, 0.0)
    if token is not None:
        assert len(token.text) == TOKEN_CHARACTERS
        assert parsed(f" {token.text}\n") == parsed(token.text.upper()) == token


@given(st.text(max_size=80) | st.text("abcdefg234567", min_size=48, max_size=48).map(lambda text: f"covey-{text}"))
def test_any_text_is_a_token_or_none(text: str) -> None:
    found = parsed(text)
    assert found is None or found.text == text.strip().lower()


@pytest.mark.parametrize(
    ("voters", "leader", "named"),
    [
        ("a", "a", "a"),
        ("ab", "b", "b"),
        ("abc", "b", "abc"),
        ("abcd", "d", "abd"),
        ("abcdefg", "g", "abcdg"),
        ("ab", "", "a"),
    ],
)
def test_a_new_host_names_an_odd_number_of_voters_and_the_leader(voters: str, leader: str, named: str) -> None:
    assert voters_to_name([HostId(host) for host in voters], HostId(leader) or None) == tuple(named)


def test_the_longest_giving_fits_into_a_datagram() -> None:
    voters = tuple(HostId(f"{n}{'v' * 62}") for n in range(VOTERS_MAX))
    longest = RackGiven(HostId("g" * 63), (KEY, OTHER, b"3" * 32), "c" * 64, voters, ("1" * 80,) * SEEDS_MAX)
    tokens = JoinTokens((KEY,))
    asking = JoinAsking(made(tokens), PRIVATE)
    reply = tokens.asked(asking.datagram, longest, SERVER, 1.0).reply
    assert len(reply) <= GIVING_BYTES_MAX == DATAGRAM_BYTES and asking.answer(reply) == longest


# ---- nothing crashes it ----


@given(st.binary(max_size=300) | st.binary(min_size=ASK_BYTES - 2, max_size=ASK_BYTES - 2).map(lambda b: b"\x4a\1" + b))
def test_random_bytes_get_nothing_but_a_refusal(datagram: bytes) -> None:
    tokens = JoinTokens((KEY,))
    made(tokens)
    replied = tokens.asked(datagram, GIVEN, SERVER, 1.0)
    assert replied.outcome in ("malformed", "unknown", "wrong", "version")
    assert len(replied.reply) < ASK_BYTES, "a reply is no longer than what it answers"
    assert is_ask(datagram) or read_ask(datagram) is None


@given(st.integers(0, ASK_BYTES - 1), st.integers(1, 255))
def test_an_ask_with_one_byte_changed_is_refused_or_dropped(place: int, change: int) -> None:
    tokens = JoinTokens((KEY,))
    datagram = bytearray(JoinAsking(made(tokens), PRIVATE).datagram)
    datagram[place] ^= change
    assert tokens.asked(bytes(datagram), GIVEN, SERVER, 1.0).outcome in ("malformed", "unknown", "wrong", "version")


def test_an_ask_of_another_version_is_told_so() -> None:
    tokens = JoinTokens((KEY,))
    asking = JoinAsking(made(tokens), PRIVATE)
    asking.datagram = bytes((asking.datagram[0], VERSION + 1)) + asking.datagram[2:]
    assert outcome(tokens, asking)[1] == JoinRefusal(read_answer_of(tokens, asking), "version")


def read_answer_of(tokens: JoinTokens, asking: JoinAsking) -> bytes:
    found = read_answer(tokens.asked(asking.datagram, GIVEN, SERVER, 1.0).reply)
    assert found is not None
    return found.of


@given(st.binary(max_size=1500) | st.binary(max_size=1300).map(lambda data: b"\x4b\1" + data))
def test_random_bytes_are_no_answer(datagram: bytes) -> None:
    asking = JoinAsking(by_key(KEY), PRIVATE)
    assert asking.answer(datagram) is None


@given(st.integers(0, 5000), st.integers(1, 255))
def test_an_answer_with_one_byte_changed_is_not_believed(place: int, change: int) -> None:
    tokens = JoinTokens((KEY,))
    asking = JoinAsking(made(tokens), PRIVATE)
    reply = bytearray(tokens.asked(asking.datagram, GIVEN, SERVER, 1.0).reply)
    reply[place % len(reply)] ^= change
    assert asking.answer(bytes(reply)) is None


@given(st.binary(max_size=400))
def test_whatever_was_sealed_is_read_within_bounds(plain: bytes) -> None:
    found = decode_given(plain)
    assert found is None or decode_given(encode_given(found)) == found


@pytest.mark.parametrize("bad", [b"\0" * 32, b"\1" + b"\0" * 31, b"\xff" * 32])
def test_a_public_key_that_is_none_is_dropped(bad: bytes) -> None:
    """Points of small order would make a shared secret that anybody knows."""
    tokens = JoinTokens((KEY,))
    token = made(tokens)
    signed = pack_ask(token.id, bad, bytes(MAC_BYTES))[:-MAC_BYTES]
    replied = tokens.asked(signed + mac(token.secret, signed), GIVEN, SERVER, 1.0)
    assert replied.outcome in ("malformed", "given")
    if bad != b"\xff" * 32:
        assert replied.outcome == "malformed"

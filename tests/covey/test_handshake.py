"""Both ends prove that they know a key; strangers are limited in number, and never hold up others."""

import pytest

from covey.wire import handshake
from covey.wire.handshake import NONCE_BYTES, PROOF_BYTES, Strangers

KEY, HELLO, NONCE = b"k" * 16, b"hello" + b"c" * NONCE_BYTES, b"s" * NONCE_BYTES


def test_a_proof_is_good_for_one_key_one_role_one_hello_and_one_nonce() -> None:
    proof = handshake.proof_of_client(KEY, HELLO, NONCE)
    assert len(proof) == PROOF_BYTES
    assert handshake.is_proof(proof, handshake.proof_of_client(KEY, HELLO, NONCE))
    for other in (
        handshake.proof_of_client(b"x" * 16, HELLO, NONCE),
        handshake.proof_of_server(KEY, HELLO, NONCE),
        handshake.proof_of_client(KEY, b"x" + HELLO[1:], NONCE),
        handshake.proof_of_client(KEY, HELLO, b"x" * NONCE_BYTES),
    ):
        assert not handshake.is_proof(proof, other)


def test_nobody_knows_a_secret_that_is_none() -> None:
    """Anyone could compute a proof under the empty key, and present an empty secret."""
    for prove in (handshake.proof_of_client, handshake.proof_of_server):
        with pytest.raises(ValueError, match="without a secret"):
            prove(b"", HELLO, NONCE)
    assert handshake.is_secret(KEY, KEY) and not handshake.is_secret(KEY[1:], KEY)
    assert not handshake.is_secret(b"", b"") and not handshake.is_secret(KEY, b"")


def test_a_challenge_is_read_back() -> None:
    found = handshake.parse_challenge(handshake.challenge(KEY, HELLO, NONCE))
    assert found == (NONCE, handshake.proof_of_server(KEY, HELLO, NONCE))


def test_the_oldest_stranger_of_an_address_makes_room_for_its_next() -> None:
    strangers: Strangers[int] = Strangers(per_address_max=2, all_max=10)
    assert [strangers.come(number, "a") for number in range(4)] == [None, None, 0, 1]
    assert strangers.come(9, "b") is None, "another address has nothing to do with it"
    assert len(strangers) == 3
    assert strangers.turned_away == 2


def test_of_too_many_strangers_the_oldest_of_the_largest_crowd_goes() -> None:
    strangers: Strangers[int] = Strangers(per_address_max=9, all_max=4)
    for number, address in enumerate("abbb"):
        assert strangers.come(number, address) is None
    assert strangers.come(5, "c") == 1
    assert strangers.come(6, "d") == 2


def test_who_has_proven_itself_is_no_stranger_any_more_and_is_never_pushed_out() -> None:
    strangers: Strangers[int] = Strangers(per_address_max=1, all_max=10)
    strangers.come(1, "a")
    strangers.go(1)
    strangers.go(1)
    assert strangers.come(2, "a") is None
    assert strangers.come(3, "a") == 2

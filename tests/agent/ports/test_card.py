"""The network card under an address, on this machine."""

import socket

import pytest

from agent.ports.network import card
from agent.ports.network.card import card_now


def test_the_loopback_interface_is_found_and_its_bytes_grow_with_what_is_sent() -> None:
    before = card_now("127.0.0.1")
    assert before is not None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        one.sendto(bytes(10_000), one.getsockname())
        one.recv(20_000)
    after = card_now("127.0.0.1")
    assert after is not None and after.name == before.name
    assert after.sent_bytes - before.sent_bytes >= 10_000 and after.received_bytes - before.received_bytes >= 10_000


def test_an_address_of_no_interface_and_no_address_have_no_card() -> None:
    assert card_now("203.0.113.7") is None and card_now("gpu1") is None and card_now("") is None
    assert card_now("2001:db8::7") is None


def test_counters_that_cannot_be_read_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    monkeypatch.setattr(card, "DEVICES", Path("/nowhere"))
    assert card_now("127.0.0.1") is None

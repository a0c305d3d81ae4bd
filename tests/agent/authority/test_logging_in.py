"""`agent.login` on a rack of whole agents: whom a certificate names, and that every host believes it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.api.login import DAYS_MAX, LoginView
from agent.authority.certificates import NotBelieved
from chaos.askers import ANN, EVE, ROOT, VISITOR, asked_by
from chaos.rackworld import SimRack
from covey.core.errors import Refused
from plugins.askers import Asker
from tests.agent.authority.test_certificates import request
from tests.families import examples


@pytest.fixture(scope="module")
def rack() -> Iterator[SimRack]:
    with SimRack(5, hosts=2, watched=False).start() as rack:
        rack.run(20)
        yield rack


def login(rack: SimRack, asker: Asker, **asked: Any) -> LoginView:
    found = rack.ask("h1", "agent.login", asked_by(asker, {"csr": request(), **asked}))
    assert isinstance(found, LoginView)
    return found


def der(made: LoginView) -> bytes:
    return x509.load_pem_x509_certificate(made.certificate.encode()).public_bytes(Encoding.DER)


def test_a_certificate_names_whom_the_kernel_named_whatever_the_request_says(rack: SimRack) -> None:
    claims = {"user": "root", "uid": 0, "name": "root", "days": 2, "by": "root", "role": "operator"}
    made = login(rack, EVE, csr=request(name="root"), **claims)
    now_s = rack.agents["h1"].env.clock.wall_s()
    assert (made.user, made.uid) == ("eve", EVE.uid) and abs(made.until_wall_s - now_s - 2 * 86_400) < 5
    for host in ("h1", "h2"):
        named = rack.agents[host].authority.named_by(der(made))
        assert named == ("eve", EVE.uid, made.until_wall_s), "every host of the rack believes it"
    assert made.authority == rack.agents["h1"].authority.pem
    with SimRack(6, hosts=1, watched=False).start() as other:
        other.run(10)
        other_key = msgspec.structs.replace(other.agents["h1"].keyring._ring, keys=(b"x" * 32,))
        other.agents["h1"].keyring._ring = other_key
        found = other.agents["h1"].authority.named_by(der(made))
        assert isinstance(found, NotBelieved) and found.reason == "certificate_of_others"


def test_the_event_log_of_the_host_says_for_whom_and_for_how_long(rack: SimRack) -> None:
    login(rack, ANN, days=DAYS_MAX)
    lines = rack.ask("h1", "agent.why", asked_by(ROOT, {"id": "host/h1"}))
    said = [line.reason for line in getattr(lines, "data", lines) if line.event == "certificate made"]
    assert f"for ann (uid {ANN.uid}), good for {DAYS_MAX} days" in said
    for _ in range(5):
        login(rack, ANN, days=DAYS_MAX)
    lines = rack.ask("h1", "agent.why", asked_by(ROOT, {"id": "host/h1"}))
    again = [line.reason for line in getattr(lines, "data", lines) if line.event == "certificate made"]
    assert again == said, "a user who logs in again and again pushes no other event out"


@pytest.mark.parametrize("days", [0, -1, DAYS_MAX + 1, True, "1", None, 1.5, [], 1 << 70])
def test_what_is_no_number_of_days_is_refused(rack: SimRack, days: Any) -> None:
    with pytest.raises(Refused, match="number of days from 1 to") as no:
        login(rack, ANN, days=days)
    assert no.value.code == 2 and no.value.next


@settings(max_examples=examples(100), deadline=None)
@given(st.text(max_size=60) | st.binary(max_size=20) | st.none() | st.integers() | st.lists(st.text(), max_size=2))
def test_what_is_no_request_is_refused_in_three_lines(rack: SimRack, csr: Any) -> None:
    command = rack.agents["h1"].logins.commands()["agent.login"]
    with pytest.raises(Refused) as no:
        asyncio.run(_awaited(command(asked_by(ANN, {"csr": csr}))))
    assert no.value.code == 2 and no.value.what and no.value.why and no.value.next


async def _awaited(work: Any) -> Any:
    return await work


def test_root_the_agents_user_and_whoever_comes_over_tcp_get_none(rack: SimRack) -> None:
    certified = msgspec.structs.replace(ANN, by_certificate=True)
    nameless = Asker(64_100, "", "viewer"), Asker(64_101, "a" * 65, "viewer")
    for asker in (ROOT, VISITOR, certified, Asker(990, "covey", "operator", is_agent=True), *nameless):
        with pytest.raises(Refused, match="no certificate was made") as no:
            login(rack, asker)
        assert no.value.code == 4 and no.value.next, asker

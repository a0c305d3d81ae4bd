"""UDP, and addresses as text."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.datagrams import UdpDatagrams, ip_port, ip_port_text
from tests.agent.here import both_loops, run_on, until


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)), st.integers(0, 65535))
def test_an_address_is_read_back_as_it_was_written(ip: object, port: int) -> None:
    assert ip_port(ip_port_text((str(ip), port))) == (str(ip), port)


@given(st.text(max_size=30))
def test_whatever_is_no_address_is_refused_with_what_was_expected(text: str) -> None:
    try:
        host, port = ip_port(text)
    except OSError as error:
        assert "expected IP:PORT" in str(error)
    else:
        assert host
        assert 0 <= port <= 65535


@both_loops
@pytest.mark.parametrize("ip", ["127.0.0.1", "[::1]"])
def test_a_datagram_arrives_whole_with_the_address_it_came_from(loop: str, ip: str) -> None:
    async def story() -> None:
        got: list[tuple[bytes, str]] = []
        here = await UdpDatagrams().open(f"{ip}:0", lambda data, sender: got.append((data, sender)))
        there = await UdpDatagrams().open(f"{ip}:0", lambda data, sender: None)
        there.send(b"x" * 1400, here.address)
        await until(lambda: got)
        assert got == [(b"x" * 1400, there.address)]
        here.close()
        there.close()
        await asyncio.sleep(0)

    run_on(loop, story())


@both_loops
def test_sending_never_raises_for_what_the_network_or_a_peer_does(loop: str) -> None:
    async def story() -> None:
        got: list[bytes] = []
        here = await UdpDatagrams().open("127.0.0.1:0", lambda data, sender: got.append(data))
        for nonsense in ("127.0.0.1:1", "nobody", "256.1.1.1:5", "127.0.0.1:99999", "unix:/tmp/x", "[::1]:5"):
            here.send(b"lost", nonsense)
        here.send(bytes(70_000), here.address)
        here.send(b"kept", here.address)
        await until(lambda: got)
        assert got == [b"kept"]
        here.close()
        here.send(b"late", here.address)

    run_on(loop, story())


@both_loops
def test_an_address_that_is_taken_is_refused(loop: str) -> None:
    async def story() -> None:
        first = await UdpDatagrams().open("127.0.0.1:0", lambda data, sender: None)
        with pytest.raises(OSError):
            await UdpDatagrams().open(first.address, lambda data, sender: None)
        first.close()

    run_on(loop, story())

"""UDP, and addresses as text."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.ports.network.datagrams import UdpDatagrams, ip_port_text
from covey.ports.addresses import ip_port
from tests.agent.here import both_loops, until


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
async def test_a_datagram_arrives_whole_with_the_address_it_came_from(ip: str) -> None:
    got: list[tuple[bytes, str]] = []
    here = await UdpDatagrams().open(f"{ip}:0", lambda data, sender: got.append((data, sender)))
    there = await UdpDatagrams().open(f"{ip}:0", lambda data, sender: None)
    there.send(b"x" * 1400, here.address)
    await until(lambda: got)
    assert got == [(b"x" * 1400, there.address)]
    here.close()
    there.close()
    await asyncio.sleep(0)


@both_loops
async def test_sending_never_raises_for_what_the_network_or_a_peer_does() -> None:
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


@both_loops
async def test_an_address_that_is_taken_is_refused() -> None:
    first = await UdpDatagrams().open("127.0.0.1:0", lambda data, sender: None)
    with pytest.raises(OSError):
        await UdpDatagrams().open(first.address, lambda data, sender: None)
    first.close()


@both_loops
async def test_a_send_that_the_kernel_did_not_take_says_so() -> None:
    """None of these leaves this host: a name, another family, too long, no route from loopback, a closed socket."""
    here = await UdpDatagrams().open("127.0.0.1:0", lambda data, sender: None)
    assert here.send(b"kept", here.address) is True
    for to in ("gpu1:7946", "localhost:7946", "[::1]:7946", "192.0.2.1:7946", "nonsense"):
        assert here.send(b"lost", to) is False, to
    assert here.send(bytes(70_000), here.address) is False
    here.close()
    assert here.send(b"late", here.address) is False


@both_loops
async def test_a_name_is_all_its_addresses_with_the_port_and_an_ip_is_itself() -> None:
    port = UdpDatagrams()
    assert list(await port.resolve("[fd00::7]:1")) == ["[fd00::7]:1"]
    assert "127.0.0.1:7946" in await port.resolve("localhost:7946")
    with pytest.raises(OSError, match=r"[Nn]ot known|No address"):
        await port.resolve("no-such-host.invalid:7946")


@pytest.mark.parametrize("text", ["::1:7946", "fd00::7:7946", "[::1:7946", "::1]:7946", "[gpu1]:7946"])
def test_an_ipv6_address_without_its_brackets_is_refused(text: str) -> None:
    """It could not be told where the address ends and the port begins."""
    with pytest.raises(OSError, match="brackets"):
        ip_port(text)

import asyncio
import gc
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from agent import log as logs
from agent.metrics import CONTROL_CONNECTIONS, CONTROL_LINKS
from agent.ports.network import handshake_limit, links
from agent.ports.network.links import HELD_MESSAGES_MAX, MESSAGE_BYTES_MAX, QUIET_S, RECONNECT_S, ZmqLinks, _turn_away
from covey.core.ids import HostId
from covey.ports.addresses import reached_at
from tests.agent.here import until

GPU1, GPU2 = HostId("gpu1"), HostId("gpu2")


class End:
    def __init__(self) -> None:
        self.links = ZmqLinks(logs.for_host("test"))
        self.heard: asyncio.Queue[tuple[HostId, bytes]] = asyncio.Queue()

    async def open(self) -> "End":
        await self.links.open("127.0.0.1:0", lambda sender, data: self.heard.put_nowait((sender, data)))
        return self

    async def next(self) -> tuple[HostId, bytes]:
        return await asyncio.wait_for(self.heard.get(), 5)


async def send_until_heard(sender: End, to: HostId, data: bytes, receiver: End) -> tuple[HostId, bytes]:
    """Send until it is heard: a link may lose the first messages while it connects, by its contract."""
    for _ in range(100):
        sender.links.send(to, data)
        try:
            return await asyncio.wait_for(receiver.heard.get(), 0.05)
        except TimeoutError:
            continue
    raise AssertionError("nothing arrived")


async def send_until(sender: End, to: HostId, data: bytes, true: Callable[[], object]) -> None:
    """Send again and again: a link may lose what it was given while it connects."""

    def sent() -> object:
        sender.links.send(to, data)
        return true()

    await until(sent)


async def test_the_sender_is_who_its_key_says_and_strangers_are_not_heard() -> None:
    one, two, stranger = [await End().open() for _ in range(3)]
    try:
        one.links.know(GPU2, two.links.address, two.links.public_key)
        two.links.know(GPU1, one.links.address, one.links.public_key)
        assert await send_until_heard(one, GPU2, b"hello", two) == (GPU1, b"hello")

        stranger.links.know(GPU2, two.links.address, two.links.public_key)
        await send_until(stranger, GPU2, b"let me in", lambda: two.links.counters["refused_key"] >= 2)
        while not two.heard.empty():
            assert two.heard.get_nowait()[1] == b"hello"
    finally:
        for end in (one, two, stranger):
            await end.links.close()


async def test_while_nobody_answers_which_keys_are_known_no_handshake_succeeds() -> None:
    """ZeroMQ asks for each key, and lets everybody in where nobody answers, unless it is told not to."""
    one, two = [await End().open() for _ in range(2)]
    try:
        authenticator = two.links._authenticator
        assert authenticator is not None
        two.links.know(GPU1, one.links.address, one.links.public_key)
        authenticator.stop()
        one.links.know(GPU2, two.links.address, two.links.public_key)
        tried = lambda: two.links.counters["accepted"] >= 3 or two.links.counters["handshakes"]  # noqa: E731
        await send_until(one, GPU2, b"hello", tried)
        assert two.links.counters["handshakes"] == 0 and two.heard.empty()
    finally:
        for end in (one, two):
            await end.links.close()


async def test_a_forgotten_key_is_not_heard_on_a_connection_that_still_stands() -> None:
    one, two = [await End().open() for _ in range(2)]
    try:
        one.links.know(GPU2, two.links.address, two.links.public_key)
        two.links.know(GPU1, one.links.address, one.links.public_key)
        await send_until_heard(one, GPU2, b"hello", two)
        two.links.forget(GPU1)
        one.links.send(GPU2, b"still me")
        await until(lambda: two.links.counters["dropped"])
        while not two.heard.empty():
            assert two.heard.get_nowait()[1] == b"hello"
    finally:
        for end in (one, two):
            await end.links.close()


async def test_a_peer_that_refused_us_before_it_knew_our_key_is_reached_once_it_does() -> None:
    one, two = [await End().open() for _ in range(2)]
    try:
        one.links.know(GPU2, two.links.address, two.links.public_key)
        await send_until(one, GPU2, b"early", lambda: two.links.counters["refused_key"])
        two.links.know(GPU1, one.links.address, one.links.public_key)
        assert (await send_until_heard(one, GPU2, b"hello", two))[0] == GPU1
        assert one.links.counters["renewed"] >= 1
    finally:
        for end in (one, two):
            await end.links.close()


async def test_a_host_told_of_again_keeps_its_connection_unless_its_key_is_new() -> None:
    one, two, three = [await End().open() for _ in range(3)]
    try:
        one.links.know(GPU2, two.links.address, two.links.public_key)
        two.links.know(GPU1, one.links.address, one.links.public_key)
        await send_until_heard(one, GPU2, b"hello", two)
        for _ in range(20):
            one.links.know(GPU2, two.links.address, two.links.public_key)
        assert one.links.send(GPU2, b"at once"), "gossip tells the same four times a second"
        while await two.next() != (GPU1, b"at once"):
            pass

        three.links.know(GPU2, two.links.address, two.links.public_key)
        two.links.know(GPU1, three.links.address, three.links.public_key)
        assert await send_until_heard(three, GPU2, b"restarted", two) == (GPU1, b"restarted")
        dropped = two.links.counters["dropped"]
        one.links.send(GPU2, b"my former self")
        await until(lambda: two.links.counters["dropped"] > dropped)
        while not two.heard.empty():
            assert two.heard.get_nowait() == (GPU1, b"restarted"), "it was sent until it was heard"
    finally:
        for end in (one, two, three):
            await end.links.close()


async def test_a_link_is_opened_for_the_first_message_and_closed_when_it_is_quiet() -> None:
    one, two = [await End().open() for _ in range(2)]
    try:
        one.links.know(GPU2, two.links.address, two.links.public_key)
        two.links.know(GPU1, one.links.address, one.links.public_key)
        for turn in (1, 2):
            assert open_links(one) == 0 and one.links.counters["opened"] == turn - 1
            for number in range(20):
                assert one.links.send(GPU2, b"%d" % number)
            assert [await two.next() for _ in range(20)] == [(GPU1, b"%d" % number) for number in range(20)]
            one.links.close_quiet(time.monotonic() + 0.9 * QUIET_S)
            assert open_links(one) == 1
            one.links.close_quiet(time.monotonic() + 1.1 * QUIET_S)
        assert one.links.counters["closed"] == 2 and one.links.counters["not_connected_or_full"] == 0
    finally:
        for end in (one, two):
            await end.links.close()


def open_links(end: End) -> float:
    return end.links.metrics()[CONTROL_LINKS.of("open")]


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_as_many_files_are_open_as_links_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    one = await End().open()
    warned: list[str] = []
    monkeypatch.setattr(one.links._log, "warning", lambda event, **_: warned.append(event))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        key = one.links.public_key
        gc.collect()
        before = files()
        for number in range(1100):
            one.links.know(HostId(f"h{number}"), f"127.0.0.1:{number + 1}", b"%039d" % number + key[:1])
        assert files() <= before, "what other tests left may be closed meanwhile"
        for number in range(200):
            one.links.send(HostId(f"h{number}"), b"hello")
        assert files() - before <= 400 and open_links(one) == 200
        most = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 100, limits[1]))
        assert sum(one.links.send(HostId(f"h{number}"), b"hello") for number in range(200, 700)) < 500
        assert warned == ["no socket is left for a control link"] and one.links.counters["no_socket"] > 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await one.links.close()


async def test_a_peer_that_cannot_be_reached_is_tried_anew_but_not_at_every_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "HELD_S", 0.3)
    one = await End().open()
    try:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            one.links.know(GPU2, f"127.0.0.1:{closed.getsockname()[1]}", one.links.public_key)
            began_s, taken = asyncio.get_running_loop().time(), 0
            while (passed_s := asyncio.get_running_loop().time() - began_s) < 1.2:
                taken += one.links.send(GPU2, b"hello")
                assert passed_s < 0.4 or taken <= HELD_MESSAGES_MAX, "none is held later on"
                await asyncio.sleep(0.005)
        tries = one.links.counters["not_connected_or_full"]
        assert 1 <= one.links.counters["renewed"] <= 1 + passed_s / RECONNECT_S[0] / 2, "pauses double"
        assert tries > 10 * one.links.counters["renewed"]
        assert one.links.counters["sent"] == 0
    finally:
        await one.links.close()


async def test_an_address_that_is_none_is_logged_and_nothing_is_sent() -> None:
    one = await End().open()
    try:
        one.links.know(GPU2, "no port here", one.links.public_key)
        assert not one.links.send(GPU2, b"hello") and not one.links.send(GPU2, b"hello")
        assert one.links.counters["opened"] == 0
    finally:
        await one.links.close()


async def test_plain_and_oversized_input_is_dropped() -> None:
    one, two = [await End().open() for _ in range(2)]
    context = zmq.Context()
    try:
        plain = context.socket(zmq.DEALER)
        plain.linger = 0
        plain.connect(f"tcp://{two.links.address}")
        plain.send(b"no handshake", zmq.NOBLOCK)
        one.links.know(GPU2, two.links.address, two.links.public_key)
        two.links.know(GPU1, one.links.address, one.links.public_key)
        await send_until_heard(one, GPU2, b"hello", two)
        one.links.send(GPU2, b"x" * (MESSAGE_BYTES_MAX + 1))
        assert await send_until_heard(one, GPU2, b"after", two) in ((GPU1, b"after"), (GPU1, b"hello"))
        plain.close()
    finally:
        context.destroy(linger=0)
        for end in (one, two):
            await end.links.close()


async def test_sending_to_nobody_says_so() -> None:
    one = await End().open()
    try:
        assert not one.links.send(GPU2, b"hello")
        one.links.know(GPU2, "127.0.0.1:9", b"short key")
        assert one.links.counters["bad_key"] == 1
        assert not one.links.send(GPU2, b"hello")
    finally:
        await one.links.close()


async def test_an_address_in_use_is_an_error_that_names_it() -> None:
    one = await End().open()
    two = ZmqLinks(logs.for_host("test"))
    try:
        with pytest.raises(OSError, match=one.links.address):
            await two.open(one.links.address, lambda _sender, _data: None)
    finally:
        await one.links.close()
        await two.close()


class Connected:
    """A TCP connection: `here` was accepted on `address`, `there` made it."""

    def __init__(self, ip: str) -> None:
        self._listener = socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)
        self.there = socket.create_connection(self._listener.getsockname()[:2])
        self.here, _ = self._listener.accept()
        port = self._listener.getsockname()[1]
        self.address = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"

    def cut(self) -> bool:
        """Whether the other end hears that the connection is over."""
        self.there.settimeout(0.05)
        try:
            return self.there.recv(1) == b""
        except TimeoutError:
            return False

    def close(self) -> None:
        for end in (self.there, self.here, self._listener):
            end.close()


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_who_is_turned_away_is_connected_to_our_own_port(ip: str) -> None:
    try:
        ours, other = Connected(ip), Connected(ip)
    except OSError:
        pytest.skip(f"no {ip} here")
    try:
        _turn_away(other.here.fileno(), ours.address)
        assert not other.cut(), "the number was another connection's by now"
        _turn_away(ours.there.fileno(), ours.address)
        assert not ours.cut(), "one that we made, to whomever"
        _turn_away(ours.here.fileno(), ours.address)
        assert ours.cut()
        assert ours.here.fileno() >= 0, "closing it is left to ZeroMQ"
    finally:
        for connection in (ours, other):
            connection.close()


def test_a_number_that_is_no_tcp_connection_by_now_is_left_alone(tmp_path: Path) -> None:
    """ZeroMQ may have closed the file and another one may have got its number before the limit hears of it."""
    near, far = socket.socketpair()
    with near, far, socket.socket(socket.AF_UNIX) as bound, (tmp_path / "file").open("wb") as file:
        bound.bind(str(tmp_path / "s7"))
        reader, writer = os.pipe()
        before = set(os.listdir("/proc/self/fd"))
        for number in (near.fileno(), bound.fileno(), file.fileno(), reader, 1 << 19):
            for port in ("t", "7", "0"):
                _turn_away(number, f"127.0.0.1:{port}")
        assert set(os.listdir("/proc/self/fd")) == before, "none is left open, none is closed"
        far.sendall(b"still")
        assert near.recv(5) == b"still"
        os.close(reader)
        os.close(writer)


async def test_who_connects_and_says_nothing_is_counted_and_a_crowd_of_them_is_turned_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake_limit, "UNPROVEN_MAX", 8)
    one, two = [await End().open() for _ in range(2)]
    silent: list[socket.socket] = []
    try:
        ip, _, port = two.links.address.rpartition(":")
        silent += [socket.create_connection((ip, int(port))) for _ in range(20)]
        await until(lambda: two.links.counters["accepted"] == 20)
        await until(lambda: two.links.visitors.open == 8)
        assert two.links.counters["turned_away"] == 12
        assert two.links.metrics()[CONTROL_CONNECTIONS.of("not_shown")] == 8
        silent[0].close()
        await until(lambda: two.links.counters["broken_off"] >= 1)
        one.links.know(GPU2, two.links.address, two.links.public_key)
        two.links.know(GPU1, one.links.address, one.links.public_key)
        assert await send_until_heard(one, GPU2, b"hello", two) == (GPU1, b"hello"), "there is room for honest ones"
        await until(lambda: two.links.counters["silent"] >= 7, 15.0)
        await until(lambda: two.links.metrics()[CONTROL_CONNECTIONS.of("not_shown")] == 0)
        assert two.links.counters["handshakes"] >= 1
    finally:
        for connection in silent:
            connection.close()
        for end in (one, two):
            await end.links.close()


async def test_links_work_on_ipv6_alone() -> None:
    one, two = End(), End()
    try:
        for end in (one, two):
            await end.links.open("[::]:0", lambda sender, data, end=end: end.heard.put_nowait((sender, data)))  # type: ignore[misc]
        at = [reached_at(end.links.address, "::1") for end in (one, two)]
        one.links.know(GPU2, at[1], two.links.public_key)
        two.links.know(GPU1, at[0], one.links.public_key)
        assert (await send_until_heard(one, GPU2, b"hello", two))[0] == GPU1
    finally:
        for end in (one, two):
            await end.links.close()

"""GossipService on real UDP sockets over loopback, and on a loop that is made to stop."""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, cast

import pytest

from covey.core.ids import HostId
from covey.ports.addresses import Address, ip_port, joined
from covey.ports.env import Env
from gossip import metrics
from gossip.joining.messages import RackGiven
from gossip.joining.policy import JoinAsking
from gossip.packet import VERSION, Keyring, Sealer
from gossip.seeds import Seeds
from gossip.service import GossipEvent, GossipService, GossipSettings, HostDown, HostUp
from gossip.types import Sender

KEY = bytes(range(32))
QUICK = {"probe_interval_s": 0.1, "probe_timeout_s": 0.05, "spread_interval_s": 0.05, "gossip_interval_s": 0.02}


class Udp(asyncio.DatagramProtocol):
    """The smallest datagram port: one asyncio endpoint."""

    def __init__(self, received: Callable[[bytes, Address], None]) -> None:
        self._received = received

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.address = "{}:{}".format(*transport.get_extra_info("sockname"))

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._received(data, f"{addr[0]}:{addr[1]}")

    def send(self, data: bytes, to: Address) -> bool:
        host, port = ip_port(to)
        self.transport.sendto(data, (host, port))
        return True

    def close(self) -> None:
        self.transport.close()


class Ports:
    """Clock, datagrams, disk and log of one host; only what gossip uses."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.sick = False
        self.skipped_s = 0.0
        self.warnings: list[str] = []
        self.names: dict[str, list[str]] = {}

    def now_s(self) -> float:
        return time.monotonic() + self.skipped_s

    async def open(self, bind: Address, received: Callable[[bytes, Address], None]) -> Udp:
        host, _, port = bind.rpartition(":")
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_datagram_endpoint(lambda: Udp(received), local_addr=(host, int(port)))
        return protocol

    async def resolve(self, address: Address) -> Sequence[Address]:
        name, port = ip_port(address)
        if name not in self.names:
            raise OSError(-2, f"Name or service not known: {name}")
        return [joined(ip, port) for ip in self.names[name]]

    async def read(self, name: str) -> bytes | None:
        if self.sick:
            raise OSError("sick disk")
        return self.files.get(name)

    def path(self, name: str) -> str:
        return f"/state/{name}"

    async def replace(self, name: str, data: bytes) -> None:
        if self.sick:
            raise OSError("sick disk")
        self.files[name] = data

    def warning(self, event: str, **_: Any) -> None:
        self.warnings.append(event)

    info = warning


class Rack:
    """Services of one test, all ended with it."""

    def __init__(self) -> None:
        self.services: list[GossipService] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.told: dict[str, list[GossipEvent]] = {}
        self.ports: dict[str, Ports] = {}

    def make(self, name: str, keys: Sequence[bytes] = (KEY,), boot: int = 1, **options: Any) -> GossipService:
        ports = self.ports.setdefault(name, Ports())
        env = Env(
            host=HostId(name),
            clock=cast(Any, ports),
            rng=random.Random(name),
            entropy=random.Random(f"{name}{boot}").randbytes,
            spawn=self.spawn,
            log=cast(Any, ports),
            datagrams=cast(Any, ports),
            links=cast(Any, None),
            bytes=cast(Any, None),
            disk=cast(Any, ports),
            processes=cast(Any, None),
            probes=cast(Any, None),
            pages=cast(Any, None),
            run_dir="",
        )
        settings = GossipSettings(**({"bind": "127.0.0.1:0"} | QUICK | options))
        told = self.told.setdefault(name, [])
        service = GossipService(env, settings, keys, name.encode().ljust(16, b"."), boot, told.append)
        self.services.append(service)
        return service

    async def start(self, name: str, **options: Any) -> GossipService:
        service = self.make(name, **options)
        await service.start()
        return service

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.get_running_loop().create_task(work, name=name))
        return self.tasks[-1]

    async def end(self) -> None:
        for service in self.services:
            await service.stop(leave=False)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def rack() -> AsyncIterator[Rack]:
    made = Rack()
    yield made
    await made.end()


async def until(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110  # nobody sets an event for what is looked at from outside
            await asyncio.sleep(0.01)


def states(service: GossipService) -> dict[str, str]:
    return {str(peer.host): peer.state for peer in service.hosts()}


def values(service: GossipService, host: str) -> Mapping[str, bytes]:
    return next((peer.values for peer in service.hosts() if peer.host == host), {})


async def test_three_hosts_find_one_another_share_facts_and_say_goodbye(rack: Rack) -> None:
    a = rack.make("a")
    a.spread("endpoints", b"before the start")
    await a.start()
    b = await rack.start("b", seeds=(a.address,))
    c = await rack.start("c", seeds=(a.address,))
    everybody = {"a": "alive", "b": "alive", "c": "alive"}
    await until(lambda: all(states(service) == everybody for service in (a, b, c)))
    c.spread("spare", b"3")
    await until(lambda: values(a, "c") == values(b, "c") == {"spare": b"3"})
    await until(lambda: values(c, "a") == {"endpoints": b"before the start"})
    assert HostUp(HostId("b")) in rack.told["a"] and [peer.host for peer in b.hosts()] == ["a", "b", "c"]
    await c.stop(leave=True)
    await until(lambda: states(a)["c"] == states(b)["c"] == "left", within_s=2)
    assert rack.told["a"][-1] == HostDown(HostId("c"), left=True)


async def test_a_host_that_falls_silent_is_gone(rack: Rack) -> None:
    a = await rack.start("a")
    b = await rack.start("b", seeds=(a.address,))
    await until(lambda: states(a) == states(b) == {"a": "alive", "b": "alive"})
    await b.stop(leave=False)
    await until(lambda: states(a)["b"] == "gone")
    assert rack.told["a"][-1] == HostDown(HostId("b"), left=False)
    assert a.hosts()[1].suspected_by == "a"


async def test_a_restart_finds_the_rack_by_the_file_of_known_hosts(rack: Rack) -> None:
    a = await rack.start("a")
    b = await rack.start("b", seeds=(a.address,))
    await until(lambda: states(a) == states(b) == {"a": "alive", "b": "alive"})
    await b.stop(leave=False)
    assert set(rack.ports["b"].files) == {"gossip/peers"}
    again = await rack.start("b", boot=2)
    await until(lambda: states(again).get("a") == "alive" and a.hosts()[1].boot == 2)


async def test_a_host_asks_to_join_on_the_socket_of_gossip_and_that_is_counted(rack: Rack) -> None:
    a = await rack.start("a")
    given = RackGiven(HostId("a"), (KEY,), "covey", (HostId("a"),), (a.address,))
    asked: list[bool] = []
    a.gives, a.gave = lambda: given, lambda at, by_key: asked.append(by_key)
    token = a.make_token()
    assert token is not None
    asking, heard = JoinAsking(token, bytes(range(32))), asyncio.Queue[bytes]()
    ear = await Ports().open("127.0.0.1:0", lambda data, _: heard.put_nowait(data))
    for _ in range(2):
        ear.send(asking.datagram, a.address)
        assert asking.answer(await asyncio.wait_for(heard.get(), 5)) == given
    ear.send(asking.datagram[:40], a.address)
    await until(lambda: a.counters.get("joins_malformed") == 1)
    assert (a.counters["joins_given"], a.counters["joins_repeated"], asked) == (1, 1, [False])
    ear.close()


async def test_hosts_with_two_keys_hear_one_another_whichever_seals(rack: Rack) -> None:
    new = bytes(32)
    a = await rack.start("a", keys=(new, KEY))
    b = await rack.start("b", seeds=(a.address,))
    everybody = {"a": "alive", "b": "alive"}
    await until(lambda: states(a) == states(b) == everybody)
    a.spread("spare", b"sealed with the key that b has")
    await until(lambda: values(b, "a") == {"spare": b"sealed with the key that b has"})
    b.rekey((KEY, new))
    b.rekey((new,))
    a.rekey((new,))
    a.spread("spare", b"sealed with the new key")
    await until(lambda: values(b, "a") == {"spare": b"sealed with the new key"})
    assert states(a) == states(b) == everybody and HostDown(HostId("b"), left=False) not in rack.told["a"]


@pytest.mark.parametrize("spoilt", [b"", b"\x92\x01\x91\xc0", b"\xff" * 40, b"\x91" * 2000])
async def test_a_spoilt_file_of_known_hosts_is_left_aside(rack: Rack, spoilt: bytes) -> None:
    rack.ports["a"] = Ports()
    rack.ports["a"].files["gossip/peers"] = spoilt
    a = await rack.start("a")
    assert states(a) == {"a": "alive"} and rack.ports["a"].warnings == ["known hosts not read"]


async def test_a_flipped_bit_in_the_file_of_known_hosts_makes_nobody_a_replayer(rack: Rack) -> None:
    """A boot number that reads higher than it is would keep a live host out for ever, and be told to every host."""
    a = await rack.start("a", boot=0x5A5A5A5A)
    b = await rack.start("b", seeds=(a.address,))
    await until(lambda: states(a) == states(b) == {"a": "alive", "b": "alive"})
    await b.stop(leave=False)
    file = rack.ports["b"].files["gossip/peers"]
    rack.ports["b"].files["gossip/peers"] = file.replace(b"\x5a\x5a\x5a\x5a", b"\x5e\x5a\x5a\x5a")
    assert rack.ports["b"].files["gossip/peers"] != file
    again = await rack.start("b", seeds=(a.address,), boot=2)
    await until(lambda: states(a) == states(again) == {"a": "alive", "b": "alive"})
    assert "known hosts not read" in rack.ports["b"].warnings


async def test_a_sick_disk_does_not_keep_a_host_out(rack: Rack) -> None:
    a = await rack.start("a")
    rack.ports["b"] = Ports()
    rack.ports["b"].sick = True
    b = await rack.start("b", seeds=(a.address,))
    await until(lambda: states(a) == states(b) == {"a": "alive", "b": "alive"})
    await b.stop(leave=False)
    assert rack.ports["b"].warnings == ["known hosts not read", "known hosts not written"]


async def test_a_host_bound_to_all_addresses_is_reached_where_it_was_seen(rack: Rack) -> None:
    a = await rack.start("a")
    b = await rack.start("b", bind="0.0.0.0:0", seeds=(a.address,))
    assert b._gossip.membership.address == ""
    await until(lambda: states(a) == states(b) == {"a": "alive", "b": "alive"})
    port = b.address.rpartition(":")[2]
    assert a.hosts()[1].address == f"127.0.0.1:{port}"
    await until(lambda: b._gossip.membership.address == f"127.0.0.1:{port}")


async def test_an_advertised_ip_is_told_with_the_bound_port(rack: Rack) -> None:
    a = await rack.start("a", bind="0.0.0.0:0", advertise="127.0.0.1")
    assert a._gossip.membership.address == "127.0.0.1:" + a.address.rpartition(":")[2]


async def test_a_host_without_the_key_stays_alone(rack: Rack) -> None:
    a = await rack.start("a")
    stranger = await rack.start("stranger", keys=(b"?" * 32,), seeds=(a.address,))
    await until(lambda: a.counters.get("dropped_unknown_key", 0) > 0)
    assert states(a) == {"a": "alive"} and states(stranger) == {"stranger": "alive"}


async def test_who_is_alone_but_should_not_be_says_so_once(rack: Rack) -> None:
    a = await rack.start("a", seeds=("127.0.0.1:9",))
    lonely = await rack.start("lonely")
    for service in (a, a, lonely):
        service._notice_alone()
    assert rack.ports["a"].warnings == ["no other host answers"] and a.metrics()[metrics.ALONE.of()] == 1
    assert rack.ports["lonely"].warnings == [] and lonely.metrics()[metrics.ALONE.of()] == 0


async def test_hosts_that_seal_with_the_old_key_and_with_the_new_one_hear_one_another(rack: Rack) -> None:
    new = b"n" * 32
    a = await rack.start("a", keys=(KEY, new))
    b = await rack.start("b", keys=(new, KEY), seeds=(a.address,))
    await until(lambda: states(a) == states(b) == {"a": "alive", "b": "alive"})
    await until(lambda: a.counters["probes"] > 3)
    assert "dropped_unknown_key" not in {**a.counters, **b.counters}


async def test_rubbish_on_the_port_is_counted_and_harms_nobody(rack: Rack) -> None:
    a = await rack.start("a")
    host, _, port = a.address.rpartition(":")
    valid = Sealer(Keyring([KEY], "covey"), Sender(HostId("x"), b"x" * 16, 1), b"salt").seal([])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        for rubbish in (b"", b"x", bytes(100), bytes(2000), valid[:-1], valid[:20], valid, valid):
            wire.sendto(rubbish, (host, int(port)))
    await until(lambda: a.counters.get("received", 0) == 8)
    drops = {name: count for name, count in a.counters.items() if name.startswith("dropped_")}
    assert drops == {
        "dropped_malformed": 4,
        "dropped_oversized": 1,
        "dropped_unsealed": 1,
        "dropped_replayed": 1,
    }


async def test_a_host_of_another_version_is_named_once_and_not_heard(rack: Rack) -> None:
    a = await rack.start("a")
    host, _, port = a.address.rpartition(":")
    sealer = Sealer(Keyring([KEY], "covey"), Sender(HostId("x"), b"x" * 16, 1), b"salt")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        for _ in range(3):
            wire.sendto(bytes([VERSION + 1]) + sealer.seal([])[1:], (host, int(port)))
    await until(lambda: a.counters.get("dropped_other_version", 0) == 3)
    assert rack.ports["a"].warnings == ["a host sends datagrams of another gossip version"]
    assert states(a) == {"a": "alive"}


async def test_an_oversized_value_is_refused_and_gossip_goes_on(rack: Rack) -> None:
    a = await rack.start("a")
    with pytest.raises(ValueError, match="256"):
        a.spread("big", bytes(257))
    a.spread("small", b"1")
    assert values(a, "a") == {"small": b"1"}
    a.spread("small", None)
    assert values(a, "a") == {}


async def test_a_loop_that_stands_still_is_noticed_and_harms_nobody(rack: Rack) -> None:
    """Like SIGSTOP: the clock continued by five seconds, timers did not; far longer than any suspicion here."""
    a = await rack.start("a")
    b = await rack.start("b", seeds=(a.address,))
    await until(lambda: states(a) == states(b) == {"a": "alive", "b": "alive"})
    for name in ("a", "b"):
        rack.ports[name].skipped_s += 5.0
    await until(lambda: min(a.counters.get("stalls", 0), b.counters.get("stalls", 0)) > 0)
    lag_s = a.metrics()[metrics.LOOP_LAG_MAX_SECONDS.of()]
    assert isinstance(lag_s, float) and lag_s >= 4
    heard = [each.counters["received"] for each in (a, b)]
    await until(lambda: all(each.counters["received"] >= n + 10 for each, n in zip((a, b), heard, strict=True)))
    assert not [event for told in rack.told.values() for event in told if isinstance(event, HostDown)]


async def test_a_mistake_in_a_callback_stops_gossip_where_it_is_watched(rack: Rack) -> None:
    a = await rack.start("a")
    mistake = RuntimeError("our mistake")

    def fail(*_: object) -> None:
        raise mistake

    a._gossip.handle = fail  # type: ignore[method-assign, assignment]
    (watch,) = [task for task in rack.tasks if task.get_name() == "gossip: watch"]
    with contextlib.suppress(RuntimeError):
        await asyncio.wait_for(asyncio.shield(watch), 3)
    assert watch.exception() is mistake


async def test_a_taken_port_is_refused_at_start(rack: Rack) -> None:
    a = await rack.start("a")
    with pytest.raises(OSError, match="in use"):
        await rack.start("b", bind=a.address)


def test_settings_out_of_range_are_refused() -> None:
    for wrong in (
        {"probe_timeout_s": 2.0},
        {"datagram_bytes": 9000},
        {"gossip_fanout": 0},
        {"cluster": "x" * 65},
        {"hosts_max": 1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            GossipSettings(**wrong)


# ---- seeds that are names --------------------------------------------------------------------------------------------


async def test_a_seed_that_is_a_name_joins_all_its_addresses(rack: Rack) -> None:
    a = await rack.start("a")
    port = a.address.rpartition(":")[2]
    rack.ports["b"] = Ports()
    rack.ports["b"].names = {"rack": ["127.0.0.9", "127.0.0.1"]}
    b = await rack.start("b", seeds=(f"rack:{port}",))
    await until(lambda: states(b) == {"a": "alive", "b": "alive"})
    assert b.counters.get("not_sent", 0) == 0
    assert b.seeds_unknown == {}


async def test_datagrams_that_did_not_leave_count_as_not_sent(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    a = await rack.start("a")
    monkeypatch.setattr(Udp, "send", lambda *_: False)
    b = await rack.start("b", seeds=(a.address,))
    await until(lambda: b.counters.get("not_sent", 0) > 0)
    assert (b.counters.get("sent", 0), b.counters.get("sent_bytes", 0)) == (0, 0)


async def test_a_seed_whose_name_is_not_known_is_named_and_found_once_it_is(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossip.service.LOOK_AGAIN_ALONE_S", 0.05)
    a = await rack.start("a")
    port = a.address.rpartition(":")[2]
    b = await rack.start("b", seeds=(f"gpu9:{port}",))
    await until(lambda: f"gpu9:{port}" in b.seeds_unknown)
    assert "not known" in b.seeds_unknown[f"gpu9:{port}"]
    assert b.metrics()[metrics.SEEDS_UNKNOWN.of()] == 1
    assert b.counters.get("sent", 0) == 0, "there is nobody it could be sent to"
    assert rack.ports["b"].warnings.count("unknown seed") == 1
    rack.ports["b"].names["gpu9"] = ["127.0.0.1"]
    await until(lambda: states(b) == {"a": "alive", "b": "alive"})
    assert b.seeds_unknown == {}


async def test_a_seed_with_addresses_of_the_other_family_is_named_with_what_to_change(rack: Rack) -> None:
    """The seed has addresses of the other family only."""
    rack.ports["b"] = Ports()
    rack.ports["b"].names = {"six": ["fd00::1"]}
    b = await rack.start("b", seeds=("six:7946",))
    await until(lambda: bool(b.seeds_unknown))
    assert "bind to [::]" in b.seeds_unknown["six:7946"]


async def test_a_name_that_is_no_longer_known_keeps_its_last_addresses() -> None:
    names = Ports()
    names.names = {"gpu1": ["10.0.0.1"]}
    seeds = Seeds(("gpu1:7946", "10.0.0.2:7946"), "0.0.0.0:7946", cast(Any, names), cast(Any, names))
    assert list(seeds.addresses) == ["10.0.0.2:7946"]
    await seeds.look()
    assert list(seeds.addresses) == ["10.0.0.1:7946", "10.0.0.2:7946"]
    names.names = {}
    await seeds.look()
    assert list(seeds.addresses) == ["10.0.0.1:7946", "10.0.0.2:7946"]
    assert list(seeds.unknown) == ["gpu1:7946"]
    names.names = {"gpu1": ["10.0.0.9"]}
    await seeds.look()
    assert list(seeds.addresses) == ["10.0.0.9:7946", "10.0.0.2:7946"]
    assert seeds.unknown == {}

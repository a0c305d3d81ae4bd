"""Under which address a host is told to others, on hosts with several networks, none, and names that mean loopback."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from agent.advertise import Here, Settled, own_addresses, settle
from agent.config import ConfigError, parse
from agent.ports.network.datagrams import UdpDatagrams
from covey.ports.addresses import ip_port, joined

ENV = {"HOME": "/root"}
ROUTES = {"10.9.0.": "10.9.0.7", "192.168.1.": "192.168.1.7", "fd00::": "fd00::7", "127.": "127.0.0.1"}
"""The networks of a host with a fabric, an office network and IPv6 -> its address there."""
NAMES = {"gpu1": ["10.9.0.1"], "gpu7": ["127.0.1.1"], "six": ["fd00::1"], "both": ["10.9.0.1", "fd00::1"]}


class Names(UdpDatagrams):
    async def resolve(self, address: str) -> Sequence[str]:
        host, port = ip_port(address)
        if host in NAMES:
            return [joined(ip, port) for ip in NAMES[host]]
        return await super().resolve(address) if host[0].isdigit() or ":" in host else _unknown(host)


def _unknown(host: str) -> Sequence[str]:
    raise OSError(-2, f"Name or service not known: {host}")


def settled(tree: Mapping[str, object], default: str = "", own: Sequence[str] = ("10.9.0.7", "192.168.1.7")) -> Settled:
    def route_from(to: str) -> str:
        return next((ip for network, ip in ROUTES.items() if to.startswith(network)), "" if ":" in to else default)

    config = parse({"name": "gpu7", **tree}, "agent.toml", ENV)
    return asyncio.run(settle(config, Names(), Here(route_from, lambda: own)))


def seeds(*told: str) -> dict[str, object]:
    return {"gossip": {"seeds": list(told)}}


@pytest.mark.parametrize("default", ["", "192.168.1.7"])
def test_the_address_towards_the_seeds_is_told_whatever_the_default_route(default: str) -> None:
    assert settled(seeds("gpu1:7946"), default).config.advertise == "10.9.0.7"
    assert settled(seeds("10.9.0.1:7946"), default).config.advertise == "10.9.0.7"


def test_a_host_that_is_its_own_seed_under_a_loopback_name_looks_at_the_others() -> None:
    """Debian writes `127.0.1.1 gpu7` into the /etc/hosts of gpu7."""
    assert settled(seeds("gpu7:7946", "gpu1:7946")).config.advertise == "10.9.0.7"
    assert settled(seeds("gpu7:7946"), "192.168.1.7").config.advertise == "192.168.1.7"


def test_without_seeds_or_route_the_only_address_is_told_and_never_one_of_several() -> None:
    assert settled({}, own=("10.9.0.7",)).config.advertise == "10.9.0.7"
    assert settled({}).config.advertise == "127.0.0.1"


def test_what_the_file_says_counts_first_then_the_address_that_gossip_is_bound_to() -> None:
    assert settled({"advertise": "192.168.1.7"} | seeds("gpu1:7946")).config.advertise == "192.168.1.7"
    bound = {"gossip": {"bind": "192.168.1.7:7946", "seeds": ["gpu1:7946"]}}
    assert settled(bound).config.advertise == "192.168.1.7"


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"advertise": "127.0.0.1"} | seeds("gpu1:7946"), "`advertise`"),
        ({"gossip": {"bind": "127.0.0.1:7946", "seeds": ["10.9.0.1:7946"]}}, "`gossip.bind`"),
        ({"gossip": {"advertise": "127.0.0.1", "seeds": ["10.9.0.1:7946"]}}, "`gossip.advertise`"),
        (seeds("172.16.0.1:7946"), "`advertise`"),
        (seeds("gpu99:7946"), "`advertise`"),
    ],
)
def test_loopback_beside_a_seed_elsewhere_is_refused_with_the_addresses_there_are(
    tree: Mapping[str, object], key: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        settled(tree)
    assert key in refused.value.why
    assert "10.9.0.7, 192.168.1.7" in refused.value.next


def test_a_rack_on_one_machine_may_tell_loopback() -> None:
    assert settled({"advertise": "127.0.0.1"} | seeds("127.0.0.1:7001", "gpu7:7002")).config.advertise == "127.0.0.1"


def test_a_name_that_is_not_known_now_does_not_keep_a_host_from_starting() -> None:
    found = settled(seeds("gpu99:7946", "gpu1:7946"))
    assert found.config.advertise == "10.9.0.7"
    assert list(found.unknown) == ["gpu99:7946"]


def test_a_rack_on_ipv6_listens_on_ipv6() -> None:
    config = settled(seeds("six:7946")).config
    assert config.advertise == "fd00::7"
    assert (config.gossip.bind, config.control.bind) == ("[::]:7946", "[::]:0")
    assert settled(seeds("both:7946")).config.gossip.bind == "0.0.0.0:7946"


def test_own_addresses_are_read_from_the_kernel_without_loopback_and_link_local_ones(tmp_path: Path) -> None:
    (tmp_path / "fib_trie").write_text(
        "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.9.0.0\n        /24 link UNICAST\n     |-- 10.9.0.7\n"
        "        /32 host LOCAL\n     |-- 127.0.0.1\n        /32 host LOCAL\n"
        "Local:\n     |-- 10.9.0.7\n        /32 host LOCAL\n"
    )
    (tmp_path / "if_inet6").write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000007 02 40 00 80     eth0\n"
        "fe800000000000000000000000000007 02 40 20 80     eth0\n"
    )
    assert own_addresses(tmp_path) == ["10.9.0.7", "fd00::7"]
    assert own_addresses(tmp_path / "absent") == []

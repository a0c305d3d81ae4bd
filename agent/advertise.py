"""The address under which other hosts reach this host when agent.toml sets none: the kernel's source address.

    the IP that gossip is bound to, if it is one
    else the address of the route to the first seed that is not on this host
    else that of the default route
    else the only address there is, of a host that has one
    else loopback, which is right for a rack on one machine and nowhere else

A rack whose GPUs have a network of their own has no default route, and a host with several networks has one that leads
elsewhere: the seeds say which network is the rack's. A loopback address is refused while a seed is on another host: the
other hosts could not connect to it.
"""

import asyncio
import dataclasses
import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from agent.config import Config, ConfigError
from covey.ports.addresses import Address, ip_port, is_everywhere, is_ip, joined
from covey.ports.datagrams import Datagrams

RESOLVE_S = 5.0
"""Seconds for which the start waits until names of seeds resolve; gossip resolves the others later."""
DEFAULT_ROUTE = ("192.0.2.1", "2001:db8::1")
"""Documentation addresses (RFC 5737, RFC 3849): only the route to them is looked up, nothing is sent."""


@dataclasses.dataclass(frozen=True)
class Here:
    """Routes and addresses of this host, from its kernel."""

    route_from: Callable[[str], str]
    """Returns the source address of packets to an IP; empty without a route."""
    own: Callable[[], Sequence[str]]
    """Returns the host's addresses, without loopback and link-local ones."""


@dataclasses.dataclass(frozen=True)
class Settled:
    config: Config
    """The configuration with an address to advertise, and sockets of its family."""
    unknown: Mapping[Address, str]
    """Seeds whose names do not resolve now -> why."""


async def settle(config: Config, datagrams: Datagrams, here: Here | None = None) -> Settled:
    """Find the address to advertise. ConfigError when it is loopback while a seed is not."""
    here = here or Here(route_from, own_addresses)
    found, unknown = await _looked_up(config.gossip.seeds, datagrams)
    elsewhere = [ip for ip in found if not ipaddress.ip_address(ip).is_loopback]
    ip = config.advertise or _chosen(config, elsewhere, here)
    bound_to_one = not config.advertise and not is_everywhere(ip_port(config.gossip.bind)[0])
    told = {"gossip.bind" if bound_to_one else "advertise": ip, "gossip.advertise": config.gossip.advertise}
    for key, address in told.items():
        if address and ipaddress.ip_address(address).is_loopback and (elsewhere or unknown):
            raise _unreachable(config, key, address, [*elsewhere, *unknown], here.own())
    return Settled(_of_family(dataclasses.replace(config, advertise=ip)), unknown)


def _chosen(config: Config, elsewhere: Sequence[str], here: Here) -> str:
    bound, _ = ip_port(config.gossip.bind)
    if not is_everywhere(bound):
        return bound
    own = here.own()
    routed = (here.route_from(ip) for ip in (*elsewhere, *DEFAULT_ROUTE))
    usable = (ip for ip in routed if ip and not ipaddress.ip_address(ip).is_loopback)
    return next(usable, own[0] if len(own) == 1 else "127.0.0.1")


def _of_family(config: Config) -> Config:
    """The configuration with sockets of the advertised address's family: those that listen on all IPv4 addresses listen
    on all of IPv6 too where that is what is advertised."""
    if ":" not in config.advertise:
        return config

    def widened(bind: Address) -> Address:
        host, port = ip_port(bind)
        return joined("::", port) if host == "0.0.0.0" else bind

    gossip = msgspec.structs.replace(config.gossip, bind=widened(config.gossip.bind))
    control = msgspec.structs.replace(config.control, bind=widened(config.control.bind))
    return dataclasses.replace(config, gossip=gossip, control=control)


async def _looked_up(seeds: Sequence[Address], datagrams: Datagrams) -> tuple[list[str], dict[Address, str]]:
    """IPs of the seeds, in their order, and why other seeds have none."""
    unknown: dict[Address, str] = {}

    async def ips(seed: Address) -> list[str]:
        try:
            async with asyncio.timeout(RESOLVE_S):
                return [ip_port(address)[0] for address in await datagrams.resolve(seed)]
        except TimeoutError:
            unknown[seed] = f"no answer within {RESOLVE_S:g} s"
        except OSError as error:
            unknown[seed] = error.strerror or str(error)
        return []

    found = await asyncio.gather(*(ips(seed) for seed in seeds))
    return [ip for some in found for ip in some], unknown


def _unreachable(config: Config, key: str, ip: str, seeds: Sequence[str], own: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{config.source}: it would tell other hosts that its address is {ip}",
        f"`{key}` is a loopback address, and the rack is joined through {', '.join(seeds)}",
        f"set `{key}` to this host's address in the rack; the host has "
        + (", ".join(own) or "only loopback addresses: bring its network up"),
    )


def route_from(to: str) -> str:
    """The address from which this host would send to an IP; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((to, 9))
        except OSError:
            return ""
        ip = str(probe.getsockname()[0])
    return "" if ":" in ip and ipaddress.ip_address(ip).is_link_local else ip


def own_addresses(proc: Path = Path("/proc/net")) -> list[str]:
    """The IP addresses of all interfaces, IPv4 first, without loopback and link-local ones."""
    found: list[str] = []
    try:
        words = re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", (proc / "fib_trie").read_text())
        found += dict.fromkeys(words)
    except OSError:
        pass  # a kernel without it
    try:
        lines = (proc / "if_inet6").read_text().splitlines()
        found += [str(ipaddress.IPv6Address(int(line.split()[0], 16))) for line in lines]
    except OSError:
        pass
    usable = [ip for ip in found if is_ip(ip)]
    return [ip for ip in usable if not (known := ipaddress.ip_address(ip)).is_loopback and not known.is_link_local]

"""Addresses as text: `127.0.0.1:7946`, `[::1]:7946`, and `gpu1:7946` where a name is allowed."""

import ipaddress

Address = str
"""Address such as `127.0.0.1:7946`, `[::1]:7946` or `unix:/run/covey/agent.sock`. Port 0 asks for a free one."""


def ip_port(address: Address) -> tuple[str, int]:
    """The parts of `127.0.0.1:7946` or `[::1]:7946`; the part before the port may be a name. OSError for other text,
    also for an IPv6 address without brackets, whose end is ambiguous."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host == f"[{bare}]"
    if not colon or not bare or not port.isdecimal() or not port.isascii() or int(port) > 65535:
        raise OSError(f"{address!r} is not an address; expected IP:PORT or [IPV6]:PORT")
    if (":" in bare) != bracketed or (not bracketed and bare != host):
        raise OSError(f"{address!r} is not an address; expected IP:PORT or [IPV6]:PORT, an IPv6 address in brackets")
    return bare, int(port)


def joined(ip: str, port: int | str) -> Address:
    """The two parts as one address, with brackets around an IPv6 one."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def is_ip(host: str) -> bool:
    """Whether the text is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_v6(address: Address) -> bool:
    return address.startswith("[")


def is_everywhere(host: str) -> bool:
    """Whether a socket bound to `host` listens on all addresses, so that peers cannot use `host` to connect."""
    return is_ip(host) and ipaddress.ip_address(host).is_unspecified


def reached_at(bound: Address, advertise: str) -> Address:
    """The address for peers of a socket bound to `bound`: the advertised one when it is bound to all addresses."""
    host, port = ip_port(bound)
    return joined(advertise, port) if is_everywhere(host) else bound


def hears_others(bind: Address) -> bool:
    """Whether a socket bound here hears other machines. Empty: no socket. True for text that is no address."""
    if not bind:
        return False
    try:
        ip = ipaddress.ip_address(ip_port(bind)[0].partition("%")[0])
    except (OSError, ValueError):
        return True
    inner = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return not (inner or ip).is_loopback

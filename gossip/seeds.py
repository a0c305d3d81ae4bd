"""Seeds that are names: the addresses they resolve to now, and the names that do not resolve.

A name is looked up when gossip starts, then every 30 s, and every 5 s while no host answers: hosts move, and a name
server may come up after the hosts do. All addresses of a name are called. A name that does not resolve any more keeps
the addresses it had last, since a name server that is away proves nothing about the hosts.
"""

import asyncio
from collections.abc import Mapping, Sequence

from covey.ports.addresses import Address, ip_port, is_ip, is_v6
from covey.ports.datagrams import Datagrams
from covey.ports.log import Logger

LOOK_AGAIN_S = 30.0
LOOK_AGAIN_ALONE_S = 5.0
LOOK_S_MAX = 20.0
"""The most seconds that looking up one name may take; resolvers give up after about 10 s a server by default."""


class Seeds:
    """The seeds of this host. `bound`: the address of the gossip socket, which reaches addresses of its own family
    only."""

    def __init__(self, seeds: Sequence[Address], bound: Address, datagrams: Datagrams, log: Logger) -> None:
        self._seeds, self._bound, self._datagrams, self._log = tuple(seeds), bound, datagrams, log
        self._found: dict[Address, tuple[Address, ...]] = {}
        self.unknown: dict[Address, str] = {}
        """The seeds that cannot be called, and why."""
        for seed in self._seeds:
            if is_ip(ip_port(seed)[0]):
                self._take(seed, (seed,))

    @property
    def names(self) -> Sequence[Address]:
        """The seeds that have to be looked up."""
        return [seed for seed in self._seeds if not is_ip(ip_port(seed)[0])]

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses of all seeds that resolve, each once, in the order of the file."""
        return tuple(dict.fromkeys(address for seed in self._seeds for address in self._found.get(seed, ())))

    async def look(self) -> None:
        """Look up all names at the same time."""
        before = dict(self.unknown)
        await asyncio.gather(*(self._look_up(name) for name in self.names))
        self._tell_changes(before)

    async def _look_up(self, name: Address) -> None:
        try:
            async with asyncio.timeout(LOOK_S_MAX):
                self._take(name, await self._datagrams.resolve(name))
        except TimeoutError:
            self.unknown[name] = f"the name server did not answer within {LOOK_S_MAX:g} s"
        except OSError as error:
            self.unknown[name] = error.strerror or str(error)

    def _take(self, seed: Address, found: Sequence[Address]) -> None:
        reachable = tuple(address for address in found if is_v6(address) == is_v6(self._bound))
        if reachable:
            self._found[seed] = reachable
            self.unknown.pop(seed, None)
        else:
            kind, bind = ("IPv4", "0.0.0.0") if is_v6(self._bound) else ("IPv6", "[::]")
            self.unknown[seed] = f"it only has {kind} addresses, and gossip listens on {self._bound}; bind to {bind}"

    def _tell_changes(self, before: Mapping[Address, str]) -> None:
        for seed, why in self.unknown.items():
            if seed not in before:
                self._log.warning("unknown seed", seed=seed, why=why, next=f"asked again every {LOOK_AGAIN_S:g} s")
        for seed in before:
            if seed not in self.unknown:
                self._log.info("seed resolved", seed=seed, addresses=self._found[seed])

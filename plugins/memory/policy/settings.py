"""Section `[memory]` of agent.toml: what a person may change, checked once."""

import re
from collections.abc import Callable
from typing import Final, Literal, TypeVar

import msgspec

from covey.core.ids import ID_PATTERN
from covey.core.units import GIB, format_size, parse_seconds, parse_size
from covey.wire.swap_wire import HELPER_SOCKET
from plugins.memory.policy.budgets import SEAL_BYTES as SEAL_BYTES
from plugins.memory.policy.budgets import budget_of, lent_bytes
from plugins.memory.policy.lending import Headroom
from plugins.memory.policy.placement import CHOICES, DRAWN
from plugins.memory.policy.spilling import volume_bytes_most

SLABS_MAX = 1 << 14
"""Most slabs of one volume, so 1 TiB of the default size; each is a line in a table of the agent. Larger volumes need
larger slabs."""
REQUEST_PAGES_MAX: Final = 256
"""Most pages in one request on either byte path."""
PAGE_BYTES_MAX = (1 << 16) + SEAL_BYTES
"""Bytes of the largest page at a lender."""
VOLUMES_MAX = 4096
"""Volumes of one host: more processes than that are not a sensible setting."""
DRAWN_MAX = 24
"""Most hosts that may be drawn: from two dozen on all borrowers choose the same few hosts (measured by `covey-sim
memory`)."""
T = TypeVar("T")
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,63}")
_PERCENT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*%\s*$")


class MemorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[memory]: lending this host's spare memory, and borrowing that of others."""

    lend: str = "auto"
    """Most that is ever lent. `auto`: half of what is free above headroom when the agent starts. `0 B`: nothing."""
    headroom: str = "12.5 %"
    """Memory this host keeps free for itself: a size or a share of all (Infiniswap §2.5.1: 8 GB of 64 GB), or `auto`:
    by how fast its own programs have grown lately and by memory pressure, 3 % to 25 %. `auto` lends more on quiet
    hosts; it cannot foresee a job that takes memory faster than anything did lately."""
    slab: str = "64 MiB"
    """Size of one slab of a new volume. The paper uses 1 GB; smaller slabs move faster and spread wider."""
    page: str = "4 KiB"
    """Size of one page of a new volume."""
    bind: str = ""
    """Where the slab process listens; empty: the advertised address, a free port."""
    hot_requests_per_s: float | Literal["auto"] = "auto"
    """Page requests per second above which a slab is placed on another host. `auto`: the paper's 20 for a slab of 1 GiB
    (Infiniswap §2.4.1), and in proportion to a volume's slab size: 1.25 for 64 MiB."""
    cold_share: float = 0.0
    """A slab below this share of that is given back unasked, 0 to less than 1; 0: never, as in the paper's own
    implementation (Infiniswap §2.4.1, ColdSlab)."""
    drawn: int = DRAWN
    """Hosts drawn at random for a slab that needs a place; the two that are freest by gossip are asked (measured by
    `covey-sim memory`). 2: no look at gossip, as in the paper (Infiniswap §2.4.2)."""
    seal: bool = True
    """Pages of new volumes are encrypted and authenticated before they leave their host. `false`: a lender, and whoever
    listens on the way, can read them, and a lender can change them."""
    spill_queue: str = "16 MiB"
    """Pages acknowledged by a lender that may wait for the disk, per volume, at most 1 GiB; when full, writers wait."""
    remote_deadline: str = "2 s"
    """A lender that does not answer a page request for so long is given up; the disk answers."""
    rdma: Literal["auto", "off"] = "auto"
    """`auto`: pages are read and written one-sided over RDMA where both hosts have a device and pyverbs
    (`apt install python3-pyverbs`), over TCP elsewhere. A slab that is lent this way takes RAM as a whole."""
    same_host: Literal["map", "socket"] = "map"
    """How pages go between a volume and a lender on the same host, where one host has several agents: its memory is
    mapped, and a slab takes RAM as a whole, or a socket as between hosts."""
    grace: str = "10 s"
    """How long a borrower may take to move a slab that its lender wants back."""
    lease: str = "60 s"
    """A slab that its borrower has not renewed for so long is an orphan and freed."""
    swap_helper: str = HELPER_SOCKET
    """Unix socket of the host's swap helper (`covey-swapd`), which makes a volume swap of this host."""
    rack: str = ""
    """What this host stands in and may fail with: a label, alike on the hosts of one rack. The members of a slab that
    has no disk lie in different ones where there is room. Empty: nobody knows, the host is one of its own."""
    volume_max: str = "1 TiB"
    """Largest volume; with pages of 1 KiB or less 683 GiB or less, which is what its log can tell apart."""

    volumes_max: int = 64
    """Volumes of one host. Each is two processes that keep a ring, an index and an interpreter in memory, locked."""
    volumes_per_job_max: int = 16
    """Volumes that one job's ranks may have on one host: a script that names one by its step would fill the host."""

    budgets: dict[str, str] = {}
    """Remote memory per tenant, over the whole rack: the most that its volumes have, a mirrored one twice. Alike on all
    hosts: borrowers go by it, and lenders. The name "" stands for volumes that belong to no tenant."""
    default_budget: str = ""
    """That of a tenant without a budget of its own; empty: not limited."""

    def __post_init__(self) -> None:
        for tenant, budget in self.budgets.items():
            if tenant and not re.fullmatch(ID_PATTERN, tenant):
                why = "expected a name as jobs are submitted with, or '' for volumes of no tenant"
                raise ValueError(f"budgets has {tenant!r}: {why}")
            _checked(f"budgets.{tenant}", budget, parse_size)
        if self.default_budget:
            _checked("default_budget", self.default_budget, parse_size)
        for key in ("slab", "page", "spill_queue", "volume_max"):
            _checked(key, getattr(self, key), parse_size)
        for key in ("remote_deadline", "grace", "lease"):
            if _checked(key, getattr(self, key), parse_seconds) <= 0:
                raise ValueError(f"{key} = {getattr(self, key)!r}: expected more than 0 s")
        if self.headroom != "auto":
            _checked("headroom", self.headroom, _headroom)
        if self.lend != "auto":
            _checked("lend", self.lend, parse_size)
        if self.hot_requests_per_s != "auto" and not 0 <= self.hot_requests_per_s < float("inf"):
            raise ValueError(f"hot_requests_per_s = {self.hot_requests_per_s}: expected 'auto', or 0 or more")
        if not 0 <= self.cold_share < 1:
            raise ValueError(f"cold_share = {self.cold_share}: expected 0 (never) to less than 1")
        if not CHOICES <= self.drawn <= DRAWN_MAX:
            raise ValueError(f"drawn = {self.drawn}: expected {CHOICES} to {DRAWN_MAX}")
        for key in ("volumes_max", "volumes_per_job_max"):
            if not 1 <= getattr(self, key) <= VOLUMES_MAX:
                raise ValueError(f"{key} = {getattr(self, key)}: expected 1 to {VOLUMES_MAX}")
        if self.rack and not _LABEL.fullmatch(self.rack):
            raise ValueError(f"rack = {self.rack!r}: expected at most 63 of a-z, A-Z, 0-9, '-', '_' and '.'")
        self._check_sizes()

    def _check_sizes(self) -> None:
        page, slab = self.page_bytes, self.slab_bytes
        if page not in (512 << n for n in range(8)):
            raise ValueError(f"page = {self.page!r}: expected a power of two from 512 B to 64 KiB")
        if slab < page or slab % page or slab > 64 * GIB:
            raise ValueError(
                f"slab = {self.slab!r}: expected a multiple of the page ({format_size(page)}), at most 64 GiB"
            )
        if self.spill_queue_pages < REQUEST_PAGES_MAX:
            least = format_size(REQUEST_PAGES_MAX * page)
            raise ValueError(f"spill_queue = {self.spill_queue!r}: expected at least {least}, the largest request")
        if parse_size(self.spill_queue) > GIB:
            raise ValueError(f"spill_queue = {self.spill_queue!r}: expected at most 1 GiB; it stays in memory")

    @property
    def slab_bytes(self) -> int:
        return parse_size(self.slab)

    @property
    def page_bytes(self) -> int:
        return parse_size(self.page)

    @property
    def lent_slab_bytes(self) -> int:
        """Bytes of a slab at its lender, with the seals of its pages."""
        return lent_bytes(self.slab_bytes, self.page_bytes, self.seal)

    @property
    def spill_queue_pages(self) -> int:
        return parse_size(self.spill_queue) // self.page_bytes

    @property
    def volume_max_bytes(self) -> int:
        return min(parse_size(self.volume_max), volume_bytes_most(self.page_bytes))

    @property
    def headroom_kept(self) -> Headroom | None:
        """The memory to keep free; None for `auto`."""
        return None if self.headroom == "auto" else _headroom(self.headroom)

    @property
    def hot(self) -> float | None:
        """Page requests per second above which a slab is placed; None for `auto`."""
        return None if self.hot_requests_per_s == "auto" else self.hot_requests_per_s

    def budget_bytes(self, tenant: str) -> int | None:
        """A tenant's budget in bytes; None: not limited."""
        most = parse_size(self.default_budget) if self.default_budget else None
        return budget_of(tenant, {each: parse_size(size) for each, size in self.budgets.items()}, most)

    @property
    def lend_max_bytes(self) -> int | None:
        """Most bytes that are ever lent; None for `auto`."""
        return None if self.lend == "auto" else parse_size(self.lend)

    @property
    def remote_deadline_s(self) -> float:
        return parse_seconds(self.remote_deadline)

    @property
    def grace_s(self) -> float:
        return parse_seconds(self.grace)

    @property
    def lease_s(self) -> float:
        return parse_seconds(self.lease)


def _headroom(text: str) -> Headroom:
    found = _PERCENT.match(text)
    if found is None:
        try:
            return Headroom(fixed_bytes=parse_size(text))
        except ValueError as error:
            raise ValueError(f"{error}, a share of all memory such as '12.5 %', or 'auto'") from error
    share = float(found[1]) / 100
    if not 0 <= share < 1:
        raise ValueError(f"{text!r} is not a share of memory: expected 0 % to 99 %")
    return Headroom(fraction=share)


def _checked(key: str, value: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{key} = {value!r}: {error}") from error

"""The containers of Infiniswap's cluster experiment, rebuilt by seed (Gu 2021, §2.7.3 and §2.7.5).

Ninety containers of five application-workload pairs, equally many of each, half of them with room for all they need,
30 % for three quarters of it, 20 % for half; put on hosts at random. Spark is left out as in the paper's figure: with
half its memory it never finishes. (`SPARK` is there to be counted in: the text of the section does not exclude it, its
figures have no median for it.) That this mix is the right one shows in its sum: what the containers may hold in
local memory is 40.6 % of 32 hosts of 64 GB, and the paper measured 40.8 %.

A container needs memory for its working set; above its limit it pages. What then lies in swap is more than what does
not fit, since a page that was read back keeps its place there until it is written (Linux frees it only then, or when
swap is half full). The share of resident pages that do so is `kept`, the one number here that the paper does not give.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from covey.core.units import GIB, TIB, format_size, parse_size
from sim.files import rows_of
from sim.report import Wrong

KEPT = 0.8
"""Share of a paging container's resident pages that also lie in swap, in the long run. Fitted: with it the settings of
the paper give the paper's 60 %. Swept in the report, since it moves every system alike."""
KEPT_S = 120.0
"""Time constant of `KEPT` in seconds: reading back takes a while."""
SECONDS = 1300
"""Length of the paper's run in seconds (§2.7.5)."""
PAGES_PER_S = 380e6 / 8 / 4096
"""Pages requested per host and second: 380 Mbit/s of remote traffic (§2.7.5)."""
SIZE_MAX = 16 * TIB
"""Largest container that a file may name, in bytes."""
SYSTEM_BYTES = int(2.5 * GIB)
"""Bytes that a host without containers uses: max/min of 22.5 means that the emptiest had about this (§2.7.5.1)."""


@dataclass(frozen=True)
class App:
    name: str
    working_set_bytes: int
    ramp_s: float
    """Seconds until its memory has grown to all it needs (§2.7.1, Figure 2.11)."""
    first_share: float
    """Share of its memory that it has at the start of the ramp."""


APPS = (
    App("voltdb-tpcc", int(11.5 * GIB), 120, 0.2),
    App("memcached-etc", 9 * GIB, 60, 0.2),
    App("memcached-sys", int(14.5 * GIB), 1000, 0.4),
    App("powergraph-tunkrank", 9 * GIB, 40, 0.1),
    App("graphx-pagerank", 12 * GIB, 80, 0.1),
)
"""Applications with the working sets of §2.7.3. Memcached-SYS grows for most of the run, ETC is full early (§2.7.1)."""
SPARK = App("spark-pagerank", 16 * GIB, 80, 0.1)
"""The sixth application of §2.7.3, GraphX's workload on more memory."""
LIMITS = ((1.0, 0.5), (0.75, 0.3), (0.5, 0.2))
"""(Limit over working set, share of containers): "about 50 %, close to 30 %, the rest" (§2.7.5)."""


@dataclass(frozen=True)
class Container:
    host: int
    working_set_bytes: int
    limit_bytes: int
    ramp_s: float = 60.0
    first_share: float = 0.2

    @property
    def pages(self) -> bool:
        return self.limit_bytes < self.working_set_bytes


def containers_by_seed(
    hosts: int, count: int, host_bytes: int, rng: random.Random, apps: Sequence[App] = APPS
) -> list[Container]:
    """The mix of the module's docstring on random hosts. A container whose limit a host cannot hold any more goes to
    another one."""
    limits = [limit for limit, share in LIMITS for _ in range(round(share * count))]
    limits += [1.0] * (count - len(limits))
    rng.shuffle(limits)
    room = [host_bytes - SYSTEM_BYTES] * hosts
    placed: list[Container] = []
    for n, limit in enumerate(limits[:count]):
        app = apps[n % len(apps)]
        limit_bytes = round(limit * app.working_set_bytes)
        fits = [host for host in range(hosts) if room[host] >= limit_bytes]
        if not fits:
            break
        host = rng.choice(fits)
        room[host] -= limit_bytes
        placed.append(Container(host, app.working_set_bytes, limit_bytes, app.ramp_s, app.first_share))
    return placed


def containers_from(path: Path) -> tuple[list[str], list[Container]]:
    """Host names and containers of a CSV file with the columns `host`, `limit`, `working_set` (sizes such as 12 GiB).

    Raises `Wrong` with line and column."""
    columns = ("host", "limit", "working_set")
    lines = rows_of(path)
    _, head = next(lines, (1, []))
    if any(column not in head for column in columns):
        raise Wrong(f"{path}:1", "expected the columns host, limit, working_set", "write them as its first line")
    rows = [(line, dict(zip_longest(head, row[: len(head)], fillvalue=""))) for line, row in lines]
    if not rows:
        raise Wrong(f"{path}:2", "no container follows the line of columns", "write one line for each container")
    names = sorted({row["host"] for _, row in rows})
    found: list[Container] = []
    for line, row in rows:
        if not row["host"]:
            raise Wrong(f"{path}:{line}, column host", "it is empty", "every container lies on a host")
        sizes = [_size(path, line, column, row[column]) for column in columns[1:]]
        found.append(Container(names.index(row["host"]), sizes[1], sizes[0]))
    return names, found


def _size(path: Path, line: int, column: str, text: str) -> int:
    try:
        size = parse_size(text)
    except (ValueError, OverflowError) as error:
        raise Wrong(f"{path}:{line}, column {column}", str(error), "write a size such as 12 GiB") from None
    if not 0 < size <= SIZE_MAX:
        raise Wrong(f"{path}:{line}, column {column}", f"expected 1 B to {format_size(SIZE_MAX)}", "write such a size")
    return size


def local_and_swapped(
    containers: Sequence[Container], hosts: int, seconds: int, kept: float = KEPT
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Resident bytes, bytes in swap and pages requested per second, each of shape (seconds, hosts)."""
    at_s = np.arange(seconds, dtype=float)
    local = np.full((seconds, hosts), float(SYSTEM_BYTES))
    swapped, weight = np.zeros((seconds, hosts)), np.zeros((seconds, hosts))
    for one in containers:
        share = np.minimum(1.0, one.first_share + (1 - one.first_share) * at_s / max(1.0, one.ramp_s))
        needs = share * one.working_set_bytes
        over = np.maximum(0.0, needs - one.limit_bytes)
        paging_s = np.cumsum(over > 0)
        back = kept * one.limit_bytes * (1 - np.exp(-paging_s / KEPT_S)) * (over > 0)
        local[:, one.host] += np.minimum(needs, one.limit_bytes)
        swapped[:, one.host] += over + back
        weight[:, one.host] += over / one.working_set_bytes
    mean = weight.mean()
    requests = weight * (PAGES_PER_S / mean) if mean > 0 and math.isfinite(mean) else weight
    return local, swapped, requests

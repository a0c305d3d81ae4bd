"""Which GPUs a gang takes where a GPU holds one guaranteed job and opportunistic ones beside it (AntMan, Algorithm 1).

A guaranteed job takes GPUs that no other guaranteed job has, first those that it shares with the fewest; one that wants
one host takes the host where the fewest suffice. An opportunistic job goes where GPUs are least busy, on whatever hosts
they are: Algorithm 1 asks for the topology of guaranteed jobs only. A job of several GPUs per worker, or one that wants
its workers apart, lies on hosts as anywhere else (`policy/place.py`), and takes the best GPUs of each.

The log gives one name to one job, so parts of a GPU have names of their own: a guaranteed job holds `UUID`, those
beside it `UUID+1`, `UUID+2`, ... A job that is upgraded where it runs keeps its part; no guaranteed job starts on that
GPU while it does.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from plugins.facts import PART
from plugins.scheduler.policy.classes import gpus_to_keep
from plugins.scheduler.policy.place import consolidate

Gpu = TypeVar("Gpu", bound=Any)
Host = TypeVar("Host", bound=Any)

BUSY = 0.8
"""Utilisation from which on a GPU takes no more opportunistic jobs (AntMan §3.3: M, over the last 10 s)."""


def device_of(name: str) -> str:
    """The GPU's own name, whichever part of it `name` is."""
    return name.partition(PART)[0]


def is_part(name: str) -> bool:
    """Whether this is a part that an opportunistic job takes."""
    return PART in name


def part_of(device: str, number: int | str) -> str:
    """The name of a part; `number` counts from 1, where the log's own name of it is known."""
    return f"{device}{PART}{number}"


def short_name(device: str) -> str:
    """Eight hex digits for a GPU's name: what gossip says of GPUs must be short. Two of one host may, with a chance of
    1 in 35 million for 16 of them, come out alike; the host notices (`GpusShared.names`)."""
    return f"{zlib.crc32(device.encode()):08x}"


def has_room_beside(utilisation: float, beside: int, beside_max: int, busy: float = BUSY) -> bool:
    """Whether a GPU takes one more opportunistic job. `beside`: the number of those that it has."""
    return utilisation < busy and beside < beside_max


def least_busy(
    candidates: Sequence[Gpu], gpus: int, utilisation: Mapping[Gpu, float], beside: Mapping[Gpu, int]
) -> list[Gpu]:
    """The GPUs of an opportunistic job; empty when there are too few. `beside`: opportunistic jobs on each."""
    chosen = sorted(candidates, key=lambda gpu: (utilisation.get(gpu, 0.0), beside.get(gpu, 0), gpu))[:gpus]
    return sorted(chosen) if len(chosen) == gpus else []


def least_shared(
    candidates: Sequence[Gpu], gpus: int, beside: Mapping[Gpu, int], host_of: Callable[[Gpu], Any] | None = None
) -> list[Gpu]:
    """The GPUs of a guaranteed job; empty when there are too few. `host_of`: set when it wants one host for all of
    them."""
    if host_of is not None:
        fewest = _tightest(_by_host(candidates, host_of), gpus)
        candidates = [gpu for gpu in candidates if host_of(gpu) == fewest]
    chosen = sorted(candidates, key=lambda gpu: (beside.get(gpu, 0), gpu))[:gpus]
    return sorted(chosen) if len(chosen) == gpus else []


def which_to_keep(
    mine: Sequence[Gpu],
    candidates: Sequence[Gpu],
    gpus: int,
    beside: Mapping[Gpu, int],
    host_of: Callable[[Gpu], Any] | None = None,
) -> list[Gpu]:
    """The GPUs that a gang keeps while it does not fit: what it has, `mine`, and more up to what it asks for; where it
    wants one host, on that which has most. It never shrinks while `candidates`, `mine` among them, do not."""
    wanted = list(candidates)
    if host_of is not None:
        there = _by_host(candidates, host_of)
        hosts = gpus_to_keep(_by_host(mine, host_of), there, dict.fromkeys(there, gpus), 1, gpus)
        wanted = [gpu for gpu in candidates if host_of(gpu) in hosts]
    has = [gpu for gpu in mine if gpu in candidates]
    more = sorted((gpu for gpu in wanted if gpu not in has), key=lambda gpu: (beside.get(gpu, 0), gpu))
    return sorted([*has, *more[: max(0, gpus - len(has))]])


def _by_host(gpus: Sequence[Gpu], host_of: Callable[[Gpu], Host]) -> dict[Host, int]:
    counts: dict[Host, int] = {}
    for gpu in gpus:
        counts[host_of(gpu)] = counts.get(host_of(gpu), 0) + 1
    return counts


def _tightest(room: Mapping[Any, int], gpus: int) -> Any:
    """The host with the fewest GPUs that suffice; None when none has enough."""
    whole = {host: count for host, count in room.items() if count >= gpus}
    return next(iter(consolidate(whole, gpus))) if whole else None

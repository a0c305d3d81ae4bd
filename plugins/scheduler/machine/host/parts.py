"""Which of a host's GPUs, or which parts of them, a gang gets where GPUs are shared (AntMan §3.3).

A guaranteed gang takes GPUs that no other guaranteed job has, first those with the fewest beside it: whatever the
others use there, they are pressed before it starts. An opportunistic one takes parts of GPUs that are not busy, have
memory for it now, and where nothing else speaks against it; each other GPU has its reason, in words.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from covey.core.ids import HostId, JobId
from plugins.facts import GpuUse
from plugins.scheduler.machine.leader.shared_capacity import Sharing
from plugins.scheduler.policy.shared import device_of, has_room_beside, is_part, least_busy, least_shared, part_of


class Hold(msgspec.Struct, frozen=True):
    """GPUs of one grant on this host."""

    job: JobId
    epoch: int
    attempt: int
    coordinator: HostId
    gpus: tuple[str, ...]
    """The UUIDs of GPUs, or the names of parts of GPUs (`policy/shared.py`)."""
    port: int
    started: bool = False
    guaranteed: bool = True
    """Whether the job is guaranteed now; this matters for parts only."""
    joins: bool = False
    """The hold is for ranks that are to join others of this grant, which run here and have a hold of their own."""
    host_memory: int = 0
    """Memory of this host that the job may use, bytes; 0: not said."""
    cpus: int = 0
    """Processors of this host that these ranks may use; 0: not said."""

    @property
    def key(self) -> tuple[JobId, int, bool]:
        return self.job, self.epoch, self.joins

    @property
    def is_guest(self) -> bool:
        """Whether the hold has parts beside others, and was not upgraded."""
        return not self.guaranteed and any(map(is_part, self.gpus))


class WantedGpus(msgspec.Struct, frozen=True):
    """What a gang asks of one host."""

    gpus: int
    opportunistic: bool
    memory_bytes: int = 0
    """Bytes that it asks for on each GPU; 0: it did not say."""
    apart_from: tuple[JobId, ...] = ()
    """Guaranteed jobs beside which it must not be."""


class ChosenGpus(msgspec.Struct, frozen=True):
    """The GPUs chosen for a gang; `gpus` is empty when there are too few."""

    gpus: tuple[str, ...]
    there: int
    """The number of GPUs that would do."""
    why_not: str = ""
    """Why the GPUs that would not do refuse, in words."""


def refusals(refused: Mapping[str, str]) -> str:
    """How many GPUs take no job, and why: `1 refused (...), 2 refused (...)`. `refused`: by GPU."""
    said = Counter(f"refused ({why})" for why in refused.values())
    return ", ".join(f"{count} {why}" for why, count in sorted(said.items()))


def choice(
    wish: WantedGpus,
    gpus: Sequence[str],
    holds: Iterable[Hold],
    uses: Mapping[str, GpuUse],
    sharing: Sharing,
    refused: Mapping[str, str] = {},
) -> ChosenGpus:
    """Choose GPUs, or parts of them. `gpus`: this host's, by number; `uses`: what was measured of them; `refused`:
    those that take no job, and why."""
    owners, guests = _owners(holds)
    taken = {name for hold in holds for name in hold.gpus}
    against = {
        gpu: f"refused ({refused[gpu]})"
        if refused.get(gpu)
        else _against(gpu, wish, owners, guests[gpu], uses.get(gpu), sharing)
        for gpu in gpus
    }
    fit = [number for number, gpu in enumerate(gpus) if not against[gpu]]
    beside = {number: guests[gpus[number]] for number in fit}
    if wish.opportunistic:
        busy = {number: uses[gpus[number]].utilization or 0.0 for number in fit}
        chosen = least_busy(fit, wish.gpus, busy, beside)
    else:
        chosen = least_shared(fit, wish.gpus, beside)
    names = [_free_part(gpus[number], taken) if wish.opportunistic else gpus[number] for number in chosen]
    said = Counter(why for why in against.values() if why)
    return ChosenGpus(tuple(names), len(fit), ", ".join(f"{count} {why}" for why, count in sorted(said.items())))


def _owners(holds: Iterable[Hold]) -> tuple[dict[str, JobId], Counter[str]]:
    """The owner of each GPU, and how many guests are beside that owner."""
    owners: dict[str, JobId] = {}
    guests: Counter[str] = Counter()
    for hold in holds:
        for device in map(device_of, hold.gpus):
            if hold.is_guest:
                guests[device] += 1
            else:
                owners[device] = hold.job
    return owners, guests


def _against(
    gpu: str, wish: WantedGpus, owners: Mapping[str, JobId], guests: int, use: GpuUse | None, sharing: Sharing
) -> str:
    """Why this GPU does not suit the wish, said behind a count of GPUs; empty: it does."""
    if use is not None and use.refusal:
        return f"refused ({use.refusal})"
    if not wish.opportunistic:
        return "held by guaranteed jobs" if gpu in owners else ""
    if use is None:
        return "not measured yet"
    if owners.get(gpu) in wish.apart_from:
        return f"held by {owners[gpu]}, which this job slows down"
    if guests >= sharing.beside:
        return f"with {guests} opportunistic jobs already"
    if use.utilization is None and (guests or gpu in owners):
        return "in use, whose driver does not say how much"
    if use.utilization is not None and not has_room_beside(use.utilization, guests, sharing.beside, sharing.busy):
        return f"busy for {sharing.busy:.0%} of the last 10 s or more"
    if use.free_bytes < wish.memory_bytes:
        return "without enough free memory"
    return ""


def _free_part(device: str, taken: set[str]) -> str:
    """The first free part's name. An upgraded job keeps its part, so there may be one part more than jobs beside it."""
    number = 1
    while part_of(device, number) in taken:
        number += 1
    return part_of(device, number)

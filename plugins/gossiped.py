"""What hosts gossip about themselves: key -> Struct, msgpack, at most 256 bytes each. A value is a hint with an age."""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from covey.core.ids import HostId, JobId
from covey.ports.addresses import Address
from gossip.types import HostView
from gossip.types import MaybeHostName as HostName


class Endpoints(msgspec.Struct, frozen=True):
    """Key `endpoints`: where this host's agent answers."""

    control: Address
    public_key: bytes
    boot: int
    """The number of starts of the agent; a message from an older boot is stale."""
    http: Address = ""
    read_open: bool = True
    """Whether whoever connects to `http` reads everything; agents that do not say so did that, or listened on loopback
    alone."""
    version: Annotated[str, Meta(max_length=24)] = ""
    """The version of Covey that runs there; empty: it does not say."""


def version_of(view: HostView) -> str:
    """The version of Covey that a host says it runs; empty: it does not say."""
    said = view.value("endpoints", Endpoints)
    return said.version if isinstance(said, Endpoints) else ""


class Spare(msgspec.Struct, frozen=True):
    """Key `spare`: memory above headroom. It is a hint with an age: a host that is chosen is asked live and may
    refuse."""

    slab_bytes: int
    """Bytes that a slab of this host's own size takes at a lender, with seals: hosts with that size hear of each slab
    that fits."""
    slabs_free: int
    slabs_lent: int
    rack: Annotated[str, Meta(max_length=63)] = ""
    """The rack that the host is in, as its agent.toml says; empty: no label."""


class LentNow(msgspec.Struct, frozen=True, array_like=True):
    """Key `lent`: what this host lends to tenants and jobs, so that budgets hold over the rack
    (`plugins/memory/policy/budgets.py`)."""

    accounts: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 40)], ...], Meta(max_length=64)] = ()
    """The accounts that have most of their budgets here, one number each: CRC-32 of `tenant/NAME` or `job/ID`, and
    KiB."""


class GpusNow(msgspec.Struct, frozen=True):
    """Key `gpus`: what a gang could get here. It is a hint."""

    total: int
    """All GPUs that this host has, also those of which its driver tells nothing now."""
    free: int
    """Free GPUs that take jobs."""
    model: str
    simulated: bool
    out: int = 0
    """GPUs among `total` that no job holds and that take none, because they are sick or their state is not known."""
    why: Annotated[str, Meta(max_length=96)] = ""
    """What is wrong with GPUs, the worst first, or why it is not known which are here; empty: all take jobs."""
    known: bool = True
    """Whether this host knows which GPUs it has."""
    held: Annotated[dict[JobId, Annotated[str, Meta(max_length=8)]], Meta(max_length=8)] = {}
    """Jobs that hold GPUs here which are sick or which they do not use -> the condition, or `idle`; a few of them."""


class MemoryHere(msgspec.Struct, frozen=True):
    """Key `memory`: memory and processors of this host, for jobs that say how much of them they may take. It is a
    hint."""

    total_bytes: int
    """The smaller of the machine's and of the agent's cgroup; 0: not known."""
    free_bytes: int
    """What programs could have now, in steps of a 64th of the total."""
    cpus: int = 0
    """Processors that its agent may use; 0: not known."""


class GpusShared(msgspec.Struct, frozen=True):
    """Key `gpus_shared`: which GPUs are here and how busy they are, for jobs beside others. It is a hint, and only in
    racks where some host shares its GPUs."""

    setting: Annotated[int, Meta(ge=0, le=64)]
    """The setting `beside` in agent.toml there."""
    takes: Annotated[int, Meta(ge=0, le=64)]
    """The most opportunistic jobs on one GPU now; 0 while nothing measures them."""
    names: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...], Meta(max_length=64)]
    """CRC-32 of each GPU's UUID, by number; empty when two of them are alike."""
    use: Annotated[tuple[Annotated[int, Meta(ge=0, le=127)], ...], Meta(max_length=64)]
    """Utilization of each GPU over the last 10 s, in percent; 127: it takes no job now."""


class LateHost(msgspec.Struct, frozen=True):
    """A host for which the other ranks of a job waited, in percent of the job's newest minutes."""

    host: HostId
    job: JobId
    percent: int


class LateNow(msgspec.Struct, frozen=True):
    """Key `late`: hosts for whose ranks others wait again and again, as seen by this host, which sums for them."""

    hosts: Annotated[tuple[LateHost, ...], Meta(max_length=8)] = ()


class DrainedNow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Key `drained`: whether this host is drained or cordoned, as its copy of the log says."""

    by: str
    """Who drains or cordons the host, cut short; empty: nobody does."""
    jobs: int = 0
    """The number of jobs that still have ranks here."""
    cordon: bool = False
    """What is there stays, and slabs and sums still come."""
    why: Annotated[str, Meta(max_length=96)] = ""
    """Why, cut short; empty: nobody says."""
    wall_s: float = 0.0
    """When it began, by the wall clock of whoever drained or cordoned it, s; 0: nobody says why, nor when."""


def drained(view: HostView) -> DrainedNow | None:
    """What a host says of its draining; None: it is not drained, and takes slabs and sums."""
    said = closed(view)
    return said if said is not None and not said.cordon else None


def closed(view: HostView) -> DrainedNow | None:
    """What a host says of its being drained or cordoned; None: it takes jobs, too."""
    said = view.value("drained", DrainedNow)
    return said if isinstance(said, DrainedNow) and said.by else None


def is_drained(host: HostId, views: Iterable[HostView]) -> bool:
    """Whether this host, which is among `views`, says that it is drained."""
    return any(drained(view) for view in views if view.host == host)


class LogNow(msgspec.Struct, frozen=True, array_like=True):
    """Key `log`: which rack's log this host follows."""

    rack: Annotated[bytes, Meta(max_length=8)] = b""
    """The log's random name, from its first entry (`agent/raft/messages.py`); empty: the host is not certain of any."""
    leader: HostName = HostId("")
    """The leader that the host follows, itself when it leads; empty: none now."""


class WrongNow(msgspec.Struct, frozen=True, array_like=True):
    """Key `wrong`: what this host saw that a person has to mend."""

    names: Annotated[tuple[HostName, ...], Meta(max_length=8)] = ()
    """Names that two machines claim."""
    full: HostName = HostId("")
    """A host that this one does not let in, since it knows `hosts_max` hosts; empty: there is room."""


class AggregatorNow(msgspec.Struct, frozen=True):
    """Key `aggregator`: who sums tensors here, and how busy it is. It is a hint."""

    address: Address
    """The address where the process that sums listens, or `asleep`: the first offer starts it. Empty: nothing is summed
    there."""
    jobs: int
    load: float
    """The measured part of the time that the process worked, 0..1."""
    cycle_us: int = 0
    """The cycle C of the jobs that it promised to sum, microseconds (AutoPS §4.3.3.2); 0 without any."""
    used_us: int = 0
    """The work W of these jobs in one cycle, microseconds."""
    lanes: int = 1

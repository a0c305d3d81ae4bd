"""Who should sum a job, and who decides that: pure functions.

AutoPS has one pMaster that assigns every tensor. Here each job has a *home*: the agent of the host of its lowest live
rank. It ranks the aggregators by what they gossip and offers the job to the best; the aggregator itself accepts or
refuses on its own state, so stale gossip costs a retry, never an overload.

Epochs are ballots: a home may only use numbers that are congruent to its lowest rank modulo the world size, so two
agents that both take themselves for the home never name the same epoch, and the higher one wins.
"""

import hashlib
from collections.abc import Collection, Sequence

import msgspec

from covey.core import HostId, JobId
from covey.tensorwire import grant_of
from plugins.facts import Place


class Candidate(msgspec.Struct, frozen=True):
    """A host that sums tensors, as gossip shows it."""

    host: HostId
    suspect: bool
    load: float
    """Work per cycle over cycle, 0..1 (AutoPS W/C)."""
    jobs: int
    age_s: float


AGE_S = 10.0
"""Older word of a host counts as if it were suspect, seconds; gossip renews it each second or two."""


def ranked(job: JobId, candidates: Sequence[Candidate], avoid: Collection[HostId] = ()) -> list[HostId]:
    """Hosts to offer a job to, best first: those just found wanting last, then suspect or unheard-of ones, then by load
    in tenths and by jobs. Jobs that see the same gossip in the same moment spread over equals by a hash."""

    def key(candidate: Candidate) -> tuple[bool, bool, int, int, bytes]:
        doubtful = candidate.suspect or candidate.age_s > AGE_S
        spread = hashlib.blake2b(f"{job} {candidate.host}".encode(), digest_size=8).digest()
        return candidate.host in avoid, doubtful, int(candidate.load * 10), candidate.jobs, spread

    return [candidate.host for candidate in sorted(candidates, key=key)]


def refusal(jobs: int, jobs_max: int, load: float, load_max: float) -> str:
    """Why an aggregator takes no further job; empty when it does."""
    if jobs >= jobs_max:
        return f"{jobs} jobs are summed here already (jobs_max)"
    if load > load_max:
        return f"busy {load:.0%} of the time (load_max {load_max:.0%})"
    return ""


def home(places: Sequence[Place], gone: Collection[HostId]) -> Place | None:
    """Where the lowest live rank runs; None when all its hosts are gone."""
    alive = [place for place in places if place.host not in gone]
    return min(alive, key=lambda place: place.ranks[0], default=None)


def next_epoch(grant: int, world_size: int, rank: int, above: int) -> int:
    """The lowest epoch of this grant above `above` that only the home with this lowest rank may use."""
    base = max(above, grant << 32) + 1
    return base + (rank - (base & 0xFFFFFFFF)) % world_size


def of_run(epoch: int, grant: int) -> bool:
    """Whether an assignment belongs to this run of the job."""
    return grant_of(epoch) == grant


def load_now(old: float, busy_s: float, elapsed_s: float) -> float:
    """Part of the time that went into sums, 0..1, averaged over about 5 measurements."""
    measured = min(1.0, max(0.0, busy_s / elapsed_s)) if elapsed_s > 0 else old
    return 0.8 * old + 0.2 * measured

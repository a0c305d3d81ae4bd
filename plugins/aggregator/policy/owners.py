"""The host that should sum a job, and the host that decides that: pure functions.

AutoPS has one pMaster that assigns every tensor. Here each job has a *coordinator*: the agent of the host of its
lowest live rank. It ranks the aggregators by what they gossip and offers the job to the best; the aggregator itself
accepts or refuses on its own state, so stale gossip costs a retry, never an overload. A job's first aggregator, for its
trial iterations, is the least busy one (§4.3.3.1 starts new ones for them); with its demand known, the best fit counts.

Epochs are ballots: a coordinator may only use numbers that are congruent to its lowest rank modulo the world size. So
two agents that both take themselves for the coordinator never name the same epoch, and the higher one wins.
"""

import hashlib
from collections.abc import Collection, Sequence
from fractions import Fraction

import msgspec

from covey.core.ids import HostId, JobId
from covey.tensors.numbers.tensor_wire import grant_of
from plugins.aggregator.messages import Demand
from plugins.aggregator.policy.cycle import FILL, Cycle
from plugins.aggregator.policy.pools import best_pool, free_of, pools_of
from plugins.facts import Place


class Candidate(msgspec.Struct, frozen=True):
    """A host that sums tensors, as gossip shows it."""

    host: HostId
    suspect: bool
    load: float
    """Measured load of its process, 0..1."""
    jobs: int
    age_s: float
    cycle_us: int = 0
    """C of its promises in microseconds; 0 without any."""
    used_us: int = 0
    """W, microseconds of work in that cycle."""
    lanes: int = 1

    @property
    def cycle(self) -> Cycle:
        """Its cycle as far as gossip tells it: without the jobs."""
        return Cycle({}, self.lanes, 1, self.cycle_us, self.used_us, FILL)


AGE_S = 10.0
"""Age of gossip in seconds beyond which a host counts as suspect; gossip is renewed each second or two."""


def ranked(
    job: JobId,
    candidates: Sequence[Candidate],
    avoid: Collection[HostId] = (),
    prefers: HostId | None = None,
    stays: bool = False,
) -> list[HostId]:
    """Hosts to offer a job to, best first: by load in tenths, then by jobs, then the preferred one; if the job `stays`
    that one comes before the others. Suspect and unheard-of hosts come later, those to avoid last. Jobs that see the
    same gossip in the same moment spread over equals by a hash."""

    def key(candidate: Candidate) -> tuple[bool, bool, bool, int, int, bool, bytes]:
        doubtful = candidate.suspect or candidate.age_s > AGE_S
        spread, other = _spread(job, candidate.host), candidate.host != prefers
        load = int(candidate.load * 10)
        return candidate.host in avoid, doubtful, stays and other, load, candidate.jobs, other, spread

    return [candidate.host for candidate in sorted(candidates, key=key)]


def ranks_ranked(
    places: Sequence[Place], gone: Collection[HostId], prefers: HostId | None, avoid: Collection[HostId] = ()
) -> list[HostId]:
    """Hosts whose ranks are asked to own a table of their job, best first: the preferred one, then the others in the
    order of their ranks from there on, so that the tables of a lost host go to different ones; hosts to avoid last."""
    hosts = list(dict.fromkeys(place.host for place in places))
    first = hosts.index(prefers) if prefers in hosts else 0
    alive = [host for host in (*hosts[first:], *hosts[:first]) if host not in gone]
    return sorted(alive, key=lambda host: host in avoid)


QUIET = Fraction(1, 3)
"""Planned load up to which an aggregator may get jobs that hurt elsewhere (`machine.pool.PoolRules.quiet`)."""


def ranked_for(
    job: JobId,
    demand: Demand,
    candidates: Sequence[Candidate],
    quiet: bool = False,
    stays_on: HostId | None = None,
) -> tuple[list[HostId], list[HostId]]:
    """Hosts to offer a job to whose demand is known: those that by gossip have room, best first; and the others, which
    may have some by now. A table that stays on a host comes back there.

    First the pool that suffices (`pools.best_pool`); in it the host with the least free time that suffices (best fit,
    Pseudocode 3, 16-21), then one without jobs (a new aggregator, 22-23). With `quiet` only hosts up to a third full.
    """
    pool = _pool_of(demand, candidates)

    def key(candidate: Candidate) -> tuple[bool, bool, bool, bool, int, bytes]:
        doubtful = candidate.suspect or candidate.age_s > AGE_S
        room, other = _free_with(demand, candidate) or 0, candidate.host != stays_on
        return doubtful, other, candidate.host not in pool, not candidate.cycle_us, room, _spread(job, candidate.host)

    def has_room(candidate: Candidate) -> bool:
        if quiet and candidate.cycle.load > QUIET:
            return False
        return not candidate.suspect and _free_with(demand, candidate) is not None

    likely = [one for one in sorted(candidates, key=key) if has_room(one)]
    rest = [one.host for one in sorted(candidates, key=key) if one not in likely]
    return [one.host for one in likely], rest


def _free_with(demand: Demand, candidate: Candidate) -> int | None:
    """Microseconds that would be free for the job, as far as C and W tell; None when that does not suffice. The job's
    own loss is not judged here: in a longer cycle, which only the aggregator can compute, it may vanish."""
    now = candidate.cycle
    us = max(now.us, demand.period_us)
    free_us = now.free_in(us, now.used_us * us // now.us if now.us else 0, candidate.jobs + 1)
    return free_us if free_us >= us // demand.period_us * demand.work_us else None


def _pool_of(demand: Demand, candidates: Sequence[Candidate]) -> frozenset[HostId]:
    known = {one.host: one for one in candidates}
    groups = {str(at): hosts for at, hosts in enumerate(pools_of(sorted(known)))} if known else {}
    free = {name: free_of(known[host].cycle for host in hosts) for name, hosts in groups.items()}
    best = best_pool(free, Fraction(demand.work_us, demand.period_us))
    return frozenset(groups[best]) if best is not None else frozenset(known)


def _spread(job: JobId, host: HostId) -> bytes:
    return hashlib.blake2b(f"{job} {host}".encode(), digest_size=8).digest()


def refusal(jobs: int, jobs_max: int, load: float, load_max: float) -> str:
    """Why an aggregator takes no further job; empty when it does."""
    if jobs >= jobs_max:
        return f"{jobs} jobs are summed here already, the limit (jobs_max)"
    if load > load_max:
        return f"busy {load:.0%} of the time (load_max {load_max:.0%})"
    return ""


ERA_BITS = 20
"""Low bits of an epoch, which count within an era."""
ERA_MAX = (1 << 32 - ERA_BITS) - 1


def era_of(config: int) -> int:
    """The era of a gang's configuration (`JobPlaced.config`). A host that knows of an earlier one may take a rank to be
    on a host that it has left, and is no coordinator to those that know of later ones."""
    return min(ERA_MAX, config)


def era_in(epoch: int) -> int:
    """Era of the coordinator that chose this epoch."""
    return epoch >> ERA_BITS & ERA_MAX


def is_old(config: int, epoch: int) -> bool:
    """Does another coordinator know of a later configuration than this, by the epoch that it chose? Then the log is
    behind here."""
    return era_in(epoch) > era_of(config)


def next_epoch(grant: int, world_size: int, rank: int, above: int, era: int = 0) -> int:
    """The lowest epoch of this grant above `above` that only the coordinator with this lowest rank may use in this era,
    which is not below that of `above`."""
    base = max(above, grant << 32 | era << ERA_BITS) + 1
    return base + (rank - (base & 0xFFFFFFFF)) % world_size


def of_run(epoch: int, grant: int) -> bool:
    """Does an assignment of this epoch belong to this run of the job?"""
    return grant_of(epoch) == grant


def load_now(old: float, busy_s: float, elapsed_s: float, lanes: int = 1, lanes_s: float = 0.0) -> float:
    """Part of the time that its process worked, or all of its lanes together, whichever is busier, 0..1, averaged over
    about 5 measurements."""
    busiest_s = max(busy_s, lanes_s / lanes)
    measured = min(1.0, max(0.0, busiest_s / elapsed_s)) if elapsed_s > 0 else old
    return 0.8 * old + 0.2 * measured

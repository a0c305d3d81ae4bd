"""The words for why a job can never run, and for what a waiting job waits.

Every answer says which jobs are ahead, whose they are, and what would change it.
"""

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple, assert_never

import msgspec

from covey.core.ids import HostId, JobId
from covey.core.units import format_seconds, format_size
from plugins.facts import MemoryKilled
from plugins.gossiped import MemoryHere
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy.order import Row, queue_of
from plugins.scheduler.policy.place import slots

NAMED_MAX = 3
"""The number of jobs that are named one by one before the rest becomes a number."""

BEFORE = "; before: "
"""What stands between why a queued job waits and what became of it before, which may have words of its hosts."""


class Never(msgspec.Struct, frozen=True):
    """A job that can never run as asked. `code` as in `plugins.base.Refused`: 4 quota, 7 the rack."""

    code: int
    what: str
    why: str
    next: str


class GpusOut(msgspec.Struct, frozen=True):
    """GPUs of one host that take no job now."""

    count: int
    why: str
    """What is wrong with the worst of these GPUs."""


def gpus(count: int) -> str:
    """A number of GPUs in words: `1 GPU`, `4 GPUs`."""
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def processes(count: int) -> str:
    """A number of processes in words: `1 process`, `4 processes`."""
    return f"{count} process" if count == 1 else f"{count} processes"


def owners(hosts: Sequence[HostId]) -> str:
    """The hosts that are to own tables, in words: `tables 0 2 on h1, 1 on h2`; an empty name says none."""
    tables: dict[HostId, list[str]] = {}
    for table, host in enumerate(hosts):
        if host:
            tables.setdefault(host, []).append(str(table))
    return "tables " + ", ".join(f"{' '.join(each)} on {host}" for host, each in sorted(tables.items()))


def workers(spec: JobSpec) -> str:
    """The number of a job's workers, or the range of an elastic one: `4`, `4..16`."""
    return f"{spec.workers}..{spec.workers_max}" if spec.elastic else str(spec.workers)


def asks(spec: JobSpec) -> str:
    """What a job asks for, in words: `4 workers x 2 GPUs`; of an array, what each of its tasks does."""
    each = f"{workers(spec)} x {gpus(spec.gpus_per_worker)}" if spec.gpus else f"{workers(spec)} without GPUs"
    return f"array {spec.array} of {each}" if spec.array else each


def time_limit(seconds: float | None) -> str:
    """A time limit in words: `2 h`, `no limit`."""
    return "no limit" if seconds is None else format_seconds(seconds)


def not_elastic(spec: JobSpec) -> str:
    """Why the number of a job's processes, and what each of them does, stays."""
    return f"it was submitted with {spec.workers} workers, and not with a range of them"


def too_few_left(hosts: Sequence[HostId]) -> str:
    """Why no processes of a job end while these hosts of it are away."""
    return f"{', '.join(hosts)} is not alive, and what runs there may be lost: it would keep too few others"


def gpus_out(out: Mapping[HostId, GpusOut]) -> str:
    """GPUs that take no job, in words: `GPUs that take no job: h2 2 (XID 48: an uncorrectable memory error)`; empty:
    all take jobs."""
    rows = [f"{host} {one.count} ({one.why})" for host, one in sorted(out.items())]
    more = f" and {len(rows) - NAMED_MAX} more hosts" if len(rows) > NAMED_MAX else ""
    return f"GPUs that cannot take jobs: {', '.join(rows[:NAMED_MAX])}{more}" if rows else ""


def lack_room(spec: JobSpec, lacks: Mapping[HostId, str]) -> str:
    """Hosts without room for a job's memory and processors, in words: `no room for its 8 GiB of host memory: h2 has 3
    GiB of memory free`; empty: all have room. `lacks`: why, by host, in words that follow its name."""
    rows = [f"{host} {why}" for host, why in sorted(lacks.items())]
    more = f" and {len(rows) - NAMED_MAX} more hosts" if len(rows) > NAMED_MAX else ""
    if not rows:
        return ""
    memory = f"{format_size(spec.host_memory)} of host memory" if spec.host_memory else ""
    cpus = f"{_processors(spec.cpus)} for each worker" if spec.cpus else ""
    return f"no room for its {' and '.join(filter(None, (memory, cpus)))}: {', '.join(rows[:NAMED_MAX])}{more}"


def _processors(count: int) -> str:
    return "1 processor" if count == 1 else f"{count} processors"


def over_cpus(spec: JobSpec, memory: Mapping[HostId, MemoryHere]) -> Never | None:
    """Why no host has the processors of one worker of this job, even if it were empty; None: one has. `memory`: of all
    hosts."""
    largest = max((said.cpus for said in memory.values()), default=0)
    if not memory or any(said.cpus <= 0 for said in memory.values()) or spec.cpus <= largest:
        return None
    why = f"each worker asks for {_processors(spec.cpus)}, and the largest host has {largest}"
    return Never(7, f"{spec.called} can never be placed", why, "submit it with fewer --cpus")


def over_memory(spec: JobSpec, memory: Mapping[HostId, MemoryHere]) -> Never | None:
    """Why no host could hold this job's memory, even if it were empty; None: one could. `memory`: of all hosts."""
    largest = max((said.total_bytes for said in memory.values()), default=0)
    if not memory or spec.host_memory <= largest:
        return None
    why = f"it may use {format_size(spec.host_memory)} of a host's memory, and the largest has {format_size(largest)}"
    return Never(7, f"{spec.called} can never be placed", why, "submit it with less --mem")


def ordinal(number: int) -> str:
    """An ordinal number: `1st`, `2nd`, `3rd`, `4th`, `11th`."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def over_rack(spec: JobSpec, totals: Mapping[HostId, int]) -> Never | None:
    """Why no host, or not the whole rack, could hold this gang even if it were empty; None: it could. `totals`: GPUs
    per host."""
    have = sum(totals.values())
    largest = max(totals.values(), default=0)
    if spec.gpus_per_worker > largest:
        why = f"each worker needs {gpus(spec.gpus_per_worker)} on one host, and the largest host has {largest}"
        return Never(7, f"{spec.called} can never be placed", why, "ask for fewer gpus_per_worker")
    fits = _fits_in_empty(spec, totals)
    if fits >= spec.workers:
        return None
    what = f"{spec.called} can never be placed"
    if spec.pack == "host" and spec.gpus <= have:
        why = f"all its workers must be on one host, which needs {gpus(spec.gpus)}, and the largest host has {largest}"
        return Never(7, what, why, "submit it without --pack host, or ask for fewer workers")
    if spec.pack == "apart" and spec.gpus <= have:
        why = f"{_needs(spec)}, and this rack has only {fits} such hosts"
        return Never(7, what, why, f"ask for at most {fits} nodes, or use --workers, which may share a host")
    if spec.gpus > have:
        why = f"it needs {gpus(spec.gpus)}, and this rack has {have} on {len(totals)} hosts"
    else:
        why = (
            f"this rack's hosts have room for {fits} workers with {gpus(spec.gpus_per_worker)} "
            f"each, and the job has {spec.workers}"
        )
    return Never(7, what, why, f"ask for at most {fits} workers, or add hosts (agentctl gpus shows what there is)")


def to_end(hosts: Sequence[HostId]) -> str:
    """Why processes of an elastic job on these hosts, which are to end, still run."""
    return f"its processes on {', '.join(hosts)} run until one that stays says that it has the job's state"


def range_over_rack(spec: JobSpec, totals: Mapping[HostId, int]) -> str:
    """Why an elastic job never has as many processes as its range allows, though it may run; empty: it could have them.
    `totals`: GPUs per host."""
    if not spec.elastic or not spec.gpus_per_worker:
        return ""
    most = sum(total // spec.gpus_per_worker for total in totals.values())
    if most >= spec.workers_max:
        return ""
    room = f"the hosts that it may use have room for {processes(most)} with {gpus(spec.gpus_per_worker)} each"
    return f"it was submitted with --workers {workers(spec)}, and {room}: it never has more than {most} here"


def _fits_in_empty(spec: JobSpec, totals: Mapping[HostId, int]) -> int:
    """Workers of this gang that the rack could hold if it were empty."""
    if not spec.gpus_per_worker:
        return len(totals) if spec.pack == "apart" else spec.workers
    return sum(slots(total, spec.workers, spec.gpus_per_worker, spec.pack) for total in totals.values())


def over_quota(spec: JobSpec, quota: int | None, may_demote: bool = False) -> Never | None:
    """Why the job asks for more than the tenant could ever hold at once; None: it does not. Opportunistic jobs need no
    quota, nor do jobs of class auto in the end where they are demoted."""
    needs_none = spec.job_class == "opportunistic" or (spec.job_class == "auto" and may_demote)
    if quota is None or needs_none or spec.gpus <= quota:
        return None
    why = f"it needs {gpus(spec.gpus)}, and the quota of tenant {spec.tenant} is {quota}"
    next = f"ask for at most {gpus(quota)}, submit with class opportunistic, or raise the quota of {spec.tenant}"
    return Never(4, f"{spec.called} can never run", why, next)


def demoted(spec: JobSpec, waited_s: float) -> str:
    """What happened to a job of class auto that waited for `waited_s` seconds."""
    return (
        f"it waited {format_seconds(waited_s)} for the quota of tenant {spec.tenant}: from now on it is opportunistic: "
        "it runs on GPUs that guaranteed jobs leave free, and yields to them"
    )


def not_stopped_again(stops: int) -> str:
    """Why other jobs do not stop one that was stopped so often without having saved."""
    times = "once" if stops == 1 else f"{stops} times"
    return f"it was stopped {times} for others and has never saved: it is not stopped for others again until it saves"


def not_stopped_for_tenant(tenant: str, job: JobId) -> str:
    """Why other jobs do not stop one that never saved, since stops lost what others of its tenant had not saved."""
    return (
        f"it has never saved, and jobs of tenant {tenant} that were stopped had not either: it is not stopped for "
        f"others until it saves (agentctl preempt --test {job} shows whether it does when it is told to end)"
    )


def upgraded(spec: JobSpec, used: int, quota: int | None) -> str:
    """What happened to a demoted job. `used`: GPUs of its tenant, its own among them."""
    limit = "which has no limit" if quota is None else f"of which {used} of {quota} are used now"
    return f"its {gpus(spec.gpus)} count against the quota of tenant {spec.tenant}, {limit}: it is guaranteed"


def shares(other: JobId, job_class: str, hosts: Sequence[HostId]) -> str:
    """Which job shares GPUs with a job from now on: `with j3 (opportunistic) on h1, h2`."""
    return (
        f"with {other} ({job_class}) on {', '.join(hosts[:NAMED_MAX])}{' and more' if len(hosts) > NAMED_MAX else ''}"
    )


def keeps(wanted: int, kept: Mapping[HostId, int]) -> str:
    """The GPUs kept, in words: `2 of 4 GPUs kept: h1 2`."""
    if not kept:
        return "its GPUs are no longer reserved; other jobs may use them"
    by_host: dict[str, int] = {}
    for place, count in kept.items():  # where GPUs are shared each is kept by itself: `h1/8f2c01aa`
        host = place.partition("/")[0]
        by_host[host] = by_host.get(host, 0) + count
    where = ", ".join(f"{host} {count}" for host, count in sorted(by_host.items()))
    return f"{sum(kept.values())} of {gpus(wanted)} reserved: {where}"


def named(rows: Sequence[Row], count: int | None = None) -> str:
    """Jobs in words: `j1 (alice, 2 GPUs), j2 (bob, 1 GPU) and 4 more`. `count`: how many there are, if `rows` are the
    first few."""
    shown = ", ".join(f"{row.id} ({row.tenant}, {gpus(row.gpus)})" for row in rows[:NAMED_MAX])
    rest = (len(rows) if count is None else count) - NAMED_MAX
    return f"{shown} and {rest} more" if rest > 0 else shown


class Position(msgspec.Struct, frozen=True):
    """The position of one job in an order."""

    row: Row
    ahead: int
    """The number of jobs ahead of it that wait."""
    passed: bool
    """Whether one of these was admitted later and asks for fewer GPUs."""


class QueuePositions:
    """What an order says of all its jobs, found by one walk down it: what a job waits for is then said without another.
    Making it takes time in proportion to jobs times distinct widths; asking it takes none."""

    def __init__(self, order: Sequence[Row]) -> None:
        self.positions: dict[JobId, Position] = {}
        self.waiting: list[Row] = []
        self.holders: list[Row] = []
        """The jobs that run, in order."""
        self.held = 0
        """The GPUs of the jobs that run."""
        self.holders_of: dict[str, list[Row]] = {}
        """Tenant -> its jobs that run, in order."""
        self.used: dict[str, int] = {}
        """GPUs of a tenant's holders that count against its quota."""
        newest: dict[int, int] = {}
        """Width -> newest job of this width that waits, among those walked so far."""
        for row in order:
            passed = any(number > row.number and gpus < row.gpus for gpus, number in newest.items())
            self.positions[row.id] = Position(row, len(self.waiting), passed)
            if row.running:
                self._hold(row)
            else:
                self.waiting.append(row)
                newest[row.gpus] = max(row.number, newest.get(row.gpus, 0))

    def _hold(self, row: Row) -> None:
        self.holders.append(row)
        self.held += row.gpus
        self.holders_of.setdefault(row.tenant, []).append(row)
        if row.job_class != "opportunistic":
            self.used[row.tenant] = self.used.get(row.tenant, 0) + row.gpus


class OrderInForce(NamedTuple):
    """What the order of jobs goes by on this rack."""

    thresholds: Sequence[float]
    """Attained service at which a job leaves a queue for the next lower one, GPU·s."""
    quotas: Mapping[str, int | None]
    """GPUs of each tenant that has a quota of its own; None: not limited."""
    default: int | None
    """GPUs of every tenant without a quota of its own; None: not limited."""
    preempts: bool = True
    """Whether jobs of a lower queue are stopped for those of a higher one."""

    def quota(self, tenant: str) -> int | None:
        """GPUs that this tenant may hold; None: not limited."""
        return self.quotas.get(tenant, self.default)


def waits_for(
    job: JobId,
    walk: QueuePositions,
    over_quota: Container[JobId],
    capacity: int,
    order: OrderInForce,
    hindrance: str = "",
) -> str:
    """What a waiting job waits for: its place, who is ahead and whose jobs these are, what would let it start. `walk`:
    all guaranteed jobs; `over_quota`: those that wait only for their tenant's quota; `hindrance`: why it does not start
    on GPUs that are free."""
    position = walk.positions[job]
    row, waiting = position.row, position.ahead
    queue = queue_of(row.attained_gpu_s, order.thresholds)
    place = f"{ordinal(waiting + 1)} of the waiting jobs, in queue {queue}"
    if job in over_quota:
        return f"{place}; {_quota_words(row, walk, order.quota(row.tenant))}"
    if row.gpus > capacity:
        return (
            f"{place}; it needs {gpus(row.gpus)} and the hosts that are alive have "
            f"{capacity}: it starts when more hosts join"
        )
    holders = walk.holders
    free = max(0, capacity - walk.held)
    ahead = f"; ahead: {ahead_of(job, walk, order)}" if waiting else ""
    if row.gpus <= free and not waiting:
        return f"{place}; {hindrance or f'{are_free(free)}, and it is about to be placed'}"
    hindrance = f"; {hindrance}" if hindrance else ""
    until = f"; it starts when enough of {named(holders)} have ended" if holders else ""
    sinks = order.preempts and bool(holders) and not waiting
    sooner = _when_others_sink(row, queue, holders, free, order) if sinks else ""
    return f"{place}; it needs {gpus(row.gpus)} and {free} are free{ahead}{until}{sooner}{hindrance}"


def ahead_of(job: JobId, walk: QueuePositions, order: OrderInForce | None = None) -> str:
    """The jobs that are ahead of a waiting one, in words; empty: none is. `order`: of guaranteed jobs, whose order says
    why as well."""
    row, waiting, passed = msgspec.structs.astuple(walk.positions[job])
    first = walk.waiting[: min(waiting, NAMED_MAX)]
    if not first or order is None:
        return named(first, waiting) if first else ""
    narrow = ", since jobs with fewer GPUs go first" if passed else ""
    return f"{named(first, waiting)}{narrow}{_whose_turn_is_first(row, first, order)}"


def _whose_turn_is_first(row: Row, first: Sequence[Row], order: OrderInForce) -> str:
    """Which tenants without a quota have a job before this one, of such a tenant, because it is their turn; empty:
    none of these. `first`: jobs ahead."""
    if order.quota(row.tenant) is not None:
        return ""
    queue = queue_of(row.attained_gpu_s, order.thresholds)
    tenants = {
        other.tenant
        for other in first
        if other.tenant != row.tenant
        and other.number > row.number
        and other.gpus >= row.gpus
        and other.promoted is None
        and order.quota(other.tenant) is None
        and queue_of(other.attained_gpu_s, order.thresholds) == queue
    }
    return f", since it is the turn of {' and '.join(sorted(tenants))}" if tenants else ""


def _when_others_sink(
    row: Row,
    queue: int,
    holders: Sequence[Row],
    free: int,
    order: OrderInForce,
) -> str:
    """Running jobs that this one would stop once they attained enough service to sink below it: the first few that
    suffice. Only jobs of the same order: of its tenant, or, without a quota, of all tenants without one."""
    thresholds, limited = order.thresholds, order.quota(row.tenant) is not None
    mine = [
        other
        for other in holders
        if (other.tenant == row.tenant if limited else order.quota(other.tenant) is None) and other.promoted is None
    ]
    sinking: list[tuple[float, Row]] = []
    for other in mine:
        at = queue_of(other.attained_gpu_s, thresholds)
        if at <= queue < len(thresholds):
            width = other.gpus or 1
            sinking.append(((thresholds[queue] - other.attained_gpu_s) / width, other))
    sinking.sort(key=lambda each: (each[0], each[1].number))
    below = sum(other.gpus for other in mine if queue_of(other.attained_gpu_s, thresholds) > queue)
    have, said = free + below, []
    for left_s, other in sinking:
        if have >= row.gpus:
            break
        have += other.gpus
        said.append((left_s, other))
    if have < row.gpus or not said:
        return ""
    shown = ", ".join(
        f"{other.id} falls behind it after about {format_seconds(left_s)} of running"
        for left_s, other in said[:NAMED_MAX]
    )
    more = f" and {len(said) - NAMED_MAX} more later" if len(said) > NAMED_MAX else ""
    return f", or when {shown}{more}"


def waits_as_opportunistic(job: JobId, opportunistic: QueuePositions, guaranteed: QueuePositions, free: int) -> str:
    """What an opportunistic job waits for. `opportunistic`: all opportunistic jobs, oldest first; `free`: GPUs that no
    job holds."""
    position = opportunistic.positions[job]
    row, ahead = position.row, position.ahead
    place = f"{ordinal(ahead + 1)} of the opportunistic jobs waiting"
    older = f"; ahead: {ahead_of(job, opportunistic)}" if ahead else ""
    if row.gpus <= free:
        held = ", and guaranteed jobs come first" if guaranteed.waiting else ""
        return f"{place}; it needs {gpus(row.gpus)} that guaranteed jobs leave free, and {free} are free{held}{older}"
    holders = [*guaranteed.holders[:NAMED_MAX], *opportunistic.holders[:NAMED_MAX]]
    count = len(guaranteed.holders) + len(opportunistic.holders)
    until = f"; it starts when enough of {named(holders, count)} have ended" if holders else ""
    return f"{place}; it needs {gpus(row.gpus)} that guaranteed jobs leave free, and {free} are free{older}{until}"


def keeps_and_waits(wanted: int, kept: Mapping[HostId, int], holders: Sequence[Row]) -> str:
    """The GPUs kept and the jobs awaited, in words: `2 of 4 GPUs kept: h1 2, waiting for j3 (alice, 2 GPUs)`."""
    waits = f", waiting for {named(holders)}" if holders else ""
    return f"{keeps(wanted, kept)}{waits}"


def unlike_kernels(kernels: Mapping[int, str]) -> str:
    """Ranks with unlike kernels, in words: `ranks 0, 1: numpy 2.1.0 OpenBLAS Haswell; rank 2: numpy 2.1.0 OpenBLAS
    SkylakeX; ...` Empty when they are alike. `kernels`: by rank, of those that said so."""
    ranks: dict[str, list[int]] = {}
    for rank, kernel in sorted(kernels.items()):
        ranks.setdefault(kernel, []).append(rank)
    if len(ranks) < 2:
        return ""
    return (
        f"{'; '.join(f'{_ranks(of)}: {kernel}' for kernel, of in ranks.items())} (results may differ in the last bits)"
    )


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 2`, `ranks 0, 1, 2 and 5 more`."""
    shown = ", ".join(str(rank) for rank in ranks[:NAMED_MAX])
    more = f" and {len(ranks) - NAMED_MAX} more" if len(ranks) > NAMED_MAX else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def are_free(count: int) -> str:
    """Free GPUs in words: `1 GPU is free`, `4 GPUs are free`."""
    return f"{gpus(count)} {'is' if count == 1 else 'are'} free"


def scattered(free: Mapping[HostId, int], spec: JobSpec) -> str:
    """The words for GPUs that suffice, but are not where this gang needs them."""
    where = ", ".join(f"{host} {count}" for host, count in sorted(free.items()) if count)
    return f"free GPUs by host are {where}, and {_needs(spec)}"


def _needs(spec: JobSpec) -> str:
    """What a gang needs of hosts."""
    match spec.pack:
        case "host":
            return f"all its workers must be on one host (--pack host), with {gpus(spec.gpus)}"
        case "apart":
            each = f"{gpus(spec.gpus_per_worker)} on a host" if spec.gpus else "a host"
            return f"each of its {spec.workers} workers needs {each} of its own (--nodes)"
        case "few" | "any":
            return f"each worker needs {gpus(spec.gpus_per_worker)} on one host"
        case _:
            assert_never(spec.pack)


def demoted_later(after_s: float) -> str:
    """What will happen to a waiting job of class auto."""
    return f"it becomes opportunistic after a wait of {format_seconds(after_s)}"


def _quota_words(row: Row, walk: QueuePositions, quota: int | None) -> str:
    mine, used = walk.holders_of.get(row.tenant, []), walk.used.get(row.tenant, 0)
    if quota is not None and row.gpus > quota:
        now = f"the quota of tenant {row.tenant} is now {quota}: raise it, or cancel the job"
        return f"it needs {gpus(row.gpus)} and {now}"
    held = f" by {named(mine)}" if mine else ""
    return (
        f"it needs {gpus(row.gpus)} and tenant {row.tenant} uses {used} of its quota of {quota}{held}: it starts when "
        f"enough of those end or the quota is raised"
    )


KILLED_WITHIN_S = 10.0
"""Seconds within which a SIGKILL and a kill for memory on the same host are told together."""


def ended_words(rank: int, host: HostId, code: int, signal_name: str | None) -> str:
    """How a rank ended, in words: `rank 2 on gpu3 was killed by SIGKILL (9)`, `rank 0 on gpu1 exited with 3`."""
    if code < 0:
        return f"rank {rank} on {host} was killed by {signal_name or 'signal'} ({-code})"
    return f"rank {rank} on {host} exited with {code}"


def with_oom(reason: str, oom: MemoryKilled | None) -> str:
    """Why ranks ended, with what the kernel killed: `oom: the kernel killed 1 process at the limit of 1 GiB, peak 1
    GiB; more: --mem`."""
    if oom is None:
        return reason
    processes = "1 process" if oom.killed == 1 else f"{oom.killed} processes"
    peak = f", peak {format_size(oom.peak_bytes)}" if oom.peak_bytes else ""
    limit = f" at the limit of {format_size(oom.limit_bytes)}" if oom.limit_bytes else ""
    said = f"oom: the kernel killed {processes}{limit}{peak}; submit it with more --mem"
    return f"{reason}; {said}" if reason else said


def host_killed(codes: Mapping[int, int], killed: int, used_bytes: int) -> str:
    """What is known of ranks whose first failure is a SIGKILL that none of the rack sent: `killed` processes were
    killed for memory on their host about then, of which the kernel does not say whose they were. `used_bytes`: the most
    that the job's processes there had; 0: not known. Empty: nothing is known."""
    failure = first_failure(codes)
    if failure is None or failure[1] != -9 or not killed:
        return ""
    processes = "a process" if killed == 1 else f"{killed} processes"
    had = f"; the job's processes there had up to {format_size(used_bytes)}" if used_bytes else ""
    when = f"within the same {KILLED_WITHIN_S:.0f} s"
    return f"its host killed {processes} for memory {when}{had}; submit it with --mem, by which hosts keep room"


SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
    24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip
"""Names of Linux's signals on x86-64 and arm64; written down because a simulated rack must say the same everywhere."""
EXIT_AGAIN = 75
"""EX_TEMPFAIL, the exit code of a job that wants to be started again."""
EXIT_LOST = 255
"""The exit code of a job whose hosts were lost once too often: no rank could say how it ended."""
EXIT_CANCELLED = 143
"""The exit code of a job that was cancelled before any of its ranks said otherwise: 128 + SIGTERM."""


def too_often(cause: str, count: int, allowed: int) -> str:
    """Why a job is not started again, behind what happened; empty where it is plain."""
    if not allowed:
        return ""
    times = {
        "preempted": f"it was preempted {count} times",
        "host lost": f"its hosts were lost {count} times",
        "exit 75": f"it asked to be queued again {count} times",
        "failed": f"it failed {count} times",
        "unfit": f"it had no room beside other jobs {count} times",
    }[cause]
    return f"; {times}, and at most {allowed} restarts are allowed for that"


def away(gone_s: Mapping[HostId, float], lost_after_s: float, keeps: bool, leads: bool) -> str:
    """What a gang waits for whose hosts are gone, each for so many seconds: `waits for gpu2, gone for 12 s; taken back
    in 48 s`. `keeps`: its ranks are not ended; `leads`: the log has a leader, which could take it back."""
    where = ", ".join(f"{host}, gone for {format_seconds(s)}" for host, s in sorted(gone_s.items()))
    left_s = lost_after_s - max(gone_s.values())
    if keeps:
        hosts = ", ".join(f"agentctl hosts give-up {host}" for host in sorted(gone_s))
        return (
            f"waits for {where}; its ranks there keep running (--on-lost keep) until "
            f"the host is back, or somebody types {hosts}"
        )
    if not leads:
        return f"waits for {where}; there is no leader now, so it is not taken back"
    soon = f"in {format_seconds(left_s)}" if left_s > 0 else "as soon as its ranks there have certainly ended"
    return f"waits for {where}; taken back {soon}"


def job_code(code: int) -> int:
    """A rank's status as the job's own: N as it is, 128+N for signal N."""
    return 128 - code if code < 0 else code


def first_failure(codes: Mapping[int, int]) -> tuple[int, int] | None:
    """(rank, code) of the failure to blame on one host, None when all its ranks ended with 0. `codes` are in the order
    in which the ranks ended; one that SIGTERM ended was most likely stopped because another had failed, and comes last.
    """
    failed = [(rank, code) for rank, code in codes.items() if code != 0]
    unasked = [(rank, code) for rank, code in failed if code not in (-15, EXIT_CANCELLED)]
    return next(iter(unasked or failed), None)

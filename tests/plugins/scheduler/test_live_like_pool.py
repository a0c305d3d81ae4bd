"""The live queue and the plain pool (`plain_pool.py`) decide alike where both can speak: quotas that the rack can keep,
new jobs only, at most one guaranteed job of a tenant waiting, and nobody beside anybody on a GPU.

The live jobs are placed on the very GPUs that the pool chose, so each step compares one decision from one state. A
story ends where the two must part: a guaranteed job starts beside opportunistic ones in the pool and preempts them on
the rack, and the pool says which GPU is reserved where the rack says how many.
"""

from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from covey.core.ids import HostId, JobId
from plugins.scheduler.messages.commands import Demoted, GpusKept, Granted, TakenBack, Upgraded
from tests.plugins.scheduler.little import Little
from tests.plugins.scheduler.plain_pool import (
    Demote,
    Ended,
    Looked,
    Measured,
    Pool,
    PoolJob,
    Reserve,
    Start,
    Submitted,
    Upgrade,
)

HOSTS, EACH = 3, 3
QUOTAS = {"a": 3, "b": 2, "c": 2, "d": 2}
LATE_S = 40.0
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "submit", "end", "end", "look"]),
        st.integers(0, 50),
        st.integers(1, 3),
        st.sampled_from(["guaranteed", "guaranteed", "auto", "opportunistic"]),
        st.booleans(),
        st.sampled_from([1.0, 1.0, 15.0]),
    ),
    min_size=8,
    max_size=40,
)


class Pair:
    def __init__(self) -> None:
        self.pool = Pool(HOSTS * EACH, EACH, QUOTAS, demote_after_s=LATE_S)
        self.rack = Little([EACH] * HOSTS, QUOTAS, demote_after_s=LATE_S, narrow_first=False)
        self.rack.look(0.0)
        self.over = False

    def step(self, kind: str, pick: int, gpus: int, job_class: Any, same_host: bool, after_s: float) -> None:
        self.rack.now_s += after_s
        there = sorted(self.pool.jobs)
        told: Any = Looked()
        if kind == "submit":
            told = self.submitted("abcd"[pick % 4], gpus, job_class, same_host) or told
        elif kind == "end" and there:
            id = there[pick % len(there)]
            if self.pool.jobs[id].gpus:
                self.rack.end(self.rack.queue.jobs[live(id)])
                told = Ended(id)
        self.compare(told)

    def submitted(self, tenant: str, gpus: int, job_class: Any, same_host: bool) -> Submitted | None:
        waiting = [entry for entry in self.pool.jobs.values() if entry.job.tenant == tenant and not entry.gpus]
        if job_class != "opportunistic" and any(entry.job_class != "opportunistic" for entry in waiting):
            return None
        same_host = same_host and job_class == "guaranteed"  # the pool spreads an opportunistic job all the same
        workers, each = (1, gpus) if same_host else (gpus, 1)
        id = self.rack.try_submit(workers, tenant, job_class, each)
        if id is None:  # more than its quota: the pool would let it wait for ever
            return None
        return Submitted(PoolJob(id=name(id), tenant=tenant, gpus=gpus, job_class=job_class, same_host=same_host))

    def compare(self, told: Any) -> None:
        """Compare what each side says about one event."""
        pool, now_s = self.pool, self.rack.now_s
        guests = list(pool.opportunistic)
        pool.utilisation = [1.0] * len(pool.holder)
        said = list(pool.handle(told, now_s))
        idle = [gpu for gpu, holder in enumerate(pool.holder) if holder is None and not pool.opportunistic[gpu]]
        said += pool.handle(Measured(dict.fromkeys(idle, 0.0)), now_s)
        pool.utilisation = [1.0] * len(pool.holder)
        while more := pool.handle(Looked(), now_s):  # an upgrade follows a start at the next look
            said += more
        pool.check()
        starts = {each.job: each.gpus for each in said if isinstance(each, Start)}
        if any(each.guaranteed and any(guests[gpu] for gpu in each.gpus) for each in said if isinstance(each, Start)):
            self.over = True  # beside guests
            heard = self.looks(starts)
            assert any(isinstance(command, TakenBack | Granted) for command in heard), (
                "it starts elsewhere or they stop"
            )
            return
        if any(pool.opportunistic[gpu] for gpu in pool.reserved):
            self.over = True
            return
        heard = self.looks(starts)
        assert not any(isinstance(command, TakenBack) for command in heard)
        for ours, theirs in ((Granted, Start), (Demoted, Demote), (Upgraded, Upgrade)):
            live_said = {name(command.job) for command in heard if isinstance(command, ours)}
            assert live_said == {each.job for each in said if isinstance(each, theirs)}, (ours, heard, said)
        reserving = self.rack.queue.keeper
        assert (name(reserving) if reserving else None) == pool.reserving
        assert sum(self.rack.queue.kept.values()) == len(pool.reserved)
        assert any(isinstance(each, Reserve) for each in said) == any(isinstance(each, GpusKept) for each in heard)
        for tenant in QUOTAS:
            assert self.rack.queue.used(tenant) == pool.used.get(tenant, 0)

    def looks(self, starts: dict[str, tuple[int, ...]]) -> list[Any]:
        """Looks of the leader until it says nothing more; gangs are placed on the GPUs of the pool at once."""
        heard: list[Any] = []
        while now := self.rack.look(0.0):
            heard += now
            for job in self.rack.jobs("placing"):
                on: dict[HostId, list[str]] = {}
                for gpu in starts.get(name(job.id), ()):
                    host = HostId(f"h{gpu // EACH + 1}")
                    on.setdefault(host, []).append(f"{host}.{gpu % EACH}")
                if on:
                    self.rack.place(job, on)
            if any(isinstance(command, TakenBack) for command in now) or self.rack.jobs("placing"):
                break
        return heard


def name(id: JobId) -> str:
    """The job's name in the pool: those sort as the log numbers jobs."""
    return f"j{int(id[1:]):03}"


def live(name: str) -> JobId:
    return JobId(f"j{int(name[1:])}")


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_the_live_queue_says_what_the_pool_says(steps: list[tuple[str, int, int, Any, bool, float]]) -> None:
    """Reference: AntMan §3.3."""
    pair = Pair()
    for step in steps:
        pair.step(*step)
        if pair.over:
            break
    event("to the end" if not pair.over else "parted")

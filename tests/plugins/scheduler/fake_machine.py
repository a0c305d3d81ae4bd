"""One machine of a rack of fakes: its disk, its devices and its running ranks, which outlive an agent."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.ports.job_records import DirectRecords, RecordFile
from chaos.world.clock import SimLoopStalls
from covey.core.events import Fact
from covey.core.ids import JobId
from covey.ports.devices import DeviceProcess, DeviceSample, Gpu
from covey.ports.probes import CardNow, MemoryNow
from plugins.base import LogRead, RankLease, RanksSpec
from plugins.facts import RanksEnded, RanksStarted, StartFault


class FakeClock:
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def wall_s(self) -> float:
        return 1_700_000_000.0 + asyncio.get_running_loop().time()

    def boot_s(self) -> float:
        return self.now_s()

    def cpu_s(self) -> float:
        return 0.0


class FakeDisk:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.sick = False

    async def read(self, name: str) -> bytes | None:
        return self.files.get(name)

    async def replace(self, name: str, data: bytes) -> None:
        await asyncio.sleep(0.001)
        if self.sick:
            raise OSError("input/output error")
        self.files[name] = data

    async def delete(self, name: str) -> None:
        if self.sick:
            raise OSError("input/output error")
        self.files.pop(name, None)

    async def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.files if name.startswith(prefix))

    def path(self, name: str) -> str:
        return f"/state/{name}"


class FakeDevices:
    """Devices on which processes are that the test puts there."""

    def __init__(self) -> None:
        self.processes: dict[str, tuple[DeviceProcess, ...]] = {}
        self.fails = False

    async def sample(self, uuid: str) -> DeviceSample:
        if self.fails:
            raise OSError("the driver does not answer")
        return DeviceSample(0, 0.0, self.processes.get(uuid, ()))


class FakeProbes:
    unlisted = ""
    memory_now = MemoryNow(1 << 30, 1 << 29, 0.0)
    cores_now = 1

    def __init__(self, host: str, gpus: int) -> None:
        self.devices: Any = FakeDevices()
        self._gpus = [Gpu(n, f"GPU-{host}-{n}", "Test", 1 << 30, 0, 0.0, True) for n in range(gpus)]

    def gpus(self) -> Sequence[Gpu]:
        return self._gpus

    def gpus_unlisted(self) -> str:
        return self.unlisted

    def forget_gpu(self, uuid: str) -> str:
        return ""

    def watch_memory(self, stalls: Callable[[], None]) -> str:
        return "not watched"

    def card(self, address: str) -> CardNow | None:
        return None

    def cores(self) -> int:
        return self.cores_now

    def stay_in_memory(self, flushes: bool) -> str:
        return "not locked"

    def swap_lacks(self, helper: str) -> str:
        return f"no swap helper listens at {helper}"

    def keep_heap(self, size_bytes: int) -> str:
        return "not kept"

    def watch_loop(self) -> SimLoopStalls:
        return SimLoopStalls()

    def memory(self) -> MemoryNow:
        return self.memory_now


class Machine:
    """A machine as far as it outlives an agent: disk, ranks and their ends."""

    def __init__(self, host: str, gpus: int) -> None:
        self.disk = FakeDisk()
        self.records = DirectRecords(RecordFile(":memory:"))
        self.probes = FakeProbes(host, gpus)
        self.ranks: dict[tuple[JobId, int], RanksSpec] = {}
        self.ends: dict[tuple[JobId, int], RanksEnded] = {}
        self.forgotten: dict[JobId, int] = {}
        self.starts: list[tuple[JobId, int]] = []
        """Every real start of ranks, ever."""
        self.leases: dict[tuple[JobId, int], RankLease] = {}
        self.outputs: dict[tuple[JobId, int], bytes] = {}
        self.curves: dict[JobId, bytes] = {}
        self.written: dict[float | None, int] = {}
        """Age in seconds -> where output begins that is no older; no such age: not known."""
        self.saves_and_exits = False
        """Whether its ranks answer SIGTERM with exit 0, and the runner gives no reason."""
        self.without_state: set[int] = set()
        """Processes that run here, and do not have the state of their elastic job."""
        self.takes_no_more = False
        """Whether no rank may join those that run here."""
        self.dying: set[tuple[JobId, int]] = set()
        """Ranks of which processes that left still run."""
        self.unstarted: StartFault = ""
        """Whose fault it is that no ranks start here; empty: they do."""
        self.die_slowly = False
        """Whether processes that leave run on until `FakeRunner.all_left`."""


class FakeRunner:
    """The agent's runner on such a machine. `tell`: hears of starts, and of ends while the agent is up."""

    def __init__(self, machine: Machine, tell: Callable[[Fact], None]) -> None:
        self.machine, self.tell = machine, tell
        self.ports: dict[tuple[JobId, int], int] = {}
        self.stops: list[tuple[JobId, int, str]] = []
        self.graces: list[tuple[JobId, int, float]] = []
        self.refusal = ""
        self.spares: dict[tuple[JobId, int], tuple[int, tuple[str, ...]]] = {}
        """The spares that are to wait here, with what they import."""
        self.imported: tuple[str, ...] = ()
        """The modules that the ranks here imported."""
        self.stuck: list[tuple[Any, ...]] = []
        """What was said of ranks that are stuck."""
        self.refused_users: dict[str, str] = {}
        """The users as whom nothing starts here, and why."""
        self.limited_here: set[tuple[JobId, int]] = set()
        """The epochs whose memory is limited."""

    def limited(self, job: JobId, epoch: int) -> bool | None:
        return None if (job, epoch) not in self.machine.ranks else (job, epoch) in self.limited_here

    def refusal_as(self, user: str, uid: int | None) -> str:
        return self.refused_users.get(user, "")

    async def keep_spares(self, spec: RanksSpec, modules: tuple[str, ...]) -> None:
        self.spares[spec.job, spec.epoch] = (spec.spares, modules)

    def end_spares(self, job: JobId, epoch: int) -> None:
        self.spares.pop((job, epoch), None)

    def modules(self, job: JobId, epoch: int) -> tuple[str, ...]:
        return self.imported

    async def keep_stacks(self, job: JobId, epoch: int) -> None:
        self.stuck.append((job, epoch))

    async def end_stuck(self, job: JobId, epoch: int, rank: int, pid: int, why: str) -> None:
        self.stuck.append((job, epoch, rank, pid, why))

    async def reserve_port(self, job: JobId, epoch: int) -> int:
        return self.ports.setdefault((job, epoch), 20_000 + len(self.ports))

    def release_port(self, job: JobId, epoch: int) -> None:
        self.ports.pop((job, epoch), None)

    async def start(self, spec: RanksSpec) -> None:
        key = (spec.job, spec.epoch)
        known = self.machine.ranks.get(key)
        if known is not None and (known.since < spec.since or known.config < spec.config):
            self.machine.ranks[key] = spec
            if self.machine.die_slowly and {r.rank for r in known.ranks} - {r.rank for r in spec.ranks}:
                self.machine.dying.add(key)
                return
            self.tell(RanksStarted(spec.job, spec.epoch, {rank.rank: 100 + rank.rank for rank in spec.ranks}))
        if key in self.machine.ranks or key in self.machine.ends:
            return
        if spec.epoch <= self.machine.forgotten.get(spec.job, 0):
            return
        self.machine.ranks[key] = spec
        self.machine.starts.append(key)
        if self.machine.unstarted:
            codes = {rank.rank: 127 for rank in spec.ranks}
            self.end(*key, codes, "no room in this test", unstarted=self.machine.unstarted)
            return
        self.tell(RanksStarted(spec.job, spec.epoch, {rank.rank: 100 + rank.rank for rank in spec.ranks}))

    def spec(self, job: JobId, epoch: int) -> RanksSpec | None:
        return self.machine.ranks.get((job, epoch))

    def leaving(self, job: JobId, epoch: int) -> bool:
        return (job, epoch) in self.machine.dying

    def all_left(self, job: JobId, epoch: int) -> None:
        """End the processes that left."""
        self.machine.dying.discard((job, epoch))
        spec = self.machine.ranks[job, epoch]
        self.tell(RanksStarted(spec.job, spec.epoch, {rank.rank: 100 + rank.rank for rank in spec.ranks}))

    def have_state(self, job: JobId, epoch: int) -> tuple[int, ...]:
        spec = self.machine.ranks.get((job, epoch))
        return tuple(rank.rank for rank in spec.ranks if rank.rank not in self.machine.without_state) if spec else ()

    def may_join(self, job: JobId, epoch: int) -> bool:
        return not self.machine.takes_no_more

    async def stop(self, job: JobId, epoch: int, grace_s: float, why: str) -> None:
        self.stops.append((job, epoch, why))
        self.graces.append((job, epoch, grace_s))
        spec = self.machine.ranks.get((job, epoch))
        if spec is not None:
            saves = self.machine.saves_and_exits
            self.end(job, epoch, {rank.rank: 0 if saves else -15 for rank in spec.ranks}, "" if saves else why)

    def is_ending(self, job: JobId, epoch: int) -> bool:
        return False

    async def renew(self, leases: Mapping[tuple[JobId, int], RankLease]) -> None:
        self.machine.leases |= {key: lease for key, lease in leases.items() if key in self.machine.ranks}

    async def kept(self) -> Sequence[RanksSpec]:
        return list(self.machine.ranks.values())

    def end(
        self,
        job: JobId,
        epoch: int,
        codes: dict[int, int],
        reason: str = "",
        lost: bool = False,
        unstarted: StartFault = "",
    ) -> None:
        since = self.machine.ranks.pop((job, epoch)).since
        fact = RanksEnded(job, epoch, codes, reason, lost, since, unstarted=unstarted)
        self.machine.ends[job, epoch] = fact
        self.tell(fact)

    def running(self) -> Mapping[tuple[JobId, int], Mapping[int, int]]:
        return {
            key: {rank.rank: 100 + rank.rank for rank in spec.ranks} for key, spec in sorted(self.machine.ranks.items())
        }

    def knows(self, job: JobId, epoch: int) -> bool:
        return (job, epoch) in self.machine.ranks or (job, epoch) in self.machine.ends

    def log_path(self, job: JobId, rank: int) -> str:
        return f"/state/jobs/{job}/rank{rank}.log"

    def forget(self, job: JobId, epoch: int) -> None:
        if self.machine.ends.pop((job, epoch), None) is not None:
            self.machine.forgotten[job] = max(epoch, self.machine.forgotten.get(job, 0))

    async def keep_curve(self, job: JobId, data: bytes) -> None:
        self.machine.curves[job] = data

    async def curve(self, job: JobId) -> bytes | None:
        return self.machine.curves.get(job)

    async def read_log(self, job: JobId, rank: int, offset: int, limit: int, since_s: float | None = None) -> LogRead:
        data = self.machine.outputs.get((job, rank), b"")
        offset = offset if since_s is None else self.machine.written.get(since_s, 0)
        start = max(0, len(data) + offset) if offset < 0 else min(offset, len(data))
        kept, timed = (job, rank) in self.machine.outputs, since_s in self.machine.written
        return LogRead(data[start : start + limit], start, len(data), kept, timed)

"""What this host says of its own GPUs: to the rack by gossip, to people by its event logs, its log and its status.

A GPU that takes no job is told as long as it is so: how many, and what is wrong, the worst first (`GpusNow`). What
changes is an event of the host and of the GPU (`agentctl why host/NAME`).
"""

from collections.abc import Mapping, Sequence

from covey.core.ids import JobId
from covey.core.metrics import MetricSeries
from covey.ports.devices import Condition, Gpu
from covey.ports.probes import MemoryNow
from plugins.base import Host
from plugins.gossiped import GpusNow, MemoryHere
from plugins.scheduler.machine.host.reservations import Reservations
from plugins.scheduler.service import metrics
from plugins.scheduler.service.gpus.use_watch import UseWatch

WHY_BYTES_MAX = 80
"""The most bytes in gossip of what is wrong with GPUs."""
HELD_MAX, ID_MAX = 2, 12
"""The most jobs with sick or idle GPUs that a host gossips, and the longest of their ids: the value has 256 bytes."""
WORSE: tuple[Condition, ...] = ("ok", "degraded", "unknown", "drain", "lost")
"""The conditions of a GPU, the better first."""


def causes(gpus: Sequence[Gpu], out: Mapping[str, str]) -> list[str]:
    """Why GPUs take no job, held or not, each cause once: those of the GPUs in the worst condition first. `out`: GPUs
    that no job holds and that take none, and why."""
    sick = sorted((gpu for gpu in gpus if not gpu.takes_jobs), key=lambda gpu: -WORSE.index(gpu.condition))
    others = [why for uuid, why in out.items() if uuid not in {gpu.uuid for gpu in sick}]
    return list(dict.fromkeys([*(gpu.why or gpu.condition for gpu in sick), *others]))


def shortened(found: Sequence[str]) -> str:
    """The causes as far as gossip has room for them, and how many more there are."""
    for count in range(len(found), 0, -1):
        more = [f"{len(found) - count} more"] if count < len(found) else []
        if len((text := "; ".join([*found[:count], *more])).encode()) <= WHY_BYTES_MAX:
            return text
    return found[0].encode()[:WHY_BYTES_MAX].decode(errors="ignore") if found else ""


def now(
    gpus: Sequence[Gpu], unlisted: str, reservations: Reservations, in_trouble: Mapping[JobId, str] | None = None
) -> GpusNow:
    """What gossip says of this host's GPUs. `unlisted`: why it is not known which GPUs are here; empty: `gpus` has them
    all. `in_trouble`: jobs that hold sick or idle GPUs here."""
    out = reservations.out()
    why = shortened([unlisted] if unlisted else causes(gpus, out))
    return GpusNow(
        total=len(gpus),
        free=len(reservations.free()),
        model=gpus[0].model[:64] if gpus else "",
        simulated=bool(gpus) and gpus[0].simulated,
        out=len(out),
        why=why,
        known=not unlisted,
        held={job: word[:8] for job, word in sorted((in_trouble or {}).items())[:HELD_MAX] if len(job) <= ID_MAX},
    )


MEMORY_STEPS = 64
"""The free memory of a host is gossiped in steps of a 64th of its total (chosen: so it is said again only when it
changed by more than what comes and goes each second)."""


def memory_here(memory: MemoryNow, cpus: int = 0) -> MemoryHere:
    """What gossip says of this host's memory and processors. `cpus`: 0 where it is not known."""
    step = max(1, memory.total_bytes // MEMORY_STEPS)
    return MemoryHere(memory.total_bytes, memory.available_bytes // step * step, max(0, cpus))


class OwnGpus:
    """What this host writes down of its GPUs; `look` once a second notes what changed."""

    def __init__(self, host: Host, watch: UseWatch) -> None:
        self._host, self._watch = host, watch
        self._told: dict[str, tuple[Condition, str]] = {}
        self._foreign: dict[str, str] = {}
        self._unlisted = ""
        self._published: GpusNow | None = None
        self._memory: MemoryHere | None = None

    def publish(self, reservations: Reservations) -> None:
        """Gossip the host's GPUs to the rack, when they changed."""
        probes = self._host.env.probes
        said = now(probes.gpus(), probes.gpus_unlisted(), reservations, self._watch.jobs_in_trouble())
        if said != self._published:
            self._published = said
            self._host.spread("gpus", said)
        memory = memory_here(probes.memory(), probes.cores())
        if memory != self._memory:
            self._memory = memory
            self._host.spread("memory", memory)

    def metrics(self) -> Mapping[MetricSeries, float]:
        """The GPUs of this host by their UUIDs. A figure that the driver does not tell has no series: it is not 0."""
        gpus, held, now_s = self._host.env.probes.gpus(), self._watch.held(), self._host.env.clock.now_s()
        uses = self._watch.uses
        foreign, idle = uses.foreign(now_s), uses.idle(now_s)
        out = sum(not gpu.takes_jobs or gpu.uuid in foreign for gpu in gpus)
        found: dict[MetricSeries, float] = {metrics.GPUS_OUT.of(): out}
        for gpu in gpus:
            uuid = gpu.uuid
            found[metrics.GPU_INFO.of(uuid, str(gpu.index), gpu.model)] = 1
            found[metrics.GPU_CONDITION.of(uuid, gpu.condition)] = 1
            found[metrics.GPU_TAKES_JOBS.of(uuid)] = gpu.takes_jobs and uuid not in foreign
            found[metrics.GPU_HELD.of(uuid)] = uuid in held
            if uses.tells_processes(uuid):
                found[metrics.GPU_FOREIGN.of(uuid)] = uuid in foreign
            if uses.tells_utilization(uuid):
                found[metrics.GPU_IDLE_SECONDS.of(uuid)] = now_s - idle[uuid].since_s if uuid in idle else 0
            if gpu.memory_total_bytes:
                found[metrics.GPU_MEMORY_BYTES.of(uuid)] = gpu.memory_total_bytes
            if gpu.condition not in ("unknown", "lost"):
                found[metrics.GPU_MEMORY_USED_BYTES.of(uuid)] = gpu.memory_used_bytes
                if gpu.utilization is not None:
                    found[metrics.GPU_UTILIZATION.of(uuid)] = gpu.utilization
        return found

    def _uses(self) -> None:
        """Note which GPUs processes use that no job started, and which are free of them again."""
        now = dict(self._watch.uses.foreign(self._host.env.clock.now_s()))
        for uuid in sorted({*now, *self._foreign}):
            if (uuid in now) != (uuid in self._foreign):
                event = "GPU used by others" if uuid in now else "GPU no longer used by others"
                said = f"{uuid}: {now.get(uuid, self._foreign.get(uuid, ''))}"
                self._note(event, said)
                self._host.note(f"gpu/{uuid}", event, said)
        self._foreign = now

    def look(self) -> None:
        self._uses()
        probes = self._host.env.probes
        if (unlisted := probes.gpus_unlisted()) != self._unlisted:
            self._unlisted = unlisted
            self._note(
                "the GPUs of this host are known" if not unlisted else "the GPUs of this host are not known", unlisted
            )
        for gpu in probes.gpus():
            before = self._told.get(gpu.uuid, ("ok", ""))
            if (gpu.condition, gpu.why) != before:
                self._told[gpu.uuid] = gpu.condition, gpu.why
                self._changed(gpu, before[0])

    def _changed(self, gpu: Gpu, before: Condition) -> None:
        if gpu.takes_jobs:
            event = "GPU in use again" if before not in ("ok", "degraded") else f"GPU is {gpu.condition}"
            said = f"{gpu.uuid} (GPU {gpu.index}){f': {gpu.why}' if gpu.why else ''}"
        else:
            event, said = "GPU out of use", f"{gpu.uuid} (GPU {gpu.index}) is {gpu.condition}: {gpu.why}"
            self._host.env.log.warning("a GPU is out of use", gpu=gpu.uuid, condition=gpu.condition, why=gpu.why)
        self._note(event, said)
        self._host.note(f"gpu/{gpu.uuid}", event, said)

    def _note(self, event: str, said: str) -> None:
        self._host.note(f"host/{self._host.id}", event, said)

    def notes(self) -> list[str]:
        """Notes for `agentctl status`: what is not as it should be."""
        probes = self._host.env.probes
        found = [
            f"GPU {gpu.index} ({gpu.uuid}) cannot take jobs: {gpu.condition}, {gpu.why}"
            for gpu in probes.gpus()
            if not gpu.takes_jobs
        ]
        found += [f"GPU {uuid} is {why}" for uuid, why in self._foreign.items()]
        unlisted = probes.gpus_unlisted()
        return [*found, *([f"the GPUs of this host are not known: {unlisted}"] if unlisted else [])]

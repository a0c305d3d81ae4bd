"""What people see of the shared GPUs of this host."""

import math

from covey.core.ids import HostId
from plugins.sharing.machine.gpu import SharedGpu
from plugins.sharing.machine.host import HostSharing
from plugins.sharing.machine.member import GpuMember
from plugins.sharing.service.watch import DeviceWatch
from plugins.views import GpuJobView, InterferenceView, SharedGpuView


def gpus(host: HostId, machine: HostSharing, watch: DeviceWatch, now_s: float) -> list[SharedGpuView]:
    """The views of this host's shared GPUs, by UUID."""
    known = watch.devices()
    found = []
    for uuid, gpu in sorted(machine.gpus.items()):
        device, health = known.get(uuid), watch.healths.get(uuid)
        found.append(
            SharedGpuView(
                host=host,
                gpu=uuid,
                model=device.model if device is not None else "",
                backend=device.backend if device is not None else "",
                state=gpu.state,
                condition=health.condition if health is not None else "ok",
                why=gpu.use.why or (health.why if health is not None else ""),
                utilization=None if (used := watch.utilization(uuid)) is None else round(used, 3),
                memory_bytes=gpu.ledger.room_bytes,
                memory_free_bytes=gpu.ledger.free_bytes,
                jobs=tuple(_job(gpu, member) for member in gpu.members.values()),
            )
        )
    return found


def _job(gpu: SharedGpu, member: GpuMember) -> GpuJobView:
    account, limits = gpu.ledger.accounts[member.job], member.limits
    return GpuJobView(
        job=member.job,
        kind=member.kind,
        stage=member.stage,
        may=str(gpu.rates_of(member)),
        gate=member.gate,
        flag=member.flag,
        memory_limit_bytes=account.told_bytes,
        applied=limits is not None and not account.sent,
        fixed=member.fixed,
        spill_bytes=member.spill_bytes,
        step_s=member.step_s,
    )


def interference(host: HostId, machine: HostSharing, now_s: float) -> list[InterferenceView]:
    """A row for each GPU on which a guaranteed job runs."""
    rows = []
    for uuid, gpu in sorted(machine.gpus.items()):
        holder = gpu.guaranteed
        if holder is None or holder.stage != "running":
            continue
        ladder = gpu.ladder
        measured = ladder.measured if ladder is not None and ladder.phase == "run" else None
        sure = measured is not None and math.isfinite(measured.error)
        rows.append(
            InterferenceView(
                host=host,
                gpu=uuid,
                job=holder.job,
                beside=tuple(member.job for member in gpu.opportunistic),
                state=gpu.state,
                slowdown=measured.excess if measured is not None and sure else None,
                error=measured.error if measured is not None and sure else None,
                baseline_s=ladder.baseline.mean_s if ladder is not None else 0.0,
                baseline_age_s=now_s - ladder.baseline_s if ladder is not None and ladder.baseline_s else None,
                audits=ladder.audits if ladder is not None else 0,
                others=str(ladder.rates) if ladder is not None else "stopped",
            )
        )
    return rows

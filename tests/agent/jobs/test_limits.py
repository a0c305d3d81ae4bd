"""What the processes of a job may take of a host where limits are enforced."""

from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from agent.jobs.limits import limits_of, seconds_of
from agent.jobs.whose import start_program
from covey.ports.devices import Device
from covey.ports.env import Env
from covey.ports.probes import MemoryNow
from covey.ports.processes import ProcessId
from covey.ports.starter import EpochLimits, NobodyElse, ProgramAs
from plugins.base import RankSpec, RanksSpec
from tests.agent.here import ranks

GIB = 1 << 30
EIGHT = tuple(Device(f"GPU-{n}", "H100", 80 * GIB, "nvml", number=7 - n) for n in range(8))
PART = Device("MIG-a", "H100 MIG", 10 * GIB, "nvml", parent="GPU-0", number=2, caps=(21, 22))


def spec(*gpus: str, **more: object) -> RanksSpec:
    places = tuple(RankSpec(n, n, (gpu,)) for n, gpu in enumerate(gpus)) or (RankSpec(0, 0, ()), RankSpec(1, 1, ()))
    return msgspec.structs.replace(ranks("j1", "train"), ranks=places, **more)


def test_a_job_that_asked_for_nothing_has_its_part_by_its_gpus() -> None:
    limits = limits_of(spec("GPU-0", "GPU-3"), EIGHT, 512 * GIB)
    assert limits == EpochLimits(memory_bytes=128 * GIB, cpus=0, weight=200, gpus=(4, 7))
    assert limits_of(spec("GPU-0"), EIGHT, 0).memory_bytes == 0, "a host that does not know its memory limits none"


def test_what_it_asked_for_is_for_all_its_ranks_on_the_host() -> None:
    limits = limits_of(spec("GPU-0", "GPU-3", host_memory=64 * GIB, cpus=6), EIGHT, 512 * GIB)
    assert (limits.memory_bytes, limits.cpus) == (64 * GIB, 12)


def test_a_job_without_gpus_opens_none_and_has_no_part_of_the_memory() -> None:
    assert limits_of(spec(), EIGHT, 512 * GIB) == EpochLimits(gpus=())


def test_an_instance_is_opened_by_its_gpu_and_its_two_files() -> None:
    limits = limits_of(spec("MIG-a"), (PART,), 512 * GIB)
    assert (limits.gpus, limits.caps) == ((2,), (21, 22))


@pytest.mark.parametrize(
    "device", [msgspec.structs.replace(EIGHT[0], number=None), msgspec.structs.replace(PART, uuid="GPU-0", caps=())]
)
def test_a_gpu_whose_files_nobody_knows_starts_nothing(device: Device) -> None:
    """To let the job open every GPU instead would be to let it open others' too."""
    with pytest.raises(OSError, match="which device file opens GPU-0; next: agentctl doctor"):
        limits_of(spec("GPU-0"), (device,), GIB)


def test_a_gpu_that_nobody_lists_opens_nothing() -> None:
    """Its driver does not answer: every device would be those of others."""
    with pytest.raises(OSError, match="GPU-9 is not among the GPUs that this host lists; next: agentctl doctor"):
        limits_of(spec("GPU-0", "GPU-9"), EIGHT, GIB)
    assert limits_of(spec(), (), GIB, unlisted=True) == EpochLimits(gpus=())
    assert limits_of(spec(), (), GIB) == EpochLimits(gpus=None), "it has none"


async def test_processes_that_wait_open_no_gpu_whoever_has_it() -> None:
    """The GPUs of their spec are any of the host's; those that a rank gets come with its supervisor."""
    begun: list[tuple[str, EpochLimits]] = []

    class Starter(NobodyElse):
        async def start_program(self, which: ProgramAs, config: msgspec.Struct) -> ProcessId:
            begun.append((which.program, which.limits))
            return ProcessId(1, 1)

    probes = SimpleNamespace(
        devices=SimpleNamespace(devices=lambda: EIGHT),
        gpus_unlisted=lambda: "",
        memory=lambda: MemoryNow(8 * GIB, 0, 0.0),
    )
    env = cast(Env, SimpleNamespace(starter=Starter(0), probes=probes))
    for program in ("spares", "supervisor"):
        await start_program(env, spec("GPU-0", user="alice", uid=1001), program, "i", EpochLimits())
    whole = EpochLimits(memory_bytes=GIB, gpus=(7,))
    assert begun == [("spares", msgspec.structs.replace(whole, gpus=())), ("supervisor", whole)]


def test_devices_that_are_no_gpus_of_nvidia_have_no_files() -> None:
    devices = (Device("GPU-0", "cores", GIB, "cpu", cores=(0,)), Device("GPU-1", "cores", GIB, "cpu", cores=(1,)))
    limits = limits_of(spec("GPU-0"), devices, 8 * GIB)
    assert (limits.gpus, limits.memory_bytes) == (None, 4 * GIB)


def test_a_time_limit_leaves_the_agent_time_to_end_the_job() -> None:
    assert seconds_of(spec(time_left_s=None)) == 0
    assert seconds_of(spec(time_left_s=60.0, grace_s=30.0)) == 60 + 30 + 600 + 120
    assert seconds_of(spec(time_left_s=-5.0, grace_s=0.0)) == 720

"""What a rank finds in its environment, for every shape of a job: workers, GPUs of each, hosts, bound or not.

The GPUs are those of a stand-in for NVML; `Devices` is what CUDA makes of CUDA_VISIBLE_DEVICES.
"""

import itertools
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from agent.jobs.launching import container_of
from agent.jobs.rank_env import NEVER_CHOSEN, RankEndpoints, cores_of, environment, memory_of, visible
from agent.ports.devices.cpu import CpuDevices
from agent.ports.devices.settings import CpuDevice
from covey.core.ids import HostId, JobId
from covey.hooks import SITE
from plugins.base import RankSpec, RanksSpec
from plugins.facts import Place, SavedAt
from plugins.scheduler.machine.log.jobs import Job, JobTimes
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.service.ranks.rankspec import ranks_spec
from tests.agent.here import ranks

GPUS = 8
Env = Mapping[str, str]


class Devices:
    """A process's view of its host's GPUs, as CUDA counts them."""

    def __init__(self, env: Env, on_host: tuple[str, ...]) -> None:
        self.seen = [gpu for gpu in env["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
        assert set(self.seen) <= set(on_host) and len(set(self.seen)) == len(self.seen)

    def set_device(self, ordinal: int) -> str:
        """The GPU with this ordinal. What CUDA calls an invalid device ordinal fails here."""
        assert 0 <= ordinal < len(self.seen), f"invalid device ordinal {ordinal} of {len(self.seen)}"
        return self.seen[ordinal]


def uuids(kind: str = "GPU") -> tuple[str, ...]:
    return tuple(f"{kind}-{number}" for number in range(GPUS))


def job_at(places: tuple[Place, ...], spec: JobSpec) -> Job:
    job = Job(id=JobId("j1"), number=1, key="key", spec=spec, times=JobTimes(0.0))
    job.start.places, job.start.master_addr, job.start.master_port, job.tally.attempt = places, "10.0.0.1", 29_500, 1
    return job


def door(host: HostId) -> RankEndpoints:
    return RankEndpoints(host, "token", "/run/jobs.sock", "/state/preempt")


def ranks_of(
    workers_by_host: list[int], each: int, bind: bool, taken: int = 0, kind: str = "GPU"
) -> list[tuple[HostId, RankSpec, Env]]:
    """Every rank of a job that got these many workers on each host, and its environment. `taken`: GPUs of each host
    that others hold."""
    places, rank = [], 0
    for number, workers in enumerate(workers_by_host, 1):
        gpus = uuids(kind)[taken : taken + workers * each]
        places.append(Place(HostId(f"h{number}"), tuple(range(rank, rank + workers)), gpus))
        rank += workers
    given = {"argv": ["x"], "workers": rank, "gpus_per_worker": each, "bind_gpus": bind}
    job = job_at(tuple(places), JobSpec.parse(given))
    found: list[tuple[HostId, RankSpec, Env]] = []
    for place in places:
        spec = ranks_spec(job, place, {"OMP_NUM_THREADS": "7"})
        found += [(place.host, each, environment(spec, each, door(place.host), True)) for each in spec.ranks]
    return found


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[int], int, bool, int]:
    each = draw(st.integers(0, GPUS))
    taken = draw(st.integers(0, GPUS - each))
    most = (GPUS - taken) // each if each else 8
    return draw(st.lists(st.integers(1, most), min_size=1, max_size=4)), each, draw(st.booleans()), taken


@given(shapes())
def test_set_device_of_local_rank_is_valid_and_another_gpu_for_every_rank_of_a_host(
    shape: tuple[list[int], int, bool, int],
) -> None:
    workers, each, bind, taken = shape
    used: dict[HostId, list[str]] = {}
    for host, rank, env in ranks_of(workers, each, bind, taken):
        if not each:
            assert env["CUDA_VISIBLE_DEVICES"] == env["COVEY_LOCAL_DEVICE"] == "", "a rank without GPUs sees one"
            continue
        devices = Devices(env, uuids())
        first = devices.set_device(int(env["LOCAL_RANK"]))
        assert first in rank.gpus, "LOCAL_RANK is a sibling's GPU"
        assert devices.set_device(int(env["COVEY_LOCAL_DEVICE"])) == first
        own = [devices.set_device(int(index)) for index in env["COVEY_LOCAL_DEVICES"].split(",")]
        assert own[0] == first and sorted(own) == sorted(rank.gpus) and env["COVEY_GPUS"] == ",".join(rank.gpus)
        used.setdefault(host, []).extend(own)
        if bind:
            assert tuple(devices.seen) == rank.gpus and env["LOCAL_RANK"] == "0"
    for host, gpus in used.items():
        assert len(set(gpus)) == len(gpus), f"two ranks of {host} take one GPU"


def test_a_rank_on_cores_sees_no_gpu_and_as_many_threads_as_cores() -> None:
    spec = ranks("j1", "x")
    rank = msgspec.structs.replace(spec.ranks[0], gpus=("CPU-h1-1",))
    env = environment(spec, rank, door(HostId("h1")), False, cores=3)
    assert (env["OMP_NUM_THREADS"], env["COVEY_GPUS"], env["NVIDIA_VISIBLE_DEVICES"]) == ("3", "CPU-h1-1", "void")
    assert env["CUDA_VISIBLE_DEVICES"] == env["COVEY_LOCAL_DEVICE"] == env["COVEY_LOCAL_DEVICES"] == ""
    chosen = msgspec.structs.replace(spec, env={"OMP_NUM_THREADS": "8", "CUDA_VISIBLE_DEVICES": "0"})
    env = environment(chosen, rank, door(HostId("h1")), True, cores=3)
    assert (env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == ("8", "")


def test_cores_of_a_rank_are_those_of_all_its_devices_and_of_no_gpu() -> None:
    listed = [CpuDevice("0-1", "1 GiB"), CpuDevice("4", "1 GiB"), CpuDevice("5", "1 GiB")]
    devices = CpuDevices("h1", listed)
    assert cores_of(RankSpec(0, 0, ("CPU-h1-1", "CPU-h1-0")), devices) == (0, 1, 4)
    assert cores_of(RankSpec(0, 0, ("CPU-h2-0", "GPU-1")), devices) == ()
    assert cores_of(RankSpec(0, 0, ()), devices) == ()


@given(shapes())
def test_every_rank_of_a_host_sees_all_gpus_that_the_job_has_there_and_no_others(
    shape: tuple[list[int], int, bool, int],
) -> None:
    workers, each, _, taken = shape
    for host, _, env in ranks_of(workers, each, bind=False, taken=taken):
        here = workers[int(host[1:]) - 1]
        seen = [gpu for gpu in env["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
        assert sorted(seen) == sorted(uuids()[taken : taken + here * each])


@given(shapes())
def test_two_workers_never_share_a_node_rank_and_what_torchrun_counts_adds_up(
    shape: tuple[list[int], int, bool, int],
) -> None:
    workers, each, bind, taken = shape
    found = ranks_of(workers, each, bind, taken)
    world = sum(workers)
    for name in ("RANK", "NODE_RANK", "PET_NODE_RANK"):
        assert [int(env[name]) for _, _, env in found] == list(range(world)), name
    groups: dict[int, int] = {}
    for host, _, env in found:
        assert env["NNODES"] == env["PET_NNODES"] == env["WORLD_SIZE"] == str(world)
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == (env["PET_MASTER_ADDR"], env["PET_MASTER_PORT"])
        assert env["PET_NPROC_PER_NODE"] == str(max(1, each))
        assert bind or int(env["GROUP_RANK"]) == int(host[1:]) - 1
        groups[int(env["GROUP_RANK"])] = int(env["LOCAL_WORLD_SIZE"])
        assert int(env["LOCAL_RANK"]) < int(env["LOCAL_WORLD_SIZE"])
        assert int(env["GROUP_WORLD_SIZE"]) == (world if bind else len(workers))
    assert sum(groups.values()) == world, "the groups do not make up the world"
    assert len({(env["GROUP_RANK"], env["LOCAL_RANK"]) for _, _, env in found}) == world


def test_a_worker_of_several_gpus_counts_its_own_first() -> None:
    ranks = ranks_of([2], 4, bind=False)
    assert [env["CUDA_VISIBLE_DEVICES"] for _, _, env in ranks] == [
        "GPU-0,GPU-1,GPU-2,GPU-3,GPU-4,GPU-5,GPU-6,GPU-7",
        "GPU-4,GPU-5,GPU-6,GPU-7,GPU-0,GPU-1,GPU-2,GPU-3",
    ]
    assert [env["COVEY_LOCAL_DEVICES"] for _, _, env in ranks] == ["0,1,2,3", "1,0,2,3"]


def test_where_local_rank_is_beyond_its_own_gpus_one_of_them_stands_there() -> None:
    *_, (_, rank, env) = ranks_of([4], 2, bind=False)
    assert rank.gpus == ("GPU-6", "GPU-7")
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-6,GPU-0,GPU-1,GPU-7,GPU-2,GPU-3,GPU-4,GPU-5"
    assert (env["LOCAL_RANK"], env["COVEY_LOCAL_DEVICES"]) == ("3", "3,0")


def test_our_folder_comes_before_the_submitters_unless_the_job_is_left_alone() -> None:
    def path(hooks: bool, **env: str) -> Env:
        spec = RanksSpec(
            job=JobId("j1"), epoch=1, name="x", tenant="t", job_class="auto", argv=("x",), cwd="/", env=env,
            ranks=(RankSpec(0, 0, ()),), world_size=1, node_rank=0, nodes=(HostId("h1"),), master_addr="10.0.0.1",
            master_port=1, hooks=hooks,
        )  # fmt: skip
        return environment(spec, spec.ranks[0], door(HostId("h1")), True)

    assert path(True, PYTHONPATH="/mine:/more")["PYTHONPATH"] == f"{SITE}:/mine:/more"
    assert path(True)["PYTHONPATH"] == SITE and "COVEY_HOOKS" not in path(True)
    assert path(False, PYTHONPATH="/mine")["PYTHONPATH"] == "/mine" and path(False)["COVEY_HOOKS"] == "0"
    carried = dict.fromkeys(NEVER_CHOSEN, "3,4")
    assert not NEVER_CHOSEN & path(True, **carried).keys(), "submitted with the environment of another job's rank"


def test_jax_reserves_no_memory_of_a_gpu_that_others_use_unless_it_is_told() -> None:
    def found(job_class: str, gpus: tuple[str, ...] = ("a",), **env: str) -> str | None:
        spec = RanksSpec(
            job=JobId("j1"), epoch=1, name="x", tenant="t", job_class=job_class, argv=("x",), cwd="/", env=env,
            ranks=(RankSpec(0, 0, gpus),), world_size=1, node_rank=0, nodes=(HostId("h1"),), master_addr="10.0.0.1",
            master_port=1,
        )  # fmt: skip
        return environment(spec, spec.ranks[0], door(HostId("h1")), True).get("XLA_PYTHON_CLIENT_PREALLOCATE")

    assert found("opportunistic") == "false"
    assert found("guaranteed") is None and found("auto") is None and found("opportunistic", ()) is None
    assert found("opportunistic", XLA_PYTHON_CLIENT_PREALLOCATE="true") == "true"


def test_jax_takes_no_more_than_the_job_asked_for_where_gpus_are_shared() -> None:
    def found(asked: int, gpu_bytes: int, job_class: str = "guaranteed", **env: str) -> Env:
        told = {"shared_memory": asked, "job_class": job_class, "env": env, "ranks": (RankSpec(0, 0, ("a",)),)}
        spec = msgspec.structs.replace(ranks("j1", "x"), **told)
        return environment(spec, spec.ranks[0], door(HostId("h1")), True, 0, gpu_bytes)

    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    assert found(24 << 30, 80 << 30)[name] == "0.3000" and found(24 << 30, 80 << 30, "opportunistic")[name] == "0.3000"
    assert found(1 << 30, 3 << 30)[name] == "0.3333", "never more than was asked for"
    assert found(24 << 30, 80 << 30, XLA_PYTHON_CLIENT_MEM_FRACTION="0.9")[name] == "0.9"
    assert name not in found(0, 80 << 30) and name not in found(24 << 30, 0) and name not in found(90 << 30, 80 << 30)
    assert found(24 << 30, 0)["COVEY_GPU_MEMORY"] == str(24 << 30) and "COVEY_GPU_MEMORY" not in found(0, 80 << 30)


def test_what_a_rank_may_take_is_a_part_of_its_smallest_device() -> None:
    devices = CpuDevices("h1", [CpuDevice("0", "8 GiB"), CpuDevice("1", "2 GiB")])
    one, two = (device.uuid for device in devices.devices())
    assert (
        memory_of(RankSpec(0, 0, (one, two)), devices) == 2 << 30
        and memory_of(RankSpec(0, 0, (one,)), devices) == 8 << 30
    )
    assert memory_of(RankSpec(0, 0, ()), devices) == 0 and memory_of(RankSpec(0, 0, ("gone", one)), devices) == 0


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 2))
def test_ranks_on_mig_instances_are_bound_one_each_without_being_asked(workers: list[int], each: int) -> None:
    """CUDA shows a process one instance, the first of those it may see."""
    for _, rank, env in ranks_of(workers, each, False, kind="MIG"):
        shown_by_cuda = env["CUDA_VISIBLE_DEVICES"].split(",")[:1]
        assert shown_by_cuda == [rank.gpus[0]] and set(env["CUDA_VISIBLE_DEVICES"].split(",")) == set(rank.gpus)
        assert env["LOCAL_RANK"] == env["COVEY_LOCAL_DEVICE"] == env["COVEY_LOCAL_DEVICES"] == "0"
        assert (env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"], env["PET_NPROC_PER_NODE"]) == ("1", env["RANK"], "1")


def test_opportunistic_ranks_begin_held_back_where_gpus_are_shared_and_no_others() -> None:
    place = Place(HostId("h1"), (0,), ("GPU-0",))
    for job_class, gpus, shares in itertools.product(("guaranteed", "opportunistic"), (0, 1), (False, True)):
        job = job_at(
            (place,), JobSpec.parse({"argv": ["x"], "workers": 1, "gpus_per_worker": gpus, "class": job_class})
        )
        wanted = shares and job_class == "opportunistic" and gpus == 1
        assert ranks_spec(job, place, {}, shares).held_back is wanted


def test_ranks_of_one_job_count_alike_where_only_some_have_instances() -> None:
    places = Place(HostId("h1"), (0, 1), ("GPU-0", "GPU-1")), Place(HostId("h2"), (2,), ("MIG-0",))
    job = job_at(places, JobSpec.parse({"argv": ["x"], "workers": 3}))
    assert all(ranks_spec(job, place, {}).bind_gpus for place in places)


def test_a_process_of_an_elastic_job_knows_that_it_carries_ranks() -> None:
    """Processes are counted where programs count them on a host; ranks are counted over the whole job."""
    given = {"argv": ["x"], "workers": 2, "workers_max": 6, "gpus_per_worker": 1}
    places = (Place(HostId("h1"), (0, 5), ("a", "b")), Place(HostId("h2"), (1,), ("c",), since=3))
    job = job_at(places, JobSpec.parse(given))
    job.start.carried, job.healing.healed = {0: (0, 2), 1: (1, 3), 5: (5, 4)}, 4
    here, there = (ranks_spec(job, place, {"COVEY_ELASTIC": "0"}) for place in places)
    assert [(rank.rank, rank.local_rank, rank.gpus) for rank in here.ranks] == [(0, 0, ("a",)), (5, 1, ("b",))]
    assert here.carried == there.carried == {0: (0, 2), 1: (1, 3), 5: (5, 4)}
    assert (here.config, here.world_size, there.config, there.since) == (4, 6, 4, 3)
    env = environment(here, here.ranks[1], door(HostId("h1")), True)
    assert (env["COVEY_ELASTIC"], env["WORLD_SIZE"], env["COVEY_WORLD_SIZE"]) == ("1", "6", "6")
    assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"], env["RANK"]) == ("1", "2", "5")
    fixed = ranks_spec(job_at(places, JobSpec.parse(given | {"workers_max": 0})), places[0], {})
    assert (fixed.config, fixed.world_size, fixed.carried) == (0, 2, {})
    assert "COVEY_ELASTIC" not in environment(fixed, fixed.ranks[0], door(HostId("h1")), True)


def test_a_rank_knows_what_its_job_may_take_of_the_hosts_memory() -> None:
    place = Place(HostId("h1"), (0,), ())

    def found(**more: object) -> Env:
        spec = JobSpec.parse({"argv": ["x"], "gpus_per_worker": 0, **more})
        known = ranks_spec(job_at((place,), spec), place, {"COVEY_HOST_MEMORY": "5"})
        return environment(known, known.ranks[0], door(HostId("h1")), True)

    assert found(host_memory=8 << 30)["COVEY_HOST_MEMORY"] == str(8 << 30) and "COVEY_HOST_MEMORY" not in found()


def test_checkpoints_of_a_job_are_in_a_folder_of_its_own_and_its_newest_is_known() -> None:
    place, job = Place(HostId("h1"), (0,), ()), job_at((Place(HostId("h1"), (0,), ()),), JobSpec.parse({"argv": ["x"]}))
    job.times.submitted_wall_s = 1795981381.0

    def found(**env: str) -> Env:
        known = ranks_spec(job, place, env)
        return environment(known, known.ranks[0], door(HostId("h1")), True)

    own = f"{job.id}-20261129T194301"
    of_another = {"COVEY_CHECKPOINT_DIR": "/w/checkpoints/j3-x", "COVEY_SAVED_AT": "/w/x", "COVEY_SAVED_STEP": "3"}
    assert found(**of_another)["COVEY_CHECKPOINT_DIR"] == str(Path(job.spec.cwd, "checkpoints", own))
    assert not {"COVEY_SAVED_AT", "COVEY_SAVED_STEP"} & found(**of_another).keys(), "it was submitted by a rank of j3"
    assert found(COVEY_CHECKPOINTS="/scratch")["COVEY_CHECKPOINT_DIR"] == f"/scratch/{own}"
    job.measured.saved = SavedAt(381, 5.0, "/scratch/x")
    assert (found()["COVEY_SAVED_STEP"], found()["COVEY_SAVED_AT"]) == ("381", "/scratch/x")


def test_a_rank_in_an_image_sees_its_jobs_gpus_here_and_what_covey_sets_holds_there() -> None:
    place = Place(HostId("a"), (0, 1), ("GPU-0", "CPU-h1-0"))
    spec = JobSpec(name="j", workers=2, argv=("python",), image="torch:2", cwd="/w")
    ran = ranks_spec(job_at((place,), spec), place, {"LANG": "C", "RANK": "9"})
    rank, devices = ran.ranks[0], CpuDevices("h1", [CpuDevice("0", "1 GiB")])
    endpoints = door(HostId("a"))

    def environment_of(given: RanksSpec) -> dict[str, str]:
        return environment(given, rank, endpoints, True)

    found = container_of(ran, visible(ran, rank), devices, endpoints, environment_of)
    assert found is not None and (found.image, found.gpus) == ("torch:2", ("GPU-0",))
    assert {"RANK", "CUDA_VISIBLE_DEVICES", "COVEY_TOKEN"} <= set(found.ours) and not {"LANG", "PATH"} & set(found.ours)
    assert found.shows == ("/run", "/state", SITE.removesuffix("/site"))
    plain = msgspec.structs.replace(ran, image="")
    assert container_of(plain, (), devices, endpoints, lambda given: {}) is None


def test_jobs_that_came_with_lines_of_slurm_have_its_variables_which_agree_with_ours(tmp_path: Path) -> None:
    places = tuple(Place(HostId(f"h{n}"), (2 * n, 2 * n + 1), uuids()[2 * n : 2 * n + 2]) for n in range(2))
    spec = JobSpec.parse({"argv": ["x"], "name": "BERT_large", "workers": 4, "cpus": 3})
    for asks in ({}, {"COVEY_SLURM": "1", "PATH": "/opt"}):
        given = ranks_spec(job_at(places, spec), places[1], asks)
        env = environment(given, given.ranks[1], door(HostId("h1")), True)
        assert any(name.startswith("SLURM") for name in env) == bool(asks)
    assert env["SLURM_JOB_ID"] == "1" and env["SLURM_JOB_NAME"] == env["COVEY_JOB_NAME"] == "BERT_large"
    for ours, theirs in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"), ("LOCAL_RANK", "SLURM_LOCALID"),
                         ("GROUP_RANK", "SLURM_NODEID"), ("COVEY_NODES", "SLURM_JOB_NODELIST")):  # fmt: skip
        assert env[ours] == env[theirs]
    assert (env["SLURM_TASKS_PER_NODE"], env["SLURM_CPUS_PER_TASK"], env["SLURM_GPUS_ON_NODE"]) == ("2(x2)", "3", "2")
    folder = env["PATH"].split(":")[0]

    def srun(*words: str) -> tuple[int, str]:
        ran = subprocess.run(("srun", *words), env={**env, "PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True,
                             text=True, cwd=tmp_path)  # fmt: skip
        return ran.returncode, ran.stdout + ran.stderr

    assert srun("-n", "4", "--gres=gpu:1", "--unbuffered", "echo", "-n", "here") == (0, "here")
    assert srun("-n3", "echo", "not here: this is task 3") == (0, "")
    assert srun("--output", "o-%j-%t", "sh", "-c", "echo out; echo err >&2; exit 5") == (5, "")
    assert (tmp_path / "o-1-3").read_text() == "out\nerr\n"
    for words, said in ((("--frob", "x"), "unknown option --frob"), (("-n", "2"), "no command to run"),
                        (("--pty", "sh"), "--pty is refused"), (("-n", "x", "y"), "invalid -n x")):  # fmt: skip
        code, text = srun(*words)
        assert code == 2 and said in text and "next:" in text

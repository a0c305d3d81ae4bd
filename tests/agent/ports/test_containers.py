"""The argument lists of podman and apptainer, and what is refused, by tables. A real podman: in tests/agent/starter."""

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import msgspec
import pytest

from agent.ports.processes import container_host
from agent.ports.processes.container_host import Containers, error_in, groups_of, variables_of
from agent.ports.processes.containers import (
    ContainerHost,
    Groups,
    cdi_names,
    clearing,
    contained,
    mounts,
    name_of,
    refusal,
    runtime_of,
)
from covey.ports.processes import Command, Container

ONE, TWO = "GPU-11111111-1111-1111-1111-111111111111", "GPU-22222222-2222-2222-2222-222222222222"
SITE = "/opt/covey/covey/hooks/site"
ENV = {
    "PATH": "/home/ann/venv/bin:/usr/bin", "LD_LIBRARY_PATH": "/opt/cuda", "HOME": "/home/ann", "LANG": "C.UTF-8",
    "CONTAINER_HOST": "unix:/run/podman.sock", "XDG_RUNTIME_DIR": "/run/user/7", "PYTHONPATH": f"{SITE}:/home/ann/lib",
    "RANK": "3", "COVEY_RANK": "3", "COVEY_JOB_ID": "j7", "COVEY_EPOCH": "2", "COVEY_TOKEN": "secret",
    "COVEY_UMASK": "027", "NVIDIA_VISIBLE_DEVICES": ONE, "CUDA_VISIBLE_DEVICES": ONE, "LESS%%": "x",
}  # fmt: skip
IMAGE = Container(
    image="torch:2",
    ours=("CUDA_VISIBLE_DEVICES", "RANK"),
    shows=("/run/covey", "/var/lib/covey/jobs/j7", "/opt/covey/covey/hooks"),
)
COMMAND = Command(
    argv=("python", "train.py", "--lr=1"), cwd="/data/run", env=ENV, output="/s/rank3.log", run="/s/2.rank3",
    container=IMAGE,
)  # fmt: skip
HOST = ContainerHost(
    name="gpu3", user="ann", uid=1001, gid=1002, tool="/usr/bin/podman", runtimes=("crun", "runc"), image_env={},
    folders=frozenset({"/home/ann", "/data/run", *IMAGE.shows}), runtime_dir="/run/user/1001",
)  # fmt: skip
APPTAINER = HOST._replace(tool="/usr/bin/apptainer")


def made(command: Command = COMMAND, host: ContainerHost = HOST, **more: object) -> Command:
    assert command.container is not None
    container = msgspec.structs.replace(command.container, **more)
    return contained(msgspec.structs.replace(command, container=container), container, host)


def test_the_whole_argument_list_of_podman() -> None:
    found = made()
    assert found.argv == (
        "/usr/bin/podman", "--cgroup-manager=cgroupfs", "--runtime=crun", "run",
        "--rm", "--pull=never", "--name=covey-j7-2-r3-2bb80d53", "--pidfile=/s/2.rank3.pid",
        "--label=covey=j7", "--log-driver=passthrough", "--no-healthcheck",
        "--network=host", "--pid=host", "--uts=host", "--cgroupns=host", "--ipc=host",
        "--userns=keep-id", "--user=1001:1002", "--group-add=keep-groups",
        "--security-opt=label=disable", "--ulimit=host", "--umask=0027",
        "--volume=/data/run:/data/run", "--volume=/home/ann:/home/ann",
        "--volume=/opt/covey/covey/hooks:/opt/covey/covey/hooks:ro", "--volume=/run/covey:/run/covey:ro",
        "--volume=/var/lib/covey/jobs/j7:/var/lib/covey/jobs/j7:ro",
        "--env=COVEY_EPOCH", "--env=COVEY_JOB_ID", "--env=COVEY_RANK", "--env=COVEY_TOKEN",
        "--env=COVEY_UMASK", "--env=CUDA_VISIBLE_DEVICES", "--env=HOME", "--env=LANG", "--env=PYTHONPATH",
        "--env=RANK", "--env=NVIDIA_VISIBLE_DEVICES=void",
        "--workdir=/data/run", "--entrypoint=", "torch:2", "python", "train.py", "--lr=1",
    )  # fmt: skip
    assert (found.cwd, found.run, found.output) == (COMMAND.cwd, COMMAND.run, COMMAND.output)


def test_podman_has_no_session_that_would_move_it_out_of_the_job() -> None:
    env = made().env
    assert "CONTAINER_HOST" not in env and "LD_LIBRARY_PATH" not in env
    assert env["DBUS_SESSION_BUS_ADDRESS"] == "unix:path=/nonexistent"
    assert env["XDG_RUNTIME_DIR"] == "/run/user/1001" and not env["PATH"].startswith("/home")
    assert "XDG_RUNTIME_DIR" not in made(host=HOST._replace(runtime_dir="")).env, "no folder of another host"


def test_no_image_is_pulled_and_none_but_the_ranks_own_gpus_are_given() -> None:
    host = HOST._replace(cdi=frozenset({ONE, TWO, "all", "0"}))
    argv = made(host=host, gpus=(ONE,)).argv
    assert [word for word in argv if word.startswith("--device")] == [f"--device=nvidia.com/gpu={ONE}"]
    assert "--pull=never" in argv and "--env=NVIDIA_VISIBLE_DEVICES=void" in argv
    assert not [word for word in made(host=host).argv if word.startswith("--device")], "a rank without GPUs"


@pytest.mark.parametrize(
    ("groups", "there", "runtime"),
    [
        ("unified", ("crun", "runc"), "crun"),
        ("unified", ("runc",), ""),
        ("hybrid", ("crun", "runc"), "runc"),
        ("hybrid", ("crun",), ""),
        ("legacy", ("runc",), "runc"),
        ("legacy", ("crun", "runc"), "crun"),
        ("legacy", (), ""),
    ],
)
def test_the_runtime_is_one_that_can_use_the_hosts_control_groups(
    groups: Groups, there: tuple[str, ...], runtime: str
) -> None:
    assert runtime_of(groups, there) == runtime
    host = HOST._replace(groups=groups, runtimes=there)
    assert (refusal(COMMAND, IMAGE, host) is None) == bool(runtime)
    if runtime:
        assert f"--runtime={runtime}" in made(host=host).argv
        assert ("--group-add=keep-groups" in made(host=host).argv) == (runtime == "crun")


def test_the_hosts_control_groups_by_their_files() -> None:
    assert [groups_of(*there) for there in ((True, False), (False, True), (False, False))] == [
        "unified", "hybrid", "legacy",
    ]  # fmt: skip


def test_ranks_share_memory_also_where_there_are_no_queues() -> None:
    argv = made(host=HOST._replace(queues=False)).argv
    assert "--ipc=host" not in argv and {"--ipc=private", "--volume=/dev/shm:/dev/shm"} <= set(argv)
    assert "--device=/dev/infiniband" in made(host=HOST._replace(folders=HOST.folders | {"/dev/infiniband"})).argv


@pytest.mark.parametrize(
    ("home", "cwd", "there", "expected"),
    [
        ("/home/ann", "/home/ann/run", ("/home/ann", "/home/ann/run"), [("/home/ann", True)]),
        ("/home/ann", "/home", ("/home/ann", "/home"), [("/home", True)]),
        ("/home/ann", "/home/anna", ("/home/ann", "/home/anna"), [("/home/ann", True), ("/home/anna", True)]),
        ("/nonexistent", "/w", ("/w",), [("/w", True)]),
        ("/", "/w", ("/", "/w"), [("/w", True)]),
        ("relative", "/w", ("relative", "/w"), [("/w", True)]),
    ],
)
def test_home_and_working_directory_are_mounted_once(
    home: str, cwd: str, there: tuple[str, ...], expected: list[tuple[str, bool]]
) -> None:
    container = Container(image="torch:2", shows=(f"{cwd}/agent",))
    command = msgspec.structs.replace(COMMAND, cwd=cwd, env={"HOME": home}, container=container)
    assert list(mounts(command, HOST._replace(folders=frozenset(there)))) == expected


def test_covey_sets_what_the_image_would_and_the_image_what_the_submitter_would() -> None:
    image = {"PATH": "/image", "RANK": "0", "LANG": "C", "HOME": "/root", "PYTHONPATH": "/image/lib"}
    found = made(host=HOST._replace(image_env=image))
    passed = {word.removeprefix("--env=") for word in found.argv if word.startswith("--env=")}
    assert {"RANK", "HOME", "COVEY_TOKEN", "PYTHONPATH"} <= passed and not {"LANG", "PATH"} & passed
    assert found.env["PYTHONPATH"] == f"{SITE}:/image/lib:/home/ann/lib"
    bare = msgspec.structs.replace(COMMAND, env=ENV | {"PYTHONPATH": "/home/ann/lib"})
    assert contained(bare, IMAGE, HOST._replace(image_env=image)).env["PYTHONPATH"] == "/image/lib:/home/ann/lib"
    assert variables_of('level=warning msg="slow"\n["A=1", "B=x=y"]\nlevel=warning\n') == {"A": "1", "B": "x=y"}
    assert error_in('level=warning msg="slow"\nError: no space\nlevel=warning\n') == "no space"
    assert variables_of("null") == variables_of("what?") == {}


def test_the_argument_list_of_apptainer_by_its_manual() -> None:
    container = msgspec.structs.replace(IMAGE, image="/images/torch.sif", gpus=(ONE,))
    found = contained(COMMAND, container, APPTAINER)
    assert found.argv == (
        "/usr/bin/apptainer", "exec", "--cleanenv", "--pwd=/data/run",
        "--bind=/data/run:/data/run", "--bind=/home/ann:/home/ann",
        "--bind=/opt/covey/covey/hooks:/opt/covey/covey/hooks:ro", "--bind=/run/covey:/run/covey:ro",
        "--bind=/var/lib/covey/jobs/j7:/var/lib/covey/jobs/j7:ro",
        "--nv", "/images/torch.sif", "python", "train.py", "--lr=1",
    )  # fmt: skip
    assert found.env["APPTAINERENV_RANK"] == "3" and found.env["APPTAINERENV_CUDA_VISIBLE_DEVICES"] == ONE
    assert "APPTAINERENV_PATH" not in found.env and "APPTAINERENV_HOME" not in found.env


def test_what_is_refused_says_why_and_what_next() -> None:
    gpu, sif = msgspec.structs.replace(IMAGE, gpus=(TWO,)), msgspec.structs.replace(IMAGE, image="/i/torch.sif")
    odd = msgspec.structs.replace(COMMAND, cwd="/data/a:b")
    hides = msgspec.structs.replace(COMMAND, env={**COMMAND.env, "COVEY_CHECKPOINT_DIR": "/tmp/j7-x"})
    saves = msgspec.structs.replace(COMMAND, env={**COMMAND.env, "COVEY_CHECKPOINT_DIR": "/ckpt/j7-x"})
    for command, container, host, why, next in (
        (COMMAND, IMAGE, HOST._replace(uid=0), "rootless", "submit as a user"),
        (COMMAND, IMAGE, HOST._replace(tool=""), "podman is not installed", "install podman on gpu3"),
        (COMMAND, sif, HOST._replace(tool=""), "apptainer is not installed", "install apptainer on gpu3"),
        (COMMAND, IMAGE, HOST._replace(image_env=None), "never pull", "podman pull torch:2 on gpu3 as ann"),
        (COMMAND, sif, APPTAINER._replace(image_env=None), "no such file", "copy it to /i/torch.sif on gpu3"),
        (COMMAND, gpu, HOST._replace(cdi=frozenset({ONE})), TWO, "nvidia-ctk cdi generate"),
        (COMMAND, IMAGE, HOST._replace(gains=False), "gain no privileges", "covey-starter"),
        (COMMAND, IMAGE, HOST._replace(runtimes=("runc",)), "needs crun", "install crun on gpu3"),
        (COMMAND, IMAGE, HOST._replace(trouble="no space", runtime_dir=""), "no space", "enable-linger ann"),
        (COMMAND, IMAGE, HOST._replace(trouble="no space"), "no space", "podman image exists torch:2"),
        (saves, IMAGE, HOST, "COVEY_CHECKPOINTS, /ckpt, is no folder there", "mkdir -p /ckpt"),
        (hides, IMAGE, HOST, "COVEY_CHECKPOINTS, /tmp, would hide", "a folder below it"),
        (odd, IMAGE, HOST._replace(folders=HOST.folders | {"/data/a:b"}), "':'", "rename"),
    ):
        refused = refusal(command, container, host)
        assert refused is not None and refused.filename == f"image {container.image} cannot be used on gpu3"
        told, _, step = str(refused.strerror).partition("; next: ")
        assert why in told and next in step, refused
        assert [line.split()[0] for line in refused.lines.splitlines()] == ["covey:", "why:", "next:"]
    assert refusal(COMMAND, IMAGE, HOST) is None
    there = HOST._replace(folders=HOST.folders | {"/ckpt"})
    assert refusal(saves, IMAGE, there) is None and ("/ckpt", True) in mounts(saves, there)
    assert refusal(COMMAND, gpu, HOST._replace(cdi=frozenset({TWO}))) is None
    assert refusal(COMMAND, sif, APPTAINER) is None, "a GPU needs no CDI there"


def test_devices_are_named_by_cdis_files_alone() -> None:
    yaml = f'cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: "0"\n- containerEdits: x\n  name: {ONE}\n'
    json = f'{{"kind": "nvidia.com/gpu", "devices": [{{"name": "{TWO}"}}]}}'
    other = f"kind: vendor.com/card\ndevices:\n- name: {TWO}\n"
    assert cdi_names([yaml, other]) == {"0", ONE}
    assert cdi_names([json]) == {TWO}


def test_a_container_has_one_name_for_all_processes_of_a_rank() -> None:
    again = msgspec.structs.replace(COMMAND, run="/s/2.rank3.1", env=ENV | {"COVEY_INCARNATION": "1"})
    other = msgspec.structs.replace(COMMAND, env=ENV | {"COVEY_TOKEN": "another"})
    assert name_of(again) == name_of(COMMAND) != name_of(other) and "secret" not in name_of(COMMAND)
    assert clearing("/usr/bin/podman", [name_of(COMMAND)])[-1] == name_of(COMMAND)


async def test_an_image_that_got_the_name_of_another_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sets, asked, now_s = ["A=1"], list[str](), 100.0

    async def run(argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
        asked.append(argv[3])
        return 0, json.dumps(sets) if argv[3] == "inspect" else ""

    monkeypatch.setattr(container_host, "look", lambda name, command, container: HOST._replace(image_env=None))
    monkeypatch.setattr(container_host, "time", SimpleNamespace(monotonic=lambda: now_s))
    made = Containers("gpu3", run)
    command = msgspec.structs.replace(COMMAND, env=ENV | {"A": "mine", "B": "mine"})
    for image, seconds, passes in ((["A=1"], 0.0, "B"), (["B=1"], 5.0, "B"), (["B=1"], 11.0, "A")):
        sets[:], now_s = image, 100.0 + seconds
        argv = (await made.contained(command, IMAGE)).argv
        assert [word for word in ("--env=A", "--env=B") if word in argv] == [f"--env={passes}"], seconds
    assert asked == ["exists", "inspect"] * 2

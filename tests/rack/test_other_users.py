"""Jobs of several users on a host whose first process is systemd, and what each of them can do to the others."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from chaos.rack.agents import wait
from chaos.rack.booted import ROOT, BootedHost, why_not_booted
from chaos.rack.hosts import Laboratory
from tests.rack.installed import install, installation, typed, written

pytestmark = [pytest.mark.rack, pytest.mark.xdist_group("booted")]
OWNED = f"""
import pwd, sys
sys.path.insert(0, {str(ROOT)!r})
import msgspec
from plugins.scheduler.messages import spec
parse = spec.JobSpec.parse.__func__
def owned(cls, fields):
    found = parse(cls, fields)
    user = found.name.partition(".")[0]
    owner = spec.JobOwner(user, pwd.getpwnam(user).pw_uid)
    return msgspec.structs.replace(found, owner=owner)
spec.JobSpec.parse = classmethod(owned)
from agent.main import main
main()
"""
"""An agent that takes the first word of a job's name for its owner."""
ATTACK = """
import os, socket, sys
def tried(what, work):
    try:
        print(what, "DONE", repr(work())[:60], flush=True)
    except OSError as error:
        print(what, error.strerror, flush=True)
def connected(path, asks="GET /v1/jobs", body=""):
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(5)
        stream.connect(path)
        head = f"{asks} HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
        stream.sendall((head + body).encode())
        return stream.recv(100) or sys.exit("closed")
def operated():
    answer = connected("/run/covey/agent.sock", "POST /v1/quotas", '{"tenant": "ml", "gpus": 1000}')
    if b" 403 " in answer.splitlines()[0]:
        raise PermissionError(13, "Permission denied")
    return answer
pid, folder = int(sys.argv[1]), "/var/lib/covey-jobs/jobs/" + sys.argv[2]
tried("environ", lambda: open(f"/proc/{pid}/environ").read())
tried("memory", lambda: open(f"/proc/{pid}/mem", "rb"))
tried("signal", lambda: os.kill(pid, 9))
tried("output", lambda: open(f"{folder}/rank0.log").read())
tried("listing", lambda: os.listdir(folder))
tried("jobs", lambda: os.listdir("/var/lib/covey-jobs/jobs"))
tried("link", lambda: os.symlink("/etc/passwd", "/var/lib/covey-jobs/jobs/j99"))
tried("supervisor", lambda: connected(f"{folder}/sup-1.sock"))
tried("starter", lambda: connected("/var/lib/covey-jobs/starter.sock"))
tried("key", lambda: open("/etc/covey/gossip.key").read())
tried("state", lambda: os.listdir("/var/lib/covey"))
tried("given", lambda: os.listdir("/run/covey-starter"))
tried("operator", operated)
tried("tools", lambda: connected("/run/covey/jobs.sock"))
tried("agent", lambda: os.kill(int(open("/proc/self/stat").read().split()[3]) and int(sys.argv[3]), 9))
"""


@pytest.fixture(scope="module")
def host() -> Iterator[BootedHost]:
    """One host with a starter, and users alice and bob."""
    if trouble := why_not_booted():
        pytest.skip(f"no host can be booted here: {trouble}")
    with Laboratory(1, kind=BootedHost) as lab:
        (found,) = (host for host in lab.hosts.values() if isinstance(host, BootedHost))
        typed(found, "useradd -m alice && useradd -m bob && groupadd -f rdma && usermod -aG rdma alice")
        install([found], toml="[gpus]\nsimulated = 4\n")
        written(found, "/opt/owned.py", OWNED)
        written(found, "/opt/attack.py", ATTACK)
        typed(found, "chmod 644 /opt/owned.py /opt/attack.py; mkdir -p /etc/systemd/system/covey{,-starter}.service.d")
        agent = f"[Service]\nExecStart=\nExecStart={sys.executable} /opt/owned.py --config /etc/covey/agent.toml\n"
        written(found, "/etc/systemd/system/covey.service.d/owned.conf", agent)
        # the Python of these tests may be in root's home, and this checkout in /tmp
        seen = "[Service]\nProtectHome=read-only\nPrivateTmp=no\n"
        written(found, "/etc/systemd/system/covey-starter.service.d/python.conf", seen)
        typed(found, "cp /opt/covey/share/covey/covey-starter.service /etc/systemd/system/")
        typed(found, "systemctl daemon-reload && systemctl enable --now covey-starter")
        typed(found, "set -e; " + "\n".join(installation()[-2:]), 240.0)
        wait(lambda: "gpu1 leads" in found.shell("agentctl hosts").stdout, found.journal, 60.0)
        yield found


def submitted(host: BootedHost, name: str, *options: str) -> str:
    """The id of a job that runs now."""
    said = typed(host, f"cd /; agentctl submit --name {name} {' '.join(options)}")
    job = said.split()[0]
    wait(lambda: f"{job} " in host.shell("agentctl jobs | grep running").stdout, lambda: why(host, job), 30.0)
    return job


def why(host: BootedHost, job: str) -> str:
    return host.shell(f"agentctl why {job}").stdout + host.journal() + host.journal("covey-starter")


def pid_of(host: BootedHost, user: str, word: str) -> int:
    """The pid of what a job that has just begun runs as that user."""
    found = wait(lambda: host.shell(f"pgrep -u {user} -x {word}").stdout.split(), host.journal, 10.0)
    return int(found[0])


def test_a_job_runs_as_its_user_in_a_unit_of_its_own(host: BootedHost) -> None:
    script = "id -un; id -Gn; echo $HOME $USER; tail -1 /proc/self/cgroup; grep NoNewPrivs /proc/self/status; nice"
    said = typed(host, f"cd /; HOME=/elsewhere agentctl submit --name alice.a --follow -- sh -c {shlex.quote(script)}")
    lines = [line.removeprefix("[0] ") for line in said.splitlines()]
    assert "alice" in lines and "alice rdma" in lines and "/home/alice alice" in lines, said
    assert re.search(r"/covey-jobs\.slice/covey-jobs-j\d+:1\.slice/covey-job:j\d+:1:supervisor-\w+\.service", said), (
        said
    )
    assert "NoNewPrivs:\t0" in lines and "0" in lines


def test_it_outlives_agent_and_starter_its_output_is_read_and_cancel_ends_it(host: BootedHost) -> None:
    job = submitted(host, "alice.b", "-- sh -c 'id -un; exec sleep 601'")
    pid = pid_of(host, "alice", "sleep")
    typed(host, "systemctl restart covey-starter; systemctl restart covey")
    wait(lambda: "gpu1 leads" in host.shell("agentctl hosts").stdout, host.journal, 60.0)
    assert pid_of(host, "alice", "sleep") == pid
    wait(lambda: "alice" in host.shell(f"agentctl logs {job}").stdout, lambda: why(host, job), 10.0)
    typed(host, f"agentctl cancel {job}")
    wait(lambda: host.shell("pgrep -u alice").returncode == 1, lambda: why(host, job), 20.0)
    wait(lambda: "covey-job:" not in typed(host, "systemctl list-units --all 'covey-job*'"), host.journal, 10.0)


def as_user(host: BootedHost, user: str, line: str) -> "subprocess.CompletedProcess[str]":
    return host.shell(f"cd /; runuser -u {user} -- {line}")


def test_who_submits_is_who_runs_and_others_see_a_row(host: BootedHost) -> None:
    """Whatever the submission says: the kernel tells who it is."""
    typed(
        host, "usermod -aG covey alice && usermod -aG covey bob && agentctl tenant add ml --users alice,bob --quota 4"
    )
    said = as_user(host, "alice", "agentctl submit --name bob.h -- sh -c 'id -un; exec sleep 604'")
    assert said.returncode == 0, said.stderr + host.journal()
    job = said.stdout.split()[0]
    wait(lambda: "alice" in as_user(host, "alice", f"agentctl logs {job}").stdout, lambda: why(host, job), 30.0)
    row = as_user(host, "bob", "agentctl jobs --everyone").stdout
    assert job in row and "alice" in row and "bob.h" not in row
    for words in ("logs", "cancel"):
        refused = as_user(host, "bob", f"agentctl {words} {job}")
        assert refused.returncode == 4 and "belongs to alice" in refused.stderr, refused
    assert as_user(host, "alice", f"agentctl cancel {job}").returncode == 0
    wait(lambda: host.shell("pgrep -u alice").returncode == 1, lambda: why(host, job), 20.0)


def test_a_container_without_root_may_gain_what_any_user_may(host: BootedHost) -> None:
    script = "unshare --user --map-root-user --mount sh -c 'id -u; mount -t tmpfs tmpfs /mnt && echo mounted'"
    said = typed(host, f"cd /; agentctl submit --name alice.c --follow -- sh -c {shlex.quote(script)}")
    assert "mounted" in said


def test_root_and_system_users_run_nothing(host: BootedHost) -> None:
    for user in ("root", "daemon"):
        said = host.shell(f"cd /; agentctl submit --name {user}.d --wait -- true")
        assert said.returncode == 127, said.stdout
        assert "never run as root" in said.stdout + said.stderr or "a system user" in said.stdout + said.stderr
    assert "refused StartAs" in host.journal("covey-starter")


def test_a_user_can_do_nothing_to_another_users_job_nor_to_the_agent(host: BootedHost) -> None:
    job = submitted(host, "alice.e", "-- sh -c 'echo secret; exec sleep 602'")
    pid, agent = pid_of(host, "alice", "sleep"), typed(host, "systemctl show covey -p MainPID --value").strip()
    said = typed(host, f"cd /; agentctl submit --name bob.e --follow -- python3 /opt/attack.py {pid} {job} {agent}")
    lines = [line.removeprefix("[0] ") for line in said.splitlines()]
    found = dict(line.split(" ", 1) for line in lines if line.split(" ")[0] in ATTACK and " " in line)
    denied = "Permission denied"
    assert {what: answer for what, answer in found.items() if what in ATTACKS} == {
        **dict.fromkeys(ATTACKS, denied),
        "signal": "Operation not permitted",
        "agent": "Operation not permitted",
    }, said
    assert pid_of(host, "alice", "sleep") == pid
    typed(host, f"agentctl cancel {job}")


ATTACKS = tuple(re.findall(r'tried\("(\w+)"', ATTACK))


CONTROLLERS = "cat /sys/fs/cgroup/cgroup.controllers"


def test_a_job_has_the_limits_it_asked_for(host: BootedHost) -> None:
    """One slice has them, for all its units. Whether the kernel keeps to them is said as it is: it may have given its
    controllers to somebody else."""
    job = submitted(host, "alice.f", "--mem 256MiB --cpus 1 --time 1h --private-tmp -- sh -c 'ls -A /tmp; sleep 603'")
    names = ("MemoryMax", "TasksMax", "CPUQuotaPerSecUSec", "CPUWeight")
    asked = " ".join(f"-p {name}" for name in names)
    shown = dict(line.split("=") for line in typed(host, f"systemctl show 'covey-jobs-{job}:1.slice' {asked}").split())
    assert shown == dict(zip(names, (str(256 << 20), "32768", "1s", "100"), strict=True))
    unit = typed(host, f"systemctl list-units --plain --no-legend 'covey-job:{job}:*'").split()[0]
    assert set(typed(host, f"systemctl show {unit} -p Slice -p PrivateTmp").split()) == {
        "PrivateTmp=yes",
        f"Slice=covey-jobs-{job}:1.slice",
    }
    assert f"covey-end:{job}:1.timer" in typed(host, "systemctl list-timers --all")
    lacks = [name for name in ("memory", "cpu", "pids") if name not in typed(host, CONTROLLERS).split()]
    said = f"not enforced: nothing here has control of {', '.join(lacks)}" if lacks else "enforced"
    assert f"limits of their memory and processes: {said}" in typed(host, "agentctl status")

    def limits() -> object:
        kept = "not enforced" if lacks else "enforced"
        return re.search(rf"(?m)^limits +{kept}$", host.shell(f"agentctl job {job}").stdout)

    wait(limits, lambda: typed(host, f"agentctl job {job}"), 20.0)  # its host has just begun it
    typed(host, f"agentctl cancel {job}")
    wait(lambda: f"{job}:1" not in typed(host, "systemctl list-units --all 'covey*'"), host.journal, 20.0)


IMAGE = r"""
set -e
grep -q ^alice: /etc/subuid || usermod --add-subuids 300000-365535 --add-subgids 300000-365535 alice
mkdir -p /opt/image/bin && cp "$(command -v busybox)" /opt/image/bin/
runuser -u alice -- mkdir -p /home/alice/.config/containers
printf '[storage]\ndriver = "vfs"\n' > /home/alice/.config/containers/storage.conf
cd / && tar -C /opt/image -c . | runuser -u alice -- env HOME=/home/alice podman import - tiny:1
pkill -u alice podman || true
install -d -m 770 -o root -g rdma /home/alice/shared
"""
CGROUPS = "for p in $(pgrep -u alice 'busybox|conmon|podman'); do tail -1 /proc/$p/cgroup 2> /dev/null; done; true"
IN_IMAGE = """
b=/bin/busybox
echo rank $RANK of $WORLD_SIZE as $($b id -u) in $PWD
[ -e /usr ] || echo no folder of the host
[ -S $COVEY_SOCKET ] && echo socket
echo mine > at.$RANK
echo ours > shared/at.$RANK
trap "echo saved; exit 0" TERM
while :; do $b sleep 0.1; done
"""


def test_ranks_in_an_image_are_their_users_and_stay_in_the_jobs_unit(host: BootedHost) -> None:
    for tool in ("podman", "crun", "newuidmap", "busybox"):
        if host.shell(f"command -v {tool}").returncode:
            pytest.skip(f"{tool} is not installed, so no rank runs in an image; next: apt install podman crun uidmap")
    typed(host, IMAGE, 120.0)
    options = "--workers 2 --gpus 0 --private-tmp --image tiny:1 --cwd /home/alice"
    script = f"/bin/busybox sh -c {shlex.quote(IN_IMAGE)}"
    job = typed(host, f"agentctl submit --name alice.i {options} -- {script}").split()[0]
    uid = typed(host, "id -u alice").strip()

    def said() -> str:
        return host.shell(f"agentctl logs {job}").stdout

    wait(lambda: said().count("socket") == 2, lambda: said() + why(host, job), 60.0)
    for rank in range(2):
        assert f"rank {rank} of 2 as {uid} in /home/alice" in said() and "no folder of the host" in said()
        assert typed(host, f"stat -c %U:%G /home/alice/at.{rank}") == "alice:alice\n"
        assert typed(host, f"cat /home/alice/shared/at.{rank}") == "ours\n", "the user's other groups may write there"
    groups = typed(host, CGROUPS).split()
    assert len(groups) >= 8 and all(f"/covey-job:{job}:1:supervisor-" in group for group in groups), groups
    unit = typed(host, f"systemctl list-units --plain --no-legend 'covey-job:{job}:*'").split()[0]
    assert "PrivateTmp=no" in typed(host, f"systemctl show {unit} -p PrivateTmp"), "podman's sockets are there"
    assert re.search(r"(?m)^image +tiny:1$", typed(host, f"agentctl job {job}"))
    typed(host, f"agentctl cancel {job}")
    wait(lambda: host.shell("pgrep -u alice").returncode == 1, lambda: why(host, job), 30.0)
    assert said().count("saved") == 2
    left = host.shell("cd /; runuser -u alice -- env HOME=/home/alice podman ps -aq; pkill -u alice podman")
    assert left.stdout == "", left
    job = typed(host, "agentctl submit --name alice.k --image tiny:2 --gpus 0 --cwd /home/alice -- true").split()[0]
    refused = host.shell(f"agentctl wait {job}")
    assert refused.returncode == 127 and "next: podman pull tiny:2 on gpu1 as alice" in refused.stdout, refused
    for shown in ("logs", "job", "why"):
        line = host.shell(f"agentctl {shown} {job}").stdout
        assert "agents never pull one" in line and "next: podman pull tiny:2 on gpu1 as alice" in line, (shown, line)


HOG = "held = [bytearray(b'x' * (16 << 20)) for _ in range(64)]; import time; time.sleep(600)"


def test_a_job_that_takes_more_memory_is_named_oom(host: BootedHost) -> None:
    if "memory" not in typed(host, CONTROLLERS).split():
        pytest.skip("this kernel's control of memory is with version 1 of control groups; next: make limits")
    said = host.shell(
        f"cd /; agentctl submit --name alice.o --mem 256MiB --wait -- python3 -c {shlex.quote(HOG)}", 180.0
    )
    assert said.returncode == 137 and "oom: the kernel killed 1 process at the limit of 256 MiB" in said.stdout


COUNTS = "while :; do date +%s; sleep 0.2; done > ~/counted"
BOMB = "f() { f | f & f; }; sleep 1; f"
FILLS = "head -c 2G /dev/zero > /tmp/full; ls -l /tmp; sleep 600"
SPINS = "while :; do :; done"
STAT = "cat /sys/fs/cgroup/covey.slice/covey-jobs.slice/covey-jobs-{}:1.slice/cpu.stat"


def test_what_one_job_takes_leaves_the_others_and_the_agent_alone(host: BootedHost) -> None:
    """A fork bomb, a job that fills /tmp where that is memory, and one that computes beside one with more GPUs."""
    lacks = {"memory", "cpu", "pids"} - set(typed(host, CONTROLLERS).split())
    if lacks:
        pytest.skip(f"this kernel does not limit {', '.join(sorted(lacks))} for systemd; next: make limits")
    neighbour = submitted(host, "alice.n", f"--gpus 1 -- sh -c {shlex.quote(COUNTS)}")
    bomb = submitted(host, "bob.n", f"--gpus 1 --mem 96MiB -- sh -c {shlex.quote(BOMB)}")
    for _ in range(10):
        assert f"{neighbour} " in typed(host, "agentctl jobs"), "the agent answers"
        time.sleep(1.0)
    typed(host, f"agentctl cancel {bomb}")
    wait(lambda: host.shell("pgrep -u bob", 180.0).returncode == 1, lambda: why(host, bomb), 180.0)
    full = typed(host, f"cd /; agentctl submit --name bob.f --mem 256MiB --private-tmp -- sh -c {shlex.quote(FILLS)}")
    full = full.split()[0]
    mounted = typed(host, "stat -f -c %T /tmp").strip()
    if mounted == "tmpfs":
        wait(
            lambda: "oom: the kernel killed" in host.shell(f"agentctl why {full}").stdout,
            lambda: why(host, full),
            180.0,
        )
    typed(host, f"agentctl cancel {full}; true")
    counted = [int(second) for second in typed(host, "cat /home/alice/counted").split()]
    pauses = [after - before for before, after in pairwise(counted)]
    assert max(pauses) <= 5, f"the neighbour stood still for {max(pauses)} s"
    typed(host, f"agentctl cancel {neighbour}")
    few, many = (submitted(host, f"alice.w{gpus}", f"--gpus {gpus} -- sh -c '{SPINS}'") for gpus in (1, 3))

    def used(job: str) -> int:
        return int(typed(host, STAT.format(job)).split()[1])

    time.sleep(2.0)
    before = used(few), used(many)
    time.sleep(8.0)
    took = used(few) - before[0], used(many) - before[1]
    for job in (few, many):
        typed(host, f"agentctl cancel {job}")
    assert took[1] > 1.5 * took[0], f"processor time with one GPU and with three: {took} us"


def test_without_a_starter_jobs_of_others_wait_and_everybody_is_told(host: BootedHost) -> None:
    typed(host, "systemctl stop covey-starter")
    line = "not possible: no starter answers at /var/lib/covey-jobs/starter.sock"
    wait(lambda: line in host.shell("agentctl status").stdout, lambda: typed(host, "agentctl status"), 30.0)
    assert "systemctl enable --now covey-starter" in typed(host, "agentctl doctor")
    job = typed(host, "cd /; agentctl submit --name alice.g -- true").split()[0]
    refused = "jobs of alice are not possible on gpu1"
    wait(lambda: refused in host.shell(f"agentctl why {job}").stdout, lambda: why(host, job), 30.0)
    typed(host, "systemctl start covey-starter")
    wait(lambda: " done " in host.shell(f"agentctl jobs -a | grep '^{job} '").stdout, lambda: why(host, job), 60.0)
    assert "jobs of other users" in typed(host, "agentctl status")

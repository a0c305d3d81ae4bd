"""A script as its manual has it, of a user whose home no other user may enter: torchrun on two hosts, preempted."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.rack.agents import wait
from chaos.rack.booted import BootedHost, why_not_booted
from chaos.rack.hosts import Laboratory
from tests.rack.installed import TOML, install, start, typed, written

pytest.importorskip("torch")
pytestmark = [pytest.mark.rack, pytest.mark.torch, pytest.mark.long, pytest.mark.xdist_group("booted")]
TORCHRUN = Path(sys.executable).with_name("torchrun")
SCRIPT = """
import glob, hashlib, os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
folder = os.path.expanduser("~/runs")
os.makedirs(folder, exist_ok=True)
saved = torch.tensor(max([int(path.split("-")[-1][:-3]) for path in glob.glob(f"{folder}/step-*.pt")], default=0))
dist.all_reduce(saved, dist.ReduceOp.MIN)
if saved:
    state = torch.load(f"{folder}/step-{saved}.pt", weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
print(f"begins at step {int(saved)} in a home of mode {os.stat(os.path.expanduser('~')).st_mode & 0o777:o}", flush=True)
for step in range(int(saved), 400):
    drawn = torch.Generator().manual_seed(2 * step + dist.get_rank())
    x = torch.randn(32, 8, generator=drawn)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9 and os.environ["LOCAL_RANK"] == "0":
        path = f"{folder}/step-{step + 1}.pt"
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path + "~")
        os.replace(path + "~", path)
    time.sleep(0.05)
learnt = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
print("learnt", hashlib.sha256(learnt.numpy().tobytes()).hexdigest()[:16], flush=True)
dist.destroy_process_group()
"""
STARTER = "[Service]\nProtectHome=read-only\nPrivateTmp=no\n"
"""For the starter's unit: the Python of this tree may be in root's home, and this tree in /tmp."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[BootedHost]]:
    """Two hosts with a starter each, and user ann."""
    if trouble := why_not_booted():
        pytest.skip(f"no host can be booted here: {trouble}")
    with Laboratory(2, kind=BootedHost) as lab:
        found = [host for host in lab.hosts.values() if isinstance(host, BootedHost)]
        for host in found:
            typed(host, "useradd -m ann && chmod 700 /home/ann; mkdir -p /etc/systemd/system/covey-starter.service.d")
            written(host, "/etc/systemd/system/covey-starter.service.d/python.conf", STARTER)
            written(host, "/home/ann/train.py", SCRIPT)
            typed(host, "chown ann:ann /home/ann/train.py")
        if found[0].run(["runuser", "-u", "ann", "--", str(TORCHRUN), "--help"]).returncode:
            pytest.skip("another user cannot run this environment's torchrun")
        install(found, TOML)
        for host in found:
            typed(host, "usermod -aG covey ann; cp /opt/covey/share/covey/covey-starter.service /etc/systemd/system/")
            typed(host, "systemctl daemon-reload && systemctl enable --now covey-starter")
        start(found, 120.0)
        typed(found[0], "agentctl tenant add ml --users ann --quota 4")
        yield found


def as_ann(host: BootedHost, line: str) -> str:
    done = host.run(["runuser", "-l", "ann", "-c", f"PATH=/opt/covey/bin:$PATH; {line}"], 300.0)
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}{host.journal()}"
    return done.stdout


def submitted(host: BootedHost, script: str) -> str:
    line = f"agentctl submit --nodes 2 --gpus 1 -- {TORCHRUN} {script}"
    return as_ann(host, line).split()[0]


def learnt(host: BootedHost, job: str) -> set[str]:
    def ended() -> bool:
        return as_ann(host, f"agentctl job {job} --json").count('"state": "done"') > 0

    wait(ended, lambda: as_ann(host, f"agentctl why {job}; agentctl logs {job}"), 240.0, 1.0)
    return set(re.findall(r"learnt (\w{16})", as_ann(host, f"agentctl logs {job}")))


def test_a_script_of_another_user_under_torchrun_is_preempted_and_resumed(hosts: list[BootedHost]) -> None:
    first, second = hosts
    job = submitted(first, "train.py")

    def reached(step: int) -> None:
        path = f"/home/ann/runs/step-{step}.pt"
        wait(lambda: all(host.shell(f"ls {path}").returncode == 0 for host in hosts), lambda: said(job), 180.0, 0.5)

    def said(job: str) -> str:
        return as_ann(first, f"agentctl why {job}; agentctl logs {job}") + second.journal()

    for step in (50, 200):
        reached(step)
        typed(first, "agentctl hosts drain gpu2 --stop-jobs --wait", 120.0)
        for host in hosts:
            assert host.shell("pgrep -u ann -f train.py").stdout == "", "a rank runs on"
        typed(first, "agentctl hosts resume gpu2")
    (disturbed,) = learnt(first, job)
    begun = [
        int(n) for n in re.findall(r"begins at step (\d+) in a home of mode 700", as_ann(first, f"agentctl logs {job}"))
    ]
    assert len(set(begun)) == 3 and min(begun) == 0 and max(begun) >= 200, begun
    for host in hosts:
        typed(host, "rm -r /home/ann/runs; sed -i s/0.05/0/ /home/ann/train.py")
    (undisturbed,) = learnt(first, submitted(first, "train.py"))
    assert disturbed == undisturbed
    assert os.geteuid() not in {int(uid) for uid in first.shell("stat -c %u /home/ann/runs").stdout.split()}

"""Ranks of a training whose model is divided among them, with replicas (HSDP), for `test_torch_replicas`: 2 x 2 ranks.

    RANK RANKS INCARNATION KIND STEPS EPOCH ADDRESS [FOLDER]       as of `torch_heal_script`

KIND: `epochs`, with a validation after each; `steps`, a loop over steps that saves; `unlike`: replicas have other
parameters; `part`: the mesh has some of the ranks; `within`: a collective in the optimizer's step.
"""

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

import covey.torch
from covey.core.ids import HostId, JobId
from covey.wire.job import AggregatorAt
from tests.covey.torch_heal_script import PlayedJob, RankOfTest, Samples, seeded, told

BATCH, SLOW_S = 4, 0.005


def divided(of: RankOfTest) -> Any:
    """A model, of which parts of another size go to each rank of a replica."""
    torch.manual_seed(of.rank // 2 if of.kind == "unlike" else 3)
    norm = torch.nn.BatchNorm1d(5) if of.kind == "epochs" else torch.nn.LayerNorm(5)
    layers = [torch.nn.Linear(8, 5), norm, torch.nn.Dropout(0.3), torch.nn.Linear(5, 1)]
    model = torch.nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (2, of.ranks // 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if of.kind == "steps" else MixedPrecisionPolicy()
    for each in layers[0], layers[3]:
        fully_shard(each, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def by_epochs(of: RankOfTest, job: Any) -> Any:
    """A training with Adam, dropout, clipping, a schedule, and a look at other data after each epoch."""
    model = divided(of)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
    samples, sampler = Samples(), covey.torch.StepSampler(len(Samples()), BATCH, seed=3)
    seeded(of)
    state = covey.torch.attach(model, optimizer, job, also=[scheduler], data=sampler, checkpoint=of.checkpoint)
    told("goes on", state.step)
    for _ in sampler.epochs(of.steps // sampler.steps_per_epoch):
        for inputs, numbers in DataLoader(samples, batch_sampler=sampler):
            told("takes", state.next_step, *numbers.tolist())
            optimizer.zero_grad()
            model(inputs.float()).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            time.sleep(SLOW_S)
        model.eval()
        with torch.no_grad():
            loss = sum(model(inputs.float()).square().mean() for inputs, _ in DataLoader(samples, 64, shuffle=True))
        dist.all_reduce(loss)
        model.train()
        scheduler.step()
    return model


def by_steps(of: RankOfTest, job: Any) -> Any:
    """A training in bfloat16 with momentum, which takes two passes for a step and saves."""
    model = divided(of)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    seeded(of)
    state = covey.torch.attach(model, optimizer, job, checkpoint=of.checkpoint)
    told("goes on", state.step)
    if of.kind == "within":
        optimizer.register_step_pre_hook(lambda *_: dist.barrier())
    for step in state.steps(of.steps):
        told("takes", step)
        optimizer.zero_grad()
        for is_last in False, True:
            model.set_requires_gradient_sync(is_last)
            model(torch.randn(BATCH, 8)).square().mean().backward()
        optimizer.step()
        if of.checkpoint and step == 4:
            state.save()
            told("saves", step)
        time.sleep(SLOW_S)
    return model


def main(words: list[str]) -> None:
    rank, ranks, incarnation, kind, steps, epoch, address, *more = words
    of = RankOfTest(int(rank), int(ranks), int(incarnation), kind, int(steps), *map(Path, more))
    torch.set_num_threads(1)
    job: Any = PlayedJob(of, AggregatorAt(JobId("j1"), int(epoch), HostId("h1"), address, b"sixteen bytes !!"))
    covey.torch.init_process_group(job)
    if kind == "part":
        some = init_device_mesh("cpu", (2,), mesh_dim_names=("some",))
        ones = torch.ones(3, dtype=torch.bfloat16)
        if int(rank) < 2:
            dist.all_reduce(ones, group=some.get_group())
        told("added", *ones.tolist())
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        mean, most = torch.tensor([float(rank)]), torch.tensor([int(rank)])
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh["shard"].get_group())
        dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh["replicate"].get_group())
        told("of mesh", mean.item(), most.item())
    model = by_epochs(of, job) if kind == "epochs" else by_steps(of, job)
    whole = hashlib.sha256()
    for name, each in sorted(model.state_dict().items()):
        part = each.to_local() if hasattr(each, "to_local") else each
        whole.update(name.encode() + part.contiguous().numpy().tobytes())
    told("sha256", whole.hexdigest(), torch.rand(1).item())


if __name__ == "__main__":
    main(sys.argv[1:])

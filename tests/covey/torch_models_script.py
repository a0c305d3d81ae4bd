"""Trainings of several models and optimizers, for `torch_heal_script`: a GAN, an actor with a critic, one model with
two optimizers whose parameters come later. Each says in which part of a step it is: a line `part STEP NUMBER`."""

import time
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import covey.torch
from tests.covey.torch_heal_script import BATCH, SIZE, RankOfTest, Samples, device_of, seeded, told

SLOW_S = 0.006


def made(of: RankOfTest, *layers: Any, **more: Any) -> Any:
    """A model in a DistributedDataParallel. Each rank begins with another one, and takes rank 0's."""
    return DistributedDataParallel(torch.nn.Sequential(*layers).to(device_of(of)), **more)


def part(step: int, number: int) -> None:
    time.sleep(SLOW_S)
    told("part", step, number)


def gan(of: RankOfTest, job: Any) -> Any:
    """Two models; the critic steps twice in each step, and the generator once, by a loss with what the critic had
    computed before. The loop is a stock one, which says where steps end."""
    torch.manual_seed(of.rank)
    relu, linear = torch.nn.ReLU(), torch.nn.Linear
    layers = [linear(4, 16), torch.nn.BatchNorm1d(16), relu, linear(16, 8)]
    ema = AveragedModel(torch.nn.Sequential(*layers), multi_avg_fn=get_ema_multi_avg_fn(0.9)).to(device_of(of))
    generator = made(of, *layers, bucket_cap_mb=0.0005)
    critic = made(of, linear(8, 16), torch.nn.Dropout(0.3), relu, linear(16, 1))
    optimizers = [torch.optim.Adam(critic.parameters(), 0.01), torch.optim.SGD(generator.parameters(), 0.05, 0.9)]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizers[0], [1])
    seeded(of)
    samples, sampler = Samples(), covey.torch.StepSampler(SIZE, BATCH, seed=3)
    loader = DataLoader(samples, batch_sampler=sampler)
    state = covey.torch.attach(
        [generator, critic], optimizers, job, also=[ema, scheduler], data=sampler, checkpoint=of.checkpoint
    )
    told("goes on", state.step)
    device = device_of(of)
    for _ in sampler.epochs(of.steps // sampler.steps_per_epoch):
        for inputs, numbers in loader:
            told("takes", state.step, *numbers.tolist())
            for at in range(2):
                optimizers[0].zero_grad()
                made_up = generator(torch.randn(BATCH, 4).to(device)).detach()
                loss = (critic(inputs.to(device)) - 1).square().mean() + critic(made_up).square().mean()
                loss.backward()
                part(state.step, at)
                optimizers[0].step()
                shown = loss.detach().clone()
                torch.distributed.all_reduce(shown)
                told("loss", state.step, at, shown.item().hex())
            optimizers[1].zero_grad()
            tricked = (critic(generator(torch.randn(BATCH, 4).to(device))) - 1).square().mean() * loss.detach()
            tricked.backward()
            mean = tricked.detach().clone()
            torch.distributed.all_reduce(mean)
            part(state.step, 2)
            optimizers[1].step()
            ema.update_parameters(generator.module)
            if of.kind.endswith("unended"):
                continue
            state.done()
        scheduler.step()
    return torch.nn.ModuleList([generator.module, critic.module, ema])


def actor(of: RankOfTest, job: Any) -> Any:
    """An actor whose gradients follow from a forward pass before the critic's step, and from a collective of it."""
    torch.manual_seed(of.rank)
    policy, critic = made(of, torch.nn.Linear(8, 4), torch.nn.Dropout(0.2)), made(of, torch.nn.Linear(8, 1))
    optimizers = [torch.optim.SGD(each.parameters(), 0.02, momentum=0.9) for each in (critic, policy)]
    target = torch.nn.Linear(8, 1)
    target.load_state_dict(critic.module[0].state_dict())
    seeded(of)
    samples, sampler = Samples(), covey.torch.StepSampler(SIZE, BATCH)
    state = covey.torch.attach((policy, critic), optimizers, job, also=[target], checkpoint=of.checkpoint)
    told("goes on", state.step)
    for step in state.steps(of.steps):
        chosen = sampler.batch_of(step)
        told("takes", step, *chosen)
        inputs = torch.stack([samples[at][0] for at in chosen])
        values, actions = critic(inputs), policy(inputs)
        gain = (1 - values).detach() + target(inputs).detach()
        for each in optimizers:
            each.zero_grad()
        (values - 1).square().mean().backward()
        spread = values.detach().std()
        torch.distributed.all_reduce(spread)
        part(step, 0)
        optimizers[0].step()
        (actions.square().mean(1) * gain * spread).mean().backward()
        part(step, 1)
        optimizers[1].step()
        torch.distributed.barrier()
        with torch.no_grad():
            for mine, its in zip(target.parameters(), critic.parameters(), strict=True):
                mine.lerp_(its, 0.1)
    return torch.nn.ModuleList([policy.module, critic.module, target])


def one(of: RankOfTest, job: Any) -> Any:
    """One model with two optimizers. A layer is frozen at first; parameters come to an optimizer later."""
    torch.manual_seed(of.rank)
    layers = [torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)]
    ddp = made(of, *layers, find_unused_parameters=True)
    optimizers: list[Any] = [
        torch.optim.SGD([layers[0].weight, layers[1].weight], 0.02, momentum=0.9),
        torch.optim.AdamW([layers[0].bias, layers[1].bias], 0.01),
    ]
    seeded(of)
    samples, sampler = Samples(), covey.torch.StepSampler(SIZE, BATCH)
    state = covey.torch.attach(ddp, optimizers, job, checkpoint=of.checkpoint)
    told("goes on", state.step)
    if not state.step:
        layers[1].requires_grad_(False)
    for step in state.steps(of.steps):
        if step == of.steps // 3:
            layers[2].zero_grad()
            optimizers[1].add_param_group({"params": layers[2].parameters(), "lr": 0.02})
        if step == of.steps // 2:
            layers[1].requires_grad_(True)
        chosen = sampler.batch_of(step)
        told("takes", step, *chosen)
        inputs = torch.stack([samples[at][0] for at in chosen])
        (ddp(inputs) - 1).square().mean().backward()
        for at, each in enumerate(optimizers):
            part(step, at)
            each.step()
            each.zero_grad()
        told("loss", ddp(inputs).square().mean().item())  # a forward pass that belongs to no part
    return ddp.module


TRAININGS = {"gan": gan, "actor": actor, "one": one, "unended": gan}

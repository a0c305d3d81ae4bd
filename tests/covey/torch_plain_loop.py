"""A training that is computed twice: by a plain loop over its ranks without Covey, and as an elastic job.

As a script it is a process of the elastic job: RANKS FILE. The process of rank 0 writes what was learnt.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch

BATCH, SIZE, STEPS = 4, 96, 20


def network() -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )


def samples() -> tuple[Any, Any]:
    drawn = torch.Generator().manual_seed(5)
    inputs = torch.randn(SIZE, 8, generator=drawn)
    return inputs, inputs.sum(1, keepdim=True).sin()


def batch_of(step: int, rank: int, ranks: int) -> Iterator[int]:
    """Numbers of a rank's samples in a step."""
    first = (step * ranks + rank) * BATCH
    return (at % SIZE for at in range(first, first + BATCH))


def loss_of(model: Any, step: int, rank: int, ranks: int) -> Any:
    inputs, wanted = samples()
    at = list(batch_of(step, rank, ranks))
    return (model(inputs[at]) - wanted[at]).square().mean()


def optimizer_of(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def learnt(ranks: int) -> dict[str, Any]:
    """What a plain loop learns: each rank's gradients, from the buffers with which the step began, are averaged, and
    rank 0's buffers stay."""
    model = network()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        before, kept = [each.clone() for each in model.buffers()], list[Any]()
        sums = [torch.zeros_like(each) for each in model.parameters()]
        for rank in range(ranks):
            for buffer, was in zip(model.buffers(), before, strict=True):
                buffer.copy_(was)
            gradients = torch.autograd.grad(loss_of(model, step, rank, ranks), list(model.parameters()))
            sums = [one + other for one, other in zip(sums, gradients, strict=True)]
            kept = kept or [each.clone() for each in model.buffers()]
        for buffer, of_first in zip(model.buffers(), kept, strict=True):
            buffer.copy_(of_first)
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = total / ranks
        optimizer.step()
    return {name: each.detach() for name, each in model.state_dict().items()}


def main(ranks: int, out: str) -> None:
    import covey
    import covey.torch

    torch.set_num_threads(1)
    model = network()
    training = covey.torch.attach(model, optimizer_of(model), elastic=True)
    for step in training.steps(STEPS):
        for rank in training.carried():
            with rank:
                loss_of(model, step, int(rank), ranks).backward()
        training.step()
    if covey.join().rank == 0:
        torch.save(model.state_dict(), out)
    print("sha256=ok", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

"""Ranks of a training for `test_torch_calls`: a script that calls collectives wherever people call them.

Arguments as of `torch_heal_script`. KIND is what it does, then @ and, separated by commas, where the processes of rank
1 end one after the other, each by a signal to itself: the first process at the first place, its successor at the next.
"""

import os
import re
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import covey.torch
from covey.core.errors import CoveyError
from covey.core.ids import HostId, JobId
from covey.wire.job import AggregatorAt
from tests.covey.torch_heal_script import PlayedJob, RankOfTest, Samples, checksum, model_of, sampler_of, seeded, told

LATE = 17 << 20
"""Bytes that are too many to be kept."""


class Places:
    """The places at which a process of rank 1 ends."""

    def __init__(self, of: RankOfTest) -> None:
        ends = of.kind.partition("@")[2].split(",")
        self._here = ends[of.incarnation] if of.rank == 1 and of.incarnation < len(ends) else ""

    def passes(self, *place: object) -> None:
        if self._here == "-".join(map(str, place)):
            os.kill(os.getpid(), signal.SIGKILL)


def agrees(of: RankOfTest) -> None:
    """What scripts do before anything else."""
    run: list[Any] = [{"run": secrets.token_hex(8)} if of.rank == 0 else None]
    dist.broadcast_object_list(run)
    every: list[Any] = [None] * of.ranks
    dist.all_gather_object(every, "x" * of.rank)
    dist.barrier()
    told("agreed", run[0]["run"], every == ["x" * rank for rank in range(of.ranks)])
    if of.kind.startswith("large"):
        dist.broadcast(torch.zeros(LATE, dtype=torch.uint8), 0)


def by_windows(of: RankOfTest, job: Any, at: Places) -> Any:
    """Epochs with a validation at the end of each, which feeds the schedule, and a barrier; other draws, too."""
    agrees(of)
    samples = Samples()
    ddp = DistributedDataParallel(model_of(of), bucket_cap_mb=0.002)
    optimizer: Any = torch.optim.Adam(ddp.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
    seeded(of)
    sampler = sampler_of(of, samples)
    loader = DataLoader(samples, batch_sampler=sampler, num_workers=of.kind.startswith("workers"))
    held_out = DataLoader(TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(of.rank))), 8)
    also = torch.zeros(3)
    state = covey.torch.attach(
        ddp, optimizer, job, also=[scheduler, Kept(also)], data=sampler, checkpoint=of.checkpoint
    )
    told("goes on", state.step)
    at.passes("attached")
    count = torch.tensor([of.rank + 1])
    dist.all_reduce(count, dist.ReduceOp.MAX)
    at.passes("first")
    for epoch in sampler.epochs(of.steps // sampler.steps_per_epoch):
        for inputs, numbers in loader:
            told("takes", state.next_step, *numbers.tolist())
            at.passes("step", state.next_step)
            optimizer.zero_grad()
            loss = ddp(inputs).square().mean() * (1 + torch.rand(()))
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            optimizer.step()
        at.passes("validates", epoch)
        also += float(count)
        ddp.eval()
        with torch.no_grad():
            found = torch.stack([ddp(each).square().mean() for (each,) in held_out]).sum()
        ddp.train()
        dist.all_reduce(found)
        at.passes("second", epoch)
        best: list[Any] = [None] * of.ranks
        dist.gather_object(float(found + torch.rand(())), best if of.rank == 0 else None)
        scheduler.step(found)
        at.passes("third", epoch)
        if of.kind.startswith("saves") and of.rank == 0 and of.folder:
            state.save(of.folder / f"epoch-{epoch}.safetensors")
        if of.kind.startswith("changes"):
            with torch.no_grad():
                ddp.module[0].weight += 1
        dist.barrier()
        at.passes("fourth", epoch)
        told("validated", epoch, f"{found.item():.9g}", optimizer.param_groups[0]["lr"], also.tolist())
    return ddp.module


class Kept:
    """A tensor with a state_dict."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self._tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tensor.copy_(state["tensor"])


def by_tails(of: RankOfTest, job: Any, at: Places) -> Any:
    """Steps after whose optimizer.step() collectives are called, with draws after them."""
    agrees(of)
    samples = Samples()
    ddp = DistributedDataParallel(model_of(of))
    optimizer: Any = torch.optim.SGD(ddp.parameters(), 0.02, momentum=0.9)
    seeded(of)
    sampler = sampler_of(of, samples)
    state = covey.torch.attach(ddp, optimizer, job, checkpoint=of.checkpoint)
    told("goes on", state.step)
    for step in state.steps(of.steps):
        chosen = sampler.batch_of(step)
        told("takes", step, *chosen)
        at.passes("step", step)
        optimizer.zero_grad()
        ddp(torch.stack([samples[number][0] for number in chosen])).square().mean().backward()
        optimizer.step()
        if of.kind.startswith("tails-save") and of.rank == 0 and of.folder and step == 4:
            state.save(of.folder / "stepped.safetensors")
        at.passes("tail", step)
        mean = torch.rand(1)
        dist.all_reduce(mean)
        torch.rand(1)
        if of.kind.startswith("restarts") and step == 2:
            made = dist.new_group([0])
            assert dist.get_rank(made) == (0 if of.rank == 0 else -1)
        if of.kind.startswith("tails-save") and of.rank == 0 and of.folder and step == 6:
            try:
                state.save(of.folder / "tail.safetensors")
            except CoveyError as error:
                told("refused", error.why)
        told("mean", step, mean.item())
    return ddp.module


def by_looks(of: RankOfTest, job: Any, at: Places) -> Any:
    """A look at other data, in another order each time, after some steps and after each epoch: without collectives."""
    samples = Samples()
    ddp = DistributedDataParallel(model_of(of), bucket_cap_mb=0.002)
    optimizer: Any = torch.optim.Adam(ddp.parameters(), 0.01)
    seeded(of)
    sampler = sampler_of(of, samples)
    loader = DataLoader(samples, batch_sampler=sampler, num_workers="workers" in of.kind)
    others = DataLoader(TensorDataset(torch.arange(24)), 8, shuffle=True)
    state = covey.torch.attach(ddp, optimizer, job, data=sampler, checkpoint=of.checkpoint)
    told("goes on", state.step)

    def looks(step: int) -> None:
        seen = torch.cat([each for (each,) in others])
        told("looks", step, *seen.tolist()[:5])
        at.passes("looks", step)

    for epoch in sampler.epochs(of.steps // sampler.steps_per_epoch):
        for inputs, numbers in loader:
            step = state.next_step
            told("takes", step, *numbers.tolist())
            optimizer.zero_grad()
            loss = ddp(inputs).square().mean() * (1 + torch.rand(()))
            at.passes("step", step)
            loss.backward()
            optimizer.step()
            if step % 5 == 4:
                looks(step)
                if "saves" in of.kind and step == 9 and of.folder:
                    state.save(of.folder / "early.safetensors")
                    told("saves", step)
        looks(1000 + epoch)
    return ddp.module


def by_kinds(of: RankOfTest, job: Any, at: Places) -> None:
    """All collectives, compared with gloo's own group of the same ranks."""
    ours: Any = dist.group.WORLD
    ranks, rank = of.ranks, of.rank
    everyone = dist.new_group(range(ranks))
    assert type(everyone) is type(ours), "a group of all ranks heals too"
    job.heals = lambda: None
    pair = dist.new_group([1, 0]) if ranks > 2 else None
    gloo = dist.ProcessGroup(dist.HashStore(), rank, ranks)
    gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = ours.calls.connections.everyone("a test")
    gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    gloo._set_group_name("gloo")
    dist.distributed_c10d._register_pg_in_world(
        gloo,
        backend_name="gloo",
        store=dist.HashStore(),
        group_name="gloo",
        backend_config="cpu:gloo",
        rank_mapping={each: each for each in range(ranks)},
    )
    for name, call in CALLS.items():
        for kind in (torch.float32, torch.int64, torch.bfloat16, torch.bool):
            if name.startswith(("sum", "mean", "product", "bits")) and kind not in CALLS_OF.get(name, (kind,)):
                continue
            drawn = torch.randint(0, 2 if kind == torch.bool else 9, (ranks * 2, 3), generator=_draws(rank)).to(kind)
            for group in (ours, everyone):
                try:
                    wanted, found = call(drawn.clone(), gloo, rank, ranks), call(drawn.clone(), group, rank, ranks)
                except CoveyError as error:
                    told("refused", name, kind, error.why)
                    continue
                assert torch.equal(wanted, found), (name, kind, wanted, found)
        told("same", name)
    if pair is not None and rank < 2:
        value = torch.tensor([rank + 1])
        dist.all_reduce(value, group=pair)
        told("pair", value.item(), dist.get_rank(pair))
    _sent(rank, ranks)
    job.tensors.leave()


def _draws(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


def _sent(rank: int, ranks: int) -> None:
    """A ring, then messages to rank 0 from whomever."""
    came = torch.zeros(2)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % ranks),
            dist.P2POp(dist.irecv, came, (rank - 1) % ranks),
        ]
    )
    for work in works:
        work.wait()
    if rank == 0:
        of = {dist.recv(torch.zeros(1)) for _ in range(ranks - 1)}
        told("received", came.tolist() == [ranks - 1.0] * 2 and of == set(range(1, ranks)))
    else:
        dist.send(torch.ones(1), 0)
        told("received", came.tolist() == [rank - 1.0] * 2)


def _into(name: str, *more: Any) -> Callable[..., Any]:
    def call(given: Any, group: Any, rank: int, ranks: int) -> Any:
        getattr(dist, name)(given, *more, group=group)
        return given

    return call


def _all_gather(given: Any, group: Any, rank: int, ranks: int) -> Any:
    each = [torch.zeros_like(given) for _ in range(ranks)]
    dist.all_gather(each, given.t() if given.shape[0] == 3 else given, group=group)
    return torch.stack(each)


def _all_gather_into(given: Any, group: Any, rank: int, ranks: int) -> Any:
    whole = given.new_zeros((ranks * given.shape[0], 3))
    dist.all_gather_into_tensor(whole, given, group=group)
    return whole


def _gather(given: Any, group: Any, rank: int, ranks: int) -> Any:
    each = [torch.zeros_like(given) for _ in range(ranks)] if rank == 1 else None
    dist.gather(given, each, 1, group=group)
    return given if each is None else torch.stack(each)


def _scatter(given: Any, group: Any, rank: int, ranks: int) -> Any:
    out = given.new_zeros((2, 3))
    dist.scatter(out, list(given.chunk(ranks)) if rank == 1 else None, 1, group=group)
    return out


def _reduce_scatter(given: Any, group: Any, rank: int, ranks: int) -> Any:
    out = given.new_zeros((2, 3))
    dist.reduce_scatter(out, list(given.chunk(ranks)), group=group)
    return out


def _reduce_scatter_tensor(given: Any, group: Any, rank: int, ranks: int) -> Any:
    out = given.new_zeros((2, 3))
    dist.reduce_scatter_tensor(out, given, group=group)
    return out


def _all_to_all(given: Any, group: Any, rank: int, ranks: int) -> Any:
    out = torch.zeros_like(given)
    dist.all_to_all_single(out, given, group=group)
    sizes = [2 * ranks - ranks + 1] + [1] * (ranks - 1)
    mine = [sizes[rank]] * ranks
    uneven = given.new_zeros((sum(mine), 3))
    dist.all_to_all_single(uneven, given, mine, sizes, group=group)
    return torch.cat([out, uneven])


def _reduce(given: Any, group: Any, rank: int, ranks: int) -> Any:
    dist.reduce(given, 1, group=group)
    return given if rank == 1 else given.new_zeros(1)


FLOATS, WHOLE = (torch.float32, torch.bfloat16), (torch.int64, torch.bool)
CALLS_OF = {"product": (torch.int64,), "bits": (torch.int64,), "sum": (torch.int64, torch.bfloat16, torch.float32)}
CALLS: dict[str, Callable[..., Any]] = {
    "sum": _into("all_reduce"),
    "product": _into("all_reduce", dist.ReduceOp.PRODUCT),
    "bits": _into("all_reduce", dist.ReduceOp.BXOR),
    "least": _into("all_reduce", dist.ReduceOp.MIN),
    "most": _into("all_reduce", dist.ReduceOp.MAX),
    "sum to one": _reduce,
    "broadcast": _into("broadcast", 1),
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into,
    "gather": _gather,
    "scatter": _scatter,
    "sum and scatter": _reduce_scatter,
    "sum and scatter a tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
}


def train(of: RankOfTest, at: AggregatorAt) -> None:
    job: Any = PlayedJob(of, at)
    torch.set_num_threads(1)
    covey.torch.init_process_group(job)
    if of.kind == "kinds":
        by_kinds(of, job, Places(of))
        return
    loops = {"tails": by_tails, "restarts": by_tails, "looks": by_looks}
    model = loops.get(re.split("[-@]", of.kind)[0], by_windows)(of, job, Places(of))
    dist.barrier()
    told("sum", sum(range(of.ranks)) + of.ranks * (5 << 40))
    told("sha256", checksum(model))
    dist.destroy_process_group()


def main(words: list[str]) -> None:
    rank, ranks, incarnation, kind, steps, epoch, address, *folder = words
    at = AggregatorAt(JobId("j1"), int(epoch), HostId("h1"), address, b"sixteen bytes !!")
    train(RankOfTest(int(rank), int(ranks), int(incarnation), kind, int(steps), *map(Path, folder)), at)


if __name__ == "__main__":
    main(sys.argv[1:])

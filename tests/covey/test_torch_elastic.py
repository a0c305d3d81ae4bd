"""A PyTorch training whose ranks are carried by processes that come and go: the same bits, in real processes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.core.errors import CoveyError
from tests.covey.elastic_rig import ElasticProcesses
from tests.covey.forks import Forks
from tests.covey.hooks.torch_jobs import NEEDS_TORCH
from tests.families import in_gate

pytestmark = NEEDS_TORCH
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "elastic_ddp.py"
WORDS = ("--epochs", "2", "--width", "32", "--batch", "32", "--step-seconds", "0.002")
RANKS = 4
PLAIN = Path(__file__).with_name("torch_plain_loop.py")
SCRIPT, STEPS = Path(__file__).with_name("torch_elastic_script.py"), 40
Jobs = Callable[..., ElasticProcesses]
_fixed: dict[tuple[Path, tuple[str, ...]], str] = {}


@pytest.fixture
def jobs(forks: Forks, tmp_path: Path) -> Iterator[Jobs]:
    made: list[ElasticProcesses] = []

    def make(processes: int, script: Path = EXAMPLE, words: tuple[str, ...] = WORDS) -> ElasticProcesses:
        made.append(ElasticProcesses(forks, tmp_path / str(len(made)), RANKS, processes, script, *words))
        return made[-1]

    yield make
    for each in made:
        each.close()


def fixed(jobs: Jobs, script: Path = EXAMPLE, words: tuple[str, ...] = WORDS) -> str:
    """The digest of a job with one process for each rank."""
    if (script, words) not in _fixed:
        _fixed[script, words] = jobs(RANKS, script, words).digest()
    return _fixed[script, words]


@pytest.mark.parametrize("processes", [1, 2])
def test_few_processes_learn_what_many_learn(jobs: Jobs, processes: int) -> None:
    assert jobs(processes).digest() == fixed(jobs)


def test_an_elastic_training_learns_what_a_plain_loop_over_the_ranks_learns(jobs: Jobs, tmp_path: Path) -> None:
    """The loop is PyTorch alone: it adds each rank's gradients one after the other, where Covey adds by a tree and
    divides afterwards. So sums differ by roundings of 2**-24 of their parts, and 20 steps of SGD carry them on: 2e-7
    was seen. 2e-6 allows for other kernels; one gradient of one rank that is left out of the last step makes 4e-3."""
    import torch

    from tests.covey.torch_plain_loop import learnt

    out, plain = tmp_path / "learnt", learnt(RANKS)
    job = jobs(2, PLAIN, (str(RANKS), str(out)))
    assert job.digest() == "ok"
    found = torch.load(out)
    assert found.keys() == plain.keys()
    for name, each in plain.items():
        assert torch.allclose(found[name].double(), each.double(), rtol=0, atol=2e-6), name


def test_a_process_that_is_killed_leaves_the_same_bits(jobs: Jobs) -> None:
    job = jobs(2)
    job.until(lambda: job.have_said("epoch 0"))
    job.arrange([1], 0)
    assert job.digest() == fixed(jobs)


def taken(job: ElasticProcesses) -> dict[tuple[int, int], set[tuple[int, ...]]]:
    """For each step and rank, the samples that were taken for it, by whichever processes."""
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for each in [*job.now.values(), *job.ended]:
        for line in each.text().rpartition("\n")[0].splitlines():
            if line.startswith("takes "):
                step, rank, *samples = map(int, line.split()[1:])
                found.setdefault((step, rank), set()).add(tuple(samples))
    return found


def changed(jobs: Jobs, words: tuple[str, ...], go_on: Path) -> ElasticProcesses:
    """A job in which two new processes begin and process 0 is killed; steps are long meanwhile."""
    job = jobs(2, SCRIPT, (*words, str(go_on)))
    job.until(lambda: "ends 1" in job.now[0].text())
    for ends in ([], [0]):
        (new,) = job.arrange(ends, 1)
        job.until(lambda new=new: "goes on " in job.now[new].text())  # type: ignore[misc]
    go_on.touch()
    return job


@pytest.mark.parametrize("kind", in_gate(1, ["cpu-unlike", "cpu-place"]))
def test_all_that_is_a_ranks_own_moves_with_it(jobs: Jobs, kind: str, tmp_path: Path) -> None:
    """The training has a GradScaler that skips steps, clipped gradients, a schedule, BatchNorm, dropout, draws of three
    generators, parameters without a gradient in some ranks or all, a place in the data; parameters differ at first."""
    words = kind, str(STEPS)
    job = changed(jobs, words, tmp_path / "go on")
    assert job.digest() == fixed(jobs, SCRIPT, words)
    found = taken(job)
    assert set(found) == {(step, rank) for step in range(STEPS) for rank in range(RANKS)}
    assert all(len(each) == 1 for each in found.values()), "each rank has one set of samples, whoever computed"


@pytest.mark.long
def test_workers_of_a_loader_leave_the_bits_and_samples_while_processes_change(jobs: Jobs, tmp_path: Path) -> None:
    """A DataLoader that keeps its workers draws from the rank's generator in its first loop, and in no later one."""
    job, plain = changed(jobs, ("cpu-still-workers", str(STEPS)), tmp_path / "go on"), ("cpu-still", str(STEPS))
    assert job.digest() == fixed(jobs, SCRIPT, plain)
    found = taken(job)
    assert set(found) == {(step, rank) for step in range(STEPS) for rank in range(RANKS)}
    assert all(len(each) == 1 for each in found.values())


class _NoJob:
    rank, world_size, is_elsewhere = 0, 4, False

    def tell(self, text: str) -> None: ...


def refused(model: Any, optimizer: Any = None, **more: Any) -> str:
    import torch

    import covey.torch

    if optimizer is None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    with pytest.raises((CoveyError, TypeError)) as found:
        covey.torch.attach(model, optimizer, _NoJob(), elastic=True, **more)  # type: ignore[call-overload]
    return str(found.value)


def test_what_could_not_keep_the_bits_is_refused_in_words() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    one, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    assert "it has several optimizers" in refused(model, [one, other])
    assert "it has several optimizers" in refused(model, one, also=[other])
    assert "its optimizer is a str" in refused(model, "adam")
    assert "'1' is a SyncBatchNorm" in refused(torch.nn.Sequential(model, torch.nn.SyncBatchNorm(2)))
    assert "has neither as_rank(rank) nor a state_dict" in refused(model, one, data=3)
    assert "gradients of '0.weight' are sparse" in refused(torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True)))
    wrapped: Any = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    assert "leave DistributedDataParallel out" in refused(wrapped)


def test_a_model_that_plays_a_graph_is_refused() -> None:
    """`torch.cuda.make_graphed_callables` puts such a function in place of a module's forward pass."""
    import torch

    def make_graphed_callables(module: Any) -> Any:
        def new_fwd(*inputs: Any) -> Any:
            return module(*inputs)

        return new_fwd

    part = torch.nn.Linear(2, 2)
    part.forward = make_graphed_callables(part)
    assert "'1' plays a CUDA graph" in refused(torch.nn.Sequential(torch.nn.Linear(2, 2), part))


def test_a_rank_is_not_entered_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import covey.torch

    model = torch.nn.Linear(2, 1)
    job: Any = _AloneJob()
    training = covey.torch.attach(model, torch.optim.SGD(model.parameters(), 0.1), job, elastic=True)
    next(training.steps(2))
    training._contents.devices = [torch.device("cuda", 0)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CoveyError, match="a graph is being recorded on cuda:0"):
        next(iter(training.carried())).__enter__()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    training._is_whole = False
    next(iter(training.carried())).__enter__()


class _Counts:
    """A training that is in its first step."""

    next_step = 0


def test_a_loop_over_a_steps_batches_draws_one_number_whatever_workers_it_has() -> None:
    import torch
    from torch.utils.data import DataLoader

    import covey.torch

    sampler = covey.torch.StepSampler(8, 2, rank=0, world_size=2)
    sampler.carries(_Counts())  # type: ignore[arg-type]
    loader = DataLoader(range(8), batch_sampler=sampler)

    def draw() -> None:
        torch.empty((), dtype=torch.int64).random_()

    def starts_workers() -> None:
        iter(sampler)
        draw()
        next(iter(sampler))

    def state_after(loop: Callable[[], object]) -> bytes:
        torch.manual_seed(1)
        loop()
        return bytes(torch.get_rng_state().numpy().tobytes())

    loops = draw, starts_workers, lambda: next(iter(sampler)), lambda: list(loader), lambda: list(loader)
    assert len({state_after(loop) for loop in loops}) == 1


@pytest.mark.long
def test_a_model_whose_kernels_depend_on_what_a_process_has_seen_is_refused() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert "the model is compiled by torch.compile" in refused(torch.compile(model, backend="eager"))
    assert "chooses kernels by the shapes" in refused(torch.compile(model, backend="eager", dynamic=True))
    assert "neither as_rank(rank)" in refused(torch.compile(model, backend="eager", dynamic=False), data=3)


class _Carried(int):
    """A rank that is carried in a job of one process."""

    def __enter__(self) -> None: ...
    def __exit__(self, *of: object) -> None: ...

    def push(self, name: str, array: Any, out: Any = None, **how: Any) -> Any:
        if out is not None:
            out[:] = array
        return _Handle(array)


class _Handle:
    def __init__(self, array: Any) -> None:
        self.wait = lambda: array


class _AloneJob(_NoJob):
    """A job with one rank, whose sums are what it pushes."""

    world_size, step = 1, 0

    def state(self, *of: Any, **more: Any) -> Any:
        return self

    def done(self) -> None:
        self.step += 1

    def carried(self, step: int) -> Iterator[_Carried]:
        yield _Carried(0)

    def leave(self) -> None: ...


def test_a_loop_that_leaves_something_out_is_told_so() -> None:
    import torch

    import covey.torch

    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job: Any = _AloneJob()
    training = covey.torch.attach(model, optimizer, job, elastic=True)
    steps = training.steps(2)
    assert next(steps) == 0
    with pytest.raises(ValueError, match=r"averaged before all ranks of this process had passed; next:"):
        training.step()
    with pytest.raises(ValueError, match=r"rank 0 did not compute; next: pass for each rank"):
        for _ in training.carried():
            pass
    model.bias.requires_grad_(True)
    with pytest.raises(CoveyError, match=r"'bias' has a gradient, and had requires_grad=False"):
        for rank in training.carried():
            with rank:
                model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match=r"step 0 was ended without averages; next:"):
        next(steps)


def test_the_optimizer_steps_with_what_ranks_gave_and_numbers_are_averaged() -> None:
    import torch

    import covey.torch

    model = torch.nn.Linear(2, 1, bias=False)
    job: Any = _AloneJob()
    training = covey.torch.attach(model, torch.optim.SGD(model.parameters(), 0.5), job, elastic=True)
    expected, seen = model.weight.detach().clone(), []
    for step in training.steps(3):
        for rank in training.carried():
            with rank:
                for scale in (1.0, 2.0):
                    (model(torch.ones(1, 2)).sum() * scale).backward()
                mean = rank.mean("step", step)
                with pytest.raises(ValueError, match=r"next: ask after training\.step"):
                    _ = mean.value
        training.step()
        seen.append(mean.value)
        expected -= 0.5 * 3.0
    assert seen == [0.0, 1.0, 2.0] and training.next_step == 3
    assert torch.equal(model.weight, expected)

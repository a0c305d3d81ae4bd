"""The state that a PyTorch training gives to a rank that takes over, part by part, in one process."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from covey.core.errors import CoveyError
from tests.covey.hooks.torch_jobs import NEEDS_TORCH

pytestmark = NEEDS_TORCH


def trained(seed: int, optimizer: str = "Adam", width: int = 3) -> tuple[Any, Any, Any]:
    """A small model after two steps, its optimizer and its scheduler."""
    import torch

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.BatchNorm1d(4)).to(torch.float32)
    made = getattr(torch.optim, optimizer)(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(made, [1, 5])
    for _ in range(2 if seed else 0):
        made.zero_grad()
        model(torch.randn(5, width)).square().mean().backward()
        made.step()
        scheduler.step()
    return model, made, scheduler


def test_a_fresh_optimizer_goes_on_with_the_moments_of_another_one() -> None:
    from covey.frameworks.torch.state import TrainingState

    (model, optimizer, scheduler), fresh = trained(1), trained(0)
    theirs = TrainingState(model, optimizer, [scheduler])
    theirs.first = 1
    ours = TrainingState(fresh[0], fresh[1], [fresh[2]])
    assert "optimizer/state/0/exp_avg" not in ours.arrays()
    ours.load({name: array.copy() for name, array in theirs.arrays().items()})
    found, wanted = ours.arrays(), theirs.arrays()
    assert list(found) == list(wanted)
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)
    assert isinstance(fresh[2].milestones, Counter) and fresh[1].param_groups[0]["lr"] == pytest.approx(0.01)


def test_arrays_lie_in_the_memory_of_the_model_but_buffers_are_copied() -> None:
    from covey.frameworks.torch.state import TrainingState

    model, optimizer, _ = trained(1)
    state = TrainingState(model, optimizer, [])
    assert set(state.arrays()) == {"covey/rest", "covey/made"}, "before the first step each rank has its own"
    state.first = 1
    arrays = state.arrays()
    model[0].weight.data.fill_(7.0)
    model[1].running_mean.fill_(7.0)
    assert (arrays["parameter/0.weight"] == 7.0).all() and not (arrays["buffer/1.running_mean"] == 7.0).any()


def test_what_a_script_sets_in_a_step_is_not_in_the_state_at_its_beginning() -> None:
    """Some scripts set the rate between the beginning of a step and its forward pass, or change buffers in it; arrays
    are read when a rank is lost, in the middle of a step."""
    from covey.frameworks.torch.state import TrainingState

    model, optimizer, scheduler = trained(1)
    state = TrainingState(model, optimizer, [scheduler])
    state.first = 1
    wanted = {name: array.tobytes() for name, array in state.arrays().items()}
    arrays = state.arrays()
    optimizer.param_groups[0]["lr"] *= 0.5
    scheduler.last_epoch += 1
    model[1].running_mean = model[1].running_mean + 1
    assert {name: array.tobytes() for name, array in arrays.items()} == wanted
    assert {name: array.tobytes() for name, array in state.arrays().items()} != wanted


def test_moments_that_cannot_be_given_are_named_as_soon_as_there_are_some() -> None:
    from covey.frameworks.torch.state import TrainingState

    model, optimizer, _ = trained(1)
    state = TrainingState(model, optimizer, [])
    state.first = 1
    optimizer.state[model[0].weight]["how"] = object()
    with pytest.raises(CoveyError, match="optimizer/state/0/how is a object"):
        state.arrays()


def test_moments_of_another_type_than_the_parameters_stay_as_they_are() -> None:
    import torch

    from covey.frameworks.torch.state import TrainingState

    def short() -> tuple[Any, Any]:
        model = torch.nn.Linear(2, 2).to(torch.bfloat16)
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    (model, optimizer), fresh = short(), short()
    kept = torch.full((2, 2), 1.0 + 2.0**-20)
    optimizer.state[model.weight]["momentum_buffer"] = kept
    theirs, ours = TrainingState(model, optimizer, []), TrainingState(*fresh, [])
    theirs.first = 1
    ours.load({name: array.copy() for name, array in theirs.arrays().items()})
    assert torch.equal(fresh[1].state[fresh[0].weight]["momentum_buffer"], kept)
    assert torch.equal(fresh[0].weight, model.weight) and fresh[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"optimizer": "SGD"}, "optimizer here is Adam, and there SGD"),
        ({"width": 2}, "model here has 0.weight (4, 3) float32, and there 0.weight (4, 2) float32"),
    ],
)
def test_a_rank_of_another_training_says_what_differs(other: dict[str, Any], why: str) -> None:
    from covey.frameworks.torch.state import TrainingState

    theirs = TrainingState(*trained(1, **other)[:2], []).arrays()
    ours = TrainingState(*trained(0)[:2], [])
    with pytest.raises(CoveyError, match="cannot go on") as raised:
        ours.load(theirs)
    assert raised.value.why == why


def test_a_rank_with_another_pytorch_says_so() -> None:
    from covey.frameworks.torch.state import MADE, TrainingState

    ours = TrainingState(*trained(0)[:2], [])
    made = json.loads(ours.arrays()[MADE].tobytes()) | {"PyTorch": "1.0"}
    with pytest.raises(CoveyError) as raised:
        ours.load({**ours.arrays(), MADE: np.frombuffer(json.dumps(made).encode(), np.uint8)})
    assert raised.value.why.endswith("and there 1.0")


def test_what_cannot_be_given_to_another_process_is_named() -> None:
    from covey.frameworks.torch.state import TrainingState

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"how": {"kind": object()}}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(CoveyError) as raised:
        TrainingState(*trained(0)[:2], [Odd()])
    assert raised.value.why == "also/0/how/kind is a object"
    with pytest.raises(CoveyError) as raised:
        TrainingState(*trained(0)[:2], [trained(0)[0], object()])
    assert raised.value.why == "also[1] is a object, which has no state_dict and no load_state_dict"


def test_random_generators_go_on_where_they_were_kept() -> None:
    import torch

    from covey.frameworks.torch.random_state import generators, set_generators

    def drawn() -> list[float]:
        return [torch.rand(()).item(), random.gauss(0, 1), np.random.standard_normal()]

    drawn()
    before = generators()
    text = before.as_json()
    kept = json.loads(text)
    wanted = drawn()
    assert generators() != before
    set_generators(kept)
    assert generators() == before and drawn() == wanted
    assert text.isascii() and len(text) < 16_000, "it goes to two neighbours in each step"


def test_a_normal_number_that_is_left_over_is_a_part_of_a_generators_state() -> None:
    """Generators make two normal numbers at a time, and return the second one without a draw."""
    from covey.frameworks.torch.random_state import generators

    np.random.seed(1)
    random.seed(1)
    each: list[tuple[Callable[[], float], str]] = [
        (lambda: np.random.standard_normal(), "numpy"),
        (lambda: random.gauss(0, 1), "python"),
    ]
    for draw, of in each:
        draw()
        before = getattr(generators(), of)
        assert before == getattr(generators(), of)
        draw()
        after = getattr(generators(), of)
        assert after != before and after[1] == before[1], "no word was drawn"


def test_anything_travels_as_halves() -> None:
    import torch

    from covey.frameworks.torch.types import fill, halves_count, halves_of

    given = [
        torch.tensor([float("nan"), -0.0, 1e-40, float("inf")]),
        torch.tensor(-(1 << 62)),
        torch.tensor([True, False, True]),
        torch.zeros(0),
        torch.randn(3, 2).to(torch.bfloat16).t(),
    ]
    halves = halves_of(given)
    assert halves.size == halves_count(given)
    into = [torch.zeros_like(each) for each in given]
    fill(into, halves + np.zeros_like(halves))
    assert [each.tolist() for each in into[1:]] == [each.tolist() for each in given[1:]]
    assert halves_of(into).tobytes() == halves.tobytes()


class PlayedSteps:
    """The part of a training that a sampler uses."""

    def __init__(self, step: int, between: int | None = None) -> None:
        self.next_step, self.between, self.said = step, between, [""]

    def asks_for_batches(self, begins_epoch: bool) -> None:
        self.said.append(f"asks {begins_epoch}")

    def takes_batch(self) -> None:
        pass

    def batches_over(self, epoch: int) -> None:
        self.said.append(f"all of epoch {epoch}")

    def ends_step(self) -> None:
        self.said.append("step ended")
        self.between = None

    def ends(self) -> None:
        self.said.append("ended")


def epochs_of(sampler: Any, steps: PlayedSteps, stop: int) -> Iterator[list[int]]:
    for _ in sampler.epochs(stop):
        for at, batch in enumerate(sampler, 1):
            yield batch
            steps.next_step += at % 2 == 0  # two batches make a step


@pytest.mark.parametrize("began", [0, 1, 5, 6, 17, 18])
def test_a_sampler_goes_on_at_any_step_with_the_batches_that_it_would_have_given(began: int) -> None:
    from covey.torch import StepSampler

    def given(step: int, rank: int) -> tuple[list[list[int]], PlayedSteps]:
        sampler = StepSampler(100, 4, per_step=2, rank=rank, world_size=2)
        assert sampler.steps_per_epoch == 6 and len(sampler) == 12
        steps = PlayedSteps(step)
        sampler.follow(steps)
        return list(epochs_of(sampler, steps, 3)), steps

    whole = [given(0, rank)[0] for rank in range(2)]
    found, steps = given(began, 1)
    assert found == whole[1][2 * began :] and steps.said[-1] == "ended"
    for epoch in range(3):
        samples = [at for each in whole for batch in each[epoch * 12 : epoch * 12 + 12] for at in batch]
        assert len(set(samples)) == len(samples) == 96
    assert began % 6 == 0 or steps.said[1] == "asks False"
    assert [each for each in steps.said if each.startswith("all of")] == [
        f"all of epoch {at}" for at in range(began // 6, 3)
    ]


def test_a_sampler_goes_on_after_an_epochs_steps_with_that_epoch_and_no_batches() -> None:
    from covey.torch import StepSampler

    sampler = StepSampler(100, 4, rank=1, world_size=2)
    steps = PlayedSteps(24, 1)
    sampler.follow(steps)
    epochs, found = sampler.epochs(3), []
    for _ in range(2):
        found.append((next(epochs), len(list(sampler))))
    assert found == [(1, 0), (2, 12)]
    assert steps.said[1] == "step ended", "once that epoch's end was done again"


def test_a_sampler_has_the_order_of_pytorchs_own() -> None:
    from torch.utils.data import DistributedSampler

    from covey.torch import StepSampler

    stock: Any = DistributedSampler(list(range(50)), num_replicas=2, rank=1, seed=9)
    sampler = StepSampler.like(stock, 5)
    found = [[at for batch in sampler for at in batch] for _ in range(2)]
    for epoch in range(2):
        stock.set_epoch(epoch)
        assert found[epoch] == list(stock)
    assert [sampler.batch_of(5), sampler.batch_of(6)] == [list(stock)[:5], list(stock)[5:10]]


def test_too_few_samples_for_a_step_are_refused() -> None:
    from covey.torch import StepSampler

    with pytest.raises(ValueError, match="7 samples are too few for one step of 2 ranks, 1 batches, 4 samples"):
        StepSampler(7, 4, rank=0, world_size=2)


def attached_alone(ranks: int, group: Any) -> None:
    import covey.torch

    model, optimizer, _ = trained(0)
    ddp = SimpleNamespace(module=model, process_group=group)
    job: Any = SimpleNamespace(rank=0, world_size=ranks, tensors=SimpleNamespace(in_background=lambda: None))
    covey.torch.attach(ddp, optimizer, job)


def test_a_job_of_one_rank_has_nobody_to_give_it_back() -> None:
    with pytest.raises(CoveyError, match=r"one rank.*\n.*--workers 2"):
        attached_alone(1, SimpleNamespace(size=lambda: 1))


def test_a_group_that_spans_what_dies_is_refused() -> None:
    with pytest.raises(CoveyError, match=r"its process group \(gloo\) spans"):
        attached_alone(2, SimpleNamespace(size=lambda: 2, name=lambda: "gloo"))


def test_a_collective_of_a_group_that_belongs_to_no_job_is_refused() -> None:
    import torch

    from covey.frameworks.torch.group import TensorsGroup

    group: Any = TensorsGroup(0, 2)
    with pytest.raises(CoveyError, match=r"this collective was refused\n.*no job\n.*init_process_group"):
        group.allreduce([torch.zeros(1)])


def test_a_list_of_models_without_the_jobs_group_is_refused() -> None:
    import covey.torch

    model, optimizer, _ = trained(0)
    gloo = SimpleNamespace(size=lambda: 2, name=lambda: "gloo")
    job: Any = SimpleNamespace(rank=0, world_size=2, tensors=SimpleNamespace(in_background=lambda: None))
    with pytest.raises(CoveyError, match=r"its process group \(gloo\) spans"):
        covey.torch.attach([SimpleNamespace(module=model, process_group=gloo)] * 2, [optimizer, optimizer], job)


def test_parameters_that_come_and_thaw_later_come_to_successors_too() -> None:
    """Its script adds them a second time, at the beginning of the epoch into which it comes."""
    import torch

    from covey.frameworks.torch.state import TrainingState

    def short(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        model[1].requires_grad_(False)
        return model, torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)

    (model, optimizer), said = short(1), list[str]()
    theirs, fresh = TrainingState(model, optimizer, []), short(0)
    ours = TrainingState(*fresh, [], said.append)
    for each in theirs, ours:
        each.first = 1
        each.groups.follow()
    before = theirs.arrays()
    model[1].requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(CoveyError, match="comes to an optimizer has gradients of earlier steps"):
        optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
    model[1].zero_grad()
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
    optimizer.step()
    ours.load({name: array.copy() for name, array in theirs.arrays().items()})
    assert fresh[1].param_groups[1]["lr"] == 0.5 and fresh[0][1].weight.requires_grad
    fresh[1].add_param_group({"params": list(fresh[0][1].parameters())})
    assert len(fresh[1].param_groups) == 2 and "has the group of 2 parameters already" in said[0]
    assert list(ours.arrays()) == list(theirs.arrays())
    TrainingState(*short(0), []).load({name: array.copy() for name, array in before.items()})  # as it was without
    other = short(0)
    other[1].add_param_group({"params": [other[0][1].bias]})
    with pytest.raises(CoveyError, match="parameter groups of SGD"):
        TrainingState(*other, []).load(theirs.arrays())
    other[1].add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    with pytest.raises(CoveyError, match="of shape \\(3,\\) that is in none of the models"):
        TrainingState(*other, [])


def test_what_is_held_and_what_is_missing_is_said_in_one_line() -> None:
    from covey.frameworks.torch.state import TrainingState
    from covey.frameworks.torch.steps.held_words import held_words

    model, optimizer, scheduler = trained(0)
    model[0].bias.requires_grad_(False)
    said = held_words(TrainingState(model, optimizer, []), [optimizer], [], False)
    assert said == (
        "holds for successors: 4 parameters (1 of them frozen), 3 buffers, moments of Adam, random generators; "
        "not held: the scheduler of Adam (not in also=), other objects of the script that are not in also="
    )
    assert "MultiStepLR" in held_words(TrainingState(model, optimizer, [scheduler]), [optimizer], [scheduler], False)
    assert "scheduler of" not in held_words(TrainingState(model, optimizer, []), [optimizer], [scheduler], False)


class AddedAlone:
    """The tensors of a job of one rank."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.pushed: list[str] = []

    def tell(self, text: str) -> None:
        self.said.append(text)

    def push(self, name: str, array: Any, *, out: Any = None, **_: Any) -> Any:
        self.pushed.append(name)
        return SimpleNamespace(wait=lambda: array)


def parts_of(model: Any, optimizer: Any, copies: bool = True) -> tuple[Any, AddedAlone]:
    from covey.frameworks.torch.state import TrainingState
    from covey.frameworks.torch.steps.step_parts import StepParts

    state, tensors = TrainingState(model, optimizer, []), AddedAlone()
    state.first = 1
    parts = StepParts(tensors, state, copies)  # type: ignore[arg-type]
    parts.by_script, parts.step = True, 7
    return parts, tensors


def pushes(parts: Any, optimizer: int, value: float) -> list[float]:
    """What a part of a step does."""
    found: list[float] = parts.push("g", np.full(2, value), out=np.zeros(2)).wait().tolist()
    parts.steps(optimizer)
    return found


def taken_over(parts: Any) -> tuple[Any, AddedAlone]:
    ours = parts_of(*trained(0)[:2])
    ours[0].load({name: array.copy() for name, array in parts.arrays().items()}, False)
    return ours


def test_a_part_behind_the_others_is_done_again_with_its_results_alone() -> None:
    model, optimizer, _ = trained(1)
    parts, _ = parts_of(model, optimizer)
    before = model[0].weight.clone()
    parts.arrays()
    pushes(parts, 0, 3.0)
    model[0].weight.data.fill_(9.0)
    assert parts.ends_part() and (parts.arrays()["parameter/0.weight"] == before.numpy(force=True)).all()
    ours, tensors = taken_over(parts)
    ours.arrays()
    assert ours.step == 7 and ours.is_again and not ours.begins_step
    assert pushes(ours, 0, 4.0) == [3.0, 3.0] and not tensors.pushed, "what came from others"
    assert not ours.ends_part() and not ours.is_again
    assert list(ours.arrays()) == list(parts.arrays()), "others may take over from it in turn"
    assert pushes(ours, 1, 5.0) == [5.0, 5.0] and tensors.pushed == ["g"]
    ours.ends_step()
    assert ours.step == 8 and ours.begins_step


def test_a_script_that_does_not_repeat_itself_is_found() -> None:
    parts, _ = parts_of(*trained(1)[:2])
    parts.arrays()
    pushes(parts, 0, 3.0)
    parts.ends_part()
    with pytest.raises(CoveyError, match=r"part 0 of step 7 cannot be done again: tensor 'h' was not pushed"):
        taken_over(parts)[0].push("h", np.zeros(2))
    with pytest.raises(CoveyError, match="the script ended the step without it"):
        taken_over(parts)[0].ends_step()
    ours, _ = taken_over(parts)
    ours.drew(lambda: "one", "other")
    with pytest.raises(CoveyError, match="random generators are not where they were"):
        ours.push("g", np.zeros(2))


def test_the_first_unexpected_part_loses_its_step_and_later_ones_do_not() -> None:
    parts, tensors = parts_of(*trained(1)[:2], copies=False)
    parts.arrays()
    pushes(parts, 0, 3.0)
    parts.ends_part()
    assert "has no copy of the state at the beginning of step 7" in tensors.said[0]
    with pytest.raises(CoveyError, match="something followed an optimizer's step in step 7") as raised:
        taken_over(parts)
    assert "checkpoint" in raised.value.next
    parts.ends_step()
    parts.arrays()
    pushes(parts, 0, 3.0)
    parts.ends_part()
    assert taken_over(parts)[0].copies


def test_a_part_that_is_done_again_has_its_answers_and_a_saved_step_is_over() -> None:
    parts, _ = parts_of(*trained(1)[:2])
    parts.arrays()
    assert parts.stopping(lambda: True) and not parts.stopping(lambda: False)
    pushes(parts, 0, 3.0)
    parts.ends_part()
    ours, _ = taken_over(parts)
    assert not ours.stopping(lambda: True)
    parts.saved()
    with pytest.raises(CoveyError, match="step 7 was saved, and went on"):
        parts.ends_part()


def test_a_tensor_that_changes_between_two_steps_is_noticed() -> None:
    import torch

    from covey.frameworks.torch.state import TrainingState, changed_in

    class Average:
        tensor = torch.ones(3)

        def state_dict(self) -> dict[str, Any]:
            return {"tensor": self.tensor}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.tensor.copy_(state["tensor"])

    model, optimizer, _ = trained(1)
    state, rate = TrainingState(model, optimizer, [average := Average()]), torch.tensor(0.5)
    optimizer.param_groups[0]["lr"] = rate
    state.first, state.place = 1, {"step": 3, "between": 0}
    held = state.guarded()
    before = {name: array.tobytes() for name, array in held.items()}
    average.tensor += 1
    rate *= 0.5
    assert changed_in(held) == [] and {name: array.tobytes() for name, array in held.items()} == before
    model[0].weight.data[0, 0] += 1.0
    assert changed_in(held) == ["parameter/0.weight"], "though what was read before was unchanged"
    ours = TrainingState(*trained(0)[:2], [Average()])
    with pytest.raises(CoveyError, match=r"parameter/0.weight was changed after an epoch's steps"):
        ours.load({name: array.copy() for name, array in held.items()})

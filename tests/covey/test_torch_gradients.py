"""Gradients as tensors that do not depend on a DDP's buckets."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from covey.core.errors import CoveyError
from tests.covey.forks import Forks
from tests.covey.hooks.torch_jobs import NEEDS_TORCH

pytestmark = NEEDS_TORCH
UNEVEN = Path(__file__).with_name("uneven_script.py")
SIZES = {"0.weight": 300_000, "0.bias": 3, "1.weight": 20, "1.bias": 5, "2.weight": 400_000}


class Averages:
    """A stand-in that records what is pushed, and returns half of it as the average."""

    def __init__(self) -> None:
        self.pushed: dict[str, Any] = {}
        self.ended: list[int] = []
        self.copied = 0

    def push(self, name: str, array: Any, *, out: Any, mean: bool, type: str) -> Any:
        assert out is array and mean and type == "float32" and name not in self.pushed
        self.pushed[name] = array.copy()
        self.copied += array.base is None

        def wait() -> Any:
            if not array.flags.writeable:
                raise ValueError("nothing can come back")
            array[:] = self.pushed[name] / 2
            return array

        return SimpleNamespace(wait=wait)

    def end(self, wait: Callable[[], object], gradients: Any, future: Any) -> None:
        wait()
        self.ended.append(future)


def passed(order: list[list[str]]) -> tuple[Averages, list[Any]]:
    """The averages after a backward pass with these buckets, and the buckets' contents."""
    import torch

    from covey.frameworks.torch.gradients import Gradients

    parameters = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in SIZES.items()}
    found = Averages()
    gradients = Gradients(found, list(parameters.items()), found.end)  # type: ignore[arg-type]
    buckets = []
    for at, names in enumerate(order):
        bucket = torch.cat([torch.full((SIZES[name],), float(list(SIZES).index(name) + 1)) for name in names])
        buckets.append(bucket)
        gradients.came([parameters[name] for name in names], bucket, at)
    return found, buckets


ORDERS = [
    [list(reversed(SIZES))],
    [["2.weight"], ["1.bias", "1.weight"], ["0.bias", "0.weight"]],
    [["1.weight", "2.weight", "0.bias"], ["0.weight", "1.bias"]],
    [[name] for name in SIZES],
]


@pytest.mark.parametrize("order", ORDERS)
def test_whatever_the_buckets_are_the_same_tensors_are_pushed(order: list[list[str]]) -> None:
    whole, _ = passed(ORDERS[0])
    assert len(whole.pushed) == 3, "large ones alone, small ones together"
    found, buckets = passed(order)
    assert {name: array.tobytes() for name, array in found.pushed.items()} == {
        name: array.tobytes() for name, array in whole.pushed.items()
    }
    assert found.ended == list(range(len(order))), "each bucket is done, once"
    for names, bucket in zip(order, buckets, strict=True):
        wanted = np.concatenate([np.full(SIZES[name], (list(SIZES).index(name) + 1) / 2) for name in names])
        assert (bucket.numpy() == wanted).all()


def test_what_lies_together_is_not_copied() -> None:
    assert passed(ORDERS[0])[0].copied == 0
    assert passed(ORDERS[3])[0].copied == 1


def test_types_are_not_put_together() -> None:
    from covey.frameworks.torch.gradients import cut_of

    cut = cut_of([("a", 3, 4, "float32"), ("b", 3, 2, "bfloat16"), ("c", 5, 4, "float32"), ("d", 1, 4, "float32")])
    assert cut.sizes == [6, 3, 3] and cut.places["c"] == (0, 1, 6)
    assert cut.names == ["ddp/0 d .. c", "ddp/of b", "ddp/of a"]


def test_a_second_backward_pass_in_a_step_is_refused() -> None:
    import torch

    from covey.frameworks.torch.gradients import Gradients

    parameter, found = torch.nn.Parameter(torch.zeros(4)), Averages()
    gradients = Gradients(found, [("w", parameter)], found.end)  # type: ignore[arg-type]
    gradients.came([parameter], torch.ones(4), 0)
    with pytest.raises(CoveyError, match="gradients were averaged twice before one step"):
        gradients.came([parameter], torch.ones(4), 1)
    gradients.step_begins()
    found.pushed.clear()
    gradients.came([parameter], torch.ones(4), 2)
    assert found.ended == [0, 2]


def test_parameters_frozen_between_ddp_and_attach_are_named_not_waited_for() -> None:
    """DDP averages those that need a gradient when it is made; others would be waited for, or never averaged."""
    import torch

    from covey.frameworks.torch.gradients import Gradients

    a, b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    found = Averages()
    both: Any = Gradients(found, [("a", a), ("b", b)], found.end)  # type: ignore[arg-type]
    with pytest.raises(CoveyError, match="parameter 'b' was frozen when DistributedDataParallel was made"):
        both.came([a], torch.zeros(3), 0, True)
    one: Any = Gradients(found, [("a", a)], found.end)  # type: ignore[arg-type]
    with pytest.raises(CoveyError, match="a parameter was frozen between"):
        one.came([b, a], torch.zeros(6), 0)


@pytest.mark.parametrize(
    ("by_all", "heals", "what"),
    [
        (True, False, "averaged"),
        (False, False, "divide_by_initial_world_size=False"),
        (True, True, "ddp.join() was refused"),
    ],
)
def test_uneven_inputs_are_refused_where_their_averages_would_be_wrong(
    forks: Forks, by_all: bool, heals: bool, what: str
) -> None:
    process = forks.run(UNEVEN, int(by_all), int(heals))
    assert process.wait() == 0 and what in process.text(), process.text()

"""Optimizers that run where gradients are summed: what is declared of them. `covey.tensors.numbers.update_steps` has
the arithmetic.

    w = job.tensors.model("w", w0, update=covey.Adam(rate=1e-3))
    w = job.tensors.push_pull("w", gradient)                # the parameters after this step, on every rank
    w = job.tensors.push_pull("w", gradient, rate=1e-4)     # likewise, at another learning rate

So each parameter is updated once, and not by every rank, and what the optimizer remembers of it (its *moments*) lies at
its owner and with one rank, its *keeper*: a second copy, from which a new owner goes on.
"""

import math
from typing import Annotated

import msgspec

Factor = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
Positive = Annotated[float, msgspec.Meta(ge=0.0)]


class SGD(msgspec.Struct, frozen=True, tag=True):
    """Stochastic gradient descent, with momentum as PyTorch has it. ValueError."""

    rate: Positive
    """Of learning, unless a round has its own."""
    momentum: Factor = 0.0
    """Part of the last step's velocity that stays; 0: none is kept."""
    weight_decay: Positive = 0.0
    """Of the parameter, added to its gradient."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def moments(self) -> int:
        """How many numbers are kept for each parameter, beside itself."""
        return 1 if self.momentum else 0


class Adam(msgspec.Struct, frozen=True, tag=True):
    """Adam (Kingma and Ba 2015, algorithm 1); with `decoupled` weight decay AdamW (Loshchilov and Hutter 2019).
    ValueError."""

    rate: Positive = 1e-3
    """Of learning, unless a round has its own."""
    beta1: Factor = 0.9
    """Part of the mean of gradients that stays."""
    beta2: Factor = 0.999
    """Part of the mean of their squares that stays."""
    epsilon: Positive = 1e-8
    """Added to the root of that mean."""
    weight_decay: Positive = 0.0
    """Of the parameter, added to its gradient, or taken from the parameter."""
    decoupled: bool = False
    """Which of the two."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def moments(self) -> int:
        """How many numbers are kept for each parameter, beside itself."""
        return 2


Update = SGD | Adam


def check_rate(rate: float) -> float:
    """A learning rate. ValueError."""
    if not (math.isfinite(rate) and rate >= 0):
        raise ValueError(f"a learning rate is a number from 0 on, not {rate}")
    return float(rate)


def _check(update: Update) -> None:
    for field in msgspec.structs.fields(update):
        value = getattr(update, field.name)
        limit = 1.0 if field.type == Factor else math.inf
        if not 0 <= value < limit:
            raise ValueError(f"{field.name} of {type(update).__name__} is from 0 to below {limit}, not {value}")
        if not isinstance(value, bool):
            msgspec.structs.force_setattr(
                update, field.name, float(value)
            )  # numpy's too, and so 1 is 1.0 on every rank

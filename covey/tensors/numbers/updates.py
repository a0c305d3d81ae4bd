"""Declarations of optimizers that run where gradients are summed (arithmetic: `covey.tensors.numbers.update_steps`).

    w = job.tensors.model("w", w0, update=covey.Adam(rate=1e-3))
    w = job.tensors.push_pull("w", gradient)                # the parameters after this step, on every rank
    w = job.tensors.push_pull("w", gradient, rate=1e-4)     # the same at another learning rate

So each parameter is updated once, and not by every rank. What the optimizer remembers of it (its *moments*) is stored
at its owner and, as a second copy from which a new owner continues, at one rank, its *keeper*.
"""

import math
from typing import Annotated

import msgspec

Factor = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
Positive = Annotated[float, msgspec.Meta(ge=0.0)]


class SGD(msgspec.Struct, frozen=True, tag=True):
    """Stochastic gradient descent, with momentum as in PyTorch. ValueError for values out of range."""

    rate: Positive
    """Learning rate, unless a round has its own."""
    momentum: Factor = 0.0
    """Share of the last step's velocity that is kept; 0: no velocity."""
    weight_decay: Positive = 0.0
    """Factor of the parameter that is added to its gradient."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def moments(self) -> int:
        """How many numbers are kept for each parameter, beside itself."""
        return 1 if self.momentum else 0


class Adam(msgspec.Struct, frozen=True, tag=True):
    """Adam (Kingma and Ba 2015, algorithm 1); with `decoupled` weight decay AdamW (Loshchilov and Hutter 2019).
    ValueError for values out of range."""

    rate: Positive = 1e-3
    """Learning rate, unless a round has its own."""
    beta1: Factor = 0.9
    """Share of the mean of gradients that is kept."""
    beta2: Factor = 0.999
    """Share of the mean of squared gradients that is kept."""
    epsilon: Positive = 1e-8
    """Number that is added to the root of the mean of squared gradients."""
    weight_decay: Positive = 0.0
    """Factor of the parameter that is added to its gradient, or subtracted from the parameter (`decoupled`)."""
    decoupled: bool = False
    """Whether weight decay is subtracted from the parameter instead of added to its gradient."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def moments(self) -> int:
        """How many numbers are kept for each parameter, beside itself."""
        return 2


Update = SGD | Adam


def check_rate(rate: float) -> float:
    """The learning rate as a float. ValueError when it is negative or not finite."""
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

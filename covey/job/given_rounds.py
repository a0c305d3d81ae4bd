"""The arguments that a script gives for one round of a tensor, checked against those of earlier rounds."""

import operator
from collections.abc import Sequence
from typing import NamedTuple

from covey.tensors.numbers.arrays import Array, GivenArray
from covey.tensors.numbers.moments import Moments, check_moments
from covey.tensors.numbers.sum_order import Order
from covey.tensors.numbers.tensor_wire import ADDED_AS, PART_BYTES_MAX, TYPES, Declared, Kind, Type
from covey.tensors.numbers.updates import Update, check_rate


class GivenRound(NamedTuple):
    """The arguments of one round of a tensor. The methods raise ValueError whose text names the tensor."""

    array: GivenArray
    kind: Kind = "grad"
    mean: bool = False
    rate: float | None = None
    """Rate at which the optimizer learns in this round; None: the rate that was declared."""
    update: Update | None = None
    """The optimizer of a model, in the model's first round."""
    moments: Moments | None = None
    """The moments from which the optimizer continues, in the model's first round."""

    def moments_of(self, name: str) -> Sequence[Array]:
        """The moments from which the optimizer continues; none: it begins with zeros. TypeError, ValueError."""
        try:
            return check_moments(self.array, self.update, self.moments)
        except (TypeError, ValueError) as error:
            raise type(error)(f"tensor {name!r}: {error}") from error

    def declared(self, name: str, part_bytes: int, order: Order) -> Declared:
        """The declaration of a tensor, for its first round. Sums that a host has made of 16-bit numbers are sent as
        wide as they are added, and a part of them must not be longer than any other part."""
        wider = TYPES[ADDED_AS[self.array.type]][1] // TYPES[self.array.type][1]
        return Declared(
            name,
            self.kind,
            self.array.data.shape,
            min(part_bytes, PART_BYTES_MAX // wider),
            order,
            type=self.array.type,
            mean=self.mean,
            update=self.update,
            steps=operator.index(self.moments.steps) if self.moments is not None else 0,
        )

    def check(self, declared: Declared) -> None:
        """ValueError when this round does not fit the tensor's declaration, in any round but the first."""
        name, shape = declared.name, self.array.data.shape
        if self.kind == "model":
            raise ValueError(f"tensor {name!r} is already known as {declared.kind} {declared.shape}")
        if declared.shape != shape:
            raise ValueError(
                f"tensor {name!r} has shape {declared.shape}, this array {shape}; "
                "give an array of another shape another name"
            )
        was, now = _result(declared.type, declared.mean), _result(self.array.type, self.mean)
        if was != now:
            raise ValueError(f"tensor {name!r} is the {was}, and here the {now}; give another one another name")

    def rate_in(self, declared: Declared) -> float:
        """The learning rate of this round; 0 for a tensor without an optimizer."""
        if declared.update is not None:
            return declared.update.rate if self.rate is None else check_rate(self.rate)
        if self.rate is not None:
            raise ValueError(f"tensor {declared.name!r} has no optimizer that could learn at rate {self.rate}")
        return 0.0


def _result(type: Type, mean: bool) -> str:
    return f"{'mean' if mean else 'sum'} of {type}"

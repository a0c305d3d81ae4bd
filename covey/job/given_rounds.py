"""What a script gives for one round of a tensor, and whether that is what it gave for earlier ones."""

import operator
from collections.abc import Sequence
from typing import NamedTuple

from covey.tensors.numbers.arrays import Array, GivenArray
from covey.tensors.numbers.moments import Moments, check_moments
from covey.tensors.numbers.sum_order import Order
from covey.tensors.numbers.tensor_wire import ADDED_AS, PART_BYTES_MAX, TYPES, Declared, Kind, Type
from covey.tensors.numbers.updates import Update, check_rate


class GivenRound(NamedTuple):
    """ValueError of its methods name the tensor."""

    array: GivenArray
    kind: Kind = "grad"
    mean: bool = False
    rate: float | None = None
    """At which an optimizer learns; None: as it was declared."""
    update: Update | None = None
    """That optimizer, in a model's first round."""
    moments: Moments | None = None
    """Likewise: from where it goes on."""

    def moments_of(self, name: str) -> Sequence[Array]:
        """With which an optimizer goes on; none: from zero. TypeError, ValueError."""
        try:
            return check_moments(self.array, self.update, self.moments)
        except (TypeError, ValueError) as error:
            raise type(error)(f"tensor {name!r}: {error}") from error

    def declared(self, name: str, part_bytes: int, order: Order) -> Declared:
        """For the first round of a tensor. Sums that a host has made of 16-bit numbers go out as wide as they are
        added, and a part of them is no longer than any other."""
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
        """For every other one."""
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
        """Of learning; 0 where nothing learns."""
        if declared.update is not None:
            return declared.update.rate if self.rate is None else check_rate(self.rate)
        if self.rate is not None:
            raise ValueError(f"tensor {declared.name!r} has no optimizer that could learn at rate {self.rate}")
        return 0.0


def _result(type: Type, mean: bool) -> str:
    return f"{'mean' if mean else 'sum'} of {type}"

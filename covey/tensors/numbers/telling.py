"""Messages among ranks of a job, which its aggregators pass on (`covey.healing.healing`)."""

from typing import NamedTuple

from covey.tensors.numbers.tensor_wire import Payload


class Tell(NamedTuple):
    """A message of this rank to another one of its job."""

    rank: int
    about: int
    step: int
    data: Payload = b""


class ToldByRank(NamedTuple):
    """A message of another rank to this one; `data` is valid only while it is handled."""

    rank: int
    about: int
    step: int
    data: Payload

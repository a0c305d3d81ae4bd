"""What ranks of a job tell one another, by way of who adds for them (`covey.healing.healing`)."""

from typing import NamedTuple

from covey.tensors.numbers.tensor_wire import Payload


class Tell(NamedTuple):
    """What this rank tells another one of its job."""

    rank: int
    about: int
    step: int
    data: Payload = b""


class ToldByRank(NamedTuple):
    """What another rank told this one; `data` is there only while it is heard."""

    rank: int
    about: int
    step: int
    data: Payload

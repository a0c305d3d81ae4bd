"""A round of a tensor that was begun and not yet waited for."""

from typing import Protocol

from covey.tensors.numbers.arrays import Array, GivenArray, as_stored


class FinishesRounds(Protocol):
    """The part of `covey.job.tensors.TensorClient` that a handle uses."""

    def has_result(self, name: str) -> bool: ...
    def finish(self, name: str, out: Array | None) -> Array: ...


class TensorHandle:
    """A round that `TensorClient.push` began."""

    def __init__(self, client: FinishesRounds, name: str, given: GivenArray, out: Array | None) -> None:
        self._client, self._name, self._given, self._out = client, name, given, out
        self._result: Array | None = None

    @property
    def done(self) -> bool:
        """Whether the result is here, and `wait` would not block."""
        return self._result is not None or self._client.has_result(self._name)

    def wait(self) -> Array:
        """The result, with the type that was pushed: in `out` if there was one, else in a new array. Blocks until every
        rank has pushed. A second call is harmless. Errors as of `push_pull`."""
        if self._result is None:
            out = None if self._out is None else as_stored(self._out, self._given.type)
            found = self._client.finish(self._name, out)
            self._result = self._out if self._out is not None else found.view(self._given.dtype)
        return self._result

"""A rank's wait for a tensor: it checks whether waiting still makes sense, and tells from time to time why it waits."""

import math
import time
from typing import Protocol

from covey.core.units import format_seconds


class WaitsForTensors(Protocol):
    """What `Patience` needs of a rank's client (`covey.job.tensors`)."""

    patience_s: float
    """Seconds after which the client tells people what it waits for, and between two such lines."""

    def raise_if_over(self) -> None: ...
    def raise_in_vain(self, name: str) -> None: ...
    def why(self, name: str) -> str: ...
    def tell(self, text: str) -> None: ...


class Patience:
    """The wait of one caller for one tensor of `client`."""

    def __init__(self, client: WaitsForTensors, name: str, give_up_s: float | None) -> None:
        self._client, self._name, self._began_s = client, name, time.monotonic()
        self._tell_s = self._began_s + client.patience_s
        self._end_s = math.inf if give_up_s is None else self._began_s + give_up_s

    @property
    def left_s(self) -> float:
        """Seconds to wait before `look` is called again, at most."""
        return max(0.0, min(self._tell_s, self._end_s) - time.monotonic()) + 0.001

    def look(self) -> None:
        """Check the wait, and tell people why it takes so long, once every `patience_s`. TimeoutError when the time is
        over; errors of the client."""
        self._client.raise_if_over()
        self._client.raise_in_vain(self._name)
        now_s = time.monotonic()
        if now_s >= self._end_s:
            raise TimeoutError(f"tensor {self._name!r} took longer than {format_seconds(self._end_s - self._began_s)}")
        if now_s >= self._tell_s:
            waited = format_seconds(now_s - self._began_s)
            self._client.tell(f"has waited {waited} for tensor {self._name!r}: {self._client.why(self._name)}")
            self._tell_s = now_s + self._client.patience_s

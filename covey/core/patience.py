"""How long a rank waits for a tensor: it looks whether it still may, and says from time to time for what."""

import math
import time
from typing import Protocol

from covey.core.units import format_seconds


class WaitsForTensors(Protocol):
    """A rank's client (`covey.job.tensors`)."""

    patience_s: float
    """People read after so long for what it waits."""

    def raise_if_over(self) -> None: ...
    def raise_in_vain(self, name: str) -> None: ...
    def why(self, name: str) -> str: ...
    def tell(self, text: str) -> None: ...


class Patience:
    """Of whoever waits for one tensor of `client`."""

    def __init__(self, client: WaitsForTensors, name: str, give_up_s: float | None) -> None:
        self._client, self._name, self._began_s = client, name, time.monotonic()
        self._tell_s = self._began_s + client.patience_s
        self._end_s = math.inf if give_up_s is None else self._began_s + give_up_s

    @property
    def left_s(self) -> float:
        """Until the next look, at most."""
        return max(0.0, min(self._tell_s, self._end_s) - time.monotonic()) + 0.001

    def look(self) -> None:
        """Says why it takes so long, from time to time. TimeoutError at the end of it; errors of the client."""
        self._client.raise_if_over()
        self._client.raise_in_vain(self._name)
        now_s = time.monotonic()
        if now_s >= self._end_s:
            raise TimeoutError(f"tensor {self._name!r} took longer than {format_seconds(self._end_s - self._began_s)}")
        if now_s >= self._tell_s:
            waited = format_seconds(now_s - self._began_s)
            self._client.tell(f"has waited {waited} for tensor {self._name!r}: {self._client.why(self._name)}")
            self._tell_s = now_s + self._client.patience_s

"""A real device under another controller than the ladder."""

from collections.abc import Callable
from typing import Any, ClassVar

from plugins.sharing.machine.control import Settling, Steady, Unwatched
from plugins.sharing.machine.gpu import SharedGpu
from plugins.sharing.machine.ladder import Ladder
from plugins.sharing.policy.ladder import Rates


class Ruled(Ladder):
    """A controller of another kind in the ladder's place."""

    inner: ClassVar[Any]

    def __init__(self, tolerance: float = 0.05, flag: bool = True) -> None:
        super().__init__(tolerance, flag)
        self.phase = "run"
        self.law: Any = type(self).inner(tolerance)

    @property
    def rates(self) -> Rates:
        found: Rates = self.law.rates
        return found

    def stepped(
        self, step_s: float, idle_s: float, now_s: float, ended_s: float | None = None, *others: bool
    ) -> str | None:
        self.last_step_s = now_s
        return "" if self.law.stepped(step_s, idle_s, now_s, ended_s) else None

    def passed(self, now_s: float, busy: bool) -> str | None:
        return "" if self.law.passed(now_s, busy) else None

    def restart(self, why: str) -> str:
        return why


def ruled(make: Callable[[float], Any]) -> type[Ladder]:
    """A class of controller that rules by what `make` returns, one of `machine/rivals.py`, told how much slower a
    guaranteed job may get."""
    return type("Ruled", (Ruled,), {"inner": staticmethod(make)})


def rule(gpu: SharedGpu) -> None:
    """Let the GPU's `controller` rule from now on, as if the guaranteed job had just begun to run steadily."""
    member = gpu.guaranteed
    assert member is not None
    gpu.control = Unwatched()
    gpu.control = Settling()
    gpu.control = Steady(gpu.controller(gpu.tolerance, member.flag))

"""The laws of other systems, for comparison: what each does with the rate of an opportunistic job after a window.

All of them know one rate for all times, and a baseline that they keep. Their constants are those of the published code
where there is one; where a law has none, they were chosen to do well in the scenarios of `sim/sharing/sharing.py`.
"""

import msgspec


class StepUp(msgspec.Struct, frozen=True):
    """AntMan: from nothing upwards in steps while the guaranteed job is not affected, and pessimistic when it is
    (§3.3). Its controller is not published; the published job side takes whole percents, averages ten mini-batches."""

    rate: float = 0.0
    hold: int = 0
    """The number of windows to wait before the next step."""

    def after(self, excess: float, tolerance: float) -> "StepUp":
        """The law after a window. `excess`: the measured slowdown of the window."""
        if excess > tolerance:
            return StepUp(self.rate / 2, 5)
        return StepUp(min(1.0, self.rate + 0.01)) if self.hold == 0 else StepUp(self.rate, self.hold - 1)


class Aimd(msgspec.Struct, frozen=True):
    """Additive increase, multiplicative decrease: one percent up, a quarter down."""

    rate: float = 0.0

    def after(self, excess: float, tolerance: float) -> "Aimd":
        """The law after a window. `excess`: the measured slowdown of the window."""
        return Aimd(0.75 * self.rate if excess > tolerance else min(1.0, self.rate + 0.01))


class Pi(msgspec.Struct, frozen=True):
    """Proportional and integral control of the rate towards three quarters of the tolerance."""

    rate: float = 0.0
    error: float = 0.0

    def after(self, excess: float, tolerance: float) -> "Pi":
        """The law after a window. `excess`: the measured slowdown of the window."""
        error = 0.75 * tolerance - excess
        rate = self.rate + 0.3 * (error - self.error) + 0.2 * error
        return Pi(min(1.0, max(0.0, rate)), error)


class Tgs(msgspec.Struct, frozen=True):
    """TGS (NSDI'23), as its published code does it every 50 ms: slow start by half, then a four-thousandth more each
    time; 8 % less when the guaranteed job is over the tolerance (3 % there), a tenth and slow start at thrice."""

    rate: float = 0.01
    slow_start: bool = True

    def after(self, excess: float, tolerance: float) -> "Tgs":
        """The law after a window. `excess`: the measured slowdown of the newest mini-batches."""
        if excess >= 3 * tolerance:
            return Tgs(max(0.001, self.rate / 10), True)
        if excess > tolerance:
            return Tgs(max(0.001, 0.92 * self.rate), False)
        return Tgs(min(1.0, 1.5 * self.rate if self.slow_start else self.rate + 0.00025), self.slow_start)

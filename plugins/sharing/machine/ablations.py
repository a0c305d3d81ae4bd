"""The ladder with one of its rules taken out, to see what that rule is worth (`make tables ONLY=sharing-rules`, `make
bench-sharing ONLY=rules`). No agent runs one of these."""

from plugins.sharing.machine.ladder import Ladder
from plugins.sharing.machine.rivals import SpreadLadder
from plugins.sharing.policy import ladder
from plugins.sharing.policy.interference import Slowdown


class Unverified(Ladder):
    """Whoever is beside a slower job is guilty: down a rung at once, and the first baseline is kept for ever."""

    def _violated(self, measured: Slowdown) -> str | None:
        if measured.excess < 0:
            return self._quiet(measured)
        self.found, self.too_much, self.quiet = measured, self.u, 0
        return self._enter("run", ladder.descended(self.u), f"{measured} slower")

    def _is_old(self) -> bool:
        if self.quiet >= ladder.QUIET_WINDOWS:
            self.too_much, self.quiet = None, 0
        return False


class Unaudited(Ladder):
    """A baseline is taken again after a violation only."""

    def _is_old(self) -> bool:
        if self.quiet >= ladder.QUIET_WINDOWS:
            self.too_much, self.quiet = None, 0
        return False


class OnAnyBaseline(Ladder):
    """Busy time is given away on any baseline."""

    def _is_known(self) -> bool:
        return True


class Forgetful(Ladder):
    """What was too much is climbed to again as fast as the first time."""

    def _ceiling(self) -> float | None:
        return None


class NeverAway(Ladder):
    """A job that is away is waited for: its idle phase has no more than the rung says."""

    def passed(self, now_s: float, busy: bool) -> str | None:
        return None


class Closed(Ladder):
    """Busy time is never given away: nothing above the whole idle phases."""

    def _is_known(self) -> bool:
        return False


RULES: dict[str, type[Ladder]] = {
    "head": SpreadLadder,
    "verification": Unverified,
    "audit": Unaudited,
    "known-baseline": OnAnyBaseline,
    "too-much": Forgetful,
    "away": NeverAway,
    "busy": Closed,
}
"""By the rule that is missing."""

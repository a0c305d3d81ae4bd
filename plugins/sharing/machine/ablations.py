"""The ladder with one of its rules taken out, to see what that rule is worth (`make tables ONLY=sharing-rules`, `make
bench-sharing ONLY=rules`). No agent runs one of these."""

from plugins.sharing.machine.ladder import Ladder
from plugins.sharing.machine.rivals import SpreadLadder
from plugins.sharing.policy import ladder
from plugins.sharing.policy.interference import Slowdown


class Unverified(Ladder):
    """The ladder without verification: the jobs beside a slower job are always guilty. They go down a rung at once, and
    the first baseline is kept for ever."""

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
    """The ladder without audits: a baseline is taken again after a violation only."""

    def _is_old(self) -> bool:
        if self.quiet >= ladder.QUIET_WINDOWS:
            self.too_much, self.quiet = None, 0
        return False


class OnAnyBaseline(Ladder):
    """The ladder without a known baseline: busy time is given away on any baseline."""

    def _is_known(self) -> bool:
        return True


class Forgetful(Ladder):
    """The ladder without memory: a rung that was too much is climbed to again as fast as the first time."""

    def _ceiling(self) -> float | None:
        return None


class NeverAway(Ladder):
    """The ladder without idle phases of a job that is away: it is waited for, and its idle phase gives no more than the
    rung says."""

    def passed(self, now_s: float, busy: bool) -> str | None:
        return None


class Closed(Ladder):
    """The ladder without busy time: nothing is given away above the whole idle phases."""

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
"""The ablated ladders, by the rule that is missing."""

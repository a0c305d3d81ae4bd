"""Who may go on, by the rates of a page: the rules of `gate.cpp`, for a script that has no native gate. Pure.

Time is split into the phases in which the neighbour was idle and was busy on the device; each phase has its share, and
a credit that grows by its share of time and shrinks by what this process worked then. Work comes in quanta: once the
credit of a phase is a quantum below nothing, the script is stopped until it is nothing again.
"""

from covey.kernel.pages import RankLimits

QUANTUM_NS = 1_000_000
"""Worked at a stretch. Shorter ones cost more than they give: a sleep of nothing takes 54 us."""
PAUSE_MIN_NS, PAUSE_MAX_NS = 200_000, 10_000_000
"""Between two looks of who is stopped: each costs a Python thread some 50 us of a core."""
DEBT_NS = 1_000_000_000
"""What one long operator may owe: at the failsafe nobody is stopped for longer."""


class GatePace:
    """`now_ns` is CLOCK_MONOTONIC, `cpu_ns` processor time of this process."""

    def __init__(self) -> None:
        self._rates = RankLimits()
        self._credit = [0.0, 0.0]
        self._held = [False, False]
        self._last_ns = self._last_cpu_ns = 0

    def set(self, rates: RankLimits, now_ns: int, cpu_ns: int) -> None:
        """What holds from now on (`covey.kernel.pages.rates_at`). Debts end with the rates that made them."""
        same = (rates.idle, rates.busy) == (self._rates.idle, self._rates.busy)
        self._rates = rates
        if not same:
            self._credit, self._held = [0.0, 0.0], [False, False]
            self._last_ns, self._last_cpu_ns = now_ns, cpu_ns

    def account(self, now_ns: int, cpu_ns: int, busy: bool, since_ns: int) -> None:
        """The neighbour is `busy` or idle since then."""
        took_ns = now_ns - self._last_ns
        if took_ns <= 0:
            return
        used = min(max(cpu_ns - self._last_cpu_ns, 0), took_ns) / took_ns
        in_this_phase = now_ns - min(max(since_ns, self._last_ns), now_ns)
        parts = (took_ns - in_this_phase, in_this_phase) if busy else (in_this_phase, took_ns - in_this_phase)
        for phase, share in enumerate((self._rates.idle, self._rates.busy)):
            credit = self._credit[phase] + (share - used) * parts[phase]
            least = min(-share * DEBT_NS, -2 * QUANTUM_NS)  # else nobody would be stopped by the smallest shares
            self._credit[phase] = min(max(credit, least), QUANTUM_NS)
        self._last_ns, self._last_cpu_ns = now_ns, cpu_ns

    def may(self, now_ns: int, busy: bool, since_ns: int) -> bool:
        """Whether work may begin now."""
        if not busy and 0 <= self._rates.head_ns <= now_ns - since_ns:
            return False
        share = self._rates.busy if busy else self._rates.idle
        if share >= 1 or share <= 0:
            return share >= 1
        credit = self._credit[busy]
        self._held[busy] = credit < 0 if self._held[busy] else credit < -QUANTUM_NS
        return not self._held[busy]

    def pause_ns(self, busy: bool) -> int:
        """How long who may not go on can sleep, unless the neighbour's flag changes."""
        share = self._rates.busy if busy else self._rates.idle
        owed = max(0.0, -self._credit[busy]) / share if 0 < share < 1 else PAUSE_MAX_NS
        return int(min(max(owed, PAUSE_MIN_NS), PAUSE_MAX_NS))

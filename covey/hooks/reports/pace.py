"""Whether a script without a native gate may continue, by the rates of a page: the rules of `gate.cpp`. Pure.

Time is split into phases in which the neighbour is idle or busy on the device. Each kind of phase has a share, and a
credit that grows by this share of the time and shrinks by the work of this process. Work comes in quanta: once the
credit is a quantum below zero, the script is stopped until it is zero again.
"""

from covey.kernel.pages import RankLimits

QUANTUM_NS = 1_000_000
"""Ns of work at a stretch. Shorter ones cost more than they give: a sleep of nothing takes 54 us."""
PAUSE_MIN_NS, PAUSE_MAX_NS = 200_000, 10_000_000
"""Least and most ns between two looks of a stopped script: each costs a Python thread some 50 us of a core."""
DEBT_NS = 1_000_000_000
"""Most ns that one long operator may owe, so that at the failsafe a script is not stopped for longer."""


class GatePace:
    """The pace of a script. `now_ns` is CLOCK_MONOTONIC, `cpu_ns` the processor time of this process."""

    def __init__(self) -> None:
        self._rates = RankLimits()
        self._credit = [0.0, 0.0]
        self._held = [False, False]
        self._last_ns = self._last_cpu_ns = 0

    def set(self, rates: RankLimits, now_ns: int, cpu_ns: int) -> None:
        """Set the rates from now on (`covey.kernel.pages.rates_at`). Debts end with the rates that made them."""
        same = (rates.idle, rates.busy) == (self._rates.idle, self._rates.busy)
        self._rates = rates
        if not same:
            self._credit, self._held = [0.0, 0.0], [False, False]
            self._last_ns, self._last_cpu_ns = now_ns, cpu_ns

    def account(self, now_ns: int, cpu_ns: int, busy: bool, since_ns: int) -> None:
        """Count the time since the last call. The neighbour is `busy` or idle since `since_ns`."""
        took_ns = now_ns - self._last_ns
        if took_ns <= 0:
            return
        used = min(max(cpu_ns - self._last_cpu_ns, 0), took_ns) / took_ns
        in_this_phase = now_ns - min(max(since_ns, self._last_ns), now_ns)
        parts = (took_ns - in_this_phase, in_this_phase) if busy else (in_this_phase, took_ns - in_this_phase)
        for phase, share in enumerate((self._rates.idle, self._rates.busy)):
            credit = self._credit[phase] + (share - used) * parts[phase]
            least = min(-share * DEBT_NS, -2 * QUANTUM_NS)  # otherwise the smallest shares would stop no script
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
        """How many ns a stopped script can sleep, unless the neighbour's flag changes."""
        share = self._rates.busy if busy else self._rates.idle
        owed = max(0.0, -self._credit[busy]) / share if 0 < share < 1 else PAUSE_MAX_NS
        return int(min(max(owed, PAUSE_MIN_NS), PAUSE_MAX_NS))

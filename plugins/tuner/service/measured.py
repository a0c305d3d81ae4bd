"""What one host measures of a tuned job between two reports to its coordinator."""

from covey.ports.probes import CardNow
from plugins.facts import JobPlaced, Place, StepTimed
from plugins.tuner.messages import HostTimed

CARRIED_MIN = 1e5
"""Bytes per second below which a card was idle, and nothing is known of it."""
STEP_S_MAX = 86_400.0
"""Most seconds of a step that are believed."""


class ProcessTimes:
    """Sums over the steps of one process."""

    def __init__(self) -> None:
        self.steps, self.step_s, self.compute_s, self.communicate_s = 0, 0.0, 0.0, 0.0

    def add(self, fact: StepTimed) -> None:
        self.steps += 1
        self.step_s += fact.step_s
        self.compute_s += fact.compute_s
        self.communicate_s += fact.communicate_s


class CardWindow:
    """The most that a card carried in one direction between two looks."""

    def __init__(self) -> None:
        self._last: tuple[float, CardNow] | None = None
        self.most_bytes_per_s = 0.0

    def look(self, now: CardNow | None, now_s: float) -> None:
        """Compare with the look before. A card whose counters cannot be read, or that came up anew, tells nothing."""
        before, self._last = self._last, (now_s, now) if now is not None else None
        if before is None or now is None or now.name != before[1].name or now_s <= before[0]:
            return
        carried = max(now.sent_bytes - before[1].sent_bytes, now.received_bytes - before[1].received_bytes)
        self.most_bytes_per_s = max(self.most_bytes_per_s, carried / (now_s - before[0]))

    def taken(self) -> float:
        """The most since this was asked last; 0: the card was idle."""
        most, self.most_bytes_per_s = self.most_bytes_per_s, 0.0
        return most if most >= CARRIED_MIN else 0.0


class HostMeasures:
    """What this host measured of one job in its present configuration."""

    def __init__(self, placed: JobPlaced) -> None:
        self._times: dict[int, ProcessTimes] = {}
        self._most_bytes_per_s = 0.0
        """The most that the card carried since the last report with steps."""
        self.place(placed)

    def place(self, placed: JobPlaced) -> None:
        """The job is arranged like this; what was measured in an older configuration is forgotten."""
        self.placed = placed
        self._times.clear()
        self._most_bytes_per_s = 0.0

    def timed(self, fact: StepTimed, here: Place) -> None:
        if fact.epoch != self.placed.epoch or fact.rank not in here.ranks or not 0 < fact.step_s < STEP_S_MAX:
            return
        self._times.setdefault(fact.rank, ProcessTimes()).add(fact)

    def report(self, here: Place | None, card_bytes_per_s: float) -> HostTimed:
        """The report of this host, whose card carried this since the last one. Before each of its processes has done a
        step the report is empty, and what was measured stays for the next: a step may last longer than reports are
        apart, and the card is busy for a part of it only."""
        self._most_bytes_per_s = max(self._most_bytes_per_s, card_bytes_per_s)
        placed, times = self.placed, self._times
        of = placed.job, placed.epoch, placed.config
        if here is not None and not set(here.ranks) <= times.keys():
            return HostTimed(*of, 0)
        most, self._most_bytes_per_s = self._most_bytes_per_s, 0.0
        if here is None:
            return HostTimed(*of, 0, card_bytes_per_s=most)
        carried = {process: max(1, len(placed.carried.get(process, (process,)))) for process in times}
        pass_s = max(each.compute_s / each.steps / carried[process] for process, each in times.items())
        step_s = max(each.step_s / each.steps for each in times.values())
        communicate_s = min(each.communicate_s / each.steps for each in times.values())
        steps = min(each.steps for each in times.values())
        self._times = {}
        return HostTimed(*of, steps, step_s, pass_s, communicate_s, most)

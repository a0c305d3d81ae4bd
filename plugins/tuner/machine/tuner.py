"""The tuner of one elastic job, at its coordinator: measures, decides, asks the log, and looks whether it was right.

    measuring --- every host timed enough steps ---> deciding --- not worth 5 % -----------> measuring, anew
        ^                                               | worth it
        |                                               v
        |                                            asking --- refused: later, with fresh figures ---> measuring
        |                                               | in force
        |     right, or wrong for the first times       v
        '------------------------------------------- checking --- wrong for the third time in a row ---> left alone

Hosts tell what their processes and cards took, and figures are moving averages (§3.3.1). Hosts that differ by chance
count as equal (`machine/figures.py`), or the tuner would find another 5 % to gain every time. What is missing is named,
and nothing is decided before it is there: a card of unknown speed is no card without traffic.

A step is predicted from what the present one takes: the model (`policy/division.py`) says what traffic and computing
change, and what it does not know about a step (the sums' own time, the script between steps) stays as it is. After each
change the steps are measured again; both times stand in the event log. The tuner of a job whose steps it cannot predict
says so and leaves the job alone until a person asks for it again. What a tuner knows is in its process only: another
coordinator, a restarted agent and another start of the job begin anew.

A process ends where it would only hold others up, and with it the job gives its GPUs back; a host that owns tables gets
a first one where that is faster, and has no room for one if it says so. A host that the best division leaves without
ranks and tables is none of the job's hosts any more. Nothing is measured there, so only a person brings it back.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from covey.core.events import LogEvent, Publish
from covey.core.ids import HostId, JobId
from plugins.facts import ArrangementsWanted, WantedArrangement
from plugins.tuner.machine.figures import Figure, measure, named, short, told_apart
from plugins.tuner.policy.division import (
    DividedJob,
    Division,
    HostPace,
    HostPart,
    best_division,
    card_bytes,
    may_be,
    owners_of,
    step_s,
)
from plugins.tuner.policy.gain import GAIN_MIN, is_worth_it

STEPS_MIN = 16
"""Steps of every host before a decision. The paper waits for "a set" of mini-batches (§3.4.1) and names no number."""
REPORTS_MIN = 5
"""Reports of every host before a decision: a report is the mean of the steps of some seconds."""
ERRORS_OF_STEP = 3.0
"""Standard errors of the measured step that a change must save, too."""
KNOWN_S = 600.0
"""Seconds for which the measured step of a division counts more than what would be predicted for it: a tuner that goes
by predictions alone comes back to divisions that it has tried."""
ALIKE = 0.25
"""Share by which a host's figures may change while what was measured of a division counts."""
REST_S = 10.0
"""Least seconds between two decisions about one job."""
RETRY_S = 30.0
"""Seconds until a wish that was refused may be asked again."""
FULL_S = 600.0
"""Seconds for which a host that had no room for a process is not asked again."""
ANSWER_S = 60.0
"""Seconds after which a wish that nobody answers counts as refused: the agent's log may have been away."""
WRONG = 0.10
"""Share of a measured step by which a prediction may miss it."""
WRONG_MAX = 3
"""Number of wrong predictions in a row after which the job is left alone."""
BY = "the tuner"
JUDGED_S_MIN = 1e-6
"""Least seconds of a step that a prediction is divided by."""
JUDGED_KEPT, KNOWN_MAX = 16, 32
"""Most predictions that are kept, and most divisions that are known."""


class HostNow(msgspec.Struct, frozen=True):
    """The processes of the job on one host now, and the ranks that they carry together."""

    processes: int
    ranks: int


# ---- events ----------------------------------------------------------------------------------------------------------


class JobDivided(msgspec.Struct, frozen=True):
    """The log says how the job is arranged from now on."""

    epoch: int
    config: int
    hosts: Mapping[HostId, HostNow]
    """Every host that has processes of the job."""
    owners: tuple[HostId, ...]
    """The host of each table."""
    ends_never: HostId
    """The host of the process that carries rank 0."""
    processes_min: int = 1


class TensorsNow(msgspec.Struct, frozen=True):
    """What ranks push in a step."""

    total_bytes: int
    used: tuple[int, ...]
    """The tables that have tensors in them, ascending."""


class HostMeasured(msgspec.Struct, frozen=True):
    """A host measured this in some seconds."""

    host: HostId
    epoch: int
    config: int
    steps: int
    """Steps that its processes did; 0: it has none, or they did none."""
    step_s: float
    pass_s: float
    """Seconds that a process computed for one of its ranks in a step: those of its slowest process."""
    communicate_s: float
    """Seconds of a step in which its processes waited for tensors: those of the process that waited least."""
    card_bytes_per_s: float
    """The most that its card carried in one direction; 0: not known."""


class WishAnswered(msgspec.Struct, frozen=True):
    """The scheduler answered a wish."""

    ask: str
    refused: str
    full: HostId = HostId("")
    """The host that had no room for a process, if that is why."""


class TunerTicked(msgspec.Struct, frozen=True):
    """Some seconds are over."""


TunerEvent = JobDivided | TensorsNow | HostMeasured | WishAnswered | TunerTicked
TunerAction = Publish | LogEvent


class TunerWish(msgspec.Struct, frozen=True):
    """A change that was asked for, and what it should do."""

    ask: str
    config: int
    """The number of the configuration that it makes."""
    asked_s: float
    division: Division
    before_s: float
    """Measured seconds of a step before it."""
    predicted_s: float
    granted: bool = False


class Judged(msgspec.Struct, frozen=True):
    """A prediction, and what became of it, in seconds of a step."""

    before_s: float
    predicted_s: float
    measured_s: float

    @property
    def is_wrong(self) -> bool:
        return abs(self.predicted_s - self.measured_s) > WRONG * self.measured_s


class Known(msgspec.Struct, frozen=True):
    """A division that the job had, and what its steps took."""

    division: Division
    step_s: float
    until_s: float
    paces: Sequence[HostPace]
    """The hosts as they were seen then."""

    def holds(self, paces: Sequence[HostPace], now_s: float) -> bool:
        """Whether it says what its division would take now: hosts are much as they were, and it is not long ago."""
        return (
            self.until_s > now_s
            and [each.host for each in self.paces] == [each.host for each in paces]
            and all(
                abs(now.pass_s - then.pass_s) <= ALIKE * then.pass_s
                and abs(now.card_bytes_per_s - then.card_bytes_per_s) <= ALIKE * then.card_bytes_per_s
                for now, then in zip(paces, self.paces, strict=True)
            )
        )


class Tuner:
    """The tuner of one job. `boot`: what makes names of wishes unique among agents' lives."""

    def __init__(self, job: JobId, now: JobDivided, boot: str = "", gain_min: float = GAIN_MIN) -> None:
        self.job, self.now, self.gain_min, self._boot = job, now, gain_min, boot
        self.tensors = TensorsNow(0, ())
        self.passes: dict[HostId, Figure] = {}
        self.cards: dict[HostId, Figure] = {}
        self.waits: dict[HostId, Figure] = {}
        self.steps: dict[HostId, int] = {}
        """Steps that each host did in this configuration, without those of its first report: the change is in it."""
        self.reports: dict[HostId, int] = {}
        self.step: Figure | None = None
        """Seconds of a step in this configuration."""
        self.best: tuple[Division, float] | None = None
        """The best division as last decided, and its predicted step in seconds."""
        self.wish: TunerWish | None = None
        self.judged: list[Judged] = []
        self.wrong = 0
        """Number of predictions in a row that were wrong."""
        self.left_alone = False
        self.known: list[Known] = []
        """Divisions that were measured among these hosts."""
        self._full: dict[HostId, float] = {}
        """Until when no process is asked for on hosts that had no room for one."""
        self._wishes = 0
        self._not_before_s = 0.0
        self._said: dict[str, str] = {}

    def handle(self, event: TunerEvent, now_s: float) -> Sequence[TunerAction]:
        match event:
            case JobDivided():
                return self._arranged(event)
            case TensorsNow():
                return self._pushes(event)
            case HostMeasured():
                return self._measured(event, now_s)
            case WishAnswered():
                return self._answered(event, now_s)
            case TunerTicked():
                return self._time_passed(now_s)
            case _:
                assert_never(event)

    def check(self) -> None:
        there = self.hosts()
        assert set(self.steps) <= there and set(self.reports) <= there, "who measured is there"
        assert self.wish is None or sum(part.ranks for part in self.wish.division.values()) == self.ranks
        assert self.wrong <= WRONG_MAX and self.left_alone == (self.wrong == WRONG_MAX)

    # ---- the job -----------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return sum(host.ranks for host in self.now.hosts.values())

    def hosts(self) -> set[HostId]:
        """The hosts that the job uses: those with processes, and owners of tables that are used."""
        return {*self.now.hosts, *self._owners()}

    def _owners(self) -> list[HostId]:
        """The host of each table that is used."""
        return [self.now.owners[table] for table in self.tensors.used if table < len(self.now.owners)]

    def division(self) -> Division:
        """The present division."""
        tables, none = self._owners(), HostNow(0, 0)
        return {
            host: HostPart(self.now.hosts.get(host, none).ranks, tables.count(host)) for host in sorted(self.hosts())
        }

    def lacks(self) -> str:
        """What was not measured yet and is needed to decide, in words; empty: nothing."""
        if len(self.hosts()) < 2:
            return "it has one host, and there is nothing to divide"
        if not self.tensors.used or not self.tensors.total_bytes:
            return "the bytes of its tensors are not known"
        untimed = self._untimed()
        if untimed:
            return f"{named(untimed)} timed fewer than {STEPS_MIN} steps since the last change"
        cards = sorted(host for host in self.hosts() if host not in self.cards)
        if cards:
            return f"the bytes per second that the card of {named(cards)} carries are not known"
        return ""

    @property
    def doing(self) -> str:
        """What the tuner does now, in words."""
        if self.left_alone:
            return f"leaves the job alone: its last {WRONG_MAX} predictions were wrong"
        if self.wish is not None and not self.wish.granted:
            return "waits until the log has the change that it asked for"
        lacks = self.lacks()
        if self.wish is not None:
            return f"looks whether steps take {short(self.wish.predicted_s)}{f': {lacks}' if lacks else ''}"
        return f"measures: {lacks}" if lacks else "keeps the job as it is, and measures"

    def _untimed(self) -> list[HostId]:
        """Hosts that have not timed enough steps in this configuration."""
        return sorted(host for host in self.now.hosts if not self._timed_enough(host))

    def _timed_enough(self, host: HostId) -> bool:
        return self.steps.get(host, 0) >= STEPS_MIN and self.reports.get(host, 0) > REPORTS_MIN

    def _arranged(self, event: JobDivided) -> Sequence[TunerAction]:
        anew = event.epoch != self.now.epoch
        if event == self.now or (event.epoch, event.config) < (self.now.epoch, self.now.config):
            return []
        before, self.now = self.hosts(), event
        self._forget_steps()
        if anew or before != self.hosts():
            self.known = []
        for figures in (self.passes, self.cards, self.waits):
            for gone in [host for host in figures if host not in self.hosts()]:
                del figures[gone]
        if self.wish is not None and (anew or event.config > self.wish.config):
            return self._drop_wish("the job was arranged anew meanwhile")
        return []

    def _pushes(self, event: TensorsNow) -> Sequence[TunerAction]:
        """What was measured with other tensors says nothing about a step with these."""
        if event == self.tensors:
            return []
        self.tensors, self.known = event, []
        self._forget_steps()
        return self._drop_wish("its ranks push other tensors now") if self.wish is not None else []

    def _drop_wish(self, why: str) -> Sequence[TunerAction]:
        self.wish = None
        return [self._note("tuner", f"the last prediction is not compared: {why}")]

    def _forget_steps(self) -> None:
        self.steps, self.reports, self.step, self.best = {}, {}, None, None

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def _measured(self, event: HostMeasured, now_s: float) -> Sequence[TunerAction]:
        if event.host not in self.hosts() or (event.epoch, event.config) != (self.now.epoch, self.now.config):
            return []
        if event.card_bytes_per_s > 0:
            measure(self.cards, event.host, event.card_bytes_per_s)
        if event.steps <= 0 or event.pass_s <= 0 or event.host not in self.now.hosts:
            return self._look(now_s)
        self.reports[event.host] = self.reports.get(event.host, 0) + 1
        if self.reports[event.host] == 1:
            return []
        self.steps[event.host] = self.steps.get(event.host, 0) + event.steps
        measure(self.passes, event.host, event.pass_s)
        if event.communicate_s > 0:
            measure(self.waits, event.host, event.communicate_s)
        self.step = Figure(event.step_s) if self.step is None else self.step.with_measured(event.step_s)
        return self._look(now_s)

    def _time_passed(self, now_s: float) -> Sequence[TunerAction]:
        if self.wish is not None and not self.wish.granted and now_s - self.wish.asked_s > ANSWER_S:
            return self._answered(WishAnswered(self.wish.ask, "nobody answered"), now_s)
        return []

    def paces(self, now_s: float) -> list[HostPace]:
        """The hosts as the model sees them. A host that computes nothing is like the median of the others; a card that
        seems much slower than what a step needed of it while its processes waited is as fast as that. KeyError when
        one lacks a figure."""
        passes, cards = told_apart(self.passes, REPORTS_MIN), told_apart(self.cards, REPORTS_MIN)
        middle = sorted(passes.values())[len(passes) // 2]
        job, division = self.divided(), self.division()
        found = []
        for host in sorted(self.hosts()):
            waits, processes = self.waits.get(host), self.now.hosts.get(host, HostNow(0, 0)).processes
            carried = card_bytes(job, division[host]) / waits.mean if waits is not None else 0.0
            may_end = host != self.now.ends_never if processes else now_s >= self._full.get(host, 0.0)
            pass_s = passes.get(host, middle)
            card = carried if carried > (1 + ALIKE) * cards[host] else cards[host]
            found.append(HostPace(host, pass_s, card, processes, may_end))
        return found

    def divided(self) -> DividedJob:
        return DividedJob(self.ranks, len(self.tensors.used), float(self.tensors.total_bytes))

    # ---- deciding ----------------------------------------------------------------------------------------------------

    def _look(self, now_s: float) -> Sequence[TunerAction]:
        if self.left_alone or self.step is None:
            return []
        if self.wish is not None:
            return self._judge() if self.wish.granted and self.wish.config == self.now.config else []
        if now_s < self._not_before_s or self._untimed():
            return []
        lacks = self.lacks()
        if lacks:
            return self._say_once("tuner lacks", lacks)
        self._not_before_s = now_s + REST_S
        return self._decide(self.step, now_s)

    def _decide(self, step: Figure, now_s: float) -> Sequence[TunerAction]:
        job, paces, present, measured_s = self.divided(), self.paces(now_s), self.division(), step.mean
        wanted = best_division(job, paces, present, self.now.processes_min)
        predicted_s = predicted(measured_s, step_s(job, paces, present), step_s(job, paces, wanted))
        self._remember(present, measured_s, now_s, paces)
        for known in self.known:
            if known.division == wanted:
                predicted_s = known.step_s
        for known in self.known:
            if known.step_s < predicted_s and may_be(paces, known.division, self.now.processes_min):
                wanted, predicted_s = known.division, known.step_s
        self.best = wanted, predicted_s
        if wanted == present or not self._is_worth_it(step, predicted_s):
            best = "no division is better" if wanted == present else f"the best would take {short(predicted_s)}"
            return self._say_once("tuner keeps", f"{short(measured_s)} a step; {best}", told(present))
        self._wishes += 1
        ask = f"{self.job}/{self.now.epoch}/{self._boot}{self._wishes}"
        self.wish = TunerWish(ask, self.now.config + 1, now_s, wanted, measured_s, predicted_s)
        why = f"{told(wanted)}: {short(predicted_s)} a step predicted, {short(measured_s)} measured before"
        return [Publish(ArrangementsWanted(ask, {self.job: self._arrangement(wanted)}, BY, why))]

    def _is_worth_it(self, step: Figure, predicted_s: float) -> bool:
        return is_worth_it(step.mean, predicted_s, self.gain_min) and step.mean - predicted_s > (
            ERRORS_OF_STEP * step.error
        )

    def _remember(self, division: Division, measured_s: float, now_s: float, paces: Sequence[HostPace]) -> None:
        others = [each for each in self.known if each.holds(paces, now_s) and each.division != division]
        self.known = [*others, Known(division, measured_s, now_s + KNOWN_S, paces)][-KNOWN_MAX:]

    def _arrangement(self, wanted: Division) -> WantedArrangement:
        shares = {host: part.ranks for host, part in wanted.items() if part.ranks}
        processes = {host: max(1, self.now.hosts.get(host, HostNow(0, 0)).processes) for host in shares}
        stay = processes == {host: now.processes for host, now in self.now.hosts.items()}
        owners = owners_of(wanted, self.now.owners, self.tensors.used)
        return WantedArrangement(
            self.now.epoch,
            self.now.config,
            {} if stay else processes,
            shares,
            None if owners == self.now.owners else owners,
        )

    def _answered(self, event: WishAnswered, now_s: float) -> Sequence[TunerAction]:
        if self.wish is None or event.ask != self.wish.ask:
            return []
        if not event.refused:
            self.wish = msgspec.structs.replace(self.wish, granted=True)
            return []
        self.wish = None
        self._forget_steps()
        self._not_before_s = now_s + RETRY_S
        if event.full:
            self._full[event.full] = now_s + FULL_S
        return [self._note("tuner refused", f"{event.refused}; it measures again and asks in {RETRY_S:.0f} s")]

    # ---- checking ----------------------------------------------------------------------------------------------------

    def _judge(self) -> Sequence[TunerAction]:
        """Compare the prediction with what the new configuration takes, once enough steps are measured."""
        if self.wish is None or self.step is None or self._untimed():
            return []
        judged = Judged(self.wish.before_s, self.wish.predicted_s, max(JUDGED_S_MIN, self.step.mean))
        self.wish = None
        self.judged = [*self.judged, judged][-JUDGED_KEPT:]
        self.wrong = self.wrong + 1 if judged.is_wrong else 0
        off = 100 * (judged.predicted_s / judged.measured_s - 1)
        said = (
            f"predicted {short(judged.predicted_s)} a step, measured {short(judged.measured_s)} ({off:+.0f} %); "
            f"before {short(judged.before_s)}"
        )
        notes = [self._note("tuned", said)]
        if self.wrong >= WRONG_MAX:
            self.left_alone = True
            why = f"{WRONG_MAX} predictions in a row were wrong by more than {WRONG:.0%}"
            notes.append(self._note("tuner gives up", f"{why}: the job is left alone; agentctl tune {self.job} again"))
        return notes

    def _say_once(self, event: str, reason: str, key: str = "") -> Sequence[TunerAction]:
        """Note this unless the same was noted last. `key`: what counts as the same; empty: the reason."""
        key = key or reason
        if self._said.get(event) == key:
            return []
        self._said[event] = key
        return [self._note(event, reason)]

    def _note(self, event: str, reason: str) -> LogEvent:
        return LogEvent(subject=self.job, event=event, reason=reason)


def predicted(measured_s: float, model_s: float, then_s: float) -> float:
    """Seconds of a step after a change from `model_s` to `then_s` in the model. What the model does not know of the
    measured step stays; a model that overrates the step (its parts overlap) is scaled."""
    return then_s + measured_s - model_s if measured_s >= model_s else then_s * measured_s / model_s


def told(division: Division) -> str:
    """A division in words: `h0 5 ranks 2 tables, h1 3 ranks 0 tables`."""
    return ", ".join(f"{host} {part.ranks} ranks {part.tables} tables" for host, part in sorted(division.items()))

"""The tuner of one elastic job, as a story: what hosts measure, what it asks for, whether it was right."""

import random
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from covey.core.events import LogEvent, Publish
from covey.core.ids import HostId, JobId
from plugins.facts import ArrangementsWanted, WantedArrangement
from plugins.tuner.machine.tuner import (
    ANSWER_S,
    FULL_S,
    REPORTS_MIN,
    REST_S,
    RETRY_S,
    WRONG_MAX,
    HostMeasured,
    HostNow,
    JobDivided,
    TensorsNow,
    Tuner,
    TunerAction,
    TunerTicked,
    WishAnswered,
    predicted,
)
from plugins.tuner.policy.division import HostPace, HostPart, step_s

JOB = JobId("j1")
H = [HostId(f"h{n}") for n in range(6)]
MB = 1_000_000


class Rack:
    """Hosts as they really are, with a tuner that hears what they measure; its wishes are obeyed when they are
    granted. The job needs all processes that it has, unless fewest are said."""

    def __init__(self, hosts: Sequence[HostPace], ranks: int, tables: int, processes_min: int = 0) -> None:
        self.real = {pace.host: pace for pace in hosts}
        count = len(hosts)
        each = {pace.host: HostNow(pace.processes, len(range(at, ranks, count))) for at, pace in enumerate(hosts)}
        owners = tuple(hosts[table % count].host for table in range(tables))
        self.tuner = Tuner(JOB, JobDivided(1, 0, each, owners, hosts[0].host, processes_min or count))
        size = MB // 10
        self.size, self.now_s, self.overhead_s, self.rng, self.noise = size, 0.0, 0.002, random.Random(1), 0.0
        self.tell(TensorsNow(size, tuple(range(tables))))

    def tell(self, event: object) -> list[TunerAction]:
        done = list(self.tuner.handle(event, self.now_s))  # type: ignore[arg-type]
        self.tuner.check()
        return done

    def step_s(self) -> float:
        return step_s(self.tuner.divided(), list(self.real.values()), self.tuner.division()) + self.overhead_s

    def report(self, without: Sequence[HostId] = (), times: float = 1.0) -> list[TunerAction]:
        """All hosts report what two seconds were like."""
        self.now_s += 2.0
        done: list[TunerAction] = []
        for host in sorted(self.tuner.hosts() - set(without)):
            pace, noisy = self.real[host], 1 + self.noise * self.rng.uniform(-1, 1)
            now = self.tuner.now
            steps = 20 if host in now.hosts else 0
            took_s = times * self.step_s()
            heard = HostMeasured(
                host, now.epoch, now.config, steps, took_s, pace.pass_s * noisy, took_s / 2, pace.card_bytes_per_s
            )
            done += self.tell(heard)
        return done

    def reports(self, count: int, **how: float) -> list[TunerAction]:
        return [action for _ in range(count) for action in self.report(times=how.get("times", 1.0))]

    def until_wish(self) -> ArrangementsWanted:
        for _ in range(60):
            if found := wishes(self.report()):
                return found[0]
        raise AssertionError(f"nothing was asked for; the tuner {self.tuner.doing}")

    def grant(self, asked: ArrangementsWanted) -> list[TunerAction]:
        done = self.obey(asked.jobs[JOB])
        return done + self.tell(WishAnswered(asked.ask, ""))

    def obey(self, wanted: WantedArrangement) -> list[TunerAction]:
        now = self.tuner.now
        hosts = {
            host: HostNow(wanted.processes.get(host, now.hosts.get(host, HostNow(1, 0)).processes), ranks)
            for host, ranks in wanted.shares.items()
        }
        owners = now.owners if wanted.owners is None else wanted.owners
        return self.tell(msgspec.structs.replace(now, config=now.config + 1, hosts=hosts, owners=owners))


def wishes(actions: Sequence[TunerAction]) -> list[ArrangementsWanted]:
    facts = [action.fact for action in actions if isinstance(action, Publish)]
    return [fact for fact in facts if isinstance(fact, ArrangementsWanted)]


def notes(actions: Sequence[TunerAction], event: str) -> list[str]:
    return [action.reason for action in actions if isinstance(action, LogEvent) and action.event == event]


def alike(count: int) -> list[HostPace]:
    return [HostPace(host, 0.01, 10.0 * MB, 1) for host in H[:count]]


def slow_third() -> list[HostPace]:
    return [*alike(2), HostPace(H[2], 0.04, 10.0 * MB, 1)]


def test_a_slow_host_is_asked_to_carry_fewer_ranks_and_both_times_are_noted() -> None:
    """The division changes while the job runs. Reference: §3.3.1."""
    rack = Rack(slow_third(), 12, 3)
    before_s = rack.step_s()
    asked = rack.until_wish()
    wanted = asked.jobs[JOB]
    assert asked.by == "the tuner" and (wanted.epoch, wanted.replaces) == (1, 0)
    assert wanted.shares[H[2]] < 4 and sum(wanted.shares.values()) == 12 and wanted.processes == {}
    rack.grant(asked)
    said = notes(rack.reports(REPORTS_MIN + 1), "tuned")
    assert len(said) == 1 and "predicted" in said[0] and "measured" in said[0] and rack.tuner.wrong == 0
    assert rack.step_s() < before_s * 0.95
    assert rack.tuner.judged[0].measured_s == pytest.approx(rack.step_s())


def test_nothing_is_asked_before_every_host_has_timed_enough_after_its_first_report() -> None:
    rack = Rack(slow_third(), 12, 3)
    for _ in range(REPORTS_MIN):
        assert not wishes(rack.report())
    late = H[1]
    for _ in range(10):
        assert rack.report(without=[late]) == [], "that a host still times its steps is nothing to note"
    assert "h1" in rack.tuner.lacks() and "steps" in rack.tuner.lacks()


def test_a_card_of_unknown_speed_is_named_once_and_nothing_is_decided() -> None:
    rack = Rack(slow_third(), 12, 3)
    rack.real[H[1]] = HostPace(H[1], 0.01, 10.0 * MB, 1)
    unknown = msgspec.structs.replace(rack.real[H[1]], card_bytes_per_s=0.0)
    sure = dict(rack.real)
    done: list[TunerAction] = []
    for _ in range(20):
        rack.now_s += 2.0
        for host in H[:3]:
            pace = unknown if host == H[1] else sure[host]
            done += rack.tell(HostMeasured(host, 1, 0, 20, 0.2, pace.pass_s, 0.1, pace.card_bytes_per_s))
    assert not wishes(done) and len(notes(done, "tuner lacks")) == 1
    assert "the card of h1" in notes(done, "tuner lacks")[0]


def test_a_host_whose_name_has_the_word_steps_in_it_is_named_too() -> None:
    odd = HostId("steps1")
    rack = Rack([*alike(2), HostPace(odd, 0.04, 0.0, 1)], 12, 3)
    rack.step_s = lambda: 0.2  # type: ignore[method-assign]
    assert notes(rack.reports(20), "tuner lacks") == [
        "the bytes per second that the card of steps1 carries are not known"
    ]


def test_equal_hosts_whose_times_differ_by_chance_are_left_as_they_are() -> None:
    rack = Rack(alike(4), 12, 4)
    rack.noise = 0.1
    done = rack.reports(400)
    assert not wishes(done) and len(notes(done, "tuner keeps")) == 1


def test_what_saves_less_than_five_percent_is_kept() -> None:
    hosts = [*alike(2), HostPace(H[2], 0.0103, 10.0 * MB, 1)]
    rack = Rack(hosts, 12, 3)
    assert not wishes(rack.reports(50))


def test_a_refused_wish_is_asked_again_later_with_fresh_figures() -> None:
    rack = Rack(slow_third(), 12, 3)
    asked = rack.until_wish()
    at_s = rack.now_s
    said = rack.tell(WishAnswered(asked.ask, "j1: another change came first"))
    assert "another change came first" in notes(said, "tuner refused")[0]
    assert rack.tuner.steps == {} and rack.tuner.wish is None
    again = rack.until_wish()
    assert again.ask != asked.ask and rack.now_s - at_s >= RETRY_S


def test_a_wish_that_nobody_answers_counts_as_refused() -> None:
    rack = Rack(slow_third(), 12, 3)
    rack.until_wish()
    assert not wishes(rack.reports(5)), "one at a time"
    rack.now_s += ANSWER_S
    assert notes(rack.tell(TunerTicked()), "tuner refused") and rack.tuner.wish is None


def test_a_division_that_was_tried_and_took_longer_is_not_tried_again_for_a_while() -> None:
    """Whatever the model promises of it: what was measured counts."""
    rack = Rack(slow_third(), 12, 3)
    first = rack.until_wish()
    rack.grant(first)
    rack.overhead_s = 0.5
    back = rack.until_wish()
    assert back.jobs[JOB].shares == dict.fromkeys(H[:3], 4), "the division before was better"
    rack.grant(back)
    rack.overhead_s = 0.002
    assert not any(asked.jobs[JOB].shares == first.jobs[JOB].shares for asked in wishes(rack.reports(60)))


def test_a_script_that_pushes_one_more_tensor_is_measured_anew() -> None:
    """What a division took with fewer tables, or fewer bytes, says nothing about the tables of now."""
    rack = Rack(slow_third(), 12, 4)
    rack.tell(TensorsNow(rack.size, (0, 1, 2)))
    rack.grant(rack.until_wish())
    rack.reports(REPORTS_MIN + 1)
    assert rack.tuner.known
    rack.tell(TensorsNow(2 * rack.size, (0, 1, 2, 3)))
    assert rack.tuner.known == [] and rack.tuner.steps == {} and rack.tuner.step is None
    done = rack.reports(30, times=2.0)
    assert all(sum(part.tables for part in known.division.values()) == 4 for known in rack.tuner.known)
    assert rack.tuner.known and not notes(done, "tuner gives up")


def test_a_prediction_is_not_compared_with_steps_that_push_other_tensors() -> None:
    rack = Rack(slow_third(), 12, 4)
    rack.grant(rack.until_wish())
    said = rack.tell(TensorsNow(3 * rack.size, (0, 1, 2, 3)))
    assert "not compared" in notes(said, "tuner")[0] and rack.tuner.wish is None
    assert not notes(rack.reports(REPORTS_MIN + 1, times=2.0), "tuned")


def test_a_report_that_repeats_the_bytes_forgets_nothing() -> None:
    rack = Rack(slow_third(), 12, 3)
    rack.reports(3)
    steps = dict(rack.tuner.steps)
    assert rack.tell(TensorsNow(rack.size, (0, 1, 2))) == [] and rack.tuner.steps == steps != {}


def test_a_gain_within_what_chance_explains_is_not_worth_a_change() -> None:
    rack = Rack(slow_third(), 12, 3)
    done: list[TunerAction] = []
    for at in range(60):
        done += rack.report(times=3.0 if at % 2 else 0.5)
    assert not wishes(done)


def test_an_answer_to_another_wish_changes_nothing() -> None:
    rack = Rack(slow_third(), 12, 3)
    rack.until_wish()
    assert rack.tell(WishAnswered("other", "no")) == [] and rack.tuner.wish is not None


def test_three_wrong_predictions_in_a_row_and_the_job_is_left_alone() -> None:
    """The paper has no word for this; it compares predictions and measured epochs. Reference: §3.4.3."""
    rack = Rack(slow_third(), 12, 3)
    done: list[TunerAction] = []
    for time in range(WRONG_MAX):
        asked = rack.until_wish()
        rack.grant(asked)
        done = rack.reports(REPORTS_MIN + 1, times=2.0)
        assert notes(done, "tuned") and rack.tuner.wrong == time + 1
        slow = H[time]
        rack.real = {at: HostPace(at, 0.04 if at == slow else 0.01, 10.0 * MB, 1) for at in H[:3]}
    assert "left alone" in notes(done, "tuner gives up")[0] and "agentctl tune j1" in notes(done, "tuner gives up")[0]
    assert not wishes(rack.reports(100)) and rack.tuner.doing.startswith("leaves the job alone")


def test_a_right_prediction_forgives_those_before() -> None:
    rack = Rack(slow_third(), 12, 3)
    rack.grant(rack.until_wish())
    rack.reports(REPORTS_MIN + 1, times=2.0)
    assert rack.tuner.wrong == 1
    rack.real[H[2]], rack.real[H[0]] = HostPace(H[2], 0.01, 10.0 * MB, 1), HostPace(H[0], 0.04, 10.0 * MB, 1)
    rack.grant(rack.until_wish())
    rack.reports(REPORTS_MIN + 1)
    assert rack.tuner.wrong == 0 and len(rack.tuner.judged) == 2


def test_what_was_measured_in_another_configuration_does_not_count() -> None:
    rack = Rack(slow_third(), 12, 3)
    before = HostMeasured(H[0], 1, 0, 20, 9.0, 9.0, 0.1, 1.0 * MB)
    rack.tell(msgspec.structs.replace(rack.tuner.now, config=1))
    assert rack.tell(before) == [] and rack.tuner.passes == {} and rack.tuner.cards == {}
    rack.tell(msgspec.structs.replace(rack.tuner.now, config=0))
    assert rack.tuner.now.config == 1, "an older arrangement is old news"


def test_a_change_by_others_meanwhile_is_said_and_not_judged() -> None:
    rack = Rack(slow_third(), 12, 3)
    rack.grant(rack.until_wish())
    said = rack.tell(msgspec.structs.replace(rack.tuner.now, config=rack.tuner.now.config + 1))
    assert "not compared" in notes(said, "tuner")[0] and rack.tuner.wish is None
    assert not notes(rack.reports(REPORTS_MIN + 1), "tuned")


def test_hosts_that_leave_take_their_figures_along() -> None:
    rack = Rack(slow_third(), 12, 3)
    rack.reports(3)
    left = {H[0]: HostNow(1, 6), H[1]: HostNow(1, 6)}
    rack.tell(msgspec.structs.replace(rack.tuner.now, config=1, hosts=left, owners=(H[0], H[1], H[0])))
    assert H[2] not in rack.tuner.passes and H[2] not in rack.tuner.cards and rack.tuner.ranks == 12


def test_a_host_becomes_a_server_and_its_process_ends() -> None:
    rack = Rack([*alike(3), HostPace(H[3], 1.0, 1000.0 * MB, 1)], 12, 1, processes_min=3)
    wanted = rack.until_wish().jobs[JOB]
    assert H[3] not in wanted.shares and wanted.processes == dict.fromkeys(H[:3], 1)
    assert wanted.owners == (H[3],)


def mere_server() -> Rack:
    """A job on three equal hosts, of which the third only owns a table."""
    rack = Rack(alike(3), 12, 3, processes_min=2)
    hosts: Mapping[HostId, HostNow] = {H[0]: HostNow(1, 8), H[1]: HostNow(1, 4)}
    rack.tell(msgspec.structs.replace(rack.tuner.now, config=1, hosts=hosts))
    rack.real[H[2]] = HostPace(H[2], 0.01, 10.0 * MB, 0)
    return rack


def test_a_mere_server_gets_a_process_again_where_that_is_faster() -> None:
    wanted = mere_server().until_wish().jobs[JOB]
    assert wanted.shares == dict.fromkeys(H[:3], 4) and wanted.processes == dict.fromkeys(H[:3], 1)


def test_a_host_that_has_no_room_for_a_process_is_not_asked_again_for_some_minutes() -> None:
    rack = mere_server()
    rack.tell(WishAnswered(rack.until_wish().ask, f"{H[2]} has no room for j1: no free GPU", H[2]))
    refused_s = rack.now_s
    asked = rack.until_wish()
    assert set(asked.jobs[JOB].shares) == {H[0], H[1]} and asked.jobs[JOB].processes == {}
    while H[2] not in asked.jobs[JOB].processes:
        assert rack.now_s < refused_s + 2 * FULL_S
        rack.tell(WishAnswered(asked.ask, "another one was faster"))
        asked = rack.until_wish()
    assert rack.now_s >= refused_s + FULL_S and asked.jobs[JOB].processes == dict.fromkeys(H[:3], 1)


def test_a_division_that_was_faster_is_not_asked_for_while_a_host_of_it_has_no_room() -> None:
    rack = Rack(alike(3), 12, 3, processes_min=2)
    while not rack.tuner.known:
        rack.report()
    rack.tell(msgspec.structs.replace(rack.tuner.now, config=1, hosts={H[0]: HostNow(1, 8), H[1]: HostNow(1, 4)}))
    rack.real[H[2]] = HostPace(H[2], 0.01, 10.0 * MB, 0)
    asked = rack.until_wish()
    assert (
        asked.jobs[JOB].shares
        == dict.fromkeys(H[:3], 4)
        == {h: p.ranks for h, p in rack.tuner.known[0].division.items()}
    )
    rack.tell(WishAnswered(asked.ask, f"{H[2]} has no room for j1: no free GPU", H[2]))
    assert set(rack.until_wish().jobs[JOB].shares) == {H[0], H[1]}


def test_hosts_that_own_tables_without_tensors_are_not_waited_for() -> None:
    rack = Rack(slow_third(), 12, 4)
    rack.tell(msgspec.structs.replace(rack.tuner.now, config=1, owners=(*rack.tuner.now.owners[:3], H[5])))
    rack.tell(TensorsNow(MB, (0, 1, 2)))
    assert H[5] not in rack.tuner.hosts()
    wanted = rack.until_wish().jobs[JOB]
    assert wanted.owners is None or wanted.owners[3] == H[5]


def test_one_host_is_nothing_to_divide() -> None:
    rack = Rack(alike(1), 4, 1)
    assert not wishes(rack.reports(20)) and "one host" in rack.tuner.lacks()


def test_decisions_have_rest_between_them() -> None:
    rack = Rack(alike(3), 12, 3)
    while rack.tuner.best is None:
        rack.report()
    first, decided_s = rack.tuner.best, rack.now_s
    while rack.now_s + 2.0 < decided_s + REST_S:
        rack.report()
        assert rack.tuner.best is first
    rack.report()
    assert rack.tuner.best is not first


def test_what_the_model_does_not_know_of_a_step_stays() -> None:
    assert predicted(1.0, 0.8, 0.5) == pytest.approx(0.7)
    assert predicted(0.5, 1.0, 0.6) == pytest.approx(0.3), "a model that overrates is scaled"


def test_a_card_is_no_slower_than_what_a_step_needed_of_it() -> None:
    rack = Rack(alike(3), 12, 3)
    rack.real = {host: msgspec.structs.replace(pace, card_bytes_per_s=1e3) for host, pace in rack.real.items()}
    for _ in range(4):
        rack.now_s += 2.0
        for host in H[:3]:
            rack.tell(HostMeasured(host, 1, 0, 20, 0.1, 0.01, 0.05, 1e3))
    part = HostPart(4, 1)
    needed = part.ranks * 2 * rack.size / 3 / 0.05
    assert all(pace.card_bytes_per_s == pytest.approx(needed) for pace in rack.tuner.paces(rack.now_s))

"""An upgrade of a gang: all ranks or none, whatever order the answers come in and whoever falls silent."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from covey.core import HostId, JobId, Send
from plugins.sharing.machine.gpu import PROMISE_S
from plugins.sharing.machine.upgrade import (
    ASK_S,
    UNDO_S,
    UpgradeAnswered,
    UpgradeDone,
    UpgradeEvent,
    Upgrades,
    UpgradeTick,
    UpgradeWanted,
)
from plugins.sharing.messages import AskUpgrade, CanUpgrade, Kind, Retag

JOB = JobId("j")
GPUS = {HostId("a"): ("GPU-1",), HostId("b"): ("GPU-2", "GPU-3")}


class Home:
    def __init__(self) -> None:
        self.machine, self.now_s = Upgrades(), 0.0
        self.tags: dict[str, Kind] = {}

    def tell(self, event: UpgradeEvent, after_s: float = 0.0) -> list[Any]:
        self.now_s += after_s
        actions = list(self.machine.handle(event, self.now_s))
        self.machine.check()
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Retag):
                self.tags[action.to] = action.message.kind
        return actions

    def want(self, epoch: int = 1, kind: Kind = "guaranteed") -> list[Any]:
        return self.tell(UpgradeWanted(JOB, epoch, kind, GPUS))

    def say(self, host: str, refused: str = "", epoch: int = 1) -> list[Any]:
        return self.tell(UpgradeAnswered(HostId(host), CanUpgrade(JOB, epoch, refused)))


def done(actions: list[Any]) -> list[str]:
    return [action.refused for action in actions if isinstance(action, UpgradeDone)]


def test_nobody_is_upgraded_before_everybody_can() -> None:
    """Reference: AntMan §3.3, Job upgrade."""
    home = Home()
    asked = home.want()
    assert [(a.to, a.message) for a in asked] == [(host, AskUpgrade(JOB, 1, gpus)) for host, gpus in GPUS.items()]
    home.say("a")
    assert home.tags == {}
    home.say("b")
    assert home.tags == {"a": "guaranteed", "b": "guaranteed"}
    assert done(home.tell(UpgradeTick(), 16)) == [""] and home.machine.asked == {}


def test_silence_is_waited_out_to_the_end_and_so_is_a_no_that_comes_late() -> None:
    home = Home()
    home.want()
    home.say("a")
    assert home.tell(UpgradeTick(), ASK_S) == [], "the others may still answer"
    assert done(home.tell(UpgradeTick(), 0.1)) == ["no answer from b within 5 s"]
    home.want(2)
    home.say("a", epoch=2)
    home.say("b", epoch=2)
    assert home.tell(UpgradeTick(), UNDO_S) == [] and list(home.machine.asked) == [JOB]
    home.say("b", "its device is gone", epoch=2)
    assert home.tags == {"a": "opportunistic", "b": "opportunistic"} and home.machine.asked == {}


def test_one_no_is_enough_and_silence_is_a_no() -> None:
    home = Home()
    home.want()
    home.say("a")
    assert done(home.say("b", "no room")) == ["b: no room"]
    home.want(2)
    home.say("a", epoch=2)
    assert done(home.tell(UpgradeTick(), ASK_S + 1)) == ["no answer from b within 5 s"]
    home.say("b", epoch=2)
    assert home.tags == {"a": "opportunistic", "b": "opportunistic"} and home.machine.asked == {}


def test_who_was_guaranteed_in_an_older_epoch_is_not_when_the_next_is_refused() -> None:
    """All ranks or none: `UpgradeDone` says that all are opportunistic, so they are. Reference: AntMan §3.3, Job
    upgrade."""
    home = Home()
    home.want()
    home.say("a")
    home.say("b")
    assert home.tags == {"a": "guaranteed", "b": "guaranteed"}
    home.want(2)
    home.say("a", epoch=2)
    assert done(home.say("b", "no room", epoch=2)) == ["b: no room"]
    assert home.tags == {"a": "opportunistic", "b": "opportunistic"}


def test_a_promise_that_was_broken_takes_all_back() -> None:
    home = Home()
    home.want()
    home.say("a")
    home.say("b")
    assert done(home.say("b", "the device is gone")) == ["b: the device is gone"]
    assert home.tags == {"a": "opportunistic", "b": "opportunistic"}


def test_answers_of_another_epoch_or_host_do_not_count_and_a_new_wish_replaces_one() -> None:
    home = Home()
    home.want(5)
    home.say("a", epoch=4)
    home.say("c", epoch=5)
    assert home.want(4) == []
    home.say("b", epoch=5)
    assert home.tags == {}
    assert done(home.want(6, "opportunistic")) == [""]
    assert home.tags == {"a": "opportunistic", "b": "opportunistic"} and home.machine.asked == {}


def test_hosts_keep_their_word_for_longer_than_the_home_waits() -> None:
    assert PROMISE_S >= 2 * ASK_S


@given(
    st.lists(
        st.one_of(
            st.builds(
                UpgradeAnswered,
                st.sampled_from(["a", "b", "c"]).map(HostId),
                st.builds(CanUpgrade, st.just(JOB), st.integers(0, 3), st.sampled_from(["", "", "", "no"])),
            ),
            st.builds(
                UpgradeWanted,
                st.just(JOB),
                st.integers(0, 3),
                st.sampled_from(["guaranteed", "opportunistic"]),
                st.just(GPUS),
            ),
            st.just(UpgradeTick()),
        ),
        max_size=40,
    ),
    st.sampled_from([0.0, 1.0, 6.0]),
)
def test_all_hosts_are_told_the_same_whatever_happens(events: list[UpgradeEvent], after_s: float) -> None:
    home = Home()
    for event in events:
        home.tell(event, after_s)
        assert len(set(home.tags.values())) <= 1 and (not home.tags or set(home.tags) == {"a", "b"})

"""A program starts even where it has little time: on a busy machine, and beside many others that start."""

import random

import pytest

from chaos.rackworld import SimRack
from chaos.stories import lenders, train, working
from plugins.starting import LISTEN_S_MAX, LOAD_S_MAX, LOOK_S, PAUSE_MAX_S, PAUSE_S, STEADY_S, Pauses, StartPatience


def looks(patience: StartPatience, loaded: bool) -> int:
    return next(number for number in range(100_000) if not patience.looked(loaded)) + 1


def test_a_start_that_loads_has_minutes_and_one_that_has_loaded_has_seconds() -> None:
    patience = StartPatience()
    assert looks(patience, loaded=False) * LOOK_S == pytest.approx(LOAD_S_MAX)
    assert looks(patience, loaded=True) * LOOK_S == pytest.approx(LISTEN_S_MAX)


@pytest.mark.parametrize("seed", range(5))
def test_pauses_grow_with_failed_starts_to_half_a_minute_and_a_long_life_ends_that(seed: int) -> None:
    """Only a long life resets the pauses."""
    pauses = Pauses(random.Random(seed))
    drawn = [pauses.after(lived_s=0.0 if number % 2 else STEADY_S - 1) for number in range(12)]
    for number, pause_s in enumerate(drawn):
        assert 0.5 <= pause_s / min(PAUSE_S * 2**number, PAUSE_MAX_S) <= 1.0
    assert pauses.after(STEADY_S) <= PAUSE_S < pauses.after(0.0) * 2


def test_hosts_whose_starts_failed_together_do_not_start_together() -> None:
    assert len({Pauses(random.Random(seed)).after(0.0) for seed in range(30)}) == 30


@pytest.mark.parametrize("load_s", [25.0, 100.0])
def test_programs_that_take_long_to_load_are_started_once_and_come_up(load_s: float) -> None:
    """Like thirty agents on two cores: no program is killed while it loads, so all of them arrive."""
    with SimRack(3, hosts=3) as rack:
        for host in rack.hosts.values():
            host.load_s = load_s
        rack.start()
        rack.run(3.0)
        wake(rack)
        rack.run(load_s / 2)
        first = {name: there(rack, name) for name in rack.hosts}
        rack.run(load_s / 2 + 5)
        for name in rack.hosts:
            assert len(first[name]) == 2
            assert there(rack, name) == first[name]
            assert rack.agents[name].plugins["memory"].lending.process.ready.is_set()  # type: ignore[attr-defined]


def wake(rack: SimRack) -> None:
    """Start the programs of each host, as the first loan and the first offer do."""
    for name in rack.hosts:
        lending = rack.plugin(name, "memory").lending
        lending.wake(lending.process)
        rack.plugin(name, "aggregator").wake()


def test_no_program_is_started_before_something_is_borrowed_or_summed() -> None:
    """The first use starts a program. (Ranks that own their tables need none.)"""
    with SimRack(5, hosts=3, settings={"aggregator": {"direct": "never"}}) as rack:
        rack.start()
        rack.run(30.0)
        assert [there(rack, name) for name in rack.hosts] == [[], [], []]
        rack.pager("h1", "vol", 1 << 20, 60.0)
        rack.until(lambda: bool(lenders(rack, "h1")), 40.0, "a slab is lent")
        assert {name for name in rack.hosts if rack.hosts[name].find("slabd")} >= set(lenders(rack, "h1"))
        assert not rack.hosts["h1"].find("slabd"), "h1 lends nothing"
        train(rack, rounds=40)
        rack.until(lambda: any(host.find("aggd") for host in rack.hosts.values()), 60.0, "somebody sums")
        summing = {name for name, host in rack.hosts.items() if host.find("aggd")}
        assert summing <= set(working(rack)), "each of the job's hosts may own a table of it, and no other sums"


def there(rack: SimRack, name: str) -> list[int]:
    """Process ids of the programs of a host."""
    return [process.id.pid for program in ("aggd", "slabd") for process in rack.hosts[name].find(program)]


@pytest.mark.long
def test_a_program_that_never_listens_is_killed_and_the_next_tries_are_ever_rarer() -> None:
    with SimRack(4, hosts=3) as rack:
        rack.start()
        rack.run(3.0)
        wake(rack)
        rack.run(3.0)
        rack.hosts["h2"].load_s = 1e6
        for program in ("aggd", "slabd"):
            rack.hosts["h2"].find(program)[0].signal(9)
        pids: set[int] = set()
        for _ in range(400):
            rack.run(1.0)
            pids |= {process.id.pid for process in rack.hosts["h2"].find("slabd")}
        assert 2 <= len(pids) <= 400 / LOAD_S_MAX + 1

from agent.runtime.bus import Bus
from covey.core.events import Fact


class Counted(Fact, frozen=True):
    number: int


def test_a_fact_told_while_another_is_heard_waits_its_turn() -> None:
    bus = Bus()
    first: list[int] = []
    second: list[int] = []

    def echo(fact: Fact) -> None:
        assert isinstance(fact, Counted)
        first.append(fact.number)
        if fact.number == 1:
            bus.publish(Counted(2))

    def listen(fact: Fact) -> None:
        assert isinstance(fact, Counted)
        second.append(fact.number)

    bus.listen(echo)
    bus.listen(listen)
    bus.publish(Counted(1))
    assert first == [1, 2]
    assert second == [1, 2], "every listener hears the same order"

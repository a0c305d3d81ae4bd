"""One process that takes Blocks from a real giver: what it holds up meanwhile, and what stays when ranks go on."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from covey.core.ids import HostId
from covey.job.blocks import exchange as exchanges
from covey.job.blocks.block_store import BlockStore
from covey.job.blocks.block_wire import AboutBlocks, BlockArrays, BlocksHeld, BlocksWanted, encode_blocks
from covey.job.blocks.data_blocks import DataBlocks, added, declared_blocks
from covey.job.blocks.exchange import Exchange, ExchangingProcess
from covey.job.blocks.giving import GivingBlocks
from covey.tensors.numbers.telling import Tell, ToldByRank
from covey.wire.job import AggregatorAt, Carries
from tests.covey.test_carrying import JOB
from tests.covey.test_data_blocks import content

SECRET = b"s" * 16
OWNER = AggregatorAt(JOB, 5, HostId("h1"), "127.0.0.1:9", SECRET)
RANKS = 2


class Hearing:
    """Other ranks, which hear what is told and say nothing."""

    def __init__(self) -> None:
        self.told: list[Tell] = []

    def tell(self, said: Tell) -> None:
        self.told.append(said)


class Taker:
    """Process 1 of a job of two ranks, which begins later, and process 0, which gives it its Blocks."""

    def __init__(self, blocks: int, store: BlockStore) -> None:
        self.others, self.store = Hearing(), store
        self.said: list[str] = []
        me = ExchangingProcess("j1", 1, 1, RANKS, lambda: OWNER, self.said.append)
        self.exchange = Exchange(me, lambda: self.others)
        declared = declared_blocks("data", blocks, content, "1 MiB")
        self.data: DataBlocks = added(self.exchange, declared, content, RANKS, lambda: 1, lambda: store)
        self.taken: list[int] = []
        self.finds: Callable[[int], BlockArrays | None] = lambda block: {"": content(block)}
        self.gives = GivingBlocks(
            "j1", lambda epoch: SECRET, lambda _, block: self.finds(block), lambda _, block: self.taken.append(block)
        )

    def begin(self) -> None:
        """Rank 1 comes here, and process 0 says that it has all its Blocks."""
        self.exchange.carries(Carries(1, {0: (0,), 1: (1,)}))
        held = {"data": tuple(range(1, self.data.blocks, RANKS))}
        answer = encode_blocks(BlocksHeld(1, self.gives.address("127.0.0.1"), (), held))
        assert self.exchange.told(ToldByRank(0, AboutBlocks.ANSWER, 0, answer))

    def close(self) -> None:
        self.exchange.close()
        self.gives.close()


@pytest.fixture
def takers() -> Iterator[Callable[..., Taker]]:
    made: list[Taker] = []

    def make(blocks: int, store: BlockStore | None = None) -> Taker:
        made.append(Taker(blocks, store or BlockStore()))
        return made[-1]

    yield make
    for each in made:
        each.close()


class SlowStore(BlockStore):
    """A store that writes for as long as `meanwhile` takes."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self.meanwhile, self.order = meanwhile, list[str]()

    def put(self, block: int, arrays: BlockArrays) -> None:
        self.meanwhile()
        super().put(block, arrays)
        self.order.append("put")

    def close(self) -> None:
        self.order.append("closed")


def ends(call: Callable[[], object], within_s: float = 5.0) -> bool:
    """Whether another thread is through with this call in time."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(within_s)
    return not thread.is_alive()


def test_nobody_waits_for_a_block_that_is_being_written(takers: Callable[..., Taker]) -> None:
    """Neither the thread of the agent's link nor that of the tensors: no frame would be read meanwhile."""
    ended: list[bool] = []

    def meanwhile() -> None:
        question = encode_blocks(BlocksWanted(7, (1,)))
        ended.append(ends(lambda: taker.exchange.told(ToldByRank(0, AboutBlocks.QUESTION, 0, question)), 2.0))
        ended.append(ends(lambda: taker.exchange.carries(Carries(1, {0: (0,), 1: (1,)})), 2.0))

    taker = takers(3, SlowStore(meanwhile))
    taker.begin()
    assert (taker.data[1] == content(1)).all() and ended == [True, True]
    assert (taker.data.loaded, taker.data.moved) == (0, 1)


def test_what_is_written_comes_to_an_end_before_the_store_does(takers: Callable[..., Taker]) -> None:
    begun = threading.Event()

    def meanwhile() -> None:
        begun.set()
        while not taker.exchange._closed:
            time.sleep(0.001)
        time.sleep(0.1)  # so that a store which is not waited for is closed by now

    store = SlowStore(meanwhile)
    taker = takers(2, store)
    taker.begin()
    assert begun.wait(5.0)
    taker.exchange.close()
    assert store.order == ["put", "closed"]


def test_no_block_is_waited_for_when_a_process_ends(takers: Callable[..., Taker]) -> None:
    asked, never = threading.Event(), threading.Event()

    def finds(block: int) -> None:
        asked.set()
        never.wait(20.0)

    taker = takers(2)
    taker.finds = finds
    taker.begin()
    assert asked.wait(5.0)
    takes = list(taker.exchange._takes.values())
    began_s = time.monotonic()
    taker.exchange.close()
    assert time.monotonic() - began_s < 1.0 and not any(each.is_alive() for each in takes)
    never.set()
    assert taker.said == [], "people are not told of what a process that ends does not take"


def alone(blocks: int = 8, ranks: int = 4) -> Exchange:
    """Process 0 of a job, which has all Blocks of one set."""
    exchange = Exchange(ExchangingProcess("j1", 0, 0, ranks, lambda: None, lambda text: None), Hearing)
    added(exchange, declared_blocks("data", blocks, content, "1 MiB"), content, ranks, lambda: 0)
    for block in range(blocks):
        exchange.sets["data"].store.put(block, {"": content(block)})
    return exchange


def test_blocks_of_a_rank_that_goes_on_before_it_was_adopted_are_kept_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange = alone(ranks=2)
    exchange.carries(Carries(2, {0: (0, 1)}))
    exchange.carries(Carries(3, {0: (0,), 1: (1,)}))
    exchange.stepped((0,))
    exchange.stepped((0,))
    assert set(exchange.sets["data"].store) == set(range(8)), "process 1 may ask for them"
    monkeypatch.setattr(exchanges, "KEEP_S", -1.0)
    exchange.stepped((0,))
    assert set(exchange.sets["data"].store) == {0, 2, 4, 6}


def test_blocks_of_a_rank_that_goes_on_stay_while_it_is_carried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "KEEP_S", -1.0)
    exchange = alone(ranks=2)
    exchange.carries(Carries(2, {0: (0, 1)}))
    exchange.carries(Carries(3, {0: (0,), 1: (1,)}))
    for _ in range(3):
        exchange.stepped((0, 1))
    assert set(exchange.sets["data"].store) == set(range(8))
    exchange.let_go([1])
    exchange.stepped((0,))
    assert set(exchange.sets["data"].store) == {0, 2, 4, 6}


def test_what_was_given_is_kept_once_its_rank_has_come_back() -> None:
    """Process 1 has taken Block 1, and ended; process 2 is to have it next."""
    exchange = alone(ranks=2)
    exchange.carries(Carries(1, {0: (0,), 1: (1,)}))
    exchange._taken(exchange.sets["data"].declared.key, 1)
    exchange.carries(Carries(2, {0: (0, 1)}))
    exchange.carries(Carries(3, {0: (0,), 2: (1,)}))
    exchange.let_go([1])
    assert 1 in exchange.sets["data"].store


def test_a_block_whose_rank_has_gone_when_it_is_here_at_last_is_not_kept(
    takers: Callable[..., Taker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "KEEP_S", -1.0)
    went = threading.Event()

    def meanwhile() -> None:
        taker.exchange.carries(Carries(2, {0: (0, 1), 1: ()}))
        for _ in range(2):
            taker.exchange.stepped(())
        went.set()

    taker = takers(2, SlowStore(meanwhile))
    taker.begin()
    assert went.wait(5.0)
    taker.exchange.close()
    assert 1 not in taker.store and taker.data.moved == 0


class CountingStore(BlockStore):
    """A store that counts how often it is asked for a Block."""

    looks = 0

    def __contains__(self, block: int) -> bool:
        self.looks += 1
        return super().__contains__(block)


def test_taking_blocks_takes_time_in_proportion_to_their_number(takers: Callable[..., Taker]) -> None:
    """Who looks at all Blocks for each one holds a lock for seconds where there are thousands."""
    store, blocks = CountingStore(), 600
    taker = takers(2 * blocks, store)
    taker.begin()
    while taker.data.moved < blocks:
        time.sleep(0.001)
    assert store.looks < 12 * blocks


def test_a_block_that_rots_here_is_loaded_once_all_have_come(takers: Callable[..., Taker]) -> None:
    """Whoever gave it has forgotten it."""
    taker = takers(6)
    taker.begin()
    assert [k for k, _ in taker.data.of(1)] == [1, 3, 5] and taker.data.moved == 3
    while taker.exchange._takes:
        time.sleep(0.001)
    taker.store.drop(3)
    taker.finds = lambda block: None
    assert ends(lambda: taker.data[3], 2.0) and (taker.data[3] == content(3)).all()
    assert (taker.data.loaded, taker.data.moved) == (1, 3)


def test_the_block_that_the_script_waits_for_comes_first(takers: Callable[..., Taker]) -> None:
    asked: list[int] = []
    waited = threading.Event()

    def finds(block: int) -> BlockArrays:
        waited.wait(5.0)
        asked.append(block)
        return {"": content(block)}

    taker = takers(20)
    taker.finds = finds
    taker.begin()
    script = threading.Thread(target=taker.data.__getitem__, args=(15,))
    script.start()
    while taker.exchange._awaited is None:
        time.sleep(0.001)
    waited.set()
    script.join(5.0)
    assert 15 in asked[:2]

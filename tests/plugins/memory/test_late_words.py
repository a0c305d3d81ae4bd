"""Messages that come late, twice, about something else or from another host: each is about one epoch, one lender and
one question, and changes nothing beside that."""

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.ports.memory.pages import MemfdPages
from covey.core.events import Message, Undelivered
from covey.core.ids import HostId
from plugins.memory.datapath.lending.slab_store import SlabStore
from plugins.memory.datapath.spill.places import Places
from plugins.memory.datapath.volumes.members.member_lenders import MemberLenders
from plugins.memory.datapath.volumes.members.mirror_slab import MirrorSlab
from plugins.memory.datapath.wire.control import ListSlabs, OpenPlace, RegisterSlabFrame
from plugins.memory.datapath.wire.control_ends import ControlClient
from plugins.memory.machine.borrowing import events as b
from plugins.memory.machine.lending import events as le
from plugins.memory.machine.loan import LoanedSlab
from plugins.memory.messages import (
    Activity,
    CheckActivity,
    Done,
    Evict,
    Map,
    MrInfo,
    QueryMem,
    Renew,
    SlabRef,
    Unrenewed,
)
from plugins.memory.service.process import ByteProcess, ByteProgram
from tests.plugins.memory.ports import a_bench, replaces_a_method
from tests.plugins.memory.tale import ME, OTHERS, PAGE, SECRET, SLAB, Tale, noted, only, sent
from tests.plugins.memory.test_lender import Loan

HERE = "10.0.0.2:7"

# ---- a lender --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("age", [-4, 4], ids=["of an older mapping", "of a later one"])
def test_what_the_slab_process_says_of_another_epoch_is_not_about_this_mapping(age: int) -> None:
    """Once a late *freed* made the lender forget the newer mapping: its borrower went on to write to memory that was
    lent again."""
    loan, other = Loan(), SlabRef("v", 0, 5 + age)
    ref = loan.lend(0, epoch=5)
    assert loan.tell(le.SlabFreed(ME, other)) == []
    assert loan.tell(le.SlabNotRegistered(ME, other, "out of memory")) == []
    assert only(loan.tell(le.SlabRegistered(ME, other, HERE)), le.FreeSlab).slab == other, "nobody wants it"
    assert [lent.slab for lent in loan.machine.lent.values()] == [ref]
    assert sent(loan.hear(ME, Map("v", 0, 5, SLAB, PAGE)), MrInfo)[0][1].refused == ""


@pytest.mark.parametrize("age", [-4, 4])
def test_what_is_said_of_another_epoch_while_memory_is_registered_is_not_about_that(age: int) -> None:
    loan, other = Loan(), SlabRef("v", 0, 5 + age)
    coming = only(loan.hear(ME, Map("v", 0, 5, SLAB, PAGE)), le.RegisterSlab).slab
    assert loan.tell(le.SlabFreed(ME, other)) == []
    assert loan.tell(le.SlabNotRegistered(ME, other, "out of memory")) == []
    assert sent(loan.tell(le.SlabRegistered(ME, other, HERE)), MrInfo) == []
    older = sent(loan.hear(ME, Map("v", 0, 4, SLAB, PAGE)), MrInfo)
    assert [(info.epoch, "older than" in info.refused) for _, info in older] == [(4, True)]
    actions = loan.tell(le.SlabRegistered(ME, coming, HERE))
    assert [info.epoch for _, info in sent(actions, MrInfo)] == [5]


def test_a_renewal_of_another_epoch_or_host_does_not_keep_a_slab() -> None:
    loan = Loan()
    loan.lend(0, epoch=5)
    for _ in range(30):
        loan.second()
    for sender, epoch in ((ME, 4), (ME, 6), (OTHERS[0], 5)):
        loan.hear(sender, Renew((SlabRef("v", 0, epoch),)))
    for _ in range(29):
        assert loan.second() == []
    assert noted([*loan.second(), *loan.second()]) == ["orphan"]


def test_a_slab_process_that_has_another_epoch_does_not_have_this_mapping() -> None:
    """The process was killed after it had forgotten one slab and before it heard of the next."""
    loan, older = Loan(), SlabRef("v", 0, 4)
    loan.lend(0, epoch=5)
    loan.tell(le.StoreFound(HERE, (LoanedSlab(ME, older, SLAB, SECRET),)))
    assert [lent.slab for lent in loan.machine.lent.values()] == [older]


def test_the_time_of_an_earlier_question_is_not_that_of_a_later_one() -> None:
    loan, hosts = Loan(spare=6), [ME, OTHERS[0], OTHERS[1]]
    for host in hosts:
        loan.lend(0, 1, host)
    first = next(a for a in loan.short(1) if getattr(a, "after_s", 0)).event
    ((victim, evict),) = sent(loan.tell(first), Evict)
    loan.hear(victim, Done("v", 0, evict.epoch))
    loan.tell(le.SlabFreed(victim, SlabRef("v", 0, evict.epoch)))
    loan.short(1)
    assert loan.machine._batch is not None
    assert loan.tell(first) == [] and loan.machine._batch is not None, "nobody has answered yet"


def test_what_was_let_go_without_a_slab_process_is_that_mapping_and_none_later() -> None:
    loan = Loan()
    ref = loan.lend(0, epoch=5)
    loan.tell(le.StoreLost("killed"))
    loan.hear(ME, Done("v", 0, 5))
    actions = loan.tell(le.StoreFound(HERE, (LoanedSlab(ME, ref, SLAB, SECRET),)))
    assert only(actions, le.FreeSlab).slab == ref
    loan.tell(le.StoreLost("killed again"))
    assert noted(loan.tell(le.StoreFound(HERE, (LoanedSlab(ME, ref, SLAB, SECRET),)))) == ["found again"]


# ---- a borrower ------------------------------------------------------------------------------------------------------


def hot(tale: Tale) -> tuple[HostId, QueryMem]:
    """Make slab 0 hot; return the host that is then asked for a slab, and the question."""
    questions = sent(tale.second(1000), QueryMem)
    ((lender, _),) = sent(tale.offers(questions, 5, 4), Map)
    return lender, questions[0][1]


def test_a_grant_of_another_host_or_epoch_is_given_back() -> None:
    tale = Tale()
    lender, query = hot(tale)
    stranger = next(host for host in OTHERS if host != lender)
    for host, epoch in ((stranger, query.epoch), (lender, query.epoch - 1), (lender, query.epoch + 1)):
        actions = tale.hear(host, MrInfo("v", 0, epoch, "10.0.0.9:7", b"x" * 16))
        assert actions == sent_done(host, epoch), "nothing is opened there"
    assert tale.hear(stranger, MrInfo("v", 0, query.epoch, refused="no room")) == [], "it was not asked for a slab"
    opened = only(tale.hear(lender, MrInfo("v", 0, query.epoch, HERE, SECRET)), b.OpenSlab)
    assert (opened.place.address, opened.place.epoch) == (HERE, query.epoch)


def sent_done(host: HostId, epoch: int) -> list[Any]:
    tale = Tale()
    return list(tale.hear(host, MrInfo("v", 0, epoch, "10.0.0.9:7", b"x" * 16)))


def test_a_map_that_another_host_did_not_get_is_no_refusal() -> None:
    tale = Tale()
    lender, query = hot(tale)
    stranger = next(host for host in OTHERS if host != lender)
    message = Map("v", 0, query.epoch, SLAB, PAGE)
    assert tale.tell(Undelivered(stranger, message)) == []
    older: list[Message] = [Map("v", 0, query.epoch - 1, SLAB, PAGE), QueryMem("v", 0, query.epoch - 1, SLAB)]
    for each in older:
        assert tale.tell(Undelivered(lender, each)) == []
    assert noted(tale.tell(Undelivered(lender, message)))[0] == "refused"


def test_words_of_another_epoch_are_not_about_the_place_that_is_opened() -> None:
    tale = Tale()
    lender, query = hot(tale)
    tale.hear(lender, MrInfo("v", 0, query.epoch, HERE, SECRET))
    other = query.epoch - 1
    assert tale.tell(b.SlabNotOpened("v", 0, other, "no")) == []
    assert only(tale.tell(b.SlabOpened("v", 0, other)), b.CloseSlab).epoch == other
    for event in (b.SlabCopied("v", 0, other), b.SlabFailed("v", 0, other, "gone"), b.SlabClosed("v", 0, other)):
        assert tale.tell(event) == []
    assert tale.state() == "asking"
    tale.tell(b.SlabOpened("v", 0, query.epoch))
    assert tale.state() == "mapped"


def test_what_is_said_of_another_epoch_is_not_about_the_place_in_use() -> None:
    tale = Tale()
    lender, epoch = tale.mapped()
    other = epoch - 1
    for event in (
        b.SlabCopied("v", 0, other),
        b.SlabFailed("v", 0, other, "gone"),
        b.SlabClosed("v", 0, other),
        b.GraceOver("v", 0, other),
        b.SearchOver("v", 0, other, "open"),
        b.SlabNotOpened("v", 0, other, "no"),
    ):
        assert tale.tell(event) == []
    for host, of in ((lender, other), (OTHERS[0] if lender != OTHERS[0] else OTHERS[1], epoch)):
        assert tale.hear(host, Evict("v", 0, of, 10.0)) == tale.hear(host, Unrenewed("v", 0, of))
        assert [done.epoch for _, done in sent(tale.hear(host, Evict("v", 0, of, 10.0)), Done)] == [of]
    assert tale.hear(lender, MrInfo("v", 0, epoch, HERE, SECRET)) == [], "it is in use, and said twice"
    said = sent(tale.hear(lender, CheckActivity(1, (SlabRef("v", 0, other),))), Activity)
    assert said[0][1].activities == ()
    assert tale.state() == "mapped"
    assert [renew.slabs for _, renew in sent(tale.hear(lender, Unrenewed("v", 0, epoch)), Renew)] == [
        (SlabRef("v", 0, epoch),)
    ]


def test_while_a_slab_moves_each_word_is_about_one_of_its_places() -> None:
    tale = Tale()
    lender, epoch = tale.mapped()
    questions = sent(tale.hear(lender, Evict("v", 0, epoch, 10.0)), QueryMem)
    ((to, _),) = sent(tale.offers(questions, 5, 4), Map)
    then = questions[0][1].epoch
    stranger = next(host for host in OTHERS if host not in (lender, to))
    assert [done.epoch for _, done in sent(tale.hear(stranger, Evict("v", 0, then, 10.0)), Done)] == [then]
    tale.hear(to, MrInfo("v", 0, then, HERE, SECRET))
    for other in (epoch, epoch - 1):
        assert tale.tell(b.SlabCopied("v", 0, other)) == []
    assert not any(isinstance(a, b.CloseSlab) for a in tale.tell(b.SlabOpened("v", 0, then))), "it is not filled"
    for event in (b.SlabCopied("v", 0, epoch), b.SlabClosed("v", 0, epoch - 1), b.GraceOver("v", 0, then)):
        assert tale.tell(event) == []
    assert sent(tale.hear(lender, Evict("v", 0, then + 1, 10.0)), Done)[0][1].epoch == then + 1
    assert [place.epoch for place in tale.machine.volumes["v"].slabs[0].places] == [epoch, then]
    tale.tell(b.BorrowerTick({"v": [0]}, (), {"v": {then: "open", epoch: "reopening"}}))
    assert tale.machine.volumes["v"].slabs[0].phase.link == "reopening", "the link of the place that serves"  # type: ignore[union-attr]
    assert only(tale.tell(b.SlabCopied("v", 0, then)), b.CloseSlab).epoch == epoch
    assert tale.tell(b.SlabClosed("v", 0, epoch - 1)) == []
    assert sent(tale.tell(b.SlabClosed("v", 0, epoch)), Done) == [(lender, Done("v", 0, epoch))]


# ---- what holds the pages, and what is on record ---------------------------------------------------------------------


def held(epoch: int = 5, secret: bytes = SECRET) -> tuple[SlabStore, RegisterSlabFrame]:
    store, asked = SlabStore(1 << 30, MemfdPages()), RegisterSlabFrame(1, "h1", "v", 0, epoch, 4 * PAGE, PAGE, secret)
    store.register(asked)
    return store, asked


def filled(word: int) -> memoryview:
    return memoryview(bytes([word]) * PAGE)


def test_a_slab_is_registered_once_and_not_under_another_secret_of_its_epoch() -> None:
    store, asked = held()
    slab = store.slabs["h1", "v", 0]
    slab.put_one(1, 7, filled(7))
    store.register(asked)
    for epoch, secret in ((5, b"x" * 16), (4, SECRET)):
        with pytest.raises(ValueError, match="not newer"):
            store.register(RegisterSlabFrame(1, "h1", "v", 0, epoch, 4 * PAGE, PAGE, secret))
    assert store.slabs["h1", "v", 0] is slab and slab.has(1, 1) == filled(7)


@pytest.mark.parametrize("who", [("h1", "v", 0, 4), ("h1", "v", 0, 6), ("h2", "v", 0, 5), ("h1", "w", 0, 5)])
def test_what_is_freed_under_another_epoch_or_of_another_host_is_not_this_slab(who: tuple[str, str, int, int]) -> None:
    store, _ = held()
    store.free(*who)
    assert store.slabs["h1", "v", 0].live and store.held_bytes == 4 * PAGE
    assert store.known(*who) is None


def test_a_write_that_comes_twice_or_late_does_not_change_a_page() -> None:
    """Late writes are also sent as one of a run, and with other content under the same version."""
    store, _ = held()
    slab = store.slabs["h1", "v", 0]
    slab.put_one(1, 7, filled(7))
    for version in (7, 6):
        slab.put_one(1, version, filled(9))
        slab.put(0, array("Q", [version] * 3), memoryview(bytes([8]) * (3 * PAGE)))
        slab.put(1, array("Q", [version]), None)
    assert slab.has(0, 3) == bytes([8]) * PAGE + bytes([7]) * PAGE + bytes([8]) * PAGE
    assert list(slab.versions) == [7, 7, 7, 0]


class SlowPlaces:
    """A disk that takes its time, in which the set of whole members changes again."""

    def __init__(self, slab: MirrorSlab) -> None:
        self.slab, self.writes = slab, 0

    async def write(self) -> None:
        self.writes += 1
        if self.writes == 1:
            self.slab.changes += 1


async def test_what_changes_while_the_disk_writes_is_not_on_record_by_that() -> None:
    """Otherwise a write would be acknowledged without a member that the disk still calls whole."""
    replaces_a_method()
    slab = MirrorSlab(0, 0, 16, lambda slab: None)
    slab.changes, places = 1, SlowPlaces(slab)
    await MemberLenders.record(cast(Any, SimpleNamespace(_places=places)), slab)
    assert (places.writes, slab.recorded, slab.unrecorded) == (2, 2, False)


async def test_a_place_that_is_added_while_the_file_is_written_is_written_by_the_next() -> None:
    async with a_bench() as bench:
        replace, may, begun = bench.directory.replace, asyncio.Event(), asyncio.Event()

        async def slowly(name: str, data: bytes) -> None:
            begun.set()
            await may.wait()
            await replace(name, data)

        bench.disk.replace = slowly  # type: ignore[method-assign]
        places = Places(bench.env.disk, bench.env.log, "p")
        first, second = (OpenPlace(0, epoch, "h2", HERE, SECRET) for epoch in (1, 2))
        adding = [asyncio.create_task(places.add(first))]
        await begun.wait()
        adding.append(asyncio.create_task(places.add(second)))
        await asyncio.sleep(0)
        may.set()
        await asyncio.gather(*adding)
        found = Places(bench.env.disk, bench.env.log, "p")
        await found.load(4)
        assert {place.epoch for place in found.all()} == {1, 2}


async def test_whoever_asks_a_process_that_has_ended_waits_for_the_next_one() -> None:
    """Otherwise the client would ask again and again without ever letting the loop notice the end."""
    nobody: Any = None
    process = ByteProcess(nobody, ByteProgram("slabd", "slabd", SlabRef("v", 0, 1), "slab", b""), *[nobody] * 5)
    client = process._client = ControlClient(nobody, nobody, nobody)
    client.ended.set()
    process.ready.set()
    with pytest.raises(ConnectionError):
        await process.ask(ListSlabs, 1.0)
    assert not process.ready.is_set()

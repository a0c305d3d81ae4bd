"""The agent's side of turns: who gets a slot, in what order, what is freed, and what people are told."""

from types import SimpleNamespace
from typing import Any, cast

from chaos.world.pages import SimPage
from covey.core.ids import HostId, JobId
from covey.tensors.turns.page import AT, KEY, LOST, PLACE, SLOTS_MAX, STATE, Taker
from covey.wire.job import Frame, TurnsHere
from plugins.base import Host
from plugins.facts import JobJoined, RankDisconnected
from plugins.interleave.policy.settings import InterleaveSettings
from plugins.interleave.policy.turn_order import turn_order
from plugins.interleave.service.turns import LONG_S, HostTurns, TurnsGroup
from tests.agent.here import ranks

J2, J10, J11 = JobId("j2"), JobId("j10"), JobId("j11")


class Peer:
    def __init__(self, job: JobId, rank: int = 0, epoch: int = 1) -> None:
        self.job, self.rank, self.epoch, self.gone = job, rank, epoch, False
        self.handed: list[tuple[Frame, Any]] = []

    def hand(self, frame: Frame, page: SimPage) -> None:
        self.handed.append((frame, page))


class OneHost:
    """A host with joined processes, and no more of an agent than turns need."""

    def __init__(self, **settings: Any) -> None:
        self.at_s, self.all, self.notes = 1000.0, list[Peer](), list[tuple[str, str, str]]()
        self.specs: dict[JobId, Any] = {}
        self.full = False
        self.pages: list[SimPage] = []
        self.id = HostId("h1")
        quiet = SimpleNamespace(warning=lambda *_, **__: None)
        clock = SimpleNamespace(now_s=lambda: self.at_s)
        self.env = SimpleNamespace(clock=clock, log=quiet, pages=SimpleNamespace(make_handed=self._made))
        self.runner = SimpleNamespace(spec=lambda job, epoch: self.specs.get(job))
        self.turns = HostTurns(cast(Host, self), InterleaveSettings(**settings), dict)

    def _made(self, size: int) -> SimPage:
        if self.full:
            raise OSError("no memory")
        self.pages.append(SimPage(True, size))
        return self.pages[-1]

    def peers(self, job: JobId) -> list[Peer]:
        return [peer for peer in self.all if peer.job == job and not peer.gone]

    def note(self, subject: str, event: str, reason: str, key: str = "") -> None:
        self.notes.append((subject, event, reason))

    def joins(self, job: JobId, group: str, rank: int = 0, tenant: str = "ann") -> Peer:
        spec = ranks(str(job), "x", count=2)
        self.specs[job] = type(spec)(**{**_fields(spec), "share_host": group, "tenant": tenant})
        peer = Peer(job, rank)
        self.all.append(peer)
        self.turns.on_fact(JobJoined(job, 1, rank))
        return peer

    def leaves(self, peer: Peer) -> None:
        peer.gone = True
        assert peer.job is not None
        self.turns.on_fact(RankDisconnected(peer.job, 1, peer.rank))

    def group(self, name: str) -> TurnsGroup:
        return self.turns.groups[name]

    def taker(self, peer: Peer, name: str = "auto") -> Taker:
        turns = self.group(name).turns
        made = Taker(turns, slot_of(peer), lambda: int(self.at_s * 1e9))
        made.alive()
        return made

    def takes(self, peer: Peer, name: str = "auto") -> Taker:
        """Let this process ask for the processors, and have them if they are free."""
        made = self.taker(peer, name)
        for _ in zip(range(20), made.take("comp"), strict=False):
            pass
        return made


def _fields(spec: Any) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


def slot_of(peer: Peer) -> int:
    (frame, _), *_ = peer.handed
    assert isinstance(frame, TurnsHere)
    return frame.slot


def test_jobs_come_in_the_order_of_their_numbers() -> None:
    assert turn_order([J10, J2, J11]) == [J2, J10, J11]


def test_each_process_of_a_group_gets_a_slot_and_the_order_follows_the_jobs() -> None:
    host = OneHost()
    late, first, second = host.joins(J10, "auto"), host.joins(J2, "auto"), host.joins(J2, "auto", 1)
    assert [slot_of(peer) for peer in (late, first, second)] == [0, 1, 2]
    assert len(host.pages) == 1 and all(len(peer.handed) == 1 for peer in (late, first, second))
    turns = host.group("auto").turns
    assert [turns.get(slot, PLACE) for slot in range(3)] == [1, 0, 0]
    assert turns.get(1, KEY) == turns.get(2, KEY) != turns.get(0, KEY)


def test_a_job_that_shares_with_nobody_gets_nothing() -> None:
    host = OneHost()
    assert not host.joins(J2, "").handed and not host.turns.groups
    away = OneHost(turns=False)
    assert not away.joins(J2, "auto").handed


def test_a_group_belongs_to_its_tenant_and_auto_to_all() -> None:
    host = OneHost()
    for number, (group, tenant) in enumerate((("x", "ann"), ("x", "bob"), ("auto", "ann"), ("auto", "bob"))):
        host.joins(JobId(f"j{number}"), group, tenant=tenant)
    assert {name: len(group.peers) for name, group in host.turns.groups.items()} == {"ann/x": 1, "bob/x": 1, "auto": 2}


def test_what_a_process_had_is_free_when_it_is_gone_and_the_page_with_the_last_one() -> None:
    host = OneHost()
    first, second = host.joins(J2, "auto"), host.joins(J10, "auto")
    assert host.takes(first).holds("comp") and not host.takes(second).holds("comp")
    turns = host.group("auto").turns
    host.leaves(first)
    assert turns.get(0, KEY) == 0 and turns.get(0, AT["comp"] + STATE) == 0
    assert host.takes(second).holds("comp")
    third = host.joins(J11, "auto")
    assert slot_of(third) == 0, "the slot is used again"
    assert turns.get(0, KEY) not in (0, turns.get(1, KEY))
    host.leaves(second)
    host.leaves(third)
    assert not host.turns.groups and host.pages[0].descriptor == -1


def test_what_jobs_have_left_is_asked_once_a_look_and_only_for_groups_that_are_here() -> None:
    host, asked = OneHost(), list[float]()

    def left_s() -> dict[JobId, float]:
        asked.append(host.at_s)
        return {}

    host.turns._left_s = left_s
    host.turns.look()
    assert not asked
    for job, group in ((J2, "auto"), (J10, "x"), (J11, "y")):
        host.joins(job, group)
    host.turns.look()
    assert len(asked) == 1


def test_more_processes_than_a_page_has_slots_run_without_turns_and_say_so() -> None:
    host = OneHost()
    for rank in range(SLOTS_MAX):
        host.joins(J2, "auto", rank)
    assert not host.joins(J10, "auto").handed
    ((job, event, why),) = host.notes
    assert (job, event) == (J10, "takes no turns") and str(SLOTS_MAX) in why


def test_a_host_without_memory_lets_jobs_run_and_says_so() -> None:
    host = OneHost()
    host.full = True
    assert not host.joins(J2, "auto").handed
    assert host.notes == [(J2, "takes no turns", "the kernel has no memory to share: no memory")]


def test_a_turn_that_lasts_long_is_named_once_while_others_wait() -> None:
    host = OneHost()
    first, second = host.joins(J2, "auto", 3), host.joins(J10, "auto")
    has, waits = host.takes(first), host.takes(second)
    for _ in range(int(LONG_S) + 30):
        host.at_s += 1.0
        has.alive()
        waits.alive()
        host.turns.look()
    ((job, event, why),) = host.notes
    assert (job, event) == (J2, "holds its turn")
    assert "rank 3 has the processors of h1 for 1 min" in why and "rank 0 of j10 waits" in why
    assert host.turns.status() == {"turns of auto": "rank 3 of j2 computes, 1 waits to compute; waited 0.0 s together"}


def test_a_long_turn_for_which_nobody_waits_is_nobodys_business() -> None:
    host = OneHost()
    has = host.takes(host.joins(J2, "auto"))
    for _ in range(int(LONG_S) + 30):
        host.at_s += 1.0
        has.alive()
        host.turns.look()
    assert not host.notes


def test_turns_that_were_lost_are_told_once_for_each_process() -> None:
    host = OneHost()
    first = host.joins(J2, "auto")
    host.group("auto").turns.put(0, LOST, 1)
    host.turns.look()
    host.group("auto").turns.put(0, LOST, (1 << 64) - 1)
    host.turns.look()
    ((job, event, why),) = host.notes
    assert (job, event) == (J2, "lost its turn") and "rank 0" in why and first.handed

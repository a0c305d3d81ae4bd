"""What `covey-rack run` believes, and what it does not."""

import base64
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.client import Agent, AgentctlError
from cli.rack import proof as rack_proof
from cli.rack.files import RackHost
from cli.rack.proof import Outcome, Progress, Watch, accuracy, in_turn, judge_job, last, pattern
from cli.rack.summary import summary
from tests.cli.conftest import FakeAgent

Job = Callable[..., dict[str, Any]]
GOOD = "a" * 64
PLACES = [{"host": "gpu1", "ranks": [0, 1], "gpus": ["a", "b"]}, {"host": "gpu2", "ranks": [2, 3], "gpus": ["c", "d"]}]


def line(sha256: str = GOOD, right: str = "0.9638") -> str:
    return f"step 50 accuracy=0.1\nparameters sha256={sha256}  accuracy={right}\n"


def judged(agent: FakeAgent, view: dict[str, Any], text: str, sequential: str) -> Outcome:
    """The verdict when rank 0 has written `text`, and the others nothing."""

    def logs(_body: Any) -> dict[str, Any]:
        target = agent.asked[-1][0]
        written = text.encode() if "rank=0" in target and "offset=0" in target else b""
        return {"data": base64.b64encode(written).decode(), "offset": 0, "size": len(written)}

    agent.replies["GET /v1/jobs/j1/logs"] = logs
    outcome = Outcome()
    judge_job(Agent([agent.address]), view, sequential, outcome)
    return outcome


@pytest.fixture
def done(job: Job) -> dict[str, Any]:
    return job(state="done", exit_code=0, workers=4, places=PLACES, times={"for_s": 10.0})


def test_a_good_run_has_nothing_against_it(agent: FakeAgent, done: dict[str, Any]) -> None:
    outcome = judged(agent, done, line(), line())
    assert (outcome.failures, outcome.accuracy, outcome.sha256) == ([], 0.9638, GOOD)


@pytest.mark.parametrize(
    ("changes", "text", "sequential", "complaint"),
    [
        ({}, line("b" * 64), line(), "parameters differ"),
        ({}, "", line(), "parameters differ"),
        ({}, line(), "nothing", "named no sha256"),
        ({}, line(right="0.9299"), line(), "accuracy is 0.9299"),
        ({}, f"sha256={GOOD}", line(), "accuracy is None"),
        ({"state": "failed", "exit_code": 3, "reason": "rank 1 exited with 3"}, line(), line(), "rank 1 exited with 3"),
        ({"places": PLACES[:1]}, line(), line(), "ran on 1 host"),
    ],
)
def test_what_did_not_hold_is_said(
    agent: FakeAgent, done: dict[str, Any], changes: dict[str, Any], text: str, sequential: str, complaint: str
) -> None:
    assert any(complaint in failure for failure in judged(agent, done | changes, text, sequential).failures)


def test_one_host_is_enough_when_it_holds_all_gpus(agent: FakeAgent, done: dict[str, Any]) -> None:
    place = {"host": "gpu1", "ranks": [0, 1, 2, 3], "gpus": ["a", "b", "c", "d"]}
    assert judged(agent, done | {"places": [place]}, line(), line()).failures == []


def test_the_last_word_counts() -> None:
    assert accuracy("accuracy 0.5 ... accuracy: 96.4 %") == pytest.approx(0.964)
    assert accuracy("accuracy=0.9638") == 0.9638
    assert accuracy("none") is None
    assert last(rack_proof._SHA256, f"sha256={'b' * 64} SHA256: {GOOD}") == GOOD


def test_pages_are_taken_from_each_slab_in_turn_and_none_is_forgotten() -> None:
    pages = list(itertools.islice(in_turn(12, 3), 12))
    assert pages[:6] == [0, 4, 8, 1, 5, 9]
    assert sorted(pages) == list(range(12))
    assert next(itertools.islice(in_turn(12, 3), 12, None)) == 0


def test_no_page_looks_like_another_or_like_an_earlier_run() -> None:
    seen = {pattern(seed, page, 64) for seed in (1, 2) for page in range(100)}
    assert len(seen) == 200
    assert pattern(1, 5, 64) == pattern(1, 5, 64)


class Memory:
    """A volume in a list, of 8 pages of 16 bytes, 2 pages a slab."""

    def __init__(self) -> None:
        self.page, self.size = 16, 128
        self.content = bytearray(128)
        self.writes: list[tuple[int, int]] = []

    def write(self, offset: int, data: bytes) -> None:
        self.writes.append((offset // 16, len(data) // 16))
        self.content[offset : offset + len(data)] = data

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self.content[offset : offset + size])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rack_proof, "CHUNK_BYTES", 48)
    monkeypatch.setattr(rack_proof, "PAGES_ONE_BY_ONE_MIN", 3)
    monkeypatch.setattr(rack_proof, "LOOK_S", 0.0)


@pytest.fixture
def watch(agent: FakeAgent, job: Job) -> Watch:
    agent.replies |= {"GET /v1/jobs/j1": job(), "GET /v1/tensors": []}
    return Watch(Agent([agent.address]), "j1", Progress(lambda _: None))


HOST = RackHost("gpu1", Path("c"), Path("s"), Path("r"), "", "", "")


def slabs(placed: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {"volume": "demo", "borrower": "gpu1", "index": i, "state": "mapped" if i in placed else "cold",
         "lender": "gpu2" if i in placed else None}
        for i in range(4)
    ]  # fmt: skip


@pytest.mark.usefixtures("small")
def test_memory_is_written_until_every_slab_is_placed_then_filled_and_compared(agent: FakeAgent, watch: Watch) -> None:
    answers: Iterator[Any] = iter([slabs(range(n)) for n in range(4)])
    agent.replies["GET /v1/slabs"] = lambda _: next(answers, slabs(range(4)))
    memory: Any = Memory()
    outcome = Outcome()
    written = rack_proof.write_until_placed(memory, Agent([agent.address]), HOST, watch, outcome, 7)
    assert outcome.failures == []
    assert len(written) >= 3
    rack_proof.fill(memory, watch, written, 7)
    filled = [page for first, count in memory.writes[len(written) :] for page in range(first, first + count)]
    assert sorted([*filled, *written]) == list(range(8))
    assert max(count for _, count in memory.writes) <= 3
    assert rack_proof.differing_pages(memory, watch, 7) == 0
    memory.content[20] ^= 1
    memory.content[100] ^= 128
    assert rack_proof.differing_pages(memory, watch, 7) == 2


@pytest.mark.usefixtures("small")
def test_slabs_that_are_not_placed_or_lie_at_home_are_a_failure(
    agent: FakeAgent, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rack_proof, "MAP_S", 0.02)
    at_home = [slab | {"state": "mapped", "lender": "gpu1"} for slab in slabs([])]
    for answer in (slabs([0]), at_home, []):
        agent.replies["GET /v1/slabs"] = answer
        outcome = Outcome()
        rack_proof.write_until_placed(Memory(), Agent([agent.address]), HOST, watch, outcome, 7)  # type: ignore[arg-type]
        assert len(outcome.failures) == 1


def test_a_job_that_does_not_end_is_an_error(watch: Watch) -> None:
    with pytest.raises(AgentctlError, match="did not end in time"):
        watch.until_ended(0.0)


def test_the_newest_word_of_the_aggregator_is_kept(agent: FakeAgent, watch: Watch) -> None:
    rows = [{"job": job, "epoch": e, "rounds": r} for job, e, r in (("j1", 1, 9), ("j1", 2, 3), ("j2", 9, 1))]
    agent.replies["GET /v1/tensors"] = rows
    watch._look()
    agent.replies["GET /v1/tensors"] = rows[:1]
    watch._look()
    assert watch.tensors == rows[1]


def test_the_summary_waits_for_what_was_just_read_to_be_counted(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"volume": "demo", "host": "gpu4", "read_bytes": 0}
    whole = row | {"read_bytes": rack_proof.VOLUME_BYTES}
    looks = iter([[row], [row, whole | {"host": "gpu1"}], [whole], [row]])
    agent.replies["GET /v1/volumes"] = lambda _: next(looks)
    rack_proof.until_counted(Agent([agent.address]), "gpu4")
    assert next(looks) == [row], "it looked until the volume of this host was read whole, and no longer"
    monkeypatch.setattr(rack_proof, "COUNTED_S", 0.05)
    agent.replies["GET /v1/volumes"] = [row]
    rack_proof.until_counted(Agent([agent.address]), "gpu4")


def test_the_summary_names_hosts_leader_job_lenders_and_traffic(agent: FakeAgent, done: dict[str, Any]) -> None:
    host = {"host": "gpu1", "state": "alive"}
    agent.replies |= {
        "GET /v1/hosts": [host, host | {"host": "gpu2", "state": "gone"}],
        "GET /v1/leader": {"leader": "gpu1", "term": 3, "since_s": 61.0},
        "GET /v1/jobs": [done | {"times": done["times"] | {"ended_wall_s": 950.0}}],
        "GET /v1/tensors": [{"host": "gpu3", "rounds": 7, "received_bytes": 1024, "sent_bytes": 2048}],
        "GET /v1/slabs": slabs([0, 1, 2]),
        "GET /v1/volumes": [
            {"volume": "demo", "host": "gpu1", "size_bytes": 128, "written_bytes": 128, "read_bytes": 64,
             "remote_read_bytes": 32}
        ],
    }  # fmt: skip
    rack_host = RackHost("gpu1", Path("c"), Path("s"), agent.path.parent, "", "", "")
    agent.path.rename(agent.path.parent / "agent.sock")
    said: list[str] = []
    summary([rack_host], said.append)
    (agent.path.parent / "agent.sock").rename(agent.path)
    assert said == [
        "hosts   1 of 2 alive: gpu1",
        "leader  gpu1 (term 3) for 1 min 1 s",
        "job     j1 digits: done, 10 s, step 7, loss 0.25",
        "        on gpu1 (ranks 0 1), gpu2 (ranks 2 3)",
        "        gradients summed at gpu3: 7 rounds, 1 KiB in, 2 KiB out (as last seen)",
        "memory  demo of gpu1, 128 B; slabs 0 on gpu2, 1 on gpu2, 2 on gpu2, 3 cold",
        "        128 B written, 64 B read, 32 B of that from lenders",
    ]


def test_progress_that_is_no_terminal_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    progress = Progress(said.append, every_s=60.0)
    for text in ("one", "two", "three"):
        progress.show(text)
    progress.clear()
    assert said == ["one"]
    assert capsys.readouterr().out == ""

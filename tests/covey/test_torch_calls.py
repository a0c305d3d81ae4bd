"""Scripts that call collectives wherever people call them, in PyTorch trainings whose ranks are killed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.core.errors import EXIT_STATE_LOST
from tests.covey.forks import Forks
from tests.covey.hooks.torch_jobs import NEEDS_TORCH
from tests.covey.test_torch_heal import TrainedGang

pytestmark = NEEDS_TORCH
SCRIPT = Path(__file__).with_name("torch_calls_script.py")
Gangs = Callable[..., TrainedGang]


@pytest.fixture
def gangs(forks: Forks, tmp_path: Path) -> Iterator[Gangs]:
    made: list[TrainedGang] = []

    def make(ranks: int, kind: str, steps: int = 96, saved: Path | None = None) -> TrainedGang:
        gang = TrainedGang(forks, tmp_path / str(len(made)), ranks, kind, steps, saved, SCRIPT)
        made.append(gang)
        gang.begin()
        return gang

    yield make
    for gang in made:
        gang.close()


def told(gang: TrainedGang, word: str, ranks: int = 2) -> list[set[str]]:
    return [set(gang.lines(rank, word)) for rank in range(ranks)]


EVERYWHERE = "attached,first,step-10,validates-1,second-1,third-2,fourth-2,step-72"


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "places"),
    [
        pytest.param("windows", EVERYWHERE, id="windows"),
        pytest.param("workers", "validates-1,fourth-2", id="workers", marks=pytest.mark.long),
        pytest.param("windows-neighbours", EVERYWHERE, id="neighbours", marks=pytest.mark.long),
    ],
)
def test_collectives_anywhere_are_healed_with_the_bits_of_a_run_without_losses(
    gangs: Gangs, kind: str, places: str
) -> None:
    """A rank is lost before the loop, in a step, and between any two collectives at an epoch's end; its neighbours keep
    what is its own, or all ranks do."""
    gang, calm = gangs(2, f"{kind}@{places}"), gangs(2, kind)
    for _ in places.split(","):
        gang.replace(1)
    assert gang.learnt() == calm.learnt()
    assert told(gang, "validated") == told(calm, "validated"), "what is validated, and the schedule, are the same"
    assert len(set.union(*told(gang, "agreed"))) == 1, "each process has the run id that the first ones agreed on"
    assert len(set.union(*told(gang, "validated"))) == 4
    gang.check_samples()
    assert "restarts" not in gang.text(0)


def test_every_collective_has_gloos_result(gangs: Gangs) -> None:
    """Groups of some ranks and messages from one to another have the results of gloo, which makes them; the job is told
    to heal no more."""
    gang = gangs(3, "kinds")
    ended = [gang.ended(rank) for rank in range(3)]
    assert ended == [0] * 3, [gang.text(rank)[-3000:] for rank in range(3)]
    same = told(gang, "same", 3)
    assert same[0] == same[1] == same[2] and len(same[0]) == 14
    assert told(gang, "pair", 3) == [{"3 0"}, {"3 1"}, set()]
    assert told(gang, "received", 3) == [{"True"}] * 3
    assert gang.text(0).count("restarts instead of heals") == 1
    assert not any("refused" in gang.text(rank) for rank in range(3))


@pytest.mark.parametrize(
    ("kind", "place", "why"),
    [
        ("tails", "tail-3", "the others are after optimizer.step(), in all_reduce, where this process does not pass"),
        ("restarts", "step-6", "lost ranks of this job are not replaced any more: new_group over ranks [0]"),
        ("large", "step-30", "lost ranks of this job are not replaced any more: broadcast uint8"),
        ("changes", "fourth-1", "parameter/0.weight was changed after an epoch's steps"),
    ],
    ids=["tails", "restarts", "large", "changes"],
)
def test_where_a_lost_rank_cannot_be_replaced_it_is_said_once_and_its_successor_ends(
    gangs: Gangs, kind: str, place: str, why: str
) -> None:
    gang = gangs(2, f"{kind}@{place}")
    gang.replace(1)
    assert gang.ended(1) == EXIT_STATE_LOST, gang.text(1)[-3000:]
    assert why in gang.text(1)
    said = {"tails": 1, "restarts": 2, "large": 1, "changes": 0}
    assert gang.text(0).count("restarts instead of heals") == said[kind], gang.text(0)
    assert gang.text(0).count("heals no more") == (kind in ("restarts", "large")), "the agent is told, too"


def test_a_rank_that_is_lost_in_a_step_is_healed_though_collectives_follow_its_steps(gangs: Gangs) -> None:
    gang, calm = gangs(2, "tails@step-3,step-5", 12), gangs(2, "tails", 12)
    for _ in range(2):
        gang.replace(1)
    assert gang.learnt() == calm.learnt()
    assert told(gang, "mean")[0] == told(calm, "mean")[0]


@pytest.mark.long
def test_a_job_goes_on_where_it_saved_between_two_collectives(gangs: Gangs, tmp_path: Path) -> None:
    """It does again what the script does at an epoch's end; and one that is asked to end does so once that is done."""
    (saved := tmp_path / "saved").mkdir()
    gang = gangs(2, "saves", saved=saved)
    gang.until(0, 30)
    gang.stopped()
    again = gangs(2, "saves", saved=saved)
    calm = gangs(2, "saves")
    assert again.learnt() == calm.learnt()
    (saved / "epoch-2.safetensors").rename(saved / "state.safetensors")
    last = gangs(2, "saves@validates-2", saved=saved)
    last.replace(1)
    assert last.learnt() == calm.learnt()
    assert [line.split()[0] for line in last.lines(0, "validated")] == ["2", "3"]
    assert set(last.lines(0, "validated")) <= set(calm.lines(0, "validated"))
    assert last.lines(0, "goes on") == ["72"]


def test_what_is_saved_after_a_step_is_of_the_next_one_or_refused(gangs: Gangs, tmp_path: Path) -> None:
    (saved := tmp_path / "saved").mkdir()
    gang = gangs(2, "tails-saves", 8, saved)
    gang.learnt()
    assert gang.lines(0, "refused") == [
        "random numbers were drawn after optimizer.step(), and those of other ranks are not known yet"
    ]
    assert not (saved / "tail.safetensors").exists()
    (saved / "stepped.safetensors").rename(saved / "state.safetensors")
    again = gangs(2, "tails", 8, saved)
    again.learnt()
    assert again.lines(0, "goes on") == ["5"] and "goes on with step 6" in again.text(1)


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        pytest.param("looks", "step-5,step-10,step-24", id="looks"),
        pytest.param("looks-neighbours", "step-5,step-10,step-24", id="neighbours", marks=pytest.mark.long),
        pytest.param("looks-workers", "step-24", id="workers", marks=pytest.mark.long),
    ],
)
def test_numbers_drawn_after_a_step_are_not_drawn_again_by_who_takes_over(gangs: Gangs, kind: str, places: str) -> None:
    """A look at other data draws them, after a step and after an epoch; a rank is lost in the step that follows."""
    gang, calm = gangs(2, f"{kind}@{places}", 48), gangs(2, kind, 48)
    for _ in places.split(","):
        gang.replace(1)
    assert gang.learnt() == calm.learnt()
    assert told(gang, "looks") == told(calm, "looks")
    assert gang.text(0).count("draws random numbers after optimizer.step(), for an evaluation, say") == 1


def test_it_is_said_that_a_rank_was_lost_among_numbers_that_nobody_draws_again(gangs: Gangs) -> None:
    gang = gangs(2, "looks@looks-4", 24)
    gang.replace(1)
    gang.learnt()
    why = "may have another own state than the lost rank had: rank 0 changed theirs (random generators) after the last"
    assert gang.text(1).count(why) == 1


def test_a_job_that_is_asked_to_end_saves_what_was_drawn_after_its_last_step(gangs: Gangs, tmp_path: Path) -> None:
    (saved := tmp_path / "saved").mkdir()
    said = "saved random generators as they were at the step's last push: numbers were drawn since"
    for here in (4, 24):
        gang = gangs(2, "looks-saves", 48, saved)
        gang.until(0, here)
        gang.stopped()
        assert gang.text(0).count(said) == len(gang.lines(0, "saves"))
    last = gangs(2, "looks-saves", 48, saved)
    assert last.learnt() == gangs(2, "looks", 48).learnt()


@given(st.binary(max_size=300))
@example(b"gpu1:0")
@example(b":80")
@example(b"gpu1:70000")
def test_a_message_that_names_no_address_is_ignored(data: bytes) -> None:
    from covey.frameworks.torch.calls.connections import address_of

    try:
        host, port = address_of(data)
    except ValueError:
        return
    assert host and 0 < port < 65_536 and f"{host}:{port}".encode().rstrip(b"0123456789") in data


def test_an_address_is_read_back() -> None:
    from covey.frameworks.torch.calls.connections import address_of

    assert address_of(b"10.0.0.7:29500") == ("10.0.0.7", 29_500) and address_of(b"fd00::7:29500") == ("fd00::7", 29_500)

"""Ranks that compute other bits, or with other versions, are told apart: when they attach, and when one takes over."""

import hashlib
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.errors import StateLost
from covey.healing.healing import Healing
from covey.healing.held_state import HeldState
from covey.healing.likeness import (
    Likeness,
    drawn,
    encode_likeness,
    likeness,
    likeness_decoder,
    main_script,
    unlike_bits,
    unlike_script,
    unlike_versions,
)
from covey.healing.neighbours import HealedRank
from covey.healing.state_pieces import About, encode_have
from covey.tensors.aggregator.rounds import Tell, ToldByRank

ONE = Likeness({"Covey": "1", "numpy": "2.1"}, "EPYC with AVX512", "2 threads", "aa", "bb")
OTHER = msgspec.structs.replace(ONE, processor="Xeon with AVX2", bits="bb")
NEWER = msgspec.structs.replace(ONE, versions={"Covey": "1", "numpy": "2.2"})
CHANGED = msgspec.structs.replace(ONE, script="cc")
SAYS = "from covey.healing.likeness import likeness; print(likeness().bits, likeness().threads)"


class Told:
    """The messages that one rank sends to others, and to people."""

    def __init__(self, like: Likeness | None, incarnation: int = 0) -> None:
        self.said: list[Tell] = []
        self.people: list[str] = []
        self.healing = Healing(
            HealedRank(0, 3, incarnation), self, lambda: b"rounds", lambda text: self.people.append(text), like
        )

    def tell(self, said: Tell) -> None:
        self.said.append(said)
        if said.about is About.FETCH:
            threading.Thread(target=self._give, args=(said,), daemon=True).start()

    def _give(self, said: Tell) -> None:
        piece = HeldState({}, b"").piece(said.data)
        assert piece is not None
        self.healing.told(ToldByRank(said.rank, About.PIECE, said.step, piece))

    def likes(self) -> list[int]:
        return [said.rank for said in self.said if said.about is About.LIKE]


def computed(**environ: str) -> str:
    done = subprocess.run([sys.executable, "-c", SAYS], env={**os.environ, **environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[0]


def test_the_same_process_finds_the_same_bits_again_and_so_does_another_one() -> None:
    assert computed(OPENBLAS_NUM_THREADS="1") == computed(OPENBLAS_NUM_THREADS="1")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of kernels")
def test_another_kernel_of_blas_or_other_threads_are_found_by_their_bits() -> None:
    if "openblas" not in likeness().versions["BLAS"]:
        pytest.skip("this numpy chooses its kernels otherwise")
    alone = computed(OPENBLAS_NUM_THREADS="1")
    assert computed(OPENBLAS_NUM_THREADS="1", OPENBLAS_CORETYPE="Prescott") != alone


def test_what_is_drawn_is_between_minus_one_and_one_and_not_all_alike() -> None:
    found = drawn(50, 7)
    assert found.shape == (50, 7) and found.dtype == np.float32
    assert -1.0 <= found.min() < -0.9 and 0.9 < found.max() <= 1.0 and len(np.unique(found)) == 350


def test_what_differs_is_said_in_words() -> None:
    assert unlike_versions(ONE, OTHER) == "" and unlike_bits(ONE, NEWER) == ""
    assert unlike_versions(ONE, NEWER) == "numpy here is 2.1, and there 2.2"
    without = msgspec.structs.replace(ONE, versions={"Covey": "1"})
    assert unlike_versions(without, ONE) == "numpy here is not used, and there 2.1"
    assert "EPYC with AVX512, 2 threads here, and there Xeon with AVX2, 2 threads" in unlike_bits(ONE, OTHER)
    assert "of the same name" in unlike_bits(ONE, msgspec.structs.replace(ONE, bits="cc"))


def test_neighbours_are_told_until_they_say_that_they_know() -> None:
    told = Told(ONE)
    told.healing.begin({})
    assert told.likes() == [1, 2]
    told.healing.told(ToldByRank(2, About.LIKED, 0, b""))
    told.healing.end({})
    assert told.likes() == [1, 2, 1]


@pytest.mark.parametrize(
    ("other", "word"), [(OTHER, "the same numbers give other bits"), (NEWER, "numpy here is 2.1, and there 2.2")]
)
def test_a_neighbour_that_is_unlike_is_named_to_people_once(other: Likeness, word: str) -> None:
    told = Told(ONE)
    for _ in range(3):
        told.healing.told(ToldByRank(2, About.LIKE, 0, encode_likeness(other)))
    (line,) = told.people
    assert line.startswith("is not like rank 2: ") and word in line and "; next: " in line
    assert [said.rank for said in told.said if said.about is About.LIKED] == [2, 2, 2]
    told.healing.told(ToldByRank(1, About.LIKE, 0, encode_likeness(ONE)))
    assert len(told.people) == 1


def test_a_rank_that_runs_another_script_or_an_unknown_one_is_named() -> None:
    told = Told(ONE)
    told.healing.told(ToldByRank(1, About.LIKE, 0, encode_likeness(CHANGED)))
    told.healing.told(ToldByRank(2, About.LIKE, 0, encode_likeness(msgspec.structs.replace(ONE, script=""))))
    one, other = told.people
    assert one.startswith("is not like rank 1: the text of the main script is bb here, and there cc; next: run one")
    assert "rank 2" in other and "and there not known (python -m" in other
    assert unlike_script(*[msgspec.structs.replace(ONE, script="")] * 2) == "", "nothing is known of either"
    told = Told(ONE)
    told.healing.told(ToldByRank(1, About.LIKE, 0, encode_likeness(msgspec.structs.replace(OTHER, script="cc"))))
    assert all(word in told.people[0] for word in ("other bits", "main script", "hosts that are alike", "one script"))


def test_the_main_script_is_known_by_its_text_where_python_was_given_a_file(tmp_path: Path) -> None:
    says = "from covey.healing.likeness import main_script; print('found', main_script())"
    (tmp_path / "one.py").write_text(says)

    def found(*words: str) -> str:
        where = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, *filter(None, sys.path))))}
        done = subprocess.run([sys.executable, *words], env=where, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.removeprefix("found").strip()

    assert found(str(tmp_path / "one.py")) == hashlib.blake2b(says.encode(), digest_size=8).hexdigest()
    assert [found("-m", "one"), found("-c", says)] == ["", ""]


def test_a_main_script_whose_file_is_gone_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/no/such/file", raising=False)
    assert main_script() == ""


def recovered(like: Likeness, source: Likeness, lost: Likeness | None) -> tuple[Told, StateLost | None]:
    """A successor that is `like` this, after the answers of the two others."""
    told, failed, said = Told(like, 1), list[StateLost](), list[str]()

    def recover() -> None:
        try:
            told.healing.recover(said.append, False)
        except StateLost as error:
            failed.append(error)

    thread = threading.Thread(target=recover, daemon=True)
    thread.start()
    held = HeldState({}, b"")
    held.make_sum()
    for rank in (1, 2):
        have = held.haves(1, 5, 0, {}, {}, source, lost if rank == 2 else None)[0]
        told.healing.told(ToldByRank(rank, About.HAVE, 5, encode_have(have)))
    thread.join(10.0)
    assert not thread.is_alive()
    told.people = said
    return told, failed[0] if failed else None


def test_a_successor_with_another_version_ends_and_says_which() -> None:
    _, lost = recovered(NEWER, ONE, ONE)
    assert lost is not None and lost.why == "compared with rank 1, numpy here is 2.2, and there 2.1"
    assert "as the ranks that are there were started" in lost.next


def test_a_successor_on_another_kind_of_processor_goes_on_and_says_so() -> None:
    told, lost = recovered(OTHER, ONE, ONE)
    assert lost is None and told.healing.step == 5
    assert "last bits of the result will differ" in told.people[0] and "EPYC with AVX512" in told.people[0]


def test_a_successor_that_runs_another_script_goes_on_and_says_so() -> None:
    told, lost = recovered(CHANGED, ONE, ONE)
    assert lost is None and "runs another script than rank 1, which gives the state" in told.people[0]
    assert "is cc here, and there bb" in told.people[0]


def test_a_successor_is_compared_with_the_lost_rank_where_somebody_knows_it() -> None:
    told, lost = recovered(OTHER, ONE, OTHER)
    assert lost is None and not told.people, "it computes as the one before it did, though others do not"
    told, lost = recovered(OTHER, ONE, None)
    assert lost is None and told.people


@given(st.binary(max_size=300))
def test_whatever_is_told_of_a_likeness_ends_nothing(data: bytes) -> None:
    told = Told(ONE)
    told.healing.told(ToldByRank(1, About.LIKE, 0, data))
    try:
        known = likeness_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        assert not told.people and not told.healing.machine._likes
        return
    assert told.healing.machine._likes == {1: known}

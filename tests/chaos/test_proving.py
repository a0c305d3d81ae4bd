"""Planting bugs in a copy of the tree: which checks notice them, which do not, and that the copy is what is tried."""

from pathlib import Path

import msgspec
import pytest

from chaos import main as command
from chaos.known_trials import KnownTrials
from chaos.planted import ROOT, Mutant
from chaos.proving import Proof, Ran, Trial, Workbench, by_simulator, by_tests, summary, table

HEARD_ONCE = Mutant(
    file="gossip/packet.py",
    find="is_new = self._is_new(sender, boot, counter)",
    replace="is_new = self._is_new(sender, boot, -counter)",
    why="A datagram that somebody recorded is heard again.",
    hosts="one",
    tests=("tests/gossip/test_packet.py::test_a_datagram_is_heard_once",),
    area="gossip",
    slug="heard-again",
)
UNSEEN = msgspec.structs.replace(
    HEARD_ONCE, tests=("tests/gossip/test_packet.py::test_a_key_id_is_no_part_of_its_key",), slug="unseen"
)
STALE = msgspec.structs.replace(HEARD_ONCE, find="no such text", slug="stale")
NO_TERMS = Mutant(
    file="gossip/types.py",
    find="class HostDown(",
    replace="raise RuntimeError('planted')\nclass HostDown(",
    why="No agent starts.",
    hosts="several",
    story="agent_killed",
    seeds="1",
    area="gossip",
    slug="no-words",
)


@pytest.mark.long
def test_tests_notice_a_planted_bug_and_the_tree_itself_is_untouched(tmp_path: Path) -> None:
    before = (ROOT / HEARD_ONCE.file).read_bytes()
    proof = Proof(tmp_path, [HEARD_ONCE, UNSEEN, STALE], cpu_s=0, workers=1)
    caught, unseen, stale = proof.run()
    assert caught.by_tests == HEARD_ONCE.tests[0]
    assert (unseen.caught, unseen.unusable) == (False, "")
    assert "not once" in stale.unusable and not stale.caught
    assert (ROOT / HEARD_ONCE.file).read_bytes() == before
    assert (proof.benches[0].folder / HEARD_ONCE.file).read_bytes() == before, "the bug is taken out again"


@pytest.mark.long
def test_the_simulator_notices_a_planted_bug(tmp_path: Path) -> None:
    (trial,) = Proof(tmp_path, [NO_TERMS], cpu_s=20, workers=1).run()
    assert trial.caught and trial.by_simulator.startswith("exit status")


def test_a_copy_whose_processes_would_see_the_original_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    for package in ("covey", "gossip", "plugins", "agent", "cli"):  # chaos is not there: the installed one is found
        (tree / package).mkdir(parents=True)
        (tree / package / "__init__.py").touch()
    with pytest.raises(RuntimeError, match=r"import .*chaos/__init__\.py"):
        Workbench(tmp_path / "copy", tree)


@pytest.mark.long
def test_a_test_that_is_red_without_the_bug_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = Proof(tmp_path, [HEARD_ONCE], cpu_s=0, workers=1)
    other = proof.clean.folder / "gossip/packet.py"
    other.write_text(other.read_text().replace(HEARD_ONCE.find, HEARD_ONCE.replace))
    (trial,) = proof.run()
    assert "red without the bug" in trial.unusable and not trial.caught


def test_what_a_check_printed_is_read() -> None:
    failed = Ran(1, "x\nFAILED tests/a.py::test_b - assert 1 == 2\n1 failed", 1.0)
    assert by_tests(failed) == "tests/a.py::test_b"
    assert by_tests(Ran(0, "2 passed", 1.0)) == ""
    assert "not over" in by_tests(Ran(-24, "", 200.0))
    with pytest.raises(ValueError, match="cannot be run"):
        by_tests(Ran(4, "ERROR: not found", 0.1))
    broken = Ran(1, "BROKEN: swarm seed 12: Broken: no tenant runs more\nat 3 s", 9.0)
    assert by_simulator(broken) == "swarm 12: Broken: no tenant runs more"
    assert by_simulator(Ran(0, "9 stories held", 9.0)) == ""


def test_the_shares_decide_and_an_unusable_mutant_is_never_enough() -> None:
    caught, survivor = Trial(HEARD_ONCE, by_tests="tests/a.py::test_b"), Trial(UNSEEN, tests_cpu_s=1.0)
    assert summary([caught] * 19 + [survivor])[1]
    assert not summary([caught] * 18 + [survivor])[1]
    assert not summary([caught] * 19 + [Trial(STALE, unusable="stale")])[1]
    several = Trial(NO_TERMS, by_tests="tests/a.py::test_b", simulator_cpu_s=300.0)
    seen = msgspec.structs.replace(several, by_simulator="swarm 3: it broke")
    assert summary([seen, seen, several])[1]
    assert not summary([seen, several])[1]
    assert summary([seen, several], asked=False)[1]
    words = table([survivor, caught, seen])
    assert words.index("gossip/unseen") < words.index("gossip/heard-again"), "survivors first"
    assert "**holds**" in words


def test_an_area_without_mutants_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(("mutants", "--area", "nowhere"))
    assert ended.value.code == 2
    assert "no such mutant" in capsys.readouterr().err


def test_what_was_caught_is_tried_again_once_its_file_or_its_tests_change(tmp_path: Path) -> None:
    test = tmp_path / HEARD_ONCE.tests[0].partition("::")[0]
    for path, text in ((tmp_path / HEARD_ONCE.file, HEARD_ONCE.find), (test, "def test(): ...")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    several = msgspec.structs.replace(HEARD_ONCE, hosts="several", slug="several")
    file = tmp_path / "known.jsonl"
    known = KnownTrials(file, tmp_path)
    for mutant in (several, HEARD_ONCE):
        known.add(mutant, 0.0, "test_a", "")
    known.tidy()
    read = KnownTrials(file, tmp_path)
    assert [line.split(b'"')[3] for line in file.read_bytes().splitlines()] == [
        b"gossip/heard-again",
        b"gossip/several",
    ]
    assert read.of(HEARD_ONCE, 300.0) is not None, "one host: no simulator is asked"
    assert read.of(several, 0.0) is not None and read.of(several, 300.0) is None
    assert read.of(UNSEEN, 0.0) is None and read.of(STALE, 0.0) is None
    assert read.of(msgspec.structs.replace(HEARD_ONCE, replace="x"), 0.0) is None
    test.write_text("def test(): assert True")
    assert read.of(HEARD_ONCE, 0.0) is None
    file.write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1"):
        KnownTrials(file, tmp_path)

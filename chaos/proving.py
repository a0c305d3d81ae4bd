"""Do the checks notice planted bugs? Each mutant is planted in a copy of the tree and its check is run there.

    covey-chaos mutants --area memory --cpu-seconds 60

Nothing is changed in the tree itself: processes of the copy import the copy's packages (`PYTHONPATH` comes before an
editable install; `Workbench` proves it), and byte code is validated by the source's hash, since a bug that is planted
and taken out again within a second may have the size of what it replaced.

A mutant is *caught* by its tests when one of them fails, by the simulator when a story does not hold. The same check
must hold without the bug: the named tests are run once on the clean copy, and so is each story and seed that noticed
one.
"""

import compileall
import os
import py_compile
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from chaos.known_trials import KnownTrials
from chaos.planted import ROOT, Mutant, problems, with_bug
from chaos.story import known_stories

PACKAGES = ("covey", "gossip", "plugins", "agent", "cli", "sim", "chaos")
COPIED = (
    *(*PACKAGES, "tools", "tests", "docs", "bench", "examples", "systemd"),
    *("pyproject.toml", "MANIFEST.in", "Makefile", "README.md", "LICENSE"),
)
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "results")
WORKERS_MAX = 2
TEST_CPU_S = 200
"""CPU seconds that the named tests of a mutant may take: a bug may make them spin."""
STORY_CPU_S = 300.0
"""CPU seconds for the story of a mutant that names no tests, where the simulator is not asked for otherwise."""
SOAK_EXTRA_S = 120
"""CPU seconds beyond its own limit after which a soak is taken to hang in one callback."""
WALL_S = 3600.0
"""Seconds of wall clock after which a check is killed, whatever the machine was busy with."""
SHARE = 0.95
"""Least share of all mutants that tests or the simulator must catch."""
SIMULATOR_SHARE = 0.6
"""Least share of the mutants that concern several hosts which the simulator alone must catch."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
BROKEN = re.compile(r"^BROKEN: (\w+) seed (\d+): (.*)$", re.MULTILINE)


class Ran(msgspec.Struct, frozen=True):
    """One process: exit status (negative: the signal that ended it), what it printed, its CPU seconds."""

    code: int
    printed: str
    cpu_s: float


class Trial(msgspec.Struct, frozen=True):
    """The result for one mutant. `by_tests` and `by_simulator` say what noticed it; empty: nothing did."""

    mutant: Mutant
    by_tests: str = ""
    by_simulator: str = ""
    tests_cpu_s: float = 0.0
    simulator_cpu_s: float = 0.0
    unusable: str = ""
    """Why this trial proves nothing: the mutant is stale, or its check is red without the bug."""

    @property
    def caught(self) -> bool:
        return bool(self.by_tests or self.by_simulator) and not self.unusable


class Workbench:
    """A copy of the tree whose processes see the copy and nothing of the original."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder = folder
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, folder / name, ignore=LEFT_OUT)
            elif (root / name).exists():
                shutil.copy2(root / name, folder / name)
        for package in (*PACKAGES, "tests"):
            compileall.compile_dir(
                folder / package, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
            )
        seen = self.run("-c", f"import {', '.join(PACKAGES)}; print({', '.join(f'{p}.__file__' for p in PACKAGES)})")
        elsewhere = [file for file in seen.printed.split() if not file.startswith(str(folder))]
        if seen.code or elsewhere:
            raise RuntimeError(f"processes of the copy in {folder} import {elsewhere or seen.printed}, not the copy")

    def plant(self, mutant: Mutant) -> Callable[[], None]:
        """Put the bug in; returns a function that takes it out again. Raises ValueError when the mutant is stale."""
        path = self.folder / mutant.file
        text = with_bug(mutant, self.folder)
        before = path.read_text()
        path.write_text(text)

        def take_out() -> None:
            path.write_text(before)

        return take_out

    def run(self, *arguments: str, cpu_s: float = 60.0) -> Ran:
        """Run a Python of this environment in the copy."""
        environment = {
            **os.environ,
            "COVEY_LONG": "1",  # tests that the gate leaves out are checks too
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        limit = int(cpu_s) + 1
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(
                [sys.executable, "-P", *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5)),
            )
            too_late = threading.Timer(WALL_S, child.kill)
            too_late.start()
            _, status, usage = os.wait4(child.pid, 0)
            too_late.cancel()
            child.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            printed = output.read().decode(errors="replace")
        return Ran(child.returncode, printed, usage.ru_utime + usage.ru_stime)


# ---- one mutant ------------------------------------------------------------------------------------------------------


def _tests(bench: Workbench, tests: Sequence[str], cpu_s: float, first: bool = True) -> Ran:
    stop = ("-x",) if first else ()
    quiet = ("-q", "--no-header", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=300")
    return bench.run("-m", "pytest", *stop, *quiet, *tests, cpu_s=cpu_s)


def _soak(bench: Workbench, cpu_s: float, story: str, seeds: str) -> Ran:
    which = ("--story", story) if story else ()
    asked = ("--first", "--cpu-seconds", f"{cpu_s:g}", "--seeds", seeds)
    return bench.run("-m", "chaos.main", "soak", *asked, *which, cpu_s=cpu_s + SOAK_EXTRA_S)


def by_tests(ran: Ran) -> str:
    """The test that noticed something; empty when all held. Raises ValueError when they could not be run."""
    if ran.code in (-24, -9):
        return f"not over after {ran.cpu_s:.0f} CPU-s"
    if ran.code in (4, 5):
        raise ValueError(f"its tests cannot be run: {ran.printed.strip().splitlines()[-1:]}")
    found = FAILED.search(ran.printed)
    return (found[1] if found else f"exit status {ran.code}") if ran.code else ""


def by_simulator(ran: Ran) -> str:
    """The story that noticed something; empty when all held."""
    if ran.code in (-24, -9):
        return "a story does not end"
    found = BROKEN.search(ran.printed)
    if found:
        return f"{found[1]} {found[2]}: {found[3]}"
    return f"exit status {ran.code}" if ran.code else ""


class Proof:
    """Tries mutants, `workers` at a time; each worker has a copy of its own, and all share a clean one."""

    def __init__(self, folder: Path, mutants: Sequence[Mutant], cpu_s: float, workers: int, root: Path = ROOT) -> None:
        self.mutants, self.cpu_s, self.root = mutants, cpu_s, root
        self.workers = max(1, min(workers, WORKERS_MAX))
        self.clean = Workbench(folder / "clean", root)
        self.benches = [Workbench(folder / f"bench{number}", root) for number in range(self.workers)]
        self.red: frozenset[str] = frozenset()
        """Tests that fail without any bug."""
        self._clean_seeds: dict[tuple[str, str], bool] = {}
        self._free = list(self.benches)

    def run(self, told: Callable[[Trial], None] = lambda trial: None) -> list[Trial]:
        named = sorted({test for mutant in self.mutants for test in mutant.tests})
        if named:
            ran = _tests(self.clean, named, TEST_CPU_S + 60.0 * len(named), first=False)
            self.red = frozenset(FAILED.findall(ran.printed)) if ran.code in (0, 1) else frozenset(["all of them"])
        trials: list[Trial] = []
        with ThreadPoolExecutor(self.workers) as pool:
            for trial in pool.map(self._one, self.mutants):
                trials.append(trial)
                told(trial)
        return trials

    def _one(self, mutant: Mutant) -> Trial:
        wrong = problems(mutant, frozenset(known_stories()), self.root)
        red = sorted(test for test in self.red if test == "all of them" or _concerns(test, mutant.tests))
        if wrong or (red and mutant.tests):
            return Trial(mutant, unusable=wrong[0] if wrong else f"red without the bug: {', '.join(red[:3])}")
        bench = self._free.pop()
        take_out = bench.plant(mutant)
        try:
            return self._try(bench, mutant)
        except ValueError as error:
            return Trial(mutant, unusable=str(error))
        finally:
            take_out()
            self._free.append(bench)

    def _try(self, bench: Workbench, mutant: Mutant) -> Trial:
        noticed, cpu_s = "", 0.0
        if mutant.tests:
            ran = _tests(bench, mutant.tests, TEST_CPU_S)
            noticed, cpu_s = by_tests(ran), ran.cpu_s
        trial = Trial(mutant, by_tests=noticed, tests_cpu_s=cpu_s)
        if not mutant.story and (mutant.hosts == "one" or self.cpu_s <= 0):
            return trial
        if noticed and self.cpu_s <= 0:
            return trial
        seeds = mutant.seeds if mutant.story else "1-100000"
        ran = _soak(bench, self.cpu_s if self.cpu_s > 0 else STORY_CPU_S, mutant.story, seeds)
        seen = by_simulator(ran)
        where = BROKEN.search(ran.printed)
        if where and not self._holds_clean(where[1], where[2]):
            return msgspec.structs.replace(trial, unusable=f"{where[1]} seed {where[2]} breaks without the bug")
        return msgspec.structs.replace(trial, by_simulator=seen, simulator_cpu_s=ran.cpu_s)

    def _holds_clean(self, story: str, seed: str) -> bool:
        key = (story, seed)
        if key not in self._clean_seeds:
            self._clean_seeds[key] = not by_simulator(_soak(self.clean, 3600.0, story, seed))
        return self._clean_seeds[key]


def _concerns(red: str, tests: Sequence[str]) -> bool:
    """Whether a test that is red is one of these, or a case of one of these."""
    return any(red == test or red.startswith((f"{test}[", f"{test}::")) for test in tests)


# ---- what is said about all of them ----------------------------------------------------------------------------------


def table(trials: Sequence[Trial]) -> str:
    """Markdown: one row per mutant, worst first within its area."""
    lines = ["| mutant | hosts | tests | simulator | CPU-s | what it would do |", "|---|---|---|---|---|---|"]
    for trial in sorted(trials, key=lambda trial: (trial.mutant.area, trial.caught, trial.mutant.slug)):
        mutant = trial.mutant
        tests = trial.by_tests.rpartition("::")[2] or ("**holds**" if mutant.tests else "-")
        simulator = trial.by_simulator or ("**holds**" if trial.simulator_cpu_s else "-")
        if trial.unusable:
            tests, simulator = f"**unusable**: {trial.unusable}", "-"
        elif mutant.harmless and not trial.caught:
            tests = f"harmless: {mutant.harmless}"
        spent = f"{trial.tests_cpu_s:.0f} + {trial.simulator_cpu_s:.0f}"
        cells = (mutant.name, mutant.hosts, tests, simulator[:100], spent, mutant.why)
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def summary(trials: Sequence[Trial], asked: bool = True) -> tuple[str, bool]:
    """A few lines in words, and whether the shares hold. Mutants called harmless count as not caught. `asked`: was the
    simulator asked about every mutant that concerns several hosts, and not only those that tests let through?"""
    caught = sum(trial.caught for trial in trials)
    several = [trial for trial in trials if trial.mutant.hosts == "several"]
    seen = sum(bool(trial.by_simulator) and trial.caught for trial in several)
    unusable = [trial.mutant.name for trial in trials if trial.unusable]
    tried = asked and any(trial.simulator_cpu_s for trial in several)
    lines = [f"{caught} of {len(trials)} caught by tests or simulator (wanted: {SHARE:.0%})"]
    if tried:
        lines.append(
            f"{seen} of {len(several)} that concern several hosts caught by the simulator alone "
            f"(wanted: {SIMULATOR_SHARE:.0%})"
        )
    lines.append(f"{sum(trial.tests_cpu_s + trial.simulator_cpu_s for trial in trials):.0f} s of CPU")
    if unusable:
        lines.append(f"unusable: {', '.join(unusable)}")
    enough = caught >= SHARE * len(trials) and (not tried or seen >= SIMULATOR_SHARE * len(several))
    return "\n".join(lines), enough and not unusable


def prove(
    mutants: Sequence[Mutant], cpu_s: float, workers: int = WORKERS_MAX, known: KnownTrials | None = None
) -> bool:
    """Try these mutants, print the result of each and of all; returns whether enough were caught. Those that are
    `known` are not tried, and the others are written down there."""
    before: list[Trial] = []
    for mutant in mutants:
        if known is not None and (found := known.of(mutant, cpu_s)) is not None:
            before.append(Trial(mutant, found.by_tests, found.by_simulator))
    is_known = {trial.mutant.name for trial in before}

    def tell(trial: Trial) -> None:
        became = trial.unusable or trial.by_tests or trial.by_simulator or trial.mutant.harmless or "SURVIVED"
        print(f"{trial.mutant.name}: {became}", file=sys.stderr, flush=True)
        if known is not None and trial.caught:
            known.add(trial.mutant, cpu_s, trial.by_tests, trial.by_simulator)

    with tempfile.TemporaryDirectory(prefix="covey-mutants-") as folder:
        os.chmod(folder, 0o755)  # tests run programs of the copy as other users
        left = [mutant for mutant in mutants if mutant.name not in is_known]
        trials = Proof(Path(folder), left, cpu_s, workers).run(tell) if left else []
    if known is not None:
        known.tidy()
    words, enough = summary([*before, *trials], cpu_s > 0)
    print(table(trials), words, *([f"{len(before)} of them known from before"] if before else []), sep="\n\n")
    return enough

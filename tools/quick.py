"""`make quick`: style, and the tests that are nearest to a change, for half a minute.

    python -m tools.quick [FOLDER ...] [--seconds 30]

Without a folder: what differs from the last commit, or if nothing does, the last commit. Tests come in this order:
those that were changed; those named after a changed file; those that import a changed module; those that import a
module that imports one. What starts real racks or takes long is left to `make check`. Pytest ends when the time is
over; the last line says how many of the related tests were run, and the command for all of them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)|import[ \t]+([\w., \t]+))", re.M
)
LEFT_OUT = ("tests/rack/", "tests/guest/")
"""Tests of racks of real programs: seconds each."""
UNTIL, TOLD = "COVEY_QUICK_UNTIL", "COVEY_QUICK_TOLD"
"""Environment of pytest: when it ends (CLOCK_MONOTONIC, s), and the file for its figures."""
ENDS_S = 5.0
"""How long before the end no further test begins; what runs at the end is killed."""
WORKERS = 2
SHOWN = 20
"""Most test files that are named in the command for all of them."""


def module_of(path: str) -> str:
    """The dotted name of a Python file of the repository."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imported(text: str) -> set[str]:
    """Dotted names that a file imports: modules, and names of modules that may be modules themselves."""
    found: set[str] = set()
    for module, names, plain in IMPORT.findall(text):
        if module:
            found.add(module)
            for name in re.sub(r"#[^\n]*", "", names).strip("()").split(","):
                found.add(f"{module}.{name.split(' as ')[0].strip()}")
        found |= {each.split(" as ")[0].strip() for each in plain.split(",") if each.strip()}
    return found


def near(one: str, other: str) -> int:
    """Number of folders that two files have in common, `tests` left out."""
    pairs = zip(one.removeprefix("tests/").split("/")[:-1], other.removeprefix("tests/").split("/")[:-1], strict=False)
    count = 0
    for mine, theirs in pairs:
        if mine != theirs:
            break
        count += 1
    return count


def related(changed: Collection[str], imports: Mapping[str, Collection[str]]) -> list[str]:
    """Test files for a change, the nearest first. `changed`: paths of files; `imports`: of every Python file of the
    repository, by path, what it imports."""
    users: dict[str, set[str]] = defaultdict(set)
    modules = {module_of(path): path for path in imports}
    for path, names in imports.items():
        for name in names:
            if name in modules and modules[name] != path:
                users[modules[name]].add(path)
    product = [path for path in changed if path.endswith(".py")]
    direct = {user for path in product for user in users[path]}
    further = {user for path in direct for user in users[path]}
    stems = {Path(path).stem for path in product}
    closeness = {path: max((near(path, each) for each in product), default=0) for path in imports}

    def rank(test: str) -> tuple[int, int, str]:
        named = Path(test).stem.removeprefix("test_") in stems and closeness[test] > 0
        step = 0 if test in changed else 1 if named else 2 if test in direct else 3
        return step, -closeness[test], test

    tests = [path for path in imports if path.startswith("tests/") and Path(path).name.startswith("test_")]
    return sorted(
        (
            test
            for test in tests
            if (test in changed or test in direct or test in further or rank(test)[0] == 1)
            and (test in changed or not test.startswith(LEFT_OUT))
        ),
        key=rank,
    )


def listed(*words: str) -> list[str]:
    """What git prints, by lines."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line]


def changes(folders: Sequence[str]) -> list[str]:
    """Paths that a change is about."""
    if folders:
        return listed("ls-files", "--", *folders)
    others = listed("ls-files", "--others", "--exclude-standard")
    return [*listed("diff", "--name-only", "HEAD"), *others] or listed("diff", "--name-only", "HEAD~1", "HEAD")


def passes_style(paths: Iterable[str]) -> bool:
    """Whether ruff has nothing to say of these files."""
    python = [path for path in paths if path.endswith(".py") and (ROOT / path).is_file()]
    ruff = [sys.executable, "-m", "ruff"]
    commands = ([*ruff, "check", *python], [*ruff, "format", "--check", "-q", *python]) if python else ()
    codes = [subprocess.run(command, cwd=ROOT, check=False).returncode for command in commands]
    return not any(codes)


def main(arguments: Sequence[str] | None = None) -> int:
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="instead of what differs from the last commit")
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args(arguments)
    unknown = [folder for folder in given.folders if not (ROOT / folder).exists()]
    if unknown:
        print(f"quick: there is no {unknown[0]!r} here; next: a path from the root, as plugins/memory", file=sys.stderr)
        return 2
    changed = changes(given.folders)
    good = passes_style(changed)
    imports = {
        path: imported((ROOT / path).read_text(encoding="utf-8"))
        for path in listed("ls-files", "--cached", "--others", "--exclude-standard", "--", "*.py")
        if (ROOT / path).is_file()
    }
    tests = related(changed, imports)
    if not tests:
        print("quick: no test imports what changed; next: make check")
        return 0 if good else 1
    with tempfile.TemporaryDirectory(prefix="covey-quick-") as folder:
        told = Path(folder, "told.json")
        until_s = began_s + max(given.seconds - ENDS_S, 1.0)
        environ = {**os.environ, UNTIL: str(until_s), TOLD: str(told)}
        options = ["-n", str(WORKERS), "--maxfail", "3", "-m", "not slow and not long", "-p", "tools.quick"]
        with subprocess.Popen([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, env=environ) as process:
            try:
                process.wait(max(1.0, began_s + given.seconds - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # its workers end when it is gone
        figures = json.loads(told.read_text()) if told.is_file() else {"run": 0, "failed": 1, "all": 0}
    ran, failed, seconds = f"{figures['run']} of {figures['all']}", figures["failed"], time.monotonic() - began_s
    print(f"quick: {ran} tests of {len(tests)} files ran, {failed} failed, {seconds:.0f} s")
    if figures["run"] < figures["all"]:
        rest = f".venv/bin/pytest -n {WORKERS} {' '.join(tests)}" if len(tests) <= SHOWN else "make check"
        print(f"quick: next: {rest}")
    return 1 if figures["failed"] or not good else 0


# ---- in pytest ----


class Clock:
    """Ends a session of pytest when its time is over, and counts."""

    def __init__(self, until_s: float, told: Path, stop: Callable[[], None]) -> None:
        """`stop` is called with each test that ends after `until_s` (CLOCK_MONOTONIC); `told`: file for the figures."""
        self.until_s, self.told, self.stop = until_s, told, stop
        self.ran: set[str] = set()
        self.failed: set[str] = set()
        self.all = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.all = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:
        self.all = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when == "teardown":
            self.ran.add(report.nodeid)
        figures = {"run": len(self.ran), "failed": len(self.failed), "all": self.all}
        self.told.write_text(json.dumps(figures), encoding="utf-8")
        if time.monotonic() > self.until_s:
            self.stop()


def pytest_configure(config: pytest.Config) -> None:
    """Only in the process that is asked for figures: not in workers."""
    if TOLD not in os.environ or hasattr(config, "workerinput"):
        return

    def stop() -> None:
        """End the session of pytest-xdist, or pytest's own where there is none."""
        session = config.pluginmanager.getplugin("dsession") or config.pluginmanager.getplugin("session")
        if session is not None:
            session.shouldstop = "the time is over"

    config.pluginmanager.register(Clock(float(os.environ[UNTIL]), Path(os.environ[TOLD]), stop), "covey-quick")


if __name__ == "__main__":
    sys.exit(main())

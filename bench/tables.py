"""`make tables`: every experiment of these folders, its tables and figures under `bench/results/`.

Each file of a folder beside this one that has `EXPERIMENTS` (name -> function of a progress callback that returns a
`Report`) takes part. An experiment writes NAME.md, NAME.csv and, when it has figures, NAME.svg.

    python bench/tables.py                 all of them
    python bench/tables.py jobs-gain       those
    python bench/tables.py --list          which there are
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from difflib import get_close_matches
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from sim import output  # noqa: E402
from sim.main import Shown  # noqa: E402
from sim.report import Progress, Report  # noqa: E402

RESULTS = HERE / "results"
Experiment = Callable[[Progress], Report]


def experiments(file: Path) -> dict[str, Experiment]:
    """Experiments that a file offers; none when it is no file of experiments."""
    spec = importlib.util.spec_from_file_location(f"bench_{file.stem}", file)
    if spec is None or spec.loader is None or "EXPERIMENTS" not in file.read_text(encoding="utf-8"):
        return {}
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return dict(getattr(module, "EXPERIMENTS", {}))


def offered() -> dict[str, Path]:
    """Name of every experiment -> its file."""
    found: dict[str, Path] = {}
    for file in sorted(HERE.glob("*/*.py")):
        for name in experiments(file):
            if name in found:
                raise SystemExit(f"tables: {name} is in {found[name].name} and in {file.name}")
            found[name] = file
    return found


def run(name: str, file: Path, progress: Progress | None = None) -> tuple[str, float, list[str]]:
    """Run one experiment and write it down; returns (name, seconds it took, its files)."""
    began = time.monotonic()
    report = experiments(file)[name](progress or (lambda share, text: None))
    spent = time.monotonic() - began
    RESULTS.mkdir(exist_ok=True)
    written = {".md": output.as_markdown(report, name), ".csv": output.as_csv(report)}
    if report.figures:
        written[".svg"] = output.svg(report.figures)
    for ending, text in written.items():
        (RESULTS / f"{name}{ending}").write_text(text, encoding="utf-8")
    return name, spent, [f"{name}{ending}" for ending in written]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tables", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these experiments, or those that begin so")
    parser.add_argument("--list", action="store_true", help="which there are")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes; with one there is finer progress"
    )
    options = parser.parse_args(argv)
    known = offered()
    if options.list:
        print("\n".join(f"{name:<28} {file.name}" for name, file in known.items()))
        return 0
    chosen = {name: file for name, file in known.items() if not options.names or _wanted(name, options.names)}
    for each in options.names:
        if not any(_wanted(name, [each]) for name in known):
            near = get_close_matches(each, known, 1, 0.4)
            print(f"tables: no experiment {each!r}; " + (f"did you mean {near[0]}?" if near else "--list shows all"))
            return 2
    began = time.monotonic()
    if options.workers > 1:
        _together(chosen, options.workers)
    else:
        _in_turn(chosen)
    print(f"{len(chosen)} experiments in {time.monotonic() - began:.0f} s; results in {RESULTS}")
    return 0


def _wanted(name: str, given: Sequence[str]) -> bool:
    return any(name == each or name.startswith(each) for each in given)


def _in_turn(chosen: dict[str, Path]) -> None:
    for at, (name, file) in enumerate(chosen.items()):
        shown = Shown()

        def progress(share: float, text: str, at: int = at, name: str = name, shown: Shown = shown) -> None:
            shown((at + share) / len(chosen), f"{name}: {text}")

        done = run(name, file, progress)
        shown.done()
        _said(done)


def _together(chosen: dict[str, Path], workers: int) -> None:
    with ProcessPoolExecutor(workers) as pool:
        for future in as_completed([pool.submit(run, name, file) for name, file in chosen.items()]):
            _said(future.result())


def _said(done: tuple[str, float, list[str]]) -> None:
    name, spent, files = done
    print(f"{spent:6.1f} s  {name:<28} {', '.join(files)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

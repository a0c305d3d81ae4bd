"""What a failure story costs: CPU seconds per story, per callback and per simulated second.

    python bench/story_cost.py --seeds 1-8 --repeats 3
    python bench/story_cost.py --seeds 1-8 --repeats 3 --against DIR      # another checkout, in turns with this one
    python bench/story_cost.py --seeds 1-24 --where                       # which files it is spent in

Every repeat is a process of its own, which imports once, as a soak does; the import is counted apart. The median of
the repeats is printed. On a machine that does other work compare two trees within one run only.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from chaos.planted import range_of
from chaos.story import tell

ROOT = Path(__file__).parent.parent
ONE = """
import json, sys, time
began = time.process_time()
from chaos.story import tell
imported = time.process_time()
told = [tell(sys.argv[1], int(seed)) for seed in sys.argv[2:]]
over = time.process_time()
print(json.dumps([imported - began, over - imported, sum(t.steps for t in told), sum(t.seconds for t in told)]))
"""


def measured(tree: Path, story: str, seeds: range) -> list[float]:
    """CPU seconds of the import, CPU seconds of the stories, callbacks, simulated seconds."""
    command = [sys.executable, "-c", ONE, story, *map(str, seeds)]
    told = subprocess.run(command, cwd=tree, env={"PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(told.stdout)
    return found


def line(name: str, runs: list[list[float]], stories: int) -> str:
    imports, cpu, steps, seconds = (statistics.median(run[at] for run in runs) for at in range(4))
    return (
        f"{name}: {cpu / stories:.2f} CPU-s a story, {cpu / steps * 1e6:.1f} us a callback, "
        f"{cpu / seconds * 1e3:.1f} ms a simulated second; {stories} stories, {steps:.0f} callbacks, {seconds:.0f} s, "
        f"{imports:.2f} CPU-s to import"
    )


def where(story: str, seeds: range) -> Counter[str]:
    """File -> how often a signal, sent for every 4 ms of CPU (what the kernel counts), found it running."""
    found: Counter[str] = Counter()

    def look(number: int, frame: FrameType | None) -> None:
        if frame is not None:
            path = Path(frame.f_code.co_filename)
            found[str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else f"python/{path.name}"] += 1

    tell(story, seeds[0])
    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, 0.004, 0.004)
    try:
        for seed in seeds:
            tell(story, seed)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
    return found


def shares(found: Counter[str]) -> str:
    """Shares by package, then by file, in percent of all."""
    packages: Counter[str] = Counter()
    for file, times in found.items():
        packages[file.partition("/")[0]] += times
    told = [f"{100 * times / found.total():5.1f} %  {name}" for name, times in packages.most_common()]
    told += [f"{100 * times / found.total():5.1f} %  {name}" for name, times in found.most_common(25)]
    return "\n".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--story", default="swarm")
    parser.add_argument("--seeds", type=range_of, default=range(1, 9), metavar="A-B")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, for example of an older release")
    parser.add_argument("--where", action="store_true", help="say which files the CPU goes to, and nothing else")
    options = parser.parse_args()
    if options.where:
        print(shares(where(options.story, options.seeds)))
        return
    trees = {"here": ROOT} | ({str(options.against): options.against.resolve()} if options.against else {})
    runs: dict[str, list[list[float]]] = {name: [] for name in trees}
    for _ in range(options.repeats):
        for name, tree in trees.items():
            runs[name].append(measured(tree, options.story, options.seeds))
    for name, found in runs.items():
        print(line(name, found, len(options.seeds)))


if __name__ == "__main__":
    main()

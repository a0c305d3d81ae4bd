"""`covey-sim`: what would the six systems decide for this workload, why, and how much would it gain?

Virtual time, on the policies that agents call. Exit codes: 0 done, 1 error, 2 wrong usage or unusable input, 130
interrupted.
"""

import argparse
import importlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from cli.client import FAILED, USAGE, AgentctlError
from cli.main import Parser, say_error
from cli.table import BOLD, DIM, YELLOW, Paint
from sim import output
from sim.report import Progress, Report, Wrong

COMMANDS = {
    "jobs": ("jobs.jobs", "run a trace of jobs under a scheduling policy"),
    "import": ("jobs.sacct", "turn the accounting of another scheduler into a trace: import sacct FILE"),
    "memory": ("memory.memory", "remote memory: a rack of hosts and containers"),
    "aggregators": ("tensors.aggregators", "tensors of many jobs on few CPUs"),
    "tuner": ("tuner.tuner", "workers and servers of one job on given hosts"),
    "groups": ("groups.groups", "many jobs on one set of hosts"),
    "sharing": ("sharing.sharing", "two jobs on one GPU"),
}
"""Word -> (module below this package, a line). The module gives `HELP`, `arguments(parser)`, `run(options, progress)`;
one that uses random numbers also gives `SEED`, its default, and gets `--seed`."""
SHOW_EVERY_S = 0.1
SHOW_EVERY_QUIET_S = 15.0


class Shown:
    """Progress on stderr: one line that is written over on a terminal; elsewhere a new line now and then."""

    def __init__(self, out: TextIO | None = None, on: bool = True) -> None:
        self.out = sys.stderr if out is None else out
        self.terminal = self.out.isatty()
        self.on = on
        self.began_s = self.last_s = time.monotonic()
        self.width = 0

    def __call__(self, share: float, text: str) -> None:
        now_s = time.monotonic()
        if not self.on or now_s - self.last_s < (SHOW_EVERY_S if self.terminal else SHOW_EVERY_QUIET_S):
            return
        self.last_s = now_s
        line = f"{100 * min(1.0, max(0.0, share)):3.0f} %  {now_s - self.began_s:5.1f} s  {text}"
        if self.terminal:
            line = line[: self._columns() - 1]  # a full line would scroll
            self.out.write("\r" + line.ljust(min(self.width, self._columns() - 1)))
            self.width = max(self.width, len(line))
        else:
            self.out.write(line + "\n")
        self.out.flush()

    def _columns(self) -> int:
        try:
            return max(2, os.get_terminal_size(self.out.fileno()).columns)
        except (OSError, ValueError):
            return max(2, shutil.get_terminal_size().columns)

    def done(self) -> None:
        """Remove the line of progress."""
        if self.terminal and self.width:
            self.out.write("\r" + " " * min(self.width, self._columns() - 1) + "\r")
            self.out.flush()


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        code = run(given)
        sys.stdout.flush()
        return code
    except AgentctlError as error:
        say_error(error, "--json" in given, "covey-sim")
        return error.code
    except Wrong as wrong:
        say_error(AgentctlError(USAGE, wrong.what, wrong.why, wrong.next), "--json" in given, "covey-sim")
        return USAGE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is not None:
            raise  # files are checked where they are opened; what has no name is standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        said = AgentctlError(FAILED, "standard output cannot be written", str(error), "write somewhere else")
        say_error(said, "--json" in given, "covey-sim")
        return FAILED
    except KeyboardInterrupt:
        return 130


def run(argv: Sequence[str]) -> int:
    words = [word for word in argv if not word.startswith("-")]
    if not words or argv[0] in ("-h", "--help", "help"):
        print(help_text(Paint()))
        return 0 if argv else USAGE
    name = argv[0]
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1, 0.5)
        next_step = f"did you mean: covey-sim {near[0]}" if near else "covey-sim --help"
        raise AgentctlError(USAGE, f"covey-sim has no word {name!r}", f"known: {', '.join(COMMANDS)}", next_step)
    module = load(name)
    options = options_of(name, module, argv[1:])
    check_plot(options.plot)
    shown = Shown(on=not options.quiet)
    progress: Progress = shown
    try:
        report: Report = module.run(options, progress)
    finally:
        shown.done()
    write(report, options)
    return 0


def load(name: str) -> ModuleType:
    path = f"sim.{COMMANDS[name][0]}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise AgentctlError(
            USAGE, f"covey-sim {name} is not built yet", f"{path} is missing", "covey-sim --help"
        ) from None


def options_of(name: str, module: ModuleType, argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        f"covey-sim {name}",
        description=module.__doc__,
        epilog=None,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.arguments(parser)
    taken = {flag for action in parser._actions for flag in action.option_strings}

    def add(flag: str, **how: Any) -> None:
        if flag not in taken:
            parser.add_argument(flag, **how)

    if hasattr(module, "SEED"):
        add("--seed", type=int, default=module.SEED, help=f"of chance (default {module.SEED})")
    add("--json", action="store_true", help="one object for programs")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the figures")
    add("--quiet", action="store_true", help="no progress on stderr")
    return parser.parse_args(argv)


def check_plot(path: Path | None) -> None:
    """Check, before minutes of simulation, that the figures can be written there; raises AgentctlError if not."""
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        raise AgentctlError(USAGE, f"--plot {path}: no folder {folder}", "it must be there before the run", "make it")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise AgentctlError(USAGE, f"--plot {path} cannot be written", "a folder, or not allowed", "name another file")


def write(report: Report, options: argparse.Namespace) -> None:
    """Write the report on stdout, or on stderr when the command itself has written to stdout (`options.report_aside`);
    then the figures, so that an error with them does not lose the report."""
    aside = getattr(options, "report_aside", False)
    out = sys.stderr if aside else sys.stdout
    if options.json:
        print(output.as_json(report), file=out)
    else:
        paint = Paint(out=out)
        print(output.text(report, paint), file=out)
        for warning in report.warnings:
            print(f"{Paint(out=sys.stderr)('note:', YELLOW)} {warning}", file=sys.stderr)
    if options.plot is None:
        return
    if not report.figures:
        raise AgentctlError(USAGE, f"{options.plot} was not drawn", "this run has no figure", "leave --plot out")
    try:
        options.plot.write_text(output.svg(report.figures), encoding="utf-8")
    except OSError as error:
        raise AgentctlError(USAGE, f"{options.plot} cannot be written", str(error), "name another file") from None
    if not options.json:
        print(f"drawn: {options.plot}", file=sys.stderr)


def help_text(paint: Paint) -> str:
    lines = ["covey-sim: what would the six systems decide for this workload, and how much would it gain?", ""]
    lines += [paint("commands", BOLD)] + [f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", paint("everywhere", BOLD), "  --json           for programs; errors too"]
    lines += ["  --plot FILE.svg  draw the figures", "  --quiet          no progress on stderr"]
    lines += ["  --seed N         of random numbers, where a command uses them"]
    lines += [
        "",
        paint("exit codes", BOLD),
        "  0 done   1 error   2 wrong usage or unusable input   130 interrupted",
        "",
    ]
    lines.append(paint("covey-sim COMMAND --help says more.", DIM))
    return "\n".join(lines)

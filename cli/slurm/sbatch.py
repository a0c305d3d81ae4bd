"""sbatch: submit a script, its options in `#SBATCH` lines and typed."""

import sys
from collections.abc import Sequence

from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.job_files import reading, sbatch_options
from cli.job_files.reading import JobFile
from cli.job_files.sbatch_options import Given, Said
from cli.jobs import submit
from cli.jobs.wait import wait

OUTPUT, OUTPUT_OF_TASKS = "slurm-%j.out", "slurm-%A_%a.out"
"""Where output goes unless somebody says so."""


def run(context: Context, words: Sequence[str]) -> int:
    typed, rest = sbatch_options.read(words, "sbatch")
    file = file_of(typed, rest)
    said = sbatch_options.merged([file.slurm, typed])
    if "output" not in said:
        typed["output"] = Given(OUTPUT_OF_TASKS if "array" in said else OUTPUT, "sbatch")
    args, command = submit.with_file(file, context.args, rest[1:], typed)
    job = submit.submitted(context, args, command)
    number = job["id"][1:]
    context.say(number if "parsable" in said else f"Submitted batch job {number}")
    return wait(context, job["id"]) if "wait" in said else 0


def file_of(typed: Said, rest: Sequence[str]) -> JobFile:
    """The script that is named, or comes over standard input, or that --wrap says."""
    if "wrap" in typed:
        if rest:
            why = "--wrap makes a script of its own"
            raise AgentctlError(USAGE, f"unexpected argument {rest[0]!r}", why, "leave --wrap or the script out")
        return reading.script("wrap", f"#!/bin/sh\n{typed['wrap'].value}\n".encode())
    if rest:
        return reading.read(rest[0])
    data = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read(reading.SCRIPT_BYTES_MAX + 1)
    if not data.startswith(b"#!"):
        why = "expected a script by its name, by --wrap, or on standard input with a line #!/bin/sh first"
        raise AgentctlError(USAGE, "no script to run", why, "sbatch job.sh")
    return reading.script("sbatch", data)

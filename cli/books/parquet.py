"""`agentctl history -o parquet`: the columns of `-o csv` with their types, for tools that read tables.

It needs the package pyarrow, which nothing else does."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cli.client import FAILED, USAGE, AgentctlError

TEXTS = ("job_id", "tenant", "status", "user", "name", "ended_as", "hosts")
FLOATS = (
    *("time_limit_s", "held_gpu_s", "used_gpu_s", "idle_gpu_s", "unknown_gpu_s", "preempted_gpu_s", "failed_gpu_s"),
    "restarts_gpu_s",
)
"""The columns of fractions; what is neither these nor text is whole numbers."""


def refuse_terminal() -> None:
    """AgentctlError where the bytes would go to a terminal."""
    if sys.stdout.isatty():
        why = "a terminal shows none of its bytes"
        raise AgentctlError(USAGE, "parquet needs a file", why, "agentctl history -o parquet > jobs.parquet")


def write(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write these rows to standard output as one Parquet file."""
    pyarrow, parquet = library()
    kinds = {name: pyarrow.string() for name in TEXTS} | {name: pyarrow.float64() for name in FLOATS}
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.int64())) for name in columns])
    held = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), held)
    sys.stdout.flush()
    sys.stdout.buffer.write(held.getvalue())


def library() -> tuple[Any, Any]:
    """pyarrow and its reader and writer of Parquet. AgentctlError where they are not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "pyarrow":
            raise
        why = f"the package pyarrow is not installed in {sys.prefix}"
        step = f"{sys.prefix}/bin/python -m pip install 'pyarrow>=17', or: agentctl history -o csv"
        raise AgentctlError(FAILED, "parquet needs pyarrow", why, step) from None
    return pyarrow, pyarrow.parquet

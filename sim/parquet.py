"""Parquet files for `covey-sim import`, read as the CSV that the same jobs would be. It needs the package pyarrow."""

import csv
import io
import sys
from typing import Any

from sim.files import BYTES_MAX
from sim.report import Wrong

MAGIC = b"PAR1"
"""How a Parquet file begins, and ends."""
ROWS_EACH = 1 << 14
COLUMNS_MAX = 1000


def csv_of(data: bytes, name: str, bytes_max: int = BYTES_MAX) -> str:
    """The rows of a Parquet file as CSV, what is not known as nothing. Raises Wrong when it is damaged, is no table of
    plain columns, or has more than `bytes_max` bytes as CSV."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        why = f"it is a Parquet file, and the package pyarrow is not installed in {sys.prefix}"
        step = f"{sys.prefix}/bin/python -m pip install 'pyarrow>=17', or write CSV"
        raise Wrong(f"{name} cannot be read", why, step) from None
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data))
        columns = file.schema_arrow.names
        if len(columns) > COLUMNS_MAX or any(pyarrow.types.is_nested(kind) for kind in file.schema_arrow.types):
            why = f"plain columns are expected, at most {COLUMNS_MAX}"
            raise Wrong(f"{name}: no table of jobs", why, "agentctl history -o parquet > jobs.parquet")
        if _unpacked(file.metadata) > bytes_max:
            raise Wrong(f"{name} is too large", f"at most {bytes_max} bytes are read, unpacked", "split the file")
        writer.writerow(columns)
        for batch in file.iter_batches(ROWS_EACH):
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                writer.writerow(["" if value is None else value for value in row])
            if out.tell() > bytes_max:
                raise Wrong(f"{name} is too large", f"at most {bytes_max} bytes are read, unpacked", "split the file")
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise Wrong(f"{name}: no Parquet that can be read", why, "write it anew") from None
    return out.getvalue()


def _unpacked(metadata: Any) -> int:
    """Bytes of all columns without their packing, as the file itself says."""
    return sum(int(metadata.row_group(at).total_byte_size) for at in range(metadata.num_row_groups))

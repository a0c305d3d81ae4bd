"""Files that people give `covey-sim`: plain or gzip, UTF-8 with or without a byte-order mark, of a bounded size."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

from cli.sim.report import Wrong

BYTES_MAX = 1 << 30
"""Of the unpacked text; a packed bomb must not fill the memory."""


def text_of(path: Path) -> str:
    """Wrong when it cannot be read, is larger than `BYTES_MAX` or is not UTF-8."""
    try:
        with open(path, "rb") as file:
            data = file.read(BYTES_MAX + 1)
            if data[:2] == b"\x1f\x8b":
                file.seek(0)
                data = gzip.GzipFile(fileobj=file).read(BYTES_MAX + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Wrong(f"{path} cannot be read", str(error), "name a file that is there, plain or gzip") from None
    if len(data) > BYTES_MAX:
        raise Wrong(f"{path} is too large", f"at most {BYTES_MAX} bytes are read", "split the file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise Wrong(f"{path}, line {line}: no text", f"{error.reason}; UTF-8 is expected", "convert the file") from None


def rows_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of every line of a CSV file that is not empty."""
    reader = csv.reader(io.StringIO(text_of(path), newline=""), strict=True)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            what = f"{path}, line {reader.line_num}: no CSV"
            raise Wrong(what, f"{error}", "correct the line; quotes come in pairs") from None
        if row is None:
            return
        if row and any(row):
            yield reader.line_num, row

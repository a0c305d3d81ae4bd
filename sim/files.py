"""Files that people give `covey-sim`: plain or gzip, UTF-8 with or without a byte-order mark, of a bounded size."""

import contextlib
import csv
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from sim.report import Wrong

BYTES_MAX = 1 << 30
"""Limit of the unpacked text in bytes; a packed bomb must not fill the memory."""
GZIP = b"\x1f\x8b"
"""How a packed file begins."""


def bytes_of(file: Path | str) -> bytes:
    """The content of a file, or of standard input (`-`), unpacked. Never holds more than `BYTES_MAX` of it, or twice
    that of a packed one. Raises Wrong when it cannot be read, unpacks to nothing sensible or is larger."""
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as stream:
            data = stream.read(BYTES_MAX + 1)
        if data[:2] == GZIP and len(data) <= BYTES_MAX:
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(BYTES_MAX + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Wrong(f"{file} cannot be read", str(error), "name a file that is there, plain or gzip") from None
    if len(data) > BYTES_MAX:
        raise Wrong(f"{file} is too large", f"at most {BYTES_MAX} bytes are read, unpacked", "split the file")
    return data


def text_of(path: Path) -> str:
    """The text of a file, read like `bytes_of`; raises Wrong also when it is not UTF-8."""
    data = bytes_of(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise Wrong(f"{path}, line {line}: no text", f"{error.reason}; UTF-8 is expected", "convert the file") from None


def rows_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, fields) for every line of a CSV file that is not empty."""
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

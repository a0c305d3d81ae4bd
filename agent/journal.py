"""Lines of the log as entries of systemd's journal, each with its priority and fields of its own.

    journalctl -u covey -p warning     what is wrong
    journalctl -u covey -o verbose     entries with their fields: host, event and whatever a line is said with, such as
                                       its job, in capitals behind `PREFIX` (docs/guides/failures.md)

The native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL): one datagram an entry. It is used only where standard error is
the journal's (`$JOURNAL_STREAM`), so that nothing is written past a file or a terminal. A stream to the journal has one
priority a line, by a prefix `<N>`, and no fields: that is for what is said before there is a log.
"""

import json
import os
import socket
from collections.abc import Mapping
from typing import Any, TextIO

SOCKET = "/run/systemd/journal/socket"
IDENTIFIER = "covey-agent"
"""What `journalctl -t` knows the agent by; the same as `SyslogIdentifier=` in the unit."""
PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2, "exception": 3}
"""Level -> priority of syslog(3)."""
ENTRY_BYTES_MAX = 128 << 10
"""The most bytes of an entry: below what any unix datagram may have. Of a longer one the fields are left out."""
PREFIX = "COVEY_"
NAME_MAX = 64
"""The most letters of a field's name."""


def is_journal(environ: Mapping[str, str], stream: TextIO) -> bool:
    """Whether systemd connected this very stream to the journal, which a process that redirects it inherits the
    variable of."""
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))


def prefix(level: str, environ: Mapping[str, str], stream: TextIO) -> str:
    """What begins a line of this level on this stream: `<3>` for an error where it is the journal's, else nothing."""
    return f"<{PRIORITIES[level]}>" if is_journal(environ, stream) else ""


def message(event: str, fields: Mapping[str, Any]) -> str:
    """A line for people: `agent started boot=1795952970 plugins=["memory"]`."""
    return " ".join([event, *(f"{name}={_word(value)}" for name, value in fields.items())])


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) and (not text or " " in text) else text


def entry(event: Mapping[str, Any]) -> bytes:
    """One entry, of an event of structlog: `event`, `level`, and fields."""
    fields = {name: value for name, value in event.items() if name not in ("event", "level", "timestamp", "host")}
    text, level = str(event["event"]), str(event.get("level", "info"))
    said: dict[str, Any] = {
        "MESSAGE": message(text, fields),
        "PRIORITY": PRIORITIES.get(level, 6),
        "SYSLOG_IDENTIFIER": IDENTIFIER,
    }
    said |= {f"{PREFIX}EVENT": text} | ({f"{PREFIX}HOST": event["host"]} if "host" in event else {})
    more = {f"{PREFIX}{name.upper()}"[:NAME_MAX]: value for name, value in fields.items()}
    whole = _encoded(said | more)
    return whole if len(whole) <= ENTRY_BYTES_MAX else _encoded(said | {"MESSAGE": said["MESSAGE"][:8192]})


def _encoded(fields: Mapping[str, Any]) -> bytes:
    return b"".join(_field(name, value) for name, value in fields.items())


def _field(name: str, value: Any) -> bytes:
    """`NAME=value`; a value of several lines is preceded by its length, 64 bits, little-endian."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    data = text.encode(errors="backslashreplace")
    if b"\n" in data:
        return name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"
    return name.encode() + b"=" + data + b"\n"


class JournalLogger:
    """What structlog writes to: each call is one entry. `lines` takes what the journal does not: its daemon is away, or
    behind, and must not keep the agent waiting."""

    def __init__(self, lines: TextIO, path: str | None = None) -> None:
        self._lines, self._path = lines, path or SOCKET
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    def msg(self, **event: Any) -> None:
        try:
            self._socket.sendto(entry(event), self._path)
        except OSError:
            number = PRIORITIES.get(str(event.get("level")), 6)
            self._lines.write(f"<{number}>{json.dumps(event, default=str)}\n")
            self._lines.flush()

    debug = info = warning = error = critical = exception = msg

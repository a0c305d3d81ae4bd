"""Entries of systemd's journal, as a socket in its place hears them."""

import io
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from agent import log as logs
from agent.journal import ENTRY_BYTES_MAX, IDENTIFIER, JournalLogger, entry, is_journal, prefix

UNIT = Path(__file__).parents[2] / "systemd" / "covey.service"


def fields(datagram: bytes) -> dict[str, str]:
    """The entry as journald reads it."""
    found = {}
    while datagram:
        line, _, rest = datagram.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + size], rest[9 + size :]
        found[name.decode()], datagram = value.decode(), rest
    return found


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.settimeout(5)
        yield listener


def test_an_entry_has_a_priority_an_identifier_and_fields_of_its_own() -> None:
    said = fields(entry({"event": "ranks wait", "level": "warning", "host": "gpu1", "job": "j7", "why": "no room"}))
    assert said == {
        "MESSAGE": 'ranks wait job=j7 why="no room"',
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "covey-agent",
        "COVEY_EVENT": "ranks wait",
        "COVEY_HOST": "gpu1",
        "COVEY_JOB": "j7",
        "COVEY_WHY": "no room",
    }


@pytest.mark.parametrize(("level", "number"), [("debug", "7"), ("info", "6"), ("warning", "4"), ("error", "3")])
def test_each_level_has_its_priority(level: str, number: str) -> None:
    assert fields(entry({"event": "x", "level": level}))["PRIORITY"] == number


def test_lines_are_kept_within_a_value_and_values_are_json() -> None:
    said = fields(entry({"event": "failed", "exception": "Traceback\n  x=1\n", "voters": ["gpu1"], "term": 2}))
    assert (said["COVEY_EXCEPTION"], said["COVEY_VOTERS"], said["COVEY_TERM"]) == (
        "Traceback\n  x=1\n",
        '["gpu1"]',
        "2",
    )


def test_an_entry_that_no_datagram_could_carry_keeps_its_beginning() -> None:
    whole = entry({"event": "long", "level": "error", "why": "x" * ENTRY_BYTES_MAX})
    assert len(whole) < ENTRY_BYTES_MAX
    assert fields(whole)["PRIORITY"] == "3" and fields(whole)["MESSAGE"].startswith("long why=xxx")


def test_a_stream_is_the_journals_only_where_systemd_says_so(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        found = os.fstat(file.fileno())
        environ = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert is_journal(environ, file) and prefix("error", environ, file) == "<3>"
        assert not is_journal({"JOURNAL_STREAM": "1:2"}, file), "it was inherited, and the stream is another one"
        assert not is_journal({}, file) and prefix("error", {}, file) == ""
    assert not is_journal(environ, io.StringIO())


def test_what_the_journal_does_not_take_is_written_as_a_line_with_its_priority(tmp_path: Path) -> None:
    lines = io.StringIO()
    JournalLogger(lines, str(tmp_path / "nobody")).error(event="lost", level="error")
    assert lines.getvalue() == '<3>{"event": "lost", "level": "error"}\n'


def test_under_systemd_the_agents_log_is_entries(
    journald: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.journal.SOCKET", str(tmp_path / "socket"))
    with (tmp_path / "stderr").open("w") as stderr:
        found = os.fstat(stderr.fileno())
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        before = structlog.get_config()
        try:
            logs.configure("info")
            log = logs.for_host("gpu1")
            log.debug("not wanted")
            log.error("a plugin failed", plugin="memory", api_token="abc")
            logs.set_level("debug")
            log.debug("wanted now")
        finally:
            structlog.configure(**before)
            logs.set_level("info")
    first, second = fields(journald.recv(1 << 16)), fields(journald.recv(1 << 16))
    assert (first["MESSAGE"], first["PRIORITY"], first["COVEY_HOST"], first["COVEY_PLUGIN"]) == (
        "a plugin failed plugin=memory api_token=(hidden)",
        "3",
        "gpu1",
        "memory",
    )
    assert second["MESSAGE"] == "wanted now", "also by a logger that was made before"
    assert (tmp_path / "stderr").read_text() == ""


def test_the_unit_has_the_same_identifier_for_what_is_said_before_there_is_a_log() -> None:
    assert f"SyslogIdentifier={IDENTIFIER}\n" in UNIT.read_text()

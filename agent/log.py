"""structlog: colours for people on a terminal, entries with fields under journald, JSON lines into a file.

The level may change while the agent runs (`set_level`): every logger is made to hear of it, and what is below it is
dropped first, before anything is made of it.
"""

import logging
import os
import sys

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from agent.journal import JournalLogger, is_journal
from agent.ports.last_room import LastingLog

SECRETS = ("key", "secret", "token", "password")
"""A field whose name contains one of these is never written."""
_least = logging.INFO


def set_level(level: str) -> None:
    """Have lines below this level (debug, info, warning, error) dropped from now on, by every logger there is."""
    global _least
    _least = logging.getLevelNamesMapping()[level.upper()]


def _drop_below(_logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if logging.getLevelNamesMapping().get(method.upper(), logging.ERROR) < _least:
        raise structlog.DropEvent
    return event


def _redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for name in event:
        if any(word in name for word in SECRETS):
            event[name] = "(hidden)"
    return event


def _as_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> tuple[tuple[()], EventDict]:
    return (), event


def configure(level: str = "info") -> None:
    """Configure the log, once per process, before the first line."""
    set_level(level)
    in_journal = is_journal(os.environ, sys.stderr)
    people = sys.stderr.isatty() and not in_journal
    lines = LastingLog(sys.stderr)
    for_lines = structlog.dev.ConsoleRenderer() if people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            _drop_below,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _redact,
            _as_fields if in_journal else for_lines,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=(lambda *_: JournalLogger(lines)) if in_journal else structlog.PrintLoggerFactory(lines),
    )


def for_host(host: str) -> FilteringBoundLogger:
    """A logger whose lines all name the host."""
    logger: FilteringBoundLogger = structlog.get_logger().bind(host=host)
    return logger

"""structlog: colours for people on a terminal, JSON lines under journald or into a file."""

import logging
import os
import sys

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from agent.ports.last_room import LastingLog

SECRETS = ("key", "secret", "token", "password")
"""A field whose name contains one of these is never written."""


def _redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for name in event:
        if any(word in name for word in SECRETS):
            event[name] = "(hidden)"
    return event


def configure(level: str = "info") -> None:
    """Configure the log, once per process, before the first line."""
    people = sys.stderr.isatty() and "JOURNAL_STREAM" not in os.environ
    render = structlog.dev.ConsoleRenderer() if people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _redact,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(LastingLog(sys.stderr)),
    )


def for_host(host: str) -> FilteringBoundLogger:
    """A logger whose lines all name the host."""
    logger: FilteringBoundLogger = structlog.get_logger().bind(host=host)
    return logger

"""A base for loggers that write lines: all methods of `covey.ports.log.Logger`, made of one for all levels."""

from abc import ABC, abstractmethod
from typing import Any


class LineLog(ABC):
    @abstractmethod
    def _line(self, level: str, event: str, fields: dict[str, Any]) -> None:
        """Write one line. `level` is debug, info, warning or error."""

    def debug(self, event: str, **fields: Any) -> None:
        self._line("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._line("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._line("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._line("error", event, fields)

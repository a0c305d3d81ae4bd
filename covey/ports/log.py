"""The log of a host, and a base for what writes it in lines."""

from abc import ABC, abstractmethod
from typing import Any, Protocol


class Logger(Protocol):
    """A structlog logger bound to one host. `event` is a fixed phrase; what varies goes into fields."""

    def debug(self, event: str, **fields: Any) -> Any: ...
    def info(self, event: str, **fields: Any) -> Any: ...
    def warning(self, event: str, **fields: Any) -> Any: ...
    def error(self, event: str, **fields: Any) -> Any: ...


class LineLog(ABC):
    """A base for loggers that write lines: all methods of `Logger`, made of one for all levels."""

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

"""systemd's manager, asked over the system bus (org.freedesktop.systemd1(5)): a start of a unit is five questions, and
each as a command would take longer than all of them here."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from jeepney import DBusAddress, DBusErrorResponse, MatchRule, Message, message_bus, new_method_call
from jeepney.io.blocking import DBusConnection, open_dbus_connection
from jeepney.wrappers import unwrap_msg

from agent.ports.starter.slices import Properties

NAME, PATH = "org.freedesktop.systemd1", "/org/freedesktop/systemd1"
MANAGER, SERVICE = f"{NAME}.Manager", f"{NAME}.Service"
EXISTS, NO_SUCH = f"{NAME}.UnitExists", f"{NAME}.NoSuchUnit"
MANAGER_AT = DBusAddress(PATH, NAME, MANAGER)
ANSWER_S = 30.0
TRANSIENT = "ssa(sv)a(sa(sv))"


class ManagerError(Exception):
    """systemd refused, or cannot be asked. `name`: the error's name on the bus, or empty."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why.strip()[:200] or name)
        self.name = name


class Manager(Protocol):
    """The manager. All of these raise ManagerError."""

    def make(self, unit: str, properties: Properties, aux: Sequence[tuple[str, Properties]] = ()) -> None:
        """Begin a transient unit; `aux`: units that come with it. ManagerError with EXISTS where it is there."""

    def start(self, unit: str, properties: Properties) -> str:
        """Begin a transient unit, and wait until it has begun. Returns how that ended: `done` where it did."""

    def main_pid(self, unit: str) -> int:
        """The pid of a service; 0: it has none."""

    def set(self, unit: str, properties: Properties) -> None:
        """Change properties of a unit until the next boot."""

    def units(self, pattern: str) -> list[str]:
        """Names of the units that systemd knows, inactive ones too."""

    def kill(self, unit: str) -> None:
        """Kill all processes of a unit. Does nothing where there is no such unit."""

    def stop(self, unit: str) -> None:
        """Begin to stop a unit. Does nothing where there is no such unit."""


OpenManager = Callable[[], contextlib.AbstractContextManager[Manager]]


@contextlib.contextmanager
def system_manager() -> Iterator[Manager]:
    """The manager of this host while the context is open. ManagerError where the system bus does not answer."""
    try:
        connection = open_dbus_connection("SYSTEM", auth_timeout=ANSWER_S)
    except (OSError, EOFError, ValueError, RuntimeError, DBusErrorResponse) as error:  # jeepney's, and the socket's
        raise ManagerError("", f"the system bus does not answer: {str(error) or type(error).__name__}") from error
    with connection:
        yield BusManager(connection)


class BusManager:
    """The manager at the other end of a connection to the system bus."""

    def __init__(self, connection: DBusConnection) -> None:
        self._connection = connection

    def make(self, unit: str, properties: Properties, aux: Sequence[tuple[str, Properties]] = ()) -> None:
        self._ask("StartTransientUnit", TRANSIENT, unit, "fail", properties, list(aux))

    def start(self, unit: str, properties: Properties) -> str:
        (systemd,) = self._sent(message_bus.GetNameOwner(NAME))
        ends = MatchRule(type="signal", sender=systemd, interface=MANAGER, member="JobRemoved", path=PATH)
        with self._connection.filter(ends, bufsize=1000) as ended:
            self._sent(message_bus.AddMatch(ends))
            self._ask("Subscribe")
            (job,) = self._ask("StartTransientUnit", TRANSIENT, unit, "fail", properties, [])
            until_s = time.monotonic() + ANSWER_S
            while True:
                try:
                    signal = self._connection.recv_until_filtered(ended, timeout=max(0.0, until_s - time.monotonic()))
                except (OSError, EOFError) as error:  # TimeoutError is one
                    raise ManagerError("", f"systemd did not say within {ANSWER_S:.0f} s that it began") from error
                if signal.body[1] == job:
                    return str(signal.body[3])

    def main_pid(self, unit: str) -> int:
        (path,) = self._ask("GetUnit", "s", unit)
        properties = DBusAddress(path, NAME, "org.freedesktop.DBus.Properties")
        (found,) = self._sent(new_method_call(properties, "Get", "ss", (SERVICE, "MainPID")))
        return int(found[1])

    def set(self, unit: str, properties: Properties) -> None:
        self._ask("SetUnitProperties", "sba(sv)", unit, True, properties)

    def units(self, pattern: str) -> list[str]:
        (found,) = self._ask("ListUnitsByPatterns", "asas", [], [pattern])
        return [name for name, *_ in found]

    def kill(self, unit: str) -> None:
        with _where_it_is():
            self._ask("KillUnit", "ssi", unit, "all", 9)

    def stop(self, unit: str) -> None:
        with _where_it_is():
            self._ask("StopUnit", "ss", unit, "replace")

    def _ask(self, member: str, signature: str = "", *body: object) -> tuple[Any, ...]:
        return self._sent(new_method_call(MANAGER_AT, member, signature or None, body))

    def _sent(self, message: Message) -> tuple[Any, ...]:
        try:
            return tuple(unwrap_msg(self._connection.send_and_get_reply(message, timeout=ANSWER_S)))
        except DBusErrorResponse as error:
            raise ManagerError(error.name, " ".join(map(str, error.data))) from error
        except (OSError, EOFError) as error:  # TimeoutError is one
            raise ManagerError("", f"systemd does not answer: {str(error) or type(error).__name__}") from error


@contextlib.contextmanager
def _where_it_is() -> Iterator[None]:
    try:
        yield
    except ManagerError as refused:
        if refused.name != NO_SUCH:
            raise

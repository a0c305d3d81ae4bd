"""The state that systemd is told (sd_notify(3)): one datagram of `KEY=value` lines to $NOTIFY_SOCKET."""

import socket
from collections.abc import Mapping


class Notifier:
    """Tells systemd the agent's state; it does nothing where there is no systemd."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._path = environ.get("NOTIFY_SOCKET", "")
        period_us = environ.get("WATCHDOG_USEC", "")
        self.watchdog_s = int(period_us) / 1e6 if period_us.isdigit() else None
        """Seconds for which systemd waits for a WATCHDOG=1 before it kills the agent; None: it does not watch."""

    def tell(self, **values: str | int) -> None:
        """Send lines, as in `tell(READY=1, STATUS="4 hosts alive")`. A full or absent socket is ignored."""
        if not self._path:
            return
        address = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        text = "\n".join(f"{key}={value}" for key, value in values.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            try:
                sender.sendto(text.encode(), address)
            except OSError:
                return

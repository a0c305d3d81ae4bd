"""Finding a running agent, and asking it.

An agent is looked for at `--agent`, then $COVEY_AGENT, then in `.rack/rack.json` of this directory or one above it,
then beside this virtual environment, then where an agent of this user or of the system has its socket by default; the
first place that exists counts. A rack
has many agents and each answers everything, so a dead or stopped one is passed over. When none answers, that is said
in under a second.
"""

import contextlib
import grp
import http.client
import json
import os
import pwd
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from cli import tls

OK, FAILED, USAGE, NOT_FOUND, REFUSED, NO_AGENT, TOO_LATE, IMPOSSIBLE, NOT_WHOLE, TRY_AGAIN = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    75,
)
"""Exit codes; `wait` and `submit --wait` return the job's own instead."""

SYSTEM_SOCKET = "/run/covey/agent.sock"
RACK_FILE = ".rack/rack.json"
ANSWER_S = 25.0
"""How long to wait for an answer, seconds: longer than an agent waits for its plugins, so that its words arrive."""
KNOCK_S = (0.2, 2.0)
"""How long to wait for a sign of life from each of several agents: first round, second round (a busy machine)."""
GATHER_S_MAX = 600.0
"""Longest that an agent waits for hosts whose part of a list is missing, seconds (`agent.api.gathering.WAIT_S_MAX`)."""
GATHER_EXTRA_S = 5.0
"""How much longer than for hosts the list itself is waited for, seconds."""
STREAM_TURN_S = 0.5
"""How long a stream may say nothing until its reader gets a turn, seconds."""
HEAD_BYTES_MAX = 1 << 16
"""The longest head of an answer, bytes."""
CONNECT_S = 0.8
"""How long one connection may take: a refusal comes within a second when no agent listens."""


class AgentctlError(Exception):
    """What a person sees instead of a traceback: one line what, one line why, one line what to do next."""

    def __init__(self, code: int, what: str, why: str, next: str) -> None:
        super().__init__(f"{what}: {why}")
        self.code, self.what, self.why, self.next = code, what, why, next


class Answer(NamedTuple):
    data: Any
    host: str
    """Who answered."""
    as_of_wall_s: float
    whole: dict[str, Any]
    """The JSON as it came, for `--json`."""

    @property
    def unanswered(self) -> Sequence[Mapping[str, Any]]:
        """`host`, `why` and `age_s` of each host whose part of a list is missing; None: no row of it is shown."""
        found: Sequence[Mapping[str, Any]] = self.whole.get("unanswered", ())
        return found


class Agent:
    """The first agent of `addresses` (`unix:PATH`, `https://HOST:PORT` or `HOST:PORT`) that answers. Errors are
    AgentctlError."""

    def __init__(self, addresses: Sequence[str], found_by: str = "--agent", timeout_s: float = ANSWER_S) -> None:
        self.addresses = list(addresses)
        self.found_by = found_by
        self.timeout_s = timeout_s
        self.wait_s: float | None = None
        """How long a list waits for hosts that do not answer, seconds; None: as long as the agent waits by itself."""
        self.address: str | None = None if len(self.addresses) > 1 else next(iter(self.addresses), None)

    def get(self, *path: str, **query: object) -> Answer:
        """A read: repeated at the next agent when this one dies half way."""
        return self._read(_target(path, query), self.timeout_s)

    def gather(self, *path: str) -> Answer:
        """A list to which every host adds. `Answer.unanswered` are the hosts whose part is missing or old."""
        if self.wait_s is None:
            return self._read(_target(path, {}), self.timeout_s)
        wait_s = min(self.wait_s, GATHER_S_MAX)
        return self._read(_target(path, {"timeout_s": wait_s}), wait_s + GATHER_EXTRA_S)

    def _read(self, target: str, timeout_s: float) -> Answer:
        try:
            return self._ask("GET", target, None, timeout_s)
        except Gone:
            if len(self.addresses) < 2:
                raise
        self.address = None
        return self._ask("GET", target, None, timeout_s)

    def of_host(self, host: str) -> "Agent | None":
        """The agent of that host, when it is one of those known here and answers."""
        for address in self.addresses:
            one = Agent([address], self.found_by, self.timeout_s)
            with contextlib.suppress(AgentctlError):
                if one.get("leader").host == host:
                    return one
        return None

    def post(self, *path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """A change: over a unix socket or TLS, since over TCP without a certificate agents answer reads alone."""
        return self._change("POST", _target(path, {}), {} if body is None else body)

    def delete(self, *path: str) -> Answer:
        """A change that removes something, as `post`."""
        return self._change("DELETE", _target(path, {}), None)

    def _change(self, method: str, target: str, body: Mapping[str, Any] | None) -> Answer:
        sockets = [address for address in self.addresses if _is_told_who(address)]
        if self.addresses and not sockets:
            where = f"{_tried(self.addresses)} (from {self.found_by})"
            why = f"an agent cannot tell who sends a request over http (as at {where}), so it only answers reads there"
            step = (
                f"on a host: agentctl login, then --agent https://{self.addresses[0]}; "
                f"or there leave {self.found_by} out, or --agent unix:{SYSTEM_SOCKET}"
            )
            raise AgentctlError(REFUSED, "nothing can be changed over http", why, step)
        if self.address is not None and not _is_told_who(self.address):
            self.address = None
        if self.address is None and sockets:
            self.address = sockets[0] if len(sockets) == 1 else self._awake(sockets)
        return self._ask(method, target, body, self.timeout_s)

    def stream(self, path: str, **query: object) -> Iterator[tuple[str, Any, str] | None]:
        """The server-sent events of a stream: name, data, id; None after `STREAM_TURN_S` without one. It ends when the
        agent ends it. AgentctlError where it is not opened, or breaks."""
        address, connection = self._connected()
        with contextlib.closing(connection):
            try:
                yield from _events(connection.sock, _target((path,), query), address)
            except OSError as error:
                raise _not_trusted(address, error) or Gone("GET", address, error) from None

    def text(self, target: str) -> str:
        """A read whose answer is no JSON: `/metrics`."""
        address = self.address = self.address or self._awake(self.addresses)
        connection = _connection(address, self.timeout_s)
        try:
            with contextlib.closing(connection):
                connection.request("GET", target)
                return connection.getresponse().read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise _not_trusted(address, error) or Gone("GET", address, error) from None

    def _ask(self, method: str, target: str, body: Mapping[str, Any] | None, timeout_s: float) -> Answer:
        address, connection = self._connected()
        try:
            status, found = _exchange(connection, method, target, body, timeout_s)
        except TimeoutError:
            raise AgentctlError(
                TOO_LATE, f"{address} did not answer", f"no answer within {timeout_s:g} s", "agentctl status"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise _not_trusted(address, error) or Gone(method, address, error) from None
        except ValueError as error:  # all of an answer came, and it was not ours
            raise _no_agent(address, str(error)) from None
        if status >= 400 and "code" in found:
            raise AgentctlError(*(found.get(key, "") for key in ("code", "what", "why", "next")))
        if "data" not in found:
            raise _no_agent(address, f"HTTP status {status} without data")
        return Answer(found["data"], found.get("host", ""), found.get("as_of_wall_s", 0.0), found)

    def _connected(self) -> tuple[str, http.client.HTTPConnection]:
        """The agent that is asked, and a connection to it. AgentctlError where there is none."""
        address = self.address = self.address or self._awake(self.addresses)
        connection = _connection(address, CONNECT_S)
        try:
            connection.connect()
        except ssl.SSLError as error:
            raise AgentctlError(FAILED, *tls.not_believed(address, error)) from None
        except OSError as error:
            raise self._nobody({address: error}) from None
        return address, connection

    def _awake(self, addresses: Sequence[str]) -> str:
        """The first agent of these that answers at all: one that is stopped accepts connections and is silent."""
        errors: dict[str, Exception] = {}
        for knock_s in KNOCK_S:
            for address in addresses:
                try:
                    _exchange(_connection(address, knock_s), "GET", "/livez", None, knock_s)
                except (OSError, http.client.HTTPException, ValueError) as error:
                    errors[address] = error
                else:
                    return address
            if not any(isinstance(error, TimeoutError) for error in errors.values()):
                break
        raise self._nobody(errors)

    def _nobody(self, errors: Mapping[str, Exception]) -> AgentctlError:
        if not self.addresses:
            return AgentctlError(
                NO_AGENT,
                "no agent found",
                f"there is no {RACK_FILE} here or above, and no {SYSTEM_SOCKET}",
                "make run    (starts a rack on this machine), or name an agent: agentctl --agent unix:PATH hosts",
            )
        for address, error in errors.items():
            if (no := _not_trusted(address, error)) is not None:
                return no
        last = list(errors.values())[-1]
        reason = getattr(last, "strerror", None) or str(last) or "no answer"
        why = f"{_tried(list(errors))} (from {self.found_by}): {reason}"
        hint = "covey-rack start    (starts what is missing), or: covey-rack status"
        if isinstance(last, PermissionError):
            hint = _who_may(list(errors)[-1])
        elif "rack" not in self.found_by:
            hint = "start an agent: agentd --config FILE, or name another one: agentctl --agent unix:PATH hosts"
        return AgentctlError(NO_AGENT, "no agent answers", why, hint)


def _who_may(address: str) -> str:
    """Whom an agent's socket lets in, as far as that can be seen, and what to do."""
    user, group, me = "covey", "", "USER"
    with contextlib.suppress(OSError, KeyError):
        found = os.stat(address.removeprefix("unix:"))
        user = pwd.getpwuid(found.st_uid).pw_name
        group = grp.getgrgid(found.st_gid).gr_name if found.st_mode & 0o060 == 0o060 else ""
    with contextlib.suppress(KeyError):
        me = pwd.getpwuid(os.geteuid()).pw_name
    if group:
        return f"it is for group {group}; as root: usermod -aG {group} {me}, then log in again"
    return f"only its own user and root may use it: sudo -u {user} agentctl ..."


class Gone(AgentctlError):
    """The agent went away between question and answer."""

    def __init__(self, method: str, address: str, error: Exception) -> None:
        unknown = "" if method == "GET" else "; the change may or may not have been made"
        why = f"{type(error).__name__}: {error}{unknown}"
        super().__init__(
            TRY_AGAIN,
            f"{address} closed the connection while answering",
            why,
            "check with agentctl jobs, then try again",
        )


def _not_trusted(address: str, error: Exception) -> AgentctlError | None:
    """Why this agent, or the user's certificate, was not believed in TLS; None: that was not why."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AgentctlError(FAILED, *tls.not_believed(address, error))
    words = tls.refused(address, error)
    return None if words is None else AgentctlError(REFUSED, *words)


def _no_agent(address: str, why: str) -> AgentctlError:
    return AgentctlError(FAILED, f"{address} is not a Covey agent", why, "check --agent and COVEY_AGENT")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(self._path)
        except OSError:
            self.sock.close()
            raise


def is_socket(address: str) -> bool:
    """Whether the address is a unix socket's."""
    return address.startswith("unix:")


def _is_told_who(address: str) -> bool:
    """Whether an agent is told there who asks."""
    return is_socket(address) or address.startswith(tls.SCHEME)


def _connection(address: str, timeout_s: float) -> http.client.HTTPConnection:
    if is_socket(address):
        return _UnixConnection(address.removeprefix("unix:"), timeout_s)
    if address.startswith(tls.SCHEME):
        try:
            context = tls.context(address)
        except tls.NotLoggedIn as error:
            raise AgentctlError(REFUSED, *error.words) from None
        return http.client.HTTPSConnection(address.removeprefix(tls.SCHEME), timeout=timeout_s, context=context)
    return http.client.HTTPConnection(address, timeout=timeout_s)


def _exchange(
    connection: http.client.HTTPConnection, method: str, target: str, body: Mapping[str, Any] | None, timeout_s: float
) -> tuple[int, dict[str, Any]]:
    """HTTP status and JSON object. OSError, HTTPException or ValueError when the other side is no agent."""
    with contextlib.closing(connection):
        if connection.sock is None:
            connection.connect()
        connection.sock.settimeout(timeout_s)
        sent = None if body is None else json.dumps(body).encode()
        connection.request(method, target, sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        try:
            found = json.loads(text)
        except ValueError:
            raise ValueError(f"HTTP status {response.status} with an answer that is not JSON") from None
        if not isinstance(found, dict):
            raise ValueError(f"HTTP status {response.status} with JSON that is not an object")
        return response.status, found


def _events(sock: socket.socket, target: str, address: str) -> Iterator[tuple[str, Any, str] | None]:
    """What comes over a connection as answer to this read, by HTTP/1.0: its end is the end of the answer."""
    sock.sendall(f"GET {target} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
    sock.settimeout(STREAM_TURN_S)
    parts, head, fields = b"", b"", dict[str, str]()
    while True:
        try:
            part = sock.recv(1 << 18)
        except TimeoutError:
            yield None
            continue
        parts += part
        if not head:
            head, mark, rest = parts.partition(b"\r\n\r\n")
            if not mark:
                head = b""
                if not part or len(parts) > HEAD_BYTES_MAX:
                    raise _no_agent(address, "an answer that is not HTTP")
                continue
            parts = rest
        if b" 200 " not in head.partition(b"\r\n")[0]:
            if not part:
                raise _refused(address, parts)
            continue
        *lines, parts = parts.split(b"\n")
        for line in lines:
            name, _, value = line.decode(errors="replace").partition(": ")
            if name and value:
                fields[name] = value
            elif not name and "data" in fields:
                yield fields.get("event", ""), json.loads(fields["data"]), fields.get("id", "")
                fields = {}
        if not part:
            return


def _refused(address: str, body: bytes) -> AgentctlError:
    """What an agent says against a read."""
    try:
        said = json.loads(body)
        return AgentctlError(*(said[key] for key in ("code", "what", "why", "next")))
    except (ValueError, KeyError, TypeError):
        return _no_agent(address, "it refused a stream without a reason")


def _target(path: Sequence[str], query: Mapping[str, object]) -> str:
    given = "&".join(f"{name}={quote(str(value))}" for name, value in query.items() if value is not None)
    safe = "/" if path[0] == "why" else ""
    return "/v1/" + "/".join(quote(part, safe=safe) for part in path) + ("?" + given if given else "")


def _tried(addresses: Sequence[str]) -> str:
    return addresses[0] if len(addresses) == 1 else f"{addresses[0]} and {len(addresses) - 1} more"


# ---- where agents may be ---------------------------------------------------------------------------------------------


def find(given: str | None, environ: Mapping[str, str], timeout_s: float = ANSWER_S) -> Agent:
    """The agent to ask: what was named, or what is found around here."""
    for text, source in ((given, "--agent"), (environ.get("COVEY_AGENT"), "COVEY_AGENT")):
        if text:
            return Agent([checked_address(part) for part in text.split(",")], source, timeout_s)
    for place in _rack_files():
        addresses = rack_addresses(place)
        if addresses:
            return Agent(addresses, str(place), timeout_s)
    for path in (*_own_sockets(environ), SYSTEM_SOCKET):
        if os.path.exists(path):
            return Agent([f"unix:{path}"], path, timeout_s)
    return Agent([], SYSTEM_SOCKET, timeout_s)


def _own_sockets(environ: Mapping[str, str]) -> list[str]:
    """Where an agent without `run_dir` puts its socket when it is not root's. All users write to /tmp, so a directory
    there counts only when it is ours."""
    base = environ.get("XDG_RUNTIME_DIR")
    folder = os.path.join(base, "covey") if base else f"/tmp/covey-{os.geteuid()}"
    try:
        ours = os.lstat(folder).st_uid == os.geteuid()
    except OSError:
        ours = False
    return [os.path.join(folder, "agent.sock")] if ours else []


def checked_address(text: str) -> str:
    """`unix:PATH`, a bare path, `https://HOST:PORT`, `HOST:PORT` or `http://HOST:PORT`; over the last two agents answer
    reads alone. AgentctlError for anything else."""
    text = text.strip().removeprefix("http://").rstrip("/")
    if text.startswith("/"):
        return f"unix:{text}"
    if text.startswith("unix:") and len(text) > 5:
        return text
    host, _, port = text.removeprefix(tls.SCHEME).rpartition(":")
    if host and port.isascii() and port.isdigit() and int(port) < 65536:
        return text
    raise AgentctlError(
        USAGE,
        f"{text!r} is not an agent's address",
        "expected unix:PATH, https://HOST:PORT or HOST:PORT",
        "agentctl --agent https://gpu1:8470",
    )


def _rack_files() -> Iterator[Path]:
    """`.rack/rack.json` here, above, and beside the virtual environment; nearest first."""
    with contextlib.suppress(OSError):
        here = Path.cwd()
        for folder in (here, *here.parents):
            yield folder / RACK_FILE
    yield Path(sys.prefix).parent / RACK_FILE


def rack_addresses(place: Path) -> list[str]:
    """The sockets in a rack file. Empty when it is absent, malformed or another user's: that user would get our
    environment on submit."""
    try:
        with place.open("rb") as file:
            if os.fstat(file.fileno()).st_uid not in (os.geteuid(), 0):
                return []
            found = json.load(file)
        return [f"unix:{host['socket']}" for host in found["hosts"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def wait_until_over(agent: Agent, job: str, deadline_s: float | None, poll_s: float = 0.2) -> Any:
    """The job's JSON once it is over. AgentctlError 6 when `deadline_s` (monotonic) passes first; an
    agent that restarts meanwhile is waited for."""
    patience_until_s = time.monotonic() + 30
    while True:
        try:
            view = agent.get("jobs", job).data
        except AgentctlError as error:
            if error.code not in (NO_AGENT, TRY_AGAIN) or time.monotonic() > patience_until_s:
                raise
            agent.address = None if len(agent.addresses) > 1 else agent.address
        else:
            patience_until_s = time.monotonic() + 30
            if view["over"]:
                return view
        if deadline_s is not None and time.monotonic() > deadline_s:
            why = "the deadline passed" if "view" not in locals() else f"it is {view['state']}: {view['reason']}"
            raise AgentctlError(TOO_LATE, f"{job} has not ended yet", why, f"agentctl why {job}")
        time.sleep(poll_s)
